"""A service that follows a plan, in virtual time with the shipped controller."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.scheduling.test_plan import machine
from tests.support.peers import ManualClock

from rookery.controller.planned import LOOK_SECONDS, SETTLE_SECONDS, PlanFollower, plan_to_follow, train_speeds
from rookery.controller.queries import JobQueries
from rookery.errors import UserError
from rookery.scheduling.plan.predict import Role, devices_of
from rookery.server.launcher import check_settings
from rookery.settings import Settings
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


async def reaches(queries: JobQueries, tenant: str, job: str, step: int) -> None:
    """Return as soon as the job has taken so many steps."""
    async with aclosing(queries.follow(tenant, job)) as rows:
        async for row in rows:
            if row["step"] >= step:
                return


def test_workers_play_the_roles_of_the_plan_and_new_ones_when_the_trainer_leaves() -> None:
    fleet = FleetSpec(machines=[machine("a"), machine("b"), machine("c")])
    plan = planned(fleet, a_0=["train"], b_0=["rollout"])

    async def play() -> None:
        async with following(plan, fleet, ["both", "both", "both"], 30) as service:
            site, queries = service.site, service.site.controller.queries
            ((tenant, id),) = service.jobs
            await reaches(queries, tenant, id, 5)
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


class Workers:
    """A fleet of workers with both roles, of which some are there."""

    def __init__(self) -> None:
        self.there: dict[str, Any] = {}
        self.roles: dict[str, frozenset[str]] = {}

    def all(self) -> list[Any]:
        return [*self.there.values()]

    def get(self, name: str) -> Any:
        return self.there.get(name)

    def set_roles(self, worker: Any, roles: frozenset[str]) -> None:
        self.roles[worker.name] = roles

    def join(self, name: str, follower: PlanFollower) -> None:
        hello = SimpleNamespace(roles=["rollout", "train"], model="")
        self.there[name] = SimpleNamespace(name=name, state="serving", hello=hello)
        follower.on_worker_joined(self.there[name])


async def at_once(call: Callable[[], Any]) -> Any:
    return call()


@pytest.mark.parametrize("stays", ["a-0", "c-0"])
@pytest.mark.parametrize("seconds", [1.0, 20.0])
@pytest.mark.parametrize("grace", [0.0, 60.0])
async def test_no_role_flaps_where_workers_leave_and_return(stays: str, seconds: float, grace: float) -> None:
    """Three workers, one, and three again, and so on. After ``grace`` one that was lost does not return by itself."""
    fleet = FleetSpec(machines=[machine("a"), machine("b"), machine("c")])
    plan = planned(fleet, a_0=["train"], b_0=["rollout"], c_0=["rollout"])
    workers, clock = Workers(), ManualClock()
    follower = PlanFollower(plan, workers, clock, at_once, lambda: 100_000)  # type: ignore[arg-type]

    for name in ("a-0", "b-0", "c-0"):
        workers.join(name, follower)
    await follower.review()
    assert workers.roles == {"a-0": {"train"}, "b-0": {"rollout"}, "c-0": {"rollout"}}
    others = [name for name in workers.there if name != stays]
    moves = []
    for _ in range(4):
        clock.now += seconds
        lost = [workers.there.pop(name) for name in others]
        for worker in lost:
            follower.on_worker_lost(worker)
        clock.now += grace
        for worker in lost if grace else ():
            follower.on_worker_lost(worker)
        await follower.review()
        assert workers.roles[stays] == {"rollout", "train"}, "the jobs go on"
        clock.now += seconds
        for name in others:
            workers.join(name, follower)
        await follower.review()
        moves.append(follower.moves)
    assert moves[0] <= 2 and moves[-1] == moves[0], moves


def test_another_worker_trains_while_a_lost_one_may_return() -> None:
    """The trainer's process is dead; the service waits a minute for it to reconnect, the jobs do not."""
    fleet = FleetSpec(machines=[machine("a"), machine("b")])
    plan = planned(fleet, a_0=["train"], b_0=["rollout"])

    async def play() -> None:
        async with following(plan, fleet, ["both", "both"], 30) as service:
            queries, ((tenant, id),) = service.site.controller.queries, service.jobs
            await reaches(queries, tenant, id, 5)
            await service.workers[0].kill()
            await asyncio.sleep(2 * SETTLE_SECONDS)
            shown = {row.name: (row.state, set(row.roles)) for row in queries.workers()}
            assert shown["a-0"][0] == "suspect" and shown["b-0"] == ("serving", {"rollout", "train"})
            assert (await queries.wait(tenant, id)).state == "completed"

    run(play())


