"""Pipelines of several jobs on the same workers, planned with look-ahead, in virtual time.

``python -m benchmarks.scale.jigsaw``; minutes. The decisions are the shipped ones (``scheduling/pipelines.py``).
Two slowdown tables: the one that ``benchmarks.micro.multiplex`` measured here, and an assumed one like a GPU's, where a
few decoding rows leave most of the arithmetic idle. The baseline is event-driven and first come, first served, and
shares forward passes among all tenants' decodes. Durations are predicted from the last step; the truth differs
by some noise, or doubles with each step. Last, the shipped controller in virtual time, on two machines as measured
here, with merging and without."""

from __future__ import annotations

import itertools
import json
import math
import random
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.lib import intervals
from benchmarks.lib.cells import table
from benchmarks.lib.harness import RESULTS, Result, command

from rookery.controller.rollout.rules import RolloutRules
from rookery.scheduling.pipelines import (
    PAYS,
    Action,
    Planner,
    Slowdown,
    StagePredictor,
    SubStage,
    Timeline,
    complete,
)
from rookery.simulation.profiles import load_profile
from rookery.simulation.replay import MODES, ReplayResult, Scenario, replay
from rookery.simulation.traces import Trace

SEEDS = 20
MERGE_STEPS, MERGE_SECONDS = 6, 3000.0
"""Of the shipped controller's jobs; and an end that they do not reach."""
DEPTHS = (0, 1, 2, 4)
FLAT = 0.25
"""Percentage points within which mean regrets are equal: less than the standard error of one."""
WORKERS, JOBS, STEPS = 2, 3, 6
SIGMA = 0.6
"""Of the logarithm of lengths: a worker's tail is the excess of its longest text …"""
NOISE = 0.08
"""… and from step to step."""
GPU = {1: 10.0, 4: 10.2, 8: 10.4, 16: 11.0, 32: 12.0, 64: 14.0}
"""Milliseconds of a decode step by rows, assumed; and slowdowns beside training, which fills the machine alone."""
GPU_TRAIN = {"decode 4": (1.15, 1.2), "decode 16": (1.25, 1.3), "prefill": (2.0, 2.0), "train": (2.0, 2.0)}
MOVE_SECONDS = 0.3
"""Prefill of a tail's tokens: eight rows of some hundred tokens, on two cores."""
MOVED_TOKENS = 4 * 150


def shared_passes(milliseconds: Mapping[int, float], a: str, b: str) -> tuple[float, float]:
    """Slowdowns of two decodes in the same forward passes."""
    rows = sorted(milliseconds)

    def step(count: int) -> float:
        at = min(max(1, bisect_left(rows, count)), len(rows) - 1)
        low, high = rows[at - 1], rows[at]
        return milliseconds[low] + (count - low) / (high - low) * (milliseconds[high] - milliseconds[low])

    first, second = int(a.split()[1]), int(b.split()[1])
    return step(first + second) / step(first), step(first + second) / step(second)


def tables() -> dict[str, dict[tuple[str, str], tuple[float, float]]]:
    measured = json.loads((RESULTS / "multiplex.json").read_text())["data"]
    here = {int(kind.split()[1]): ms for kind, ms in measured["alone"].items() if kind.startswith("decode")}
    train = {pair.split("|")[0]: tuple(s) for pair, s in measured["slowdown"].items() if pair.endswith("|train")}
    found = {}
    for name, steps, beside in (
        ("simulated, slowdowns measured here", here, train),
        ("simulated, GPU-like, assumed", GPU, GPU_TRAIN),
    ):
        one = {(kind, "train"): slow for kind, slow in beside.items()}
        decodes = ["decode 16", "decode 4"]
        one |= {(a, b): shared_passes(steps, a, b) for a in decodes for b in decodes if a <= b}
        found[name] = one
    return found


