"""The cost of the timeline for the service: the time spent on spans in each step of a job, as a share of the step.

The service runs in this process, so every call that makes or keeps a span is timed where it is made, with the timer's
own cost included. Storing them is the processor time of the functions that read, join and write the stored hours, in
threads. Then what a full ring costs: adding to it, its memory, and one picture of it; and storing into a full hour."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from benchmarks.lib.harness import MODEL, Result, command, repeats
from benchmarks.lib.service import JOB_SECONDS, service

from rookery.controller import stored_spans
from rookery.controller.activity import MOST_SPANS
from rookery.controller.rollout.request import InflightRequest
from rookery.controller.training.dispatcher import OperationSucceeded
from rookery.telemetry.spans import SPANS_KEPT, SpanRing, TraceSpan, picture, timeline

STEPS = 4
JOB = {
    "name": "sums",
    "base_model": MODEL,
    "environment": {"id": "calculator"},
    "algorithm": {"group_size": 8, "groups_per_step": 4},
    "sampling": {"max_tokens": 24},
    "stop": {"steps": STEPS},
}
PER_SECOND = 30
"""Spans per second of the generated ring."""


class Spent:
    """Seconds in some functions, and the number of calls."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self.calls = 0
        self.clock = clock

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **named: Any) -> Any:
            began = self.clock()
            try:
                return function(*args, **named)
            finally:
                self.seconds += self.clock() - began
                self.calls += 1

        return wrapper


def spans(count: int) -> Iterator[TraceSpan]:
    """Spans of four workers and twenty jobs of five tenants."""
    kinds = ("waiting", "prefill", "decode", "environment", "train")
    for number in range(count):
        kind, job = kinds[number % 5], number % 20
        worker = "" if kind in ("waiting", "environment") else f"worker-{number % 4}"
        start, tenant = number / PER_SECOND, f"tenant-{job % 5}"
        yield TraceSpan(
            kind, start, start + 1.5, worker, tenant, f"job-{job}", f"policy-{job}", f"job-{job}-g{number}-0.0"
        )


def main() -> None:
    times = repeats(__doc__)
    result = Result("timeline_cost", "What the timeline costs the service", command())
    shares, seconds, counts, adding, pictures, stored, hours = [], [], [], [], [], [], []
    ring, storing = Spent(), Spent(time.thread_time)
    for name in ("span_rows", "joined_rows", "save_spans"):
        setattr(stored_spans, name, storing.timed(getattr(stored_spans, name)))
    SpanRing.record = ring.timed(SpanRing.record)  # type: ignore[method-assign]
    SpanRing.add, add = ring.timed(SpanRing.add), SpanRing.add  # type: ignore[method-assign]
    InflightRequest.spans = ring.timed(InflightRequest.spans)  # type: ignore[method-assign]
    made = vars(OperationSucceeded)["spans"].fget
    OperationSucceeded.spans = property(ring.timed(made))  # type: ignore[method-assign,assignment]
    with service() as bench:
        for _ in range(times + 1):
            ring.seconds, ring.calls, storing.seconds = 0.0, 0, 0.0
            began = time.perf_counter()
            bench.client.submit(JOB).wait(JOB_SECONDS)
            took = time.perf_counter() - began
            shares.append(100 * ring.seconds / took)
            stored.append(100 * storing.seconds / took)
            seconds.append(1e6 * ring.seconds / STEPS)
            counts.append(ring.calls / STEPS)
    for _ in range(times):
        full, every = SpanRing(), list(spans(2 * SPANS_KEPT))
        began = time.perf_counter()
        for span in every:
            add(full, span)
        adding.append(1e6 * (time.perf_counter() - began) / len(every))
        kept, end = full.snapshot(), every[-1].end
        began = time.perf_counter()
        picture(timeline(kept, None, 0.0, end), end / 1000, MOST_SPANS)
        pictures.append(1000 * (time.perf_counter() - began))
        hour = [msgspec.structs.replace(span, tenant="t", job="j") for span in kept[: stored_spans.HOUR_SPANS]]
        key = ("t", "j", 0)
        [row] = stored_spans.joined_rows({key: hour}, [])
        began = time.thread_time()
        stored_spans.joined_rows({key: hour[:100]}, [row])
        hours.append(1000 * (time.thread_time() - began))
    size = sum(sys.getsizeof(span) + sum(map(sys.getsizeof, (span.start, span.end, span.text))) for span in kept)
    cost = result.add("spent on spans in a step", shares[1:], "%", f"of jobs of {STEPS} steps of 32 episodes")
    result.add("the same, per step", seconds[1:], "µs")
    result.add("timed calls per step", counts[1:], "calls")
    kept_cost = result.add("spent on storing spans in a step", stored[1:], "%", "processor time, of the same jobs")
    result.add("storing 100 spans into a full hour, in a thread", hours, "ms")
    result.add("adding a span to a full ring", adding, "µs")
    result.add(f"a picture of {SPANS_KEPT} spans, in a thread", pictures, "ms")
    result.add("memory of a full ring", [size / 1e6], "MB")
    whole = cost.median + kept_cost.median
    result.judge("the timeline and its storing cost < 1% of a step", f"{whole:.4f} %", whole < 1)
    result.save()


if __name__ == "__main__":
    main()
