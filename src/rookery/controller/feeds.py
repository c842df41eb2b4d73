"""The followers of jobs: one task for each job that is followed reads the database, and all followers read from it.

A follower that is behind, or that begins with earlier steps, reads pages of the database until it is among the rows
that the task holds. One that reads slowly holds nothing but its place.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

from rookery.aio import Signal, cancel_all
from rookery.controller.views import JobView
from rookery.storage.models import FINAL_JOB_STATES
from rookery.turns import TENANT

ROWS_KEPT = 256
"""The newest rows of a job that its task holds for followers."""

PAGE = 1000
"""Rows of one read of the database."""


@dataclass
class FeedRow:
    """One optimizer step."""

    step: int
    metrics: dict[str, Any]
    encoded: bytes = b""
    """The row as its followers send it, made by the first one."""


FeedEvent = tuple[Literal["job", "end"], JobView] | tuple[Literal["metrics"], FeedRow] | tuple[Literal["quiet"], None]
"""The job's state or reason changed; a step was committed; the job has ended; nothing happened for a while."""

Show = Callable[[str, str], Awaitable[JobView]]
Page = Callable[[str, str, int, int], Awaitable[list[dict[str, Any]]]]


class JobFeed:
    """The changes of one job, read once for all of its followers."""

    def __init__(self, signal: Signal) -> None:
        self.signal = signal
        self.changed = Signal()
        self.view: JobView | None = None
        self.rows: deque[FeedRow] = deque()
        self.covered = -1
        """All rows of later steps than this one, up to ``last``, are among ``rows``."""
        self.last = -1
        self.ended = False
        self.error: Exception | None = None
        self.readers = 0
        self.task: asyncio.Task[None] | None = None

    def after(self, step: int) -> FeedRow | None:
        """The first row of a later step, where it is held."""
        if step < self.covered:
            return None
        index = bisect_right(self.rows, step, key=lambda row: row.step)
        return self.rows[index] if index < len(self.rows) else None

    def add(self, rows: list[dict[str, Any]]) -> None:
        self.rows.extend(FeedRow(row["step"], row) for row in rows)
        while len(self.rows) > ROWS_KEPT:
            self.covered = self.rows.popleft().step
        self.last = self.rows[-1].step if self.rows else self.last


class JobFeeds:
    def __init__(
        self,
        show: Show,
        page: Page,
        last_step: Callable[[str, str], Awaitable[int]],
        signal: Callable[[str], Signal],
    ) -> None:
        """``page(tenant, job, after, count)``: the first rows of later steps; ``signal(job)`` tells of changes."""
        self._show = show
        self._page = page
        self._last_step = last_step
        self._signal = signal
        self._feeds: dict[tuple[str, str], JobFeed] = {}

    async def follow(
        self, tenant: str, job: str, after: int = -1, quiet_seconds: float | None = None
    ) -> AsyncGenerator[FeedEvent, None]:
        """The job's state, the rows of steps later than ``after`` as they are committed, and its end. Where nothing
        happens for ``quiet_seconds``, that is an event too. Raises :class:`NotFound`."""
        shown: tuple[str, str] | None = None
        async with self._feed(tenant, job) as feed:
            while True:
                change, ended, view = feed.changed.next, feed.ended, feed.view
                if feed.error is not None:
                    raise feed.error
                if view is not None and (view.state, view.reason) != shown:
                    shown = (view.state, view.reason)
                    yield "job", view
                while after < feed.last:
                    if (row := feed.after(after)) is not None:
                        after = row.step
                        yield "metrics", row
                        continue
                    page = await self._page(tenant, job, after, PAGE)
                    if not page:  # rolled back since
                        break
                    for found in page:
                        after = found["step"]
                        yield "metrics", FeedRow(after, found)
                if ended and view is not None:
                    yield "end", view
                    return
                try:
                    async with asyncio.timeout(quiet_seconds):
                        await change.wait()
                except TimeoutError:
                    yield "quiet", None

    @asynccontextmanager
    async def _feed(self, tenant: str, job: str) -> AsyncIterator[JobFeed]:
        feed = self._feeds.get((tenant, job))
        if feed is None:
            feed = self._feeds[tenant, job] = JobFeed(self._signal(job))
            feed.task = asyncio.create_task(self._read(feed, tenant, job), name=f"feed of {job}")
        feed.readers += 1
        try:
            yield feed
        finally:
            feed.readers -= 1
            if not feed.readers:
                if self._feeds.get((tenant, job)) is feed:
                    del self._feeds[tenant, job]
                assert feed.task is not None
                with suppress(Exception):
                    await cancel_all(feed.task)

    async def _read(self, feed: JobFeed, tenant: str, job: str) -> None:
        """Read the job at each change until it has ended."""
        TENANT.set(tenant)
        try:
            feed.last = feed.covered = await self._last_step(tenant, job)
            while True:
                change = feed.signal.next
                view = await self._show(tenant, job)
                while rows := await self._page(tenant, job, feed.last, PAGE):
                    feed.add(rows)
                feed.view, feed.ended = view, view.state in FINAL_JOB_STATES
                feed.changed.notify()
                if feed.ended:
                    break
                await change.wait()
        except Exception as error:  # each follower raises it
            feed.error = error
            feed.changed.notify()
        if self._feeds.get((tenant, job)) is feed:
            del self._feeds[tenant, job]  # a later follower reads again
