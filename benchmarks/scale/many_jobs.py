"""A hundred jobs of one tenant, and what they leave another tenant's small job on a real worker.

``python -m benchmarks.scale.many_jobs [--jobs N] [--seconds S] [--small-model] [--save]``. One worker of one thread has
SmolLM2-135M-Instruct, or a random model of a few hundred kilobytes: that computes less than the messages about it cost,
so its worker's threads wait for Python's lock, which no scheduler divides. The small job's steps in ``--seconds`` alone
are compared with those next to the other tenant's jobs, all of which run. With two tenants at work half of the speed is
fair. The exit code tells whether the target was met.
"""

from __future__ import annotations

import os

os.environ["TINKER_TELEMETRY"] = "0"

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.lib.harness import MODEL, Result, command
from benchmarks.scale.callers import small_job
from tests.chaos.driver import Deployment, wait_until
from tests.support.tinkered import MODEL as SMALL_MODEL
from tests.support.tinkered import RANK, place_model
from tests.support.waiting import until

import rookery
from rookery.settings import Settings

FAIR_LEAST = 0.4
"""Of its speed alone that the small job keeps: half is fair."""

ENDLESS = {"steps": 1_000_000}

WARM_SECONDS = 10.0
"""Before each measure: jobs start, and load what later steps share."""

PATIENCE = 600.0
"""Seconds until every job has trained a step."""

LEARNING_RATE = 1e-6
"""Too little to learn the task within the measure: groups of equal rewards would need no training."""
VOWEL_AT_END = r"[aeiou]$"
"""About half of the replies, which are cut, end so: groups have something to teach."""

SUBMITTERS = 8
"""Jobs submitted at a time."""


def steps_of(town: Deployment, job: str) -> int:
    return int(town.rows("SELECT step FROM jobs WHERE id = ?", job)[0]["step"])


def speed(town: Deployment, job: str, seconds: float) -> float:
    """Steps of the job in a second."""
    before, began = steps_of(town, job), time.monotonic()
    time.sleep(seconds)
    return (steps_of(town, job) - before) / (time.monotonic() - began)


def run(jobs: int, seconds: float, folder: Path, *, small_model: bool) -> Result:
    load = os.getloadavg()[0]
    title = f"A small job beside {jobs} jobs of another tenant, {date.today().isoformat()}, load {load:.0f}"
    result = Result("many_jobs", title, command())
    if small_model:
        place_model(folder)
    model, cache = (SMALL_MODEL, folder / "cache") if small_model else (MODEL, Settings.load().cache)
    spec: dict[str, Any] = {"stop": ENDLESS, "base_model": model}
    if not small_model:
        spec["policies"] = {"main": {"rank": RANK, "optimizer": {"lr": LEARNING_RATE}}}
        spec["environment"] = small_job(0)["environment"] | {"verifier": {"name": "regex", "pattern": VOWEL_AT_END}}
    allowed = {"tenant_jobs": str(jobs), "tenant_adapters": str(10 * jobs)}
    with Deployment(folder, cache, Path(model), workers=1, **allowed) as town, ExitStack() as stack:
        wait_until(lambda: any(row.state == "serving" for row in town.client.workers()), "a worker serves")
        small, many = (
            stack.enter_context(rookery.Client(town.url, str(town.client.add_key(town.client.add_tenant(name).id).key)))
            for name in ("small", "many")
        )
        job = small.submit(small_job(1, **spec))
        wait_until(lambda: steps_of(town, job.id) > 0, "the small job has trained a step")
        time.sleep(WARM_SECONDS)
        alone = speed(town, job.id, seconds)
        with ThreadPoolExecutor(SUBMITTERS) as pool:
            others = list(pool.map(lambda seed: many.submit(small_job(seed, **spec)), range(jobs)))
        until(lambda: all(steps_of(town, other.id) > 0 for other in others), "every job has trained", patience=PATIENCE)
        time.sleep(WARM_SECONDS)
        before = sum(steps_of(town, other.id) for other in others)
        beside = speed(town, job.id, seconds)
        taken = (sum(steps_of(town, other.id) for other in others) - before) / seconds
        result.add("the small job alone", [alone], "steps/s")
        result.add(f"the small job beside {jobs} jobs", [beside], "steps/s", f"those together take {taken:.2f} steps/s")
        share = beside / alone
        result.judge(f"it keeps >= {FAIR_LEAST:.0%} of its speed", f"{share:.0%}", share >= FAIR_LEAST)
        for one in [job, *others]:
            one.cancel()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--save", action="store_true", help="write results/many_jobs.json")
    parser.add_argument("--small-model", action="store_true", help="a random model of a few hundred kilobytes")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="many-jobs-") as folder:
        result = run(given.jobs, given.seconds, Path(folder), small_model=given.small_model)
    if given.save:
        result.save()
    sys.exit(any(verdict.met is False for verdict in result.verdicts))


if __name__ == "__main__":
    main()
