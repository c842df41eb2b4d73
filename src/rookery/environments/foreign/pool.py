"""The processes of environments of other libraries: how many run, which tenant has them, when they end.

* At most :data:`MOST_PROCESSES` run at a time. One without episodes ends after :data:`IDLE_SECONDS`, or at once where
  another environment needs its place.
* A tenant that waits for a place goes before those that have more places. Where a tenant has at least two more, its
  process that has had episodes longest gets no further ones, and ends with its last one: tenants that wait come to
  equal shares, and no tenant keeps all places by episodes that overlap.
* No wait holds a thread: a place is given under one lock, at the moment at which it becomes free.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rookery.environments.foreign.process import LibraryProcess
from rookery.errors import UserError, count_of
from rookery.turns import TENANT

MOST_PROCESSES = 24
"""Processes of environments at a time. One has some 200 MB: all of them and a worker fit in 16 GB."""

IDLE_SECONDS = 300.0
"""Time after which a process without episodes ends. A job's groups follow each other much faster; starting one takes
seconds."""

WAIT_SECONDS = 30.0
"""Longest time for which an episode waits for the place of another environment's process. Half of the default
``step_timeout``, within which a reset waits, starts a process, and ends: its owner reads why it waited."""


@dataclass(eq=False)
class ProcessRequest:
    """One episode that asks for the process of its environment."""

    owner: LibraryProcesses
    tenant: str
    answer: Future[LibraryProcess] = field(default_factory=Future)
    """The process, where the episode counts already; or why there is none."""


class LibraryPool:
    """The processes of all environments here. Thread-safe."""

    def __init__(
        self, most: int = MOST_PROCESSES, idle_seconds: float = IDLE_SECONDS, wait_seconds: float = WAIT_SECONDS
    ) -> None:
        self.wait_seconds = wait_seconds
        self._most, self._idle = most, idle_seconds
        self._changed = threading.Condition()
        self._live: list[LibraryProcess] = []
        self._starting: dict[LibraryProcesses, str] = {}
        """Environments whose process starts, with the tenant for which it does."""
        self._waiting: list[ProcessRequest] = []
        self._watch: threading.Thread | None = None

    def running(self) -> list[LibraryProcess]:
        """The processes that run."""
        with self._changed:
            return list(self._running())

    def waiting(self) -> int:
        """The episodes that wait for the place of another environment's process."""
        with self._changed:
            return sum(request.owner not in self._starting for request in self._waiting)

    def ask(self, owner: LibraryProcesses) -> ProcessRequest:
        """Ask for the owner's process, for one more episode. It is answered at once where it runs."""
        request = ProcessRequest(owner, TENANT.get())
        with self._changed:
            self._waiting.append(request)
            self._serve()
        return request

    def expire(self, request: ProcessRequest) -> None:
        """The request has waited for :attr:`wait_seconds`: it is refused, unless its process is starting, which has a
        limit of its own."""
        with self._changed:
            if request in self._waiting and request.owner not in self._starting:
                self._waiting.remove(request)
                request.answer.set_exception(
                    UserError(
                        f"environment.id: {count_of(self._most, 'process', 'processes')} of {request.owner.library}"
                        f" and others have episodes, the most at a time; none was free within {self.wait_seconds:g} s:"
                        " try again when other jobs have ended"
                    )
                )

    def withdraw(self, request: ProcessRequest) -> None:
        """The episode has ended before it got its process, or at that moment."""
        with self._changed:
            if request in self._waiting:
                self._waiting.remove(request)
                request.answer.cancel()
            elif request.answer.exception() is None:
                self.leave(request.answer.result())

    def leave(self, process: LibraryProcess) -> None:
        """One episode of the process has ended."""
        with self._changed:
            process.episodes -= 1
            if not process.episodes:
                process.since = time.monotonic()
                if process.draining:
                    process.end()
            self._serve()

    def _running(self) -> list[LibraryProcess]:
        self._live = [process for process in self._live if process.alive()]
        return self._live

    def _serve(self) -> None:
        """Answer the requests whose process runs, start the processes that have room, and drain for the others."""
        self._join_running()
        while needed := self._needed():
            if not self._has_room():
                self._drain(needed)
                break
            self._start(needed[0])
        else:
            self._resume()
        if self._watch is None and self._live:
            self._watch = threading.Thread(target=self._end_idle, daemon=True, name="idle environments")
            self._watch.start()
        self._changed.notify_all()

    def _join_running(self) -> None:
        """Answer the requests whose process runs and does not drain."""
        for request in list(self._waiting):
            process = request.owner.process
            if process is not None and process.alive() and not process.draining:
                self._admit(request, process)

    def _admit(self, request: ProcessRequest, process: LibraryProcess) -> None:
        self._waiting.remove(request)
        if not process.episodes:
            process.tenant, process.since = request.tenant, time.monotonic()
        process.episodes += 1
        request.answer.set_result(process)

    def _needed(self) -> list[ProcessRequest]:
        """For each environment whose process neither runs nor starts, its first request: those of tenants with the
        fewest places first, then in the order in which they came."""
        first: dict[LibraryProcesses, ProcessRequest] = {}
        for request in self._waiting:
            owner = request.owner
            if owner not in self._starting and (owner.process is None or not owner.process.alive()):
                first.setdefault(owner, request)
        slots = self._slots_by_tenant()
        return sorted(first.values(), key=lambda request: slots[request.tenant])

    def _slots_by_tenant(self) -> Counter[str]:
        """The places that each tenant has."""
        busy = [process for process in self._running() if process.episodes and not process.draining]
        return Counter(process.tenant for process in busy) + Counter(self._starting.values())

    def _has_room(self) -> bool:
        """Whether another process may start. Ends the one that has been idle longest where only that makes room."""
        if len(self._running()) + len(self._starting) < self._most:
            return True
        idle = [process for process in self._live if not process.episodes]
        if not idle:
            return False
        min(idle, key=lambda process: process.since).end()
        return len(self._running()) + len(self._starting) < self._most

    def _drain(self, needed: list[ProcessRequest]) -> None:
        """Drain processes of the tenants that have the most places, until each request has one or has its share."""
        slots = self._slots_by_tenant()
        coming = sum(process.draining for process in self._live)
        for number, request in enumerate(needed):
            if number >= coming:
                held = [
                    process
                    for process in self._live
                    if process.episodes and not process.draining and slots[process.tenant] > slots[request.tenant] + 1
                ]
                if not held:
                    return
                longest = min(held, key=lambda process: (-slots[process.tenant], process.since))
                longest.draining = True
                slots[longest.tenant] -= 1
            slots[request.tenant] += 1

    def _resume(self) -> None:
        """No environment waits for a place: where one is free or idle, processes that drain get episodes again."""
        if sum(process.episodes > 0 for process in self._running()) + len(self._starting) >= self._most:
            return
        for one in self._live:
            one.draining = False
        self._join_running()

    def _start(self, request: ProcessRequest) -> None:
        owner = request.owner
        starting = threading.Thread(target=self._run_start, args=(owner,), daemon=True, name="start of an environment")
        try:
            starting.start()
        except RuntimeError as error:  # the system gives no further thread
            self._waiting.remove(request)
            request.answer.set_exception(error)
        else:
            self._starting[owner] = request.tenant

    def _run_start(self, owner: LibraryProcesses) -> None:
        """Start the owner's process, in a thread, and answer the requests for it."""
        made, error = None, None
        try:
            made = owner.start()
        except Exception as raised:  # the answer to the requests
            error = raised
        with self._changed:
            del self._starting[owner]
            if made is not None:
                owner.process = made
                self._live.append(made)
            for request in [request for request in self._waiting if request.owner is owner]:
                if made is not None:
                    self._admit(request, made)
                else:
                    self._waiting.remove(request)
                    request.answer.set_exception(error)
            self._serve()

    def _end_idle(self) -> None:
        with self._changed:
            while running := self._running():
                now = time.monotonic()
                for process in running:
                    if not process.episodes and now - process.since >= self._idle:
                        process.end()
                since = [process.since for process in self._running() if not process.episodes]
                self._changed.wait(min(since) + self._idle - now if since else None)
            self._watch = None


