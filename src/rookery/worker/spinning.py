"""How long the threads that compute spin while they wait for each other: briefly where others want their cores.

A thread that spins for the next parallel piece of work answers at once on a core that nobody else wants, and holds up
the very thread that it waits for on a core that others want: next to one program that always runs, a decode step of 8
rows on two cores takes seven times as long with 10,000 turns, and not twice as long with 100
(``benchmarks.micro.neighbours``; fewer threads gain nothing over that, and lose next to two programs). So a
worker measures how long its threads wait for a core although they could run, and shortens the spinning while that is a
large part of their time. Results do not change.

The GNU OpenMP runtime reads its spin count once, but takes about 100 turns instead while it has more threads than the
machine has cores. :class:`SparePool` starts such threads, which sleep, and ends them.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Protocol

from rookery.worker.engine.native.kernels.runtime import openmp_parallel

log = logging.getLogger("rookery.worker.spinning")

LOOK_SECONDS = 1.0

CROWDED_SHARE = 0.25
"""Share of their time for which threads wait for a core, above which they spin briefly: two threads on two cores next
to one program that always runs wait about a third of it, on a quiet machine some percent."""

QUIET_SHARE = 0.15
"""The share below which they spin as usual again: threads of a worker on two cores, which share them with their service
and environments, wait 7% to 8% in the median second, 15% in a quarter of the seconds."""

LOOKS, FEWEST_LOOKS = 5, 3
"""The share is the median of so many looks, at least of the fewest. A second of much waiting, as at the start, is no
program that wants the cores: where it decided, a worker next to its service took turns for a whole run."""

LEAST_SECONDS = 0.1
"""Time of all threads between two looks below which nothing is decided: the worker is idle."""

_TASKS = Path("/proc/self/task")


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


def scheduled_seconds() -> tuple[float, float] | None:
    """Seconds for which this process's present threads ran, and for which they waited for a core; None where the system
    does not say."""
    ran = waited = 0
    try:
        for task in _TASKS.iterdir():
            on_core, in_queue, _ = (task / "schedstat").read_text(encoding="ascii").split()
            ran, waited = ran + int(on_core), waited + int(in_queue)
    except (OSError, ValueError):  # no such file, or a thread has ended meanwhile
        return None
    return ran / 1e9, waited / 1e9


class SpinControl:
    """Belongs to the I/O thread."""

    def __init__(
        self,
        pool: Pool,
        crowd: Callable[[bool], object],
        measure: Callable[[], tuple[float, float] | None] = scheduled_seconds,
    ) -> None:
        """``crowd(crowded)`` says whether other programs want the cores from now on."""
        self._pool = pool
        self._crowd = crowd
        self._measure = measure
        self._before: tuple[float, float] | None = None
        self._shares: deque[float] = deque(maxlen=LOOKS)
        """Shares of their time for which threads waited, in the last looks."""
        self.brief = False
        """Whether threads spin briefly now."""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look()

    def look(self) -> None:
        """Decide by the time since the last look, and by those before."""
        now, before = self._measure(), self._before
        self._before = now
        if now is None or before is None:
            return
        ran, waited = (after - earlier for after, earlier in zip(now, before, strict=True))
        if min(ran, waited) < 0 or ran + waited < LEAST_SECONDS:  # threads have ended, or the worker is idle
            return
        self._shares.append(waited / (ran + waited))
        if len(self._shares) < FEWEST_LOOKS:
            return
        share = median(self._shares)
        if not self.brief and share > CROWDED_SHARE:
            self.brief = True
            self._pool.start()
            self._crowd(True)
            log.info("threads wait for a core %.0f%% of their time: they spin briefly", 100 * share)
        elif self.brief and share < QUIET_SHARE:
            self.brief = False
            self._pool.stop()
            self._crowd(False)
            log.info("threads have their cores again: they spin as usual")
