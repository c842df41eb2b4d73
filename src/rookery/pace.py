"""The limit of transfers that take as long as their size needs: a server that sends a byte now and then is never silent
for long, and would be waited for without end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

SLOWEST = 1024.0
"""Bytes per second that a transfer must have: a slow mobile network has more."""


class TooSlow(TimeoutError):
    """Less than :data:`SLOWEST` bytes per second came for a while."""


class TransferPace:
    """The pace of one transfer: how long to wait for its next bytes. Waits may take ``seconds`` together; the bytes
    that come extend that by the time that they take at the slowest rate, up to ``seconds`` again. So a silence ends
    within that time, and a transfer of N bytes within ``seconds + N / SLOWEST``. Time between the waits does not
    count."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._left = seconds
        self._clock = clock

    def _waited(self, seconds: float, came: int) -> None:
        """Raises :class:`TooSlow`."""
        self._left = min(self.seconds, self._left - seconds + came / SLOWEST)
        if self._left <= 0:
            raise self._too_slow()

    def _too_slow(self) -> TooSlow:
        return TooSlow(f"less than {SLOWEST:g} bytes per second came for {self.seconds:g} s")

    def blocks(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """The ``blocks``, each as soon as it comes; a wait for one has its own limit. Raises :class:`TooSlow`."""
        source = iter(blocks)
        while True:
            began = self._clock()
            block = next(source, None)
            if block is None:
                return
            self._waited(self._clock() - began, len(block))
            yield block

    async def wait(self, arrival: Awaitable[T], size: Callable[[T], int] = lambda arrived: 0) -> T:
        """The value that arrives, with ``size(…)`` bytes. Raises :class:`TooSlow`."""
        began = self._clock()
        try:
            async with asyncio.timeout(self._left):
                arrived = await arrival
        except TimeoutError:
            raise self._too_slow() from None
        self._waited(self._clock() - began, size(arrived))
        return arrived

    async def ablocks(self, blocks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """As :meth:`blocks`, also where a wait has no limit of its own."""
        while block := await self.wait(anext(blocks, b""), len):
            yield block
