"""How the controller's time per event grows with workers and jobs: the shipped controller, modelled peers, no faults.

``python -m benchmarks.scale.controller_scaling [--repeats N] [--workers N ...]``. In each setting the jobs train as
they do in service; after a warm-up, up to ``MEASURED`` virtual seconds are looked at. An event is a frame that crosses
one of the controller's links, in either direction, to or from a worker or an environment host; a frame of tokens counts
as many events as it has requests in it, so that a setting does not look better for spreading them thin. The time is
that of this process's one thread on its processor less what the modelled peers took: so it has the event loop's own
work in it, and the database's. What the handling of each kind of frame takes by itself stands beside it.

* *jobs fixed*: more workers for the same jobs.
* *jobs growing*: one job for five workers, so each has as much to do as before.

The exponent is that of time per event against workers, by least squares on logarithms.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.lib.harness import Result, command
from tests.chaos.faults import Plan
from tests.chaos.network import NetworkConnection, PeerEnd
from tests.chaos.run import Run

from rookery import protocol
from rookery.simulation.clock import VirtualLoop
from rookery.simulation.fakes.service import MEMORY

WORKERS = (10, 30, 100, 300, 1000)
FIXED_JOBS = 20
WORKERS_PER_JOB = 5
WARM_UP = 30.0
"""Virtual seconds until every job has its first versions and its rhythm."""
MEASURED = 60.0
"""Virtual seconds that are looked at at most."""
ENOUGH = 200_000
"""Events that are looked at at most."""
TARGET = 0.1

QUIET = Plan(
    seed=1, preemptions=0, hosts=4, tenants=10, trainers=0.1, breaks=0.0, half_opens=0.0, freezes=0.0, closes=0.0,
    garbage=0.0, host_breaks=0.0, host_kills=0.0, phase_deaths=0.0, commit_deaths=0.0, database_failures=0.0,
    upload_failures=0.0, upload_twice=0.0, upload_corrupt=0.0, pull_failures=0.0, engine_errors=0.0, duplicates=0.0,
    stale_frames=0.0, lifetime=1e9, restart_every=1e9,
)  # fmt: skip


class Meter:
    """Where this thread's time goes."""

    def __init__(self) -> None:
        self.peers = 0
        """Nanoseconds of the modelled peers."""
        self.decoders: dict[NetworkConnection, Any] = {}
        """Of the frames that arrive."""
        self.events: Counter[str] = Counter()
        self.handling: defaultdict[str, int] = defaultdict(int)
        """Nanoseconds by kind of frame, from its arrival until the next is waited for."""
        self._came: tuple[str, int] | None = None

    def arrived(self, connection: NetworkConnection, frame: bytes) -> None:
        message = protocol.decode(self.decoders[connection], frame)
        kind = type(message).__name__
        self.events[kind] += max(1, len(message.chunks)) if isinstance(message, protocol.Output) else 1
        self._came = (kind, time.thread_time_ns())

    def handled(self, connection: NetworkConnection) -> None:
        if self._came is not None:
            (kind, began), self._came = self._came, None
            self.handling[kind] += time.thread_time_ns() - began


