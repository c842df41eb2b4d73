"""Budgets of jobs and tenants: what one of them asks beyond a limit is refused with the numbers, or waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.datasets import read_jsonl
from tests.support.peers import HANG, MODEL, ScriptedHost, Service, eventually, job_of, settle

from rookery import protocol
from rookery.controller.fleet.env_hosts import SERVICE
from rookery.controller.jobs.runner import START_SECONDS
from rookery.controller.quotas import job_problems, tokens_in_memory
from rookery.errors import count_of
from rookery.settings import Settings
from rookery.spec.parsing import SpecError, parse_job
from rookery.storage.repositories import tenants
from rookery.storage.repositories.jobs import get_job

ROWS = [{"prompt": f"{number} {'x' * 1000}", "answer": "1"} for number in range(100)]


@pytest.fixture
def settings() -> dict[str, Any]:
    """Settings of the service; a test gives its own."""
    return {}


@pytest.fixture
async def service(tmp_path: Path, settings: dict[str, Any]) -> AsyncIterator[Service]:
    service = Service(tmp_path, **{"start_crashes": 4} | settings)
    await service.start()
    yield service
    await service.close()
    service.database.close()


def inline(**changes: Any) -> dict[str, Any]:
    return job_of(environment={"id": "jsonl", "rows": ROWS, "verifier": "exact"}, **changes)


async def hosted(service: Service, script: Any = None) -> Any:
    """A host of the service for ``jsonl``."""
    host = service.host(owner=SERVICE, environments={"builtin:jsonl": True}, script=script)
    await host.join()
    return host


# --- a job ------------------------------------------------------------------------------------------------------------


async def test_inline_rows_are_stored_once_and_never_travel_with_an_episode(service: Service) -> None:
    """The service held a copy of all rows for each of its episodes."""
    options: list[dict[str, Any]] = []

    def script(message: protocol.Reset | protocol.StepEpisode) -> Any:
        if isinstance(message, protocol.Reset):
            options.append(message.options)
        return None

    await service.worker().join()
    host = await hosted(service, script)
    view, _ = await service.controller.submit("alice", inline(algorithm={"group_size": 16, "groups_per_step": 2}))
    assert "rows" not in view.spec["environment"]
    digest = view.spec["environment"]["dataset"]
    await service.ends(view.id)
    assert len(options) == 64
    assert max(len(msgspec.msgpack.encode(one)) for one in [*options, *(ask.options for ask in host.asked)]) < 1000
    assert service.database.read(tenants.get_upload, "alice", "dataset", digest).size > 100_000
    assert read_jsonl(service.artifacts.path(digest, "rows.jsonl").read_bytes()) == ROWS


@pytest.mark.parametrize(
    ("change", "said", "limit"),
    [
        ({"algorithm": {"group_size": 1024, "groups_per_step": 4096}}, "= 268435456 tokens", "job_tokens"),
        ({"sampling": {"max_tokens": 131072}, "algorithm": {"max_staleness": 64}}, "x turns 8 =", "job_tokens"),
        ({"environment": {"hosted": "task", "more": "x" * 70_000}}, "70012 bytes.*as a dataset", "options_bytes"),
    ],
)
async def test_job_beyond_a_limit_is_refused_with_the_numbers(
    service: Service, change: dict[str, Any], said: str, limit: str
) -> None:
    with pytest.raises(SpecError, match=said) as refusal:
        await service.controller.submit("alice", job_of(**{"environment": {"hosted": "task"}, **change}))
    assert refusal.value.status == 422
    assert limit == "options_bytes" or f"ROOKERY_{limit.upper()}" in str(refusal.value)
    assert service.controller.queries.health().totals[f"refused_{limit}"] == 1


@pytest.mark.parametrize(
    ("policies", "groups", "longest"),
    [
        ({"main": {}}, 8, 16),
        ({"main": {"algorithm": {"groups_per_step": 3, "max_staleness": 2}, "sampling": {"max_tokens": 9}}}, 9, 9),
        ({"main": {}, "judge": {"train": False, "base": True, "sampling": {"max_tokens": 99}}}, 8, 99),
        ({"main": {}, "other": {"algorithm": {"groups_per_step": 5}, "sampling": {"max_tokens": 20}}}, 8 + 10, 20),
        ({str(number) + "x": {} for number in range(16)}, 16 * 8, 16),
    ],
)
def test_groups_of_every_policy_that_trains_count(policies: dict[str, Any], groups: int, longest: int) -> None:
    """Each waits for its groups, which may be others than those of its partners. The line has numbers that multiply."""
    algorithm = {"group_size": 2, "groups_per_step": 4, "max_staleness": 1}
    spec = parse_job(job_of(policies=policies, algorithm=algorithm, sampling={"max_tokens": 16}))
    tokens = groups * 2 * longest * 8
    assert tokens_in_memory(spec.model_dump(mode="json")) == tokens
    (line,) = job_problems(spec, Settings.load({}, job_tokens=tokens - 1).limits, Counter())
    assert f"{groups} groups in memory" in line
    assert f"x group_size 2 x max_tokens {longest} x turns 8 = {tokens}" in line
    assert not job_problems(spec, Settings.load({}, job_tokens=tokens).limits, Counter())


@pytest.mark.parametrize("settings", [{"job_episodes": 8}])
async def test_job_starts_only_as_many_groups_as_its_episodes_allow(service: Service) -> None:
    _, host = await service.join(script=lambda message: HANG)
    view, _ = await service.controller.submit("alice", job_of(algorithm={"group_size": 4, "groups_per_step": 6}))
    await eventually(lambda: host.calls == 8)
    await settle()
    assert host.calls == 8
    assert (await service.controller.queries.show("alice", view.id)).groups_in_flight == 2


@pytest.mark.parametrize("settings", [{"job_episodes": 4}])
async def test_job_whose_group_exceeds_its_episodes_runs_one_group_at_a_time(service: Service) -> None:
    await service.worker().join()
    running: set[str] = set()
    most = 0

    def script(message: protocol.Reset | protocol.StepEpisode) -> Any:
        nonlocal most
        (running.add if isinstance(message, protocol.Reset) else running.discard)(message.episode)
        most = max(most, len({name.rsplit("-", 1)[0] for name in running}))

    await service.host(script=script).join()
    view, _ = await service.controller.submit("alice", job_of(algorithm={"group_size": 6, "groups_per_step": 3}))
    await service.ends(view.id)
    assert most == 1


# --- base models by name ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "fine"),
    [
        ({}, False),
        ({"allowed_models": "a/b, some/model"}, True),
        ({"allowed_models": "*"}, True),
        ({"models": "some/model"}, True),
    ],
)
async def test_hub_id_is_refused_unless_it_is_allowed(service: Service, fine: bool) -> None:
    wanted = job_of(base_model="some/model")
    if fine:
        assert (await service.controller.submit("alice", wanted))[0].base_model == "some/model"
        return
    with pytest.raises(SpecError, match=r"some/model is not allowed to tenants.*ROOKERY_ALLOWED_MODELS"):
        await service.controller.dry_run("alice", wanted)
    assert service.controller.queries.health().totals["refused_allowed_models"] == 1
    assert service.controller.jobs.runners == {}


@pytest.mark.parametrize(
    ("settings", "name", "may"),
    [
        ({}, "/gone", False),
        ({"models": "smollm2-135m-instruct,/gone"}, "/gone", True),
        ({"models": "/other", "allowed_models": "*,/gone"}, "/gone", False),
        ({}, "some/model", False),
        ({"allowed_models": "*"}, "some/model", True),
        ({"models": "some/model"}, "some/model", True),
        ({}, "smollm2-135m-instruct", True),
    ],
)
async def test_a_tenant_sees_the_base_models_that_it_may_name(service: Service, name: str, may: bool) -> None:
    """The administrator sees all of them."""
    controller = service.controller
    service.database.write(tenants.create_tenant, "root", "root", 0.0, admin=True)
    await service.worker(model=name).join()
    for tenant, sees in (("alice", may), ("root", True)):
        targets = [row["name"] for row in await controller.completions.targets(tenant)]
        models = [row.name for row in await controller.queries.models(tenant)]
        assert (name in targets, name in models) == (sees, sees or name == "smollm2-135m-instruct")
    refused = "" if may else "no model is called" if name == "/gone" else "not allowed"
    if may and name == "/gone":
        refused = "is not a folder"  # which only a name that the tenant may give is looked up for
    if refused:
        with pytest.raises(SpecError, match=refused):
            await controller.submit("alice", job_of(base_model=name))
    else:
        assert (await controller.submit("alice", job_of(base_model=name)))[0].base_model == name


async def test_the_administrator_may_name_any_hub_id(service: Service) -> None:
    service.database.write(tenants.create_tenant, "root", "root", 0.0, admin=True)
    assert (await service.controller.submit("root", job_of(base_model="some/model")))[0].base_model == "some/model"


async def test_a_tenant_may_name_a_model_of_the_catalogue_by_its_hub_id(service: Service) -> None:
    view, _ = await service.controller.submit("alice", job_of(base_model="huggingfacetb/SmolLM2-135M-Instruct"))
    assert view.base_model == "smollm2-135m-instruct"


@pytest.mark.parametrize("settings", [{"model_idle_seconds": 60.0}])
async def test_an_unused_model_is_released_and_one_with_a_job_is_not(service: Service) -> None:
    await starting(service)
    view, _ = await service.controller.submit("alice", job_of())
    await service.ends(view.id, "running")
    assert service.provided == [MODEL]
    await service.clock.advance(200.0)
    assert service.released == []
    await service.controller.cancel("alice", view.id)
    await service.clock.advance(59.0)
    assert service.released == []
    await service.pass_until(lambda: service.released)
    assert service.released == [MODEL]


# --- a tenant ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"job_tokens": 256}])
async def test_jobs_that_would_hold_too_many_tokens_together_wait(service: Service) -> None:
    """Each job had a bound, and a tenant's sixteen had none."""
    await service.worker().join()
    await service.host(script=lambda message: HANG).join()
    first, second, third = [(await service.controller.submit("alice", job_of()))[0] for _ in range(3)]
    for one in (first, second):
        await service.ends(one.id, "running")
    shown = await service.controller.queries.show("alice", third.id)
    assert shown.waits_for == (
        "running jobs of the tenant to end, which may hold 512 tokens in memory, of 512 (place 1)"
    )
    await service.controller.cancel("alice", first.id)
    await eventually(lambda: service.database.read(get_job, "alice", third.id).state == "running")


