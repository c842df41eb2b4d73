"""Looking at jobs costs the same however long their history is, and wakes nobody else."""

from __future__ import annotations

import asyncio
import math
import threading
import weakref
from collections import Counter
from typing import Any, get_type_hints

import msgspec
import pytest
from pydantic import TypeAdapter
from sqlalchemy import update
from tests.support.peers import MODEL, PATIENCE, Service, eventually, job_of, settle

from rookery import protocol
from rookery.controller import queries
from rookery.controller.views import HeartbeatView, View, WorkerView
from rookery.errors import NotFound
from rookery.storage.columns import add
from rookery.storage.models import JobRow, PolicyRow, StepRow
from rookery.storage.repositories.jobs import set_job_state, submit_job


def ended_job(service: Service, id: str, steps: int) -> None:
    """A job that was completed by an earlier process, after so many steps."""
    spec = {"base_model": MODEL, "environment": {"id": "calculator"}, "stop": {"steps": steps}}
    job = JobRow(id=id, tenant="alice", name=id, spec=spec, created=1.0)
    policy = PolicyRow(id=f"{id}-policy", tenant="alice", job=id, name="main", rank=8, alpha=16.0, targets=["q"])
    service.database.write(submit_job, job, [policy])
    with service.database.writing() as connection:
        connection.execute(update(JobRow).where(JobRow.id == id).values(step=steps))
        add(
            connection,
            *(
                StepRow(
                    job=id, step=step, tenant="alice", version=step, reward=float(step),
                    metrics={"step": step, "reward": float(step), "bad": math.nan},
                )
                for step in range(1, steps + 1)
            ),
        )  # fmt: skip
    service.database.write(set_job_state, id, "completed", "", 2.0)


async def test_a_list_shows_the_last_rewards_without_a_query_for_each_job(service: Service) -> None:
    for number, steps in enumerate((100, 10_000)):
        ended_job(service, f"job-{number}", steps)
        view = await service.controller.queries.show("alice", f"job-{number}")
        assert view.rewards == [float(step) for step in range(steps - 63, steps + 1)] and view.reward == steps
    calls = Counter[str]()
    store = service.controller.context.store
    read = store.read

    async def counted(call: Any, *arguments: Any, **named: Any) -> Any:
        calls[call.__name__] += 1
        return await read(call, *arguments, **named)

    store.read = counted
    assert [len(view.rewards) for view in await service.controller.queries.list("alice")] == [64, 64]
    assert set(calls.values()) == {1}, "no query for each job"


async def test_metrics_later_than_a_step(service: Service) -> None:
    ended_job(service, "job", 100)
    rows = await service.controller.queries.metrics("alice", "job", after=98)
    assert [(row["step"], row["version"], row["bad"]) for row in rows] == [(99, 99, None), (100, 100, None)]
    assert len(await service.controller.queries.metrics("alice", "job")) == 100
    with pytest.raises(NotFound):
        await service.controller.queries.metrics("bob", "job")


async def test_a_follower_is_woken_by_its_job_alone(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = []
    for name in ("quiet", "loud"):
        view, _ = await service.controller.submit("alice", job_of(name=name, environment={"hosted": "nobody"}))
        jobs.append(view.id)
    looks = Counter[str]()
    show = service.controller.queries.show

    async def counted(tenant: str, job: str) -> Any:
        looks[job] += 1
        return await show(tenant, job)

    monkeypatch.setattr(service.controller.queries, "show", counted)
    states = [await show("alice", job) for job in jobs]
    while any(view.state != "running" for view in states):
        states = [await show("alice", job) for job in jobs]
    waiting = [asyncio.ensure_future(service.controller.queries.wait("alice", job)) for job in jobs]
    await eventually(lambda: looks == Counter(dict.fromkeys(jobs, 1)))
    for _ in range(3):
        await service.controller.pause("alice", jobs[1])
        await service.controller.resume("alice", jobs[1])
        await settle()
    await eventually(lambda: looks[jobs[1]] >= 4)
    assert looks[jobs[0]] == 1
    for job, task in zip(jobs, waiting, strict=True):
        await service.controller.cancel("alice", job)
        assert (await task).state == "cancelled"
    signals = service.controller.jobs.signal
    assert not any(weakref.ref(signals(job))() for job in jobs), "nobody follows them any more"


def test_a_new_core_field_of_a_worker_is_shown_by_its_name() -> None:
    """The message and the view: no other file copies the fields of one to the other."""

    class WiderHeartbeat(protocol.Heartbeat, kw_only=True):
        swapped: int = 0

    class WiderView(HeartbeatView):
        swapped: int

    class WiderHello(protocol.Hello, kw_only=True):
        rack: str = ""

    class ShownWorker(WorkerView):
        rack: str

    beat = WiderHeartbeat(
        epoch=1, progress=1, active=2, waiting=0, training=0, generated=3, decode_seconds=1.0, train_seconds=0.0,
        gauges={"nan": math.nan}, swapped=7,
    )  # fmt: skip
    shown = WiderView.of(beat)
    assert (shown.swapped, shown.active, shown.gauges) == (7, 2, {"nan": None})
    hello = WiderHello(
        protocol=1, name="w", instance="i", model=MODEL, model_hash="", roles=["rollout", "train"], max_rows=4,
        max_context=8, max_rank=8, device="cpu", dtype="float32", adapters=["a"], rack="r2",
    )  # fmt: skip
    seen = {"state": "serving", "seconds": 1.0, "requests": 0, "tokens_per_second": 0.0, "note": "", "beat": shown}
    worker = ShownWorker.of(hello, roles=["train"], adapters=2, max_flush_tokens=0, **seen)
    assert (worker.rack, worker.name, worker.roles, worker.adapters) == ("r2", "w", ["train"], 2)


@pytest.mark.parametrize(("view", "message"), [(HeartbeatView, protocol.Heartbeat), (WorkerView, protocol.Hello)])
def test_fields_that_are_copied_have_the_message_s_types(view: type[View], message: type[msgspec.Struct]) -> None:
    hints = get_type_hints(message)
    counted = {"adapters"} if view is WorkerView else {"gauges"}  # their number; infinities are shown as null
    for name in view.model_fields.keys() & hints.keys() - counted:
        field = view.model_fields[name].annotation
        assert TypeAdapter(field).json_schema()["type"] == TypeAdapter(hints[name]).json_schema()["type"], name


async def test_requests_for_base_models_share_a_look_at_their_files_and_wait_for_none(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that is slow, as on a busy machine, delays only a request that nothing recent answers."""
    real, looks, slow = queries.status, Counter[str](), threading.Event()

    def look(*given: Any) -> Any:
        looks[given[1]] += 1
        slow.wait(PATIENCE)
        return real(*given)

    async def names() -> list[str]:
        return [row.name for row in await service.controller.queries.models()]

    monkeypatch.setattr(queries, "status", look)
    first = [asyncio.create_task(names()) for _ in range(5)]
    await eventually(lambda: bool(looks))
    slow.set()
    known = await first[0]
    assert MODEL in known and await asyncio.gather(*first) == [known] * 5 and set(looks.values()) == {1}
    slow.clear()
    await service.clock.advance(2 * queries.MODEL_SECONDS)
    async with asyncio.timeout(10):
        assert [await names() for _ in range(3)] == [known] * 3
    slow.set()
    await eventually(lambda: set(looks.values()) == {2})
    slow.clear()
    await service.clock.advance(2 * queries.LATE_MODEL_SECONDS)
    late = asyncio.create_task(names())
    await settle()
    assert not late.done()
    slow.set()
    assert await late == known and set(looks.values()) == {3}
