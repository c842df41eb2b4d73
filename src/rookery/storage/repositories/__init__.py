"""Queries and transactions by subject: jobs and their groups, versions, sessions of clients, tenants."""
