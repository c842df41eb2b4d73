"""The pools of a program share a room: how many processes work at once, and how many are idle, is bounded over all."""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import psutil
import pytest
from tests.support.waiting import until

from rookery.environments import warm_processes
from rookery.environments.sandbox.sandbox import Program, Sandbox
from rookery.environments.warm_processes import ProcessRoom, WarmProcesses
from rookery.turns import work_of


class Warm:
    """A process that only counts."""

    def __init__(self, name: str, living: list[str]) -> None:
        self.name, self.used, self._living = name, time.monotonic(), living
        living.append(name)

    def alive(self) -> bool:
        return self.name in self._living

    def end(self) -> None:
        self._living.remove(self.name)

    kill = end


@pytest.fixture
def living() -> list[str]:
    """The processes that have not ended."""
    return []


@pytest.fixture
def pool(living: list[str]) -> Iterator[Callable[[str, ProcessRoom, int], WarmProcesses[Warm]]]:
    """Makes pools, and closes them."""
    with ExitStack() as pools:

        def made(name: str, room: ProcessRoom, most: int = 4) -> WarmProcesses[Warm]:
            numbers = iter(range(1000))
            new = WarmProcesses(lambda: Warm(f"{name}{next(numbers)}", living), most, room=room)
            pools.callback(new.close)
            return new

        yield made


def test_the_idle_processes_of_all_pools_are_few_and_the_latest(
    living: list[str], pool: Callable[..., WarmProcesses[Warm]]
) -> None:
    room = ProcessRoom(more=8, idle=3)
    pools = [pool(letter, room) for letter in "abcdefgh"]
    for one in pools:
        with one.borrow(), one.borrow():
            pass
    assert living == ["g0", "h0", "h1"], "those that were given back last"
    with pools[7].borrow() as again, pools[0].borrow() as new:
        assert (again.name, new.name) == ("h0", "a2")
    assert len(living) == 3


def test_the_first_process_of_a_tenant_waits_for_no_other_and_further_ones_share_a_number(
    pool: Callable[..., WarmProcesses[Warm]],
) -> None:
    """Whichever jobs of the tenants use them, each of which has a pool."""
    room, held, most, lock = ProcessRoom(more=2, idle=100), Counted(), list[int](), threading.Lock()
    jobs = [(tenant, pool(f"{tenant}{number}", room)) for tenant in "abc" for number in range(5)]

    def work(tenant: str, one: WarmProcesses[Warm]) -> None:
        held.begun.put(None)
        with work_of(tenant), one.borrow():
            with lock:
                held.now += 1
                most.append(held.now)
            held.free.acquire()
            with lock:
                held.now -= 1

    threads = [threading.Thread(target=work, args=job) for job in jobs]
    for thread in threads[:5]:
        thread.start()
    for _ in threads[:5]:
        held.begun.get(timeout=60)
    until(lambda: held.now == 3)
    for thread in threads[5:]:
        thread.start()
    until(lambda: held.now == 5, "one of each other tenant")
    for _ in threads:
        held.free.release()
    for thread in threads:
        thread.join(60)
    assert max(most) == 5 and len(most) == 15 and held.now == 0
    with work_of("a"), jobs[0][1].borrow(), jobs[0][1].borrow(), jobs[1][1].borrow():
        pass  # all places are free again


def test_a_tenant_has_the_processes_of_a_pool_that_several_share(pool: Callable[..., WarmProcesses[Warm]]) -> None:
    """As of the pool of a host's checks: large files of one tenant must not keep another one's job from its start."""
    shared, done = pool("a", ProcessRoom(), 1), threading.Event()

    def work() -> None:
        with work_of("b"), shared.borrow():
            done.set()

    with work_of("a"), shared.borrow():
        threading.Thread(target=work, daemon=True).start()
        assert done.wait(60)


def test_the_next_free_place_is_for_the_tenant_that_has_the_fewest(pool: Callable[..., WarmProcesses[Warm]]) -> None:
    room, order, held = ProcessRoom(more=2), queue.Queue[str](), {tenant: threading.Semaphore(0) for tenant in "ab"}
    jobs = {tenant: [pool(f"{tenant}{job}", room) for job in range(count)] for tenant, count in (("a", 9), ("b", 2))}

    def work(tenant: str, one: WarmProcesses[Warm]) -> None:
        with work_of(tenant), one.borrow():
            order.put(tenant)
            held[tenant].acquire()

    def start(tenant: str) -> list[threading.Thread]:
        threads = [threading.Thread(target=work, args=(tenant, one)) for one in jobs[tenant]]
        for thread in threads:
            thread.start()
        return threads

    threads = start("a")
    assert [order.get(timeout=60) for _ in range(3)] == ["a"] * 3
    until(lambda: room.waiting == {"a": 6})
    threads += start("b")
    assert order.get(timeout=60) == "b", "its first waits for nobody"
    until(lambda: room.waiting == {"a": 6, "b": 1})
    held["a"].release()
    assert order.get(timeout=60) == "b"
    for tenant, semaphore in held.items():
        semaphore.release(len(jobs[tenant]))
    for thread in threads:
        thread.join(60)
    assert not room.waiting


class Counted:
    """The bodies that hold a process."""

    def __init__(self) -> None:
        self.now = 0
        self.begun: queue.Queue[None] = queue.Queue()
        self.free = threading.Semaphore(0)


def test_a_closed_pool_ends_only_the_processes_that_it_made(
    living: list[str], pool: Callable[..., WarmProcesses[Warm]]
) -> None:
    room = ProcessRoom()
    first, second = pool("a", room), pool("b", room)
    for one in (first, second):
        with one.borrow():
            pass
    with first.borrow() as used:
        first.close()
        assert not used.alive()
        living.append(used.name)  # it answers all the same
    assert living == ["b0"], "one that is given back to a closed pool ends"


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap: apt-get install bubblewrap")
def test_many_jobs_leave_few_warm_sandboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each job has a sandbox; forty jobs left two hundred processes."""
    monkeypatch.setattr(warm_processes.ROOM, "most_idle", 3)
    before = set(psutil.Process().children())
    with ExitStack() as jobs:
        for _ in range(8):
            job = Sandbox()
            jobs.callback(job.close)
            assert job.run(Program("print(1)")).stdout == "1\n"
        assert 0 < len(set(psutil.Process().children()) - before) <= 3