POOL = LibraryPool()


class LibraryProcesses:
    """The process of one environment, started where it does not run."""

    def __init__(
        self, library: str, python: str, script: Path, given: Mapping[str, Any], pool: LibraryPool | None = None
    ) -> None:
        """Starts the process, and keeps its first message in ``ready``. Blocks; raises :class:`UserError`."""
        self.library = library
        self.process: LibraryProcess | None = None
        """The process that was started last; changed by the pool."""
        self._arguments = (library, python, script, given)
        self._pool = pool or POOL
        self._episodes = itertools.count()
        request = self._pool.ask(self)
        try:
            first = request.answer.result(self._pool.wait_seconds)
        except TimeoutError:
            self._pool.expire(request)
            first = request.answer.result()
        self.ready = first.ready
        self._pool.leave(first)

    def start(self) -> LibraryProcess:
        """A further process of the environment, which the pool asks for. Blocks; raises :class:`UserError`."""
        return LibraryProcess(*self._arguments)

    async def join(self) -> LibraryProcess:
        """The process, which runs until :meth:`leave`. Raises :class:`UserError`."""
        request = self._pool.ask(self)
        if request.answer.done():
            return request.answer.result()
        answer = asyncio.wrap_future(request.answer)
        try:
            if not (await asyncio.wait([answer], timeout=self._pool.wait_seconds))[0]:
                self._pool.expire(request)
                await asyncio.wait([answer])
        except asyncio.CancelledError:
            self._pool.withdraw(request)
            raise
        return answer.result()

    def leave(self, process: LibraryProcess) -> None:
        """An episode in the process has ended."""
        self._pool.leave(process)

    def next_name(self) -> str:
        """A name for another episode."""
        return f"episode-{next(self._episodes)}"
