"""Lifetimes in sessions: trainer slots, checkpoints, results, samplers; and their state after a crash.

The controller is real, its workers follow a script and time passes when a test says so.
"""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.support.driven import ADAM, Client, forward, join, restart
from tests.support.peers import PATIENCE, ScriptedWorker, Service, eventually
from tests.support.work import work_of

from rookery import protocol
from rookery.controller.prompts import CallOptions
from rookery.controller.sessions import operations
from rookery.controller.sessions.futures import FutureExpired, QueueStatus
from rookery.controller.training.policy_run import PolicyRun
from rookery.errors import NotFound, Unavailable, UserError
from rookery.storage.repositories import sessions
from rookery.storage.repositories import versions as version_rows

HOUR = 3600.0


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    service = Service(
        tmp_path, session_poll=0.05, session_idle=100.0, trainer_slots=1, session_result=HOUR,
        session_sampler_idle=10 * HOUR, session_slot_wait=1e6, suspect_seconds=1e9, stuck_seconds=1e9,
    )  # fmt: skip
    await service.start()
    await join(service)
    yield service
    await service.close()


async def wait(service: Service, seconds: float) -> None:
    """Time passes, beat by beat; what is due is done in each."""
    for _ in range(int(seconds / service.settings.worker.heartbeat_seconds) + 1):
        await service.clock.advance(service.settings.worker.heartbeat_seconds, steps=1)


async def heads(client: Client) -> set[str]:
    """Hashes of what is kept of the client's model."""
    _, policy = await client.store.read(sessions.get_model, client.tenant, client.model)
    return {
        row.hash for row in client.service.database.read(version_rows.versions, client.tenant, policy.id) if row.kept
    }


def evicted_policies(worker: ScriptedWorker) -> list[str]:
    return [
        message.policy for message in worker.other if isinstance(message, protocol.EvictArtifacts) and message.policy
    ]


# --- places -----------------------------------------------------------------------------------------------------------


async def test_silent_client_releases_its_slot_and_may_return(service: Service) -> None:
    [worker] = service.peers
    silent, eager = await Client(service).begin(), await Client(service, "bob").begin()
    await silent.gradient(1, 2, 3)  # begun: it would keep its place
    request = await eager.send(forward([1, 2, 3]))
    waiting = await service.controller.sessions.wait("bob", request)
    assert isinstance(waiting, QueueStatus) and waiting.paused and "all training slots" in waiting.reason
    for _ in range(4):  # the eager one beats, the silent one does not
        await wait(service, 30.0)
        await eager.sessions.heartbeat("bob", eager.session)
    assert isinstance(await eager.outcome(request), operations.ForwardBackwardResult)
    assert len(evicted_policies(worker)) == 1
    await eager.sessions.finish("bob", eager.session, "success")  # gives its place back at once
    await silent.sessions.heartbeat("alice", silent.session)
    before = len(worker.operations)
    assert isinstance(await silent.step(), operations.OptimStepResult)
    replayed = worker.operations[before:]
    assert [type(op).__name__ for op in replayed] == ["ForwardBackward", "OptimStep"], "its gradient is computed again"
    with pytest.raises(UserError, match="is finished"):
        await eager.send(forward([1, 2, 3]))
    with pytest.raises(FutureExpired, match="is finished"):
        await eager.sessions.heartbeat("bob", eager.session)


async def test_a_client_with_heartbeats_keeps_its_slot_without_waiting_clients(service: Service) -> None:
    [worker] = service.peers
    visitor = await Client(service).begin()
    await visitor.gradient()
    for _ in range(10):
        await wait(service, 50.0)
        await visitor.sessions.heartbeat("alice", visitor.session)
    assert evicted_policies(worker) == []
    await wait(service, 151.0)
    assert len(evicted_policies(worker)) == 1


# --- checkpoints and results ------------------------------------------------------------------------------------------


