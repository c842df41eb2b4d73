"""Tenants take turns on the event loop, by the time that they take; the service's own callbacks wait for none."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.support.faces import served

from rookery.tenant_loop import TURNS_SECONDS, TenantLoop
from rookery.turns import loop_time_of, metered, service_task, work_of


class TimedLoop(TenantLoop):
    """Its processor time is what the callbacks of a test say that they take."""

    now = 0.0

    def processor_seconds(self) -> float:
        return self.now


class Timed:
    """Callbacks of tenants."""

    def __init__(self) -> None:
        self.taken: Counter[str] = Counter()
        self.order: list[str] = []
        self.loop = TimedLoop()

    @property
    def now(self) -> float:
        return self.loop.now

    def run(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(main())

    def take(self, tenant: str, seconds: float) -> None:
        self.loop.now += seconds
        self.taken[tenant] += seconds  # type: ignore[assignment]
        self.order.append(tenant)

    def work(self, tenant: str, times: float, seconds: float) -> asyncio.Task[None]:
        """A task of the tenant that comes back to the loop so many times, and takes so long each time."""

        async def repeat() -> None:
            count = 0
            while count < times:
                self.take(tenant, seconds)
                count += 1
                await asyncio.sleep(0)

        with work_of(tenant):
            return asyncio.get_running_loop().create_task(repeat())


@pytest.mark.parametrize("tasks", [1, 16, 500])
def test_a_tenant_with_many_tasks_delays_another_by_one_callback(tasks: int) -> None:
    timed = Timed()

    async def main() -> None:
        many = [timed.work("busy", 200 / tasks + 2, 0.001) for _ in range(tasks)]
        await timed.work("other", 50, 0.001)
        assert timed.order.count("busy") <= 50 + 5
        await asyncio.gather(*many)

    timed.run(main)


@pytest.mark.parametrize("costs", [(0.01, 0.001, 0.0001), (0.001, 0.001, 0.001), (0.1, 0.0001, 0.001)])
def test_tenants_that_always_have_work_share_the_time_equally(costs: tuple[float, ...]) -> None:
    timed = Timed()

    async def main() -> None:
        tasks = [
            timed.work(str(cost_at), float("inf"), cost)
            for cost_at, cost in enumerate(costs)
            for _ in range(1 + 7 * cost_at)
        ]
        while timed.now < 2.0:  # noqa: ASYNC110  # the loop's own turns are counted
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    timed.run(main)
    assert max(timed.taken.values()) - min(timed.taken.values()) <= 2 * max(costs) + TURNS_SECONDS, timed.taken


def test_a_tenant_saves_up_no_time_and_owes_none_for_being_alone() -> None:
    timed = Timed()

    async def main() -> None:
        await timed.work("early", 1000, 0.01)
        timed.order.clear()
        tasks = [timed.work("early", 100, 0.01), timed.work("late", 100, 0.01)]
        await asyncio.gather(*tasks)
        first = Counter(timed.order[:100])
        assert abs(first["early"] - first["late"]) <= 2, first

    timed.run(main)


def test_callbacks_of_a_tenant_keep_their_order_and_a_cancelled_one_does_not_run() -> None:
    timed, seen = Timed(), list[int]()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with work_of("a"):
            handles = [loop.call_soon(seen.append, number) for number in range(100)]
        handles[50].cancel()
        with work_of("b"):
            await loop.create_task(asyncio.sleep(0))
        with work_of("a"):
            await loop.create_task(asyncio.sleep(0))

    timed.run(main)
    assert seen == [*range(50), *range(51, 100)]


def test_callbacks_of_the_service_and_of_sockets_wait_for_a_few_milliseconds_of_tenants() -> None:
    timed, waits = Timed(), list[float]()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        tasks = [timed.work(str(tenant), float("inf"), 0.0005) for tenant in range(20) for _ in range(20)]
        for _ in range(50):
            before = timed.now
            await asyncio.sleep(0)
            waits.append(timed.now - before)
            before, reached = timed.now, loop.create_future()
            loop.call_soon_threadsafe(reached.set_result, None)
            await reached
            waits.append(timed.now - before)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    timed.run(main)
    assert max(waits) <= 2 * (TURNS_SECONDS + 0.0005)


def test_a_task_for_several_tenants_is_the_services() -> None:
    timed = Timed()

    async def main() -> None:
        busy = [timed.work("busy", float("inf"), 0.001) for _ in range(100)]

        async def shared() -> float:
            for _ in range(10):
                await asyncio.sleep(0)
            return timed.now

        async def ask(begin: Callable[[Coroutine[Any, Any, float]], Awaitable[float]]) -> float:
            began = timed.now
            return await begin(shared()) - began

        with work_of("busy"):
            as_service, as_tenant = service_task(ask(service_task)), asyncio.create_task(ask(asyncio.create_task))
        assert await as_service < await as_tenant / 5
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)

    timed.run(main)


def test_time_of_a_tenant_without_that_of_its_requests_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    timed, requests, jobs = Timed(), list[float](), Counter[str]()
    monkeypatch.setattr(time, "thread_time", lambda: timed.loop.now)
    timed.loop.spent = lambda tenant, seconds: jobs.update({tenant: seconds})  # type: ignore[dict-item]

    async def part(seconds: float) -> None:
        for _ in range(4):
            timed.take("a", seconds)
            await asyncio.sleep(0)

    async def main() -> None:
        with work_of("a"):
            parts: list[Any] = [metered(part(1.0), requests.append), part(0.5)]
            tasks = [asyncio.ensure_future(one) for one in parts]
        await asyncio.gather(*tasks)
        with loop_time_of("b"):  # as for a message of a worker
            timed.take("b", 3.0)
        with loop_time_of(""):
            timed.take("", 3.0)

    timed.run(main)
    assert sum(requests) == pytest.approx(4.0)
    assert {tenant: seconds for tenant, seconds in jobs.items() if seconds} == pytest.approx({"a": 2.0, "b": 3.0})


@pytest.mark.parametrize("waits", [True, False], ids=["it waits for its turn", "it has no callback"])
def test_the_next_turns_of_a_tenant_are_later_by_the_time_of_the_services_callbacks(waits: bool) -> None:
    timed = Timed()

    async def main() -> None:
        tasks = [timed.work("charged", 50, 0.01)] if waits else []
        timed.loop.charge("charged", 0.25)
        tasks += [timed.work(tenant, 50, 0.01) for tenant in ("other", *([] if waits else ["charged"]))]
        await asyncio.gather(*tasks)

    timed.run(main)
    first = Counter(timed.order[:25])
    assert first["other"] >= 22, first


def test_callbacks_that_wait_run_after_one_that_ended_the_loop() -> None:
    """The runner cancels the tasks, which end in their tenants' turns."""
    timed, tasks = Timed(), list[asyncio.Task[None]]()

    def end() -> None:
        raise KeyboardInterrupt

    async def main() -> None:
        tasks.extend(timed.work(tenant, float("inf"), 0.001) for tenant in ("a", "b", "c"))
        await asyncio.sleep(0)
        with work_of("b"):
            asyncio.get_running_loop().call_soon(end)
        await asyncio.gather(*tasks)

    with pytest.raises(KeyboardInterrupt):
        timed.run(main)
    assert [task.cancelled() for task in tasks] == [True] * 3


def test_an_error_of_a_callback_delays_no_other() -> None:
    timed, errors = Timed(), list[object]()
    timed.loop.set_exception_handler(lambda loop, context: errors.append(context["exception"]))

    async def main() -> None:
        with work_of("a"):
            asyncio.get_running_loop().call_soon(lambda: 1 // 0)
        await asyncio.gather(*(timed.work(tenant, 10, 0.001) for tenant in ("a", "b")))

    timed.run(main)
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_the_service_runs_on_such_a_loop(tmp_path: Path) -> None:
    async def kind() -> type:
        return type(asyncio.get_running_loop())

    with served(tmp_path) as service:
        assert service.call(kind()).result(60) is TenantLoop
