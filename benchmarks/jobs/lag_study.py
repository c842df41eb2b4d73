"""How much does lag cost, and does correcting for it help? Jobs of every staleness, loss and seed on one service.

``python -m benchmarks.jobs.lag_study [--steps N] [--staleness …] [--losses …] [--seeds …] [--discard]``; resumable. All
runs are jobs of one service and train side by side. Its data lies in ``runs/lag-study``: a second start goes on with
every job where its last commit left it, and submits those that are new. Figures are written as each job ends. The
folder stays, in case runs are added; it may be removed when none is under way.

The task is the demo's shopping list, which the model learns in some eight steps on-policy; the learning rate is twice
the demo's, so that lag can do harm.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.jobs.lag_figures import LAGS, LOSSES, Arm, figures
from benchmarks.lib.cells import Cell, Cells
from benchmarks.lib.harness import MODEL, ROOT
from benchmarks.lib.service import service

import rookery
from rookery.cli.demo import HELD_OUT
from rookery.examples.shopping import Shopping

SEEDS = (0, 1, 2)
STEPS = 16
"""Twice as many as the largest lag: half of a run is trained on what version 0 said, half on what later ones did."""
EVALUATIONS = 4
"""Per run, beside the one of version 0."""
GROUPS, GROUP_SIZE = 6, 8
LEARNING_RATE = 1e-3
RANK = 8
FOLDER = ROOT / "runs" / "lag-study"
PATIENCE = "10m"
"""For an environment that is away or late: a service that starts again loads its model first, and thousands of episodes
begin at the same moment."""
MOST_PAUSES = 3
"""A job that has paused so often by itself has a reason that resuming does not mend."""
LOOK_SECONDS = 5.0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--staleness", nargs="*", type=int, choices=LAGS, default=LAGS)
    parser.add_argument("--losses", nargs="*", choices=list(LOSSES), default=list(LOSSES))
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--discard", action="store_true", help="drop the runs that are there")
    given = parser.parse_args()
    plan = {"model": MODEL, "steps": given.steps, "groups": [GROUPS, GROUP_SIZE], "lr": LEARNING_RATE, "rank": RANK}
    cells = Cells(figures, plan, discard=given.discard)
    if given.discard:
        shutil.rmtree(FOLDER, ignore_errors=True)
    arms = [Arm(loss, lag, seed) for seed in given.seeds for lag in given.staleness for loss in given.losses]
    missing = [arm for arm in arms if arm.key not in cells.cells]
    if missing:
        study(cells, missing, given.steps, FOLDER)
    cells.tell()


def study(cells: Cells, arms: list[Arm], steps: int, folder: Path) -> None:
    """Run them all, side by side; each is stored when it ends. Raises ``RuntimeError`` for one that keeps pausing."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    with service(folder) as bench:
        for seed in {arm.seed for arm in arms}:
            bench.client.host(host_of(seed), Shopping())
        running = {}
        for arm in arms:
            # one key per run: a start after a break finds its job and goes on with it
            job = bench.client.submit(spec(arm, steps), key=f"{arm.key}/{steps}")
            running[job.id] = (arm, job)
        print(f"{len(running)} jobs side by side", flush=True)
        pauses: Counter[str] = Counter()
        while running:
            for view in bench.client.views():
                if view.id in running and view.state == "paused":
                    pauses[view.name] += 1
                    print(f"{view.name} paused, and goes on: {view.reason}", flush=True)
                    if pauses[view.name] > MOST_PAUSES:
                        raise RuntimeError(f"{view.name} paused {MOST_PAUSES} times and more: {view.reason}")
                    running[view.id][1].resume()
                elif view.id in running and view.state in ("completed", "failed", "cancelled"):
                    arm, job = running.pop(view.id)
                    cells.put(arm.key, {**record(arm, job), "took": time.monotonic() - began})
            time.sleep(LOOK_SECONDS)


def host_of(seed: int) -> str:
    """A host has room for so many episodes, and jobs of large lag keep many."""
    return f"shopping-{seed}"


def spec(arm: Arm, steps: int) -> dict[str, Any]:
    return {
        "name": arm.key.replace("/", "-"),
        "base_model": MODEL,
        "environment": {"hosted": host_of(arm.seed), "return_timeout": PATIENCE, "step_timeout": PATIENCE},
        "policies": {"main": {"rank": RANK, "seed": arm.seed, "optimizer": {"lr": LEARNING_RATE}}},
        "algorithm": {
            "name": "grpo",
            "group_size": GROUP_SIZE,
            "groups_per_step": GROUPS,
            "max_staleness": arm.lag,
            "loss": LOSSES[arm.loss].spec,
        },
        "sampling": {"temperature": 1.0, "max_tokens": 12},
        "evaluation": {"prompts": HELD_OUT, "every": max(1, steps // EVALUATIONS)},
        "checkpoints": {"keep_last": 1, "keep_best": False},
        "stop": {"steps": steps},
        "seed": arm.seed,
    }


def record(arm: Arm, job: rookery.Job) -> Cell:
    """Held-out rewards by step, and what the steps say of lag."""
    view = job.show()
    rows = list(job.metrics(follow=False))
    step_of = {0: 0} | {row.version: row.step for row in rows}
    evaluations = [
        {"step": step_of[one.version], "mean": one.mean, "error": one.stderr, "prompts": one.prompts}
        for one in job.evaluations()
    ]
    names = ("reward", "staleness_mean", "ratio", "clipped_share", "logp_diff_mean", "grad_norm", "kl", "entropy")
    return {
        "loss": arm.loss,
        "lag": arm.lag,
        "seed": arm.seed,
        "state": view.state,
        "reason": view.reason,
        "evaluations": sorted(evaluations, key=lambda one: one["step"]),
        "steps": [{name: row[name] for name in ("step", *names) if row.get(name) is not None} for row in rows],
        "skipped": view.counters.get("steps_skipped", 0),
        "dropped": view.counters.get("groups_dropped_stale", 0),
    }


if __name__ == "__main__":
    main()
