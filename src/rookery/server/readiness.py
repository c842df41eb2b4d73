"""Whether a service is ready for requests, for load balancers and probes. Liveness (``/healthz``) is another question:
a service that waits for its database must not be ended for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from rookery.clock import Clock
from rookery.errors import RookeryError

KEPT_SECONDS = 1.0
"""An answer is kept for so long: the route needs no key, and must not become a load on the database."""

PATIENCE_SECONDS = 2.0
"""A database that does not answer within this time is as good as away: probes wait about as long."""


class Readiness:
    def __init__(
        self, ask: Callable[[], Awaitable[object]], clock: Clock, patience_seconds: float = PATIENCE_SECONDS
    ) -> None:
        """``ask`` returns when the database answers and raises :class:`RookeryError` if it does not."""
        self._ask = ask
        self._patience = patience_seconds
        self._clock = clock
        self._lock = asyncio.Lock()
        self._asked: asyncio.Future[object] | None = None
        """The question under way, which outlives the patience of whoever asked."""
        self._problem = ""
        self._until = float("-inf")

    async def problem(self) -> str:
        """Why the service is not ready; empty if it is."""
        async with self._lock:  # one question at a time, whose answer is everybody's
            if self._clock.monotonic() >= self._until:
                self._problem = await self._find()
                self._until = self._clock.monotonic() + KEPT_SECONDS
            return self._problem

    async def _find(self) -> str:
        asked = self._asked = self._asked or asyncio.ensure_future(self._ask())
        await asyncio.wait([asked], timeout=self._patience)
        if not asked.done():
            return "the database does not answer in time"
        self._asked = None
        error = asked.exception()
        if error is not None and not isinstance(error, RookeryError):
            raise error
        return "" if error is None else str(error)