class TimedCoroutine(Coroutine[Any, Any, Any]):
    """Adds the time of each step of a peer's coroutine to the meter."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], meter: Meter) -> None:
        self._coroutine, self._meter = coroutine, meter

    def send(self, value: Any) -> Any:
        return self._timed(self._coroutine.send, value)

    def throw(self, *error: Any) -> Any:
        return self._timed(self._coroutine.throw, *error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()

    def _timed(self, step: Callable[..., Any], *values: Any) -> Any:
        began = time.thread_time_ns()
        try:
            return step(*values)
        finally:
            self._meter.peers += time.thread_time_ns() - began


class Quiet(Run):
    """A run without faults and without an onlooker, for so many virtual seconds."""

    meter: Meter

    def dial(self, kind: Literal["worker", "host"]) -> PeerEnd:
        end = super().dial(kind)
        connection = end.network
        self.meter.decoders[connection] = protocol.from_worker if kind == "worker" else protocol.from_host
        connection.observer = self.meter  # instead of the checks
        send = connection.send

        async def counted(frame: bytes) -> None:
            self.meter.events["to peers"] += 1
            await send(frame)

        setattr(connection, "send", counted)  # noqa: B010 (a method for an instance)
        return end

    def make_task(self, loop: asyncio.AbstractEventLoop, work: Any, **more: Any) -> asyncio.Task[Any]:
        """Tasks of the peers are timed; their coroutines are methods of fakes."""
        if getattr(work, "__qualname__", "").startswith("Fake"):
            work = TimedCoroutine(work, self.meter)
        return super().make_task(loop, work, **more)

    async def measure(self) -> dict[str, Any]:
        """Time per event, in microseconds of the processor."""
        self.calm, self.meter = True, Meter()
        await self.open()
        self.requests.end()
        for _ in range(self.plan.jobs):
            await self._submit(self.controller)  # type: ignore[arg-type]
        await asyncio.sleep(WARM_UP)
        meter = self.meter
        before, peers, steps = time.thread_time_ns(), meter.peers, self.history.versions
        meter.events.clear()
        meter.handling.clear()
        began = self._loop.time()
        for _ in range(int(MEASURED)):
            await asyncio.sleep(1.0)
            if meter.events.total() >= ENOUGH:
                break
        whole = time.thread_time_ns() - before
        spent = whole - (meter.peers - peers)
        events = meter.events.total()
        found = {
            "microseconds": spent / events / 1000,
            "thread_seconds": whole / 1e9,
            "events": events,
            "versions": self.history.versions - steps,
            "seconds": self._loop.time() - began,
            "kinds": dict(meter.events),
            "handling": {k: meter.handling[k] / meter.events[k] / 1000 for k in sorted(meter.handling)},
        }
        self._check()
        await self.close()
        return found

    def _job(self, number: int) -> dict[str, Any]:
        """All alike, and longer than what is measured."""
        job = super()._job(number)
        job["algorithm"] = {"group_size": 4, "groups_per_step": 2, "max_staleness": 1}
        return {**job, "sampling": {"max_tokens": 48}, "evaluation": {}, "checkpoints": {}, "stop": {"steps": 100_000}}


def measure(workers: int, jobs: int) -> dict[str, Any]:
    """One run in a loop of its own."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        plan = replace(QUIET, workers=workers, jobs=jobs)
        return runner.run(Quiet(plan, Path(folder), time.monotonic()).measure())


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of ``log(values)`` against ``log(sizes)``, by least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    return statistics.linear_regression(x, y).slope


def scaling_options(about: str | None, workers: Sequence[int]) -> argparse.Namespace:
    """The command line of a run at several sizes, ``about`` which a docstring tells. Silences the package's log."""
    parser = argparse.ArgumentParser(description=(about or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="runs of each setting (default: 3)")
    parser.add_argument("--workers", type=int, nargs="+", default=workers, help="numbers of workers")
    logging.getLogger("rookery").setLevel(logging.CRITICAL + 1)
    return parser.parse_args()


def main() -> None:
    options = scaling_options(__doc__, WORKERS)
    result = Result("controller_scaling", "The controller's time per event", command(), simulated=True)
    settings = {
        "jobs fixed": lambda workers: FIXED_JOBS,
        "jobs growing": lambda workers: max(1, workers // WORKERS_PER_JOB),
    }
    for name, jobs_of in settings.items():
        medians, by_kind = [], []
        for workers in options.workers:
            jobs = jobs_of(workers)
            runs = [measure(workers, jobs) for _ in range(options.repeats)]
            one = runs[0]
            note = f"{one['events']:,} events, {one['versions']} versions in {one['seconds']:.0f} virtual seconds"
            row = result.add(f"{name}: {workers} workers, {jobs} jobs", [r["microseconds"] for r in runs], "µs", note)
            medians.append(row.median)
            by_kind.append(runs[0])
        result.data[name] = by_kind
        if len(medians) > 1:
            slope = exponent(options.workers, medians)
            span = f"{options.workers[0]} to {options.workers[-1]} workers"
            result.judge(f"exponent <= {TARGET} from {span}, {name}", f"{slope:.3f}", slope <= TARGET)
        for kind in ("Output", "Heartbeat"):
            times = [run["handling"][kind] for run in by_kind]
            slope = exponent(options.workers, times) if len(times) > 1 else math.nan
            shown = ", ".join(f"{value:.1f}" for value in times)
            of = "request in a frame of tokens" if kind == "Output" else "heartbeat"
            result.notes.append(f"{name}, handling one {of} by itself: {shown} µs, exponent {slope:.3f}.")
    result.notes.append(
        "Processor time of the controller's thread less that of the modelled peers; the event loop and the database are"
        " in it. A frame of tokens counts as many events as it has requests."
    )
    result.save()


if __name__ == "__main__":
    main()
