"""Whole jobs on the shipped controller: the algorithm, its bounds, restarts, stops, evaluation, owners."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save
from sqlalchemy import update
from tests.support.peers import (
    ADAPTER,
    CONFIG,
    HANG,
    MODEL,
    PATIENCE,
    ScriptedWorker,
    Service,
    eventually,
    job_of,
    peft_config,
    settle,
)
from tests.support.storing import submit as submit_row

from rookery import protocol
from rookery.controller.fleet.env_hosts import SERVICE, EnvironmentRef
from rookery.controller.jobs.job_context import RATE_SECONDS
from rookery.controller.training.policy_versions import PolicyVersions
from rookery.errors import Conflict, NotFound, RookeryError, StorageFull, Unavailable
from rookery.protocol.connection import RegistrationRefused
from rookery.spec.job import EnvironmentSpec
from rookery.spec.parsing import SpecError
from rookery.spec.policy import TARGETS
from rookery.storage import models
from rookery.storage.artifacts import Staging
from rookery.storage.repositories import tenants
from rookery.storage.repositories import versions as version_rows
from rookery.storage.repositories.jobs import (
    get_job,
    list_jobs,
    open_groups,
    policies,
    ready_groups,
    recent_episodes,
)
from rookery.telemetry.numbers import evaluation_text
from rookery.turns import work_of


async def run(service: Service, tenant: str = "alice", **changes: Any) -> str:
    view, created = await service.controller.submit(tenant, job_of(**changes))
    assert created
    return view.id


def versions_of(service: Service, job: str) -> list[set[int]]:
    """By group in order, the versions of its episodes' tokens."""
    found = []
    for row in service.groups(job):
        episodes = [
            e for g, e in service.database.read(recent_episodes, "alice", job, 10_000) if g.id == row["id"]
        ]  # fmt: skip
        found.append({episode.version for episode in episodes})
    return found


# --- the algorithm ----------------------------------------------------------------------------------------------------


async def test_staleness_zero_is_strictly_on_policy(service: Service) -> None:
    await service.join()
    job = await run(service, stop__steps=4, algorithm__groups_per_step=3)
    await service.ends(job)
    versions = service.check_history(job)
    assert [version.step for version in versions] == [0, 1, 2, 3, 4]
    rows = service.groups(job)
    assert len(rows) == 12, "no group was begun for nothing"
    for row, began_on in zip(rows, versions_of(service, job), strict=True):
        assert row["state"] == "consumed"
        assert began_on == {row["consumed_by"] - 1} == {row["min_version"]}
    episodes = await service.controller.queries.episodes.trajectories("alice", job, 100)
    for episode in episodes:
        for trajectory in episode.trajectories or ():
            assert set(trajectory.versions) <= {episode.version, -1}
    metrics = await service.controller.queries.metrics("alice", job)
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert all(row["staleness_max"] == 0 and row["version"] == row["step"] for row in metrics)


async def test_staleness_two_collects_while_it_trains_and_keeps_the_bound(service: Service) -> None:
    worker, _ = await service.join()
    worker.training.clear()
    job = await run(service, stop__steps=6, algorithm__max_staleness=2)
    await eventually(lambda: any(isinstance(op, protocol.InitAdapter) for op in worker.operations))
    worker.training.set()
    await eventually(lambda: any(isinstance(op, protocol.ForwardBackward) for op in worker.operations))
    worker.training.clear()

    async def full() -> bool:
        view = await service.controller.queries.show("alice", job)
        return view.groups_in_flight == 0 and view.groups_ready >= 2

    await eventually(full)
    worker.training.set()
    await service.ends(job)
    service.check_history(job)
    rows = service.groups(job)
    for row in rows:
        if row["state"] == "consumed":
            assert row["consumed_by"] - 1 - row["min_version"] <= 2
    metrics = await service.controller.queries.metrics("alice", job)
    assert max(row["staleness_max"] for row in metrics) >= 1
    assert all(row["staleness_max"] <= 2 for row in metrics)


async def test_steps_between_commits(service: Service) -> None:
    worker, _ = await service.join()
    job = await run(service, stop__steps=5, algorithm__max_staleness=1, checkpoints={"commit_every": 2})
    await service.ends(job)
    versions = service.check_history(job)
    assert [version.step for version in versions] == [0, 2, 4, 5]
    assert [row["consumed_by"] for row in service.groups(job)] == [1] * 4 + [2] * 4 + [3] * 2
    metrics = await service.controller.queries.metrics("alice", job)
    assert [(row["step"], row["version"]) for row in metrics] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 3)]
    assert [op.steps for op in worker.operations if isinstance(op, protocol.OptimStep)] == [0, 1, 0, 1, 0]


async def test_many_jobs_of_many_tenants_at_once(service: Service) -> None:
    await service.worker().join()
    await service.worker("second").join()
    await service.host().join()
    await service.host(owner="bob", instance="host-2").join()
    jobs = [(tenant, await run(service, tenant)) for tenant in ("alice", "bob") for _ in range(3)]
    for tenant, job in jobs:
        await service.ends(job, tenant=tenant)
        service.check_history(job, tenant)
    totals = service.controller.queries.health().totals
    assert totals["steps"] == 12
    assert totals["episodes"] == 48
    assert service.controller.queries.health().jobs == {"completed": 6}


async def test_jobs_with_equal_adapters_keep_their_artifacts(service: Service) -> None:
    """Version 0 of equal policies is one artifact: one job lets go of it while another begins with it."""
    await service.join()
    keep = {"keep_last": 1, "keep_best": False}
    jobs = [await run(service, checkpoints=keep, stop__steps=1 + number % 3) for number in range(8)]
    for job in jobs:
        await service.ends(job)
        kept = [version for version in service.check_history(job) if version.kept]
        assert len(kept) == 1


# --- stopping ---------------------------------------------------------------------------------------------------------


async def test_stop_by_reward(service: Service) -> None:
    await service.join()
    job = await run(service, stop={"reward": -1.0}, algorithm__max_staleness=2, checkpoints={"commit_every": 3})
    view = await service.ends(job)
    assert view.reason.endswith("reached -1")
    assert [version.step for version in service.check_history(job)] == [0, 1], "the step is committed before its time"


async def test_stop_by_tokens(service: Service) -> None:
    await service.join()
    job = await run(service, stop={"tokens": 60})
    view = await service.ends(job)
    reached, rest = view.reason.split(" ", 1)
    assert rest == "tokens reached 60"
    assert 60 <= int(reached) <= view.tokens  # episodes that end while the job does are counted, too
    service.check_history(job)


@pytest.mark.parametrize("waiting", [False, True])
async def test_stop_by_wall_time(service: Service, waiting: bool) -> None:
    """Also a job that waits for its environment for ever notices."""
    _, host = await service.join()
    if waiting:
        host.answering.clear()
    job = await run(service, stop={"wall_time": 100}, environment__step_timeout="1h")
    await eventually(lambda: bool(service.database.read(policies, "alice", job)[0].head_version is not None))
    if not waiting:
        await eventually(lambda: service.database.read(get_job, "alice", job).step > 0)
    await eventually(lambda: service.controller.jobs.runners[job].job is not None)
    service.clock.now += 101
    await service.clock.advance(1, steps=1)
    await service.ends(job)
    view = await service.controller.queries.show("alice", job)
    assert view.state == "completed"
    assert "reached 100 s" in view.reason
    service.check_history(job)


