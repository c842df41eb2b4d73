"""The files and folders that a user names: their names with and without a home, and the check that a folder can be
used."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rookery.errors import NO_ROOM, RUN_OUT, StorageFull, UserError, short, unusable

CACHE_FOLDERS = ("models", "prepared", "adapters", "kernels")
"""Parts of the cache. Where another user has made one, it has to be writable like the cache itself."""

LOCKED_FOLDERS = ("", "models", "prepared", "kernels")
"""Of them those in which processes wait for each other by locks, and the cache itself, where they are made."""

PROBE_BYTES = 1 << 20
"""Bytes that are written to see whether there is room: a new database with its log takes about as many, and so does an
adapter of a small model. A full disk still takes empty files. Work that finds no room after that is tried again
later."""


def temporary_folder(prefix: str = "rookery-", at: str | None = None) -> tempfile.TemporaryDirectory[str]:
    """A new folder for as long as it is used, ``at`` another place than the system's. Raises :class:`UserError` where
    none can be made."""
    with temporary_errors(at):
        return tempfile.TemporaryDirectory(prefix=prefix, dir=at)


def temporary_file() -> IO[bytes]:
    """A file without a name for as long as it is open. Raises :class:`UserError` where none can be made."""
    with temporary_errors():
        return tempfile.TemporaryFile()


@contextmanager
def temporary_errors(at: str | None = None) -> Iterator[None]:
    """The system's folder for temporary files may be missing, read-only as in a container without a volume there, or
    full: the library tries a few and then knows none. A lack of descriptors or memory is no fault of a folder."""
    try:
        yield
    except OSError as error:
        if error.errno in RUN_OUT:
            raise
        if at is not None:
            kind = StorageFull if error.errno in NO_ROOM else UserError
            raise kind(f"no temporary folder can be made in {at} ({error.strerror})") from None
        if error.errno in NO_ROOM:
            raise StorageFull(
                f"the disk of {tempfile.gettempdir()} is full; free some space, or set TMPDIR to another folder"
            ) from None
        tried = os.environ.get("TMPDIR") or "/tmp"
        raise UserError(
            f"TMPDIR: no temporary file can be made, as in {tried}; set TMPDIR to a folder that is writable for this"
            " user and has room (in a container: mount a volume at /tmp)"
        ) from None


def probe_writes(folder: Path) -> None:
    """Write :data:`PROBE_BYTES` in ``folder`` to its disk, and delete them. Raises ``OSError``."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(PROBE_BYTES))
        file.flush()
        os.fsync(file.fileno())


def reason_of(error: OSError) -> str:
    """Why a folder cannot be used. Of a link whose target is missing, such as one to a disk that is not mounted, and of
    a file in the place of the folder, the system says only that it exists."""
    if error.errno == errno.EEXIST and isinstance(error.filename, str | os.PathLike):
        path = Path(error.filename)
        return f"it is a link to {os.readlink(path)}, which is missing" if path.is_symlink() else "it is a file"
    return error.strerror or str(error)


def write_durably(path: Path, content: str) -> None:
    """Replace a file of ASCII as a whole, which only its owner reads. Its bytes are on the disk on return; its name is
    once the folder is synchronized."""
    handle, part = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600 from the start
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        os.unlink(part)
        raise


def no_room(named: object) -> StorageFull:
    """The error for a file or folder of a user, or the option that names it, whose disk is full."""
    return StorageFull(f"{named} cannot be written: its disk is full; free some space, or give another")


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """A file of a user that takes the place of ``path`` once it is whole; after an error ``path`` is as it was. A pipe
    or a device is written to as it is. Raises :class:`StorageFull`, which names it."""
    plain = path.is_file() or not path.exists()
    target = path.resolve()
    part = target.with_name(f".{target.name}.{os.getpid()}.part") if plain else path
    try:
        with part.open("wb") as file:
            yield file
        if plain:
            part.replace(target)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise no_room(path) from None
        if error.filename == str(part):
            error.filename = str(path)
        raise
    finally:
        if plain:
            part.unlink(missing_ok=True)


def named_path(given: str | Path) -> Path:
    """The file or folder that a user names, with its ``~`` replaced. Raises :class:`UserError` for a text that is no
    path."""
    try:
        if "\0" in str(given):
            raise RuntimeError("it has a NUL in it")
        return Path(given).expanduser()
    except RuntimeError as error:
        raise UserError(f"{short(repr(str(given)))} is no path here ({error}); give another") from None


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


def usable_cache(folder: Path) -> Path:
    """The cache, as :func:`usable_folder`."""
    return usable_folder(folder, "ROOKERY_CACHE", CACHE_FOLDERS, LOCKED_FOLDERS)


def usable_folder(folder: Path, setting: str, parts: tuple[str, ...] = (), locked: tuple[str, ...] = ()) -> Path:
    """``folder``, made where it is missing, once a file could be written in it and in those of its ``parts`` that
    exist, and locked in those that are ``locked``; the empty part is the folder itself. Raises :class:`UserError`,
    which names the ``setting``, :class:`~rookery.errors.Unavailable` for a disk that may come back, or
    :class:`StorageFull`."""
    if without_home(folder):
        raise UserError(f"setting {setting}: {folder} needs a home, and HOME is not set; set {setting} to a folder")
    at, done = folder, "written"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for part in ("", *parts):
            if not (folder / part).exists():
                continue
            at, done = folder / part, "written"
            with tempfile.TemporaryFile(dir=at) as file:
                file.write(bytes(PROBE_BYTES))
                if part in locked:
                    done = "locked"
                    fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise StorageFull(
                f"the disk of {at} is full; free some space, or set {setting} to another folder"
            ) from None
        reason = reason_of(error)
        raise (UserError if done == "locked" else unusable(error))(
            f"setting {setting}: folder {at} cannot be {done} ({reason}); "
            + (
                f"its disk has no locks; set {setting} to one that has"
                if done == "locked"
                else f"make it writable for this user, or set {setting} to one that is"
            )
        ) from None
    return folder
