"""Whose a place of artifacts is, and the meaning of a failure there: the one module that decides both.

A place (a folder, or a prefix of an object store) carries its owner's mark: the file ``owner`` with the identity of the
database that names its artifacts. The mark is read at the start of a service, where :func:`admit` decides, and again
before a failure is understood. :func:`understood` gives a failure its meaning:

===========================================  =============================  =====================================
found                                        meaning                        raised
===========================================  =============================  =====================================
no mark, or that of another database         the place is away              :class:`~rookery.errors.ArtifactsAway`
denied, an I/O error, no answer              it cannot be used now          the same, if the mark cannot be read
                                                                            either; else ``UnreadableArtifact``
the mark, no such artifact                   the artifact is absent         :class:`~rookery.errors.NotFound`
the mark, bytes of the artifact are absent   its copy is not complete       :class:`~rookery.errors.IncompleteArtifact`
the mark, other bytes than the hash says     the artifact is corrupt        :class:`~rookery.errors.CorruptArtifact`
===========================================  =============================  =====================================

Only the last one lets a job go back to an earlier version. Nothing is deleted while the place is away.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rookery.errors import (
    ArtifactsAway,
    CorruptArtifact,
    NotFound,
    RookeryError,
    UnreadableArtifact,
    UserError,
    shortage,
)

OWNER = "owner"
"""The name of the mark."""

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
            f"{place} has none of the {len(owner.named)} artifacts that the database {owner.shown} names{last};"
            " give the data folder and the ROOKERY_ARTIFACTS_URL where they are, or mount the disk"
        )
    if there:
        raise UserError(
            f"{place} has {len(there)} artifacts, none of which the database {owner.shown} names{last};"
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
        raise UnreadableArtifact("the artifacts do not answer", first_line(error)) from error


def folder_name(folder: Path) -> str:
    """A folder of this machine, as the owner remembers it."""
    return f"{folder} on {socket.gethostname()}"


def away(detail: str) -> ArtifactsAway:
    """The error of a place that is away; ``detail`` is for the operator."""
    return ArtifactsAway("the artifacts do not answer: their place is away", detail)


def first_line(error: Exception) -> str:
    """The first paragraph of an error in one line; other paragraphs of a library are its debugging text."""
    return " ".join(str(error).split("\n\n")[0].split())[:300]
