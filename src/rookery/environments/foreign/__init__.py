"""Environments of other libraries, which run in processes and virtual environments of their own."""
