"""The number of rollout workers by the wait of the trainer (after AstraFlow's rule), against fixed numbers: the shipped
function through replayed traces of 200 steps. Simulated: no model runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from benchmarks.lib.harness import Result, command

from rookery.simulation.elastic import PoolRun, StepTrace, best_fixed, published, replay, shipped

SEEDS = range(20)
STEPS = 200
RIGHT = 10
"""Workers that generate as fast as the trainer trains, throughout; and, in the other trace, at first 4, at last 12."""
MOST_WAIT = 0.05
MOST_HOURS = 1.15
"""Times the worker-hours of the best fixed number, where the right one is constant: no rule needs fewer than that, and
one that starts without knowledge may need 15% more. Not of the rule's own constants, which it has to justify."""


def reversals(run: PoolRun) -> int:
    moves = [after - before for before, after in pairwise(run.sizes) if after != before]
    return sum(a * b < 0 for a, b in pairwise(moves))


def over_best(run: PoolRun, trace: StepTrace) -> float:
    """Worker-seconds over those of the best fixed number whose trainer waits as little, or :data:`MOST_WAIT`."""
    return run.worker_seconds / best_fixed(trace, max(MOST_WAIT, run.wait_share_late)).worker_seconds


WINDOWS = (10, 30)
"""Steps of the window of the published rule, which does not state one."""


def cheaper_fixed(traces: Sequence[StepTrace], than: Sequence[PoolRun]) -> dict[int, tuple[float, float]]:
    """Of the fewest three fixed numbers whose trainers wait for :data:`MOST_WAIT` of the second half at most, the
    largest ratio of worker-hours to those of ``than``, and the longest wait."""
    found = dict[int, tuple[float, float]]()
    for count in range(1, 3 * RIGHT):
        runs = [replay(trace, count) for trace in traces]
        wait = max(run.wait_share_late for run in runs)
        if wait <= MOST_WAIT:
            ratios = [a.worker_seconds / b.worker_seconds for a, b in zip(runs, than, strict=True)]
            found[count] = max(ratios), wait
        if len(found) == 3:
            break
    return found


