"""What policies act in: the base class, verifiers, built-in environments and the process that hosts them."""
