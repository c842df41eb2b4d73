"""The planner of a worker's lanes: whether training runs beside decoding or takes turns with it, on how many threads
each, and what a tail would gain in another worker's batch. After JigsawRL (arXiv 2604.23838). The functions are pure.

A job on a worker is a chain of *stages* (prefill, decode, tail, environment, train, optimizer), with durations alone on
all cores, predicted from the last step. The first stage of each chain runs. Those of the engine share forward passes,
those of the trainer take turns, environments need neither. Where both have work, the mode decides: in *turns* each
takes twice its time, *beside* each other as much as a table of measured slowdowns says (:class:`SlowdownTable`).

A mode is chosen by its predicted cost (:func:`choose`): the finish of the last job plus the mean finish of all. At
depth 0 the mode lasts until the present stages have ended, and the best one follows without a change. Depth ``n`` also
compares a change after the next stage that ends, to a choice of depth ``n - 1``. So a mode is chosen only where it
costs less than turns to the end, and look-ahead never costs more. The paper does not state its depth.

Three rules bound the damage of wrong predictions:

* The planner is *inactive*, which is turns, where no mode gains :data:`LEAST_GAIN`, and while slices beside each other
  are not what the table predicts.
* While durations are unknown or unreliable, or jobs are too many to be predicted in time, no finish is predicted: a
  mode must compute more than turns do, and make neither engine nor trainer more than :data:`MOST_LOSS` slower, so that
  it costs little whatever the durations are.
* A mode is left only for one that gains :data:`SWITCH_GAIN` more; a tail moves only if it gains :data:`HYSTERESIS`
  times the prefill that this costs (:mod:`rookery.scheduling.tails`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean
from typing import Literal, NamedTuple

from cachetools import LRUCache

LEAST_GAIN = 0.03
"""Of the predicted cost in turns: a few percent are within the error of the measurement."""

SWITCH_GAIN = 0.02
"""Of the predicted cost in the present mode: modes that are equally good do not alternate."""

HYSTERESIS = 1.5
"""A move must gain this many times its own cost: predictions of the last step are off by a third at times."""

RELIABLE = 0.3
"""Mean relative error up to which the last durations predict the next ones. Steady work is off by a tenth; lengths that
double with each step are off by a half."""

NEWEST = 0.5
"""Weight of the newest duration in the mean error."""

MOST_STAGES = 1_024
"""Stages whose durations are remembered, those used last: a worker outlives its tenants."""

CORRECTION = 0.2
"""Weight of the newest slice in a slowdown."""

MOST_ADVANCES = 100_000
"""Stages that one choice may advance, each by the time until any of them ends: less than a tenth of a second. With more
jobs a choice looks less far ahead, or compares work per second."""

BUCKETS = (4, 16, 64)
"""Decode rows, each up to the next, whose slowdowns are measured apart; the last one is for more as well."""

StageKind = Literal["prefill", "decode", "tail", "environment", "train", "optimizer"]
ENGINE: frozenset[StageKind] = frozenset({"prefill", "decode", "tail"})
TRAINER: frozenset[StageKind] = frozenset({"train", "optimizer"})

TURNS = 0
"""Threads of the engine's lane where there is none."""

TAKING_TURNS = (2.0, 2.0)
"""Slowdowns of engine and trainer in turns, and of what was never measured."""

NO_WORK = "no work to run beside"

MOST_LOSS = 0.1
"""Of the speed in turns, that a mode may cost engine or trainer while durations are unknown. The short passes of the
start measure a slowdown that is off by about as much."""


class Stage(NamedTuple):
    """A piece of a job's step."""

    kind: StageKind
    seconds: float
    """Predicted rest, alone on all cores; infinite where it cannot be predicted."""
    rows: int = 0
    """Rows of its decode steps."""


JobStages = tuple[Stage, ...]
"""A job's stages, in order; the first one runs."""


