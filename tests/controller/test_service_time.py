"""A tenant that takes more of the service's time than its share waits; others and a lone tenant do not."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from weakref import WeakValueDictionary

import pytest
from tests.support.peers import settle
from tests.support.work import work_of

from rookery.aio import cancel_all
from rookery.children import add_child_seconds
from rookery.controller.service_time import (
    ADDRESS_SHARE,
    BESIDE_JOBS,
    BURST,
    FIRST_GUESS,
    KEYLESS_SHARE,
    KEYLESS_WAITING,
    LONGEST_PAUSE,
    LONGEST_WAIT,
    LONGEST_WORK_WAIT,
    MEMORY,
    REFUSED_WAITING,
    SHORTEST_PAUSE,
    KeylessTime,
    ResponseLine,
    ServiceTime,
)
from rookery.controller.services import Threads
from rookery.controller.uploads import Uploads
from rookery.errors import TooManyRequests, UserError
from rookery.settings import Settings
from rookery.simulation.clock import run as run_virtually
from rookery.storage.artifacts import Artifacts
from rookery.turns import in_thread


class Manual:
    """A clock that moves when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.stands = False
        """A sleep that is longer than the shortest pause then lasts for ever."""

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        if self.stands and seconds > SHORTEST_PAUSE:
            await asyncio.Event().wait()
        self.now += seconds
        await settle(1)


def made(share: float = 0.25, *, working: str = "") -> tuple[ServiceTime, Manual]:
    clock = Manual()
    return ServiceTime(clock, lambda tenant: share, TooManyRequests, lambda: set(working)), clock


async def request(times: ServiceTime, tenant: str, seconds: float) -> None:
    account = await times.begin(tenant)
    times.spend(tenant, seconds, account)
    times.end(tenant, account)


async def test_a_lone_tenant_takes_all_of_the_time() -> None:
    times, clock = made()
    for _ in range(100):
        await request(times, "a", 1.0)
    assert clock.now == 1000.0 and times.seconds["a"] == 100.0


@pytest.mark.parametrize(("working", "share"), [("", 0.25), ("a", 0.25), ("b", 0.25 * BESIDE_JOBS)])
async def test_a_tenant_among_others_gets_its_share(working: str, share: float) -> None:
    times, clock = made(working=working)
    for _ in range(1000):
        await request(times, "a", 0.01)
        await request(times, "b", 0.0)
    assert (10 - BURST) / share * 0.9 < clock.now - 1000 < 10 / share * 1.1
    before = clock.now
    await request(times, "b", 0.01)
    assert clock.now == before, "the other one does not wait"


async def test_parts_of_a_stream_wait_while_the_tenant_is_beyond_its_share() -> None:
    times, clock = made(working="b")
    for _ in range(1000):
        times.spend("a", 0.01)
        await times.pause("a")
    share = 0.25 * BESIDE_JOBS
    assert (10 - BURST) / share * 0.9 < clock.now - 1000 < 10 / share * 1.1
    times.spend("a", 100.0)
    assert await times.pause("a") == LONGEST_PAUSE
    assert await times.pause("b") == 0.0, "within its share"
    alone, clock = made(working="a")
    alone.spend("a", 100.0)
    assert await alone.pause("a") == 0.0 and clock.now == 1000.0, "no other tenant works"


async def test_messages_of_hosts_wait_apart_from_requests() -> None:
    requests, clock = made()
    hosts = requests.apart(longest_pause=LONGEST_PAUSE)
    hosts.spend("a", 100.0)
    assert hosts.late("a") == 0.0, "no other tenant works"
    await request(requests, "b", 0.001)
    assert hosts.late("a") == pytest.approx(LONGEST_PAUSE * BESIDE_JOBS) and hosts.late("b") == 0.0
    hosts.spend("a", 100.0)
    assert hosts.late("a") == LONGEST_PAUSE, "another one works now"
    await request(requests, "a", 100.0)
    await request(requests, "b", 0.001)
    assert clock.now == 1000.0, "neither waits for the messages of hosts"
    clock.now += LONGEST_PAUSE
    assert hosts.late("a") == 0.0, "nor they for requests"


@pytest.mark.parametrize(("addresses", "share"), [(1, ADDRESS_SHARE), (2, KEYLESS_SHARE), (50, KEYLESS_SHARE)])
async def test_requests_without_a_key_have_a_share_by_address_and_in_all(addresses: int, share: float) -> None:
    clock = Manual()
    times = KeylessTime(clock, lambda: True)
    for number in range(3000):
        times.spend(address := str(number % addresses), 0.001)
        assert await times.turn(address, lambda: False)
    assert (3 - min(addresses, 2) * BURST) / share * 0.9 < clock.now - 1000 < 3 / share * 1.1
    before = clock.now
    assert await KeylessTime(clock, lambda: True).turn("other", lambda: False) and clock.now == before


