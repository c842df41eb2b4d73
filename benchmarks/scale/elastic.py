"""The number of rollout workers by the wait of the trainer (AstraFlow's rule), against fixed numbers: the shipped
function through replayed traces of 200 steps. Simulated: no model runs."""

from __future__ import annotations

import statistics
from itertools import pairwise

from benchmarks.lib.harness import Result, command

from rookery.simulation.elastic import PoolRun, StepTrace, replay

SEEDS = range(20)
STEPS = 200
RIGHT = 10
"""Workers that generate as fast as the trainer trains, throughout; and, in the other trace, at first 4, at last 12."""
MOST_WAIT = 0.05


def reversals(run: PoolRun) -> int:
    moves = [after - before for before, after in pairwise(run.sizes) if after != before]
    return sum(a * b < 0 for a, b in pairwise(moves))


def main() -> None:
    result = Result("elastic", "Elastic pool of rollout workers, simulated", command(), simulated=True)
    traces = {"steady": [StepTrace.steady(RIGHT, STEPS, seed) for seed in SEEDS],
              "replies grow": [StepTrace.growing(4, 12, STEPS, seed) for seed in SEEDS]}  # fmt: skip
    for name, few, many in (("steady", RIGHT // 2, 2 * RIGHT), ("replies grow", 4, 24)):
        ours = [replay(trace, few, elastic=True) for trace in traces[name]]
        shrunk = [replay(trace, many, elastic=True) for trace in traces[name]]
        fixed = {count: [replay(trace, count, elastic=False) for trace in traces[name]] for count in (few, many)}
        for count, runs in fixed.items():
            for start, elastic in ((few, ours), (many, shrunk)):
                shares = [a.worker_seconds / b.worker_seconds for a, b in zip(elastic, runs, strict=True)]
                result.add(f"{name}: worker-hours from {start} workers over those of {count} fixed", shares, "x")
        result.add(f"{name}: share of waiting, second half", [run.wait_share_late for run in ours], "of 1")
        turns = max(map(reversals, [*ours, *shrunk]))
        result.judge(f"{name}: at most one reversal from either size", str(turns), turns <= 1, f"{len(SEEDS)} seeds")
        less = [
            run.worker_seconds < min(fixed[few][seed].worker_seconds, fixed[many][seed].worker_seconds)
            for seed, run in enumerate(ours)
        ]
        result.judge(f"{name}: fewer worker-hours than either fixed size", f"{sum(less)} of {len(less)}", all(less),
                     f"from {few} workers")  # fmt: skip
    wait = statistics.median(replay(trace, RIGHT // 2, elastic=True).wait_share_late for trace in traces["steady"])
    result.judge("steady: waiting at most 5%", f"{wait:.1%}", wait <= MOST_WAIT)
    result.save()


if __name__ == "__main__":
    main()