async def test_wall_time_ends_a_job_between_two_commits(service: Service) -> None:
    """The steps taken are committed, though no episode of the next one ever completes."""
    worker, host = await service.join()

    async def stop_the_episodes(op: Any) -> None:
        if isinstance(op, protocol.ForwardBackward):
            host.answering.clear()

    worker.answer = stop_the_episodes
    job = await run(
        service, stop={"wall_time": 10}, environment__step_timeout="1h", algorithm__max_staleness=30,
        checkpoints={"commit_every": 31},
    )  # fmt: skip

    def taken() -> int:
        return sum(isinstance(op, protocol.OptimStep) and op.adam is not None for op in worker.operations)

    await eventually(lambda: taken() > 0)
    for _ in range(6):
        await service.clock.advance(service.settings.worker.heartbeat_seconds, steps=1)
    assert "reached 10 s" in (await service.ends(job)).reason
    assert [version.step for version in service.check_history(job)] == [0, taken()] and taken() < 31


@pytest.mark.parametrize("restart", [False, True])
async def test_wall_time_includes_uncommitted_steps(service: Service, restart: bool) -> None:
    """Over pauses and restarts, whose own time does not count."""
    _, host = await service.join()
    host.answering.clear()
    job = await run(service, stop={"wall_time": 100}, environment__step_timeout="1h")
    await eventually(lambda: bool(service.database.read(policies, "alice", job)[0].head_version is not None))
    service.clock.now += 60
    if restart:
        await service.close()
        service.clock.now += 1000
        await service.start()
    else:
        await service.controller.pause("alice", job)
        service.clock.now += 1000
        await service.controller.resume("alice", job)
    await eventually(lambda: service.controller.jobs.runners[job].job is not None)
    assert service.controller.jobs.runners[job].job.progress.seconds() == 60  # type: ignore[union-attr]
    service.clock.now += 41
    await service.clock.advance(1, steps=1)
    assert "reached 100 s" in (await service.ends(job)).reason


async def test_open_groups_are_closed_when_the_job_ends(service: Service) -> None:
    worker, host = await service.join(turns=3)
    job = await run(service, stop__steps=50, algorithm__max_staleness=3)
    await eventually(lambda: len(host.executed) > 20)
    await service.controller.cancel("alice", job)
    view = await service.controller.queries.show("alice", job)
    assert (view.state, view.reason) == ("cancelled", "cancelled by its owner")
    assert {row["state"] for row in service.groups(job)} <= {"consumed", "dropped"}
    await eventually(lambda: not worker.active and not host.episodes)
    with pytest.raises(Conflict, match="is cancelled"):
        await service.controller.resume("alice", job)
    with pytest.raises(Conflict, match="is cancelled already"):
        await service.controller.pause("alice", job)
    await service.controller.cancel("alice", job)


async def test_counters_are_complete_when_the_end_of_a_job_is_visible(service: Service) -> None:
    await service.join(turns=3)
    seen = []

    def stored_now(job: str) -> list[Any]:
        database = service.database
        shown = [database.read(get_job, "alice", job), database.read(tenants.events, "alice", job, 100)]
        return [
            *shown,
            database.read(recent_episodes, "alice", job, 1000),
            database.read(open_groups, job),
            database.read(ready_groups, job),
        ]

    def call(real: Any, job: str, state: str, *others: Any) -> Any:
        row = real(job, state, *others)
        if state == "completed":
            seen.append(stored_now(job))
        return row

    service.database.intercept("set_job_state", call)
    job = await run(service, stop__steps=6, algorithm__max_staleness=3)
    await service.ends(job)
    await eventually(lambda: job not in service.controller.jobs.runners)
    assert seen == [stored_now(job)]
    row, events, _, *left = seen[0]
    assert events[-1].text == "completed: 6 steps" and left == [[], []]
    assert row.counters["episodes"] == (await service.controller.queries.show("alice", job)).counters["episodes"] > 0


# --- pause and resume -------------------------------------------------------------------------------------------------


async def test_pause_keeps_tokens_and_resume_continues_from_them(service: Service) -> None:
    worker = await service.worker(chunk=1, shortest=4).join()
    host = await service.host(turns=2).join()
    job = await run(service, stop__steps=3)
    for moment in range(6):
        before = sum(worker.sampled.values())
        await eventually(lambda before=before: sum(worker.sampled.values()) >= before + 11)  # type: ignore[misc]
        await service.controller.pause("alice", job)
        view = await service.controller.queries.show("alice", job)
        assert (view.state, view.reason) == ("paused", "paused by its owner")
        assert service.controller.queries.health().gauges["requests_running"] == 0
        await eventually(lambda: not worker.active)
        await service.controller.resume("alice", job)
        if moment == 0:
            await asyncio.gather(*(service.controller.resume("alice", job) for _ in range(4)))
            assert len(service.controller.jobs.runners) == 1
    view = await service.ends(job)
    service.check_history(job)
    resent = [position for (request, position), count in worker.sampled.items() if count > 1]
    assert len(resent) <= 6 * 8, "at most what was on its way when it was paused"
    assert host.executed.most_common(1)[0][1] == 1, "no reset and no step was carried out twice"
    assert view.tokens == len(worker.sampled)


async def test_pause_during_the_start_keeps_the_state_counts_right(service: Service) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def slow(real: Any, job: str, state: str, *values: Any) -> Any:
        if state == "running":
            reached.set()
            go_on.wait(PATIENCE)
        return real(job, state, *values)

    service.database.intercept("set_job_state", slow)
    submitting = asyncio.create_task(run(service))  # its last read may wait for the same writer
    await eventually(reached.is_set)
    (job,) = service.controller.jobs.runners
    pausing = asyncio.create_task(service.controller.pause("alice", job))
    await settle()
    service.controller.jobs.runners[job].task.cancel()  # as the pause will, which waits for the same writer
    await settle()
    go_on.set()
    assert await submitting == job
    await pausing
    assert service.controller.queries.health().jobs == {"paused": 1}


@pytest.mark.parametrize("where", ["counters", "end"])
async def test_job_that_is_halted_while_its_end_is_stored_keeps_that_end(service: Service, where: str) -> None:
    reached, go_on, failures = threading.Event(), threading.Event(), [Unavailable("went away")]

    def slow(real: Any, *arguments: Any) -> Any:
        reached.set()
        go_on.wait(PATIENCE)
        return real(*arguments)

    def away(real: Any, job: str, state: str, *others: Any) -> Any:
        if state == "completed" and failures:
            raise failures.pop()
        return real(job, state, *others)

    if where == "counters":
        service.database.intercept("save_counters", slow)
    else:
        service.database.intercept("set_job_state", away)
    await service.join()
    job = await run(service, stop__steps=1)
    runner = service.controller.jobs.runners[job]
    await eventually(lambda: reached.is_set() or bool(runner.unstored))
    runner.halt("its tenant's tokens of today are used up")
    go_on.set()
    while job in service.controller.jobs.runners:
        await service.clock.advance(2.0)
        await service.writer(lambda: None)
    assert (await service.controller.queries.show("alice", job)).state == "completed"


async def test_halt_after_a_pause_by_its_owner_cancels_the_task_no_second_time(service: Service) -> None:
    """A second cancellation would end the first one's clean-up."""
    await service.join()
    job = await run(service)
    await eventually(lambda: bool(service.controller.jobs.running()))
    runner = service.controller.jobs.runners[job]
    revoking = asyncio.create_task(runner.revoke())
    await asyncio.sleep(0)
    runner.halt("its tenant's tokens of today are used up")
    assert runner.revoked and runner.task.cancelling() == 1
    await revoking


@pytest.mark.parametrize("by", ["halt", "owner"])
async def test_task_of_a_job_that_ends_before_its_first_step_is_forgotten(service: Service, by: str) -> None:
    job = await run(service)
    await service.controller.pause("alice", job)
    await service.controller.resume("alice", job)
    runner = service.controller.jobs.runners[job]
    if by == "halt":
        runner.halt("its tenant's tokens of today are used up")
        assert (await service.ends(job, "paused")).reason == "its tenant's tokens of today are used up"
    else:
        await runner.revoke()
    await eventually(lambda: job not in service.controller.jobs.runners)


