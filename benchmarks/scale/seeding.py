"""Algorithm 1 with real processes: what seeding costs where it has nothing to do, and how it finds its way.

* alone: a worker without any remote one, against the same worker whose controller has no seeding at all, in turns.
* far off: T_seed begins five times too long; how many steps until the waits differ by less than 10% of a step.
* away and back: three remote workers, then one, then three again; the first step after their return.

``python -m benchmarks.scale.seeding [--only PART ...] [--repeats N]``. The real model; on two cores all workers share
them, so a remote worker is one more thread of the same machine: this shows the control, not a gain."""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.lib.harness import MODEL, Result, command
from benchmarks.lib.intervals import t_quantile
from benchmarks.lib.service import Bench, Liked, job, service
from benchmarks.lib.workload import PROMPTS, questions
from tests.chaos.driver import Deployment, wait_until

from rookery.client import Job
from rookery.controller.offload.seeding import Seeding
from rookery.settings import Settings

STEPS = 3
MICRO_BATCH = 16
TOKENS = 48
OFF = 5.0
NEAR = 0.10
SETTLED = 8
"""Steps after which T_seed is taken as found."""
LOOKED_AT = 12
REMOTE = ("far-1", "far-2", "far-3")


# --- alone ------------------------------------------------------------------------------------------------------------


def alone(result: Result, repeats: int) -> None:
    """Jobs of one service, with the seeding of its controller and with its ears stopped; which is first changes."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    shipped = Seeding.join
    with service() as bench:
        for turn in range(repeats + 1):
            for seeding in (True, False) if turn % 2 else (False, True):
                try:
                    if not seeding:
                        Seeding.join = lambda self, policy, *, overlaps: shipped(self, policy, overlaps=False)  # type: ignore[method-assign]
                    values = _steps(bench, f"alone-{turn}-{seeding}", STEPS + 1)
                finally:
                    Seeding.join = shipped  # type: ignore[method-assign]
                if turn:
                    seconds[seeding].append(statistics.fmean(values[1:]))
    with_it = result.add("co-located step, seeding there", seconds[True], "s", f"means of {STEPS} steps")
    without = result.add("co-located step, no seeding", seconds[False], "s", f"means of {STEPS} steps")
    ratios = [one / other - 1 for one, other in zip(seconds[True], seconds[False], strict=True)]
    mean = statistics.fmean(ratios)
    half = t_quantile(0.975, repeats - 1) * statistics.stdev(ratios) / math.sqrt(repeats)
    result.judge(
        "without a remote worker it costs < 5%", f"{mean:+.1%} ± {half:.1%}", mean < 0.05,
        f"{repeats} pairs, 95% interval of the mean; medians {with_it.median:.2f} s and {without.median:.2f} s",
    )  # fmt: skip


def _steps(bench: Bench, name: str, steps: int) -> list[float]:
    """Seconds between the commits of an on-policy job that trains in portions."""
    environment = Liked(questions(PROMPTS * steps))
    spec = job(name, steps + 1, micro_batch=MICRO_BATCH)
    times = [row.time for row in bench.client.train(environment=environment, **spec).metrics()]
    return [b - a for a, b in pairwise(times)]


# --- with remote workers ----------------------------------------------------------------------------------------------


def submit(running: Deployment, steps: int) -> Job:
    rows = [{"prompt": text, "answer": ""} for text in questions(PROMPTS * steps)]
    spec = job("seeded", steps, micro_batch=MICRO_BATCH)
    spec["environment"] = {"id": "jsonl", "rows": rows, "verifier": {"name": "regex", "pattern": "[a-m].*[n-z]"}}
    spec["sampling"]["max_tokens"] = TOKENS
    return running.client.submit(spec)


def deployment(folder: str, initial: float) -> Deployment:
    cache = Settings.load().cache
    return Deployment(Path(folder) / "t", cache, Path(MODEL), workers=0, seed_initial_seconds=f"{initial:g}")


def found(rows: list[Any]) -> list[dict[str, float]]:
    """Per step: T_seed, both waits, the step's time. Rows without a cycle are left out."""
    return [
        {
            "step": row["step"],
            "seed": row["seconds/seed"],
            "trainer_wait": row["seconds/trainer_wait"],
            "remote_wait": row["seconds/remote_wait"],
            "seconds": row["time"] - before["time"],
        }
        for before, row in pairwise(rows)
        if "seconds/seed" in row
    ]


