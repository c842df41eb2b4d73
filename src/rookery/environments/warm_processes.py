"""Processes that stay warm between the questions of a pool: each is started when it is needed, has one caller at a
time, and is ended once it was idle for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

IDLE_SECONDS = 60.0
"""A process without a question for this long is ended."""


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


class WarmProcesses(Generic[P]):
    """Thread-safe."""

    def __init__(self, start: Callable[[], P], most: int, idle_seconds: float = IDLE_SECONDS) -> None:
        """At most ``most`` processes that ``start`` makes are in use at once."""
        self._start = start
        self._idle_seconds = idle_seconds
        self._slots = threading.BoundedSemaphore(most)
        self._lock = threading.Lock()
        self._idle: list[P] = []
        """Most recently used last, and used first, so that surplus processes become idle."""
        self._active: set[P] = set()
        self._timer_set = self._closed = False

    @contextmanager
    def borrow(self) -> Iterator[P]:
        """A process that nobody else uses; waits for one. Where the body raises, it is not used again and ends with its
        last reference."""
        with self._slots:
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
            processes = [*self._idle, *self._active]
            self._idle = []
        for process in processes:
            process.kill()

    def _take(self) -> P:
        with self._lock:
            while self._idle:
                process = self._idle.pop()
                if process.alive():
                    self._active.add(process)
                    return process
        process = self._start()
        with self._lock:
            self._active.add(process)
        return process

    def _put(self, process: P) -> None:
        with self._lock:
            if process.alive() and not self._closed:
                self._idle.append(process)
                if not self._timer_set:
                    self._set_timer()
                return
        process.end()

    def _set_timer(self) -> None:
        timer = threading.Timer(self._idle_seconds, self._end_idle)
        timer.daemon = True
        timer.start()
        self._timer_set = True

    def _end_idle(self) -> None:
        oldest = time.monotonic() - self._idle_seconds
        with self._lock:
            expired = [one for one in self._idle if one.used <= oldest]
            self._idle = [one for one in self._idle if one.used > oldest]
            self._timer_set = False
            if self._idle:
                self._set_timer()
        for process in expired:
            process.end()
