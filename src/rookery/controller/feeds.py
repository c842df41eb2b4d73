"""The followers of jobs: one task for each job that is followed reads the database, and all followers read from it.

A follower that is behind, or that begins with earlier steps, reads pages of the database until it is among the rows
that the task holds. One that reads slowly holds nothing but its place.

A job that is rolled back takes the same steps again. The row that was read last is read again with the later ones:
where another one is stored, or none, each follower learns from which step on its rows are replaced. Of several policies
one goes back alone: the later rows of the others stay, and are marked as ``renewed``.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from rookery.aio import Signal, cancel_all
from rookery.controller.views import JobView
from rookery.storage.models import FINAL_JOB_STATES
from rookery.turns import outlive_request

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


class FeedJob:
    """The job at a change, as its followers send it: as objects, a spec may take twenty times its text, and a tenant
    may follow a thousand jobs. Made in a thread: a spec may have megabytes."""

    def __init__(self, view: JobView) -> None:
        self.shown = (view.state, view.reason)
        self.ended = view.state in FINAL_JOB_STATES
        self.encoded = view.model_dump_json().encode()


FeedEvent = (
    tuple[Literal["job", "end"], FeedJob]
    | tuple[Literal["metrics"], FeedRow]
    | tuple[Literal["rollback"], int]
    | tuple[Literal["quiet"], None]
)
"""The job's state or reason changed; a step was committed; the rows of later steps than this one are deleted; the job
has ended; nothing happened for a while."""

Show = Callable[[str, str], Awaitable[JobView]]
Page = Callable[[str, str, int, int], Awaitable[list[dict[str, Any]]]]


class JobFeed:
    """The changes of one job, read once for all of its followers."""

    def __init__(self, signal: Signal) -> None:
        self.signal = signal
        self.changed = Signal()
        self.job: FeedJob | None = None
        self.rows: deque[FeedRow] = deque()
        self.covered = -1
        """All rows of later steps than this one, up to ``last``, are among ``rows``."""
        self.last = -1
        self.rollbacks: list[tuple[int, int]] = []
        """Of each the last step whose row stayed, and the last one that was known before."""
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

    def begin(self, rows: list[dict[str, Any]]) -> None:
        """Hold these, the newest ones of all."""
        self.rows.clear()
        self.covered = self.last = rows[0]["step"] - 1 if rows else -1
        self.add(rows)

    def same(self, rows: list[dict[str, Any]]) -> int:
        """The number of the first rows held that are the stored ``rows``, which may have got figures since."""
        pairs = zip((_identity(row.metrics) for row in self.rows), map(_identity, rows), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _identity(row: dict[str, Any]) -> tuple[Any, ...]:
    """A step that is taken again is taken later, in a version of a later number."""
    return row["step"], stored_at(row, None), row.get("version"), row.get("policy")


def stored_at(row: dict[str, Any], unknown: float | None) -> float | None:
    """When the row got its place: the step was taken then, or others before it were deleted."""
    found: float | None = row.get("renewed", row.get("time", unknown))
    return found


class JobFeeds:
    def __init__(
        self,
        show: Show,
        page: Page,
        last_step: Callable[[str, str], Awaitable[int]],
        signal: Callable[[str], Signal],
        encoders: Callable[..., Awaitable[Any]],
    ) -> None:
        """``page(tenant, job, after, count)``: the first rows of later steps; ``signal(job)`` tells of changes;
        ``encoders(call, *arguments)`` runs a call in a thread, in the tenant's turn."""
        self._show = show
        self._page = page
        self._last_step = last_step
        self._signal = signal
        self._encoders = encoders
        self._feeds: dict[tuple[str, str], JobFeed] = {}

    async def follow(
        self, tenant: str, job: str, after: int = -1, quiet_seconds: float | None = None, time: float | None = None
    ) -> AsyncGenerator[FeedEvent, None]:
        """The job's state, the rows of steps later than ``after`` as they are committed, and its end; of a rollback the
        last step whose row stayed, then the later ones again. Where nothing happens for ``quiet_seconds``, that is an
        event too. ``time``: of :func:`stored_at` for the row of step ``after``, where a follower has it. Raises
        :class:`NotFound`."""
        shown: tuple[str, str] | None = None
        has_rows = time is not None
        async with self._feed(tenant, job) as feed:
            seen = len(feed.rollbacks)
            while True:
                change, at_change = feed.changed.next, feed.job
                if feed.error is not None:
                    raise feed.error
                if at_change is not None and at_change.shown != shown:
                    shown = at_change.shown
                    yield "job", at_change
                kept = after
                if time is not None:
                    kept, time = await self._last_kept(tenant, job, after, time), None
                while seen < len(feed.rollbacks):
                    (step, last), seen = feed.rollbacks[seen], seen + 1
                    if has_rows or after <= last:
                        kept = min(kept, step)
                if kept < after:
                    after = kept
                    yield "rollback", kept
                while after < feed.last and seen == len(feed.rollbacks):
                    if (row := feed.after(after)) is not None:
                        after, has_rows = row.step, True
                        yield "metrics", row
                        continue
                    page = await self._page(tenant, job, after, PAGE)
                    if not page:  # rolled back since
                        break
                    for found in page:
                        after, has_rows = found["step"], True
                        yield "metrics", FeedRow(after, found)
                if at_change is not None and at_change.ended and seen == len(feed.rollbacks):
                    yield "end", at_change
                    return
                try:
                    async with asyncio.timeout(quiet_seconds):
                        await change.wait()
                except TimeoutError:
                    yield "quiet", None

    async def _last_kept(self, tenant: str, job: str, after: int, time: float) -> int:
        """The last step up to ``after`` with the row that a follower has, whose row of step ``after`` is of this
        ``time``; -1 where no near one is left."""
        for count in (1, ROWS_KEPT):
            rows = await self._page(tenant, job, max(after - count, -1), count)
            kept = takewhile(lambda row: row["step"] <= after and (stored_at(row, time) or 0.0) <= time, rows)
            last = max((row["step"] for row in kept), default=-1)
            if last == after:
                break
        return int(last)

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
        outlive_request(tenant)
        try:
            await self._begin(feed, tenant, job)
            while True:
                change = feed.signal.next
                view = await self._show(tenant, job)
                await self._read_rows(feed, tenant, job)
                shown = feed.job = await self._encoders(FeedJob, view)
                feed.changed.notify()
                if shown.ended:
                    break
                await change.wait()
        except Exception as error:  # each follower raises it
            feed.error = error
            feed.changed.notify()
        if self._feeds.get((tenant, job)) is feed:
            del self._feeds[tenant, job]  # a later follower reads again

    async def _begin(self, feed: JobFeed, tenant: str, job: str) -> None:
        last = await self._last_step(tenant, job)
        feed.begin(await self._page(tenant, job, max(last - ROWS_KEPT, -1), ROWS_KEPT))

    async def _read_rows(self, feed: JobFeed, tenant: str, job: str) -> None:
        """Read the rows since the last one that is known, and that one again."""
        while True:
            rows = await self._page(tenant, job, max(feed.last - 1, -1), PAGE)
            if feed.rows and (not rows or _identity(rows[0]) != _identity(feed.rows[-1].metrics)):
                known = feed.last
                stored = await self._page(tenant, job, feed.covered, PAGE)
                if same := feed.same(stored):
                    feed.begin(stored[:same])
                    feed.rollbacks.append((feed.last, known))
                else:
                    await self._begin(feed, tenant, job)
                    feed.rollbacks.append((-1, known))
                continue
            feed.add([row for row in rows if row["step"] > feed.last])
            if len(rows) < PAGE:
                return