async def test_pause_of_a_job_that_an_outage_paused_lasts(service: Service) -> None:
    job = await run(service)
    await eventually(lambda: bool(service.controller.jobs.running()))
    service.controller.model_failed(MODEL, "3 times in a row it ended with code 1")
    assert (await service.ends(job, "paused")).paused_by == "outage"
    await service.controller.pause("alice", job)
    view = await service.controller.queries.show("alice", job)
    assert (view.paused_by, view.reason) == ("owner", "paused by its owner")
    await service.join()
    await service.clock.advance(1000.0)
    assert (await service.controller.queries.show("alice", job)).state == "paused"
    await service.crash()
    await service.start()
    await service.clock.advance(1000.0)
    assert (await service.controller.queries.show("alice", job)).state == "paused"


async def test_pause_that_the_database_does_not_take_leaves_no_job_without_a_task(service: Service) -> None:
    await service.join()
    job = await run(service, stop__steps=1000)
    await service.ends(job, "running")
    ended, failures = service.controller.jobs.runners[job], [Unavailable("went away")]

    def away(real: Any, *arguments: Any) -> Any:
        if service.controller.jobs.runners.get(job) is not ended and failures:
            raise failures.pop()
        return real(*arguments)

    service.database.intercept("get_job", away)
    with pytest.raises(Unavailable):
        await service.controller.pause("alice", job)
    assert not failures and job in service.controller.jobs.runners
    await service.controller.cancel("alice", job)


async def test_an_error_of_the_machine_pauses_a_job_without_a_path_of_the_service(service: Service) -> None:
    await service.join()

    def denied(real: Any, *arguments: Any) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(service.folder / "file"))

    service.database.intercept("open_groups", denied)
    view = await service.ends(await run(service), "paused")
    assert view.paused_by == "outage"
    assert view.reason == "the service met an error of its machine (Permission denied)"


async def test_the_token_rate_window_is_trimmed_without_readers(service: Service) -> None:
    job = await run(service)
    await service.ends(job, "running")
    progress = service.controller.jobs.runners[job].job.progress  # type: ignore[union-attr]
    progress.add_sampled(3)
    await service.clock.advance(RATE_SECONDS + 1)
    progress.add_sampled(4)
    assert [count for _, count in progress._sampled] == [4]


async def test_a_paused_job_stays_paused_over_a_restart(service: Service) -> None:
    _, host = await service.join()
    job = await run(service, stop__steps=40)
    await eventually(lambda: host.calls > 10)
    await service.controller.pause("alice", job)
    await service.crash()
    await service.start()
    assert (await service.controller.queries.show("alice", job)).state == "paused"
    await service.controller.cancel("alice", job)
    assert (await service.controller.queries.show("alice", job)).state == "cancelled"


# --- restarts ---------------------------------------------------------------------------------------------------------


async def finish(service: Service, job: str, *, calls: list[int], after: bool, **host: Any) -> ScriptedWorker:
    """Run the job to its end through processes that die after so many writer calls each."""
    worker = None
    for left in [*calls, None]:
        await service.start(left, after)
        if left is None:
            # a job that was starting at several crashes is held back for some seconds
            await service.pass_until(
                lambda: job in service.controller.jobs.runners or service.database.read(get_job, "alice", job).finished
            )
        worker = await service.worker(shortest=2).join()
        await service.host(**host).join()
        if left is None:
            await service.ends(job)
        else:
            done = asyncio.ensure_future(service.ends(job))
            died = asyncio.ensure_future(service.writer.died.wait())
            await asyncio.wait([done, died], return_when=asyncio.FIRST_COMPLETED)
            done.cancel()
            died.cancel()
            await asyncio.gather(done, died, return_exceptions=True)
            await service.crash()
    assert worker is not None
    return worker


def content(service: Service, job: str) -> str:
    """The newest version's: a chain of everything that the policy was trained on."""
    head = service.check_history(job)[-1]
    return service.artifacts.path(head.hash, ADAPTER).read_text()


async def calm(folder: Path, turns: int) -> str:
    """The content that nothing disturbed."""
    service = Service(folder)
    await service.start()
    await service.worker(shortest=2).join()
    await service.host(turns=turns).join()
    job = await run(service, stop__steps=2)
    await service.ends(job)
    found = content(service, job)
    await service.close()
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """By the number of turns, the content of a calm run's last version."""
    return {turns: asyncio.run(calm(tmp_path_factory.mktemp("calm"), turns)) for turns in (1, 2)}


@pytest.mark.parametrize("turns", [1, 2])
async def test_losing_workers_while_generating_changes_no_result(
    service: Service, undisturbed: dict[int, str], turns: int
) -> None:
    await service.host(turns=turns).join()
    job = await run(service, stop__steps=2)
    sampled: Counter[tuple[str, int]] = Counter()
    for number in range(12):
        worker = service.worker(f"w{number}", shortest=2, chunk=1 + number % 3)
        worker.chunks_left = 3 + number
        await worker.join()
        view = await service.controller.queries.show("alice", job)
        while view.state != "completed" and service.controller.context.rooms.fleet.serving("rollout", MODEL):
            view = await service.controller.queries.show("alice", job)
        sampled += worker.sampled
    await service.worker("last", shortest=2).join()
    view = await service.ends(job)
    sampled += service.peers[-1].sampled
    assert content(service, job) == undisturbed[turns]
    assert set(sampled.values()) == {1}
    assert len(sampled) == view.tokens == service.controller.queries.health().totals["sampled_tokens"]
    assert service.controller.queries.health().totals["worker_losses"] >= 4


@pytest.mark.parametrize("after", [True, False])
@pytest.mark.parametrize("part", range(3))
async def test_a_crash_at_any_moment_loses_and_repeats_nothing(
    tmp_path: Path, undisturbed: dict[int, str], part: int, after: bool
) -> None:
    """The controller dies at one writer call after another, the call carried out or not; the job goes on to its end."""
    calls, moment = 0, 8 + part
    while moment < 75:
        service = Service(tmp_path / str(moment))
        await service.start()
        job = await run(service, stop__steps=2, checkpoints={"keep_last": 1}, environment__return_timeout=5)
        await service.crash()
        await finish(service, job, calls=[moment], after=after, turns=1 + moment % 2, environments={"task": True})
        versions = service.check_history(job)
        assert [version.step for version in versions] == [0, 1, 2]
        rows = service.groups(job)
        assert Counter(row["consumed_by"] for row in rows if row["state"] == "consumed") == {1: 2, 2: 2}
        assert all(row["min_version"] == row["consumed_by"] - 1 for row in rows if row["state"] == "consumed")
        metrics = await service.controller.queries.metrics("alice", job)
        assert [row["step"] for row in metrics] == [1, 2]
        assert content(service, job) == undisturbed[1 + moment % 2], "the same tokens, trained on in the same order"
        await service.close()
        calls += 1
        moment += 17
    assert calls >= 4


async def test_repeated_restarts(tmp_path: Path) -> None:
    service = Service(tmp_path)
    await service.start()
    job = await run(service, stop__steps=4, algorithm__max_staleness=2, environment__return_timeout=5)
    await service.crash()
    await finish(service, job, calls=[30, 11, 25, 40, 18, 33], after=True, environments={"task": True})
    assert [version.step for version in service.check_history(job)] == [0, 1, 2, 3, 4]


async def test_orderly_stop_is_resumed(service: Service) -> None:
    _, host = await service.join(turns=2)
    job = await run(service, stop__steps=3)
    await eventually(lambda: host.calls > 15)
    await service.close()
    assert service.database.read(get_job, "alice", job).state == "running"
    await service.start()
    worker = await service.worker().join()
    await service.reconnect(host).join()
    await service.ends(job)
    service.check_history(job)
    assert set(host.executed.values()) == {1}
    assert worker.generates