async def test_expired_checkpoints_are_deleted_and_those_in_use_stay(service: Service) -> None:
    visitor = await Client(service).begin()
    await visitor.gradient()
    await visitor.step()
    paths = {
        name: await visitor.save(name, ttl) for name, ttl in [("kept", None), ("short", HOUR), ("longer", 3 * HOUR)]
    }
    sampled = await visitor.save("sampled", HOUR, kind="sampler_weights")
    sampler = await visitor.sampler(sampled)
    [shared] = {row.hash for row in await visitor.store.read(sessions.list_checkpoints, "alice")}
    await visitor.gradient()
    await visitor.step()
    other = await visitor.save("other", HOUR)
    digest = next(row.hash for row in await visitor.store.read(sessions.list_checkpoints, "alice") if row.path == other)

    service.clock.now += HOUR + 1
    for path in (paths["short"], other):
        with pytest.raises(NotFound, match="has expired"):
            await visitor.find(path)
    await visitor.sessions.sweep()
    left = {row.path for row in await visitor.store.read(sessions.list_checkpoints, "alice")}
    assert left == {paths["kept"], paths["longer"]}
    assert {shared, digest} <= service.artifacts.hashes(), "one is named by others, the other is the model's head"
    await visitor.sessions.delete_checkpoint("alice", visitor.model, "weights", "kept")
    service.clock.now += 3 * HOUR
    await visitor.sample(sampler, 0)  # the sampler was used: it holds its weights, though its checkpoint is gone
    await visitor.outcome(f"{sampler}/0")
    await visitor.sessions.sweep()
    assert {shared, digest} <= service.artifacts.hashes()
    assert await visitor.store.read(sessions.list_checkpoints, "alice") == []
    service.clock.now += 10 * HOUR + 1
    await visitor.sessions.sweep()
    assert shared not in service.artifacts.hashes() and digest in service.artifacts.hashes()
    late = await visitor.sample(sampler, 1)
    failed = await visitor.outcome(late)
    assert isinstance(failed, operations.OperationFailed) and failed.category == "user"
    await visitor.gradient()
    assert isinstance(await visitor.step(), operations.OptimStepResult), "the model itself goes on"


async def test_idle_time_of_samplers_is_that_in_which_their_clients_could_use_them(service: Service) -> None:
    visitor = await Client(service).begin()
    path = await visitor.save("named", kind="sampler_weights")
    await visitor.sampler(path)
    [digest] = service.artifacts.hashes()
    await visitor.sessions.delete_checkpoint("alice", visitor.model, "sampler_weights", "named")
    await visitor.gradient()
    await visitor.step()
    service.clock.now += 9 * HOUR
    await visitor.sessions.sweep()
    service.clock.ahead = 11 * HOUR  # the machine slept, or its clock was set
    await visitor.sessions.sweep()
    assert digest in service.artifacts.hashes()
    await service.crash()
    service.clock.now += 20 * HOUR
    await service.start()
    await join(service)
    await visitor.sessions.sweep()
    assert digest in service.artifacts.hashes()
    service.clock.now += 10 * HOUR + 1
    await visitor.sessions.sweep()
    assert digest not in service.artifacts.hashes()


@pytest.mark.parametrize("jump", [1.5 * HOUR, 400 * 24 * HOUR])
async def test_a_wall_clock_that_is_set_ahead_deletes_nothing_that_is_new(service: Service, jump: float) -> None:
    """A checkpoint with a lifetime, results, a session whose client has not called since a restart, and the state of a
    finished one; later they are deleted."""
    silent = await Client(service).begin()
    await restart(service)
    service.clock.now += 11 * HOUR
    await silent.sessions.sweep()
    visitor, over = await Client(service).begin(), await Client(service, "bob").begin()
    await over.gradient()
    await over.step()
    await over.sessions.finish("bob", over.session, "success")
    saved = await visitor.save("brief", 1.2 * HOUR)
    sampled = await visitor.sample(await visitor.sampler(None), 0)
    await eventually(lambda: len(visitor.sessions.futures) == 0)

    async def found() -> tuple[int, int, bool, int]:
        await visitor.sessions.sweep()
        results = await visitor.store.read(sessions.stored_futures, [sampled])
        kept = await visitor.store.read(sessions.list_checkpoints, "alice")
        ended = (await visitor.store.read(sessions.get_session, "alice", silent.session)).finished is not None
        return len(results), len([row for row in kept if row.path == saved]), ended, len(service.artifacts.hashes())

    before = await found()
    assert before == (1, 1, False, before[3])
    service.clock.ahead += jump
    assert await found() == before
    service.clock.now += 0.5 * HOUR
    assert await found() == before
    service.clock.now += 1.5 * HOUR
    assert (await found())[:2] == (0, 0)
    assert (await found())[3] < before[3]


