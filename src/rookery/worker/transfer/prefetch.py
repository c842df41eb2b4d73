"""Versions that the controller wants in the cache before work names them.

* They are pulled a few at a time, in the order in which they were asked for; what work names is pulled beside them.
* A newer version of a policy takes the place of an older one that was asked for before it and has not begun to come:
  a slow receiver skips versions instead of falling further and further behind.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from rookery import protocol
from rookery.worker.transfer.client import TransferClient
from rookery.worker.transfer.http import one_line

log = logging.getLogger("rookery.worker.transfer.prefetch")

AT_ONCE = 2
"""Pulls at a time: one may wait for a slow peer while the other goes on."""


class Prefetcher:
    """Belongs to the I/O thread."""

    def __init__(self, transfers: TransferClient) -> None:
        self._transfers = transfers
        self._wanted: dict[str, protocol.AdapterRef] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def prefetch(self, refs: Iterable[protocol.AdapterRef]) -> None:
        """Have these, too. What was asked for together does not take each other's place: it is in use side by side."""
        asked = {ref.hash: ref for ref in refs}
        newest = {ref.policy: ref.version for ref in asked.values()}
        kept = {h: ref for h, ref in self._wanted.items() if ref.version >= newest.get(ref.policy, ref.version)}
        self._wanted = kept | asked
        for _ in range(min(AT_ONCE - len(self._tasks), len(self._wanted))):
            task = asyncio.create_task(self._pull())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def discard(self, digest: str) -> None:
        """Nothing will name this artifact again."""
        self._wanted.pop(digest, None)

    def clear(self) -> None:
        """The link is over: the next one says what is wanted then."""
        self._wanted.clear()

    async def _pull(self) -> None:
        while self._wanted:
            ref = self._wanted.pop(next(iter(self._wanted)))
            try:
                async with self._transfers.pulled(ref):
                    pass
            except Exception as error:  # the controller is told by the transfer itself
                log.info("version %d of %s does not come: %s", ref.version, ref.policy, one_line(error))