async def test_missing_model_after_a_restart_pauses_its_jobs(service: Service) -> None:
    """It can be mended, as a hub that does not answer; a job that never ran is refused for it."""
    _, host = await service.join()
    job = await run(service, stop__steps=20)
    await eventually(lambda: service.database.read(get_job, "alice", job).step > 0)
    await service.crash()
    service.no_model = "base_model: the hub does not answer"
    await service.start()
    assert (await service.ends(job, "paused")).reason == service.no_model
    new = await run(service)
    assert (await service.ends(new, "failed")).reason == service.no_model
    service.no_model = ""
    await service.worker().join()
    await service.reconnect(host).join()
    await service.controller.resume("alice", job)
    await service.ends(job)
    service.check_history(job)


async def test_a_corrupt_head_is_rolled_back(service: Service) -> None:
    _, host = await service.join()
    job = await run(service, stop__steps=40)
    await eventually(lambda: service.database.read(get_job, "alice", job).step >= 3)
    host.answering.clear()
    await service.crash()
    policy = service.database.read(policies, "alice", job)[0]
    head = service.database.read(version_rows.version, "alice", policy.id, int(policy.head_version or 0))
    service.corrupt(head.hash)
    service.stop_at(job, head.step + 2)
    await service.start()
    worker, _ = await service.join(instance="host-2")
    await service.ends(job)
    versions = service.check_history(job)
    lost = versions[head.version]
    assert lost.lost and not lost.kept
    after = versions[head.version + 1]
    assert (after.parent, after.step) == (head.version - 1, head.step)
    assert versions[-1].step == head.step + 2
    events = await service.controller.queries.events("alice", job)
    said = [event.text for event in events if event.kind == "corrupt"]
    assert len(said) == 1
    assert f"version {head.version} of main is corrupt" in said[0]
    assert f"went back to version {head.version - 1}" in said[0]
    assert {op.parent.version for op in worker.operations} & {head.version} == set(), "nobody is given the corrupt one"
    trained = [row for row in service.groups(job) if row["consumed_by"] == after.version]
    assert {row["min_version"] for row in trained} == {head.version - 1}, "nor what it sampled"
    steps = [row["step"] for row in await service.controller.queries.metrics("alice", job)]
    assert steps == list(range(1, head.step + 3))


async def test_versions_lost_in_a_rollback_are_not_in_the_lineage(service: Service) -> None:
    """Versions between the corrupt head and the best one, to which the job goes back, are not kept."""
    worker = await service.worker().join()

    def script(message: Any) -> Any:
        if isinstance(message, protocol.StepEpisode):
            taken = sum(isinstance(operation, protocol.OptimStep) for operation in worker.operations)
            return {"reward": 10.0 if taken == 2 else 0.1, "done": True}
        return None

    host = await service.host(script=script).join()
    job = await run(service, stop__steps=40, checkpoints={"keep_last": 1})
    await eventually(lambda: service.database.read(get_job, "alice", job).step >= 9)
    host.answering.clear()
    policy = service.database.read(policies, "alice", job)[0]

    def kept() -> list[int]:
        return [row.version for row in service.database.read(version_rows.versions, "alice", policy.id) if row.kept]

    await eventually(lambda: len(kept()) == 2 and kept()[1] > kept()[0] + 1)
    await service.crash()
    best, newest = kept()
    head = service.database.read(version_rows.version, "alice", policy.id, newest)
    service.corrupt(head.hash)
    service.stop_at(job, head.step + 1)
    await service.start()
    again, _ = await service.join(instance="host-2")
    await service.ends(job)
    rows = await service.controller.queries.metrics("alice", job)
    assert [row["step"] for row in rows] == list(range(1, head.step + 2))
    later = range(head.version + 1, head.version + 1 + len(rows) - best)
    assert [row["version"] for row in rows] == [*range(1, best + 1), *later]
    assert not {op.parent.version for op in again.operations} & set(range(best + 1, head.version + 1))


async def test_a_job_without_an_intact_version_waits_for_a_backup_of_it(service: Service) -> None:
    await service.worker().join()
    job = await run(service)
    await eventually(lambda: service.database.read(policies, "alice", job)[0].head_version == 0)
    await service.crash()
    policy = service.database.read(policies, "alice", job)[0]
    head = service.database.read(version_rows.version, "alice", policy.id, 0)
    path = service.artifacts.path(head.hash, ADAPTER)
    intact = path.read_bytes()
    service.corrupt(head.hash)
    await service.start()
    view = await service.ends(job, "paused")
    assert "version 0 of main is corrupt" in view.reason
    path.write_bytes(intact)
    await service.pass_until(lambda: service.database.read(get_job, "alice", job).state == "running")


# --- evaluation and retention -----------------------------------------------------------------------------------------


async def test_evaluations_use_the_same_prompts(service: Service) -> None:
    worker, host = await service.join()
    job = await run(service, stop__steps=5, evaluation={"every": 2, "prompts": 6, "seed": 3})
    await service.ends(job)
    evaluations = await service.controller.queries.evaluations("alice", job)
    assert [evaluation.version for evaluation in evaluations] == [0, 2, 4, 5]
    asked = [[result.prompt for result in evaluation.held_out] for evaluation in evaluations]
    assert asked == [[{"eval": number} for number in range(6)]] * 4
    assert all(evaluation.prompts == 6 and not evaluation.held_out[0].error for evaluation in evaluations)
    seeds = Counter(g.seed for g in worker.generates if f"{job}-e" in g.request)
    assert set(seeds.values()) == {4}, "the noise is the prompt's"
    assert {g.adapter.version for g in worker.generates if g.adapter and "-e4-" in g.request} == {4}
    assert [message.shuffle for message in host.asked if message.split == "eval"] == [False] * len(
        [message for message in host.asked if message.split == "eval"]
    )
    versions = await service.controller.queries.versions("alice", job, "main")
    assert [version.evaluation is not None for version in versions] == [True, False, True, False, True, True]


@pytest.mark.parametrize("prompts", [1, 2])
async def test_an_evaluation_of_one_prompt_has_no_error(service: Service, prompts: int) -> None:
    await service.join()
    job = await run(service, stop__steps=1, evaluation={"every": 1, "prompts": prompts})
    await service.ends(job)
    evaluations = await service.controller.queries.evaluations("alice", job)
    assert evaluations and all((one.stderr is None) == (prompts == 1) for one in evaluations)
    texts = [row.text for row in service.database.read(tenants.events, "alice", job, 100) if row.kind == "evaluation"]
    assert texts and all("mean reward" in text and ("±" in text) == (prompts > 1) for text in texts)


async def test_old_evaluations_keep_their_figures_and_new_ones_their_prompts(tmp_path: Path) -> None:
    service = Service(tmp_path, trajectory_keep=1)
    await service.start()
    _, host = await service.join()
    job = await run(service, stop__steps=4, evaluation={"every": 1, "prompts": 2})
    await service.ends(job)
    found = await service.controller.queries.evaluations("alice", job)
    assert [one.version for one in found] == [0, 1, 2, 3, 4] and all(one.prompts == 2 for one in found)
    assert not all(one.kept for one in found) and [bool(one.held_out) for one in found] == [one.kept for one in found]
    assert found[0].kept and found[-1].kept
    assert [one.prompt for one in found[0].held_out] == [one.prompt for one in found[-1].held_out]
    assert len([message for message in host.asked if message.split == "eval" and not message.constant]) == 1
    await service.close()
    service.database.close()


async def test_the_first_evaluation_survives_a_restart(service: Service) -> None:
    worker = await service.worker(chunk=1).join()

    def script(message: Any) -> Any:
        return None if "-e0-" not in message.episode or isinstance(message, protocol.Reset) else HANG

    await service.host(script=script).join()
    job = await run(service, stop__steps=4, evaluation={"prompts": 2}, checkpoints={"keep_last": 1, "keep_best": False})
    await eventually(lambda: service.database.read(get_job, "alice", job).step >= 3)
    await service.crash()
    assert not service.database.read(version_rows.evaluations, "alice", job)
    await service.start()
    worker, _ = await service.join(instance="host-2")
    await service.ends(job)
    evaluations = await service.controller.queries.evaluations("alice", job)
    assert [evaluation.version for evaluation in evaluations] == [0, 4]
    assert worker.generates


