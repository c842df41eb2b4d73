"""A database that takes its time, fails now and then, and goes on for a moment after its caller is dead.

* Calls are carried out one after another, in order, each after a delay: whatever else happens meanwhile happens before.
* A call that fails was not carried out, or it was and only its answer is lost: the caller cannot tell.
* When the process dies, what was not carried out never is; but a commit that the server was sent may still be, later.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any, TypeVar

from tests.chaos.events import Events

from rookery.errors import Unavailable
from rookery.storage.db import Database
from rookery.storage.repositories import versions

T = TypeVar("T")

COMMIT = versions.commit_step.__name__
"""The call that makes a version."""


class Dead(Exception):
    """The process of this writer is dead."""


class SlowWriter:
    """A :class:`~rookery.storage.store.Writer`. ``seconds`` is a call's mean delay, ``failing`` the share of calls
    that fail once :attr:`troubled`."""

    def __init__(self, random: Random, events: Events, seconds: float, failing: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._random = random
        self._events = events
        self._seconds = seconds
        self._failing = failing
        self._waiting: deque[tuple[Callable[[], Any], asyncio.Future[Any]]] = deque()
        self._carrying = False
        self.troubled = False
        self.dead = False
        self.carried = 0
        """Calls carried out."""
        self.on_commit: Callable[[bool], bool] = lambda after: False
        """Asked before and after each commit of a version whether the process dies there."""

    async def __call__(self, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        if self.dead:
            raise Dead
        future: asyncio.Future[T] = self._loop.create_future()
        self._waiting.append((partial(call, *arguments, **named), future))
        self._next()
        return await future

    def close(self) -> None:
        self.die(late=None)

    def die(self, *, late: float | None) -> None:
        """The process is gone. ``late``: in how many seconds a commit that is under way is carried out all the same."""
        self.dead = True
        if late is not None and self._waiting and _is_commit(self._waiting[0][0]):
            call = self._waiting[0][0]
            self._loop.call_later(late, self._land, call)
        for _, future in self._waiting:  # who waits outside that process sees the connection end
            if not future.done():
                future.set_exception(Dead())
        self._waiting.clear()

    def _land(self, call: Callable[[], Any]) -> None:
        try:
            call()
            self._events.note("landed", "carried out")
        except Exception as error:  # nobody is there to be told
            self._events.note("landed", type(error).__name__)

    def _next(self) -> None:
        if self._waiting and not self._carrying:
            self._carrying = True
            self._loop.call_later(self._seconds * self._random.expovariate(1.0), self._complete)

    def _complete(self) -> None:
        self._carrying = False
        if not self._waiting:
            return
        call, future = self._waiting[0]
        commit = _is_commit(call)
        if commit and self.on_commit(False):
            return
        self._waiting.popleft()
        fails = self.troubled and self._random.random() < self._failing and _is_database(call)
        received = not fails or self._random.random() < 0.5
        error: BaseException | None = None
        result = None
        if received:
            self.carried += 1
            try:
                result = call()
            except Exception as raised:  # the caller's
                error = raised
        if commit and self.on_commit(True):
            return
        if fails:
            self._events.note("database", "trouble", "carried out" if received else "not carried out")
            error = Unavailable("the database does not answer: the server went away")
        if not future.done():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)
        self._next()


def _is_database(call: Callable[[], Any]) -> bool:
    """Other work of the writer (artifacts, files of metrics) does not ask the database's server."""
    inner = call.func if isinstance(call, partial) else call
    return _is_commit(call) or isinstance(getattr(inner, "__self__", None), Database)


def _is_commit(call: Callable[[], Any]) -> bool:
    return isinstance(call, partial) and bool(call.args) and getattr(call.args[0], "__name__", "") == COMMIT
