"""Pulls the versions that the controller announces before a request or an operation names them.

* A few pulls run at a time, in order of announcement; pulls that a request needs run independently of them.
* A newer version of a policy replaces an older one that was announced earlier and whose pull has not begun: a slow
  receiver skips versions instead of lagging further and further behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from rookery import protocol
from rookery.worker.transfer.client import TransferClient
from rookery.worker.transfer.http import one_line

log = logging.getLogger("rookery.worker.transfer.prefetch")

MAX_PULLS = 2
"""Pulls at a time: one may wait for a slow peer while the other makes progress."""


class Prefetcher:
    """Belongs to the I/O thread."""

    def __init__(self, transfers: TransferClient) -> None:
        self._transfers = transfers
        self._queue: dict[str, protocol.AdapterRef] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def prefetch(self, refs: Iterable[protocol.AdapterRef]) -> None:
        """Queue these versions. Versions announced together do not replace each other: all of them are in use."""
        announced = {ref.hash: ref for ref in refs}
        newest = {ref.policy: ref.version for ref in announced.values()}
        kept = {h: ref for h, ref in self._queue.items() if ref.version >= newest.get(ref.policy, ref.version)}
        self._queue = kept | announced
        for _ in range(min(MAX_PULLS - len(self._tasks), len(self._queue))):
            task = asyncio.create_task(self._pull())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def discard(self, digest: str) -> None:
        """Nothing will name this artifact again."""
        self._queue.pop(digest, None)

    def clear(self) -> None:
        """The connection has ended; the next one announces its versions itself."""
        self._queue.clear()

    async def _pull(self) -> None:
        while self._queue:
            ref = self._queue.pop(next(iter(self._queue)))
            try:
                async with self._transfers.pulled(ref):
                    pass
            except Exception as error:  # the client reports it to the controller
                log.info("prefetch of %s version %d failed: %s", ref.policy, ref.version, one_line(error))