def bucket(kind: StageKind, rows: int) -> str:
    """The key of a slice of the engine in the table."""
    if kind == "prefill":
        return kind
    return str(next((most for most in BUCKETS if rows <= most), BUCKETS[-1]))


class SlowdownTable:
    """Seconds of slices beside each other over seconds alone on all cores, of engine and trainer, by the threads of the
    engine's lane and the engine's work. Measured at the start and corrected by every slice."""

    def __init__(self) -> None:
        self._engine: dict[tuple[int, str], float] = {}
        self._trainer: dict[tuple[int, str], float] = {}
        self._errors: dict[tuple[int, str], float] = {}

    def record(
        self, threads: int, kind: StageKind, rows: int, *, engine: float | None = None, trainer: float | None = None
    ) -> None:
        """A slice of the engine, or of the trainer beside this work of the engine, was so much slower than alone."""
        at = threads, bucket(kind, rows)
        for side, slow in ((self._engine, engine), (self._trainer, trainer)):
            if slow is None or not 0 < slow < math.inf:
                continue
            if (before := side.get(at)) is not None:
                error = abs(slow / before - 1)
                self._errors[at] = (1 - CORRECTION) * self._errors.get(at, 0.0) + CORRECTION * error
                slow = before + CORRECTION * (slow - before)
            side[at] = slow

    def slowdown(self, threads: int, kind: StageKind, rows: int) -> tuple[float, float]:
        """The slowdowns of engine and trainer."""
        at = threads, bucket(kind, rows)
        if threads == TURNS or at not in self._engine or at not in self._trainer:
            return TAKING_TURNS
        return self._engine[at], self._trainer[at]

    def reliable(self, threads: int, kind: StageKind, rows: int) -> bool:
        """Whether the last slices were as the table predicted them."""
        return self._errors.get((threads, bucket(kind, rows)), 0.0) <= RELIABLE

    def figures(self) -> dict[tuple[int, str], tuple[float, float]]:
        """All that was measured of both."""
        return {at: (self._engine[at], self._trainer[at]) for at in self._engine if at in self._trainer}


@dataclass(frozen=True)
class LaneCosts:
    """Durations of stages on a worker."""

    table: SlowdownTable
    step: Callable[[int], float]
    """Seconds of a decode step of so many rows, alone on all cores."""


class State(NamedTuple):
    """Jobs on a worker at one time."""

    chains: tuple[JobStages, ...]
    """The chains of jobs that have not ended."""
    now: float = 0.0
    ends: tuple[float, ...] = ()
    """When the others did."""

    @property
    def cost(self) -> float:
        """The finish of the last job plus the mean finish of all, once all have ended."""
        return max(self.ends) + fmean(self.ends) if self.ends else 0.0


def engine_work(chains: Sequence[JobStages]) -> tuple[StageKind, int] | None:
    """The kind of the engine's next slices, and the rows that decode; None without work for it."""
    heads = [chain[0] for chain in chains if chain and chain[0].kind in ENGINE]
    if not heads:
        return None
    decodes = [max(1, stage.rows) for stage in heads if stage.kind != "prefill"]
    return ("decode", sum(decodes)) if decodes else ("prefill", 0)


def overlaps(chains: Sequence[JobStages]) -> bool:
    """Whether engine and trainer both have work, so that the mode matters."""
    kinds = {chain[0].kind for chain in chains if chain}
    return bool(kinds & ENGINE) and bool(kinds & TRAINER)


