"""Environments of other libraries, which run in separate processes and virtual environments."""
