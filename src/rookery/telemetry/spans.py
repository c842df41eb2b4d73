"""Spans: what workers, environments and the trainer did and when, for the timeline and for a trace.

A span has a kind of :data:`KINDS`; one of :data:`MARKS` is a moment. :class:`SpanRing` keeps the newest; those of an
hour are stored as :func:`packed` bytes. The functions below the ring are pure: what a tenant may see
(:func:`visible`), when workers were idle (:func:`idle`), and as few spans as a picture of some width needs
(:func:`merged`). Times are Unix seconds.
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

import msgspec

WORK = ("prefill", "decode", "train", "transfer")
"""Kinds of what a worker does."""

KINDS = ("waiting", *WORK, "environment", "busy", "idle", "connected")
"""``waiting``: a request waits for a worker, an operation in its worker; ``prefill``: from the assignment to a worker
to the first token; ``environment``: a call of an environment; ``transfer``: a version is pulled or uploaded; ``busy``:
work of other tenants; ``idle``: a worker serves and has no work; ``connected``: it serves."""

MARKS = ("joined", "preemption", "migration", "switch", "commit")
"""Kinds of moments: a worker serves from now on; it was lost or drains; a request or an operation moved to another
worker; a running request continues with a newer version; a version became durable."""

OF_WORKERS = ("idle", "connected", "joined", "preemption")
"""Kinds that every reader sees: they are of workers, and of no tenant's work."""

SPANS_KEPT = 1 << 16
"""Of all tenants: at about 300 bytes each 20 MB, and half an hour of 10 requests per second or hours of a few."""

UNSAVED = SPANS_KEPT >> 2
"""Spans that wait to be stored; where the database takes none for so long, the oldest are not stored."""

TRIMMED = SPANS_KEPT >> 8
"""Spans that are dropped at once from the tenant with the most, so that it is searched for rarely."""

BUSY_RESOLUTION = 1.0
"""Seconds up to which busy times of others are joined: the lengths of their texts cannot be read from them."""


class TraceSpan(msgspec.Struct, frozen=True, gc=False):
    """One piece of work, or a moment. The garbage collector need not look at it: thousands are kept."""

    kind: str
    start: float
    end: float
    worker: str = ""
    """Empty for what no worker does."""
    tenant: str = ""
    job: str = ""
    """The job, or the session of a client; empty where it is no job's. Likewise ``tenant`` and ``policy``."""
    policy: str = ""
    text: str = ""
    count: int = 1
    """The number of spans that it stands for."""
    covered: float = 0.0
    """Seconds in which one of several ran; 0 where it stands for itself."""


class SpanRing:
    """The newest spans. Where there are too many, the tenant with the most loses its oldest: a busy tenant does not
    push out the work of others. ``begun``: when the ring was made; spans that ended before are not in it."""

    def __init__(self, kept: int = SPANS_KEPT, trimmed: int = TRIMMED, begun: float = 0.0) -> None:
        self._kept, self._trimmed = kept, trimmed
        self._spans: defaultdict[str, deque[TraceSpan]] = defaultdict(deque)
        self._count = 0
        self._begun = begun
        self._dropped: dict[str, float] = {}
        """By tenant: the end of the newest span that was dropped."""
        self.unsaved: deque[TraceSpan] = deque(maxlen=UNSAVED)
        """Spans that are not stored yet (:mod:`rookery.controller.stored_spans` takes them)."""

    def __len__(self) -> int:
        return self._count

    def add(self, span: TraceSpan) -> None:
        self._spans[span.tenant].append(span)
        self.unsaved.append(span)
        self._count += 1
        if self._count > self._kept:
            most = max(self._spans, key=lambda tenant: len(self._spans[tenant]))
            spans = self._spans[most]
            for _ in range(min(self._trimmed, len(spans))):
                self._dropped[most] = max(self._dropped.get(most, 0.0), spans.popleft().end)
                self._count -= 1
            if not spans:
                del self._spans[most]

    def record(self, spans: Iterable[TraceSpan], tenant: str, job: str) -> None:
        """Add spans; ``tenant`` and ``job`` are those of their policy, where they do not name them."""
        for span in spans:
            if tenant and not span.job:
                span = msgspec.structs.replace(span, tenant=span.tenant or tenant, job=job)
            self.add(span)

    def snapshot(self) -> list[TraceSpan]:
        return list(chain.from_iterable(self._spans.values()))

    def since(self, tenant: str) -> float:
        """The time from which on the ring has all ended spans of a tenant."""
        return self._dropped.get(tenant, self._begun)


def within(spans: Iterable[TraceSpan], start: float, end: float) -> list[TraceSpan]:
    """The spans that overlap the time from ``start`` to ``end``."""
    return [span for span in spans if span.start <= end and span.end >= start]