async def test_failed_held_out_episodes_are_reported_separately(service: Service) -> None:
    await service.worker().join()

    def script(message: Any) -> Any:
        if isinstance(message, protocol.StepEpisode) and "-e" in message.episode and message.episode[-1] in "01":
            return {"error": "boom"}
        return None

    await service.host(script=script).join()
    view = await service.ends(await run(service, evaluation={"prompts": 3}))
    evaluations = await service.controller.queries.evaluations("alice", view.id)
    assert [evaluation.prompts for evaluation in evaluations] == [1, 1]
    assert [result.error for result in evaluations[0].held_out] == ["boom", "boom", ""]
    events = await service.controller.queries.events("alice", view.id)
    lines = [event.text for event in events if event.kind == "evaluation"]
    assert len(lines) == 2
    assert all(line.endswith(" on 1 prompt; 2 of 3 episodes failed and do not count: boom") for line in lines)
    assert view.counters["evaluation_failures"] == 4


async def test_an_evaluation_in_which_every_episode_failed_is_stored(service: Service) -> None:
    """With its errors and without a figure. It counts as not evaluated: a resumed job evaluates the version again."""
    await service.worker().join()

    def script(message: Any) -> Any:
        failing = "-e0-" in message.episode or "-e2-" in message.episode
        return {"error": "boom"} if failing and isinstance(message, protocol.StepEpisode) else None

    await service.host(script=script).join()
    job = await run(service, evaluation={"prompts": 3, "every": 1}, stop__steps=2)
    view = await service.ends(job)
    found = await service.controller.queries.evaluations("alice", job)
    assert [(one.version, one.prompts, one.mean is None, one.stderr) for one in found] == [
        (0, 0, True, None), (1, 3, False, found[1].stderr), (2, 0, True, None),
    ]  # fmt: skip
    assert [[result.error for result in one.held_out] for one in found] == [["boom"] * 3, [""] * 3, ["boom"] * 3]
    assert len({tuple(str(result.prompt) for result in one.held_out) for one in found}) == 1
    assert [evaluation_text(one.model_dump()) for one in found[::2]] == ["every held-out episode failed"] * 2
    assert view.counters["evaluation_failures"] == 6
    versions = {version.version: version.evaluation for version in service.check_history(job)}
    assert versions[0] is None and versions[1] == found[1].mean and versions[2] is None
    assert {version for _, version in service.database.read(version_rows.evaluated, "alice", job)} == {1}


async def test_an_evaluation_of_which_most_episodes_failed_is_not_the_best(service: Service) -> None:
    await service.worker().join()

    def script(message: Any) -> Any:
        if isinstance(message, protocol.StepEpisode) and "-e" in message.episode:
            if "-e1-" in message.episode and message.episode[-1] != "0":
                return {"error": "boom"}
            return {"reward": 9.0 if "-e1-" in message.episode else 0.5, "done": True}
        return None

    await service.host(script=script).join()
    job = await run(service, stop__steps=3, evaluation={"every": 1, "prompts": 3}, checkpoints={"keep_last": 1})
    await service.ends(job)
    found = await service.controller.queries.evaluations("alice", job)
    figures = [(one.version, one.prompts, one.mean) for one in found]
    assert figures == [(0, 3, 0.5), (1, 1, 9.0), (2, 3, 0.5), (3, 3, 0.5)]
    versions = service.check_history(job)
    assert [version.evaluation for version in versions] == [0.5, None, 0.5, 0.5]
    assert 1 not in [version.version for version in versions if version.kept]


async def test_retention_keeps_the_last_and_the_best(service: Service) -> None:
    worker = await service.worker().join()

    def script(message: Any) -> Any:
        if isinstance(message, protocol.StepEpisode) and "-e" in message.episode:
            version = int(message.episode.rpartition("-e")[2].split("-")[0])
            return {"reward": {2: 10.0}.get(version, version / 100), "done": True}
        return None

    await service.host(script=script).join()
    job = await run(service, stop__steps=7, evaluation={"every": 1, "prompts": 2}, checkpoints={"keep_last": 2})
    await service.ends(job)
    versions = service.check_history(job)
    assert [version.version for version in versions if version.kept] == [2, 6, 7]
    here = service.artifacts.hashes()
    assert here == {version.hash for version in versions if version.kept}
    forgotten = {h for message in worker.other if isinstance(message, protocol.EvictArtifacts) for h in message.hashes}
    assert forgotten == {version.hash for version in versions if not version.kept}
    for wanted, number in ((2, 2), (None, 7)):
        found, manifest = await service.controller.queries.adapter("alice", job, "main", wanted)
        assert (found, manifest.hash) == (number, versions[number].hash)
    with pytest.raises(NotFound, match=r"version 3 .* is not kept any more"):
        await service.controller.queries.adapter("alice", job, "main", 3)


async def test_version_with_the_best_training_reward_is_kept_without_evaluations(service: Service) -> None:
    """Not the one that was made of it."""
    worker = await service.worker().join()

    def script(message: Any) -> Any:
        if isinstance(message, protocol.StepEpisode):
            version = sum(isinstance(operation, protocol.OptimStep) for operation in worker.operations)
            return {"reward": {2: 10.0}.get(version, version / 100), "done": True}
        return None

    await service.host(script=script).join()
    job = await run(service, stop__steps=7, checkpoints={"keep_last": 1})
    await service.ends(job)
    versions = service.check_history(job)
    assert [version.reward for version in versions[2:5]] == [0.01, 10.0, 0.03]
    assert [version.version for version in versions if version.kept] == [2, 7]


async def test_reward_of_a_version_is_the_best_of_its_steps(service: Service) -> None:
    """Two steps a version, of which the first earned the most."""
    await service.worker().join()

    def script(message: Any) -> Any:
        if isinstance(message, protocol.StepEpisode):
            group = int(message.episode.split("-")[-2].removeprefix("g"))
            return {"reward": 10.0 if group in (8, 9) else 0.1, "done": True}  # the fifth step's
        return None

    await service.host(script=script).join()
    checkpoints = {"keep_last": 1, "commit_every": 2}
    job = await run(service, stop__steps=12, algorithm__max_staleness=1, checkpoints=checkpoints)
    await service.ends(job)
    versions = service.check_history(job)
    rows = await service.controller.queries.metrics("alice", job)
    best = max(rows, key=lambda row: float(row["reward"]))
    taken_from = versions[int(best["version"])].parent
    assert versions[int(best["version"])].step > best["step"], "not its version's last step"
    assert [version.version for version in versions if version.kept] == [taken_from, versions[-1].version]


