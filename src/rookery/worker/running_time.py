"""Seconds for which this process runs: a monotonic clock without the time for which the process was stopped.

A process may be stopped for long, by a signal or by a virtual machine that is paused. The slice of that moment did not
use the time. Charged with it, engine or trainer would wait as long again for the other one, and the next slices would
be predicted to take as long.

A thread reads the clock each second. So where nobody has read it for :data:`STOPPED_SECONDS`, no thread ran.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

TICK_SECONDS = 1.0

STOPPED_SECONDS = 5.0
"""A gap between two readings that is longer is no time of the process: no call holds Python's lock for so long once the
base model is loaded."""


class RunningTime:
    """Any thread may read it."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at = clock()
        self._lost = 0.0
        """Seconds for which the process was stopped."""
        self._watched = False

    def watch(self) -> None:
        """Read it each second from now on; before, a gap between two readings may be one long slice, and counts."""
        with self._lock:
            self._read_at = self._clock()
            started, self._watched = self._watched, True
        if not started:
            threading.Thread(target=self._tick, name="running time", daemon=True).start()

    def __call__(self) -> float:
        """The seconds; only differences mean anything."""
        with self._lock:
            now = self._clock()
            gap, self._read_at = now - self._read_at, now
            if self._watched and gap > STOPPED_SECONDS:
                self._lost += gap
            return now - self._lost

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_SECONDS)
            self()


running_time = RunningTime()
"""Of this process."""
