"""Spans: the ring that keeps them, what each reader sees, and the picture and the trace that are made of them."""

from __future__ import annotations

import json

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.support.traces import check

from rookery.telemetry.spans import KINDS, MARKS, WORK, SpanRing, TraceSpan, idle, merged, picture, timeline, visible
from rookery.telemetry.trace import LEFT_OUT, chrome_trace

TENANTS = ("", "ada", "bob")
MOMENTS = st.integers(0, 4000).map(lambda value: value / 8)


@st.composite
def spans(draw: st.DrawFn) -> TraceSpan:
    kind = draw(st.sampled_from([*KINDS, *MARKS]))
    start = draw(MOMENTS)
    end = start if kind in MARKS else start + draw(MOMENTS)
    tenant = draw(st.sampled_from(TENANTS))
    job, policy = (f"job of {tenant}", f"policy of {tenant}") if tenant else ("", "")
    worker = draw(st.sampled_from(["one", "two"])) if kind in (*WORK, "connected") else ""
    return TraceSpan(kind, start, end, worker, tenant, job, policy, f"secret of {tenant}")


MANY = st.lists(spans(), max_size=40)


def measure(found: list[tuple[float, float]]) -> float:
    """Seconds that any of the times covers."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(found):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total


def test_ring_keeps_the_newest_of_one_tenant() -> None:
    ring = SpanRing(kept=100, trimmed=10)
    for number in range(1000):
        ring.add(TraceSpan("decode", number, number + 1, "one", "ada"))
        assert len(ring) <= 100
    kept = [span.start for span in ring.snapshot()]
    assert kept == list(range(1000 - len(kept), 1000)) and len(kept) > 89


@given(st.lists(st.sampled_from(["ada", "bob", "cleo"]), max_size=300))
def test_ring_drops_from_the_tenant_with_the_most(tenants: list[str]) -> None:
    ring = SpanRing(kept=60, trimmed=5)
    for number, tenant in enumerate(tenants):
        ring.add(TraceSpan("decode", number, number, "one", tenant))
    kept = [span.tenant for span in ring.snapshot()]
    assert len(kept) == len(ring) <= 60
    for tenant in set(tenants):
        assert kept.count(tenant) >= min(tenants.count(tenant), 60 // 3 - 5)


def test_owner_of_a_policy_is_added_to_its_spans() -> None:
    ring = SpanRing()
    named = TraceSpan("decode", 0, 1, "one", "bob", "theirs", "p")
    ring.record(
        [TraceSpan("transfer", 0, 1, "one", policy="p"), TraceSpan("train", 0, 1, "one", "ada", "", "p")], "ada", "job"
    )
    ring.record([named], "ada", "job")
    ring.record([TraceSpan("joined", 0, 0, "one")], "", "")
    assert sorted((span.tenant, span.job) for span in ring.snapshot()) == [
        ("", ""), ("ada", "job"), ("ada", "job"), ("bob", "theirs"),
    ]  # fmt: skip


@given(MANY)
def test_a_reader_sees_nothing_of_others_but_when_workers_are_busy(found: list[TraceSpan]) -> None:
    seen = visible(found, lambda span: span.tenant == "ada")
    text = msgspec.json.encode(seen).decode()
    assert "bob" not in text and 'secret of "' not in text
    assert [span for span in seen if span.tenant] == [span for span in found if span.tenant == "ada"]
    for span in seen:
        if span.kind == "busy" and not span.tenant:
            assert span.count == 1 and span.start == int(span.start) and span.end == int(span.end)
    others = [(span.start, span.end) for span in found if span.kind in WORK and span.tenant != "ada"]
    busy = [(span.start, span.end) for span in seen if span.kind == "busy" and not span.tenant]
    assert measure(busy) >= measure(others) and measure(busy + others) == measure(busy)


@given(MANY)
def test_idle_times_do_not_reveal_when_others_worked(found: list[TraceSpan]) -> None:
    """They begin and end with the reader's own work, with whole seconds, or with the worker's connection."""
    found, start, end = [span for span in found if span.kind not in ("idle", "busy")], 0.0, 1000.0
    own = [span for span in found if span.tenant == "ada" or span.kind == "connected"]
    known = {moment for span in own for moment in (span.start, span.end)} | {start, end}
    for span in timeline(found, lambda span: span.tenant == "ada", start, end):
        if span.kind == "idle":
            assert all(moment in known or moment == int(moment) for moment in (span.start, span.end))


@given(MANY)
def test_workers_are_idle_exactly_while_they_are_connected_and_do_nothing(found: list[TraceSpan]) -> None:
    start, end = 50.0, 600.0
    nothing = idle(found, start, end)
    for worker in ("one", "two"):

        def times(kinds: tuple[str, ...], of: list[TraceSpan], worker: str = worker) -> list[tuple[float, float]]:
            chosen = [span for span in of if span.worker == worker and span.kind in kinds]
            return [
                (max(start, span.start), min(end, span.end)) for span in chosen if span.end > start and span.start < end
            ]

        connected, work, free = times(("connected",), found), times(WORK, found), times(("idle",), nothing)
        assert measure(free) == measure(connected + work) - measure(work)
        assert measure(free + work) == measure(free) + measure(work)


@given(MANY, st.sampled_from([0.0, 0.125, 3.0, 1e6]))
def test_joined_spans_cover_the_same_lanes_and_count_all(found: list[TraceSpan], resolution: float) -> None:
    joined = merged(found, resolution)
    assert sum(span.count for span in joined) == len(found)
    lanes = {(span.kind, span.worker, span.tenant) for span in found}
    assert {(span.kind, span.worker, span.tenant) for span in joined} == lanes
    for lane in lanes:
        of = [[(s.start, s.end) for s in some if (s.kind, s.worker, s.tenant) == lane] for some in (found, joined)]
        assert measure(of[1]) >= measure(of[0])
        assert measure(of[0]) <= measure(of[0] + of[1]) == measure(of[1])
        covered = sum(
            s.covered if s.count > 1 else s.end - s.start for s in joined if (s.kind, s.worker, s.tenant) == lane
        )
        assert measure(of[0]) == covered or resolution == 1e6 > covered
    if resolution == 1e6:
        assert len(joined) == len(lanes)


def test_span_that_stands_for_itself_keeps_its_text() -> None:
    alone, pair = TraceSpan("decode", 0, 1, "one", text="a"), [TraceSpan("decode", 5, 6, "one", text="b")] * 2
    assert merged([alone, *pair], 1.0) == [alone, TraceSpan("decode", 5, 6, "one", count=2, covered=1.0)]


@given(MANY, st.integers(1, 50), st.sampled_from([0.0, 0.5]))
def test_picture_has_at_most_the_asked_number(found: list[TraceSpan], most: int, resolution: float) -> None:
    shown, used = picture(found, resolution, most)
    assert len(shown) <= most and used >= resolution
    if len(merged(found, resolution)) <= most and resolution:
        assert shown == merged(found, resolution) and used == resolution
    assert [span.start for span in shown] == sorted(span.start for span in shown)


@given(MANY)
def test_trace_is_valid_and_nests(found: list[TraceSpan]) -> None:
    """The trace event format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU"""
    trace = json.loads(msgspec.json.encode(chrome_trace(timeline(found, None, 0.0, 1e4))))
    check(trace)
    shown = [span for span in found if span.kind not in LEFT_OUT]
    events = [event for event in trace["traceEvents"] if event["ph"] != "M"]
    assert len(events) == len(shown)
    for event, span in zip(events, sorted(shown, key=lambda span: (span.start, span.end)), strict=True):
        assert abs(event["ts"] / 1e6 + trace["otherData"]["start"] - span.start) < 1e-5
        assert (event["cat"], event.get("dur", 0) / 1e6) == (span.kind, span.end - span.start)
