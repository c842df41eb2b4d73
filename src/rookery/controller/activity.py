"""What workers, environments and the trainer did: the timeline, and the same as a trace in Chrome's format."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import chain

import msgspec

from rookery.controller.context import ControllerContext
from rookery.telemetry.spans import TraceSpan, picture, timeline
from rookery.telemetry.trace import chrome_trace

MOST_SPANS = 5000
"""Of one picture: more than a screen has columns, and less than a megabyte."""

Own = Callable[[TraceSpan], bool]


class WorkTimeline(msgspec.Struct):
    """The spans of a time, as few as its picture needs. Times are Unix seconds."""

    start: float
    end: float
    resolution: float
    """Spans of one lane that are at most so many seconds apart are one."""
    oldest: float
    """The end of the oldest span that is kept; earlier times are empty because nothing of them is kept."""
    spans: list[TraceSpan]


def of_tenant(tenant: str) -> Own:
    """Whether a span is the tenant's."""
    return lambda span: span.tenant == tenant


def of_jobs(jobs: Collection[str], policies: Collection[str] = ()) -> Own:
    """Whether a span is that of one of the jobs, or of their policies."""
    return lambda span: span.job in jobs or span.policy in policies


class ActivityQueries:
    def __init__(self, context: ControllerContext) -> None:
        self._context = context

    def _spans(self) -> list[TraceSpan]:
        """Those that have ended, and those that have not, until now."""
        rooms = self._context.rooms
        open_spans = chain(rooms.rollouts.open_spans(), rooms.training.open_spans(), rooms.fleet.open_spans())
        found = self._context.records.spans.snapshot()
        for span in open_spans:
            tenant, job = rooms.usage.payer_of(span.policy) if span.policy and not span.job else ("", "")
            found.append(msgspec.structs.replace(span, tenant=span.tenant or tenant, job=job) if tenant else span)
        return found

    async def timeline(self, own: Own | None, start: float, end: float, columns: int) -> bytes:
        """A :class:`WorkTimeline` as JSON for a picture that is ``columns`` pixels wide, as a reader sees it whose
        work is what ``own`` holds for; None sees everything."""
        return await self._context.threads(_timeline, self._spans(), own, start, end, columns)

    async def trace(self, own: Own | None, start: float, end: float) -> bytes:
        """The same with every span, as a JSON file that Perfetto opens."""
        return await self._context.threads(_trace, self._spans(), own, start, end)


def _timeline(spans: list[TraceSpan], own: Own | None, start: float, end: float, columns: int) -> bytes:
    oldest = min((span.end for span in spans if span.kind != "connected"), default=end)
    shown, resolution = picture(timeline(spans, own, start, end), (end - start) / columns, MOST_SPANS)
    return msgspec.json.encode(WorkTimeline(start, end, resolution, oldest, shown))


def _trace(spans: list[TraceSpan], own: Own | None, start: float, end: float) -> bytes:
    return msgspec.json.encode(chrome_trace(timeline(spans, own, start, end)))
