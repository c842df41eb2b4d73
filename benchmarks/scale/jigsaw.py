"""The planner of lanes in virtual time: jobs on one worker whose stages take turns or run beside each other.

``python -m benchmarks.scale.jigsaw``; a minute. The decisions are the shipped ones (``scheduling/pipelines.py``), at
the depth that workers have by default, and so are the rates of a mode. Durations of stages are invented; slowdowns are
those that ``benchmarks.micro.lanes`` measured on its machine, and assumed ones like a GPU's, where a few decoding rows
leave most of the arithmetic idle, and ones that lose. The planner knows durations from the last step only; the truth
differs by some noise, or doubles with each step. Last, the shipped controller in virtual time, on two machines that
take turns, with merging and without: where some texts are long, and where all are about equally long, so that merging
has little to gain."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.lib import intervals
from benchmarks.lib.cells import table
from benchmarks.lib.harness import RESULTS, Result, command

from rookery.controller.rollout.rules import RolloutRules
from rookery.scheduling.pipelines import (
    TURNS,
    JobStages,
    LaneCosts,
    SlowdownTable,
    Stage,
    StageKind,
    StagePredictor,
    State,
    advance,
    choose,
    complete,
    overlaps,
    predicted,
    rates,
)
from rookery.settings import WorkerSettings
from rookery.simulation.profiles import load_profile
from rookery.simulation.replay import MODES, ReplayResult, Scenario, replay
from rookery.simulation.traces import Trace

SEEDS = 20
JOBS, STEPS, WORKERS = 3, 6, 2
NOISE = 0.08
"""Of the logarithm of a duration, from step to step."""
DEFAULT_DEPTH = int(WorkerSettings.model_fields["plan_depth"].default)
DEPTHS = (0, 1, 2, 4)
FLAT = 0.25
"""Percentage points within which mean regrets are equal: less than the standard error of one."""
DEEP = 8
"""Choices after which a small graph has ended: as good as exhaustive."""
STEP_MS = {1: 11.0, 4: 11.7, 16: 17.5, 64: 43.5}
"""Of a decode step by rows, on two cores."""
Slowdowns = dict[tuple[StageKind, int], tuple[float, float]]
"""Of engine and trainer, by the engine's work."""
GPU: Slowdowns = {
    ("decode", 4): (1.1, 1.2), ("decode", 16): (1.2, 1.3), ("decode", 64): (1.4, 1.5), ("prefill", 0): (2.0, 2.0)
}  # fmt: skip
"""Assumed."""
UNEVEN: Slowdowns = {
    ("decode", 4): (1.05, 2.6), ("decode", 16): (1.1, 2.4), ("decode", 64): (1.8, 1.6), ("prefill", 0): (2.1, 2.1)
}  # fmt: skip
"""Assumed: beside each other decoding takes nearly all of the machine's memory bandwidth."""
LOSING: Slowdowns = {
    ("decode", 4): (2.1, 2.1), ("decode", 16): (2.1, 2.2), ("decode", 64): (2.3, 2.1), ("prefill", 0): (2.2, 2.2)
}  # fmt: skip
"""Assumed: running beside each other costs more than taking turns."""
MEASURED = "invented durations, slowdowns that lanes measured"
JOBS_MERGED = 2
MERGE_STEPS, MERGE_SECONDS = 6, 3000.0
"""Of the shipped controller's jobs; and an end that they do not reach."""


def step_seconds(rows: int) -> float:
    points = sorted(STEP_MS.items())
    for (low, before), (high, after) in itertools.pairwise(points):
        if rows <= high:
            return (before + max(0, rows - low) / (high - low) * (after - before)) / 1000
    return points[-1][1] / 1000 * rows / points[-1][0]


def lane_costs(slow: Slowdowns) -> LaneCosts:
    table = SlowdownTable()
    for (kind, rows), (engine, trainer) in slow.items():
        table.record(1, kind, rows, engine=engine, trainer=trainer)
    return LaneCosts(table, step_seconds)


def tables() -> dict[str, LaneCosts]:
    """By name; the measured ones only where ``benchmarks.micro.lanes`` has run."""
    found = {
        "invented durations, slowdowns like a GPU's": lane_costs(GPU),
        "invented durations, uneven slowdowns": lane_costs(UNEVEN),
    }
    measured = RESULTS / "lanes.json"
    if measured.exists():
        data = json.loads(measured.read_text(encoding="utf-8"))["data"]["slowdowns"]
        here: Slowdowns = {("decode", int(rows)): (pair[0], pair[1]) for rows, pair in data.items()}
        found[MEASURED] = lane_costs(here)
    return found