def job_steps(name: str, rng: random.Random, steps: int, *, drift: float = 1.0, sigma: float = SIGMA) -> list[SubStage]:
    """Of a synchronous job: in each step every worker decodes its part and then the tail of it; when all tails have
    ended, the job's trainer does forward and backward passes and the optimizer step."""
    stages: list[SubStage] = []
    home, decode, train = rng.randrange(WORKERS), rng.uniform(2.0, 4.0), rng.uniform(2.0, 6.0)
    tails = [decode * math.expm1(1.5 * sigma * abs(rng.gauss(0.0, 1.0))) for _ in range(WORKERS)]
    for step in range(steps):
        before = (len(stages) - 1,) if step else ()

        def lasts(seconds: float, step: int = step) -> float:
            return seconds * drift**step * rng.lognormvariate(0.0, NOISE if sigma else 0.0)

        first = len(stages)
        stages += [SubStage(name, "decode 16", lasts(decode), before, worker) for worker in range(WORKERS)]
        stages += [
            SubStage(name, "decode 4", lasts(tails[worker]), (first + worker,), worker, MOVE_SECONDS)
            for worker in range(WORKERS)
        ]
        stages.append(SubStage(name, "train", lasts(train), (first + WORKERS, first + WORKERS + 1), home))
    return stages


def together(jobs: Sequence[list[SubStage]]) -> list[SubStage]:
    """One graph of several."""
    stages: list[SubStage] = []
    for job in jobs:
        start = len(stages)
        stages += [
            SubStage(s.job, s.kind, s.seconds, tuple(start + b for b in s.after), s.worker, s.move_seconds) for s in job
        ]
    return stages


@dataclass
class Foresight:
    """Plans on predicted durations while true ones pass: the current step of each job, from its last step."""

    stages: Sequence[SubStage]
    planner: Planner
    step: int
    """Sub-stages of a step."""
    starts: dict[str, int] = field(default_factory=dict)
    predictor: StagePredictor = field(default_factory=StagePredictor)
    seen: set[int] = field(default_factory=set)
    moves: int = 0

    def choose(self, truth: Timeline) -> Action | None:
        for number in range(len(self.stages)):
            if number not in truth.left and number not in self.seen:
                self.seen.add(number)
                self.predictor.record(self._name(number), self.stages[number].seconds)
        view = truth.copy()
        view.left = {}
        for job in dict.fromkeys(stage.job for stage in self.stages):
            numbers = [n for n in truth.left if self.stages[n].job == job]
            if numbers:
                last = numbers[0] // self.step * self.step + self.step
                for number in (n for n in numbers if n < last):
                    predicted = self.predictor.predict(self._name(number))
                    if predicted is None:
                        return truth.first()
                    past = self.stages[number].seconds - truth.left[number]
                    view.left[number] = max(predicted - past, 0.05 * predicted)
        action = self.planner.choose(view)
        self.moves += action is not None and action.moves
        return action

    def _name(self, number: int) -> str:
        return f"{self.stages[number].job} {number % self.step}"


@dataclass(frozen=True)
class Outcome:
    ends: dict[str, float]
    chosen: int = 0
    moves: int = 0

    @property
    def makespan(self) -> float:
        return max(self.ends.values())

    @property
    def latency(self) -> float:
        return statistics.fmean(self.ends.values())


def simulate(
    stages: list[SubStage], slow: Slowdown, depth: int | None, multiplex: bool = True, merge: bool = True
) -> Outcome:
    """``depth`` None: first come, first served."""
    timeline = Timeline.begin(stages, WORKERS, slow, multiplex=multiplex, merge=merge)
    if depth is None:
        return Outcome(complete(timeline).ends)
    foresight = Foresight(stages, Planner(depth), 2 * WORKERS + 1)
    done = complete(timeline, foresight.choose)
    return Outcome(done.ends, foresight.planner.chosen, foresight.moves)


# --- small graphs, true durations -------------------------------------------------------------------------------------


def exhaustive(timeline: Timeline, most: float) -> float:
    """The least cost of all sequences of actions; ``most`` is one that is known."""
    best = most

    def bound(state: Timeline) -> float:
        ends = dict(state.ends)
        rest: dict[int, float] = {}
        for number in sorted(state.left):  # predecessors have lower numbers
            before = max((rest.get(b, 0.0) for b in state.stages[number].after), default=0.0)
            rest[number] = before + state.left[number]
            job = state.stages[number].job
            ends[job] = max(ends.get(job, 0.0), state.now + rest[number])
        return max(ends.values()) + statistics.fmean(ends.values())

    def search(state: Timeline, least: int) -> None:
        """Starts at one time come in order of their numbers."""
        nonlocal best
        if bound(state) >= best - 1e-9:
            return
        if not state.left:
            best = state.cost()
            return
        for action in state.actions():
            if action is None or action.moves:
                search(state.apply(action), -1)
            elif action.stage > least:
                search(state.apply(action), action.stage)

    search(timeline, -1)
    return best


