"""Interactive requests go first: the pure choice, the controller's dispatch, the engine's rows."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.controller.rollout.test_scheduler import Room, check
from tests.support.peers import eventually, settle
from tests.support.room import beat
from tests.worker.engine.test_engine import finish, make, order

from rookery.controller.rollout.request import InflightRequest, SamplingResult
from rookery.scheduling.queues import PriorityQueues


@given(
    interactive=st.lists(st.sampled_from("ab"), max_size=12),
    common=st.lists(st.sampled_from("ab"), max_size=12),
    share=st.integers(1, 3),
    room=st.integers(1, 6),
)
def test_the_interactive_queue_goes_first_within_its_share_and_no_queue_starves(
    interactive: list[str], common: list[str], share: int, room: int
) -> None:
    """A round of taking fills one worker; then everything it holds completes, until all is done."""
    queues: PriorityQueues[tuple[str, str, int]] = PriorityQueues()
    for number, tenant in enumerate(interactive):
        queues.interactive.put(tenant, "chat", ("interactive", tenant, number))
    for number, tenant in enumerate(common):
        queues.common.put(tenant, "job", ("common", tenant, number))
    done: list[tuple[str, str, int]] = []
    while len(queues):
        ahead, held = 0, 0
        left = {"interactive": len(queues.interactive), "common": len(queues.common)}
        while taken := queues.take(lambda _: ahead < share, lambda _: held < room):  # noqa: B023
            item, _, goes_ahead = taken
            assert not goes_ahead or item[0] == "interactive"
            if item[0] == "interactive" and not goes_ahead:
                assert ahead == share and not len(queues.common), "what rollouts leave"
            if item[0] == "common":
                assert ahead == min(share, left["interactive"]), "the interactive queue came first"
            ahead, held = ahead + goes_ahead, held + 1
            done.append(item)
        assert len(queues.common) == max(0, left["common"] - max(0, room - min(share, left["interactive"])))
    assert sorted(done) == sorted(
        [("interactive", t, n) for n, t in enumerate(interactive)] + [("common", t, n) for n, t in enumerate(common)]
    )


@pytest.mark.parametrize(("tenant", "rows"), [("a", 4), ("b", 2)], ids=["of its tenant", "of another tenant"])
async def test_a_chat_does_not_wait_for_the_rollouts_before_it(tmp_path: Path, tenant: str, rows: int) -> None:
    """A tenant's chats take every row, or its share of them next to another's rollouts."""
    room = Room(tmp_path, dispatch_ahead=1)
    worker = await room.worker(max_rows=4)
    worker.generating.clear()
    rollouts = [room.sample(number) for number in range(8)]
    await eventually(lambda: len(worker.active) == 5)
    chats = [room.sample(number, tenant, f"chat-{number}", client=True, episode="") for number in range(5)]
    await eventually(lambda: len(worker.active) == 5 + rows)
    await settle()
    assert [g.request for g in worker.generates if g.reserved] == [f"chat-{n}-{n}" for n in range(rows)]
    assert not any(g.reserved for g in worker.generates[:5])
    worker.generating.set()
    for number, reply in enumerate(await asyncio.gather(*rollouts)):
        check(reply, number)
    for number, reply in enumerate(await asyncio.gather(*chats)):
        check(reply, number)
    await room.close()


async def test_rollouts_prefer_workers_without_chats_and_avoid_those_that_miss_objectives(tmp_path: Path) -> None:
    room = Room(tmp_path, dispatch_ahead=0)
    serving, free = await room.worker("a", max_rows=2), await room.worker("b", max_rows=1)
    for worker in (serving, free):
        worker.generating.clear()
    known = {worker.name: worker for worker in room.fleet.all()}
    room.rollouts.on_heartbeat(known["a"], beat(interactive=1, slo_slack=0.5))
    rollouts = [room.sample(number) for number in range(2)]
    await eventually(lambda: [len(worker.active) for worker in (serving, free)] == [1, 1])
    assert list(free.active) == ["job-0"], "the first one goes where no chat is, although that worker has fewer rows"
    room.rollouts.on_heartbeat(known["a"], beat(interactive=1, slo_slack=-0.1))
    rollouts.append(room.sample(2))
    await settle()
    assert len(serving.active) == 1 and room.rollouts.waiting() == 1, "a row is free, but an objective would be missed"
    room.rollouts.on_heartbeat(known["a"], beat(interactive=0))
    await eventually(lambda: len(serving.active) == 2)
    for worker in (serving, free):
        worker.generating.set()
    for number, reply in enumerate(await asyncio.gather(*rollouts)):
        check(reply, number)
    await room.close()


async def test_clients_take_the_rows_that_jobs_of_others_do_not_use(tmp_path: Path) -> None:
    """Of eight rows a job had two at once: six are free for chats, whose share is four."""
    room = Room(tmp_path)
    worker = await room.worker(max_rows=8)
    worker.generating.clear()
    replies = [room.sample(number) for number in range(2)]
    await eventually(lambda: len(worker.active) == 2)
    replies += [room.sample(number, "b", "chat", client=True, episode="") for number in range(9)]
    await eventually(lambda: len(worker.active) == 8)
    await settle()
    assert room.rollouts.waiting() == 3
    worker.generating.set()
    await asyncio.gather(*replies)
    await room.close()


async def test_many_waiting_chats_of_a_tenant_are_refused_at_once(tmp_path: Path) -> None:
    """All of them wait for the same: with a tenth of them, a choice costs as much."""
    room = Room(tmp_path)
    worker = await room.worker(max_rows=4)
    worker.generating.clear()
    replies = [room.sample(number) for number in range(4)]
    await eventually(lambda: len(worker.active) == 4)
    replies += [
        room.sample(number, "b", f"chat-{number}", request=f"chat-{number}", client=True, episode="")
        for number in range(100)
    ]
    await eventually(lambda: room.rollouts.waiting() == 98)
    queue, asked = room.rollouts.queues.models["smollm2-135m-instruct"], 0

    def refuse(inflight: InflightRequest) -> bool:
        nonlocal asked
        asked += 1
        return False

    assert queue.take(refuse, refuse) is None and asked == 2, "once for each room"
    worker.generating.set()
    for number, reply in enumerate(await asyncio.gather(*replies)):
        check(reply, number if number < 4 else number - 4)
    assert [g.request for g in worker.generates[4:]] == [f"chat-{number}" for number in range(100)]
    await room.close()


async def test_a_chat_goes_to_a_worker_where_its_tenant_has_not_its_share(tmp_path: Path) -> None:
    room = Room(tmp_path, dispatch_ahead=0)

    async def chats(tenant: str, *numbers: int) -> list[asyncio.Task[SamplingResult]]:
        names = [f"{tenant}-{number}" for number in numbers]
        made = [room.sample(1, tenant, name, request=name, client=True, episode="") for name in names]
        await settle()
        return made

    other = await room.worker("b", max_rows=8)
    other.generating.clear()
    replies = await chats("c", 0, 1, 2)
    first = await room.worker("a", max_rows=4)
    first.generating.clear()
    replies += [room.sample(number) for number in range(2)]
    await eventually(lambda: len(first.active) == 2)
    replies += await chats("b", 0, 1, 2)
    assert [g.request for g in first.generates if g.reserved] == ["b-0", "b-1"], "its share"
    assert [g.request for g in other.generates if g.reserved] == ["c-0", "c-1", "c-2", "b-2"]
    for worker in (first, other):
        worker.generating.set()
    await asyncio.gather(*replies)
    await room.close()


async def test_jobs_have_their_share_of_rows_where_other_tenants_clients_are_late(tmp_path: Path) -> None:
    room = Room(tmp_path)
    worker = await room.worker("a", max_rows=4)
    worker.generating.clear()
    [known] = room.fleet.all()
    replies = [room.sample(9, "c", "chat", client=True, episode="")]
    await eventually(lambda: len(worker.active) == 1)
    room.rollouts.on_heartbeat(known, beat(interactive=1, slo_slack=-0.1))
    replies += [room.sample(number, tenant, tenant) for tenant in "bc" for number in range(4)]
    await eventually(lambda: len(worker.active) == 3)
    await settle()
    assert [g.request for g in worker.generates] == ["chat-9", "b-0", "b-1"]
    worker.generating.set()
    await asyncio.gather(*replies[:3])
    room.rollouts.on_heartbeat(known, beat(interactive=0))
    await asyncio.gather(*replies)
    await room.close()


async def test_a_tenant_below_its_share_waits_for_no_row_of_another(tmp_path: Path) -> None:
    """It gets two of four, beyond those that the other has and the two that wait for them."""
    room = Room(tmp_path, dispatch_ahead=2)
    worker = await room.worker(max_rows=4)
    worker.generating.clear()
    replies = [room.sample(number) for number in range(10)]
    await eventually(lambda: len(worker.active) == 6)
    replies += [room.sample(number, "b", "other") for number in range(4)]
    await eventually(lambda: len(worker.active) == 8)
    await settle()
    assert [generate.request for generate in worker.generates[6:]] == ["other-0", "other-1"]
    assert room.rollouts.waiting() == 6
    worker.generating.set()
    for number, reply in enumerate(await asyncio.gather(*replies)):
        check(reply, number if number < 10 else number - 10)
    assert room.rollouts.pool.short("smollm2-135m-instruct", "ab") == {"a", "b"}, "neither has any at the end"
    await room.close()


async def test_tokens_are_streamed_to_the_caller(tmp_path: Path) -> None:
    """Also when it goes on elsewhere: never less than before, at last the whole."""
    room = Room(tmp_path)
    seen: list[list[int]] = []
    seed = 3
    worker = await room.worker("one", chunk=2)
    worker.chunks_left = 1
    task = room.sample(seed, on_tokens=lambda reply: seen.append(list(reply.tokens)))
    await eventually(lambda: bool(seen))
    await room.worker("two", chunk=2)
    reply = await task
    check(reply, seed)
    assert len(seen) > 2 and seen[-1] == reply.tokens
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(seen))
    await room.close()


def test_the_engine_admits_requests_with_reserved_rows_first_and_changes_no_text() -> None:
    calm = make()
    for number in range(3):
        calm.submit(order(f"r{number}", seed=number, max_tokens=20, adapter=None))
    calm.submit(order("chat", seed=9, max_tokens=4))
    expected = {name: tokens for name, (tokens, _) in finish(calm).items()}

    engine = make(max_rows=2)
    for number in range(3):
        engine.submit(order(f"r{number}", seed=number, max_tokens=20))
    for _ in range(5):
        engine.step()
    chunks = engine.drain()
    engine.submit(order("chat", seed=9, max_tokens=4, client=True, reserved=True))
    engine.submit(order("chat too", seed=10, max_tokens=4, client=True, reserved=True))
    engine.step()
    assert engine.active == 2 and engine.waiting == 3 and engine.stats["preempted"] == 2
    ended: list[str] = []
    texts: dict[str, list[int]] = {chunk.request: list(chunk.tokens) for chunk in chunks}
    while engine.active or engine.waiting:
        engine.step()
        for chunk in engine.drain():
            texts.setdefault(chunk.request, []).extend(chunk.tokens)
            ended += [chunk.request] if chunk.finish else []
    assert ended == ["chat", "chat too", "r0", "r1", "r2"]
    texts.pop("chat too")
    assert texts == expected


def test_growing_texts_preempt_requests_without_a_reserved_row() -> None:
    alone = make()
    engine = make(max_rows=4, kv_budget_bytes=780 * alone.store.token_bytes)
    for number in range(4):
        engine.submit(order(f"r{number}", seed=number, max_tokens=200, client=number == 3, reserved=number == 3))
    texts = finish(engine)
    assert engine.stats["preempted"] > 0
    for number in range(4):
        alone.submit(order(f"r{number}", seed=number, max_tokens=200))
    assert {name: tokens for name, (tokens, _) in texts.items()} == {
        name: tokens for name, (tokens, _) in finish(alone).items()
    }
