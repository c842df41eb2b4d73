"""What the curve's cells say: baselines, the bound that no schedule beats, gains, verdicts. Pure.

With T the seconds of a job alone (staleness 0, its own latency) and C the worker's seconds in slices for it:

* *bound* of N tenants: max(sum of C, max of T). C is a job alone, the mean of one before and one after the crowd on the
  same service; or the crowd's own (its worker's busy seconds over N) where that is less, as it is when the machine was
  slower beside the crowd than in it: the bound is then the busy share, and says nothing of its own.
* *busy share*: the worker's seconds in decode and training slices, over the makespan. It is the compute thread's; what
  the service and the environments use of the same cores lies beside it, not in it.
* *one after another*: for each tenant the mean time of the solo jobs at its latency, added up. All are
  of the crowd's own run of the curve: machines are not equally quick on all days.

Jobs of the same seed are the same job at every N and latency. With staleness 0 a reward depends on the others only
through the last bits of gradients, which are summed in another order when steps are packed: the first step's never.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.lib.cells import Cell, table
from benchmarks.lib.harness import Result, Row, Verdict
from benchmarks.lib.intervals import paired

LATENCIES: dict[str, tuple[float, ...]] = {"0": (0.0,), "1": (1.0,), "4": (4.0,), "mixed": (0.0, 1.0, 4.0)}
"""Seconds that a tenant's environment takes; tenants take theirs by turns."""
TENANTS = (1, 2, 4, 8, 16, 32)
STALENESS = (0, 2)
STEPS = 5
SOLO_JOBS = 3
"""Measured one after another; their mean is multiplied by the number of tenants."""

LEAST_EFFICIENCY = 0.85
PAPER_GAIN = 1 / (1 - 0.85)
"""MARLaaS: 85% less time from end to end."""
LITTLE_GAIN = 1.1
"""Below this a gain is none to speak of."""
SATURATED = 0.9
"""A worker that computes for this share of the time is full."""


@dataclass(frozen=True)
class Alone:
    """Means over the solo jobs of one latency and staleness, in seconds."""

    seconds: float
    decode: float
    train: float
    runs: int

    @property
    def compute(self) -> float:
        return self.decode + self.train


@dataclass(frozen=True)
class Point:
    """N tenants at one latency; medians over the runs, of ratios too: each is within one run. Times are seconds, gains
    are ratios of makespans, None where their baseline is missing."""

    latency: str
    tenants: int
    makespan: float
    bound: float
    efficiency: float
    """The bound over the makespan."""
    busy: float
    decode: float
    """The part of ``busy`` in decode slices."""
    compute: float
    """Per tenant, in the crowd."""
    gains: dict[str, float | None]
    """Over jobs one after another: ``sync`` (staleness 0), ``async`` (staleness 2)."""
    queue: float
    """A mean episode's wait for a place in the worker."""
    reward: float
    runs: int


def alone(cells: Mapping[str, Cell], latency: float, staleness: int, seed: int | None = None) -> Alone | None:
    """Of one run, or of all."""
    found = [
        job
        for key, cell in cells.items()
        if key.startswith("solo/") and (cell["latency"], cell["staleness"]) == (latency, staleness)
        if seed is None or cell["seed"] == seed
        for job in cell["jobs"]
    ]
    if not found:
        return None
    mean = {name: statistics.fmean(job[name] for job in found) for name in ("seconds", "decode", "train")}
    return Alone(**mean, runs=len(found))


def bound(computes: Sequence[float], solos: Sequence[float]) -> float:
    """The makespan that no schedule beats on one worker: max(sum of C, max of T)."""
    return max(sum(computes), max(solos))


def points(cells: Mapping[str, Cell]) -> list[Point]:
    """By latency, then by N. One tenant alone is a solo job. Where the solo cells of a crowd's run are missing, so is
    its point."""
    found = []
    for name in LATENCIES:
        for count in TENANTS:
            runs = [run for run in _runs(cells, name, count) if run is not None]
            if runs:
                found.append(_median(name, count, runs))
    return found


