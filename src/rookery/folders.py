"""The folders that a command works in: their names without a home, and the check that they can be used."""

from __future__ import annotations

import tempfile
from pathlib import Path

from rookery.errors import NO_ROOM, StorageFull, UserError

CACHE_FOLDERS = ("models", "prepared", "adapters", "kernels")
"""Parts of the cache. Where another user has made one, it has to be writable like the cache itself."""


PROBE_BYTES = 1 << 20
"""Bytes that are written to see whether there is room: a new database with its log takes about as many. A full disk
still takes empty files."""


def expanded(folder: Path) -> Path:
    """``folder`` with its ``~`` replaced, absolute. It stays as it is where no home is known, so that only commands
    fail that use it: :func:`usable_folder`."""
    try:
        return folder.expanduser().absolute()
    except RuntimeError:
        return folder


def without_home(folder: Path) -> bool:
    """Whether the folder lies in a home that is not known."""
    return str(folder).startswith("~")


def usable_folder(folder: Path, setting: str, parts: tuple[str, ...] = ()) -> Path:
    """``folder``, made where it is missing, once a file could be written in it and in those of its ``parts`` that
    exist. Raises :class:`UserError`, which names the ``setting``, or :class:`StorageFull`."""
    if without_home(folder):
        raise UserError(f"setting {setting}: {folder} needs a home, and HOME is not set; set {setting} to a folder")
    at = folder
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for at in (folder, *(folder / part for part in parts if (folder / part).exists())):
            with tempfile.TemporaryFile(dir=at) as file:
                file.write(bytes(PROBE_BYTES))
    except OSError as error:
        if error.errno in NO_ROOM:
            raise StorageFull(
                f"the disk of {at} is full; free some space, or set {setting} to another folder"
            ) from None
        reason = error.strerror or str(error)
        raise UserError(
            f"setting {setting}: folder {at} cannot be written ({reason}); make it writable for this user, or set"
            f" {setting} to one that is"
        ) from None
    return folder