@pytest.mark.parametrize("settings", [{"tenant_jobs": 2}])
async def test_jobs_beyond_the_tenants_limit_wait_with_their_place(service: Service) -> None:
    await starting(service)
    jobs = [(await service.controller.submit("alice", job_of()))[0].id for _ in range(5)]
    other, _ = await service.controller.submit("bob", job_of())

    async def shown() -> list[tuple[str, str]]:
        views = [await service.controller.queries.show("alice", job) for job in jobs]
        return [(view.state, view.waits_for if view.state == "queued" else "") for view in views]

    def position(number: int, limit: int = 2) -> tuple[str, str]:
        return "queued", f"one of the tenant's {count_of(limit, 'running job')} to end (place {number})"

    runs, ended = ("running", ""), ("cancelled", "")
    for job in jobs[:2]:
        await service.ends(job, "running")
    assert await shown() == [runs, runs, position(1), position(2), position(3)]
    assert service.controller.queries.health().gauges["jobs_waiting"] == 3
    await service.ends(other.id, "running", "bob")
    await service.controller.cancel("alice", jobs[2])
    await service.controller.cancel("alice", jobs[0])
    await service.ends(jobs[3], "running")
    assert await shown() == [ended, runs, ended, runs, position(1)]
    await service.controller.pause("alice", jobs[4])
    await service.controller.resume("alice", jobs[4])
    assert (await shown())[4] == position(1)
    await service.controller.limit_tenant("alice", {"jobs": 1})
    await service.controller.cancel("alice", jobs[1])
    assert (await shown())[4] == position(1, limit=1)
    await service.crash()
    await service.start()
    await starting(service)
    await service.ends(jobs[3], "running")
    assert await shown() == [ended, ended, ended, runs, position(1, limit=1)]
    await service.controller.limit_tenant("alice", {"jobs": None})
    await service.ends(jobs[4], "running")