def rates(chains: Sequence[JobStages], threads: int, costs: LaneCosts) -> list[float]:
    """Seconds alone that a second yields, of the first stage of each chain."""
    heads = [chain[0] for chain in chains]
    kinds = [stage.kind for stage in heads]
    training, prefills = sum(kind in TRAINER for kind in kinds), kinds.count("prefill")
    rows = sum(max(1, stage.rows) for stage in heads if stage.kind in ("decode", "tail"))
    slow = (1.0, 1.0)
    if training and (rows or prefills):
        slow = costs.table.slowdown(threads, "decode" if rows else "prefill", rows)
    engine = 1 / (slow[0] * (prefills + bool(rows) or 1))
    trainer = 1 / (slow[1] * (training or 1))
    step = costs.step(rows) if rows else 0.0
    found = []
    for stage in heads:
        if stage.kind == "environment":
            found.append(1.0)
        elif stage.kind in TRAINER:
            found.append(trainer)
        elif stage.kind == "prefill" or not (own := costs.step(max(1, stage.rows))):
            found.append(engine)
        else:
            found.append(engine * own / max(own, step))
    return found


def _until_next_end(chains: Sequence[JobStages], threads: int, costs: LaneCosts) -> tuple[float, list[JobStages]]:
    """The seconds until the next stage ends, in this mode, and the rest of each chain then, empty of those that end."""
    speeds = rates(chains, threads, costs)
    spent = min(chain[0].seconds / speed for chain, speed in zip(chains, speeds, strict=True))
    left: list[JobStages] = []
    for (first, *others), speed in zip(chains, speeds, strict=True):
        rest = first.seconds - spent * speed
        ended = rest <= 1e-9 * max(1.0, first.seconds)
        left.append(tuple(others) if ended else (Stage(first.kind, rest, first.rows), *others))
    return spent, left


def _later(state: State, spent: float, left: Sequence[JobStages]) -> State:
    now = state.now + spent
    running = tuple(chain for chain in left if chain)
    return State(running, now, state.ends + (now,) * (len(left) - len(running)))


def advance(state: State, threads: int, costs: LaneCosts) -> State:
    """The state when the next stage has ended, in this mode."""
    return _later(state, *_until_next_end(state.chains, threads, costs))


def hold(state: State, threads: int, costs: LaneCosts) -> State:
    """The state when each of the present stages has ended, in this mode."""
    lengths = [len(chain) for chain in state.chains]
    while any(len(chain) == length for chain, length in zip(state.chains, lengths, strict=True)):
        spent, left = _until_next_end(state.chains, threads, costs)
        lengths = [length for chain, length in zip(left, lengths, strict=True) if chain]
        state = _later(state, spent, left)
    return state


def complete(state: State, threads: int, costs: LaneCosts) -> State:
    """The end of all jobs, if the mode stays."""
    while state.chains:
        state = advance(state, threads, costs)
    return state


def cost_of(state: State, mode: int, modes: Sequence[int], depth: int, costs: LaneCosts) -> float:
    """The least cost if ``mode`` is the next one: until the present stages end, before the best one; or, with
    look-ahead, until the next stage ends, before a choice of one depth less."""
    held = hold(state, mode, costs)
    found = min(complete(held, other, costs).cost for other in modes)
    if depth < 1 or not state.chains:
        return found
    return min(found, predicted(advance(state, mode, costs), modes, depth - 1, costs))


def predicted(state: State, modes: Sequence[int], depth: int, costs: LaneCosts) -> float:
    """The least cost of a choice among ``modes``."""
    while state.chains and not overlaps(state.chains):
        state = advance(state, TURNS, costs)
    return min(cost_of(state, mode, modes, depth, costs) for mode in modes)


class LaneChoice(NamedTuple):
    """A mode, and why."""

    threads: int
    gain: float
    """Predicted share of the cost in turns that it saves; 0 where nothing was predicted."""
    why: str = ""
    """The reason for turns, or for a mode whose gain was not predicted."""

    @property
    def active(self) -> bool:
        return self.threads != TURNS