def main() -> None:
    result = Result("elastic", "Elastic pool of rollout workers, simulated", command(), simulated=True)
    traces = {"steady": [StepTrace.steady(RIGHT, STEPS, seed) for seed in SEEDS],
              "replies grow": [StepTrace.growing(4, 12, STEPS, seed) for seed in SEEDS]}  # fmt: skip
    for name, few, many in (("steady", RIGHT // 2, 2 * RIGHT), ("replies grow", 4, 24)):
        ours = [replay(trace, few, shipped) for trace in traces[name]]
        shrunk = [replay(trace, many, shipped) for trace in traces[name]]
        fixed = {count: [replay(trace, count) for trace in traces[name]] for count in (few, many)}
        best = [best_fixed(trace, MOST_WAIT) for trace in traces[name]]
        for count, runs in {
            f"{few} fixed": fixed[few],
            f"{many} fixed": fixed[many],
            "the best fixed number": best,
        }.items():
            for start, elastic in ((few, ours), (many, shrunk)):
                shares = [a.worker_seconds / b.worker_seconds for a, b in zip(elastic, runs, strict=True)]
                result.add(f"{name}: worker-hours from {start} workers over those of {count}", shares, "x")
        result.add(f"{name}: best fixed number, trainer waits {MOST_WAIT:.0%} at most", [run.sizes[0] for run in best],
                   "workers", "known only after the run")  # fmt: skip
        floors = [trace.floor for trace in traces[name]]
        over = {
            what: [run.worker_seconds / floor for run, floor in zip(runs, floors, strict=True)]
            for what, runs in ((f"{few} fixed", fixed[few]), ("the best fixed number", best))
        }
        for what, ratios in over.items():
            result.add(f"{name}: worker-hours of {what} over the least of any pool", ratios, "x",
                       "generation and training, known without a run")  # fmt: skip
        result.add(f"{name}: share of waiting, second half", [run.wait_share_late for run in ours], "of 1")
        turns = max(map(reversals, [*ours, *shrunk]))
        result.judge(f"{name}: at most one reversal from either size", str(turns), turns <= 1, f"{len(SEEDS)} seeds")
        without = {"no headroom": partial(shipped, headroom=1.0), "no margin": partial(shipped, certain=0.0)}
        for what, rule in without.items():
            runs = [replay(trace, start, rule) for trace in traces[name] for start in (few, many)]
            result.add(f"{name}: reversals, {what}", [max(map(reversals, runs))], "at most")
        _compare_published(result, name, traces[name], {few: ours, many: shrunk})
        cheaper = cheaper_fixed(traces[name], fixed[few])
        for size, (ratio, wait) in cheaper.items():
            result.add(f"{name}: worker-hours of {size} fixed over those of {few} fixed", [ratio], "x at most",
                       f"the trainer waits {wait:.1%} at most")  # fmt: skip
        worst = max(
            over_best(run, trace) for runs in (ours, shrunk) for run, trace in zip(runs, traces[name], strict=True)
        )
        if name == "steady":
            result.judge(f"steady: worker-hours <= {MOST_HOURS} x the best fixed number's that waits as little",
                         f"{worst:.3f} x at most", worst <= MOST_HOURS,
                         "the right number is constant: no rule needs fewer hours than it")  # fmt: skip
        else:
            result.judge(f"{name}: fewer worker-hours than the best fixed number that waits as little",
                         f"{worst:.3f} x at most", worst < 1)  # fmt: skip
        for start, elastic in ((few, ours), (many, shrunk)):
            shares = [
                max(a.worker_seconds / b.worker_seconds for a, b in zip(elastic, fixed[count], strict=True))
                for count in (few, many)
            ]
            waits = max(run.wait_share_late for run in fixed[few])
            least = min(1 / ratio for ratio in over[f"{few} fixed"])
            met = [str(size) for size, (ratio, _) in cheaper.items() if ratio < 1]
            result.judge(f"{name}: from {start} workers, fewer worker-hours than either fixed number, {few} and {many}",
                         f"{shares[0]:.3f} x and {shares[1]:.3f} x at most", max(shares) < 1,
                         f"no pool needs less than {least:.3f} x of {few} fixed workers, whose trainer waits up to"
                         f" {waits:.0%} of its time; of fixed numbers that wait {MOST_WAIT:.0%} at most, fewer hours"
                         f" than {few}: {', '.join(met) or 'none'}")  # fmt: skip
        wait = max(run.wait_share_late for runs in (ours, shrunk) for run in runs)
        result.judge(f"{name}: the trainer waits <= {MOST_WAIT:.0%} of the second half", f"{wait:.1%} at most",
                     wait <= MOST_WAIT)  # fmt: skip
    result.save()


def _compare_published(
    result: Result, name: str, traces: Sequence[StepTrace], ours: dict[int, Sequence[PoolRun]]
) -> None:
    """Worker-hours and waits of the shipped rule over those of the published one, with each of its windows."""
    for window in WINDOWS:
        rule, hours, waits = partial(published, window=window), list[float](), list[tuple[float, float]]()
        turns = 0
        for start, runs in ours.items():
            theirs = [replay(trace, start, rule) for trace in traces]
            hours += [a.worker_seconds / b.worker_seconds for a, b in zip(runs, theirs, strict=True)]
            waits += [(a.wait_share_late, b.wait_share_late) for a, b in zip(runs, theirs, strict=True)]
            turns = max(turns, *map(reversals, theirs))
        mine, theirs_waits = (statistics.fmean(one[side] for one in waits) for side in (0, 1))
        result.add(f"{name}: worker-hours over those of the published rule, window of {window}", hours, "x",
                   f"waiting {mine:.1%}, published {theirs_waits:.1%}; its reversals at most {turns}")  # fmt: skip


if __name__ == "__main__":
    main()