# --- outages ----------------------------------------------------------------------------------------------------------


async def test_job_whose_host_did_not_come_in_time_resumes_by_itself(service: Service) -> None:
    await service.worker().join()
    view, _ = await service.controller.submit("alice", job_of(environment__return_timeout=2))
    await eventually(lambda: service.database.read(get_job, "alice", view.id).state == "paused")
    row = service.database.read(get_job, "alice", view.id)
    await settle()
    assert row.resumes and "no environment host" in row.reason
    retry = service.settings.limits.outage_retry_seconds
    await service.clock.advance(retry / 2)
    assert service.database.read(get_job, "alice", view.id).state == "paused"
    await service.crash()
    await service.start()
    await service.worker("second").join()
    await service.host().join()
    began = service.clock.now
    await service.pass_until(lambda: service.database.read(get_job, "alice", view.id).state != "paused")
    assert service.clock.now - began < retry / 2, "a started service tries again at once"
    await eventually(lambda: service.database.read(get_job, "alice", view.id).state == "completed")
    assert service.controller.queries.health().totals["jobs_resumed"] == 1


async def test_job_that_its_owner_paused_does_not_resume_by_itself(service: Service) -> None:
    await starting(service)
    view, _ = await service.controller.submit("alice", job_of())
    await service.ends(view.id, "running")
    await service.controller.pause("alice", view.id)
    await service.clock.advance(10_000.0)
    assert service.database.read(get_job, "alice", view.id).state == "paused"


