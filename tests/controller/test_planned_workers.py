"""``rookery serve --plan`` with workers in processes of their own, which leave for good and join unlike the plan."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.driver import PATIENCE_SECONDS, Deployment, wait_until
from tests.scheduling.test_plan import machine
from tests.support.small_model import save_small_model

from rookery.client import Job
from rookery.controller.planned import SETTLE_SECONDS
from rookery.spec.fleet import FleetSpec, JobDemand, Plan, PlannedWorker
from rookery.worker.model.convert import prepare

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(3 * PATIENCE_SECONDS)]

DEMAND = JobDemand(
    name="a", group_size=2, groups_per_step=2, prompt_tokens=16, median_tokens=8, sigma=0.1, max_tokens=12, staleness=1
)
TRAINER, ROLLOUTS, SPARE = "a-0", "b-0", "c-0"


def plan_file(folder: Path, model: str) -> Path:
    """A quick trainer, a machine for rollouts, and one that is not needed."""
    fleet = FleetSpec(machines=[machine("a"), machine("b"), machine("c", 0.1, 0.1)])
    roles: dict[str, list[Any]] = {TRAINER: ["train"], ROLLOUTS: ["rollout"]}
    workers = [
        PlannedWorker(name=name, machine=name.split("-")[0], roles=played, max_rows=64, slice_tokens=512)
        for name, played in roles.items()
    ]
    plan = Plan(step_seconds=1.0, workers=workers, fleet=fleet, jobs=[DEMAND], model=model)
    path = folder / "plan.yaml"
    path.write_text(plan.model_dump_json(exclude_none=True))
    return path


def submit(town: Deployment, steps: int) -> Job:
    rows = [{"prompt": f"Write of {number}.", "answer": ""} for number in range(7)]
    verifier = {"name": "regex", "pattern": "[a-m].*[n-z]"}
    return town.client.submit(
        {
            "name": "planned",
            "base_model": town.model,
            "environment": {"id": "jsonl", "rows": rows, "verifier": verifier},
            "policies": {"main": {"rank": 4}},
            "algorithm": {"group_size": 2, "groups_per_step": 2, "max_staleness": 1},
            "sampling": {"max_tokens": 12},
            "stop": {"steps": steps},
        }
    )


def roles(town: Deployment) -> dict[str, list[str]]:
    """Of each worker that is there."""
    return {row.name: sorted(row.roles) for row in town.client.workers() if row.state not in ("gone", "suspect")}


def reviewed(job: Job) -> None:
    """Wait until the roles were planned again, and the job has taken steps since."""
    begun = time.monotonic()
    wait_until(lambda: time.monotonic() > begun + 2 * SETTLE_SECONDS, "the roles are reviewed")
    step = job.show().step
    wait_until(lambda: job.show().step >= step + 2, "it learns")


def test_roles_follow_the_plan_and_move_only_where_that_pays(tmp_path: Path) -> None:
    model = save_small_model(tmp_path / "small")
    cache = tmp_path / "cache"
    prepare(str(model), cache)
    plan = str(plan_file(tmp_path, str(model)))
    with Deployment(tmp_path / "one", cache, model, workers=0, plan=plan) as town:
        for name in (TRAINER, ROLLOUTS, SPARE, "stranger"):
            town.join(name)
        for name in (TRAINER, ROLLOUTS, SPARE, "stranger"):
            town.wait_serving(name)
        both = ["rollout", "train"]
        wanted = {TRAINER: ["train"], ROLLOUTS: ["rollout"], SPARE: [], "stranger": both}
        assert roles(town) == wanted, "one that the plan does not name keeps its roles"
        job = submit(town, 1_000_000)
        wait_until(lambda: job.show().step >= 2, "it learns")

        town.leave("stranger")
        town.leave(SPARE)
        reviewed(job)
        assert roles(town) == {TRAINER: ["train"], ROLLOUTS: ["rollout"]}, "no role moves for those that had no work"

        town.leave(TRAINER)
        wait_until(lambda: "train" in roles(town).get(ROLLOUTS, []), "the one that is left trains too")
        reviewed(job)

        town.join(TRAINER, "--roles", "rollout")
        town.wait_serving(TRAINER)
        wait_until(lambda: f"of the plan: {TRAINER};" in town.log("service"), "the log names it")
        reviewed(job)
        found = roles(town)
        assert found[TRAINER] == ["rollout"] and "train" in found[ROLLOUTS]
        job.cancel()
