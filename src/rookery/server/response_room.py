"""Room for responses in memory. A response that is not a stream is whole before its first byte is sent, and stays until
its client has read it: a client with a thousand connections that reads slowly would hold a thousand of them.

Of one tenant, :data:`RESPONSE_BYTES` are made or sent at once. Further ones wait before anything is read for them; a
response alone always has room. The bound of one response is its route's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from weakref import WeakValueDictionary

from rookery.aio import Signal
from rookery.controller.service_time import LONGEST_WORK_WAIT
from rookery.errors import TooManyRequests

RESPONSE_BYTES = 64 << 20
"""Most bytes of one tenant's large responses that are made or sent at once."""

LARGE_BYTES = 16 << 20
"""Counted for a response whose size is not known before it is made: more than most have, as JSON and as the rows from
which it is made."""

SMALL_BYTES = 1 << 20
"""A response of fewer does not wait for large ones that are read slowly."""

RETRY_SECONDS = 2.0


class ResponseRoom:
    def __init__(self, longest_wait: float = LONGEST_WORK_WAIT) -> None:
        self._longest_wait = longest_wait
        self._held: Counter[str] = Counter()
        """Bytes by tenant."""
        self._released: WeakValueDictionary[str, Signal] = WeakValueDictionary()
        """By tenant, while responses wait: notified when some bytes were released."""

    async def take(self, tenant: str, size: int) -> None:
        """Returns when a response of ``size`` bytes has room, which it has until :meth:`give`. Raises
        :class:`TooManyRequests` where that takes too long."""
        released = self._released.setdefault(tenant, Signal())
        try:
            async with asyncio.timeout(self._longest_wait):
                while self._held[tenant] and self._held[tenant] + size > RESPONSE_BYTES:
                    await released.next.wait()
        except TimeoutError:
            line = f"{self._held[tenant]} bytes of responses to you are made or read by your clients"
            raise TooManyRequests(f"{line}, allowed: {RESPONSE_BYTES}", RETRY_SECONDS) from None
        self._held[tenant] += size

    def give(self, tenant: str, size: int) -> None:
        """A response was sent, or has so many bytes fewer than it had room for."""
        self._held[tenant] -= size
        if not self._held[tenant]:
            del self._held[tenant]
        if (released := self._released.get(tenant)) is not None:
            released.notify()
