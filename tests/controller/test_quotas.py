"""Quotas of a tenant: beyond them jobs wait with the reason, requests are refused with the numbers and the time to
wait, and another tenant notices nothing."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.driven import ADAM, Client, forward, join
from tests.support.peers import HANG, MODEL, Service, eventually, job_of, settle

from rookery.controller.jobs.registry import WaitingJob
from rookery.controller.quotas import METADATA_SECONDS
from rookery.controller.sessions import operations
from rookery.controller.usage import FLUSH_SECONDS
from rookery.errors import Conflict, DatabaseAway, NotFound, RookeryError, TooManyRequests, Unavailable, UserError
from rookery.storage.columns import columns
from rookery.storage.repositories import jobs, tenants

DAY = 86400.0
SIZE = forward([5, 6, 7]).size


@pytest.fixture
def settings() -> dict[str, Any]:
    """Settings of the service; a test gives its own."""
    return {}


@pytest.fixture
async def service(tmp_path: Path, settings: dict[str, Any]) -> AsyncIterator[Service]:
    service = Service(tmp_path, **settings)
    await service.start()
    yield service
    await service.close()
    service.database.close()


def refused(service: Service) -> dict[str, int]:
    totals = service.controller.queries.health().totals
    return {name.removeprefix("refused_tenant_"): n for name, n in totals.items() if n and "refused_tenant_" in name}


async def content() -> AsyncIterator[bytes]:
    yield b"an archive"


@pytest.mark.parametrize("settings", [{"tenant_requests": 3}])
async def test_generations_beyond_the_limit_are_refused_until_others_end(service: Service) -> None:
    worker = await join(service)
    worker.generating.clear()
    alice, bob = await Client(service).begin(), await Client(service, "bob").begin()
    sampler, other = await alice.sampler(None), await bob.sampler(None)
    first = await alice.sample(sampler, 0, count=2)
    await eventually(lambda: len(worker.active) == 2)
    with pytest.raises(TooManyRequests, match="2 generations of yours wait or run, allowed: at most 3") as refusal:
        await alice.sample(sampler, 1, count=2)
    assert refusal.value.retry_after > 0
    await bob.sample(other, 0, count=8)  # alone: a sample that exceeds the limit by itself runs
    assert refused(service) == {"requests": 1}
    worker.generating.set()
    assert isinstance(await alice.outcome(first), operations.SampleResult)
    await eventually(lambda: service.controller.context.rooms.quotas.view("alice")["requests"] == 0)
    assert isinstance(await alice.outcome(await alice.sample(sampler, 1, count=2)), operations.SampleResult)


@pytest.mark.parametrize("settings", [{"tenant_request_tokens": 100}])
async def test_tokens_of_waiting_generations_are_bounded(service: Service) -> None:
    """4,096 prompts of a whole context were 5 GB of the service."""
    worker = await join(service)
    worker.generating.clear()
    alice = await Client(service).begin()
    sampler = await alice.sampler(None)
    first = await alice.sample(sampler, 0, prompt=[5] * 40, count=2, max_tokens=20)
    await eventually(lambda: len(worker.active) == 2)
    with pytest.raises(TooManyRequests, match="80 tokens of yours wait or run, allowed: at most 100"):
        await alice.sample(sampler, 1, prompt=[5] * 13, max_tokens=8)
    await alice.sample(sampler, 2, prompt=[5] * 12, max_tokens=8)
    worker.generating.set()
    await alice.outcome(first)
    assert refused(service) == {"request_tokens": 1}


@pytest.mark.parametrize("settings", [{"tenant_queued_bytes": 11 * SIZE // 2}])
@pytest.mark.parametrize("waiting", [True, False])
async def test_operations_in_memory_are_bounded(service: Service, waiting: bool) -> None:
    """Waiting requests, and those repeated after the loss of a worker, have a bound."""
    worker = await join(service)
    alice, bob = await Client(service).begin(), await Client(service, "bob").begin()
    if waiting:
        await worker.die()
    sent = [await alice.send(forward([5, 6, 7])) for _ in range(5)]
    if not waiting:
        assert isinstance(await alice.outcome(sent[-1]), operations.ForwardBackwardResult)
    with pytest.raises(TooManyRequests, match="bytes of operations of yours wait, or belong to a step"):
        await alice.sessions.submit("alice", alice.model, 6, forward([5, 6, 7]))
    await bob.send(forward([5, 6, 7]))
    if waiting:
        await join(service, "another")
    assert isinstance(await alice.step(), operations.OptimStepResult)  # it has room, and frees that of its gradient
    assert isinstance(await alice.gradient(), operations.ForwardBackwardResult)
    assert refused(service) == {"queued_bytes": 1}
    assert isinstance(await alice.step(), operations.OptimStepResult)
    await alice.save("all")
    await eventually(lambda: service.controller.context.rooms.quotas.queued["alice"] == 0)


PATIENT = {"suspect_seconds": 1e9, "stuck_seconds": 1e9, "session_seq_gap": 30.0}


@pytest.mark.parametrize("settings", [{"tenant_queued_bytes": 11 * SIZE // 2, **PATIENT}])
async def test_batches_that_fill_the_limit_together_run_one_after_another(service: Service) -> None:
    """Clients send the first part of a batch last, when its others are accepted: the others free nothing before."""
    await join(service)
    clients, part = [await Client(service).begin() for _ in range(3)], forward([5, 6, 7])
    left = {client: [2, 3, 4, 5, 1] for client in clients}
    for round in itertools.count():
        for client, numbers in left.items():
            if not numbers:
                continue
            try:
                await client.sessions.submit("alice", client.model, numbers[0], part)
            except TooManyRequests as refusal:
                assert not refusal.lasting
                continue
            if not numbers[1:]:
                step = operations.OptimStepOperation(adam=ADAM)
                stepped = await client.outcome(await client.sessions.submit("alice", client.model, 6, step))
                assert isinstance(stepped, operations.OptimStepResult)
            del numbers[0]
        if not any(left.values()):
            break
        assert round < 20, left
        assert service.controller.context.rooms.quotas.queued["alice"] < 2 * 11 * SIZE // 2
        await service.clock.advance(6.0, steps=2)  # longer than a gap in all
    await eventually(lambda: service.controller.context.rooms.quotas.queued["alice"] == 0)


@pytest.mark.parametrize("settings", [{"tenant_queued_bytes": 11 * SIZE // 2}])
async def test_batch_that_exceeds_the_limit_alone_fails_at_once(service: Service) -> None:
    await join(service)
    alice, part, step = await Client(service).begin(), forward([5, 6, 7]), operations.OptimStepOperation(adam=ADAM)
    submit = alice.sessions.submit_in_turn
    for number in (2, 3, 4, 5, 6, 7, 1):
        await submit("alice", alice.model, number, part)
    for number, first in ((8, 9), (13, 14)):
        await alice.outcome(await submit("alice", alice.model, number, step))
        for more in range(first, first + 4):  # the next batch fits
            await submit("alice", alice.model, more, part)
    found = [await alice.outcome(f"{alice.model}/{number}") for number in range(1, 14)]
    failed = [number for number, one in enumerate(found, 1) if isinstance(one, operations.OperationFailed)]
    assert failed == [1, 7, 8]
    assert "give it smaller batches" in found[6].error and "no step was taken" in found[7].error


@pytest.mark.parametrize("settings", [{"tenant_jobs": 1, "tenant_waiting_jobs": 2}])
async def test_queued_jobs_are_bounded(service: Service) -> None:
    await join(service)
    for _ in range(3):
        last, _ = await service.controller.submit("alice", job_of())
    with pytest.raises(TooManyRequests, match="2 jobs of yours are queued, allowed: at most 2"):
        await service.controller.submit("alice", job_of())
    await service.controller.submit("bob", job_of())
    await service.controller.pause("alice", last.id)
    await service.controller.submit("alice", job_of())
    with pytest.raises(TooManyRequests):
        await service.controller.resume("alice", last.id)
    assert refused(service) == {"waiting_jobs": 2}


@pytest.mark.parametrize("settings", [{"tenant_jobs": 1}])
async def test_a_waiting_job_takes_the_memory_of_its_text(service: Service) -> None:
    """A tenant may have a thousand, and their options may be anything."""
    await join(service)
    submitted = [(await service.controller.submit("alice", job_of()))[0].id for _ in range(2)]
    row = service.database.read(jobs.get_job, "alice", submitted[1])
    [waiting] = service.controller.jobs.waiting.of(tenant="alice")
    assert columns(waiting.row) == columns(row)
    large = replace(row, spec={**row.spec, "environment": {**row.spec["environment"], "x": [[] for _ in range(10**5)]}})
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        waiting = WaitingJob.of(large)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 1.5 * len(json.dumps(large.spec)) and columns(waiting.row) == columns(large)


@pytest.mark.parametrize("settings", [{"tenant_jobs": 1, "tenant_waiting_jobs": 1}])
async def test_a_repeated_submission_is_no_new_job_to_a_limit(service: Service) -> None:
    await join(service)
    await service.controller.add_dataset("alice", content(), lambda path: 1)
    running, waiting = [(await service.controller.submit("alice", job_of(), key))[0].id for key in ("one", "two")]
    for limits in ({}, {"metadata_bytes": 1024}, {"bytes": 1}):
        await service.controller.limit_tenant("alice", limits)
        for key, id in (("one", running), ("two", waiting)):
            view, created = await service.controller.submit("alice", job_of(), key)
            assert (view.id, created) == (id, False)
        with pytest.raises(TooManyRequests):
            await service.controller.submit("alice", job_of(), "three")
    with pytest.raises(Conflict, match="was used for another job"):
        await service.controller.submit("alice", job_of(seed=7), "two")


@pytest.mark.parametrize("settings", [{"tenant_requests": 2}])
async def test_repeated_requests_of_a_client_are_no_new_ones_to_a_limit(service: Service) -> None:
    worker = await join(service)
    alice = await Client(service).begin()
    sessions, about = alice.sessions, {"sdk_version": "0.38.0", "name": "", "about": {}}
    first = await sessions.create("alice", "key", **about)
    path = await alice.save("kept", kind="sampler_weights")
    base, saved = await alice.sampler(None, 1), await alice.sampler(path, 2)
    worker.generating.clear()
    asked = await alice.sample(base, 0, count=2)
    lora = {"rank": 4, "train_attn": True, "train_mlp": False}
    for limits in ({"adapters": 1}, {"bytes": 1}, {"metadata_bytes": 1024}):
        await service.controller.limit_tenant("alice", limits)
        made = await sessions.create_run(
            "alice", alice.session, 0, operations.CreateModel(seed=1), base_model=MODEL, lora=lora, about={}
        )
        assert (await alice.outcome(made)).model_id == alice.model
        assert (await sessions.create("alice", "key", **about)).id == first.id
        assert await alice.sample(base, 0, count=2) == asked
        assert (await alice.sampler(None, 1), await alice.sampler(path, 2)) == (base, saved)
    await sessions.delete_checkpoint("alice", alice.model, "sampler_weights", "kept")
    assert await alice.sampler(path, 2) == saved
    for new in (alice.sampler(None, 3), sessions.create("alice", "other", **about), alice.sample(base, 1)):
        with pytest.raises(TooManyRequests):
            await new
    worker.generating.set()


async def test_running_job_keeps_no_more_versions_than_its_tenant_may_store(service: Service) -> None:
    await join(service)
    await service.host().join()
    await service.controller.limit_tenant("alice", {"adapters": 4})
    checkpoints = {"keep_last": 1000}
    greedy, _ = await service.controller.submit("alice", job_of(stop__steps=9, checkpoints=checkpoints))
    await service.ends(greedy.id, "paused")
    row = service.database.read(jobs.get_job, "alice", greedy.id)
    assert row.reason.startswith("you store 4 adapters, allowed: 4") and row.resumes
    assert service.database.read(tenants.stored, "alice")[0] == 4
    with pytest.raises(TooManyRequests):
        await service.controller.dry_run("alice", job_of())
    await service.host(owner="bob").join()
    other, _ = await service.controller.submit("bob", job_of(stop__steps=9, checkpoints=checkpoints))
    await service.ends(other.id, tenant="bob")
    await service.controller.limit_tenant("alice", {"adapters": 99})
    await service.controller.resume("alice", greedy.id)
    await service.ends(greedy.id)


async def test_day_without_tokens_pauses_jobs_and_refuses_requests_until_the_next(service: Service) -> None:
    await join(service)
    await service.host().join()
    alice, bob = await Client(service).begin(), await Client(service, "bob").begin()
    await service.controller.limit_tenant("alice", {"tokens_per_day": 40})
    job, _ = await service.controller.submit("alice", job_of(stop__steps=1000))
    await eventually(lambda: service.controller.context.rooms.quotas.view("alice")["tokens_today"] >= 40)
    await service.pass_until(lambda: service.database.read(jobs.get_job, "alice", job.id).state == "paused")
    row = service.database.read(jobs.get_job, "alice", job.id)
    assert row.reason.startswith("the tenant's 40 tokens of today are used up; it continues by itself on 1970-01-13")
    assert row.resumes
    with pytest.raises(TooManyRequests, match="40 tokens of today are used up") as refusal:
        await alice.send(forward([5, 6, 7]))
    assert refusal.value.retry_after == pytest.approx(DAY - service.clock.now % DAY)
    with pytest.raises(TooManyRequests):
        await alice.sample(await alice.sampler(None), 0)
    assert refused(service) == {"tokens_per_day": 2}
    assert isinstance(await bob.gradient(), operations.ForwardBackwardResult)

    await service.clock.advance(2 * FLUSH_SECONDS)
    await service.writer(lambda: None)  # behind the write of the count
    await service.crash()
    await service.start()  # the count was stored: it holds after a restart
    await join(service)
    await service.host().join()
    waiting, _ = await service.controller.submit("alice", job_of(stop__steps=1000))
    shown = await service.controller.queries.show("alice", waiting.id)
    assert shown.state == "queued" and shown.waits_for.startswith("the next day: the tenant's 40 tokens of today")
    await service.clock.advance(3600.0)
    assert service.database.read(jobs.get_job, "alice", job.id).state == "paused"
    service.clock.ahead = -DAY  # set back: no day begins, and the count stays
    assert "are used up" in service.controller.context.rooms.quotas.used_up("alice")
    service.clock.ahead = 0.0
    await service.controller.limit_tenant("alice", {"tokens_per_day": 10**9})
    await service.clock.advance(DAY)
    for one in (job, waiting):
        await service.pass_until(
            lambda one=one: service.database.read(jobs.get_job, "alice", one.id).state == "running"  # type: ignore[misc]
        )


@pytest.mark.parametrize("settings", [{"tenant_models": 1, "allowed_models": "*"}])
async def test_further_base_model_waits_for_one_in_use_or_is_refused(service: Service) -> None:
    await join(service)
    await service.host(script=lambda message: HANG).join()
    first, _ = await service.controller.submit("alice", job_of())
    await service.ends(first.id, "running")
    second, _ = await service.controller.submit("alice", job_of(base_model="some/model"))
    again, _ = await service.controller.submit("alice", job_of())
    await service.ends(again.id, "running")  # it passes the one that waits for something else
    shown = await service.controller.queries.show("alice", second.id)
    assert shown.waits_for == "one of the tenant's 1 base model in use to be free (place 1)"
    alice = await Client(service).begin()
    with pytest.raises(TooManyRequests, match="some/model: you use 1 base model"):
        await service.controller.sessions.create_run(
            "alice", alice.session, 7, operations.CreateModel(seed=1), base_model="some/model", about={},
            lora={"rank": 4, "train_attn": True, "train_mlp": False},
        )  # fmt: skip
    await service.controller.sessions.finish("alice", alice.session, "done")
    for job in (first, again):
        await service.controller.cancel("alice", job.id)
    await service.pass_until(lambda: second.id in service.controller.jobs.runners)


async def test_full_store_refuses_new_artifacts(service: Service) -> None:
    await join(service)
    await service.host().join()
    alice = await Client(service).begin()
    await alice.save("kept")
    done, _ = await service.controller.submit("alice", job_of())
    await service.ends(done.id)
    adapters, size = service.database.read(tenants.stored, "alice")
    assert adapters >= 2 and size > 100
    assert service.database.read(tenants.stored, "bob") == (0, 0)
    for name, most in (("adapters", adapters), ("bytes", size)):
        await service.controller.limit_tenant("alice", {"adapters": None, "bytes": None, name: most})
        with pytest.raises(TooManyRequests, match=rf"you store \d+ .*allowed: {most}"):
            await service.controller.submit("alice", job_of())
        with pytest.raises(TooManyRequests):
            await service.controller.add_adapter("alice", content(), lambda path: pytest.fail("it was unpacked"))
        with pytest.raises(TooManyRequests) as refusal:
            await alice.send(operations.SaveState(kind="weights", name="more"))
        assert refusal.value.lasting
    assert refused(service) == {"adapters": 3, "bytes": 3}
    await service.controller.limit_tenant("alice", {"bytes": None})
    await service.controller.submit("alice", job_of())


async def test_operation_beyond_a_lasting_limit_takes_its_turn(service: Service) -> None:
    """A repetition, whose answer was lost, is the same operation, also when the limit is another by then."""
    await join(service)
    alice = await Client(service).begin()
    submit, limit = alice.sessions.submit_in_turn, service.controller.limit_tenant
    save, samples = operations.SaveState(kind="weights", name="a"), operations.SaveSampler(sampler="s")
    sent: list[tuple[operations.AnyOperation, str, dict[str, float]]] = [
        (save, r"you store \d+ adapters", {"adapters": 1}),
        (samples, r"you store \d+ bytes", {"bytes": 1}),
        (forward([5, 6, 7]), "token of today is used up", {"tokens_per_day": 1}),
    ]
    for number, (operation, _, limits) in enumerate(sent, 1):
        service.controller.context.rooms.quotas.add_tokens("alice", 5)
        await limit("alice", limits)
        first = await submit("alice", alice.model, number, operation)
        await limit("alice", dict.fromkeys(limits))
        assert await submit("alice", alice.model, number, operation) == first
    kept = await submit("alice", alice.model, len(sent) + 1, save)
    assert isinstance(await alice.outcome(kept), operations.StateSaved)
    await limit("alice", {"adapters": 1})
    assert await submit("alice", alice.model, len(sent) + 1, save) == kept
    for number, (_, error, _) in enumerate(sent, 1):
        found = await alice.outcome(f"{alice.model}/{number}")
        assert isinstance(found, operations.OperationFailed) and re.search(error, found.error), found


@pytest.mark.parametrize("settings", [{"tenant_uploads": 2}])
async def test_uploads_under_way_count_as_they_arrive(service: Service) -> None:
    await service.controller.limit_tenant("alice", {"bytes": 100})
    opened, arrived = asyncio.Event(), asyncio.Event()
    numbers = itertools.count(1)

    async def pieces(*sizes: int, wait: bool = False) -> AsyncIterator[bytes]:
        for size in sizes:
            yield bytes([next(numbers)]) * size
        arrived.set()
        if wait:
            await opened.wait()

    def upload(*sizes: int, wait: bool = False, tenant: str = "alice", rows: int = 1) -> Coroutine[Any, Any, Any]:
        return service.controller.add_dataset(tenant, pieces(*sizes, wait=wait), lambda path: 1 // rows)

    def refusal(given: pytest.ExceptionInfo[TooManyRequests]) -> tuple[str, bool]:
        return str(given.value).partition(", allowed")[0], given.value.lasting

    first = asyncio.ensure_future(upload(20, 40, wait=True))
    await arrived.wait()
    with pytest.raises(TooManyRequests) as beside:
        await upload(30, 11)
    assert refusal(beside) == ("you store 0 bytes of adapters and datasets, 90 more arrive", False)
    with pytest.raises(TooManyRequests) as alone:
        await upload(101)
    assert refusal(alone) == ("you store 0 bytes of adapters and datasets, 60 more arrive", True)
    with pytest.raises(ZeroDivisionError):
        await upload(30, rows=0)
    await upload(1000, tenant="bob")
    arrived.clear()
    second = asyncio.ensure_future(upload(10, wait=True))
    await arrived.wait()
    with pytest.raises(TooManyRequests, match="2 uploads of yours are under way, allowed: at most 2"):
        await upload(1)
    opened.set()
    await asyncio.gather(first, second)
    assert service.database.read(tenants.stored, "alice") == (0, 70)
    with pytest.raises(TooManyRequests) as full:
        await upload(31)
    assert refusal(full) == ("you store 70 bytes of adapters and datasets, 0 more arrive", True)
    digest, _ = await upload(30)
    with pytest.raises(TooManyRequests, match="you store 100 bytes of adapters and datasets, allowed: 100"):
        await upload(1)
    await service.controller.delete_upload("alice", digest)
    await upload(30)
    assert refused(service) == {"bytes": 4, "uploads": 1}
    assert not list((service.folder / "artifacts" / ".staging").iterdir())


@pytest.mark.parametrize("settings", [{"tenant_database_bytes": 20_000, **PATIENT}])
async def test_rows_that_work_makes_are_bounded(service: Service) -> None:
    await join(service)
    await service.host().join()
    alice, bob = await Client(service).begin(), await Client(service, "bob").begin()
    base = await alice.sampler(None, 1)
    view, _ = await service.controller.submit("alice", job_of(stop__steps=12))
    row = service.database.read(jobs.get_job, "alice", view.id)

    def state(*states: str) -> bool:
        nonlocal row
        row = service.database.read(jobs.get_job, "alice", view.id)
        return row.state in states

    await service.pass_until(lambda: state("paused"))
    known = service.database.read(tenants.database_bytes, "alice")
    assert known >= 20_000 and row.step < 12 and row.resumes
    assert row.reason.startswith("your jobs' episodes and your clients' results take"), row.reason
    for new in (
        alice.sample(base, 1), alice.send(forward([1, 2])), service.controller.submit("alice", job_of()),
    ):  # fmt: skip
        with pytest.raises(TooManyRequests, match=r"of the database, allowed: 20000") as refusal:
            await new
        assert not refusal.value.lasting
    await bob.outcome(await bob.sample(await bob.sampler(None, 1), 1))
    assert refused(service)["database_bytes"] >= 4
    await service.controller.limit_tenant("alice", {"database_bytes": 10_000_000})
    await service.pass_until(lambda: state("completed"))
    await alice.outcome(await alice.sample(base, 1))


@pytest.mark.parametrize("settings", [PATIENT | {"session_seq_gap": 100.0}])
async def test_operations_behind_a_refused_one_wait_while_it_is_sent_again(service: Service) -> None:
    await join(service)
    alice = await Client(service).begin()
    base, submit, limit = await alice.sampler(None, 1), alice.sessions.submit_in_turn, service.controller.limit_tenant
    part = forward([5, 6, 7])
    done, sampled = await submit("alice", alice.model, 1, part), await alice.sample(base, 1)
    await alice.outcome(done)
    await alice.outcome(sampled)
    behind = await submit("alice", alice.model, 3, part)
    await limit("alice", {"database_bytes": 1})
    for _ in range(4):
        with pytest.raises(TooManyRequests, match="of the database, allowed: 1") as refusal:
            await submit("alice", alice.model, 2, part)
        await service.clock.advance(refusal.value.retry_after, steps=20)
        assert await submit("alice", alice.model, 3, part) == behind, "a repetition is nothing new to a limit"
        assert await submit("alice", alice.model, 1, part) == done
        assert await alice.sample(base, 1) == sampled
    await limit("alice", {"database_bytes": None})
    await submit("alice", alice.model, 2, part)
    assert isinstance(await alice.outcome(behind), operations.ForwardBackwardResult)


@pytest.mark.parametrize("settings", [{"tenant_metadata_bytes": 3000}])
async def test_metadata_of_a_tenant_is_bounded(service: Service) -> None:
    sessions, text = service.controller.sessions, {"user_metadata": {"note": "x" * 600}}
    made = []
    with pytest.raises(TooManyRequests, match="of the database, allowed: 3000"):
        for number in range(10):
            made.append(await sessions.create("alice", f"k{number}", sdk_version="1", name="", about=text))
    assert len(made) == 3 and refused(service) == {"metadata_bytes": 1}
    await sessions.create("bob", None, sdk_version="1", name="", about=text)
    stored = service.database.read(tenants.metadata_bytes, "alice")
    assert 3000 <= stored < 4000, "what is stored is what was counted"
    await service.controller.limit_tenant("alice", {"metadata_bytes": 10_000})
    await sessions.create("alice", None, sdk_version="1", name="", about=text)


async def test_uploads_of_a_tenant_are_bounded_in_their_number(service: Service) -> None:
    """A dataset of a byte takes a folder with two files, and a row."""

    def upload(number: int, tenant: str = "alice") -> Coroutine[Any, Any, tuple[str, int]]:
        async def rows() -> AsyncIterator[bytes]:
            yield b"%d" % number

        return service.controller.add_dataset(tenant, rows(), lambda path: 1)

    await service.controller.limit_tenant("alice", {"metadata_bytes": 3 * tenants.ROW_BYTES})
    made = [await upload(number) for number in range(3)]
    assert service.database.read(tenants.metadata_bytes, "alice") == 3 * tenants.ROW_BYTES
    with pytest.raises(TooManyRequests, match=r"your jobs, uploads, .* of the database, allowed: 1536; delete"):
        await upload(3)
    assert refused(service) == {"metadata_bytes": 1}
    assert await upload(2) == made[2], "the same bytes are the same upload"
    await upload(3, "bob")
    assert len(list((service.folder / "artifacts").glob("*/rows.jsonl"))) == 4
    await service.controller.delete_upload("alice", made[0][0])
    service.clock.now += METADATA_SECONDS + 1
    await upload(3)


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (asyncio.CancelledError(), True), (DatabaseAway("no answer"), True), (OSError("broken"), True),
        (UserError("no"), False), (None, True),
    ],
)  # fmt: skip
async def test_row_that_may_be_stored_counts(service: Service, error: BaseException | None, counts: bool) -> None:
    quotas = service.controller.context.rooms.quotas
    await service.controller.limit_tenant("alice", {"metadata_bytes": 1000})
    with suppress(asyncio.CancelledError, OSError, RookeryError):
        async with quotas.describing("alice", "x" * 1000):
            if error is not None:
                raise error
    with pytest.raises(TooManyRequests) if counts else nullcontext():
        async with quotas.describing("alice"):
            pass


async def test_operation_that_is_sent_again_counts_once(service: Service) -> None:
    await join(service)
    alice = await Client(service).begin()
    save = operations.SaveState(kind="weights", name="a")
    for _ in range(20):
        saved = await alice.sessions.submit("alice", alice.model, 1, save)
        assert isinstance(await alice.outcome(saved), operations.StateSaved)
    stored = service.database.read(tenants.metadata_bytes, "alice")
    await service.controller.limit_tenant("alice", {"metadata_bytes": stored + 2 * tenants.ROW_BYTES})
    await alice.sessions.create("alice", None, sdk_version="1", name="", about={})


@pytest.mark.parametrize("settings", [{"tenant_requests_per_second": 2}])
async def test_requests_of_a_tenant_are_limited_in_their_rate(service: Service) -> None:
    quotas = service.controller.context.rooms.quotas
    for _ in range(10):  # five seconds' worth at once
        quotas.count_request("alice")
    with pytest.raises(TooManyRequests) as refusal:
        quotas.count_request("alice")
    assert refusal.value.retry_after == pytest.approx(0.5)
    quotas.count_request("bob")
    await service.clock.advance(1.0)
    for _ in range(2):
        quotas.count_request("alice")
    with pytest.raises(TooManyRequests):
        quotas.count_request("alice")


async def test_overrides_hold_after_a_restart_and_null_is_the_setting(service: Service) -> None:
    await service.controller.limit_tenant("alice", {"weight": 2.0, "jobs": 3})
    await service.controller.limit_tenant("alice", {"jobs": None, "models": 9})
    for _ in range(2):
        quotas = service.controller.context.rooms.quotas
        assert quotas.view("alice")["overrides"] == {"weight": 2.0, "models": 9}
        assert (quotas.limit("alice", "jobs"), quotas.tenant_shares["alice"]) == (16, 2.0)
        await service.crash()
        await service.start()
    with pytest.raises(NotFound):
        await service.controller.limit_tenant("nobody", {"jobs": 1})
    await settle()


# --- requests in one moment -------------------------------------------------------------------------------------------

ABOUT = {"note": "x" * 600}
LORA = {"rank": 4, "train_attn": True, "train_mlp": False}


async def sampling(alice: Client, number: int) -> object:
    return await alice.sample(f"{alice.session}:sample:0", number, count=2, max_tokens=8)


async def session(alice: Client, number: int) -> object:
    return await alice.sessions.create("alice", f"k{number}", sdk_version="1", name="", about=ABOUT)


async def job(alice: Client, number: int) -> object:
    return await alice.service.controller.submit("alice", job_of())


async def run(alice: Client, number: int) -> object:
    name = f"some/model-{number}"
    return await alice.sessions.create_run(
        "alice", alice.session, number + 1, operations.CreateModel(seed=1), base_model=name, lora=LORA, about={}
    )


async def adapter(alice: Client, number: int) -> object:
    made = await alice.sessions.create_run(
        "alice", alice.session, number + 1, operations.CreateModel(seed=number), base_model=MODEL, lora=LORA, about={}
    )
    if isinstance(outcome := await alice.outcome(made), operations.OperationFailed):
        raise TooManyRequests(outcome.error, 1.0)
    return made


async def stored_adapters(service: Service) -> int:
    return service.database.read(tenants.stored, "alice")[0]


async def waiting_jobs(service: Service) -> int:
    return len(service.controller.jobs.waiting.of(tenant="alice"))


async def generations(service: Service) -> int:
    return service.controller.context.rooms.quotas.in_use("alice")["requests"]


async def described(service: Service) -> int:
    return service.database.read(tenants.metadata_bytes, "alice")


async def models(service: Service) -> int:
    return len(service.controller.context.rooms.quotas.models("alice"))


@pytest.mark.parametrize(
    ("settings", "ask", "used", "most"),
    [
        ({"tenant_requests": 9}, sampling, generations, 9),
        ({"tenant_request_tokens": 70}, sampling, generations, 6),  # of 20 tokens each
        ({"tenant_jobs": 1, "tenant_waiting_jobs": 3}, job, waiting_jobs, 3),
        ({"tenant_metadata_bytes": 6000}, session, described, 6000 + 1400),  # the last one may exceed it
        ({"tenant_metadata_bytes": 6000}, job, described, 6000 + 5000),
        ({"tenant_models": 2, "allowed_models": "*"}, run, models, 2),
        ({"tenant_adapters": 4}, adapter, stored_adapters, 4),
    ],
)
async def test_requests_in_one_moment_exceed_no_limit(
    service: Service, ask: Callable[..., Awaitable[object]], used: Callable[[Service], Awaitable[int]], most: int
) -> None:
    """All that came while the first one was being stored passed."""
    worker = await join(service)
    await service.host(script=lambda message: HANG).join()
    alice = await Client(service).begin()
    await alice.sampler(None)
    if ask is not adapter:
        worker.generating.clear()
    quotas = service.controller.context.rooms.quotas
    before = await used(service)
    found = await asyncio.gather(*(ask(alice, number) for number in range(30)), return_exceptions=True)
    refusals = [one for one in found if isinstance(one, TooManyRequests)]
    others = [one for one in found if isinstance(one, BaseException) and not isinstance(one, TooManyRequests)]
    assert not others and len(refusals) < 30, "as many as there is room for"
    assert before < await used(service) <= most
    assert refusals, "or nothing was limited"
    worker.generating.set()
    await eventually(lambda: not quotas.in_use("alice"))


async def test_requests_that_fail_use_nothing_of_a_limit(service: Service) -> None:
    await join(service)
    alice, quotas = await Client(service).begin(), service.controller.context.rooms.quotas
    await alice.sampler(None)

    def absent(real: Any, *arguments: Any) -> None:
        raise Unavailable("the server went away")

    for name in ("open_future", "add_session", "submit_job", "add_model"):
        service.database.intercept(name, absent)
    for ask in (sampling, session, job, adapter):
        for found in await asyncio.gather(*(ask(alice, number) for number in range(5)), return_exceptions=True):
            assert isinstance(found, Unavailable), found
    assert not quotas.in_use("alice") and quotas.models("alice") == {MODEL}


@pytest.mark.parametrize("settings", [{"tenant_requests": 12}])
async def test_samples_of_an_earlier_process_run_within_the_limit(service: Service) -> None:
    """Else a service that ended because of them ends again."""
    worker = await join(service)
    worker.generating.clear()
    alice = await Client(service).begin()
    sampler = await alice.sampler(None)
    sent = [await alice.sample(sampler, number, count=2) for number in range(6)]
    await service.controller.limit_tenant("alice", {"requests": 5})
    await service.crash()
    await service.start()
    worker, quotas = await join(service), service.controller.context.rooms.quotas
    worker.generating.clear()
    await eventually(lambda: len(worker.active) == 4)
    with pytest.raises(TooManyRequests, match="4 generations of yours wait or run, allowed: at most 5"):
        await alice.sample(sampler, 7, count=2)
    assert quotas.in_use("alice")["requests"] == 4
    worker.generating.set()
    for request in sent:
        assert isinstance(await alice.outcome(request), operations.SampleResult)
    await eventually(lambda: not quotas.in_use("alice"))


async def test_service_time_of_a_tenant_is_shown_by_kind(service: Service) -> None:
    quotas = service.controller.context.rooms.quotas
    for number, times in enumerate((quotas.service_time, quotas.host_time, quotas.check_time)):
        times.spend("alice", 1.0 + number)
    quotas.spend_on_jobs("alice", 4.0)
    found = quotas.view("alice")
    assert found["service_parts"] == {"requests": 1.0, "hosts": 2.0, "checks": 3.0, "jobs": 4.0}
    assert found["service_seconds"] == 10.0 and quotas.view("bob")["service_seconds"] == 0.0
    assert quotas.check_time.late("alice") == 0.0, "nobody else works"
    await quotas.service_time.begin("bob")
    quotas.check_time.spend("alice", 3.0)
    assert quotas.check_time.late("alice") > 0 and quotas.service_time.late("bob") == 0.0
