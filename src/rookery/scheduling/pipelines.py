"""Pipelines of several jobs on the same workers: which sub-stage starts where, beside which, and which one moves.

A job is a graph of *sub-stages* (prefill, decode, tail, environment, forward-backward, optimizer), each with a duration
predicted from the last step. Three actions, after JigsawRL (arXiv 2604.23838):

* **start** a ready sub-stage on an idle worker;
* **multiplex**: start it beside another one, where the measured slowdown table says that both together are quicker than
  one after the other (:func:`pays`);
* **merge**: move a decode tail to another worker, at the cost of prefilling its tokens there.

An action is chosen by its predicted cost: the finish of the last job plus the mean finish of all, after the action and
up to ``depth - 1`` further decisions; the rest is first come, first served, with multiplexing or without. Depth 0 is
greedy: the most work per second now. The paper does not state its depth.

Three rules bound the damage of wrong predictions: a move must gain :data:`HYSTERESIS` times its own cost; a tail moves
once; and while durations cannot be predicted, or where no action gains, the order is first come, first served and the
planner is *inactive*. Pure; ties go to the first sub-stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

PAYS = 1.05
"""1/s_a + 1/s_b of a pair must be above it, s being the slowdown beside the other: 1 is one after the other, and a few
percent are within the error of the measurement."""

HYSTERESIS = 1.5
"""A move must gain this many times its own cost: predictions of the last step are off by a third at times."""

BREADTH = 3
"""Actions that are followed at each level of the look-ahead: the best by the level below."""

RELIABLE = 0.3
"""Mean relative error up to which durations of the last step predict those of the next. Steady work is off by a tenth;
lengths that double with each step are off by a half."""

NEWEST = 0.5
"""Weight of the newest step in the mean error."""

Slowdown = Mapping[tuple[str, str], tuple[float, float]]
"""By two kinds of work: seconds beside the other over seconds alone. Kinds are in order of the alphabet."""

TIME_SLICES = (2.0, 2.0)
"""Of a pair that was never measured: as if they took turns."""


@dataclass(frozen=True, slots=True)
class SubStage:
    """A piece of a job's step."""

    job: str
    kind: str
    """Key of the slowdown table; ``environment`` needs no worker. Kinds that begin with ``decode`` share forward
    passes."""
    seconds: float
    """Predicted, alone on a worker."""
    after: tuple[int, ...] = ()
    """Numbers of the sub-stages that end before it starts."""
    worker: int | None = None
    """Where its requests or its policy are; None is any worker."""
    move_seconds: float = math.inf
    """Prefill of its tokens on another worker; infinite where it cannot move."""


class Action(NamedTuple):
    """``stage`` starts on ``worker``, or moves there while it runs."""

    stage: int
    worker: int
    moves: bool = False


def slowdowns(table: Slowdown, a: str, b: str) -> tuple[float, float]:
    """Of ``a`` and ``b`` beside each other."""
    first, second = table.get((min(a, b), max(a, b)), TIME_SLICES)
    return (first, second) if a <= b else (second, first)


def pays(table: Slowdown, a: str, b: str) -> bool:
    """Whether two kinds of work are quicker beside each other than one after the other."""
    return sum(1 / slow for slow in slowdowns(table, a, b)) > PAYS


