"""The threads that compute, next to other programs: fewer of them, or ones that spin briefly, where others want their
cores (``scheduling.threads``).

A worker measures how long its threads wait for a core although they could run, and what other programs leave of the
cores. A thread that spins for the next parallel piece of work answers at once on a core that nobody else wants, and
holds up the very thread that it waits for on a core that others want. Results do not change.

The GNU OpenMP runtime reads its spin count once, but takes about 100 turns instead while it has more threads than the
machine has cores. :class:`SparePool` starts such threads, which sleep, and ends them.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rookery.scheduling.threads import CoreUse, Team, adapt
from rookery.worker.engine.native.kernels.runtime import openmp_parallel

log = logging.getLogger("rookery.worker.spinning")

LOOK_SECONDS = 1.0

_TASKS, _CORES = Path("/proc/self/task"), Path("/proc/stat")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class Pool(Protocol):
    """A pool of threads whose running shortens the spinning."""

    def start(self) -> None: ...

    def stop(self) -> None: ...


class SparePool:
    """Sleeping threads of the OpenMP runtime, one more than the machine has cores."""

    def __init__(self) -> None:
        self._ended: threading.Event | None = None

    def start(self) -> None:
        parallel = openmp_parallel()
        if parallel is not None and self._ended is None:
            self._ended = threading.Event()
            threading.Thread(target=_keep_pool, args=(parallel, self._ended), name="spare", daemon=True).start()

    def stop(self) -> None:
        if self._ended is not None:
            self._ended.set()  # with the thread that began them, the runtime ends its threads
            self._ended = None


def _keep_pool(parallel: Callable[..., None], ended: threading.Event) -> None:
    nothing = ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value  # a function that ignores its argument
    parallel(nothing, None, (os.cpu_count() or 1) + 1, 0)
    ended.wait()


@dataclass(frozen=True)
class Clocks:
    """Seconds since some moment: of the clock; for which this process's present threads ran, and for which they waited
    for a core; of all its threads; and for which the cores were idle that it may use, None where that is unknown."""

    now: float
    ran: float
    waited: float
    own: float
    idle: float | None


def read_clocks() -> Clocks | None:
    """None where the system does not tell how long threads wait."""
    ran = waited = 0
    try:
        for task in _TASKS.iterdir():
            on_core, in_queue, _ = (task / "schedstat").read_text(encoding="ascii").split()
            ran, waited = ran + int(on_core), waited + int(in_queue)
    except (OSError, ValueError):  # no such file, or a thread has ended meanwhile
        return None
    return Clocks(time.monotonic(), ran / 1e9, waited / 1e9, time.process_time(), _idle_seconds())


def _idle_seconds() -> float | None:
    try:
        lines = [line.split() for line in _CORES.read_text(encoding="ascii").splitlines()]
        names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        ticks = [int(idle) + int(waiting) for name, _, _, _, idle, waiting, *_ in lines if name in names]
    except (OSError, ValueError, AttributeError):  # another system, or a sandbox
        return None
    return sum(ticks) / os.sysconf("SC_CLK_TCK") if ticks else None


def quota() -> float:
    """The cores that the system gives this process's group at most; infinite without a limit."""
    try:
        limit, period = _QUOTA.read_text(encoding="ascii").split()
        return int(limit) / int(period)
    except (OSError, ValueError):
        return math.inf


def core_use(before: Clocks, after: Clocks, most: float = math.inf) -> CoreUse:
    """Between two readings, of a process that gets ``most`` cores."""
    elapsed, free = after.now - before.now, None
    if before.idle is not None and after.idle is not None and elapsed > 0:
        free = min(most, (after.idle - before.idle + after.own - before.own) / elapsed)
    return CoreUse(after.ran - before.ran, after.waited - before.waited, free)


class ThreadControl:
    """Belongs to the I/O thread."""

    def __init__(
        self,
        pool: Pool,
        use: Callable[[int], object],
        measure: Callable[[], Clocks | None] = read_clocks,
    ) -> None:
        """``use(threads)`` says with how many threads the worker computes at most, from its next slice on."""
        self._pool = pool
        self._use = use
        self._measure = measure
        self._most = 0
        self._fixed = True
        self._before: Clocks | None = None
        self._quota = quota()
        self.team = Team(0)

    def begin(self, threads: int, *, fixed: bool) -> None:
        """The worker has loaded: it computes with so many threads where it has the cores; ``fixed`` if results depend
        on the number."""
        self._most, self._fixed, self.team = threads, fixed, Team(threads)

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Decide by the time since the last look."""
        now, before = self._measure(), self._before
        self._before = now
        if now is None or before is None or not self._most:
            return
        use, team = core_use(before, now, self._quota), self.team
        self.team = adapt(team, use, self._most, fixed=self._fixed)
        if self.team.brief != team.brief:
            (self._pool.start if self.team.brief else self._pool.stop)()
        if self.team.threads != team.threads:
            self._use(self.team.threads)
        if (self.team.threads, self.team.brief) != (team.threads, team.brief):
            share = 100 * use.waited / (use.ran + use.waited)
            how = "briefly" if self.team.brief else "as usual"
            log.info(
                "threads waited for a core %.0f%% of their time: now %d, they spin %s", share, self.team.threads, how
            )
