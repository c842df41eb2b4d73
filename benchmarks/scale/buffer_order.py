"""The order of the buffer of complete groups: the earliest deadline first against the first that arrived, with the
shipped functions of admission and choice. Simulated: no model runs."""

from __future__ import annotations

import heapq
import math
import statistics
from dataclasses import dataclass, field
from random import Random

from benchmarks.lib.harness import Result, command

from rookery.scheduling.job_rules import admission_budget, select_batch

SEEDS = range(20)
STEPS = 300
PER_STEP, SLOTS, MAX_STALENESS = 4, 24, 8
MEDIAN, SIGMA, LONGEST = 100.0, 1.0, 300.0
"""Tokens of a group's longest reply, log-normal; a slot generates one token in a unit of time."""
STEP_TIME = 40.0
"""The longest reply takes fewer steps than the bound: a group becomes too old only because it waits in the buffer. The
slots generate more than the trainer consumes."""


@dataclass(frozen=True)
class Group:
    ordinal: int
    step: int
    length: float
    responses: int = 1


@dataclass
class Run:
    consumed: list[float] = field(default_factory=list)
    dropped: list[float] = field(default_factory=list)
    oldest: int = 0
    """The largest staleness of a group that was trained on."""

    @property
    def ratio(self) -> float:
        """Mean length of dropped groups over that of consumed ones; 1 without dropped ones: no length is preferred."""
        return statistics.fmean(self.dropped) / statistics.fmean(self.consumed) if self.dropped else 1.0


def play(seed: int, *, fifo: bool, admission: bool) -> Run:
    """A job of :data:`STEPS` steps. Without ``admission`` every free slot begins a group at once, as AstraFlow's
    services do; with it the shipped budget decides."""
    random, run = Random(seed), Run()
    lengths = [min(LONGEST, MEDIAN * random.lognormvariate(0, SIGMA)) for _ in range(100 * STEPS)]
    running: list[tuple[float, int, Group]] = []
    ready: list[Group] = []
    step = ordinal = 0
    time, training = 0.0, math.inf
    while step < STEPS:
        free = SLOTS - len(running)
        if admission:
            budget = admission_budget(
                step=step + (training < math.inf), durable_step=step, in_flight=len(running), ready=len(ready),
                per_step=PER_STEP, max_staleness=MAX_STALENESS,
            )  # fmt: skip
            free = min(free, budget)
        for _ in range(free):
            group = Group(ordinal, step, lengths[ordinal % len(lengths)])
            heapq.heappush(running, (time + group.length, ordinal, group))
            ordinal += 1
        if training == math.inf:
            batch, stale = select_batch(ready, step=step, count=PER_STEP, max_staleness=MAX_STALENESS, fifo=fifo)
            run.dropped += [group.length for group in stale]
            ready = [group for group in ready if group not in stale and group not in batch]
            if batch:
                run.consumed += [group.length for group in batch]
                run.oldest = max([run.oldest, *(step - group.step for group in batch)])
                training = time + STEP_TIME
                continue
        ends = running[0][0] if running else math.inf
        if training <= ends:
            time, training, step = training, math.inf, step + 1
        else:
            time, _, group = heapq.heappop(running)
            ready.append(group)
    return run


def main() -> None:
    result = Result("buffer_order", "Order of the buffer of complete groups, simulated", command(), simulated=True)
    shares, ratios, oldest = dict[tuple[bool, bool], float](), dict[tuple[bool, bool], float](), 0
    for admission, name in ((False, "every free slot generates"), (True, "by the shipped budget")):
        runs = {fifo: [play(seed, fifo=fifo, admission=admission) for seed in SEEDS] for fifo in (False, True)}
        for fifo, order in ((False, "earliest deadline first"), (True, "first in, first out")):
            dropped = [len(run.dropped) / (len(run.dropped) + len(run.consumed)) for run in runs[fifo]]
            what = f"{name}, {order}: length of dropped over consumed groups"
            result.add(what, [run.ratio for run in runs[fifo]], "x")
            result.add(f"{name}, {order}: share of dropped groups", dropped, "of 1")
            shares[admission, fifo] = statistics.median(dropped)
            ratios[admission, fifo] = statistics.median(run.ratio for run in runs[fifo])
            oldest = max(oldest, *(run.oldest for run in runs[fifo]))
    result.judge(
        "every free slot generates: lengths of dropped and consumed groups are nearer than first in, first out",
        f"{ratios[False, False]:.2f} x, {ratios[False, True]:.2f} x",
        abs(ratios[False, False] - 1) < abs(ratios[False, True] - 1),
    )
    result.judge(
        "by the shipped budget: fewer groups are dropped than first in, first out",
        f"{shares[True, False]:.1%}, {shares[True, True]:.1%}",
        shares[True, False] < shares[True, True],
    )
    result.judge(f"no group is trained on above the bound of {MAX_STALENESS}", str(oldest), oldest <= MAX_STALENESS)
    result.save()


if __name__ == "__main__":
    main()
