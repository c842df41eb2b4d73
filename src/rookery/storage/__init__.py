"""Durable state: the database, the artifacts, the locked data folder."""