@dataclass
class Timeline:
    """Sub-stages on workers at one time. Changed by :meth:`apply` and :meth:`advance`."""

    stages: Sequence[SubStage]
    workers: int
    table: Slowdown
    now: float = 0.0
    left: dict[int, float] = field(default_factory=dict)
    """Seconds alone of every sub-stage that has not ended."""
    at: dict[int, int] = field(default_factory=dict)
    """The worker of each that runs; -1 for environments."""
    ready: list[int] = field(default_factory=list)
    """In the order in which they became so."""
    ends: dict[str, float] = field(default_factory=dict)
    """When the last sub-stage of each job ended."""
    moved: frozenset[int] = frozenset()
    multiplex: bool = True
    merge: bool = True

    @classmethod
    def begin(
        cls, stages: Sequence[SubStage], workers: int, table: Slowdown, *, multiplex: bool = True, merge: bool = True
    ) -> Timeline:
        """Nothing has run yet."""
        left = {number: stage.seconds for number, stage in enumerate(stages)}
        made = cls(stages, workers, table, left=left, multiplex=multiplex, merge=merge)
        made._release()
        return made

    def copy(self) -> Timeline:
        return Timeline(
            self.stages, self.workers, self.table, self.now, dict(self.left), dict(self.at), list(self.ready),
            dict(self.ends), self.moved, self.multiplex, self.merge,
        )  # fmt: skip

    def on(self, worker: int) -> list[int]:
        """The sub-stages that run there: two at most."""
        return [stage for stage, where in self.at.items() if where == worker]

    def rate(self, stage: int) -> float:
        """Seconds alone that a second yields."""
        where = self.at[stage]
        other = next((held for held in self.on(where) if held != stage), None) if where >= 0 else None
        if other is None:
            return 1.0
        return 1 / slowdowns(self.table, self.stages[stage].kind, self.stages[other].kind)[0]

    def _fits(self, stage: int, worker: int, batched: bool) -> bool:
        """Whether it may run there. ``batched``: beside decoding alone, which costs no decision."""
        held = self.on(worker)
        if not held:
            return True
        a, b = self.stages[stage].kind, self.stages[held[0]].kind
        decodes = a.startswith("decode") and b.startswith("decode")
        return len(held) == 1 and (decodes or (not batched and self.multiplex)) and pays(self.table, a, b)

    def eager(self) -> Action | None:
        """The next action of first come, first served that multiplexes all that pays."""
        return self.first(batched=False)

    def first(self, batched: bool = True) -> Action | None:
        """The next action of first come, first served; decodes share forward passes."""
        for stage in self.ready:
            pinned = self.stages[stage].worker
            for worker in range(self.workers) if pinned is None else (pinned,):
                if self._fits(stage, worker, batched):
                    return Action(stage, worker)
        return None

    def actions(self) -> Iterator[Action | None]:
        """All that are possible now; of several idle workers the first. None: to wait until a sub-stage ends."""
        if self.at:
            yield None
        for stage in self.ready:
            pinned, idle = self.stages[stage].worker, False
            for worker in range(self.workers) if pinned is None else (pinned,):
                empty = not self.on(worker)
                if self._fits(stage, worker, batched=False) and not (empty and idle):
                    yield Action(stage, worker)
                idle = idle or empty
        for stage, where in self.at.items() if self.merge else ():
            if stage not in self.moved and self.stages[stage].move_seconds < self.left[stage]:
                for worker in range(self.workers):
                    if worker != where and self._fits(stage, worker, batched=True):
                        yield Action(stage, worker, moves=True)

    def apply(self, action: Action | None) -> Timeline:
        """A copy after the action; for None, at the end of the next sub-stage."""
        made = self.copy()
        if action is None:
            made.advance()
            return made
        made.at[action.stage] = action.worker
        if action.moves:
            made.left[action.stage] += made.stages[action.stage].move_seconds
            made.moved |= {action.stage}
        else:
            made.ready.remove(action.stage)
        return made

    def advance(self) -> list[int]:
        """Run until a sub-stage ends: those that do. Empty when nothing runs."""
        rates = {stage: self.rate(stage) for stage in self.at}
        step = min((self.left[stage] / rate for stage, rate in rates.items()), default=0.0)
        self.now += step
        ended = []
        for stage, rate in rates.items():
            self.left[stage] -= step * rate
            if self.left[stage] <= 1e-9:
                ended.append(stage)
                del self.left[stage], self.at[stage]
                self.ends[self.stages[stage].job] = self.now
        self._release()
        return ended

    def _release(self) -> None:
        for number in self.left:
            if number not in self.at and number not in self.ready:
                stage = self.stages[number]
                if not any(before in self.left for before in stage.after):
                    if stage.kind == "environment":
                        self.at[number] = -1
                    else:
                        self.ready.append(number)

    def cost(self) -> float:
        """Of a finished timeline: the last finish plus the mean of the jobs'."""
        return max(self.ends.values(), default=0.0) + sum(self.ends.values()) / max(1, len(self.ends))