def far_off(result: Result, repeats: int) -> None:
    curves = {}
    settled = 0.0
    for name, initial in (("near", None), ("far off", OFF)):
        start = Settings().offload.seed_initial_seconds / 4 if initial is None else max(settled, 0.5) * initial
        with tempfile.TemporaryDirectory() as folder, deployment(folder, start) as running:
            running.join("home")
            running.wait_serving("home")
            running.join(REMOTE[0], "--preemptible", "--roles", "rollout")
            running.wait_serving(REMOTE[0])
            rows = list(submit(running, LOOKED_AT).metrics())
        curves[name] = found(rows)
        tail = curves[name][SETTLED:]
        if initial is None:
            settled = statistics.median(row["seed"] for row in tail)
            result.add("T_seed once found", [row["seed"] for row in tail], "s")
        else:
            gaps = [abs(row["trainer_wait"] - row["remote_wait"]) / row["seconds"] for row in curves[name]]
            result.add("T_seed at first", [start], "s", f"{OFF:g} x that")
            result.add("gap of the waits over the step, first", gaps[:1], "")
            result.add("gap of the waits over the step, after", gaps[SETTLED:], "")
            steps = settling(gaps)
            result.judge(
                f"T_seed {OFF:g} x off: the gap falls under {NEAR:.0%} of the step", f"for good after {steps} steps",
                steps < len(gaps), "gaps: " + ", ".join(f"{gap:.0%}" for gap in gaps),
            )  # fmt: skip
    result.data["far_off"] = curves


def settling(gaps: list[float]) -> int:
    """Steps until all that follow have a gap below ``NEAR``."""
    return max((n + 1 for n, gap in enumerate(gaps) if gap >= NEAR), default=0)


def away_and_back(result: Result, repeats: int) -> None:
    with tempfile.TemporaryDirectory() as folder, deployment(folder, 2.0) as running:
        running.join("home")
        running.wait_serving("home")
        for name in REMOTE:
            running.join(name, "--preemptible", "--roles", "rollout")
            running.wait_serving(name)
        task = submit(running, 30)
        _after(task, 6)
        before = found(_rows(task))[-1]
        for name in REMOTE[1:]:
            process = running.joined.pop(name)
            process.kill()
            process.wait()
        gone = task.show().step
        _after(task, gone + 6)
        few = found(_rows(task))[-1]
        for name in REMOTE[1:]:
            running.join(name, "--preemptible", "--roles", "rollout")
            running.wait_serving(name)
        back = task.show().step
        _after(task, back + 4)
        after = next(row for row in found(_rows(task)) if row["step"] >= back + 2)
        task.cancel()
    result.add("T_seed with three remote workers", [before["seed"]], "s")
    result.add("T_seed with one", [few["seed"]], "s")
    result.add("T_seed of the first whole step with three again", [after["seed"]], "s")
    nearer = abs(after["seed"] - before["seed"]) <= abs(after["seed"] - few["seed"])
    result.judge("3 → 1 → 3 workers: the first step after uses the remembered value", f"{after['seed']:.2f} s", nearer)


def _rows(task: Job) -> list[Any]:
    return list(task.metrics(follow=False))


def _after(task: Job, step: int) -> None:
    wait_until(lambda: task.show().step >= step, f"step {step} was taken")


PARTS: dict[str, Callable[[Result, int], None]] = {"alone": alone, "far_off": far_off, "away_and_back": away_and_back}


def main() -> None:
    parser = argparse.ArgumentParser(description="Algorithm 1 with real processes.")
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=10, help="pairs of runs without remote workers")
    given = parser.parse_args()
    result = Result("seeding", "Seeding (Algorithm 1), with real processes", command())
    for name in given.only:
        print(f"{name}:", flush=True)
        PARTS[name](result, given.repeats)
    result.save()


if __name__ == "__main__":
    main()
