"""A service that follows a plan, in virtual time with the shipped controller."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.scheduling.test_plan import machine

from rookery.controller.planned import train_speeds
from rookery.scheduling.plan.predict import Role, devices_of
from rookery.simulation.clock import run
from rookery.simulation.planned import PlannedService, planned_service
from rookery.spec.fleet import FleetSpec, JobDemand, Plan, PlannedWorker

DEMAND = JobDemand(
    name="a", group_size=4, groups_per_step=2, prompt_tokens=16, median_tokens=40, sigma=0.5, max_tokens=96, staleness=1
)


def planned(fleet: FleetSpec, **roles: list[str]) -> Plan:
    workers = [
        PlannedWorker.model_validate(
            {"name": name.replace("_", "-"), "machine": name.split("_")[0], "roles": played,
             "max_rows": 64, "slice_tokens": 512}
        )
        for name, played in roles.items()
    ]  # fmt: skip
    return Plan(step_seconds=1.0, workers=workers, fleet=fleet, jobs=[DEMAND])


@asynccontextmanager
async def following(plan: Plan, fleet: FleetSpec, roles: list[Role], steps: int) -> AsyncIterator[PlannedService]:
    """A service that follows the plan, with a worker of each machine of ``fleet``, in these roles, and one job."""
    with tempfile.TemporaryDirectory() as folder:
        async with planned_service(Path(folder), devices_of(fleet), [DEMAND], roles, steps, plan=plan) as service:
            yield service


def test_workers_play_the_roles_of_the_plan_and_new_ones_when_the_trainer_leaves() -> None:
    fleet = FleetSpec(machines=[machine("a"), machine("b"), machine("c")])
    plan = planned(fleet, a_0=["train"], b_0=["rollout"])

    async def play() -> None:
        async with following(plan, fleet, ["both", "both", "both"], 30) as service:
            site, queries = service.site, service.site.controller.queries
            ((tenant, id),) = service.jobs
            while (await queries.show(tenant, id)).step < 5:  # noqa: ASYNC110
                await asyncio.sleep(1.0)
            shown = {row.name: row.roles for row in queries.workers()}
            assert shown == {"a-0": ["train"], "b-0": ["rollout"], "c-0": []}
            notes = {row.name: row.note for row in queries.workers()}
            assert notes == {"a-0": "", "b-0": "", "c-0": "the plan does not need it"}
            used = site.controller.context.rooms.fleet.get("b-0")
            assert used is not None and site.controller.plan is not None
            used.status_message = "standby"
            await site.controller.plan.review()
            assert used.note == "standby", "a review erases no note of another room"
            used.status_message = ""
            await service.workers[0].kill()
            view = await queries.wait(tenant, id)
            assert view.state == "completed"
            assert site.controller.plan is not None and site.controller.plan.moves
            shown = {row.name: set(row.roles) for row in queries.workers()}
            assert any("train" in roles for name, roles in shown.items() if name != "a-0")

    run(play())


def test_a_role_moves_to_a_worker_that_was_started_with_it() -> None:
    """Though another machine would train quicker."""
    fleet = FleetSpec(machines=[machine("a"), machine("b"), machine("c", train=4.0)])
    plan = planned(fleet, a_0=["train"], b_0=["rollout"], c_0=["rollout"])

    async def play() -> None:
        async with following(plan, fleet, ["both", "both", "rollout"], 12) as service:
            queries = service.site.controller.queries
            ((tenant, id),) = service.jobs
            while (await queries.show(tenant, id)).step < 4:  # noqa: ASYNC110
                await asyncio.sleep(1.0)
            await service.workers[0].kill()
            assert (await queries.wait(tenant, id)).state == "completed"
            shown = {row.name: row.roles for row in queries.workers()}
            assert "train" in shown["b-0"] and shown["c-0"] in (["rollout"], [])

    run(play())


def test_workers_of_the_plan_that_are_not_there_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    fleet = FleetSpec(machines=[machine("a")])
    absent = planned(FleetSpec(machines=[machine("z"), machine("y")]), z_0=["rollout"], y_0=["train"])

    async def play() -> None:
        async with following(absent, fleet, ["both"], 3) as service:
            site, ((tenant, id),) = service.site, service.jobs
            await site.controller.queries.wait(tenant, id)
            assert site.controller.plan is not None
            await site.controller.plan.review()
            await site.controller.plan.review()

    run(play())
    (line,) = [record.message for record in caplog.records if "not there" in record.message]
    assert "z-0, y-0" in line and "\n" not in line


def test_worker_without_the_roles_of_the_plan_counts_as_missing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet = FleetSpec(machines=[machine("a"), machine("b")])
    plan = planned(fleet, a_0=["train"], b_0=["rollout"])

    async def play() -> None:
        async with following(plan, fleet, ["rollout", "both"], 5) as service:
            ((tenant, id),) = service.jobs
            queries = service.site.controller.queries
            assert (await queries.wait(tenant, id)).state == "completed"
            assert {row.name: set(row.roles) for row in queries.workers()}["a-0"] == {"rollout"}

    run(play())
    assert any("the base model of the plan: a-0" in record.message for record in caplog.records)


def test_worker_of_another_base_model_keeps_its_roles() -> None:
    fleet = FleetSpec(machines=[machine("a"), machine("b")])
    plan = planned(fleet, a_0=["train"], b_0=["rollout"]).model_copy(update={"model": "another-model"})

    async def play() -> None:
        async with following(plan, fleet, ["both", "both"], 3) as service:
            ((tenant, id),) = service.jobs
            queries = service.site.controller.queries
            assert (await queries.wait(tenant, id)).state == "completed"
            assert [row.roles for row in queries.workers()] == [["rollout", "train"]] * 2

    run(play())


def test_a_policy_trains_on_the_quicker_machine_of_the_plan() -> None:
    slow, quick = machine("a"), machine("b")
    quick = quick.model_copy(update={"train_token": slow.train_token / 8})
    fleet = FleetSpec(machines=[slow, quick])
    plan = planned(fleet, a_0=["rollout", "train"], b_0=["rollout", "train"])
    assert train_speeds(plan)["b-0"] == pytest.approx(8 * train_speeds(plan)["a-0"])

    async def play() -> None:
        async with following(plan, fleet, ["both", "both"], 5) as service:
            ((tenant, id),) = service.jobs
            assert (await service.site.controller.queries.wait(tenant, id)).state == "completed"
            assert [worker.compute.trained > 0 for worker in service.workers] == [False, True]

    run(play())