@pytest.mark.parametrize("optimizer", [False, True])
async def test_checkpoint_stays_while_it_is_loaded(
    service: Service, optimizer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner deletes it meanwhile."""
    visitor = await Client(service).begin()
    await visitor.gradient()
    await visitor.step()
    path = await visitor.save("kept")
    digest = next(row.hash for row in await visitor.store.read(sessions.list_checkpoints, "alice"))
    await visitor.gradient()
    await visitor.step()
    await visitor.save("other")  # the model's head is another

    load = PolicyRun.load

    async def deleted_first(self: PolicyRun, *given: Any) -> Any:
        """Between looking it up and committing it."""
        if any(row.path == path for row in await visitor.store.read(sessions.list_checkpoints, "alice")):
            await visitor.sessions.delete_checkpoint("alice", visitor.model, "weights", "kept")
        assert digest in service.artifacts.hashes()
        return await load(self, *given)

    monkeypatch.setattr(PolicyRun, "load", deleted_first)
    loaded = await visitor.do(operations.LoadState(path=path, optimizer=optimizer))
    assert isinstance(loaded, operations.StateLoaded), loaded
    await eventually(lambda: not service.controller.context.rooms.collector.references)
    await wait(service, 1)  # what nothing names is removed in the writer thread
    checkpoints = {row.hash for row in await visitor.store.read(sessions.list_checkpoints, "alice")}
    assert service.artifacts.hashes() == await heads(visitor) | checkpoints
    assert not service.controller.context.rooms.collector.deferred
    await visitor.gradient()
    assert isinstance(await visitor.step(), operations.OptimStepResult)


async def test_results_are_deleted_some_time_after_they_were_fetched(service: Service) -> None:
    visitor = await Client(service).begin()
    sampler = await visitor.sampler(None)
    fetched, other = await visitor.sample(sampler, 0), await visitor.sample(sampler, 1)
    gradient = await visitor.send(forward([1, 2, 3]))
    for request in (fetched, gradient):
        await visitor.outcome(request)
    await eventually(lambda: len(visitor.sessions.futures) == 0)
    rules = visitor.sessions.rules
    assert rules.fetched < rules.result

    async def stored() -> list[bool]:
        await visitor.sessions.sweep()
        found = []
        for id in (fetched, other, gradient):
            try:
                found.append(bool((await visitor.store.read(sessions.get_future, "alice", id)).outcome))
            except NotFound:
                found.append(False)
        return found

    service.clock.now += rules.fetched - 1
    assert await stored() == [True, True, True]
    service.clock.now += 2
    assert await stored() == [False, True, True], "a step may be computed from the gradient again"
    assert isinstance(await visitor.step(), operations.OptimStepResult)
    service.clock.now += rules.fetched + 1
    assert await stored() == [False, True, False]


async def test_results_expire_unless_their_model_may_have_to_replay_them(service: Service) -> None:
    visitor = await Client(service).begin()
    sampler = await visitor.sampler(None)
    sampled = await visitor.sample(sampler, 0)
    await visitor.outcome(sampled)
    begun = await visitor.send(forward([1, 2, 3]))
    await visitor.outcome(begun)
    service.clock.now += HOUR + 1
    await visitor.sessions.sweep()
    await restart(service)
    with pytest.raises(FutureExpired, match="has expired"):
        await visitor.sessions.wait("alice", sampled)
    assert isinstance(await visitor.outcome(begun), operations.ForwardBackwardResult)
    assert isinstance(await visitor.step(), operations.OptimStepResult)


async def test_of_a_finished_session_only_names_stay(service: Service) -> None:
    [worker] = service.peers
    visitor, other = await Client(service).begin(), await Client(service, "bob").begin()
    await visitor.gradient()
    await visitor.step()
    path = await visitor.save("kept")
    kept, _, policy = await visitor.find(path)
    await visitor.gradient()
    last = await visitor.send(operations.OptimStepOperation(adam=ADAM))
    await visitor.outcome(last)
    await visitor.sessions.finish("alice", visitor.session, "success")
    await visitor.sessions.sweep()
    assert evicted_policies(worker)[-1] == policy.id and not visitor.sessions.runs.keys() - {other.model}
    assert isinstance(await visitor.outcome(last), operations.OptimStepResult), "results can still be fetched"
    assert len(service.artifacts.hashes()) == 3, "the checkpoint, the last state, bob's"

    service.clock.now += HOUR + 1
    for _ in range(2):  # a second sweep finds nothing
        await visitor.sessions.sweep()
        assert service.artifacts.hashes() == {kept.hash} | await heads(other)
    assert service.database.read(sessions.futures_behind, visitor.model, -1) == [], "nor are its calls kept"
    with pytest.raises(UserError, match="is finished"):
        await visitor.gradient()
    assert [row.path for row in await visitor.store.read(sessions.list_checkpoints, "alice", visitor.model)] == [path]
    another = await Client(service).begin()
    loaded = await another.do(operations.LoadState(path=path, optimizer=True))
    assert isinstance(loaded, operations.StateLoaded), "and can be gone on from"
    assert isinstance(await other.gradient(), operations.ForwardBackwardResult) and isinstance(
        await other.step(), operations.OptimStepResult
    )


async def test_acknowledged_operations_run_after_the_session_is_finished(service: Service) -> None:
    [worker] = service.peers
    visitor = await Client(service).begin()
    await worker.die()
    request = await visitor.send(forward([1, 2, 3]))
    await visitor.sessions.finish("alice", visitor.session, "success")
    service.clock.now += HOUR + 1
    await visitor.sessions.sweep()
    await service.crash()
    await service.start()
    await visitor.sessions.sweep()
    await join(service)
    assert isinstance(await visitor.outcome(request), operations.ForwardBackwardResult)
    service.clock.now += HOUR + 1
    await eventually(lambda: visitor.sessions.runs[visitor.model].resting)
    await visitor.sessions.sweep()
    assert not service.artifacts.hashes() and not visitor.sessions.runs


async def test_a_client_that_stays_away_for_long_has_finished(tmp_path: Path) -> None:
    service = Service(tmp_path, session_poll=0.05, session_expire=10 * HOUR, session_result=HOUR)
    await service.start()
    await join(service)
    silent, beats = await Client(service).begin(), await Client(service, "bob").begin()
    for _ in range(2):
        service.clock.now += 6 * HOUR
        await beats.sessions.heartbeat("bob", beats.session)
        await beats.sessions.sweep()
    row = await silent.sessions.get("alice", silent.session)
    assert (row.status, row.finished) == ("lost", service.clock.time())
    with pytest.raises(FutureExpired, match="is finished"):
        await silent.sessions.heartbeat("alice", silent.session)
    service.clock.now += HOUR + 1
    await silent.sessions.sweep()
    assert service.artifacts.hashes() == await heads(beats)
    assert isinstance(await beats.gradient(), operations.ForwardBackwardResult)
    await service.close()


@pytest.mark.parametrize("restarts", [False, True])
async def test_client_with_heartbeats_is_never_finished(tmp_path: Path, restarts: bool) -> None:
    """However seldom what it does is stored: one beats as the SDK does, one only calls."""
    service = Service(tmp_path, session_poll=0.05, session_expire=600.0, suspect_seconds=1e9, stuck_seconds=1e9)
    await service.start()
    await join(service)
    beats, computes = await Client(service).begin(), await Client(service, "bob").begin()
    for _ in range(100):
        service.clock.now += 10.0
        await beats.sessions.heartbeat("alice", beats.session)
        await computes.do(forward([1, 2, 3], only=True))
    if restarts:
        await service.crash()
        await service.start()
    await beats.sessions.sweep()
    for client in (beats, computes):
        [row] = await client.store.read(sessions.list_sessions, client.tenant)
        assert row.finished is None and service.clock.time() - row.seen <= 70.0
    await service.close()


async def test_a_session_whose_stored_end_was_not_acknowledged_is_finished(service: Service) -> None:
    visitor = await Client(service).begin()

    def unheard(real: Any, *arguments: Any) -> None:
        real(*arguments)
        raise Unavailable("the server went away")

    service.database.intercept("finish_session", unheard)
    with pytest.raises(Unavailable):
        await visitor.sessions.finish("alice", visitor.session, "success")
    with pytest.raises(UserError, match="is finished"):
        await visitor.gradient()
    await visitor.sessions.sweep()
    assert not visitor.sessions.runs


async def test_calls_without_changes_expire_while_their_model_is_used(service: Service) -> None:
    visitor = await Client(service).begin()
    looked = [await visitor.send(forward([1, 2, 3], only=True)) for _ in range(3)]
    for request in looked:
        await visitor.outcome(request)
    service.clock.now += HOUR + 1
    await visitor.sessions.sweep()
    assert service.database.read(sessions.futures_behind, visitor.model, -1) == []
    await restart(service)
    assert isinstance(await visitor.gradient(), operations.ForwardBackwardResult), "the next number is known"
    behind = await visitor.send(forward([1, 2, 3], only=True))
    await visitor.outcome(behind)
    service.clock.now += HOUR + 1
    await visitor.sessions.sweep()
    assert len(service.database.read(sessions.futures_behind, visitor.model, -1)) == 2, (
        "a gradient that has to be kept is before it"
    )
    assert isinstance(await visitor.step(), operations.OptimStepResult)
    await visitor.save("kept")
    await visitor.outcome(await visitor.send(forward([1, 2, 3], only=True)))
    service.clock.now += HOUR + 1
    await visitor.sessions.sweep()
    assert service.database.read(sessions.futures_behind, visitor.model, -1) == [], "saving changed nothing either"


async def test_weights_stay_while_requests_sample_from_them(service: Service) -> None:
    """An in-flight sampler moves on, a checkpoint is deleted: texts that began before may still move to a worker that
    has to pull their weights."""
    [worker] = service.peers
    visitor = await Client(service).begin()
    flying = f"{visitor.session}:sample:7"
    assert isinstance(await visitor.do(operations.SaveSampler(sampler=flying, inflight=True)), operations.SamplerSaved)
    zero = set(service.artifacts.hashes())
    worker.generating.clear()
    sampled = await visitor.sample(flying, 0)
    await eventually(lambda: bool(worker.generates))
    await visitor.gradient()
    await visitor.step()
    path = await visitor.save("named", kind="sampler_weights")
    answers = service.controller.completions
    target, chat = await answers.open("alice", path)
    assert target.adapter is not None
    named = target.adapter.hash
    asked = asyncio.ensure_future(
        answers.generate("alice", answers.prepare(target, chat, "Hello"), CallOptions(8, temperature=1.0, seed=1))
    )
    await eventually(lambda: len(worker.generates) == 2)
    await visitor.gradient()
    await visitor.step()
    assert isinstance(
        await visitor.do(operations.SaveSampler(sampler=f"{flying}1", inflight=True)), operations.SamplerSaved
    )
    await visitor.sessions.delete_checkpoint("alice", visitor.model, "sampler_weights", "named")
    assert {*zero, named} <= service.artifacts.hashes(), "nothing names them, but they are read"
    worker.generating.set()
    assert isinstance(await visitor.outcome(sampled), operations.SampleResult)
    assert (await asked).tokens
    await eventually(lambda: len(service.artifacts.hashes()) == 1)


# --- crashes ----------------------------------------------------------------------------------------------------------


async def away(service: Service) -> None:
    """The client is silent until nothing of it is in memory."""
    await wait(service, 200.0)
    assert not service.controller.sessions.runs


async def trained(service: Service, interrupt: Callable[[Service], Awaitable[None]], after: int | None) -> str:
    """The state's content after four steps and a gradient, with an interruption within one of the gradients."""
    visitor = await Client(service).begin()
    for number in range(4):
        await visitor.gradient(number, 2, 3)
        if number == after:
            await interrupt(service)
        stepped = await visitor.step()
        assert isinstance(stepped, operations.OptimStepResult), stepped
        await visitor.gradient(number, 5)  # two batches in each gradient but the first
    path = await visitor.save("end")
    row, _, _ = await visitor.find(path)
    versions = service.database.read(version_rows.versions, "alice", row.policy)
    assert [version.step for version in versions] == [0, 1, 2, 3, 4], "each answered step is a durable version"
    return service.artifacts.path(row.hash, "adapter_model.safetensors").read_text()


@pytest.mark.parametrize("interrupt", [restart, away])
async def test_a_crash_between_two_versions_costs_no_gradient(
    tmp_path: Path, interrupt: Callable[[Service], Awaitable[None]]
) -> None:
    """It costs computation, and so does a client that was away: the state is the same in the end."""
    ends = []
    for after in (None, 0, 2):
        service = Service(tmp_path / str(after), session_poll=0.05, suspect_seconds=1e9, stuck_seconds=1e9)
        await service.start()
        await join(service)
        ends.append(await trained(service, interrupt, after))
        await service.close()
    assert len(set(ends)) == 1


async def test_a_sample_waits_for_the_worker_that_has_it(tmp_path: Path) -> None:
    """After a crash another worker may dial in first; what the one that comes later has sampled is not sampled anew."""
    service = Service(tmp_path, session_poll=0.05, reconnect_seconds=6.0)
    await service.start()
    holder = await join(service)
    visitor = await Client(service).begin()
    holder.generating.clear()
    request = await visitor.sample(await visitor.sampler(None), 0)
    await eventually(lambda: bool(holder.generates))
    await service.crash()
    await service.start()
    empty = await join(service, "empty")
    await eventually(lambda: service.controller.context.rooms.rollouts.waiting() == 1)
    again = await join(service, running=[generate.request for generate in holder.generates])
    assert isinstance(await visitor.outcome(request), operations.SampleResult)
    assert not empty.generates and len(again.generates) == 1
    await service.close()


async def test_corrupt_head_is_reported_and_another_state_can_be_loaded(service: Service) -> None:
    visitor = await Client(service).begin()
    await visitor.gradient()
    await visitor.step()
    path = await visitor.save("good")
    await visitor.gradient()
    await visitor.step()
    await visitor.save("bad")
    head = max(row.version for row in await visitor.store.read(sessions.list_checkpoints, "alice"))
    digest = next(
        row.hash for row in await visitor.store.read(sessions.list_checkpoints, "alice") if row.version == head
    )
    await service.crash()
    file = service.artifacts.path(digest, "adapter_model.safetensors")
    file.write_text("x" * file.stat().st_size)
    await service.start()
    worker = await join(service)
    for call in (
        forward([1, 2]),
        operations.SaveState(kind="weights", name="more"),
        operations.SaveSampler(sampler="s"),
    ):
        failed = await visitor.do(call)
        assert isinstance(failed, operations.OperationFailed) and failed.category == "server"
        assert f"version {head} of model {visitor.model} is corrupt" in failed.error and path in failed.error
    step = await visitor.step()
    assert isinstance(step, operations.OperationFailed) and "is corrupt" in step.error
    assert worker.operations == [], "no worker is told of it"
    loaded = await visitor.do(operations.LoadState(path=path, optimizer=True))
    assert isinstance(loaded, operations.StateLoaded)
    await visitor.gradient()
    assert isinstance(await visitor.step(), operations.OptimStepResult)


# --- clients that are away --------------------------------------------------------------------------------------------


async def test_queued_operations_of_a_killed_client_wait_and_are_dropped(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """Its operations wait once its heartbeats stop, run on its return, and are dropped with an error after an hour."""
    [worker] = service.peers
    killed, other = await Client(service).begin(), await Client(service, "bob").begin()
    sampler, free = await killed.sampler(None), asyncio.Event()

    async def hold(op: Any) -> None:
        if isinstance(op, protocol.ForwardBackward) and op.policy == policy.id:
            await free.wait()

    _, policy = await killed.store.read(sessions.get_model, "alice", killed.model)
    worker.answer = hold
    trained = [await killed.send(forward([1, 2, number])) for number in range(3)]
    worker.generating.clear()
    sampled = [await killed.sample(sampler, number) for number in range(120)]
    await eventually(lambda: service.controller.context.rooms.rollouts.waiting() > 0)
    running = len(worker.generates)
    await wait(service, 110.0)
    free.set()
    worker.generating.set()
    await wait(service, 30.0)
    assert service.controller.context.rooms.rollouts.waiting() == 0
    assert len(worker.generates) == running, "no further request starts"
    computed = sum(isinstance(op, protocol.ForwardBackward) for op in worker.operations)
    assert computed == 1, "the operation that ran ends, and none starts"
    for request in (trained[-1], sampled[-1]):
        status = await killed.sessions.wait("alice", request)
        assert isinstance(status, QueueStatus) and status.paused and "heartbeat" in status.reason
    assert isinstance(await other.gradient(), operations.ForwardBackwardResult)
    assert isinstance(await other.step(), operations.OptimStepResult)

    await killed.sessions.heartbeat("alice", killed.session)
    assert isinstance(await killed.outcome(sampled[-1]), operations.SampleResult)
    assert isinstance(await killed.outcome(trained[-1]), operations.ForwardBackwardResult)

    await killed.sessions.heartbeat("alice", killed.session)
    free.clear()
    late = [await killed.send(forward([1, 2, 3])) for _ in range(3)]
    await wait(service, 110.0)
    free.set()
    await wait(service, HOUR)
    for request in late[1:]:
        dropped = await killed.outcome(request)
        assert isinstance(dropped, operations.OperationFailed) and "no heartbeat for 3600 s" in dropped.error
    [record] = [record for record in caplog.records if "operations dropped" in record.getMessage()]
    assert record.__dict__["tenant"] == "alice" and record.getMessage().startswith("2 operations")
    refused = await killed.step()
    assert isinstance(refused, operations.OperationFailed) and "no step was taken" in refused.error


async def test_work_for_a_session_does_not_grow_with_the_runs_of_others(service: Service) -> None:
    """Each heartbeat compared every session with all runs of all tenants."""
    [worker] = service.peers
    silent, free, works = await Client(service).begin(), asyncio.Event(), await Client(service).begin()
    _, policy = await silent.store.read(sessions.get_model, "alice", silent.model)

    async def hold(op: Any) -> None:
        if isinstance(op, protocol.ForwardBackward) and op.policy == policy.id:
            await free.wait()

    async def one_beat() -> None:
        await service.clock.advance(service.settings.worker.heartbeat_seconds, steps=1)
        await works.sessions.heartbeat("alice", works.session)
        service.controller.context.rooms.quotas.models("alice")

    worker.answer = hold
    for number in range(2):
        await silent.send(forward([1, 2, number]))
    alive, counts, parts = [works], list[int](), ("controller/sessions", "controller/quotas")
    for _ in range(2):
        alive += [await Client(service, "bob").begin() for _ in range(5)]
        for _ in range(3):
            await wait(service, 40.0)
            for client in alive:
                await client.sessions.heartbeat(client.tenant, client.session)
        assert len(works.sessions.runs) == 1 + len(alive)
        counts.append(
            min([await work_of(one_beat, *parts) for _ in range(3)])
        )  # in another one expired rows are deleted
    free.set()
    assert counts[0] == counts[1] > 0


async def test_runs_of_a_suspended_session_leave_memory_and_return(service: Service) -> None:
    visitor, other = await Client(service).begin(), await Client(service, "bob").begin()
    await visitor.gradient()
    await visitor.step()
    for _ in range(4):
        await wait(service, 50.0)
        await other.sessions.heartbeat("bob", other.session)
    assert set(visitor.sessions.runs) == {other.model}
    assert service.controller.context.rooms.quotas.queued["alice"] == 0
    await visitor.sessions.heartbeat("alice", visitor.session)
    assert isinstance(await visitor.gradient(), operations.ForwardBackwardResult)
    assert isinstance(await visitor.step(), operations.OptimStepResult)


async def test_idle_runs_of_a_tenant_in_memory_are_bounded(tmp_path: Path) -> None:
    """However many a client makes, and keeps alive by its heartbeats."""
    rules: dict[str, Any] = {"session_poll": 0.05, "session_runs_loaded": 3}
    service = Service(tmp_path, trainer_slots=16, suspect_seconds=1e9, stuck_seconds=1e9, **rules)
    await service.start()
    worker = await join(service)
    other, busy, free = await Client(service, "bob").begin(), await Client(service).begin(), asyncio.Event()
    runs, (_, policy) = busy.sessions.runs, await busy.store.read(sessions.get_model, "alice", busy.model)

    async def hold(op: Any) -> None:
        if isinstance(op, protocol.ForwardBackward) and op.policy == policy.id:
            await free.wait()

    worker.answer = hold
    held = await busy.send(forward([1, 2, 3]))
    clients = [await Client(service).begin() for _ in range(5)]
    assert [run.row.id for run in runs.of(tenant="alice")] == [busy.model, *(one.model for one in clients[-2:])]
    free.set()
    assert isinstance(await busy.outcome(held), operations.ForwardBackwardResult)
    for client in clients:  # each is loaded again
        assert isinstance(await client.gradient(), operations.ForwardBackwardResult)
        assert isinstance(await client.step(), operations.OptimStepResult)
        assert runs.count(tenant="alice") == 3 and other.model in runs
    await service.close()


async def test_live_sessions_take_little_memory(service: Service) -> None:
    known = service.controller.sessions
    about = {"note": [[] for _ in range(5000)]}
    made = [await known.create("alice", None, sdk_version="1", name="", about=about) for _ in range(30)]
    ids = [row.id for row in made]
    del made
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for id in ids:
            await known.heartbeat("alice", id)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 30 * 10_000


async def test_the_end_of_waits_does_not_wait_for_deletions(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenant may have a hundred thousand expired checkpoints."""
    visitor, free = await Client(service).begin(), asyncio.Event()
    monkeypatch.setattr(visitor.sessions, "sweep", free.wait)
    for _ in range(4):
        await wait(service, 50.0)
    assert not visitor.sessions.models_in_use("alice"), "it is suspended"
    free.set()


async def test_client_samples_again_after_its_samples_were_dropped(tmp_path: Path) -> None:
    service = Service(
        tmp_path, session_poll=0.05, session_idle=20.0, session_abandon=40.0, suspect_seconds=1e9, stuck_seconds=1e9,
    )  # fmt: skip
    await service.start()
    worker, visitor = await join(service), Client(service)
    visitor.session = (await visitor.sessions.create("alice", None, sdk_version="0.38.0", name="", about={})).id
    sampler = await visitor.sampler(None)
    worker.generating.clear()
    dropped = await visitor.sample(sampler, 0)
    await wait(service, 120.0)  # then nothing of the session is in memory
    assert isinstance(await visitor.outcome(dropped), operations.OperationFailed)
    worker.generating.set()
    await visitor.sessions.heartbeat("alice", visitor.session)
    async with asyncio.timeout(PATIENCE):
        assert isinstance(await visitor.outcome(await visitor.sample(sampler, 1)), operations.SampleResult)
    await service.close()