def small(seed: int) -> list[SubStage]:
    """Eight sub-stages: a job with a tail on each worker, one with one tail, and one that only trains."""
    rng = random.Random(seed)

    def tail(job: str, worker: int, *after: int) -> SubStage:
        return SubStage(job, "decode 4", 2.0 * rng.lognormvariate(0.0, 0.8), after, worker, MOVE_SECONDS)

    def train(job: str, worker: int, *after: int) -> SubStage:
        return SubStage(job, "train", rng.uniform(1.0, 5.0), after, worker)

    def decode(job: str, *after: int) -> SubStage:
        return SubStage(job, "decode 16", rng.uniform(1.0, 3.0), after)

    return [
        tail("a", 0), tail("a", 1), train("a", 0, 0, 1), decode("b"), tail("b", 1, 3), train("b", 1, 4),
        train("c", rng.randrange(2)), decode("c", 6),
    ]  # fmt: skip


TRAP = [SubStage(kind, kind, 4.0) for kind in ("decode 1", "decode 4", "train", "train long")]
TRAP_TABLE: Slowdown = {
    ("decode 1", "train"): (2 / 1.8, 2 / 1.8), ("decode 1", "train long"): (2 / 1.6, 2 / 1.6),
    ("decode 4", "train"): (2 / 1.5, 2 / 1.5), ("decode 1", "decode 4"): (2.0, 2.0),
}  # fmt: skip
"""One worker. The best pair now leaves two sub-stages that gain nothing beside each other."""


def cost_at(timeline: Timeline, depth: int) -> float:
    return complete(timeline, Planner(depth).choose).cost()


# --- the measure ------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> str:
    """Mean and 95% interval."""
    found = intervals.paired(values)
    return f"{found.difference:.3f} ({found.low:.3f} to {found.high:.3f})"


# --- the shipped controller -------------------------------------------------------------------------------------------


def shipped(seed: int, jobs: int, merge: bool) -> ReplayResult:
    """Synchronous jobs with long tails on two machines that generate and train."""
    profile = load_profile("two-core-cpu-135m")
    tails = {"group_size": 4, "groups_per_step": 4, "median_tokens": 120.0, "sigma": 0.8, "max_tokens": 500}
    load = profile.workload.model_copy(update=tails)
    profile = profile.model_copy(update={"workload": load})
    none = Trace("none", ((0.0, 0),), MERGE_SECONDS)
    rules = RolloutRules(merge_tails=merge)
    scenario = Scenario(profile, none, seed=seed, jobs=jobs, steps=MERGE_STEPS, reserved=WORKERS, rules=rules)
    return replay(scenario, MODES["co-located"])


def _shipped(result: Result) -> None:
    for jobs in (2, 1):
        pairs = [(shipped(seed, jobs, True), shipped(seed, jobs, False)) for seed in range(SEEDS)]
        gains = [without.seconds / merged.seconds for merged, without in pairs]
        moved = [merged.requeued["merged"] for merged, _ in pairs]
        where = f"simulated, shipped controller, {jobs} job{'s' * (jobs > 1)} on {WORKERS} machines"
        result.add(f"{where}: time without merging over with", gains, "", spread(gains))
        result.add(f"{where}: requests merged", moved, "")
        lost = sum(merged.discarded_tokens for merged, _ in pairs)
        if jobs > 1:
            interval = intervals.paired(gains)
            result.judge(
                f"{where}: quicker, no token sampled twice", f"{spread(gains)}, {lost}", interval.low > 1 and not lost
            )
        else:
            off_by = max(abs(gain - 1) for gain in gains)
            result.judge(
                f"{where}: 1.00 ± 0.02 and inactive",
                f"within {off_by:.3f}, {sum(moved)} moves",
                off_by <= 0.02 and not sum(moved),
            )


