"""Errors for users and clients. Each message is one line: what, where, what to do instead."""

from __future__ import annotations

import difflib
import errno
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TypeVar

S = TypeVar("S")
E = TypeVar("E")

EXIT_REFUSED = 2
"""Exit code of a child process (worker, environment host, model conversion) that cannot work as it was started: a
restart does not help."""


class RookeryError(Exception):
    """Base class; ``status`` is the HTTP status of the answer."""

    status = 500


class UserError(RookeryError):
    """The request is wrong; repeating it unchanged does not help."""

    status = 400


class Unauthorized(RookeryError):
    """No key, or an unknown one."""

    status = 401


class Forbidden(RookeryError):
    """A valid key without the right to do this."""

    status = 403


class NotFound(RookeryError):
    """This tenant has nothing by that name. Another tenant's things answer the same."""

    status = 404


class Conflict(RookeryError):
    """The object exists, but its state does not allow this now."""

    status = 409


class LeaseLost(Conflict):
    """A later lease on the policy exists: another trainer took over, and this one can commit nothing more."""


class TooManyRequests(RookeryError):
    """A limit of a tenant; ``retry_after`` is the time in seconds after which it allows more: infinite where only its
    user's action does, such as a deletion."""

    status = 429

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after

    @property
    def lasting(self) -> bool:
        """Whether no repetition of the request helps."""
        return math.isinf(self.retry_after)


class Unavailable(RookeryError):
    """The request is right, but something that it needs is not available now. Retrying later can help, such as after
    ``retry_after`` seconds. ``detail`` is for the operator's log only, such as an address: tenants read the message."""

    status = 503
    retry_after = 1.0

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class DatabaseAway(Unavailable):
    """The database does not answer, or what answers is not the database that the service opened."""


class DatabaseRefuses(DatabaseAway):
    """The server of the database answers and refuses: a wrong password, an unknown user or database, no permission. At
    a start that is a mistake of its operator."""


class DatabaseReadOnly(DatabaseAway):
    """The database answers and takes no writes: its server became a replica, or its disk was mounted read-only."""


class ArtifactsAway(Unavailable):
    """The place of the artifacts is not there, cannot be read, or carries another owner's mark: nothing can be
    concluded about any artifact."""


class UnreadableArtifact(Unavailable):
    """The place of the artifacts is there, but does not give or take one of them now: denied, an I/O error."""


class StorageFull(RookeryError):
    """The data folder's disk is full. Nothing half-written is visible."""

    status = 507


class ArtifactMissing(Unavailable):
    """An artifact that the database names is not in its place, wholly or in part: it may come back."""


class CorruptArtifact(RookeryError):
    """Stored bytes do not have the hash that names them."""


class IncompleteArtifact(CorruptArtifact):
    """Bytes of an artifact are absent, as in a copy that is not complete: none that are there are known to be wrong."""


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk."""

REFUSED_BY_DISK = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP,
    errno.ENAMETOOLONG, errno.EINVAL,
)  # fmt: skip
"""Error numbers of a place on a disk that cannot be used at any other time either, unless somebody changes it. A
network's disk that is not there yet, or hangs, has others."""

RUN_OUT = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
"""Error numbers of a process or a machine without free file descriptors or memory."""


def unusable(error: OSError) -> type[UserError] | type[Unavailable]:
    """The error of a place on a disk that a program needs at its start: a mistake, or one that may pass."""
    return UserError if error.errno in REFUSED_BY_DISK else Unavailable


def to_stderr(*lines: object) -> None:
    """Print lines on standard error, where they can be written: what a process does and its exit code do not depend on
    a full disk there, or on a terminal or a program that has ended and read them."""
    with suppress(OSError):
        for line in lines:
            print(line, file=sys.stderr, flush=True)


def installs(extra: str) -> str:
    """The command that installs ``extra`` for this interpreter."""
    return f"{sys.executable} -m pip install 'rookery[{extra}]'"


_PATH = re.compile(r"(?<![\w.:/~@-])/[\w.@+%~-]+(?:/[\w.@+%~-]+)*/?")
"""An absolute path: no part of a URL, of a hub id or of ``and/or``."""


def without_paths(text: str, keep: str = "") -> str:
    """``text``, which an operator reads whole, for tenants: paths of the machine are left out, except ``keep``."""
    return _PATH.sub(lambda found: found[0] if found[0] == keep else "(a path of the worker)", text)


def next_state(table: Mapping[tuple[S, E], S], state: S, event: E, whose: str) -> S:
    """The state that follows ``event``, by the table of a thing's life. Raises ``RuntimeError`` for an event that the
    ``state`` does not have: that is a mistake of this process."""
    following = table.get((state, event))
    if following is None:
        raise RuntimeError(f"{whose} is {state}, which has no event {event!r}")
    return following


def count_of(count: float, one: str, many: str = "", *, form: str = "") -> str:
    """``count`` things: "1 step", "2 steps". ``many`` is their name where there are several, by default the plural of
    ``one``; with both a verb may follow, such as "step is" and "steps are". ``form``: how the number is written."""
    number = format(count, form or ("g" if count % 1 else ".0f"))
    if count == 1:
        return f"{number} {one}"
    plural = re.sub(r"(?<=[^aeiou])y$", "ie", one) + ("es" if one.endswith(("s", "x", "ch", "sh")) else "s")
    return f"{number} {many or plural}"


def short(text: str) -> str:
    """``text`` cut to 80 characters for an error line."""
    return text if len(text) <= 80 else text[:77] + "..."


def shown_name(name: str) -> str:
    """A name as a user gave it, for an error line: in quotes and escaped where it could not be read otherwise."""
    return short(name if name.isprintable() and name.strip() == name != "" else repr(name))


def single_line(text: str) -> str:
    """``text`` for a line of a log, a terminal or an error: characters that break a line, move the cursor, or reverse
    the direction of text are escaped, so that a stranger's text cannot pass as a further line."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def nearest(name: str, known: Iterable[str], most: int = 1) -> str:
    """ "did you mean …?" with up to ``most`` of the ``known`` names; empty where none is near. The comparison's time
    grows with the square of the length: a name longer than any known one is not compared."""
    candidates = [*known]
    if len(name) > 2 * max(map(len, candidates), default=0):
        return ""
    near = difflib.get_close_matches(name, candidates, most)
    return f"did you mean {' or '.join(near)}?" if near else ""


def shortage(error: BaseException, disk: str = "a disk of the service") -> StorageFull | Unavailable | None:
    """The error for a full ``disk``, and for file descriptors or memory that have run out: a later try can succeed.
    None for any other."""
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        return StorageFull(f"{disk} is full; free some space, nothing was half-written")
    no_thread = isinstance(error, RuntimeError) and "can't start new thread" in str(error)
    if no_thread or isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno in RUN_OUT):
        return Unavailable(f"the service has run out of a resource for now ({error or 'memory'})")
    return None


@contextmanager
def shortages(disk: str = "a disk of the service") -> Iterator[None]:
    """Raises the error of :func:`shortage`; ``disk`` names what was written to."""
    try:
        yield
    except (OSError, MemoryError, RuntimeError) as error:
        if (short_of := shortage(error, disk)) is not None:
            raise short_of from error
        raise
