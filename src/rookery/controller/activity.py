"""The timeline of workers, environments and the trainer, and its form as a trace in Chrome's format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from rookery.controller.stored_spans import StoredSpans
from rookery.storage.store import Writer
from rookery.telemetry.spans import TraceSpan, picture, timeline
from rookery.telemetry.trace import chrome_trace

MOST_SPANS = 5000
"""Of one picture: more than a screen has columns, and less than a megabyte."""


class WorkTimeline(msgspec.Struct):
    """The spans of a time, as few as its picture needs. Times are Unix seconds."""

    start: float
    end: float
    resolution: float
    """Spans of one lane that are at most so many seconds apart are one."""
    oldest: float
    """The end of the oldest span that is kept; earlier times are empty because nothing of them is kept."""
    complete_from: float
    """Spans of earlier times are left out: there are too many."""
    spans: list[TraceSpan]


@dataclass(frozen=True)
class Reader:
    """Whose work a reader sees by name: that of jobs or sessions and policies, of a tenant, or everyone's."""

    tenant: str | None = None
    """None with no ``jobs``: everyone's."""
    jobs: Sequence[str] = ()
    policies: Collection[str] = ()

    @property
    def first(self) -> str:
        """The job whose stored spans are read before those of others."""
        return self.jobs[0] if self.jobs else ""

    @property
    def own(self) -> Callable[[TraceSpan], bool] | None:
        """Whether a span is one of those; None for everyone's."""
        if self.jobs:
            return lambda span: span.job in self.jobs or span.policy in self.policies
        if self.tenant is not None:
            return lambda span: span.tenant == self.tenant
        return None


class ActivityQueries:
    def __init__(
        self,
        stored: StoredSpans,
        ended: Callable[[], list[TraceSpan]],
        open_spans: Callable[[], Iterable[TraceSpan]],
        payer_of: Callable[[str], tuple[str, str]],
        threads: Writer,
    ) -> None:
        """``ended()``: a copy of the spans that have ended since the service started; ``open_spans()``: the open ones
        until now; ``payer_of(policy)``: the tenant and the job that pay for the policy's work."""
        self._stored = stored
        self._ended = ended
        self._open_spans = open_spans
        self._payer_of = payer_of
        self._threads = threads

    def _newest(self) -> list[TraceSpan]:
        """The spans that have ended since the service started, and the open ones until now."""
        found = self._ended()
        for span in self._open_spans():
            tenant, job = self._payer_of(span.policy) if span.policy and not span.job else ("", "")
            found.append(msgspec.structs.replace(span, tenant=span.tenant or tenant, job=job) if tenant else span)
        return found

    async def timeline(self, reader: Reader, start: float, end: float, columns: int) -> bytes:
        """A :class:`WorkTimeline` as JSON for a picture that is ``columns`` pixels wide, as ``reader`` sees it."""
        newest, (stored, complete) = self._newest(), await self._between(reader, start, end)
        oldest = await self._stored.oldest(reader.tenant, reader.jobs)
        return await self._threads(_timeline, stored + newest, reader, start, end, columns, oldest, complete)

    async def trace(self, reader: Reader, start: float, end: float) -> bytes:
        """The timeline with every span, as a JSON file that Perfetto opens."""
        newest, (stored, complete) = self._newest(), await self._between(reader, start, end)
        return await self._threads(_trace, stored + newest, reader, start, end, complete)

    async def _between(self, reader: Reader, start: float, end: float) -> tuple[list[TraceSpan], float]:
        return await self._stored.between(start, end, reader.first, reader.tenant)


def _timeline(
    spans: list[TraceSpan],
    reader: Reader,
    start: float,
    end: float,
    columns: int,
    stored: float | None,
    complete: float,
) -> bytes:
    own = reader.own
    ended = [span for span in spans if span.kind != "connected"]
    mine = ended if own is None else [span for span in ended if own(span)] or ended
    oldest = min((span.end for span in mine), default=end)
    oldest = oldest if stored is None else min(oldest, stored)
    shown, resolution = picture(timeline(spans, reader.own, start, end), (end - start) / columns, MOST_SPANS)
    return msgspec.json.encode(WorkTimeline(start, end, resolution, oldest, complete, shown))


def _trace(spans: list[TraceSpan], reader: Reader, start: float, end: float, complete: float) -> bytes:
    about = {"complete_from": complete} if complete > start else None
    return msgspec.json.encode(chrome_trace(timeline(spans, reader.own, start, end), about))