def main() -> None:
    result = Result("jigsaw", "Pipelines of several jobs, planned with look-ahead", command(), simulated=True)
    lines = []
    for name, slow in tables().items():
        beside = {kind: sum(1 / s for s in slow[kind, "train"]) for kind in ("decode 16", "decode 4", "prefill")}
        told = ", ".join(f"{kind} {gain:.2f}" for kind, gain in beside.items())
        result.notes.append(f"{name}: 1/s_a + 1/s_b beside training (above {PAYS} pays): {told}.")
        lines += _ablation(result, name, slow)
        _depths(result, name, slow)
    head = ["table", "arm", "throughput over first come", "95% interval", "latency over first come"]
    head += ["moves", "tokens prefilled again"]
    result.data["tables"] = [table(f"{JOBS} jobs, {STEPS} steps, {WORKERS} workers; {SEEDS} paired seeds", head, lines)]
    trap = Timeline.begin(TRAP, 1, TRAP_TABLE)
    costs = {depth: cost_at(trap, depth) for depth in DEPTHS}
    loss = costs[0] / costs[2] - 1
    result.judge("simulated, constructed case: greedy loses >= 10%", f"{loss:.0%} against depth 2", loss >= 0.1)
    _shipped(result)
    result.save()


def _graphs(seed: int, jobs: int = JOBS, **given: float) -> list[SubStage]:
    rng = random.Random(seed)
    return together([job_steps(f"job {i}", rng, STEPS, **given) for i in range(jobs)])


ARMS = {"multiplex only": (True, False), "merge only": (False, True), "both": (True, True)}


def _ablation(result: Result, name: str, slow: Slowdown) -> list[list[object]]:
    lines: list[list[object]] = []
    graphs = [_graphs(seed) for seed in range(SEEDS)]
    usual = [simulate(stages, slow, None) for stages in graphs]
    for arm, parts in ARMS.items():
        ours = [simulate(stages, slow, 1, *parts) for stages in graphs]
        gains = [b.makespan / o.makespan for b, o in zip(usual, ours, strict=True)]
        latency = statistics.fmean(o.latency / b.latency for b, o in zip(usual, ours, strict=True))
        interval = intervals.paired(gains)
        moves = statistics.fmean(o.moves for o in ours)
        row = [name, arm, interval.difference, f"{interval.low:.3f} to {interval.high:.3f}", latency, moves]
        lines.append([*row, moves * MOVED_TOKENS])
        if arm == "both":
            result.judge(f"{name}: no less throughput than first come", spread(gains), interval.low >= 0.995)
    drifting = [_graphs(seed, drift=2.0) for seed in range(SEEDS)]
    ours = [simulate(stages, slow, 1) for stages in drifting]
    pairs = zip((simulate(stages, slow, None) for stages in drifting), ours, strict=True)
    ratios = [b.makespan / o.makespan for b, o in pairs]
    result.judge(
        f"{name}: lengths double with each step: >= 0.95 of first come", f"least {min(ratios):.3f}", min(ratios) >= 0.95
    )
    return lines


def _depths(result: Result, name: str, slow: Slowdown) -> None:
    regret: dict[int, list[float]] = {depth: [] for depth in DEPTHS}
    for seed in range(SEEDS):
        timeline = Timeline.begin(small(seed), WORKERS, slow)
        costs = {depth: cost_at(timeline, depth) for depth in DEPTHS}
        best = exhaustive(timeline, min(*costs.values(), complete(timeline).cost()))
        for depth, cost in costs.items():
            regret[depth].append(100 * (cost / best - 1))
    for depth, values in regret.items():
        result.add(f"{name}: depth {depth}, cost above exhaustive search on 8 sub-stages", values, "%", spread(values))
    means = [statistics.fmean(values) for values in regret.values()]
    told = ", ".join(f"{mean:.1f}%" for mean in means)
    falls = all(b <= a + FLAT for a, b in itertools.pairwise(means))
    result.judge(f"{name}: mean regret falls with depth {', '.join(map(str, DEPTHS))}, then flattens", told, falls)


if __name__ == "__main__":
    main()