def _runs(cells: Mapping[str, Cell], name: str, count: int) -> list[dict[str, float | None] | None]:
    if count == 1:
        latency = LATENCIES[name][0]
        solos = [c for c in cells.values() if (c.get("latency"), c.get("staleness")) == (latency, 0)]
        return [
            _run(cells, solo["seed"], {"makespan": job["seconds"], "decode": job["decode"], "train": job["train"],
                                       "jobs": [job], "beside": [job["decode"] + job["train"]]})
            for solo in solos
            for job in solo["jobs"]
        ]  # fmt: skip
    return [
        _run(cells, cell["seed"], cell)
        for key, cell in cells.items()
        if key.startswith("crowd/") and (cell["latency"], cell["tenants"]) == (name, count)
    ]


def _run(cells: Mapping[str, Cell], seed: int, cell: Cell) -> dict[str, float | None] | None:
    """One run of N tenants against the solo jobs of the same run."""
    jobs, makespan = cell["jobs"], cell["makespan"]
    sync = {latency: alone(cells, latency, 0, seed) for latency in {job["latency"] for job in jobs}}
    later = {latency: alone(cells, latency, 2, seed) for latency in sync}
    if any(solo is None for solo in sync.values()):
        return None
    compute = (cell["decode"] + cell["train"]) / len(jobs)
    beside = statistics.fmean(cell["beside"])
    mine = [solo for job in jobs if (solo := sync[job["latency"]]) is not None]
    stale = [solo.seconds for job in jobs if (solo := later[job["latency"]]) is not None]
    least = bound([min(beside, compute)] * len(jobs), [solo.seconds for solo in mine])
    return {
        "makespan": makespan,
        "bound": least,
        "efficiency": least / makespan,
        "busy": (cell["decode"] + cell["train"]) / makespan,
        "decode": cell["decode"] / makespan,
        "compute": compute,
        "sync": sum(solo.seconds for solo in mine) / makespan,
        "async": sum(stale) / makespan if len(stale) == len(jobs) else None,
        "queue": statistics.fmean(job["queue"] for job in jobs),
        "reward": statistics.fmean(statistics.fmean(job["rewards"]) for job in jobs),
    }


def _median(name: str, count: int, runs: list[dict[str, float | None]]) -> Point:
    def of(what: str) -> float:
        return statistics.median(value for run in runs if (value := run[what]) is not None)

    gains = {over: of(over) if any(run[over] is not None for run in runs) else None for over in ("sync", "async")}
    names = ("makespan", "bound", "efficiency", "busy", "decode", "compute", "queue", "reward")
    values = {what: of(what) for what in names}
    return Point(latency=name, tenants=count, gains=gains, runs=len(runs), **values)


def line(cells: Mapping[str, Cell]) -> tuple[float, float] | None:
    """(seconds at latency 0, seconds per second of latency) of a solo job with staleness 0; None with fewer than two
    latencies. Only what the worker did not compute is fitted, by least squares: how quick the machine was while each
    latency was measured says nothing about latency."""
    known = {x: solo for x in (0.0, 1.0, 4.0) if (solo := alone(cells, x, 0)) is not None}
    if len(known) < 2:
        return None
    slope, start = statistics.linear_regression(list(known), [solo.seconds - solo.compute for solo in known.values()])
    return start + statistics.fmean(solo.compute for solo in known.values()), slope


def latency_for(gain: float, start: float, slope: float, per_tenant: float) -> float:
    """The latency at which jobs one after another take ``gain`` times as long as a crowd that needs ``per_tenant``
    seconds for each of them; negative where they do already at 0."""
    return (gain * per_tenant - start) / slope


