"""Which of a sampler's requests are over, as a stream that its client follows with one question at a time.

* Every request that is over is told at least once, in the order in which they ended, whenever the client began to ask.
* Events up to the cursor that a question names are done with. One that this process did not hand out (it is 0, or the
  service was started again) is answered from the beginning, as far as results can still be fetched.
* Nothing is kept for a client that does not ask, or has not asked for long: it is read again from the database.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rookery.aio import Clock
from rookery.controller.sessions.futures import Future, Futures
from rookery.controller.sessions.operations import OperationFailed, outcomes
from rookery.storage.store import Store

CLONE_REQUESTS = 1_000_000_000
"""A client numbers its sampler's requests from 0; a copy of the client, from its own multiple of this."""

_CURSORS_PER_MS = 20
"""A feed's cursors begin at its first millisecond, shifted left by this: no earlier feed of the target, of this process
or another, can have come so far."""


@dataclass(frozen=True)
class Completion:
    """A request that is over. ``size``: its result's bytes, about."""

    request: str
    failed: bool
    size: int


@dataclass(eq=False)
class _SamplerStream:
    """``told``: the cursor before the first of ``events``."""

    base: int
    told: int
    asked: float
    events: deque[Completion] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, completion: Completion) -> None:
        self.events.append(completion)
        self.changed.set()

    def done_with(self, cursor: int) -> None:
        if self.base <= cursor <= self.told + len(self.events):
            while self.told < cursor:
                self.events.popleft()
                self.told += 1


class CompletionStream:
    def __init__(self, futures: Futures, store: Store, clock: Clock) -> None:
        self._futures = futures
        self._store = store
        self._clock = clock
        self._feeds: dict[tuple[str, int], _SamplerStream] = {}
        futures.on_told(self._ended)

    def __len__(self) -> int:
        """Feeds in memory."""
        return len(self._feeds)

    async def poll(
        self, tenant: str, sampler: str, clone: int, cursor: int, seconds: float
    ) -> tuple[Sequence[Completion], int]:
        """What ended after ``cursor``, at once or within ``seconds``, and the cursor to go on with. ``sampler`` is the
        tenant's."""
        feed = self._feeds.get((sampler, clone)) or await self._open(tenant, sampler, clone)
        feed.asked = self._clock.monotonic()
        feed.done_with(cursor)
        if not feed.events and seconds > 0:
            feed.changed.clear()
            try:
                async with asyncio.timeout(seconds):
                    await feed.changed.wait()
            except TimeoutError:
                pass  # nothing has ended: the answer says so
        return list(feed.events), feed.told + len(feed.events)

    def sweep(self, idle_seconds: float) -> None:
        """Forget feeds that nobody has asked for so long."""
        now = self._clock.monotonic()
        self._feeds = {key: feed for key, feed in self._feeds.items() if now - feed.asked <= idle_seconds}

    async def _open(self, tenant: str, sampler: str, clone: int) -> _SamplerStream:
        base = int(self._clock.time() * 1000) << _CURSORS_PER_MS
        feed = self._feeds[sampler, clone] = _SamplerStream(base, base, self._clock.monotonic())
        first = clone * CLONE_REQUESTS
        rows = await self._store.ended_samples(tenant, sampler, first, first + CLONE_REQUESTS)
        here = {completion.request for completion in feed.events}  # they ended while the others were read
        for row in rows:
            assert row.outcome is not None
            if row.id not in here:
                failed = isinstance(outcomes.decode(row.outcome), OperationFailed)
                feed.add(Completion(row.id, failed, len(row.outcome)))
        return feed

    def _ended(self, future: Future) -> None:
        sampler = future.id.rpartition("/")[0]
        feed = self._feeds.get((sampler, future.seq // CLONE_REQUESTS))
        if feed is not None:
            feed.add(Completion(future.id, isinstance(future.outcome, OperationFailed), future.size))