async def test_roles_are_planned_again_for_a_job_that_starts_later() -> None:
    """A worker is lost when the running job is about to end, for which it does not pay to move others."""
    fleet = FleetSpec(machines=[machine("a"), machine("b"), machine("c")])
    plan = planned(fleet, a_0=["train"], b_0=["rollout"], c_0=["rollout"])
    workers, clock, steps = Workers(), ManualClock(), [100_000]
    follower = PlanFollower(plan, workers, clock, at_once, lambda: steps[0])  # type: ignore[arg-type]
    watching = asyncio.create_task(follower.watch())
    for name in ("a-0", "b-0", "c-0"):
        workers.join(name, follower)
    await clock.advance(60.0)
    steps[0] = 1
    follower.on_worker_lost(workers.there.pop("c-0"))
    await clock.advance(2 * LOOK_SECONDS)
    assert follower.moves == 0
    steps[0] = 100_000  # the next job
    await clock.advance(LOOK_SECONDS + 60.0)
    moves = follower.moves
    assert moves
    await clock.advance(5 * LOOK_SECONDS, steps=100)
    assert follower.moves == moves
    watching.cancel()


def test_a_role_moves_to_a_worker_that_was_started_with_it() -> None:
    """Though another machine would train quicker."""
    fleet = FleetSpec(machines=[machine("a"), machine("b"), machine("c", train=4.0)])
    plan = planned(fleet, a_0=["train"], b_0=["rollout"], c_0=["rollout"])

    async def play() -> None:
        async with following(plan, fleet, ["both", "both", "rollout"], 12) as service:
            queries = service.site.controller.queries
            ((tenant, id),) = service.jobs
            await reaches(queries, tenant, id, 4)
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


def test_a_plan_by_which_no_job_could_run_is_refused_in_one_line(tmp_path: Path) -> None:
    """The check of the settings, which a start follows, reads it."""
    plan = planned(FleetSpec(machines=[machine("one")]), one_0=["rollout", "train"])
    path, content = tmp_path / "plan.yaml", plan.model_dump(mode="json", exclude_none=True)
    path.write_text(json.dumps(content))
    settings = Settings.load({}, data=tmp_path, cache=tmp_path, plan=str(path))
    assert check_settings(settings) == plan
    for kind in content["fleet"]["machines"]:
        kind["memory"] = {"total": 10, "base": 10, "cache_token": 1, "train_token": 0}
    path.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"plan\.yaml: no job could run: .* has no memory .*; plan again$"):
        check_settings(settings)


@pytest.mark.parametrize("model", ["qwen3-0.6b", ""])
def test_a_plan_of_several_base_models_is_refused_in_one_line(tmp_path: Path, model: str) -> None:
    smol = "smollm2-135m-instruct"
    fleet = FleetSpec(machines=[machine("one", model=smol), machine("two", model=model or "qwen3-0.6b")])
    plan = planned(fleet, one_0=["rollout", "train"]).model_copy(update={"model": model})
    path = tmp_path / "plan.yaml"
    path.write_text(plan.model_dump_json(exclude_none=True))
    with pytest.raises(UserError, match=r"plan\.yaml: .* the base models qwen3-0\.6b and smollm2.*; a plan is for one"):
        plan_to_follow(path)
    alias = FleetSpec(machines=[machine("one", model=smol.upper())])
    path.write_text(planned(alias, one_0=["rollout", "train"]).model_copy(update={"model": smol}).model_dump_json())
    assert plan_to_follow(path).model == smol


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
