"""The data folder: one service at a time, and secrets that only its user can read.

* While a :class:`DataFolder` is open, no other process opens the same one. The lock is the kernel's: it ends with the
  process, however that ends, and child processes do not inherit it.
* The admin key and the worker token are made once, whole or not at all, readable by the user only (mode 0600).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from pathlib import Path
from types import TracebackType
from typing import Self

from rookery.errors import RookeryError, UserError, shortage, shortages, unusable
from rookery.folders import reason_of, usable_folder, without_home, write_durably

LOCK_FILE = "lock"
ADMIN_KEY_FILE = "admin.key"
WORKER_TOKEN_FILE = "worker.token"
DATABASE_FILE = "rookery.db"
"""Their names in the data folder."""

KEY_PREFIX = "tml-"
"""One key serves every API; Tinker clients accept no key without this prefix."""

KEY_BYTES = 32
"""Of randomness: far beyond guessing, so that a plain hash protects a stored key as well as a slow one would."""


def new_key() -> str:
    """A new random key: the prefix and 43 URL-safe characters."""
    return KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)


def hash_key(key: str) -> str:
    """The stored form of a key: the SHA-256 of its text, in hex."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def sqlite_url(root: Path) -> str:
    """The SQLite database in a data folder."""
    from sqlalchemy import URL  # imported here: the command line reads keys without it

    return URL.create("sqlite", database=str(root / DATABASE_FILE)).render_as_string()


def read_secret(root: Path, name: str) -> str | None:
    """The admin key or another secret, read by a local command without the lock; None where there is none.

    Raises :class:`UserError` if it belongs to another user or cannot be read."""
    if without_home(root):
        return None
    try:
        return (root / name).read_text(encoding="ascii").strip() or None
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:
        raise UserError(f"{root / name} belongs to another user; set ROOKERY_KEY to a key of your own") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else "") or "no text of ASCII"
        raise UserError(f"{root / name} cannot be read ({reason}); mount its disk, or set ROOKERY_KEY") from None


class DataFolder:
    """The service's folder, locked. Its parts: ``artifacts``, ``jobs`` (their metrics), ``logs``, ``database_url``."""

    def __init__(self, root: Path) -> None:
        """Makes the folder (mode 0700) where it is missing and locks it.

        Raises :class:`UserError` if it is not a folder that can be written, or another service runs on it;
        :class:`StorageFull` and :class:`Unavailable` for one that may be written later."""
        self.root = root
        if without_home(root):
            usable_folder(root, "ROOKERY_DATA")
        self.artifacts, self.jobs, self.logs = (root / name for name in ("artifacts", "jobs", "logs"))
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(root / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise self._unwritable(error) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._lock)
            raise UserError(
                f"data folder {root} is in use by another service (pid {holder});"
                " stop it, or set ROOKERY_DATA to another folder"
            ) from None
        except OSError as error:
            os.close(self._lock)
            raise UserError(
                f"data folder {root} cannot be locked ({error.strerror}): two services could use it at once; set"
                " ROOKERY_DATA to a folder on a disk of this machine"
            ) from None
        try:
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
            for part in (self.artifacts, self.jobs, self.logs):
                part.mkdir(mode=0o700, exist_ok=True)
            usable_folder(root, "ROOKERY_DATA", ("artifacts", "jobs", "logs"))
        except OSError as error:
            os.close(self._lock)
            raise self._unwritable(error) from None
        except RookeryError:
            os.close(self._lock)
            raise

    def _unwritable(self, error: OSError) -> RookeryError:
        if (full := shortage(error, f"the disk of the data folder {self.root}")) is not None:
            return full
        return unusable(error)(
            f"data folder {self.root} cannot be written ({reason_of(error)}); set ROOKERY_DATA to one that can"
        )

    @property
    def locks(self) -> list[int]:
        """Descriptors of files that are locked while the folder is open."""
        return [self._lock]

    @property
    def database_url(self) -> str:
        """The SQLite database that lives here."""
        return sqlite_url(self.root)

    def admin_key(self) -> str:
        """The first tenant's API key, made at the first call of all."""
        return _secret(self.root / ADMIN_KEY_FILE)

    def worker_token(self) -> str:
        """The token of workers and of the service's built-in environment host."""
        return _secret(self.root / WORKER_TOKEN_FILE)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _secret(path: Path) -> str:
    known = read_secret(path.parent, path.name)
    if known is not None:
        path.chmod(0o600)
        return known
    key = new_key()
    with shortages(f"the disk of {path.parent}"):
        write_durably(path, key + "\n")
    return key
