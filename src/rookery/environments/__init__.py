"""Environments: the base class, verifiers, built-in environments and the process that hosts them."""