async def test_a_version_stays_until_its_evaluation_is_known(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the best, and by then not among the last."""
    await service.join()
    evaluated, held = PolicyVersions.evaluated, []

    def told(self: PolicyVersions, version: int, mean: float) -> None:
        held.append(self._users[version])
        evaluated(self, version, mean)

    monkeypatch.setattr(PolicyVersions, "evaluated", told)
    await service.ends(await run(service, stop__steps=3, evaluation={"every": 1, "prompts": 2}))
    assert len(held) == 4 and all(held)


# --- uploads that no version names ------------------------------------------------------------------------------------


def uploads(service: Service) -> tuple[set[str], int, int]:
    """The files of the artifact store, those half-written, and those about to be named."""
    staged = len(list((service.folder / "artifacts" / ".staging").iterdir()))
    return service.artifacts.hashes(), staged, sum(service.controller.context.rooms.collector.references.values())


@pytest.mark.parametrize("step", [0, 2])
@pytest.mark.parametrize("trouble", [StorageFull("no room"), Unavailable("went away")])
@pytest.mark.parametrize("where", ["before", "during", "after"])
async def test_a_commit_that_fails_leaves_no_artifact_behind(
    service: Service, monkeypatch: pytest.MonkeyPatch, step: int, trouble: RookeryError, where: str
) -> None:
    """The artifact is not written whole, its version is not committed, or it is and nobody hears of it."""
    publish, failures = Staging.commit, [trouble]

    def committing(real: Any, version: version_rows.NextVersion, of: version_rows.JobCommit) -> Any:
        if where != "before" and version.step == step and failures:
            if where == "after":
                real(version, of)
            raise failures.pop()
        return real(version, of)

    def publishing(staging: Staging) -> protocol.Manifest:
        if where == "before" and len(service.artifacts.hashes()) == step and failures:
            raise failures.pop()
        return publish(staging)

    service.database.intercept("commit_step", committing)
    monkeypatch.setattr(Staging, "commit", publishing)
    await service.join()
    job = await run(service, stop__steps=4, checkpoints={"keep_last": 9})
    await service.ends(job, "paused")
    assert uploads(service) == ({version.hash for version in service.check_history(job)}, 0, 0)
    assert len(service.check_history(job)) == step + (where == "after")
    await eventually(lambda: job not in service.controller.jobs.runners)
    await service.controller.resume("alice", job)
    await service.ends(job)
    versions = service.check_history(job)
    assert uploads(service) == ({version.hash for version in versions}, 0, 0)
    assert len(versions) == 5


async def test_artifact_is_kept_while_its_references_are_unknown(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    def away(*arguments: Any, **values: Any) -> Any:
        raise Unavailable("the server went away")

    service.database.intercept("commit_step", away)
    service.database.intercept("names", away)
    await service.join()
    job = await run(service)
    await service.ends(job, "paused")
    here, staged, unnamed = uploads(service)
    assert (len(here), staged, unnamed) == (1, 0, 0)
    assert f"artifact {here.pop()} of " in caplog.text


@pytest.mark.parametrize("where", ["open", "publish", "commit"])
async def test_a_job_cancelled_around_its_commit_leaves_no_artifact_behind(
    service: Service, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The call under way is carried out all the same, after the job's task was told to end."""
    reached, go_on = threading.Event(), threading.Event()

    def slow(real: Any, *arguments: Any, **values: Any) -> Any:
        if service.artifacts.hashes() or where == "publish":
            reached.set()
            go_on.wait(PATIENCE)
        return real(*arguments, **values)

    await service.join()
    if where == "commit":
        service.database.intercept("commit_step", slow)
    else:
        owner, name = (service.artifacts, "begin") if where == "open" else (Staging, "commit")
        real = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *arguments: slow(real, *arguments))
    job = await run(service)
    await eventually(reached.is_set)
    ending = service.controller.jobs.runners[job].task
    ending.cancel()
    await settle()
    go_on.set()
    await asyncio.wait([ending])
    versions = service.check_history(job)
    assert uploads(service) == ({version.hash for version in versions}, 0, 0)
    assert len(versions) == (0 if where == "publish" else 1)


# --- the end of a tenant ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["repetition", "service"])
async def test_deletion_of_a_tenant_that_an_outage_interrupts_is_completed(service: Service, by: str) -> None:
    await service.join()
    older = await run(service, stop__steps=1000)
    await service.ends(await run(service, stop__steps=1))
    failures = [Unavailable("went away")]

    def away(real: Any, *arguments: Any) -> Any:
        if failures:
            raise failures.pop()
        return real(*arguments)

    service.database.intercept("delete_job", away)
    with pytest.raises(Unavailable):
        await service.controller.delete_tenant("alice", True)
    assert older not in service.controller.jobs.runners, "it costs nothing any more"
    assert service.database.read(tenants.half_deleted) == {"alice"}
    if by == "repetition":
        await service.controller.delete_tenant("alice", True)
    else:
        await service.pass_until(lambda: not service.database.read(tenants.half_deleted))
    await eventually(lambda: not service.artifacts.hashes())
    with pytest.raises(NotFound, match="is deleted"):
        await service.controller.delete_tenant("alice", True)


async def test_the_deletion_of_a_tenant_follows_its_writes(service: Service) -> None:
    store, gate = service.controller.context.store, threading.Event()
    holding = asyncio.create_task(store.run(gate.wait))
    with work_of("alice"):
        event = ("alice", None, 0.0, "text", "a write")
        events = [asyncio.create_task(store.write(tenants.add_event, *event)) for _ in range(200)]
        submitting = asyncio.create_task(store.run(submit_row, service.database, "alice", "late"))
    await settle(1)
    deleting = asyncio.create_task(service.controller.delete_tenant("alice", True))
    await settle(1)
    gate.set()
    await asyncio.gather(holding, *events, submitting, deleting)
    assert not service.database.read(list_jobs, "alice")


# --- in and out -------------------------------------------------------------------------------------------------------


async def test_a_stored_state_change_without_reply_takes_effect(service: Service) -> None:
    """The database's server goes away after it has stored that the job is submitted, resumed, completed."""

    def unanswered(method: str, *states: str) -> list[str]:
        left = list(states) or [""]

        def call(real: Any, *arguments: Any, **named: Any) -> Any:
            answer = real(*arguments, **named)
            if left and left[0] in ("", *arguments):
                left.pop(0)
                raise Unavailable("the server went away")
            return answer

        service.database.intercept(method, call)
        return left

    unanswered("submit_job")
    left = unanswered("set_job_state", "queued", "completed")
    host = await service.host().join()
    with pytest.raises(Unavailable):
        await service.controller.submit("alice", job_of(), "key")
    view, created = await service.controller.submit("alice", job_of(), "key")
    assert not created
    await eventually(lambda: view.id in service.controller.jobs.runners)
    await service.controller.pause("alice", view.id)
    with pytest.raises(Unavailable):
        await service.controller.resume("alice", view.id)
    await service.controller.resume("alice", view.id)
    await service.worker().join()
    await eventually(lambda: not left)
    while view.id in service.controller.jobs.runners:  # what is tried again in a while is
        await service.clock.advance(2.0)
        await service.writer(lambda: None)
    assert service.database.read(get_job, "alice", view.id).state == "completed"
    assert {row["state"] for row in service.groups(view.id)} <= {"consumed", "dropped", "failed"}
    assert not host.episodes, "its hosts have let go of it"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"algorithm__group_size": 1}, "algorithm.group_size: given 1"),
        ({"base_model": "gpt-9"}, "base_model: no model is called 'gpt-9'"),
        ({"base_model": "/etc"}, "base_model: "),
        ({"policies": {"main": {"rank": 65}}}, "policies.main.rank: given 65, allowed: at most 64"),
        ({"policies": {"main": {"warm_start": {"job": "job-1"}}}}, "policies.main.warm_start: no job job-1"),
        ({"policies": {"main": {"warm_start": {"job": ""}}}}, "policies.main.warm_start: no job ''"),
        ({"policies": {"main": {"warm_start": {"job": "a\nb"}}}}, "policies.main.warm_start: no job 'a\\nb'"),
        ({"policies": {"main": {"warm_start": {"upload": "0" * 64}}}}, "policies.main.warm_start: no adapter"),
        ({"policies": {"main": {"warm_start": {"peft": "x"}}}}, "policies.main.warm_start.peft: the service reads no"),
        ({"environment": {"id": "jsonl", "path": "/etc/passwd"}}, "path: the service reads no files of yours"),
        ({"environment": {"id": "jsonl", "dataset": "0" * 64}}, "dataset: no dataset"),
    ],
)
async def test_refused_job_stores_nothing(service: Service, changes: dict[str, Any], problem: str) -> None:
    job = job_of(**changes)
    for attempt in (service.controller.submit, service.controller.dry_run):
        with pytest.raises(SpecError) as refused:
            await attempt("alice", job)
        assert any(problem in line for line in refused.value.problems), refused.value.problems
    assert await service.controller.queries.list("alice") == []
    assert not service.controller.jobs.runners