# --- crashes while a job starts ---------------------------------------------------------------------------------------


async def starting(service: Service) -> None:
    """A worker and a host whose episodes never begin."""
    await service.join(script=lambda message: HANG)


async def test_job_that_ends_the_service_again_and_again_is_held_for_longer_each_time(service: Service) -> None:
    """Another job trains on by itself; after some crashes the cause waits for a person."""
    view, _ = await service.controller.submit("alice", job_of())
    other, _ = await service.controller.submit("bob", job_of())
    held = []
    for crash in range(1, 8):
        await eventually(lambda: all(service.controller.jobs.runners[id].job for id in (view.id, other.id)))
        service.controller.record.started(other.id)
        await service.controller.record.starts(view.id)  # it ends while the service works on its start
        await service.crash()
        await service.start()
        await eventually(lambda: other.id in service.controller.jobs.runners)
        row = service.database.read(get_job, "alice", view.id)
        if row.state == "paused":
            break
        assert row.crashes == crash and view.id not in service.controller.jobs.runners
        assert "perhaps because of it" in (await service.controller.queries.show("alice", view.id)).waits_for
        began = service.clock.monotonic()
        while view.id not in service.controller.jobs.runners:
            await service.clock.advance(1.0)
        held.append(service.clock.monotonic() - began)
    assert held == sorted(held) and held[0] <= 5 and held[-1] > 50
    shown = await service.controller.queries.show("alice", view.id)
    assert shown.state == "paused" and "in a row while it started this job alone" in shown.reason
    assert service.controller.queries.health().totals["refused_start_crashes"] == 1
    assert (await service.controller.queries.show("bob", other.id)).state != "paused"
    await service.controller.resume("alice", view.id)
    await eventually(lambda: view.id in service.controller.jobs.runners)


async def test_a_restart_of_the_machine_makes_no_job_a_suspect(service: Service) -> None:
    view, _ = await service.controller.submit("alice", job_of())
    await service.crash()
    path = service.controller.record.path
    path.write_bytes(path.read_bytes().replace(b'"boot":"', b'"boot":"another'))
    await service.start()
    await eventually(lambda: view.id in service.controller.jobs.runners)
    assert service.database.read(get_job, "alice", view.id).crashes == 0


@pytest.mark.parametrize("how", ["orderly stop", "trained a step", "ran for a while"])
async def test_job_that_has_started_is_no_suspect(service: Service, how: str) -> None:
    await (starting(service) if how != "trained a step" else service.worker().join())
    view, _ = await service.controller.submit("alice", job_of(stop__steps=100))
    host: ScriptedHost | None = None
    for _ in range(3):
        if how == "trained a step":
            step = service.database.read(get_job, "alice", view.id).step
            host = service.host() if host is None else service.reconnect(host)
            await host.join()
            await eventually(lambda step=step: service.database.read(get_job, "alice", view.id).step > step)
        await service.ends(view.id, "running")
        path = service.controller.record.path
        if how == "trained a step":
            await eventually(lambda path=path: view.id.encode() not in path.read_bytes())
        while how == "ran for a while" and view.id.encode() in path.read_bytes():
            await service.clock.advance(START_SECONDS)  # which may begin to count only after the job is shown to run
        await (service.close() if how == "orderly stop" else service.crash())
        await service.start()
        await eventually(lambda: view.id in service.controller.jobs.runners)
        assert service.database.read(get_job, "alice", view.id).crashes == 0
        await (starting(service) if how != "trained a step" else service.worker().join())
    await service.ends(view.id, "running")
