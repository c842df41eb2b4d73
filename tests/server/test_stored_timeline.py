"""The timeline of a run is the same after the service has restarted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.faces import ThreadedWorker, job, served
from tests.support.timelines import check_same, starts_of_run

from rookery.client import Client
from rookery.controller.stored_spans import HOUR, HOUR_SPANS, READ_SPANS, StoredSpans, joined_rows
from rookery.storage.models import SpanRow
from rookery.storage.repositories.spans import SpanHour, span_rows
from rookery.telemetry.spans import SpanRing, TraceSpan, packed, unpacked


def events(path: Path) -> Counter[str]:
    """The events of a trace by name."""
    return Counter(one["name"] for one in json.loads(path.read_text())["traceEvents"] if one["ph"] != "M")


def test_ended_run_keeps_its_timeline_and_its_trace_over_a_restart(tmp_path: Path) -> None:
    with served(tmp_path) as service, ThreadedWorker.of(service), Client(service.url, service.key) as client:
        ended = client.submit(job()).wait()
        about = client.job(ended.id)
        whole = (ended.created - 1, ended.finished + 1)
        before, fleet = about.timeline(*whole), client.timeline(*whole)
        trace = events(about.trace(tmp_path / "before.json", *whole))
    assert {"decode", "train", "commit", "environment"} <= {span.kind for span in before.spans}
    with served(tmp_path) as service, Client(service.url, service.key) as client:
        about = client.job(ended.id)
        after, later = about.timeline(*whole), client.timeline(*whole)
        check_same(starts_of_run(after, ended.id), starts_of_run(before, ended.id))
        check_same(starts_of_run(later, ended.id), starts_of_run(fleet, ended.id))
        assert after.oldest <= ended.started + 1
        worked = {span.kind for span in later.spans if span.worker == "scripted"}
        assert {"decode", "train", "connected", "idle"} <= worked
        found = events(about.trace(tmp_path / "after.json", *whole))
        assert found - Counter(found.keys() - trace) == trace, "but for what happened to the worker meanwhile"
        client.job(ended.id).delete()
        assert not starts_of_run(client.timeline(*whole), ended.id)


@pytest.mark.parametrize("count", [1, HOUR_SPANS, 3 * HOUR_SPANS])
def test_row_of_an_hour_stays_bounded_and_covers_the_same_time(count: int) -> None:
    spans = [TraceSpan("decode", float(n), n + 0.5, "one", "ada", "job", "p", f"r{n}") for n in range(count)]
    rows: list[SpanRow] = []
    for begin in range(0, count, 100):
        rows = joined_rows({("ada", "job", 0): spans[begin : begin + 100]}, rows)
    [row] = rows
    found = unpacked(row.spans, "ada", "job")
    assert len(found) == row.count <= HOUR_SPANS and sum(span.count for span in found) == count
    assert row.begins == 0.0 and max(span.end for span in found) == pytest.approx(count - 0.5)
    if count <= HOUR_SPANS:
        assert found == spans
    assert len(row.spans) < 40_000


@given(st.binary(max_size=40))
def test_bytes_that_are_no_spans_are_no_spans(stored: bytes) -> None:
    assert unpacked(stored, "ada", "job") == []
    assert unpacked(packed([])[:-1], "ada", "job") == []


@pytest.mark.parametrize(("hours", "times", "complete"), [(20, 1, True), (72, 1, True), (20, 40, False)])
async def test_a_picture_of_many_hours_leaves_none_out_without_a_word(hours: int, times: int, complete: bool) -> None:
    """Every tenth hour is quiet; each row is so many ``times`` as long as its spans here."""

    def row(hour: int) -> SpanRow:
        count = HOUR_SPANS if hour % 10 else HOUR_SPANS // 8
        begin, pause = hour * HOUR, HOUR / count
        spans = [TraceSpan("decode", begin + n * pause, begin + n * pause + 1, "w", "ada", "job") for n in range(count)]
        return SpanRow(tenant="ada", job="job", hour=hour, begins=begin, count=count, spans=packed(spans))

    rows = {hour: row(hour) for hour in range(1, hours + 1)}

    class Stored:
        async def read(self, function: Any, *arguments: Any) -> Any:
            if function is span_rows:
                return [rows[hour] for _, _, hour in arguments[0]]
            return [SpanHour("ada", "job", one.hour, one.begins, times * one.count) for one in [*rows.values()][::-1]]

    async def threads(function: Any, *arguments: Any) -> Any:
        return function(*arguments)

    store, clock = cast(Any, Stored()), cast(Any, SimpleNamespace(time=lambda: 0.0))
    ring = SpanRing(begun=(hours + 1) * HOUR)
    spans = StoredSpans(store, ring, clock, threads, 1 << 20, lambda: ())
    found, since = await spans.between(0.0, (hours + 1) * HOUR, "job", "ada")
    kept = [one for one in rows.values() if one.begins >= since]
    assert (since == 0.0) == complete and len(kept) == (hours if complete else 14)
    assert len(found) <= READ_SPANS and sum(span.count for span in found) == sum(one.count for one in kept)
    assert all(any(span.start < one.begins + HOUR and span.end > one.begins for span in found) for one in kept)
    assert max(span.count for span in found) == 1 or sum(one.count for one in kept) * times > READ_SPANS
