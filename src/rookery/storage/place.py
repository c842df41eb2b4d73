"""Whose a place of artifacts is, and the meaning of a failure there: the one module that decides both.

A place (a folder, or a prefix of an object store) carries its owner's mark: the file ``owner`` with the identity of the
database that names its artifacts. The mark is read at the start of a service, where :func:`admit` decides, and again
before a failure is understood. One service at a time uses it: the file ``holder`` names that one, which renews it
(:class:`Lease`), since a copy of the database has the same identity. :func:`understood` gives a failure its meaning:

===========================================  =============================  =====================================
found                                        meaning                        raised
===========================================  =============================  =====================================
no mark, or that of another database         the place is away              :class:`~rookery.errors.ArtifactsAway`
another service in the file ``holder``       the same                       the same
denied, an I/O error, no answer              it cannot be used now          the same, if the mark cannot be read
                                                                            either; else ``UnreadableArtifact``
the mark, no such artifact                   the artifact is absent         :class:`~rookery.errors.NotFound`
the mark, bytes of the artifact are absent   its copy is not complete       :class:`~rookery.errors.IncompleteArtifact`
the mark, other bytes than the hash says     the artifact is corrupt        :class:`~rookery.errors.CorruptArtifact`
===========================================  =============================  =====================================

Only the last one lets a job go back to an earlier version. Nothing is deleted while the place is away.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from rookery.errors import (
    ArtifactsAway,
    CorruptArtifact,
    NotFound,
    RookeryError,
    UnreadableArtifact,
    UserError,
    count_of,
    shortage,
)

OWNER = "owner"
"""The name of the mark."""

HOLDER = "holder"
"""The name of the file that names the service which uses the place."""

HOLD_SECONDS = 15.0
"""A holder that has not renewed for so long has ended: three renewals. It is watched for so long, by the watcher's
clock, so that clocks of machines need not agree."""

WATCH_SECONDS = 0.5
"""Interval at which one that wants the place looks for a renewal."""

SHOWN_CHARACTERS = 400

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

DISK = "the disk of the artifacts"


@dataclass(frozen=True)
class Owner:
    """A database, as the owner of a place."""

    shown: str
    """Its URL without a password."""
    identity: str | None = None
    """Its random name, which its backups keep; None for a database without tables."""
    where: str = ""
    """The place that it used last; empty if it used none yet."""
    named: frozenset[str] | None = None
    """The artifacts that it names; None if they cannot be read, in the tables of an earlier version of Rookery."""


@dataclass(frozen=True, kw_only=True)
class StoreRules:
    """Waits for an object store, in seconds. Tests pass others."""

    retries: int = 5
    """Times that a failed request is repeated, within ``retry``."""
    retry: float = 20.0
    small: float = 10.0
    """Longest request about a mark, a manifest or a list."""
    upload: float = 300.0
    """Longest request for one part of a file, as on a slow line."""
    silent: float = 30.0
    """Longest silence while a file is read. Within, it is read at a pace (:class:`~rookery.pace.TransferPace`)."""
    file: float = 86400.0
    """The longest time that a file may take in all."""


STORE_RULES = StoreRules()
"""The values that a service uses."""


class PlaceInUse(UserError):
    """Another service uses the place."""


class Incarnation(msgspec.Struct, frozen=True):
    """One run of a service, from its start to its end."""

    id: str
    """Random."""
    shown: str
    """Its address and data folder."""
    locks: tuple[str, ...] = ()
    """The files that the kernel locks for it (:func:`lock_key`), such as that of its data folder."""
    renewals: int = 0
    """How often it has renewed its lease."""


class Lease:
    """The use of a place by one service at a time.

    A holder that is another service is taken to be alive where the file changes while it is watched. It has ended
    where the file is empty, where it did not change for :data:`HOLD_SECONDS`, where this service has a lock that the
    holder had, and where the database's claim was taken over from it. A service that is not the holder any more, such
    as one that stood still for a while, writes and deletes nothing."""

    def __init__(self, service: Incarnation, ended: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """``ended``: the id of a service that is known to have ended."""
        self.service = service
        self.released = False
        """The service ends, and renews no more."""
        self.answered = False
        """The place answered the last attempt to renew."""
        self._ended = ended
        self._clock = clock
        self._watched, self._since = b"", 0.0
        """The file's content when it was another's, and the time at which it was first found."""

    def takes(self, found: bytes, where: str) -> bool:
        """Whether this service is now the holder of the place ``where``, whose file ``holder`` has the content
        ``found``; False while another one may be alive. Raises :class:`PlaceInUse` if it is, which names both."""
        if self.released:
            return False
        holder = _incarnation(found)
        if not _content(found) or (holder is not None and self._is_over(holder)):
            self._watched = b""
            return True
        if found == self._watched:
            return self._clock() - self._since >= HOLD_SECONDS
        changed, self._watched, self._since = bool(self._watched), found, self._clock()
        if changed:
            shown = "unknown" if holder is None else holder.shown
            raise PlaceInUse(
                f"the artifacts at {where} are in use by the service {shown}, not this one, {self.service.shown}, whose"
                " database is a copy of that one's; stop one of them, or give this one an empty place with"
                " ROOKERY_ARTIFACTS_URL and the artifacts of a backup (rookery restore)"
            )
        return False

    def renewed(self) -> bytes:
        """The next content of the file."""
        self.service = msgspec.structs.replace(self.service, renewals=self.service.renewals + 1)
        return msgspec.json.encode(self.service)

    def other(self, found: bytes) -> Incarnation | None:
        """The service that ``found`` names, if it is not this one."""
        holder = _incarnation(found)
        return None if holder is None or holder.id == self.service.id else holder

    def _is_over(self, holder: Incarnation) -> bool:
        return holder.id in (self.service.id, self._ended) or not {*holder.locks}.isdisjoint(self.service.locks)


def _content(found: bytes) -> bytes:
    """The content without the filling, and without the zeros that a power cut leaves."""
    return found.strip(b" \n\0")


def _incarnation(found: bytes) -> Incarnation | None:
    try:
        return msgspec.json.decode(_content(found), type=Incarnation)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def lock_key(descriptor: int) -> str:
    """Names a locked file of this machine until the machine starts again. Two processes that had the lock on a file of
    the same key had it one after the other."""
    try:
        boot = BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = socket.gethostname()
    found = os.fstat(descriptor)
    return f"{boot}:{found.st_dev}:{found.st_ino}"


def incarnation(id: str, name: str, data: Path, locks: Collection[int]) -> Incarnation:
    """A run that begins now. ``name``: its address, or the command that it runs; ``locks``: descriptors of locked
    files."""
    shown = f"{name} with the data folder {folder_name(data)}"[:SHOWN_CHARACTERS]
    return Incarnation(id, shown, tuple(map(lock_key, locks)))


def admit(owner: Owner, place: str, mark: str | None, found: Callable[[], Collection[str]]) -> bool:
    """Whether ``place``, which has this ``mark`` and these artifacts, is still to be marked for ``owner``; False if it
    is marked already. Raises :class:`UserError`, which names both, for any other place."""
    last = f"; it used {owner.where} last" if owner.where and owner.where != place else ""
    if mark is not None:
        if mark == owner.identity:
            return False
        raise UserError(
            f"the artifacts at {place} belong to another database than {owner.shown}{last};"
            " give the data folder and the ROOKERY_ARTIFACTS_URL that belong to the database, or another database"
        )
    if owner.named is None:
        return True
    there = found()
    if owner.named.intersection(there):
        return True  # written by a version of Rookery without marks, or copied without the mark
    if owner.named:
        raise UserError(
            f"{place} has none of the {count_of(len(owner.named), 'artifact')} that the database {owner.shown}"
            f" names{last}; give the data folder and the ROOKERY_ARTIFACTS_URL where they are, or mount the disk"
        )
    if there:
        raise UserError(
            f"{place} has {count_of(len(there), 'artifact')}, none of which the database {owner.shown} names{last};"
            " give an empty place, or the database that they belong to"
        )
    if owner.where:
        raise UserError(
            f"{place} is not the place of the artifacts of the database {owner.shown}{last}: it has no file {OWNER};"
            " give that place (a standby: the same ROOKERY_ARTIFACTS_URL), another database, or, to begin again here,"
            f" write {owner.identity} into that file"
        )
    return True


@contextmanager
def understood(
    check: Callable[[], None], kinds: tuple[type[Exception], ...] = (), absent: str = "it was deleted meanwhile"
) -> Iterator[None]:
    """Raise the meaning of a failure within. ``check`` raises :class:`ArtifactsAway` if the place is away now;
    ``kinds`` are the errors of a library besides ``OSError``; ``absent`` is the message about what is not there."""
    try:
        yield
    except (NotFound, CorruptArtifact):
        check()
        raise
    except RookeryError:
        raise
    except Exception as error:
        if (short_of := shortage(error, DISK)) is not None:
            raise short_of from error
        if not isinstance(error, (OSError, *kinds)):
            raise
        check()
        if isinstance(error, FileNotFoundError):
            raise NotFound(absent) from error
        raise UnreadableArtifact(_denied(error), first_line(error)) from error


def folder_name(folder: Path) -> str:
    """A folder of this machine, as the owner remembers it."""
    return f"{folder} on {socket.gethostname()}"


def away(detail: str) -> ArtifactsAway:
    """The error of a place that is away; ``detail`` is for the operator."""
    return ArtifactsAway("the artifacts do not answer: their place is away", detail)


def _denied(error: Exception) -> str:
    """An error for tenants: the reason of the system, which names no path."""
    number = error.errno if isinstance(error, OSError) else None
    return f"the artifacts cannot be used ({os.strerror(number).lower()})" if number else "the artifacts do not answer"


def first_line(error: Exception) -> str:
    """The first paragraph of an error in one line; other paragraphs of a library are its debugging text."""
    return " ".join(str(error).split("\n\n")[0].split())[:300]
