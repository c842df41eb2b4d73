"""API keys and tokens: drawn here, shown once, stored as hashes. Light: the command line reads keys too."""

from __future__ import annotations

import hashlib
import secrets
from pathlib import Path

from rookery.errors import UserError

ADMIN_KEY_FILE = "admin.key"
WORKER_TOKEN_FILE = "worker.token"
"""Where the data folder keeps them."""

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


def read_secret(root: Path, name: str) -> str | None:
    """A local command's way to the admin key (or another secret): without the lock; None where there is none.

    Raises :class:`UserError` if it belongs to another user."""
    try:
        return (root / name).read_text(encoding="ascii").strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:
        raise UserError(f"{root / name} belongs to another user; set ROOKERY_KEY to a key of your own") from None
