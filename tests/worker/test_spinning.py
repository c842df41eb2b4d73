"""Threads of a worker spin briefly while others want their cores, by the time that they wait for one."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from tests.support.waiting import until

from rookery.worker.engine.native.kernels.runtime import openmp_parallel
from rookery.worker.spinning import SparePool, SpinControl, scheduled_seconds


class Switch:
    """A pool that counts."""

    started = stopped = 0

    def start(self) -> None:
        self.started += 1

    def stop(self) -> None:
        self.stopped += 1


class Machine:
    """Seconds that threads ran and waited, or None where that is unknown."""

    def __init__(self) -> None:
        self.now: tuple[float, float] | None = (5.0, 1.0)

    def __call__(self) -> tuple[float, float] | None:
        return self.now

    def pass_time(self, ran: float, waited: float) -> None:
        assert self.now is not None
        self.now = self.now[0] + ran, self.now[1] + waited


def test_spinning_is_brief_while_threads_wait_for_cores() -> None:
    machine, pool, told = Machine(), Switch(), list[bool]()
    control = SpinControl(pool, told.append, machine)
    control.look()  # the time before the first look says nothing

    def look(ran: float, waited: float, times: int = 1) -> bool:
        for _ in range(times):
            machine.pass_time(ran, waited)
            control.look()
        return control.brief

    assert not look(2.0, 0.02, 10), "a quiet machine"
    assert not look(1.6, 0.4, 10), "a little: neither crowded nor quiet"
    assert not look(0.8, 1.2, 2) and not look(1.9, 0.1, 3), "for a moment"
    assert not look(1.2, 0.8, 2) and look(1.2, 0.8) and pool.started == 1
    assert look(0.01, 0.05, 20), "an idle worker learns nothing"
    assert look(1.6, 0.4, 10), "neither crowded nor quiet"
    assert look(1.9, 0.1, 2) and look(1.2, 0.8, 3), "not for long enough"
    assert look(1.85, 0.15, 2) and not look(1.85, 0.15), "as next to its own service"
    assert (pool.started, pool.stopped) == (1, 1)
    assert not look(0.5, 1.5, 2) and look(0.5, 1.5) and pool.started == 2, "again"
    assert told == [True, False, True]


def test_a_worker_spins_as_usual_after_a_crowded_start() -> None:
    """Shares of a worker next to its service, its environments and a client on two cores, as they were measured: two
    seconds in which it waits much do not make it spin briefly, nor for the whole run."""
    machine, pool = Machine(), Switch()
    control = SpinControl(pool, lambda crowded: None, machine)
    control.look()
    briefly = 0
    for percent in (56, 61, 58, 56, 21, 9, 9, 6, 7, 7, 12, 7, 10, 13, 7, 10, 8, 14, 56, 21, 10, 4, 4, 3, 2, 13, 7, 3):
        machine.pass_time(2 - percent / 50, percent / 50)
        control.look()
        briefly += control.brief
    assert pool.started == pool.stopped == 1 and briefly <= 6


@pytest.mark.parametrize("unknown", [None, (0.0, 0.0)])
def test_nothing_is_decided_where_the_time_is_unknown(unknown: tuple[float, float] | None) -> None:
    """The system does not say it, or threads have ended and took theirs with them."""
    machine, pool = Machine(), Switch()
    control = SpinControl(pool, lambda crowded: pytest.fail("nothing is known"), machine)
    for now in ((5.0, 1.0), unknown, unknown):
        machine.now = now
        control.look()
    assert not control.brief and pool.started == pool.stopped == 0


NATIVE = Path("/proc/self/task")


@pytest.mark.skipif(openmp_parallel() is None, reason="PyTorch does not use the GNU OpenMP interface here")
def test_spare_threads_come_and_go() -> None:
    """Threads have the name of the one that starts them, which others of this process have not."""
    name = "starts spares"

    def threads() -> int:
        found = 0
        for task in NATIVE.iterdir():
            with suppress(OSError):  # a thread that ends
                found += (task / "comm").read_text().strip() == name
        return found

    def run() -> None:
        (NATIVE / str(threading.get_native_id()) / "comm").write_text(name)
        pool = SparePool()
        for _ in range(3):
            pool.start()
            pool.start()  # once is enough
            until(lambda: threads() == 1 + (os.cpu_count() or 1) + 1, threads)
            pool.stop()
            pool.stop()
            until(lambda: threads() == 1, threads)

    with ThreadPoolExecutor(1) as alone:
        alone.submit(run).result()


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not say when threads wait")
def test_the_time_of_threads_is_that_of_the_system() -> None:
    def passed() -> bool:
        """False also where another thread of this process ended meanwhile, and took its time with it."""
        before, began = scheduled_seconds(), time.process_time()
        while time.process_time() - began < 0.2:
            pass
        after = scheduled_seconds()
        if before is None or after is None:
            return False
        return 0.15 < after[0] - before[0] < 10 and after[1] >= before[1]

    until(passed)
