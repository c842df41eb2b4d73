"""The timeline of the workers: the newest events of each kind, as plain values that name no object of this process.

Events are numbered from the Unix milliseconds of the service's start on, so that numbers of a later process are larger
and a reader that continues after a restart misses and repeats nothing that is kept.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable
from heapq import merge
from itertools import islice, takewhile

import msgspec

from rookery.clock import Clock
from rookery.controller.fleet.events import WorkerEvent
from rookery.controller.views import WorkerEventView

EVENTS_KEPT = 1000
"""Of each kind, so that frequent ones do not push out the loss of a worker: hours of a fleet's life, and at about a
kilobyte each some megabytes in all."""

MOST_TEXT = 500
"""Characters of an event's line: a worker is a stranger."""


class TimelineRow(msgspec.Struct, frozen=True, gc=False):
    """One event as plain values, at which the garbage collector need not look: thousands are kept."""

    number: int
    time: float
    event: str
    worker: str
    model: str
    tenant: str
    job: str
    policy: str
    text: str


class WorkerTimeline:
    def __init__(self, clock: Clock) -> None:
        self._next = int(clock.time() * 1000)
        self._kinds: defaultdict[str, deque[TimelineRow]] = defaultdict(lambda: deque(maxlen=EVENTS_KEPT))

    def add(self, event: WorkerEvent, tenant: str = "", job: str = "") -> None:
        """Keep the event. ``tenant`` and ``job`` are those of its policy, where the event does not name them."""
        worker = event.worker
        self._next += 1
        self._kinds[event.kind].append(
            TimelineRow(
                self._next, event.time, event.kind, worker.name, worker.hello.model, event.tenant or tenant,
                event.job or job, event.policy, event.text[:MOST_TEXT],
            )
        )  # fmt: skip

    def after(self, number: int, count: int, kinds: Collection[str] = ()) -> list[WorkerEventView]:
        """At most ``count`` events with larger numbers, oldest first; with ``kinds`` of these alone. A number that is
        still to come is from an earlier process, whose clock was ahead of this one's: all events are newer."""
        number = number if number <= self._next else 0
        newer = []
        for rows in self._of(kinds):
            found = list(takewhile(lambda row: row.number > number, reversed(rows)))
            newer.append(found[::-1])
        return _views(islice(merge(*newer, key=_number), count))

    def newest(self, count: int, kinds: Collection[str] = ()) -> list[WorkerEventView]:
        """At most ``count`` events, the newest, oldest first; with ``kinds`` of these alone."""
        backwards = merge(*map(reversed, self._of(kinds)), key=_number, reverse=True)
        return _views(islice(backwards, count))[::-1]

    def _of(self, kinds: Collection[str]) -> list[deque[TimelineRow]]:
        return [rows for kind, rows in self._kinds.items() if not kinds or kind in kinds]


def _number(row: TimelineRow) -> int:
    return row.number


def _views(rows: Iterable[TimelineRow]) -> list[WorkerEventView]:
    return [WorkerEventView.model_validate(row) for row in rows]