def choose(chains: Sequence[JobStages], modes: Sequence[int], costs: LaneCosts, present: int, depth: int) -> LaneChoice:
    """The mode for now, of ``modes``: threads of the engine's lane, turns (0) among them. ``present`` is the mode so
    far. Ties go to the first."""
    running = tuple(chain for chain in chains if chain)
    work = engine_work(running)
    if work is None or not overlaps(running):
        return LaneChoice(TURNS, 0.0, NO_WORK)
    able = [mode for mode in modes if mode != TURNS and costs.table.slowdown(mode, *work) != TAKING_TURNS]
    sure = [mode for mode in able if costs.table.reliable(mode, *work)]
    if able and not sure:
        return LaneChoice(TURNS, 0.0, "slices beside each other are not as predicted")
    lanes = LaneCosts(costs.table, cache(costs.step))
    known = all(math.isfinite(stage.seconds) for chain in running for stage in chain)
    ahead = affordable_depth(running, 1 + len(sure), depth) if known else None
    gains = _gains_by_rates(work, sure, costs) if ahead is None else _predicted_gains(running, sure, lanes, ahead)
    best = max(gains, key=lambda mode: gains[mode])
    if present != TURNS and gains.get(present, 0.0) >= max(LEAST_GAIN, gains[best] - SWITCH_GAIN):
        best = present
    if gains[best] < LEAST_GAIN:
        return LaneChoice(TURNS, 0.0, "nothing gains")
    if best == TURNS:
        return LaneChoice(best, gains[best], "to run beside later gains more")
    if ahead is not None:
        return LaneChoice(best, gains[best])
    return LaneChoice(best, 0.0, "jobs are too many to predict" if known else "durations are unknown")


def affordable_depth(chains: Sequence[JobStages], modes: int, depth: int) -> int | None:
    """The largest depth up to ``depth`` of which a choice advances at most :data:`MOST_ADVANCES` stages; None where not
    even depth 0 does."""
    complete_one = len(chains) * sum(map(len, chains))
    cost = 0
    found: int | None = None
    for ahead in range(depth + 1):
        cost = modes * cost + (1 + modes) * complete_one  # of cost_of
        if modes * cost > MOST_ADVANCES:
            break
        found = ahead
    return found


def _predicted_gains(chains: tuple[JobStages, ...], sure: list[int], costs: LaneCosts, depth: int) -> dict[int, float]:
    """The share of the cost in turns that each mode saves, by predicted finishes."""
    state, modes = State(chains), [TURNS, *sure]
    turns = complete(state, TURNS, costs).cost
    return {mode: 1 - cost_of(state, mode, modes, depth, costs) / turns if turns else 0.0 for mode in modes}


def _gains_by_rates(work: tuple[StageKind, int], sure: list[int], costs: LaneCosts) -> dict[int, float]:
    """The share of the time that each mode saves for the same work, of those that make neither part much slower."""
    gains = {TURNS: 0.0}
    for mode in sure:
        slow = costs.table.slowdown(mode, *work)
        if max(slow) <= min(TAKING_TURNS) * (1 + MOST_LOSS):
            gains[mode] = 1 - 1 / sum(1 / one for one in slow)
    return gains


class StagePredictor:
    """Durations of stages from the last step, and how far these are off."""

    def __init__(self) -> None:
        self._known: LRUCache[str, tuple[float, float]] = LRUCache(MOST_STAGES)
        """By name: the last duration, and the mean relative error of those before as predictions; infinite of one."""

    def record(self, name: str, seconds: float) -> None:
        """The stage of this name took so long in the step that ended."""
        last, mean = self._known.get(name, (0.0, math.inf))
        if name in self._known and seconds > 0:
            error = abs(last - seconds) / seconds
            mean = error if math.isinf(mean) else error + (1 - NEWEST) * (mean - error)
        self._known[name] = seconds, mean

    def predict(self, name: str) -> float | None:
        """Seconds of its next step; None while they are unknown, or were off by more than :data:`RELIABLE`."""
        return self._known[name][0] if self.error(name) <= RELIABLE else None

    def error(self, name: str) -> float:
        """The mean relative error; infinite while unknown."""
        return self._known.get(name, (0.0, math.inf))[1]