def reward_differences(cells: Mapping[str, Cell]) -> tuple[list[float], int, int]:
    """(mean reward in crowds less that of the same job alone, for each seed that was measured in both; steps whose
    reward was exactly equal; steps compared). Alone is staleness 0 at any latency, which no reward depends on."""
    solo = {
        job["seed"]: job["rewards"]
        for key, cell in sorted(cells.items(), reverse=True)
        if key.startswith("solo/") and cell["staleness"] == 0
        for job in cell["jobs"]
    }
    differences: dict[int, list[float]] = {}
    equal, steps = 0, 0
    for key, cell in cells.items():
        for job in cell["jobs"] if key.startswith("crowd/") else ():
            if job["seed"] in solo:
                pairs = list(zip(solo[job["seed"]], job["rewards"], strict=True))
                differences.setdefault(job["seed"], []).append(statistics.fmean(b - a for a, b in pairs))
                equal += sum(a == b for a, b in pairs)
                steps += len(pairs)
    return [statistics.fmean(of_seed) for of_seed in differences.values()], equal, steps


def figures(cells: Mapping[str, Cell]) -> Result:
    """The result: a table of points, rows of the baselines, verdicts, and what follows from them in words."""
    result = Result("curve", "Many tenants at once against one after another", "python -m benchmarks.jobs.curve")
    found = points(cells)
    largest = {point.latency: point for point in found if point.tenants == TENANTS[-1]}
    _rows(result, cells)
    for name in LATENCIES:
        point = largest.get(name)
        target = f"{TENANTS[-1]} tenants, latency {name}: makespan within 1/{LEAST_EFFICIENCY} of the bound"
        if point is None:
            result.verdicts.append(Verdict(target, "-", None))
        else:
            share, makespan = f"{point.efficiency:.0%}", f"{point.makespan:.0f} s"
            shown = f"the bound is {share} of the makespan, {makespan}; medians of {point.runs}"
            result.verdicts.append(Verdict(target, shown, point.efficiency >= LEAST_EFFICIENCY))
    _judge_rewards(result, cells)
    result.notes += _words(cells, found, largest)
    result.data["tables"] = [_table(found)]
    result.data["points"] = [vars(point) for point in found]
    return result


def _rows(result: Result, cells: Mapping[str, Cell]) -> None:
    for staleness in STALENESS:
        for latency in (0.0, 1.0, 4.0):
            jobs = [
                job
                for key, cell in cells.items()
                if key.startswith("solo/") and (cell["latency"], cell["staleness"]) == (latency, staleness)
                for job in cell["jobs"]
            ]
            if jobs:
                solo = alone(cells, latency, staleness)
                assert solo is not None
                note = f"of it decoding {solo.decode:.1f} s, training {solo.train:.1f} s"
                what = f"a job alone, staleness {staleness}, latency {latency:g} s"
                result.rows.append(Row(what, [job["seconds"] for job in jobs], "s", note))


def _judge_rewards(result: Result, cells: Mapping[str, Cell]) -> None:
    differences, equal, steps = reward_differences(cells)
    target = "rewards per tenant equal within noise, at least 3 seeds"
    if len(differences) < 3:
        result.verdicts.append(Verdict(target, "-", None))
        return
    found = paired(differences)
    shown = f"{found.difference:+.4f} in a crowd, 95% interval {found.low:+.4f} to {found.high:+.4f}"
    why = (
        f"the {len(differences)} seeds that were also measured alone; the reward of {equal} of {steps} steps is exactly"
        " that of the job alone"
    )
    result.verdicts.append(Verdict(target, shown, found.null, why))


