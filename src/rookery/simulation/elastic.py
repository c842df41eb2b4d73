"""A pool of rollout workers and one trainer through a trace of steps, in arithmetic: each step consumes the same
number of trajectories, whose generation takes the trace's worker-seconds, and training takes its own time meanwhile.
The size is fixed, or follows a rule: :func:`rookery.scheduling.elastic.wanted_workers`, or the published one
(AstraFlow, arXiv 2605.15565, equation 1), which looks at a window of fixed length. The figures are simulated."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Self, TypeAlias

from rookery.controller.rollout.rules import ROLLOUT_RULES
from rookery.scheduling.elastic import (
    CERTAIN,
    HEADROOM,
    LEAST_STEPS,
    LONGEST_WAIT,
    PoolStep,
    change_of,
    step_window,
    wanted_workers,
)

TRAJECTORIES = 64
"""Consumed by each step."""
START_SECONDS = 30.0
"""From the request for a worker to its first token: a base model is loaded meanwhile."""
WINDOW = ROLLOUT_RULES.scale_window
"""Steps that are looked at, at most."""
NOISE = 0.10
"""Sigma of the logarithm of a step's generation time: lengths of replies vary."""
TRAIN_SECONDS = 20.0
"""Training of a step."""


@dataclass(frozen=True)
class StepTrace:
    """The generation of each step in worker-seconds, and its training in seconds."""

    generation: Sequence[float]
    training: Sequence[float]

    @classmethod
    def steady(cls, right: int, steps: int, seed: int) -> Self:
        """``right`` workers generate as fast as the trainer trains."""
        return cls.growing(right, right, steps, seed)

    @classmethod
    def growing(cls, first: int, last: int, steps: int, seed: int) -> Self:
        """The right number of workers moves from ``first`` to ``last``, as replies grow in training."""
        random = Random(seed)
        right = [first + (last - first) * step / max(1, steps - 1) for step in range(steps)]
        noise = [math.exp(random.gauss(0.0, NOISE) - NOISE**2 / 2) for _ in range(steps)]
        return cls([TRAIN_SECONDS * r * n for r, n in zip(right, noise, strict=True)], [TRAIN_SECONDS] * steps)

    @property
    def floor(self) -> float:
        """Worker-seconds that no pool goes below, whatever its sizes are: a step with ``w`` workers takes the longer of
        generation / w and training, and costs ``w`` workers and the trainer for that time, so both are paid once."""
        return sum(self.generation) + sum(self.training)


@dataclass
class PoolRun:
    sizes: list[int] = field(default_factory=list)
    """Rollout workers during each step."""
    waits: list[float] = field(default_factory=list)
    """Share of each step for which the trainer waited."""
    seconds: float = 0.0
    worker_seconds: float = 0.0
    """Seconds of the rollout workers and the trainer."""

    @property
    def wait_share_late(self) -> float:
        """Mean of ``waits`` in the second half."""
        late = self.waits[len(self.waits) // 2 :]
        return sum(late) / len(late)


def best_fixed(trace: StepTrace, most_wait: float) -> PoolRun:
    """The fixed size with the fewest worker-seconds of those whose trainer waits for at most this share of the second
    half. It needs to know the whole trace beforehand."""
    most = math.ceil(max(map(float.__truediv__, trace.generation, trace.training))) + 1
    runs = [replay(trace, size) for size in range(1, most + 1)]
    return min((run for run in runs if run.wait_share_late <= most_wait), key=lambda run: run.worker_seconds)


Rule: TypeAlias = Callable[[int, Sequence[PoolStep], int], int]
"""The number of workers, the steps since it changed, and the sign of its last change become the next number."""


def shipped(
    workers: int, steps: Sequence[PoolStep], change: int, *, headroom: float = HEADROOM, certain: float = CERTAIN
) -> int:
    if len(steps) < LEAST_STEPS:
        return workers
    return wanted_workers(step_window(workers, steps), workers, change, headroom=headroom, certain=certain)


PUBLISHED_MORE, PUBLISHED_LESS, PUBLISHED_HEADROOM = 0.10, 0.05, 1.10
"""Shares of waiting above and below which the published rule changes a pool, and its headroom."""


def published(workers: int, steps: Sequence[PoolStep], change: int, *, window: int = WINDOW) -> int:
    """Its workers generate without a pause, and trajectories that nobody consumes are dropped: they enter as well."""
    if len(steps) < window:
        return workers
    seen = step_window(workers, list(steps)[-window:])
    wait = min(seen.waited / seen.seconds, LONGEST_WAIT)
    if wait > PUBLISHED_MORE:
        return math.ceil(workers / (1 - wait))
    if wait < PUBLISHED_LESS:
        return min(workers, math.ceil(workers * seen.busy * PUBLISHED_HEADROOM))
    return workers


def replay(trace: StepTrace, workers: int, rule: Rule | None = None) -> PoolRun:
    """The trajectories of a step are generated while the one before trains (``max_staleness`` 1), so a step takes as
    long as the slower of the two. A worker that was asked for is paid for from then on, and generates later. Without a
    ``rule`` the number is fixed."""
    run, starting = PoolRun(), list[float]()
    change, seen = 0, deque[PoolStep](maxlen=WINDOW)
    for generation, training in zip(trace.generation, trace.training, strict=True):
        joined = [when for when in starting if when <= run.seconds]
        if joined:
            workers, starting = workers + len(joined), [when for when in starting if when > run.seconds]
            seen.clear()
        time = max(training, generation / workers)
        wait = time - training
        run.sizes.append(workers)
        run.waits.append(wait / time)
        run.seconds += time
        run.worker_seconds += time * (workers + len(starting) + 1)
        seen.append(PoolStep(wait, time, TRAJECTORIES, TRAJECTORIES, time, generation))
        if rule is None or starting:
            continue
        wanted = rule(workers, seen, change)
        change = change_of(workers, wanted, change)
        if wanted != workers:
            starting = [run.seconds + START_SECONDS] * max(0, wanted - workers)
            workers = min(workers, wanted)
            seen.clear()
    return run
