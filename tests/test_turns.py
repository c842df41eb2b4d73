"""Tenants take turns in threads; the processor time of calls and of coroutines is measured."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable

import pytest
from starlette.types import Message
from tests.support.peers import settle

from rookery.children import add_child_seconds
from rookery.server.responses import Stream
from rookery.turns import SPENT, TENANT, TenantSlots, TenantThreads, charged, metered

Compute = Callable[[float], None]


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> Compute:
    """Takes so many seconds of processor time of the present thread; nothing else takes any."""
    taken: defaultdict[int, float] = defaultdict(float)

    def take(seconds: float) -> None:
        taken[threading.get_ident()] += seconds

    monkeypatch.setattr(time, "thread_time", lambda: taken[threading.get_ident()])
    return take


@pytest.fixture
async def threads() -> AsyncIterator[TenantThreads]:
    made = TenantThreads(3, "test")
    yield made
    made.close()


async def as_tenant(tenant: str, threads: TenantThreads, call: object, *arguments: object) -> object:
    TENANT.set(tenant)
    return await threads(call, *arguments)  # type: ignore[arg-type]


async def test_a_tenant_with_many_calls_delays_another_by_one(threads: TenantThreads) -> None:
    """A call ends when the next one has begun, so that the order is that of the turns."""
    begun: queue.Queue[tuple[str, threading.Event]] = queue.Queue()
    at_once, most = defaultdict(int), defaultdict(int)  # type: ignore[var-annotated]
    lock = threading.Lock()

    def work(tenant: str) -> None:
        with lock:
            at_once[tenant] += 1
            most[tenant] = max(most[tenant], at_once[tenant])
        free = threading.Event()
        begun.put((tenant, free))
        assert free.wait(60)
        with lock:
            at_once[tenant] -= 1

    small = {f"small{n}" for n in range(4)}
    tenants = ["busy"] * 40 + sorted(small)
    calls = asyncio.gather(*(as_tenant(tenant, threads, work, tenant) for tenant in tenants))
    tenant, free = await asyncio.to_thread(begun.get, timeout=60)
    order = [tenant]
    while len(order) < len(tenants):
        if small <= {*order}:  # the calls of one tenant are left, which run one at a time
            free.set()
        tenant, last = await asyncio.to_thread(begun.get, timeout=60)
        free.set()
        free = last
        order.append(tenant)
    free.set()
    await calls
    assert most == {"busy": 1, **dict.fromkeys(small, 1)}
    assert max(map(order.index, small)) < 12, order


async def test_calls_of_the_service_wait_for_no_tenant(threads: TenantThreads) -> None:
    free = threading.Event()
    stuck = [asyncio.create_task(as_tenant(f"t{n}", threads, free.wait)) for n in range(5)]
    await settle()
    assert await asyncio.wait_for(threads(lambda: 7), 60) == 7
    free.set()
    await asyncio.gather(*stuck)


async def test_errors_and_cancellations_end_their_call_only(threads: TenantThreads) -> None:
    begun, free, done = threading.Event(), threading.Event(), []

    def wait() -> None:
        begun.set()
        free.wait()
        done.append("ran to its end")

    running = asyncio.create_task(as_tenant("t", threads, wait))
    queued = asyncio.create_task(as_tenant("t", threads, done.append, "was never to begin"))
    await settle()
    assert await asyncio.to_thread(begun.wait, 30)
    queued.cancel()
    running.cancel()
    await asyncio.gather(running, queued, return_exceptions=True)
    free.set()
    with pytest.raises(ZeroDivisionError):
        await as_tenant("t", threads, lambda: 1 // 0)
    assert await as_tenant("t", threads, lambda: 3) == 3 and done == ["ran to its end"]


async def test_the_time_of_a_call_is_charged_to_its_tenant(compute: Compute) -> None:
    spent: list[tuple[str, float]] = []
    threads = TenantThreads(2, "test", lambda tenant, seconds: spent.append((tenant, seconds)))
    await asyncio.gather(
        as_tenant("a", threads, compute, 2.0), as_tenant("a", threads, compute, 0.5),
        as_tenant("b", threads, time.sleep, 0.01),
    )  # fmt: skip
    threads.close()
    assert sorted(spent) == [("a", 0.5), ("a", 2.0), ("b", 0.0)]


async def test_metering_counts_computing_and_not_waiting(compute: Compute) -> None:
    spent: list[float] = []

    async def work() -> str:
        compute(2.0)
        await asyncio.sleep(0.01)
        await asyncio.to_thread(compute, 16.0)
        compute(0.5)
        return "done"

    assert await metered(work(), spent.append) == "done"
    assert sum(spent) == 2.5


async def test_a_metered_coroutine_is_cancelled_and_cleans_up() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await settle(1)
            ended.append("cleaned")
            raise

    async def run() -> None:
        await metered(work(), lambda seconds: None)

    task = asyncio.create_task(run())
    await settle()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["cleaned"]


@pytest.mark.usefixtures("compute")
async def test_the_time_of_a_process_that_a_call_waited_for_is_its_tenants() -> None:
    spent: list[float] = []
    threads = TenantThreads(2, "test", lambda tenant, seconds: spent.append(seconds))
    try:
        await threads(add_child_seconds, 7.0)
        await threads(lambda: None)
    finally:
        threads.close()
    assert spent == [7.0, 0.0]


async def test_further_tasks_of_a_request_are_charged_to_its_tenant(compute: Compute) -> None:
    spent: list[float] = []

    async def work() -> str:
        compute(2.0)
        await settle(1)
        return "done"

    assert await asyncio.create_task(charged(work())) == "done" and not spent
    SPENT.set(spent.append)
    assert await asyncio.create_task(charged(work())) == "done"
    assert sum(spent) == 2.0


async def test_a_stream_waits_after_each_part_and_is_charged(compute: Compute) -> None:
    spent: list[float] = []
    seen: list[str] = []

    async def parts() -> AsyncIterator[bytes]:
        compute(2.0)
        yield b"a"
        yield b"b"

    async def send(message: Message) -> None:
        seen.append(message.get("body", b"head").decode())

    async def pause() -> None:
        seen.append("pause")

    async def receive() -> Message:
        return await asyncio.Event().wait() or {}

    SPENT.set(spent.append)
    await Stream(parts())({"type": "http", "state": {"pause": pause}}, receive, send)
    assert seen == ["head", "a", "pause", "b", "pause", ""] and sum(spent) == 2.0


async def test_a_call_in_a_thread_is_its_tenants(threads: TenantThreads) -> None:
    """So that the processes which it uses are those of the tenant."""
    tenants = [as_tenant(tenant, threads, TENANT.get) for tenant in ("a", "b", "", "a")]
    assert await asyncio.gather(*map(asyncio.create_task, tenants)) == ["a", "b", "", "a"]


async def test_tenants_take_turns_for_slots() -> None:
    slots, order, free = TenantSlots(1), list[str](), asyncio.Semaphore(0)

    async def work(tenant: str) -> None:
        async with slots.slot(tenant):
            order.append(tenant)
            await free.acquire()

    tasks = [asyncio.create_task(work(tenant)) for tenant in "aaaabbc"]
    await settle(1)
    for task in (tasks[0], tasks[3]):  # one that has the slot, and one that waits
        task.cancel()
    for _ in tasks:
        free.release()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert "".join(order) == "aabcab"
    async with slots.slot("a"):
        late = asyncio.create_task(work("b"))
        await settle(1)
        assert not late.done()
    await late


async def test_a_slot_that_is_given_to_a_cancelled_task_is_not_lost() -> None:
    slots = TenantSlots(1)

    async def work() -> None:
        async with slots.slot("a"):
            pass

    async with slots.slot("b"):
        waiting = [asyncio.create_task(work()) for _ in range(2)]
        await settle(1)
    waiting[0].cancel()  # in the moment in which it has the slot
    await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 60)
    await asyncio.wait_for(work(), 60)
