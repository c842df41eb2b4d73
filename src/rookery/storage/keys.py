"""API keys and tokens: drawn here, shown once, stored as hashes."""

from __future__ import annotations

import hashlib
import secrets

KEY_PREFIX = "tml-"
"""One key serves all faces, and Tinker clients take none without it."""

KEY_BYTES = 32
"""Of randomness: far beyond guessing, so that a plain hash protects a stored key as well as a slow one would."""


def new_key() -> str:
    """A key that nobody has: the prefix and 43 URL-safe characters."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_key(key: str) -> str:
    """What is stored of a key: the SHA-256 of its text, in hex."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