async def test_dry_run_renders_prompts_and_stores_nothing(service: Service) -> None:
    host = await service.host().join()
    shown = await service.controller.dry_run("alice", job_of())
    assert shown.spec["policies"]["main"]["rank"] == 16
    assert len(shown.prompts) == 3
    assert shown.prompts[0].text.startswith('<|im_start|>user\n{"train":0}')
    assert shown.prompts[0].text.endswith("<|im_start|>assistant\n")
    assert await service.controller.queries.list("alice") == []
    await eventually(lambda: not host.episodes)


@pytest.mark.parametrize("owner", [SERVICE, "alice"])
async def test_the_time_of_an_answer_is_charged_where_a_host_of_the_service_sends_it(
    service: Service, owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection of a tenant's host is that tenant's, whose time is measured as a whole."""
    charged: set[str] = set()
    monkeypatch.setattr(
        asyncio.get_running_loop(), "charge", lambda tenant, seconds: charged.add(tenant), raising=False
    )
    named: dict[str, Any] = {"owner": SERVICE, "environments": {"builtin:jsonl": True}} if owner == SERVICE else {}
    await service.host(**named).join()
    rows = {"id": "jsonl", "rows": [{"prompt": "2+2?", "answer": "4"}], "verifier": "exact"}
    changes = {"environment": rows, "evaluation": {"prompts": 0}} if owner == SERVICE else {}
    await service.controller.dry_run("alice", job_of(**changes))
    assert charged == ({"alice"} if owner == SERVICE else set())


@pytest.mark.parametrize("present", ["none", "another name", "another tenant", "disconnected"])
async def test_dry_run_without_a_host_of_its_environment_is_refused_at_once(service: Service, present: str) -> None:
    """The time of these tests is real: the job's own patience is a minute."""
    if present == "disconnected":
        host = await service.host().join()
        await host.leave()
        await eventually(lambda: not service.controller.context.rooms.hosts.count())
    elif present == "another name":
        await service.host(environments={"other": False}).join()
    elif present == "another tenant":
        await service.host(owner="bob").join()
    async with asyncio.timeout(30):
        with pytest.raises(Unavailable, match=r"^environment.hosted: no environment host of yours offers 'task' now; "):
            await service.controller.dry_run("alice", job_of())


async def test_jobs_of_a_model_whose_worker_does_not_work_are_paused_with_the_reason(service: Service) -> None:
    """They resume when one is loaded; jobs of other models continue."""
    await service.host().join()
    job = await run(service, stop__steps=1)
    other = await run(service, base_model="qwen3-0.6b")
    await eventually(lambda: len(service.controller.jobs.running()) == 2)
    service.controller.model_failed(MODEL, "3 times in a row it ended with code 1: KeyError: 'q'")
    view = await service.ends(job, "paused")
    assert "KeyError: 'q'" in view.reason and MODEL in view.reason
    assert (await service.controller.queries.show("alice", other)).state == "running"
    [row] = [row for row in await service.controller.queries.models() if row.name == MODEL]
    assert row.state == "refused" and "KeyError: 'q'" in row.reason
    await service.controller.resume("alice", job)
    assert "KeyError" in (await service.ends(job, "paused")).reason
    await service.worker().join()
    await service.controller.resume("alice", job)
    await service.ends(job)
    service.controller.model_failed(MODEL, "one of two")  # another one serves
    assert service.controller.context.rooms.fleet.failure(MODEL) == ""


async def test_warm_starts(service: Service) -> None:
    worker, _ = await service.join()
    first = await run(service)
    await service.ends(first)
    versions = service.check_history(first)
    contents = {v.version: service.artifacts.path(v.hash, ADAPTER).read_bytes() for v in versions if v.kept}
    for start, expected in (({"job": first}, 2), ({"job": first, "version": 1}, 1)):
        job = await run(service, policies={"main": {"warm_start": start}}, stop__steps=1)
        await service.ends(job)
        zero = service.check_history(job)[0]
        assert service.artifacts.path(zero.hash, ADAPTER).read_bytes() == contents[expected]

    async def archive() -> AsyncIterator[bytes]:
        yield b"files"

    modules = [("self_attn" if target in "qkvo" else "mlp") + f".{target}_proj" for target in TARGETS]
    lora = {
        f"base_model.model.model.layers.0.{module}.lora_{side}.weight": np.ones((16, 16), np.float32)
        for module in modules
        for side in "AB"
    }
    mine = save(lora)
    files = {ADAPTER: [mine[:9], mine[9:]], CONFIG: [peft_config()]}
    upload = await service.controller.add_adapter("alice", archive(), lambda path: nullcontext(files))
    job = await run(service, policies={"main": {"warm_start": {"upload": upload}}}, stop__steps=1)
    await service.ends(job)
    assert service.artifacts.path(service.check_history(job)[0].hash, ADAPTER).read_bytes() == mine
    files[CONFIG] = [peft_config().replace(b"{", b'{"base_model_name_or_path": "Qwen/Qwen3-0.6B", ', 1)]
    foreign = await service.controller.add_adapter("alice", archive(), lambda path: nullcontext(files))
    with pytest.raises(SpecError, match=f"trained on Qwen/Qwen3-0.6B, this job trains {MODEL}; give that base_model"):
        await run(service, policies={"main": {"warm_start": {"upload": foreign}}})
    files[CONFIG] = [peft_config()]
    with pytest.raises(SpecError, match=r"policies\.main\.rank: given 8, the adapter to start from has 16"):
        await run(service, policies={"main": {"rank": 8, "alpha": 32, "warm_start": {"job": first}}})
    with pytest.raises(SpecError, match="no job"):
        await run(service, "bob", policies={"main": {"warm_start": {"job": first}}})
    with pytest.raises(SpecError, match="no adapter"):
        await run(service, "bob", policies={"main": {"warm_start": {"upload": upload}}})
    for some in (dict(list(lora.items())[2:]), dict(list(lora.items())[1:])):  # one module fewer; half of a pair
        files[ADAPTER] = [save(some)]
        fewer = await service.controller.add_adapter("alice", archive(), lambda path: nullcontext(files))
        with pytest.raises(SpecError, match=r"targets: given .* has \['k'|self_attn.q_proj has no lora_A"):
            await run(service, policies={"main": {"warm_start": {"upload": fewer}}})
    assert worker.operations


async def test_warm_start_reads_its_source_once(service: Service) -> None:
    _, host = await service.join()
    source = await run(service, stop__steps=1, checkpoints={"keep_last": 1})
    await service.ends(source)
    job = await run(service, policies={"main": {"warm_start": {"job": source}}}, stop__steps=3)
    await eventually(lambda: service.database.read(policies, "alice", job)[0].head_version is not None)
    await service.crash()
    policy = service.database.read(policies, "alice", source)[0]
    with service.database.writing() as connection:
        connection.execute(update(models.VersionRow).where(models.VersionRow.policy == policy.id).values(kept=False))
    await service.start()
    await service.worker().join()
    await service.reconnect(host).join()
    await service.ends(job)


async def test_warm_start_source_is_kept_until_it_is_read(service: Service) -> None:
    """Its own job may let it go while the other waits for a worker."""
    worker, _ = await service.join()
    source = await run(service, stop__steps=2, checkpoints={"keep_last": 3})
    await service.ends(source)
    policy, found = service.database.read(policies, "alice", source)[0], service.check_history(source)[1]
    content = service.artifacts.path(found.hash, ADAPTER).read_bytes()
    worker.training.clear()
    before = len(worker.operations)
    job = await run(service, policies={"main": {"warm_start": {"job": source, "version": 1}}}, stop__steps=1)
    await eventually(lambda: len(worker.operations) > before)
    world = service.controller.context
    await world.rooms.collector.delete_unnamed(version_rows.retire_version, policy.id, 1)
    assert found.hash in service.artifacts.hashes()
    worker.training.set()
    await service.ends(job)
    zero = service.check_history(job)[0]
    assert service.artifacts.path(zero.hash, ADAPTER).read_bytes() == content
    assert not world.rooms.collector.references and not world.rooms.collector.deferred


async def test_a_commit_that_fails_counts_nothing(service: Service) -> None:
    await service.join(script=lambda call: None if isinstance(call, protocol.Reset) else {"done": True, "reward": 1.0})
    failed = list[int]()

    def fail_once(real: Any, version: version_rows.NextVersion, of: version_rows.JobCommit) -> Any:
        if of.metrics and not failed:
            failed.append(version.step)
            raise Unavailable("the database is away")
        return real(version, of)

    service.database.intercept("commit_step", fail_once)
    job = await run(service)
    assert "zero_variance_groups" not in (await service.ends(job, "paused")).counters
    await service.controller.resume("alice", job)
    assert (await service.ends(job)).counters["zero_variance_groups"] == 4 and failed == [1]


@pytest.mark.parametrize("begins", [True, False])
async def test_a_waiting_job_keeps_the_weights_from_which_it_begins(service: Service, begins: bool) -> None:
    """Though its source commits, retires the version and is deleted meanwhile; until the job has begun or ended."""
    await service.join()
    source = await run(service, stop__steps=2)
    await service.ends(source)
    policy, found = service.database.read(policies, "alice", source)[0], service.check_history(source)[2]
    content = service.artifacts.path(found.hash, ADAPTER).read_bytes()
    await service.controller.limit_tenant("alice", {"jobs": 0})
    job = await run(service, policies={"main": {"warm_start": {"job": source}}}, stop__steps=1)
    with service.database.writing() as connection:  # as a later version would leave it
        connection.execute(update(models.PolicyRow).filter_by(id=policy.id).values(head_version=1))
    collector = service.controller.context.rooms.collector
    await collector.delete_unnamed(version_rows.retire_version, policy.id, 2)
    await service.controller.delete_job("alice", source)
    assert found.hash in service.artifacts.hashes()
    if begins:
        await service.controller.limit_tenant("alice", {"jobs": None})
        await service.ends(job)
        zero = service.check_history(job)[0]
        assert service.artifacts.path(zero.hash, ADAPTER).read_bytes() == content
    else:
        await service.controller.cancel("alice", job)
    assert found.hash not in {*service.artifacts.hashes()} - {one.hash for one in service.check_history(job)}


async def test_reason_of_the_host_that_the_service_starts_is_shown_until_one_connects(service: Service) -> None:
    await service.join()
    hosts, spec = service.controller.context.rooms.hosts, EnvironmentSpec(hosted="task")
    service.controller.host_failed("ray_address auto: no Ray cluster answers")
    for owner, reason in ((SERVICE, " (ray_address auto: no Ray cluster answers)"), ("bob", "")):
        with pytest.raises(Unavailable) as away:
            await hosts.host_for(EnvironmentRef("job", owner, spec, {}), 0)
        assert str(away.value) == f"no environment host offers 'task'{reason}"
    await service.host(owner=SERVICE, environments={"builtin:jsonl": True}, instance="real").join()
    with pytest.raises(Unavailable, match=r"offers 'task'$"):
        await hosts.host_for(EnvironmentRef("job", SERVICE, spec, {}), 0)


async def test_a_host_serves_its_owner_only(service: Service) -> None:
    await service.join(owner="bob", instance="bobs")
    job = await run(service, environment__return_timeout=0.05)
    view = await service.ends(job, "paused")
    assert view.reason == "no environment host offers 'task': waited 0 s for one"
    with pytest.raises(RegistrationRefused, match="names that begin with builtin: belong to the service"):
        await service.host(environments={"builtin:jsonl": True}, instance="fake").join()
    await service.host(owner=SERVICE, environments={"builtin:jsonl": True}, instance="real").join()
    hosts = service.controller.context.rooms.hosts.hosts.values()
    assert any(host.offers(SERVICE, "builtin:jsonl") for host in hosts)
    del service.peers[1:-1]


async def test_waits_for_names_the_bottleneck(service: Service) -> None:
    job = await run(service)

    async def says(text: str) -> bool:
        return (await service.controller.queries.show("alice", job)).waits_for.startswith(text)

    await eventually(lambda: says("worker: no worker serves smollm2-135m-instruct for rollout and training"))
    worker = service.worker()
    worker.generating.clear()
    await worker.join()
    host = service.host()
    host.answering.clear()
    await host.join()
    host.answering.set()
    await eventually(lambda: says("engine (4 replies)"))
    host.answering.clear()
    worker.generating.set()
    await eventually(lambda: says("environment (4 episodes)"))
    worker.training.clear()
    host.answering.set()
    await eventually(lambda: says("trainer"))
    beat = protocol.Heartbeat(
        epoch=0, progress=1, active=0, waiting=0, training=6, generated=0, decode_seconds=0, train_seconds=0,
    )  # fmt: skip
    await worker.say(beat)
    await eventually(lambda: says("trainer (6 operations take turns)"))
    worker.training.set()
    await service.ends(job)
    assert service.controller.queries.workers()[0].state == "serving"
    assert {row.name: row.state for row in await service.controller.queries.models()}[MODEL] == "loaded"


async def test_no_worker_in_time_pauses_the_job_with_its_reason(tmp_path: Path) -> None:
    service = Service(tmp_path, worker_wait_seconds=0.05, suspect_seconds=10**6, stuck_seconds=10**6)
    await service.start()
    job = await run(service)
    view = await service.ends(job, "paused")
    assert view.reason == "no worker serves smollm2-135m-instruct for train"
    await service.worker("trains", roles=["train"]).join()
    await service.host().join()
    await service.controller.resume("alice", job)
    ending = asyncio.ensure_future(service.ends(job, "paused"))
    while not ending.done():
        await service.clock.advance(3, steps=1)
    assert (await ending).reason == "no worker serves smollm2-135m-instruct for rollout (trains is serving)"
    await service.worker("rolls", roles=["rollout"]).join()
    await service.controller.resume("alice", job)
    await service.ends(job)
    service.check_history(job)
    await service.close()


async def test_old_trajectories_are_trimmed(tmp_path: Path) -> None:
    service = Service(tmp_path, trajectory_keep=8)
    await service.start()
    await service.join()
    job = await run(service, stop__steps=10)
    await service.ends(job)
    assert 8 <= len(await service.controller.queries.episodes.trajectories("alice", job, 1000)) <= 16
    await service.close()


async def test_database_grows_little_with_each_finished_job(tmp_path: Path) -> None:
    service = Service(tmp_path, finished_jobs_keep=2)
    await service.start()
    await service.worker().join()
    await service.host().join()
    jobs, sizes = [], []
    for _ in range(12):
        jobs.append(await run(service, stop__steps=3, algorithm__group_size=8))
        await service.ends(jobs[-1])
        with service.database.reading() as connection:
            pages, free, size = (
                connection.exec_driver_sql(f"PRAGMA {name}").scalar_one()
                for name in ("page_count", "freelist_count", "page_size")
            )
        sizes.append((pages - free) * size)
    assert (sizes[-1] - sizes[3]) / 8 < 12e3, "bytes per job"
    queries = service.controller.queries
    readable = [job for job in jobs if await queries.episodes.trajectories("alice", job, 100)]
    assert 2 <= len(readable) <= 3, "those of the last job's end may still be there"
    assert len(await queries.metrics("alice", jobs[0])) == 3 and len(await queries.versions("alice", jobs[0], "main"))
    await service.close()
