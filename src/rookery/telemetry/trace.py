"""Spans as a trace in Chrome's JSON format, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.

A worker is a process of the trace, and so is each job with what it waited for and its environments. Spans of one kind
that overlap are put on further threads, since the format nests what overlaps on one thread.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from rookery.telemetry.spans import KINDS, MARKS, TraceSpan

LEFT_OUT = ("idle", "connected")
"""Kinds that show as the absence or the extent of others."""


def chrome_trace(spans: Iterable[TraceSpan], about: dict[str, Any] | None = None) -> dict[str, Any]:
    """The trace as an object for a JSON file; ``about`` is added to its other data. Times of events are microseconds
    since the earliest span, whose Unix time is ``otherData.start``."""
    shown = sorted((span for span in spans if span.kind not in LEFT_OUT), key=lambda span: (span.start, span.end))
    zero = shown[0].start if shown else 0.0
    processes: dict[str, int] = {}
    threads: dict[tuple[int, str, int], int] = {}
    taken: defaultdict[tuple[int, str], list[tuple[float, int]]] = defaultdict(list)
    events = []
    for span in shown:
        process = _process(span)
        pid = processes.setdefault(process, len(processes) + 1)
        row = 0 if span.kind in MARKS else _row(taken[pid, span.kind], span.start, span.end)
        lane = "marks" if span.kind in MARKS else span.kind
        tid = threads.setdefault((pid, lane, row), _order(lane) * 1000 + row + 1)
        event: dict[str, Any] = {
            "name": _name(span), "cat": span.kind, "pid": pid, "tid": tid, "ts": round(1e6 * (span.start - zero), 1),
            "args": {name: value for name in ("tenant", "job", "policy", "worker", "text")
                     if (value := getattr(span, name))},
        }  # fmt: skip
        if span.kind in MARKS:
            event |= {"ph": "i", "s": "p"}
        else:
            event |= {"ph": "X", "dur": round(1e6 * max(0.0, span.end - span.start), 1)}
        events.append(event)
    names = [_metadata("process_name", pid, 0, name) for name, pid in processes.items()]
    for (pid, lane, row), tid in threads.items():
        names.append(_metadata("thread_name", pid, tid, f"{lane} {row + 1}" if row else lane))
        names.append({**_metadata("thread_sort_index", pid, tid, ""), "args": {"sort_index": tid}})
    other = {"start": zero, "source": "rookery", **(about or {})}
    return {"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": other}


def _process(span: TraceSpan) -> str:
    if span.worker:
        return f"worker {span.worker}"
    return f"job {span.job}" if span.job else f"tenant {span.tenant}" if span.tenant else "service"


def _name(span: TraceSpan) -> str:
    return span.text or (span.policy and f"{span.kind} of {span.policy}") or span.kind


def _order(lane: str) -> int:
    return 0 if lane == "marks" else KINDS.index(lane) + 1


def _row(taken: list[tuple[float, int]], start: float, end: float) -> int:
    """A row of a lane that is free from ``start`` on; it is taken until ``end``. ``taken`` is a heap of each row's end
    with its number."""
    row = heapq.heappop(taken)[1] if taken and taken[0][0] <= start else len(taken)
    heapq.heappush(taken, (end, row))
    return row


def _metadata(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "ts": 0, "pid": pid, "tid": tid, "args": {"name": name}}