def test_requests_without_a_key_wait_for_no_absent_tenant_and_not_for_ever() -> None:
    async def main() -> None:
        clock = Manual()
        times = KeylessTime(clock, lambda: False)
        times.spend("a", 1000.0)
        assert await times.turn("a", lambda: False) and clock.now == 1000.0
        times = KeylessTime(clock, lambda: True)
        times.spend("a", 1.0)
        assert await times.turn("a", lambda: True) and clock.now == 1000.0, "its client is gone"
        clock.stands = True
        waiting = [asyncio.create_task(times.turn("a", lambda: False)) for _ in range(KEYLESS_WAITING)]
        await settle()
        assert not await times.turn("a", lambda: False), "too many wait"
        assert await times.turn("b", lambda: False) is True
        assert asyncio.get_running_loop().time() == LONGEST_WAIT
        await cancel_all(*waiting)

    run_virtually(main())


async def test_refusals_take_no_more_than_the_share_of_their_tenant() -> None:
    """Whatever the number of clients that send the next request at each refusal; requests of the tenant that are not
    refused get their turns among them."""
    times, clock = made(working="b")
    began, ended, answered = clock.now, asyncio.Event(), Counter[str]()

    async def refused() -> None:
        while not ended.is_set():
            assert await times.turn("a", lambda: False)
            times.spend("a", 0.001)
            answered["refused"] += 1
            await settle(1)

    async def valid() -> None:
        while not ended.is_set():
            await request(times, "a", 0.001)
            answered["valid"] += 1
            await settle(1)

    clients = [asyncio.create_task(refused()) for _ in range(20)] + [asyncio.create_task(valid())]
    while clock.now - began < 20:
        assert await times.turn("b", lambda: False), "another tenant does not wait"
        await settle(1)
    ended.set()
    await asyncio.gather(*clients)
    spent, share = times.seconds["a"], 0.25 * BESIDE_JOBS
    assert spent < BURST + share * (clock.now - began) + 0.001 * len(clients)
    assert answered["valid"] > 0.5 * answered["refused"] / 20


async def test_many_refusals_at_once_wait_up_to_a_number_and_not_for_ever() -> None:
    times, clock = made(working="b")
    times.spend("a", 1000.0)
    assert await times.turn("a", lambda: True) and clock.now == 1000.0, "its client is gone"
    clock.stands = True
    waiting = [asyncio.create_task(times.turn("a", lambda: False)) for _ in range(REFUSED_WAITING)]
    await settle()
    assert not any(task.done() for task in waiting) and not await times.turn("a", lambda: False), "too many wait"
    assert await times.turn("b", lambda: False)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert await times.turn("a", lambda: True), "those that are gone leave their places"


async def test_responses_that_have_waited_for_long_do_not_come_all_at_once() -> None:
    paused, most = list[float](), list[int]()

    class Pausing(Manual):
        async def sleep(self, seconds: float) -> None:
            paused.append(seconds)
            most.append(paused.count(SHORTEST_PAUSE))
            await asyncio.sleep(0 if seconds == SHORTEST_PAUSE else 60)
            paused.remove(seconds)

    line = ResponseLine(Pausing(), lambda sender: 60.0, WeakValueDictionary(), 100, 0.0)
    assert await asyncio.gather(*(line.turn("a", lambda: False) for _ in range(50))) == [True] * 50
    assert len(most) >= 50 and max(most) == 1
    most.clear()
    assert await asyncio.gather(*(line.turn("a", lambda: True) for _ in range(50))) == [True] * 50
    assert not most, "those that are gone delay no other"


@pytest.mark.parametrize("waited", [LONGEST_PAUSE, LONGEST_WAIT])
async def test_a_request_that_waited_before_it_was_refused_waits_no_second_time(waited: float) -> None:
    times, clock = made(working="b")
    times.spend("a", 1000.0)
    came, clock.now = clock.now, clock.now + waited
    assert await times.turn("a", lambda: False, came) and clock.now == came + waited
    assert await times.turn("a", lambda: False, clock.now) and clock.now > came + waited, "this one came just now"


async def test_many_requests_at_once_do_not_all_begin() -> None:
    """Their time is not known yet: the mean of earlier ones is charged when each begins."""
    times, clock = made(working="b")
    for _ in range(50):
        await request(times, "a", 0.02)
    clock.now += 100
    begun = [asyncio.create_task(times.begin("a")) for _ in range(100)]
    clock.stands = True
    await settle()
    assert sum(task.done() for task in begun) <= BURST / 0.02 + 3
    for task in begun:
        task.cancel()


async def test_a_request_waits_for_a_while_and_is_refused_with_the_reason() -> None:
    times, clock = made(working="b")
    await request(times, "a", BURST + 0.25 * BESIDE_JOBS * (LONGEST_WAIT + LONGEST_WORK_WAIT) / 2)
    with pytest.raises(TooManyRequests, match=r"0\.1 s of the service's time") as refused:
        await times.begin("a")
    assert refused.value.retry_after > LONGEST_WAIT
    began = clock.now
    await times.begin("a", LONGEST_WORK_WAIT)
    assert LONGEST_WAIT < clock.now - began < LONGEST_WORK_WAIT
    clock.now += refused.value.retry_after
    await times.begin("a")