def visible(spans: Iterable[TraceSpan], own: Callable[[TraceSpan], bool]) -> list[TraceSpan]:
    """The spans as a reader sees whose work is what ``own`` holds for. The work of others at workers is anonymous busy
    time, and their other spans are left out."""
    seen, others = [], []
    for span in spans:
        if own(span):
            seen.append(span)
        elif not span.tenant and span.kind in OF_WORKERS:  # a reason may name the work of others
            seen.append(msgspec.structs.replace(span, text=""))
        elif span.kind in WORK:
            start = span.start // BUSY_RESOLUTION * BUSY_RESOLUTION
            others.append(TraceSpan("busy", start, -(-span.end // BUSY_RESOLUTION) * BUSY_RESOLUTION, span.worker))
    return seen + [msgspec.structs.replace(one, count=1) for one in merged(others, 0.0)]


def idle(spans: Iterable[TraceSpan], start: float, end: float) -> list[TraceSpan]:
    """The times between ``start`` and ``end`` in which a worker was connected and did nothing."""
    connected: defaultdict[str, list[TraceSpan]] = defaultdict(list)
    work: defaultdict[str, list[TraceSpan]] = defaultdict(list)
    for span in spans:
        if span.kind == "connected":
            connected[span.worker].append(span)
        elif span.kind in (*WORK, "busy"):
            work[span.worker].append(span)
    found = []
    for worker, stays in connected.items():
        done = sorted(work[worker], key=lambda span: span.start)
        for stay in stays:
            last, until = max(start, stay.start), min(end, stay.end)
            for span in done:
                if span.start > last:
                    found.append(TraceSpan("idle", last, min(span.start, until), worker))
                last = max(last, span.end)
                if last >= until:
                    break
            found.append(TraceSpan("idle", last, until, worker))
    return [span for span in found if span.end > span.start]


def merged(spans: Iterable[TraceSpan], resolution: float) -> list[TraceSpan]:
    """The spans, where those of one lane (kind, worker, tenant, job, policy) that are at most ``resolution`` seconds
    apart are one, with their number. By start."""
    lanes: defaultdict[tuple[str, ...], list[TraceSpan]] = defaultdict(list)
    for span in spans:
        lanes[span.kind, span.worker, span.tenant, span.job, span.policy].append(span)
    found: list[TraceSpan] = []
    for lane in lanes.values():
        found += _joined(sorted(lane, key=lambda span: (span.start, span.end)), resolution)
    return sorted(found, key=lambda span: (span.start, span.end))


def _joined(lane: list[TraceSpan], resolution: float) -> Iterator[TraceSpan]:
    first, end, count, covered = lane[0], lane[0].end, lane[0].count, _covered(lane[0])
    for span in lane[1:]:
        if span.start - end <= resolution:
            later = 1.0 if span.start >= end else max(0.0, span.end - end) / (span.end - span.start or 1.0)
            covered += later * _covered(span)
            end, count = max(end, span.end), count + span.count
        else:
            yield _stands_for(first, end, count, covered)
            first, end, count, covered = span, span.end, span.count, _covered(span)
    yield _stands_for(first, end, count, covered)


def _covered(span: TraceSpan) -> float:
    return span.covered if span.count > 1 else span.end - span.start


def _stands_for(first: TraceSpan, end: float, count: int, covered: float) -> TraceSpan:
    if count == first.count:
        return first
    return msgspec.structs.replace(first, end=end, count=count, covered=min(covered, end - first.start), text="")


def picture(spans: Iterable[TraceSpan], resolution: float, most: int) -> tuple[list[TraceSpan], float]:
    """At most ``most`` spans, and the resolution that this took: ``resolution``, or a multiple of it. Where even one
    span a lane is too many, the longest are kept."""
    found = merged(spans, resolution) if resolution > 0 else list(spans)
    longest = max((span.end for span in found), default=0.0) - min((span.start for span in found), default=0.0)
    while len(found) > most and resolution < longest:
        resolution = max(0.001, 4 * resolution)
        found = merged(found, resolution)
    if len(found) > most:
        found = sorted(found, key=lambda span: span.start - span.end)[:most]
    return sorted(found, key=lambda span: (span.start, span.end)), resolution


def timeline(
    spans: Iterable[TraceSpan], own: Callable[[TraceSpan], bool] | None, start: float, end: float
) -> list[TraceSpan]:
    """The spans that overlap the time from ``start`` to ``end`` and the idle times of workers, by start. A reader sees
    the work for which ``own`` holds; None sees everything."""
    found = within(spans, start, end)
    if own is not None:
        found = visible(found, own)
    found += idle(found, start, end)  # after it: the times of others' work are not to be read from what is left
    return sorted(found, key=lambda span: (span.start, span.end))


class _Columns(msgspec.Struct, array_like=True):
    """Spans of one tenant and job, column by column, which compresses best. Times are microseconds since ``base``."""

    base: float
    kinds: list[str]
    starts: list[int]
    lengths: list[int]
    workers: list[str]
    policies: list[str]
    texts: list[str]
    counts: list[int]
    covered: list[int]


_columns_decoder = msgspec.msgpack.Decoder(_Columns)


def packed(spans: Sequence[TraceSpan]) -> bytes:
    """Spans of one tenant and job as bytes, without these two names. Times are kept to the microsecond."""
    base = min((span.start for span in spans), default=0.0)
    columns = _Columns(
        base,
        [span.kind for span in spans],
        [round(1e6 * (span.start - base)) for span in spans],
        [round(1e6 * (span.end - span.start)) for span in spans],
        [span.worker for span in spans],
        [span.policy for span in spans],
        [span.text for span in spans],
        [span.count for span in spans],
        [round(1e6 * span.covered) for span in spans],
    )
    return zlib.compress(msgspec.msgpack.encode(columns), 1)


def unpacked(stored: bytes, tenant: str, job: str) -> list[TraceSpan]:
    """The spans of :func:`packed` bytes; empty where they are no such bytes."""
    try:
        columns = _columns_decoder.decode(zlib.decompress(stored))
    except (zlib.error, msgspec.DecodeError):
        return []
    found = zip(
        columns.kinds, columns.starts, columns.lengths, columns.workers, columns.policies, columns.texts,
        columns.counts, columns.covered, strict=True,
    )  # fmt: skip
    return [
        TraceSpan(
            kind, columns.base + 1e-6 * start, columns.base + 1e-6 * (start + length), worker, tenant, job, policy,
            text, count, 1e-6 * covered,
        )
        for kind, start, length, worker, policy, text, count, covered in found
    ]  # fmt: skip