def _words(cells: Mapping[str, Cell], found: list[Point], largest: Mapping[str, Point]) -> list[str]:
    """Where the paper's gain would begin, where the worker is full, where the gain vanishes."""
    notes = [
        "One after another: the mean of the measured solo jobs at each tenant's latency, times the tenants. The crowds"
        " are all real. Bound: max(sum of compute, longest solo job). Busy: the worker's share of the makespan in"
        " decode and training slices. Queue: a mean episode's wait for a place in the worker. `mixed`:"
        " latencies of 0, 1 and 4 s by turns."
    ]
    fit, full = line(cells), largest.get("0")
    if fit is not None and full is not None:
        start, slope = fit
        each = full.makespan / full.tenants
        begins, vanishes = (latency_for(gain, start, slope, each) for gain in (PAPER_GAIN, LITTLE_GAIN))
        notes.append(
            f"A job alone takes {start:.1f} s and {slope:.2f} s per second of latency; a full worker takes {each:.1f} s"
            f" for each. So {PAPER_GAIN:.1f} x over staleness 0 one after another begins at a latency of {begins:.1f}"
            f" s, with at least {PAPER_GAIN:.0f} tenants; it falls below {LITTLE_GAIN} x "
            + (f"under {vanishes:.1f} s." if vanishes > 0 else f"at no latency: it is {start / each:.2f} x at 0.")
        )
    stale = [(gain, point) for point in found if (gain := point.gains["async"]) is not None and point.tenants > 1]
    if stale:
        most, at = max(stale, key=lambda pair: pair[0])
        losing = [point.tenants for gain, point in stale if gain < 1]
        notes.append(
            "Over staleness 2 one after another, which fills the environment's waits by itself, a crowd gains"
            f" {most:.2f} x at most ({at.tenants} tenants, latency {at.latency})"
            + (f", and with {min(losing)} tenants or more it can be slower." if losing else ".")
        )
    for name in LATENCIES:
        curve = [point for point in found if point.latency == name]
        solos = [alone(cells, latency, 0) for latency in LATENCIES[name]]
        known = [solo for solo in solos if solo is not None]
        if len(curve) < 2 or len(known) < len(solos):
            continue
        seconds, compute, train = (
            statistics.fmean(values) for values in zip(*((s.seconds, s.compute, s.train) for s in known), strict=True)
        )
        filled = next((f"from {point.tenants} tenants on" for point in curve if point.busy >= SATURATED), "at no N")
        notes.append(
            f"Latency {name}: the worker is full (busy {SATURATED:.0%}) {filled}; from a job alone one expects"
            f" T/C = {seconds / compute:.1f} tenants. Its training alone would fill a machine of its own from"
            f" {seconds / train:.1f} tenants on."
        )
        before, last = curve[-2].tenants, curve[-1].tenants
        if more := _more_work(cells, name, before, last):
            times = f"run{'s' * (len(more) > 1)}"
            notes[-1] += (
                f" {last} tenants get {statistics.median(more):.2f} x as much done per second as {before}, in the"
                f" {len(more)} {times} that had both."
            )
    return notes


def _more_work(cells: Mapping[str, Cell], name: str, before: int, last: int) -> list[float]:
    """How much more work per second ``last`` tenants did than ``before``, in each run that measured both crowds."""
    runs: dict[int, dict[int, float]] = {}
    for key, cell in cells.items():
        if key.startswith(f"crowd/{name}/"):
            runs.setdefault(cell["seed"], {})[cell["tenants"]] = cell["makespan"]
    return [(last / of[last]) / (before / of[before]) for of in runs.values() if {before, last} <= set(of)]


def _table(found: list[Point]) -> dict[str, Any]:
    head = ["latency, s", "tenants", "makespan, s", "bound, s", "bound / makespan", "busy", "of it decoding",
            "gain over staleness 0", "over staleness 2", "queue, s", "mean reward", "runs"]  # fmt: skip
    rows = [
        [p.latency, p.tenants, p.makespan, p.bound, p.efficiency, p.busy, p.decode, p.gains["sync"], p.gains["async"],
         p.queue, p.reward, p.runs]
        for p in found
    ]  # fmt: skip
    return table("Makespan by tenants and latency; gains over the same jobs one after another", head, rows)