def job(rng: random.Random, steps: int, drift: float = 1.0) -> list[list[Stage]]:
    """The steps of a synchronous job: a prefill, decoding, its tail, an environment, passes and an optimizer step."""
    rows = rng.choice([8, 16, 32])
    usual: list[tuple[StageKind, float, int]] = [
        ("prefill", rng.uniform(0.2, 1.0), rows), ("decode", rng.uniform(2.0, 6.0), rows),
        ("tail", rng.uniform(0.5, 3.0), 4), ("environment", rng.uniform(0.0, 2.0), 0),
        ("train", rng.uniform(2.0, 8.0), 0), ("optimizer", 0.1, 0),
    ]  # fmt: skip
    return [
        [Stage(kind, seconds * drift**step * rng.lognormvariate(0.0, NOISE), rows) for kind, seconds, rows in usual]
        for step in range(steps)
    ]


@dataclass(frozen=True)
class Outcome:
    ends: tuple[float, ...]
    active: float = 0.0
    """Share of the time with both kinds of work in which the planner chose another mode than turns."""

    @property
    def makespan(self) -> float:
        return max(self.ends)

    @property
    def latency(self) -> float:
        return statistics.fmean(self.ends)


def simulate(jobs: Sequence[list[list[Stage]]], costs: LaneCosts, depth: int | None) -> Outcome:
    """``depth`` None: turns."""
    left = [[stage for step in steps for stage in step] for steps in jobs]
    size, predictor, now, mode = len(jobs[0][0]), StagePredictor(), 0.0, TURNS
    ends, chosen, both = [0.0] * len(jobs), 0.0, 0.0
    while any(left):
        running = [number for number, stages in enumerate(left) if stages]
        truth = [tuple(left[number]) for number in running]
        if depth is not None:
            view = [_foreseen(number, left[number], jobs[number], predictor, size) for number in running]
            mode = choose(view, (TURNS, 1), costs, mode, depth).threads
        speeds = rates(truth, mode, costs)
        spent = min(left[number][0].seconds / speed for number, speed in zip(running, speeds, strict=True))
        now += spent
        both += spent * overlaps(truth)
        chosen += spent * (overlaps(truth) and mode != TURNS)
        for number, speed in zip(running, speeds, strict=True):
            stage = left[number][0]
            rest = stage.seconds - spent * speed
            if rest > 1e-9 * max(1.0, stage.seconds):
                left[number][0] = stage._replace(seconds=rest)
                continue
            del left[number][0]
            ends[number] = now
            done = size * len(jobs[number]) - len(left[number]) - 1
            predictor.record(f"{number} {stage.kind}", jobs[number][done // size][done % size].seconds)
    return Outcome(tuple(ends), chosen / both if both else 0.0)


def _foreseen(
    number: int, left: list[Stage], steps: list[list[Stage]], predictor: StagePredictor, size: int
) -> JobStages:
    """The rest of a job's present step, as far as its last one tells; endless where it does not."""
    ahead = (len(left) - 1) % size + 1
    begun = steps[len(steps) - 1 - (len(left) - 1) // size][size - ahead].seconds
    found = []
    for at, stage in enumerate(left[:ahead]):
        seconds = predictor.predict(f"{number} {stage.kind}")
        if seconds is not None and at == 0:
            seconds = max(seconds - (begun - stage.seconds), 0.1 * seconds)
        found.append(stage._replace(seconds=math.inf if seconds is None else seconds))
    return tuple(found)


def jobs_of(seed: int, count: int = JOBS, drift: float = 1.0) -> list[list[list[Stage]]]:
    rng = random.Random(seed)
    return [job(rng, STEPS, drift) for _ in range(count)]


# --- small graphs, true durations -------------------------------------------------------------------------------------


def small(seed: int) -> State:
    """Jobs in the middle of their steps: one that decodes, one that trains, one with an environment before both."""
    rng = random.Random(seed)

    def lasts() -> float:
        return rng.uniform(0.5, 6.0)

    return State((
        (Stage("decode", lasts(), 16), Stage("tail", lasts(), 4), Stage("train", lasts())),
        (Stage("train", lasts()), Stage("decode", lasts(), 64)),
        (Stage("environment", lasts()), Stage("decode", lasts(), 4), Stage("train", lasts())),
    ))  # fmt: skip


def cost_at(state: State, costs: LaneCosts, depth: int) -> float:
    """Of true durations, with a choice at the end of each stage."""
    mode = TURNS
    while state.chains:
        mode = choose(state.chains, (TURNS, 1), costs, mode, depth).threads
        state = advance(state, mode, costs)
    return state.cost


# --- the shipped controller -------------------------------------------------------------------------------------------


def shipped(seed: int, sigma: float, merge: bool) -> ReplayResult:
    """Two synchronous jobs on two machines that generate and train; ``sigma`` is of the logarithm of lengths."""
    profile = load_profile("two-core-cpu-135m")
    tails = {"group_size": 4, "groups_per_step": 4, "median_tokens": 120.0, "sigma": sigma, "max_tokens": 500}
    load = profile.workload.model_copy(update=tails)
    profile = profile.model_copy(update={"workload": load})
    none = Trace("none", ((0.0, 0),), MERGE_SECONDS)
    rules = RolloutRules(merge_tails=merge)
    scenario = Scenario(profile, none, seed=seed, jobs=JOBS_MERGED, steps=MERGE_STEPS, reserved=WORKERS, rules=rules)
    return replay(scenario, MODES["co-located"])


def _shipped(result: Result) -> None:
    for sigma, lengths in ((0.8, "some long texts"), (0.2, "similar texts")):
        pairs = [(shipped(seed, sigma, True), shipped(seed, sigma, False)) for seed in range(SEEDS)]
        gains = [without.seconds / merged.seconds for merged, without in pairs]
        moved = [merged.requeued["merged"] for merged, _ in pairs]
        where = f"shipped controller, {JOBS_MERGED} jobs on {WORKERS} machines in turns, {lengths}"
        result.add(f"{where}: time without merging over with", gains, "", spread(gains))
        result.add(f"{where}: requests merged", moved, "")
        lost = sum(merged.discarded_tokens for merged, _ in pairs)
        if sigma > 0.5:
            found = f"{spread(gains)}, {lost}"
            low = intervals.paired(gains).low
            result.judge(f"{where}: quicker, no token sampled twice", found, low > 1 and not lost)
        else:
            found = f"{spread(gains)}, {sum(moved):g} moves"
            result.judge(f"{where}: moves cost nothing", found, intervals.paired(gains).low >= 0.99)


# --- the measure ------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> str:
    """Mean and 95% interval."""
    found = intervals.paired(values)
    return f"{found.difference:.3f} ({found.low:.3f} to {found.high:.3f})"


def main() -> None:
    result = Result("jigsaw", "The planner of lanes, with invented durations", command(), simulated=True)
    lines: list[list[object]] = []
    found = tables()
    for name, costs in found.items():
        turns = [simulate(jobs_of(seed), costs, None) for seed in range(SEEDS)]
        for depth in DEPTHS:
            ours = [simulate(jobs_of(seed), costs, depth) for seed in range(SEEDS)]
            gains = [t.makespan / o.makespan for t, o in zip(turns, ours, strict=True)]
            latency = statistics.fmean(o.latency / t.latency for t, o in zip(turns, ours, strict=True))
            active = statistics.fmean(o.active for o in ours)
            interval = intervals.paired(gains)
            lines.append(
                [name, depth, interval.difference, f"{interval.low:.3f} to {interval.high:.3f}", latency, active]
            )
            if depth == DEFAULT_DEPTH:
                target = f"{name}: no less throughput than turns"
                result.judge(target, spread(gains), interval.low >= 0.995, f"depth {depth}")
        drifting = [jobs_of(seed, drift=2.0) for seed in range(SEEDS)]
        ratios = [
            simulate(d, costs, None).makespan / simulate(d, costs, DEFAULT_DEPTH).makespan for d in drifting
        ]  # fmt: skip
        result.judge(
            f"{name}: lengths double with each step: >= 0.95 of turns", f"least {min(ratios):.3f}", min(ratios) >= 0.95
        )
        _depths(result, name, costs)
    if MEASURED not in found:
        result.judge(f"{MEASURED}: no less throughput than turns", "-", None, "after benchmarks.micro.lanes")
    lost = lane_costs(LOSING)
    shares = [simulate(jobs_of(seed), lost, depth).active for seed in range(SEEDS) for depth in DEPTHS]
    target = "invented durations, slowdowns that lose: inactive at every depth"
    result.judge(target, f"{max(shares):.2f} of the time at most", not any(shares))
    head = ["table", "depth", "makespan of turns over it", "95% interval", "latency over turns", "active"]
    result.data["tables"] = [table(f"{JOBS} jobs, {STEPS} steps, one worker; {SEEDS} paired seeds", head, lines)]
    _shipped(result)
    result.save()


def _depths(result: Result, name: str, costs: LaneCosts) -> None:
    regret: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    turns = []
    for seed in range(SEEDS):
        state = small(seed)
        best = predicted(state, (TURNS, 1), DEEP, costs)
        turns.append(100 * (complete(state, TURNS, costs).cost / best - 1))
        for depth in DEPTHS:
            regret[depth].append(100 * (cost_at(state, costs, depth) / best - 1))
    result.add(f"{name}: turns, cost above exhaustive search on 8 stages", turns, "%", spread(turns))
    for depth, values in regret.items():
        result.add(f"{name}: depth {depth}, cost above exhaustive search on 8 stages", values, "%", spread(values))
    means = [statistics.fmean(values) for values in regret.values()]
    told = ", ".join(f"{mean:.1f}%" for mean in means)
    least = means[DEPTHS.index(DEFAULT_DEPTH)] <= min(means) + FLAT
    target = f"{name}: mean regret of depth {', '.join(map(str, DEPTHS))}: least at the default, {DEFAULT_DEPTH}"
    result.judge(target, told, least)


if __name__ == "__main__":
    main()
