"""Operations of clients while the database refuses writes, or stores them without an answer.

The controller is real, its workers follow a script and time passes when a test says so. Only the refusals are made up.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.driven import ADAM, Client, forward, join, restart
from tests.support.peers import ADAPTER, ScriptedWorker, Service, eventually
from tests.support.storing import FaultyDatabase

from rookery import protocol
from rookery.controller.sessions import operations
from rookery.controller.sessions.futures import QueueStatus
from rookery.errors import DatabaseAway, NotFound, RookeryError, StorageFull, Unavailable, UserError
from rookery.storage.repositories import sessions, versions

FULL = StorageFull("the database's disk is full; free some space, nothing was half-written")
AWAY = Unavailable("the database does not answer")


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    service = Service(
        tmp_path, session_poll=0.05, session_seq_gap=50.0, suspect_seconds=1e9, stuck_seconds=1e9,
        request_timeout_seconds=1e9, session_abandon=1000.0,
    )  # fmt: skip
    await service.start()
    await join(service)
    yield service
    await service.close()


class Refusing:
    """The database refuses its ``method`` while ``trouble`` is set. ``taken``: after it has carried it out."""

    def __init__(self, service: Service, method: str, trouble: Exception, *, taken: bool = False) -> None:
        self.trouble: Exception | None = trouble
        self.refused = 0

        def call(real: Any, *arguments: Any, **named: Any) -> Any:
            if self.trouble is None:
                return real(*arguments, **named)
            if taken:
                real(*arguments, **named)
            self.refused += 1
            raise self.trouble

        service.database.intercept(method, call)


# --- outcomes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", [FULL, AWAY])
async def test_result_refused_by_the_database_is_stored_later(
    service: Service, caplog: pytest.LogCaptureFixture, trouble: RookeryError
) -> None:
    visitor = await Client(service).begin()
    database = Refusing(service, "finish_future", trouble)
    request = await visitor.send(operations.InvalidOperation(error="no such loss"))
    await service.pass_until(lambda: database.refused >= 2)
    waiting = await visitor.sessions.wait("alice", request)
    assert isinstance(waiting, QueueStatus) and str(trouble) in waiting.reason
    [said] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert request in said.getMessage() and said.__dict__["tenant"] == "alice", "said once, with the tenant"
    database.trouble = None
    await service.pass_until(lambda: service.database.read(sessions.get_future, "alice", request).outcome is not None)
    assert await visitor.outcome(request) == operations.OperationFailed(error="no such loss", category="user")
    assert isinstance(await visitor.gradient(), operations.ForwardBackwardResult)
    assert isinstance(await visitor.step(), operations.OptimStepResult)


async def test_sample_whose_result_was_refused_is_answered_later(service: Service) -> None:
    visitor = await Client(service).begin()
    sampler = await visitor.sampler(None)
    database = Refusing(service, "finish_future", FULL)
    request = await visitor.sample(sampler, 0)
    await service.pass_until(lambda: database.refused >= 2)
    database.trouble = None
    await service.pass_until(lambda: service.database.read(sessions.get_future, "alice", request).outcome is not None)
    assert isinstance(await visitor.outcome(request), operations.SampleResult)


# --- waits and lifetimes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", [FULL, AWAY, OSError(5, "Input/output error")])
async def test_failed_sweep_is_logged_and_repeated(
    service: Service, caplog: pytest.LogCaptureFixture, trouble: Exception
) -> None:
    visitor = await Client(service).begin()
    await visitor.save("short", ttl=1.0)
    database = Refusing(service, "expired_checkpoints", trouble)
    await service.pass_until(lambda: database.refused >= 1)
    first = service.clock.now
    await service.pass_until(lambda: database.refused >= 2)
    assert service.clock.now - first <= 2 * service.settings.worker.heartbeat_seconds
    said = [record for record in caplog.records if "the sweep of expired" in record.getMessage()]
    assert said and all(bool(record.exc_info) == isinstance(trouble, OSError) for record in said)
    database.trouble = None
    await service.pass_until(lambda: not service.database.read(sessions.list_checkpoints, "alice"))


async def test_operations_behind_a_missing_number_fail_when_the_database_accepts_it(service: Service) -> None:
    """Meanwhile the waits and lifetimes of others are looked after."""
    visitor, other = await Client(service).begin(), await Client(service, "bob").begin()
    await other.save("short", ttl=1.0)
    visitor._seq += 1  # a number that is never sent
    lost = [await visitor.send(forward([1, 2, 3])), await visitor.send(forward([1, 2, 3]))]
    database = Refusing(service, "finish_future", FULL)
    await service.pass_until(lambda: database.refused >= 1)
    await service.pass_until(lambda: not service.database.read(sessions.list_checkpoints, "bob"))
    database.trouble = None
    await service.pass_until(lambda: not service.database.read(sessions.open_futures))
    for request in lost:
        failed = await visitor.outcome(request)
        assert isinstance(failed, operations.OperationFailed) and failed.category == "user"
        assert f"request 1 of model {visitor.model} has not arrived for 50 s" in failed.error
    refused = await visitor.step()
    assert isinstance(refused, operations.OperationFailed) and "no step was taken" in refused.error
    await visitor.gradient()
    assert isinstance(await visitor.step(), operations.OptimStepResult)


# --- calls ------------------------------------------------------------------------------------------------------------


async def test_operation_stored_but_not_acknowledged_runs_when_sent_again(service: Service) -> None:
    """Also where somebody has asked for its outcome in between."""
    [worker] = service.peers
    same = forward([1, 2, 3])
    visitor = await Client(service).begin()
    sampler = await visitor.sampler(None)
    database = Refusing(service, "open_future", AWAY, taken=True)
    for _ in range(2):
        with pytest.raises(Unavailable):
            await visitor.sessions.submit("alice", visitor.model, 1, same)
        with pytest.raises(Unavailable):
            await visitor.sample(sampler, 0)
    assert isinstance(await visitor.sessions.wait("alice", f"{visitor.model}/1"), QueueStatus)
    database.trouble = None
    with pytest.raises(UserError, match="was sent before with another content"):
        await visitor.sessions.submit("alice", visitor.model, 1, forward([3, 2, 1]))
    for _ in range(2):
        assert isinstance(
            await visitor.outcome(await visitor.sessions.submit("alice", visitor.model, 1, same)),
            operations.ForwardBackwardResult,
        )
        assert isinstance(await visitor.outcome(await visitor.sample(sampler, 0)), operations.SampleResult)
    assert sum(isinstance(op, protocol.ForwardBackward) for op in worker.operations) == 1
    assert len(worker.generates) == 1


@pytest.mark.parametrize("optimizer", [True, False])
async def test_refused_load_loses_no_training(service: Service, optimizer: bool) -> None:
    """Neither a step that was acknowledged, nor the gradient begun since."""
    ends = []
    for refused in (False, True):
        visitor = await Client(service).begin()
        await visitor.gradient(1, 2, 3)
        await visitor.step()
        path = await visitor.save("start")
        await visitor.gradient(4, 5, 6)
        assert isinstance(await visitor.step(), operations.OptimStepResult)
        await visitor.gradient(7, 8, 9)
        if refused:
            database = Refusing(service, "commit_model", FULL)
            failed = await visitor.do(operations.LoadState(path=path, optimizer=optimizer))
            assert isinstance(failed, operations.OperationFailed) and failed.error == str(FULL)
            database.trouble = None
        assert isinstance(await visitor.step(), operations.OptimStepResult)
        ends.append(await content(visitor, "end"))
        loaded = await visitor.do(operations.LoadState(path=path, optimizer=optimizer))
        assert isinstance(loaded, operations.StateLoaded)
        await visitor.gradient(4, 5, 6)
        await visitor.step()
        ends.append(await content(visitor, "again"))
    assert ends[:2] == ends[2:]


async def content(visitor: Client, name: str) -> str:
    """The state, saved under ``name``."""
    row, _, _ = await visitor.find(await visitor.save(name))
    return visitor.service.artifacts.path(row.hash, ADAPTER).read_text()


@pytest.mark.parametrize("crash", [False, True])
async def test_failed_step_is_not_taken_later(service: Service, crash: bool) -> None:
    """Its upload found no room. It is as if neither it nor its gradient had ever been asked for."""
    [worker] = service.peers
    ends = []
    for full in (False, True):
        visitor = await Client(service).begin()
        await visitor.gradient(1, 2, 3)
        assert isinstance(await visitor.step(), operations.OptimStepResult)
        await visitor.gradient(4, 5, 6)
        assert isinstance(await visitor.step(), operations.OptimStepResult)
        if full:
            await visitor.gradient(7, 8, 9)
            worker.answer = partial(without_room, worker)
            failed = await visitor.step()
            assert isinstance(failed, operations.OperationFailed) and failed.error == str(FULL)
            worker.answer = None
            if crash:
                await restart(service)
        await visitor.gradient(10, 11, 12)
        assert isinstance(await visitor.step(), operations.OptimStepResult)
        ends.append(await content(visitor, "end"))
        row, _ = await visitor.store.read(sessions.get_model, "alice", visitor.model)
        policy = service.database.read(versions.versions, "alice", row.policy)
        assert [version.step for version in policy] == [0, 1, 2, 3]
    assert ends[0] == ends[1]


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("missing", [False, True])
async def test_step_that_is_not_executed_drops_its_gradient(service: Service, missing: bool, crash: bool) -> None:
    """It was refused as a request, or a number before it never arrived: the next step is taken on what follows it."""
    ends = []
    for fails in (False, True):
        visitor = await Client(service).begin()
        if fails:
            await visitor.gradient(7, 8, 9)
            visitor._seq += missing
            step = operations.OptimStepOperation(adam=ADAM)
            refused = operations.InvalidOperation(error="learning_rate: below 0", step=True)
            request = await visitor.send(step if missing else refused)
            began, gap = service.clock.now, service.rules.sessions.seq_gap
            await service.pass_until(lambda began=began, gap=gap: not missing or service.clock.now > began + 2 * gap)
            assert isinstance(await visitor.outcome(request), operations.OperationFailed)
            if crash:
                await restart(service)
        await visitor.gradient(10, 11, 12)
        assert isinstance(await visitor.step(), operations.OptimStepResult)
        ends.append(await content(visitor, "end"))
    assert ends[0] == ends[1]


async def test_fetched_results_that_were_not_deleted_are_deleted_later(service: Service) -> None:
    visitor = await Client(service).begin()
    fetched = await visitor.sample(await visitor.sampler(None), 0)
    await visitor.outcome(fetched)
    database, rules = Refusing(service, "drop_futures", GONE), visitor.sessions.rules
    service.clock.now += rules.fetched + 1
    with pytest.raises(type(GONE)):
        await visitor.sessions.sweep()
    database.trouble = None
    service.clock.now += rules.fetched + 1
    await visitor.sessions.sweep()
    with pytest.raises(NotFound):
        await visitor.store.read(sessions.get_future, "alice", fetched)


async def without_room(worker: ScriptedWorker, op: Any) -> protocol.OperationDone | None:
    """The disk of the service is full when a step is uploaded."""
    staging = worker.tickets.staging(op.upload) if isinstance(op, protocol.OptimStep) else None
    if staging is None:
        return None
    staging.full = FULL
    return protocol.OperationDone(epoch=0, op=op.op, error="PUT: the service's disk is full", category="lost")


# --- what is in memory ------------------------------------------------------------------------------------------------


async def test_unknown_model_leaves_nothing_in_memory(service: Service) -> None:
    visitor = await Client(service).begin()
    for number in range(3):
        with pytest.raises(NotFound):
            await visitor.sessions.submit("alice", f"{visitor.session}:train:{number + 1}", 1, forward([1, 2, 3]))
    assert not visitor.sessions.loading


async def test_a_session_whose_sign_of_life_was_not_stored_is_forgotten(service: Service) -> None:
    clients = service.controller.sessions
    row = await clients.create("alice", None, sdk_version="", name="", about={})
    database = Refusing(service, "seen_session", AWAY)
    with pytest.raises(Unavailable):
        await clients.heartbeat("alice", row.id)
    assert database.refused
    await service.pass_until(lambda: not clients.known)
    database.trouble = None
    await clients.heartbeat("alice", row.id)
    assert [*clients.known] == [row.id]


# --- an absent place --------------------------------------------------------------------------------------------------

GONE = DatabaseAway("the database does not answer", "postgresql://db.internal:5432/rookery")


@pytest.mark.parametrize(
    ("method", "taken"),
    [("commit_model", False), ("commit_model", True), ("save_checkpoint", True), ("add_sampler", False)],
)
async def test_operations_wait_for_the_database(service: Service, method: str, taken: bool) -> None:
    """Each is executed once, also where the database had stored it before it was away: the end is that of a client
    whose database was never away. A tenant reads no address."""
    ends, refused = [], 0
    for away in (False, True):
        visitor = await Client(service).begin()
        await visitor.gradient(1, 2, 3)
        await visitor.step()
        path = await visitor.save("start")
        await visitor.gradient(4, 5, 6)
        await visitor.step()
        calls: list[operations.AnyOperation] = [
            operations.SaveState(kind="weights", name="two"),
            operations.LoadState(path=path, optimizer=False),
            operations.LoadState(path=path, optimizer=True),
            forward([7, 8, 9]),
            operations.OptimStepOperation(adam=ADAM),
            operations.SaveSampler(sampler=f"{visitor.session}:sample:9"),
        ]
        for call in calls:
            database = Refusing(service, method, GONE, taken=taken) if away else None
            refused += await sent_while_away(visitor, call, database)
        two, _, policy = await visitor.find(f"tinker://{visitor.model}/weights/two")
        kept = [row.version for row in await visitor.store.read(versions.versions, "alice", policy.id)]
        ends.append((await content(visitor, "end"), two.version, kept))
    assert refused
    assert ends[0] == ends[1]


async def sent_while_away(visitor: Client, call: operations.AnyOperation, database: Refusing | None) -> int:
    """Send ``call``; the database is back when it has refused once. Returns how often it refused."""
    service = visitor.service
    request = await visitor.send(call)
    if database is not None:
        await service.pass_until(lambda: database.refused or not is_open(visitor, request))
        if is_open(visitor, request):
            paused = QueueStatus(paused=True, reason="the database does not answer")

            async def waits() -> bool:
                return await visitor.sessions.wait("alice", request) == paused

            await eventually(waits)
        database.trouble = None
    await service.pass_until(lambda: not is_open(visitor, request))
    result = await visitor.outcome(request)
    assert not isinstance(result, operations.OperationFailed), result
    return database.refused if database is not None else 0


def is_open(visitor: Client, request: str) -> bool:
    return visitor.sessions.futures.find("alice", request) is not None


class FailingOnce:
    """The next call of ``method`` after :meth:`arm` finds its place away; ``taken``: it is carried out all the same."""

    def __init__(self, place: Any, method: str, *, taken: bool = False) -> None:
        self.armed = False
        self.on_failure: Callable[[], None] = lambda: None

        def call(real: Any, *arguments: Any, **named: Any) -> Any:
            if not self.armed:
                return real(*arguments, **named)
            if taken:
                real(*arguments, **named)
            self.armed = False
            self.on_failure()
            raise GONE

        if isinstance(place, FaultyDatabase):
            place.intercept(method, call)
        else:
            setattr(place, method, partial(call, getattr(place, method)))

    def arm(self) -> None:
        self.armed = True


@pytest.mark.parametrize("read", ["verify", "futures_behind", "get_future"])
async def test_a_recovery_that_fails_once_counts_no_gradient_twice(service: Service, read: str) -> None:
    """The answer of the database to its result is lost, and the first attempt to read that fails, too."""
    ends = []
    for away in (False, True):
        visitor = await Client(service).begin()
        path = await visitor.save("start")
        calls: list[tuple[operations.AnyOperation, str]] = [
            (operations.OptimStepOperation(adam=ADAM), "commit_model"),
            (operations.LoadState(path=path, optimizer=False), "commit_model"),
        ]
        if read != "futures_behind":  # a checkpoint is no new version, behind which the log is read
            calls.append((operations.SaveState(kind="weights", name="two"), "save_checkpoint"))
        for number, (call, method) in enumerate(calls):
            for tokens in ([1, 2, 3], [4, 5, 6 + number]):
                await visitor.gradient(*tokens)
                assert isinstance(await visitor.step(), operations.OptimStepResult)
            await visitor.gradient(7, 8, 9)
            commit = FailingOnce(service.database, method, taken=True)
            reading = FailingOnce(service.artifacts if read == "verify" else service.database, read)
            commit.armed, commit.on_failure = away, reading.arm
            request = await visitor.send(call)
            await service.pass_until(lambda of=visitor, request=request: not is_open(of, request))
            assert not commit.armed and not reading.armed
            assert not isinstance(await visitor.outcome(request), operations.OperationFailed)
            await visitor.gradient(10, 11, 12)
            assert isinstance(await visitor.step(), operations.OptimStepResult)
            ends.append(await content(visitor, f"end-{number}"))
    assert ends[: len(calls)] == ends[len(calls) :]


async def load_without_an_answer(service: Service, visitor: Client, path: str) -> None:
    """The database stores the load of a checkpoint and fails to answer."""
    commit = FailingOnce(service.database, "commit_model", taken=True)
    commit.arm()
    request = await visitor.send(operations.LoadState(path=path, optimizer=False))
    await service.pass_until(lambda: not is_open(visitor, request))
    assert isinstance(await visitor.outcome(request), operations.StateLoaded) and not commit.armed


async def test_a_load_whose_answer_was_lost_ends_a_rejected_gradient(service: Service) -> None:
    visitor = await Client(service).begin()
    await visitor.gradient()
    await visitor.step()
    path = await visitor.save("start")
    await visitor.do(operations.InvalidOperation(error="no such loss", gradient=True))
    await load_without_an_answer(service, visitor, path)
    await visitor.gradient()
    assert isinstance(await visitor.step(), operations.OptimStepResult)


async def test_a_load_whose_answer_was_lost_replaces_a_corrupt_head(service: Service) -> None:
    visitor = await Client(service).begin()
    path = await visitor.save("start")
    await visitor.gradient()
    await visitor.step()
    await visitor.save("bad")
    head = max(await visitor.store.read(sessions.list_checkpoints, "alice"), key=lambda row: row.version)
    await service.crash()
    file = service.artifacts.path(head.hash, "adapter_model.safetensors")
    file.write_text("x" * file.stat().st_size)
    await service.start()
    await join(service)
    refused = await visitor.do(forward([1, 2, 3]))
    assert isinstance(refused, operations.OperationFailed) and "is corrupt" in refused.error
    await load_without_an_answer(service, visitor, path)
    await visitor.gradient()
    assert isinstance(await visitor.step(), operations.OptimStepResult)


async def test_operations_given_up_during_an_unanswered_commit_reject_their_gradient(service: Service) -> None:
    visitor = await Client(service).begin()
    path = await visitor.save("start")
    database = Refusing(service, "commit_model", GONE, taken=True)
    request = await visitor.send(operations.LoadState(path=path, optimizer=False))
    await service.pass_until(lambda: database.refused)
    visitor._seq += 1  # a number that is never sent
    lost = await visitor.send(forward([1, 2, 3]))
    ping = Refusing(service, "ping", GONE)
    began, gap = service.clock.now, service.rules.sessions.seq_gap
    await service.pass_until(lambda: service.clock.now > began + 2 * gap)
    ping.trouble = None
    database.trouble = None
    await service.pass_until(lambda: not is_open(visitor, lost))
    assert isinstance(await visitor.outcome(request), operations.StateLoaded)
    refused = await visitor.step()
    assert isinstance(refused, operations.OperationFailed) and "no step was taken" in refused.error


async def test_an_operation_of_a_lost_client_waits_for_no_place(service: Service) -> None:
    visitor = await Client(service).begin()
    database = Refusing(service, "save_checkpoint", GONE)
    request = await visitor.send(operations.SaveState(kind="weights", name="one"))
    await service.pass_until(lambda: database.refused)
    await service.pass_until(lambda: not is_open(visitor, request))
    failed = await visitor.outcome(request)
    assert isinstance(failed, operations.OperationFailed) and "had no heartbeat" in failed.error