def complete(timeline: Timeline, choose: Callable[[Timeline], Action | None] = Timeline.first) -> Timeline:
    """A copy, run to its end with the actions of ``choose``: first come, first served by default."""
    made = timeline.copy()
    while made.left:
        while (action := choose(made)) is not None:
            made = made.apply(action)
        if not made.advance() and made.left and not made.at:
            raise ValueError(f"sub-stages {sorted(made.left)} wait for each other")
    return made


def greedy(timeline: Timeline) -> Action | None:
    """The action after which the most work is done per second now; None where none adds to it."""
    first = timeline.first()
    best, most = first, sum(map(timeline.rate, timeline.at))
    if first is not None:
        most = _rate_after(timeline, first)
    for action in timeline.actions():
        if action is not None and (rate := _rate_after(timeline, action)) > most + 1e-9:
            best, most = action, rate
    return best


def _rate_after(timeline: Timeline, action: Action) -> float:
    """Work per second once the action is taken and the workers that it leaves idle have work."""
    made = timeline.apply(action)
    while (follows := made.first()) is not None:
        made = made.apply(follows)
    return sum(map(made.rate, made.at))


class Planner:
    """Chooses actions with a look-ahead of ``depth`` decisions; remembers whether it ever chose another one than first
    come, first served."""

    def __init__(self, depth: int = 1) -> None:
        """``depth`` 0: greedy. More than 2 gained less than 1% in simulation."""
        self._depth = depth
        self.chosen = 0
        """Actions that first come, first served would not have taken."""

    @property
    def active(self) -> bool:
        return self.chosen > 0

    def choose(self, timeline: Timeline) -> Action | None:
        """The next action; None to wait until a sub-stage ends. :func:`complete` calls it."""
        first = timeline.first()
        action = greedy(timeline) if self._depth == 0 else self._look(timeline, first)
        self.chosen += action != first
        return action

    def _look(self, timeline: Timeline, first: Action | None) -> Action | None:
        usual = complete(timeline).cost()
        best, least = first, usual
        for cost, action in self._ranked(timeline):
            ahead = min(cost, self._ahead(timeline.apply(action), self._depth - 1))
            spent = timeline.stages[action.stage].move_seconds if action is not None and action.moves else 0.0
            if ahead < least - 1e-9 and usual - ahead > HYSTERESIS * spent:
                best, least = action, ahead
        return best

    def _ahead(self, timeline: Timeline, depth: int) -> float:
        """The least predicted cost within so many more decisions."""
        if not depth or not timeline.left:
            return math.inf
        ranked = self._ranked(timeline)
        return min(min(cost, self._ahead(timeline.apply(action), depth - 1)) for cost, action in ranked)

    def _ranked(self, timeline: Timeline) -> list[tuple[float, Action | None]]:
        """The best actions, each with its predicted cost if first come, first served follows."""
        follows = (Timeline.first, Timeline.eager) if timeline.multiplex else (Timeline.first,)
        costs = []
        for action in timeline.actions():
            after = timeline.apply(action)
            costs.append((min(complete(after, rest).cost() for rest in follows), action))
        return sorted(costs, key=lambda cost: cost[0])[:BREADTH]


class StagePredictor:
    """Durations of sub-stages from the last step, and how far these are off."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._errors: dict[str, float] = {}

    def record(self, name: str, seconds: float) -> None:
        """The sub-stage of this name took so long in the step that ended."""
        if (last := self._last.get(name)) is not None and seconds > 0:
            error = abs(last - seconds) / seconds
            self._errors[name] = error + (1 - NEWEST) * (self._errors.get(name, error) - error)
        self._last[name] = seconds

    def predict(self, name: str) -> float | None:
        """Seconds of its next step; None while they are unknown, or were off by more than :data:`RELIABLE`."""
        return self._last[name] if self._errors.get(name, math.inf) <= RELIABLE else None

    def error(self, name: str) -> float:
        """The mean relative error; infinite while unknown."""
        return self._errors.get(name, math.inf)
