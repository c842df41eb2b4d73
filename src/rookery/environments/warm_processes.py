"""Processes that stay warm between the questions of a pool: each is started when it is needed, has one caller at a
time, and is ended once it was idle for a while.

The pools of one program share a :class:`ProcessRoom`. Each job has pools, and the host of the built-in environments
runs the jobs of all tenants: without a bound over all of them, forty jobs leave a hundred idle processes, and sixteen
jobs with replies that compute for seconds keep sixty processes computing.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakValueDictionary

from rookery.machine import cores
from rookery.turns import TENANT

IDLE_SECONDS = 60.0
"""A process without a question for this long is ended."""

IDLE_AT_ONCE = 32
"""Idle processes of all pools: half a gigabyte of confinements."""

MORE_AT_ONCE = max(4, 2 * cores())
"""Processes of all pools that work at once, in addition to the first one of each tenant."""


class WarmProcess(Protocol):
    used: float
    """Monotonic time of its last answer."""

    def alive(self) -> bool:
        """Whether it can take another question."""
        ...

    def end(self) -> None:
        """End it while nobody uses it."""
        ...

    def kill(self) -> None:
        """End it although somebody may use it, who gets an error."""
        ...


P = TypeVar("P", bound=WarmProcess)


class ProcessRoom:
    """The processes of several pools. Thread-safe. A tenant's first process in use waits for no other tenant; further
    ones share places, of which the next free one is for the tenant that uses the fewest processes. Of too many idle
    processes, that which is idle longest ends."""

    def __init__(self, more: int = MORE_AT_ONCE, idle: int = IDLE_AT_ONCE) -> None:
        self.more, self.most_idle = more, idle
        self._changed = threading.Condition()
        """Guards the following; notified when a process is used no more."""
        self._in_use: Counter[object] = Counter()
        """By user."""
        self._further = 0
        """Processes in use without the first one of each user."""
        self.waiting: Counter[object] = Counter()
        """Calls that wait for a place, by user; for others to look at."""
        self._idle: dict[Any, object] = {}
        """The pool of each, the process that is idle longest first."""

    @contextmanager
    def using(self, user: object) -> Iterator[None]:
        """The ``user``, a tenant or a pool, may use one more process within; waits for its place."""
        with self._changed:
            self.waiting[user] += 1
            try:
                self._changed.wait_for(lambda: self._may_use(user))
            finally:
                _count_down(self.waiting, user)
            self._further += self._in_use[user] > 0
            self._in_use[user] += 1
            self._changed.notify_all()  # it may be the turn of another user now
        try:
            yield
        finally:
            with self._changed:
                _count_down(self._in_use, user)
                self._further -= user in self._in_use
                self._changed.notify_all()

    def _may_use(self, user: object) -> bool:
        used = self._in_use.get(user, 0)
        fewest = min(self._in_use.get(one, 0) for one in self.waiting)
        return not used or (self._further < self.more and used == fewest)

    def take(self, pool: object) -> Any:
        """The process of the pool that became idle last, which is idle no more; None without one."""
        with self._changed:
            found = next((process for process, owner in reversed(self._idle.items()) if owner is pool), None)
            self._idle.pop(found, None)
            return found

    def put(self, pool: object, process: Any) -> list[Any]:
        """A process of the pool is idle. Returns those that are idle no more, for the caller to end."""
        with self._changed:
            self._idle[process] = pool
            return [self._removed(one) for one in list(self._idle)[: -self.most_idle]]

    def remove(self, pool: object, expired: Callable[[Any], bool]) -> tuple[list[Any], bool]:
        """The idle processes of the pool that are ``expired``, which are idle no more, and whether others are."""
        with self._changed:
            mine = [process for process, owner in self._idle.items() if owner is pool]
            removed = [self._removed(process) for process in mine if expired(process)]
            return removed, len(removed) < len(mine)

    def _removed(self, process: Any) -> Any:
        del self._idle[process]
        return process


def _count_down(counted: Counter[object], user: object) -> None:
    counted[user] -= 1
    if not counted[user]:
        del counted[user]


ROOM = ProcessRoom()
"""The room of this program's pools."""


class WarmProcesses(Generic[P]):
    """Thread-safe."""

    def __init__(
        self, start: Callable[[], P], most: int, idle_seconds: float = IDLE_SECONDS, room: ProcessRoom = ROOM
    ) -> None:
        """Of the processes that ``start`` makes, each tenant uses at most ``most`` at once."""
        self._start = start
        self._idle_seconds = idle_seconds
        self._room = room
        self._most = most
        self._slots: WeakValueDictionary[object, threading.BoundedSemaphore] = WeakValueDictionary()
        """By user, while it uses a process or waits for one."""
        self._lock = threading.Lock()
        self._active: set[P] = set()
        self._timer_set = self._closed = False

    @contextmanager
    def borrow(self) -> Iterator[P]:
        """A process that nobody else uses; waits for one. Where the body raises, it is not used again and ends with its
        last reference. In threads of no tenant the pool counts as one."""
        user: object = TENANT.get() or self
        with self._lock:
            if (slots := self._slots.get(user)) is None:
                slots = self._slots[user] = threading.BoundedSemaphore(self._most)
        with slots, self._room.using(user):
            process = self._take()
            try:
                yield process
            finally:
                with self._lock:
                    self._active.discard(process)
            self._put(process)

    def close(self) -> None:
        """End all processes; questions that they work on fail."""
        with self._lock:
            self._closed = True
            active = [*self._active]
        idle, _ = self._room.remove(self, lambda process: True)
        for process in [*idle, *active]:
            process.kill()

    def _take(self) -> P:
        found: P | None
        with self._lock:
            while (found := self._room.take(self)) is not None:
                if found.alive():
                    self._active.add(found)
                    return found
        process = self._start()
        with self._lock:
            self._active.add(process)
        return process

    def _put(self, process: P) -> None:
        with self._lock:
            stays = process.alive() and not self._closed
            ended = self._room.put(self, process) if stays else [process]
            if stays and not self._timer_set:
                self._set_timer()
        for one in ended:
            one.end()

    def _set_timer(self) -> None:
        timer = threading.Timer(self._idle_seconds, self._end_idle)
        timer.daemon = True
        timer.start()
        self._timer_set = True

    def _end_idle(self) -> None:
        oldest = time.monotonic() - self._idle_seconds
        with self._lock:
            ended, left = self._room.remove(self, lambda process: process.used <= oldest)
            self._timer_set = False
            if left:
                self._set_timer()
        for process in ended:
            process.end()
