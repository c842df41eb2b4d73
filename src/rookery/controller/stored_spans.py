"""Spans in the database: the timeline of a run stays after a restart, as long as its episodes.

* Every few seconds the spans that ended since are added to the row of their job and hour, off the event loop. A row has
  at most :data:`HOUR_SPANS`: of more, neighbours become one. A killed service forgets those of the last seconds.
* A picture of earlier times is made of stored spans, one of later times of those in memory (``SpanRing.since``).
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from rookery.clock import Clock
from rookery.errors import RookeryError
from rookery.storage.models import SpanRow
from rookery.storage.repositories.spans import (
    NEWEST_ROWS,
    SpanHour,
    hours_between,
    oldest_span,
    save_spans,
    span_rows,
)
from rookery.storage.store import Store, Writer
from rookery.telemetry.spans import SpanRing, TraceSpan, merged, packed, picture, unpacked

log = logging.getLogger("rookery.controller")

SAVE_SECONDS = 5.0
"""The longest part of its timeline that a killed service loses. Storing a full hour takes milliseconds of a thread."""

HOUR_SPANS = 1024
"""Of a job and an hour: one in 3.5 s, some 20 kB. An hour is a picture's width, and shows more than that nowhere."""

READ_SPANS = 1 << 15
"""Of one picture: half of what the ring holds. Of more, neighbours become one."""

MOST_READ = 16 * READ_SPANS
"""Of which those of one picture are made: three weeks of a busy run, in a second of a thread."""

HOUR = 3600.0

Key = tuple[str, str, int]


class StoredSpans:
    def __init__(
        self,
        store: Store,
        ring: SpanRing,
        clock: Clock,
        threads: Writer,
        most_bytes: int,
        served: Callable[[], Iterable[TraceSpan]],
    ) -> None:
        """``served()``: for how long each worker has served until now. Beyond ``most_bytes`` the oldest rows go."""
        self._store = store
        self._ring = ring
        self._clock = clock
        self._threads = threads
        self._most_bytes = most_bytes
        self._workers_served = served
        self._saving = asyncio.Lock()
        self._saved_at = clock.time()
        self._failed = False

    async def watch(self) -> None:
        """Store spans every few seconds; until cancelled."""
        while True:
            await self._clock.sleep(SAVE_SECONDS)
            await asyncio.shield(self.save())  # else spans that were taken could be lost

    async def save(self) -> None:
        """Store the spans that ended since the last call, and for how long workers have served. Where the database does
        not take them, the next call tries again."""
        ring, store = self._ring, self._store
        async with self._saving:
            taken = list(ring.unsaved)
            ring.unsaved.clear()
            now = self._clock.time()
            by_key: defaultdict[Key, list[TraceSpan]] = defaultdict(list)
            for span in [*taken, *(self._served() if taken else ())]:
                by_key[span.tenant, span.job if span.tenant else "", int(span.end // HOUR)].append(span)
            if not by_key:
                return
            try:
                found = await store.read(span_rows, list(by_key))
                rows = await self._threads(joined_rows, by_key, found)
                await store.write(save_spans, rows, self._most_bytes)
            except Exception as error:  # nothing else depends on it
                later = list(ring.unsaved)
                ring.unsaved.clear()
                ring.unsaved.extend([*taken, *later])
                if not self._failed:
                    log.warning(
                        "the timeline is not stored meanwhile: %s", error, exc_info=not isinstance(error, RookeryError)
                    )
                self._failed = True
            else:
                self._failed, self._saved_at = False, now

    def _served(self) -> Iterable[TraceSpan]:
        """The times for which workers have served since the last call: after a crash, nothing else says so."""
        for span in self._workers_served():
            if span.end > (start := max(span.start, self._saved_at)):
                yield msgspec.structs.replace(span, start=start)

    async def between(
        self, start: float, end: float, first: str = "", tenant: str | None = None
    ) -> tuple[list[TraceSpan], float]:
        """Stored spans between two times that are not in the ring any more, at most :data:`READ_SPANS`; and the time
        from which on none is left out. Those of the job ``first`` are read before those of ``tenant``, these before
        others, each the newest hours first, until they are made of :data:`MOST_READ`."""
        ring, store, threads = self._ring, self._store, self._threads
        chosen, total, cut = list[SpanHour](), 0, None
        hours = await store.read(hours_between, start, end, first, tenant)
        for hour in hours:
            if hour.begins >= ring.since(hour.tenant):
                continue
            if total + hour.count > MOST_READ:
                cut = hour
                break
            total += hour.count
            chosen.append(hour)
        else:
            cut = hours[-1] if len(hours) == NEWEST_ROWS else None
        own = cut is not None and (cut.job == first if first else tenant in (None, cut.tenant))
        complete = (cut.hour + 1) * HOUR if cut is not None and own else start
        found = list[TraceSpan]()
        for part in _parts(chosen):
            rows = await store.read(span_rows, [hour.key for hour in part])
            since = {row.tenant: ring.since(row.tenant) for row in rows}
            count = sum(hour.count for hour in part)
            found += await threads(_read, rows, since, count if total <= READ_SPANS else count * READ_SPANS // total)
        return found, complete

    async def oldest(self, tenant: str | None, jobs: Sequence[str]) -> float | None:
        """When the first stored span of ``jobs``, of a tenant, or of all tenants began."""
        return await self._store.read(oldest_span, tenant, jobs)


def joined_rows(new: dict[Key, list[TraceSpan]], found: Sequence[SpanRow]) -> list[SpanRow]:
    """The rows of these spans, with those that are stored already."""
    known = {(row.tenant, row.job, row.hour): row.spans for row in found}
    rows = []
    for (tenant, job, hour), spans in new.items():
        spans = unpacked(known.get((tenant, job, hour), b""), tenant, job) + spans
        spans = merged(spans, 0.0) if not tenant else spans  # pieces of the time for which a worker serves
        kept, _ = picture(spans, 0.0, HOUR_SPANS)
        begins = min(span.start for span in kept)
        rows.append(SpanRow(tenant=tenant, job=job, hour=hour, begins=begins, count=len(kept), spans=packed(kept)))
    return rows


def _parts(hours: Sequence[SpanHour]) -> Iterator[list[SpanHour]]:
    """Hours that are read together: of at most :data:`READ_SPANS`."""
    part, count = list[SpanHour](), 0
    for hour in hours:
        if part and count + hour.count > READ_SPANS:
            yield part
            part, count = [], 0
        part.append(hour)
        count += hour.count
    if part:
        yield part


def _read(rows: Sequence[SpanRow], since: dict[str, float], most: int) -> list[TraceSpan]:
    """The spans of rows that began before the ring's first, at most so many: neighbours become one. What several stand
    for ends where the ring begins."""
    found = []
    for row in rows:
        until = since[row.tenant]
        for span in unpacked(row.spans, row.tenant, row.job):
            if span.end <= until:
                found.append(span)
            elif span.start < until and span.count > 1:
                found.append(msgspec.structs.replace(span, end=until))
    return found if len(found) <= most else picture(found, 0.0, max(1, most))[0]