async def test_other_tenants_are_active_for_a_while_after_a_request() -> None:
    times, clock = made()
    await request(times, "b", 0.001)
    await request(times, "a", 1.0)
    before = clock.now
    await request(times, "a", 1.0)
    assert clock.now > before
    clock.now += 20
    await request(times, "a", 1.0)
    before = clock.now
    await request(times, "a", 1.0)
    assert clock.now == before


@pytest.mark.parametrize("working", ["", "b"], ids=["requests come", "a job runs"])
async def test_the_time_of_a_lone_tenant_refuses_nothing_when_another_comes(working: str) -> None:
    """It was owed without a bound: after a minute alone, every request of the next three was refused."""
    clock, others = Manual(), set[str]()
    times = ServiceTime(clock, lambda tenant: 0.25, TooManyRequests, lambda: others)
    for _ in range(60):
        await request(times, "a", 1.0)
    others.update(working)
    await request(times, "b", 0.001)
    began = clock.now
    await request(times, "a", 0.001)
    assert clock.now - began <= LONGEST_PAUSE * 1.1


async def test_a_long_check_delays_the_next_one_by_a_bounded_pause() -> None:
    clock = Manual()
    times = ServiceTime(clock, lambda tenant: 0.25, TooManyRequests, lambda: {"b"}, burst=2.0, longest_pause=5.0)
    await request(times, "a", 1.5)
    await request(times, "a", 300.0)
    assert clock.now == 1000.0, "the first ones are within the burst"
    await request(times, "a", 0.1)
    assert clock.now == pytest.approx(1005.0, abs=0.1)
    assert times.seconds["a"] == pytest.approx(301.6)


async def test_checks_wait_for_themselves_while_requests_of_others_come() -> None:
    requests, clock = made()
    checks = requests.apart(burst=2.0, longest_pause=20.0)
    await request(requests, "b", 0.001)
    for _ in range(100):
        await request(checks, "a", 0.1)
        await request(requests, "b", 0.001)
    assert (10 - 2) / 0.25 * 0.9 < clock.now - 1000 < 10 / 0.25 * 1.1
    before = clock.now
    await request(requests, "a", 0.001)
    assert clock.now == before, "its requests do not wait"


async def test_time_after_the_end_of_a_request_is_charged_in_full() -> None:
    times, _ = made(working="b")
    account = await times.begin("a")
    times.end("a", account)
    times.spend("a", 1.0, account)
    assert times.debt("a") == pytest.approx(1.0)


async def test_the_next_check_is_charged_the_mean_of_earlier_ones_in_advance(tmp_path: Path) -> None:
    times, _ = made()

    async def chunks() -> AsyncIterator[bytes]:
        yield b"{}"

    def count(path: Path) -> int:
        add_child_seconds(0.25)
        raise UserError("no row")

    store = SimpleNamespace(run=in_thread)
    services = cast(
        Any,
        SimpleNamespace(store=store, artifacts=Artifacts(tmp_path), threads=Threads(), settings=Settings.load({})),
    )

    async def allowed(tenant: str) -> None:
        pass

    uploading = lambda tenant: nullcontext(lambda size: None)  # noqa: E731
    quotas = cast(Any, SimpleNamespace(check_time=times, check_stored=allowed, uploading=uploading))
    uploads = Uploads(services, quotas, cast(Any, None))
    with pytest.raises(UserError):
        await uploads.add_dataset("a", chunks(), count)
    assert 0.25 <= times.seconds["a"] < 0.5
    before = times.debt("a")
    assert before == pytest.approx(times.seconds["a"]), "charged once"
    await times.begin("a")
    assert times.debt("a") - before >= FIRST_GUESS + MEMORY * (0.25 - FIRST_GUESS)


async def test_a_request_looks_at_no_tenant_that_was_here_before() -> None:
    times, clock = made()
    counts = []
    for number in range(2):
        for other in range(100):
            await request(times, f"{number}-{other}", 0.0)
        for _ in range(2):
            clock.now += 100
            await request(times, "alice", 1.0)  # a debt, so that others' requests matter
        counts.append(await work_of(lambda: request(times, "alice", 1.0), "controller/service_time"))
    assert counts[0] == counts[1] > 0


async def test_any_other_tenant_of_the_last_seconds_works_here() -> None:
    times, clock = made()
    for tenant in ("bob", "alice", "alice", "bob", "alice"):
        await request(times, tenant, 1.0)
        clock.now += 4
        assert times.in_use() and (times.late("alice") > 0) == (times.debt("alice") > BURST)
    clock.now += 8  # bob's last request is too long ago
    await request(times, "alice", 1.0)
    assert times.debt("alice") > BURST and times.late("alice") == 0.0
