"""The watch over a worker's progress: work without a finished slice for some seconds is an alarm that tells why.

It belongs to the I/O thread, so it also notices a slice that does not end. An alarm is one line in the log when it
begins and one when it ends, a count, and a text that heartbeats carry while it lasts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rookery.bounds import LINE
from rookery.worker.compute import Compute
from rookery.worker.running_time import running_time

log = logging.getLogger("rookery.worker.progress")

STALL_SECONDS = 5.0
"""Time without a finished slice after which a worker with work has stalled: slices take a second at most, but for the
prompt of a long context on a slow machine."""

LOOK_SECONDS = 1.0
"""Time between two looks, and the time that the compute thread has to tell its state."""


class ProgressWatch:
    def __init__(self, compute: Compute, clock: Callable[[], float] = running_time) -> None:
        self._compute = compute
        self._clock = clock
        self._progress = -1
        self._since = clock()
        """When the progress last changed, or there was no work."""
        self.stalls = 0
        """Alarms since the start."""
        self.stalled = ""
        """Why there is no progress, while there is none."""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Compare the progress with that of the last look."""
        beat, now = self._compute.status.beat, self._clock()
        if beat.progress != self._progress or not beat.busy:
            if self.stalled:
                log.warning("the worker makes progress again, after %.0f s", now - self._since)
            self._progress, self._since, self.stalled = beat.progress, now, ""
        elif now - self._since >= STALL_SECONDS:
            began = not self.stalled
            story = " ".join((await self._compute.describe(LOOK_SECONDS)).split())
            self.stalled = story[:LINE]
            if began:
                self.stalls += 1
                log.warning("no progress for %.0f s with work: %s", now - self._since, self.stalled)
