"""Errors that a person or a client will read. Each message is one line: what, where, what to do instead."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_REFUSED = 2
"""Exit code of a child (worker, environment host, preparing a model) that cannot work as it was started: starting it
again does not help."""


class RookeryError(Exception):
    """Base. ``status`` is what an HTTP face answers."""

    status = 500


class UserError(RookeryError):
    """The request cannot be carried out as it stands; asking again unchanged will not help."""

    status = 400


class Unauthorized(RookeryError):
    """No key, or one that is not known."""

    status = 401


class Forbidden(RookeryError):
    """A valid key, but not one that may do this."""

    status = 403


class NotFound(RookeryError):
    """Nothing by that name belongs to this tenant. Another tenant's things answer the same."""

    status = 404


class Conflict(RookeryError):
    """The thing exists but its state does not allow this now."""

    status = 409


class Unavailable(RookeryError):
    """Nothing is wrong with the request; what it needs is not there now. Trying again later can help."""

    status = 503


class StorageFull(RookeryError):
    """The data folder's disk took no more bytes. Nothing half-written is visible."""

    status = 507


class CorruptArtifact(RookeryError):
    """Stored bytes do not have the hash that names them."""


NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""The system's numbers for a disk that takes no more."""


def installs(extra: str) -> str:
    """The command that installs ``extra`` for this interpreter. A ``pip`` of another one would take the package of this
    name that an index has, which is not this one."""
    return f"{sys.executable} -m pip install 'rookery[{extra}]'"


def short(text: str) -> str:
    """``text`` as it fits into a line beside what is wrong with it."""
    return text if len(text) <= 80 else text[:77] + "..."


@contextmanager
def disk_errors(disk: str) -> Iterator[None]:
    """Within, a disk that has no room is :class:`StorageFull`; ``disk`` says in words which one it is."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise StorageFull(f"{disk} is full; free some space, nothing was half-written") from error
        raise
