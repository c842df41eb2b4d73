"""Threads of a worker are fewer, or spin briefly, while others want their cores."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from tests.support.tiny import small
from tests.support.waiting import until

from rookery import protocol
from rookery.scheduling.threads import QUIET_LOOKS
from rookery.settings import Settings
from rookery.worker import compute as compute_module
from rookery.worker.compute import Compute
from rookery.worker.core import WorkerCore
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.engine.native.kernels.runtime import openmp_parallel
from rookery.worker.model.lora import LoraManager
from rookery.worker.spinning import Clocks, SparePool, ThreadControl, core_use, read_clocks
from rookery.worker.trainer.operation_queue import OperationQueue
from rookery.worker.trainer.trainers import Trainers


class Switch:
    """A pool that counts."""

    started = stopped = 0

    def start(self) -> None:
        self.started += 1

    def stop(self) -> None:
        self.stopped += 1


class Machine:
    """The clocks of a process on two cores, or None where they are unknown."""

    def __init__(self) -> None:
        self.now: Clocks | None = Clocks(100.0, 5.0, 1.0, 6.0, 50.0)

    def __call__(self) -> Clocks | None:
        return self.now

    def pass_second(self, ran: float, waited: float, others: float | None) -> None:
        """``others``: cores that other programs use."""
        now = self.now
        assert now is not None
        idle = None if others is None else (now.idle or 0.0) + 2.0 - ran - others
        self.now = Clocks(now.now + 1.0, now.ran + ran, now.waited + waited, now.own + ran, idle)


def looks(control: ThreadControl, machine: Machine, *second: float | None, times: int = 1) -> tuple[int, bool]:
    """The threads after so many looks at such seconds, and whether they spin briefly."""
    for _ in range(times):
        machine.pass_second(*second)  # type: ignore[arg-type]
        control.look()
    return control.team.threads, control.team.brief


def test_threads_are_fewer_while_another_program_has_a_core() -> None:
    machine, pool, used = Machine(), Switch(), list[int]()
    control = ThreadControl(pool, used.append, machine)
    assert looks(control, machine, 1.2, 0.8, 0.8, times=3) == (0, False), "the worker loads"
    control.begin(2, fixed=False)
    assert looks(control, machine, 1.9, 0.02, 0.1, times=9) == (2, False), "a quiet machine"
    assert looks(control, machine, 1.2, 0.8, 0.8) == (1, False) and used == [1]
    assert looks(control, machine, 1.0, 0.01, 1.0, times=20) == (1, False), "the program goes on"
    assert looks(control, machine, 1.0, 0.01, 0.0, times=QUIET_LOOKS - 1) == (1, False), "not for long enough"
    assert looks(control, machine, 1.0, 0.01, 0.0) == (2, False) and used == [1, 2]
    assert pool.started == pool.stopped == 0


@pytest.mark.parametrize(("fixed", "others"), [(True, 0.8), (False, None)])
def test_threads_spin_briefly_where_their_number_stays(fixed: bool, others: float | None) -> None:
    """Results depend on it, or the system does not say what others use."""
    machine, pool, used = Machine(), Switch(), list[int]()
    control = ThreadControl(pool, used.append, machine)
    control.begin(2, fixed=fixed)
    control.look()
    assert looks(control, machine, 1.2, 0.8, others) == (2, True) and pool.started == 1
    assert looks(control, machine, 0.01, 0.05, others, times=20) == (2, True), "an idle worker learns nothing"
    assert looks(control, machine, 1.9, 0.0, others, times=QUIET_LOOKS) == (2, False) and pool.stopped == 1
    assert not used


@pytest.mark.parametrize("unknown", [None, Clocks(101.0, 0.0, 0.0, 0.0, 0.0)])
def test_nothing_is_decided_where_the_time_is_unknown(unknown: Clocks | None) -> None:
    """The system does not say it, or threads have ended and took theirs with them."""
    machine, pool = Machine(), Switch()
    control = ThreadControl(pool, lambda threads: None, machine)
    control.begin(2, fixed=False)
    for now in (machine.now, unknown, unknown):
        machine.now = now
        control.look()
    assert control.team.threads == 2 and pool.started == pool.stopped == 0


def test_a_group_with_a_quota_has_no_more_cores_than_that() -> None:
    machine = Machine()
    before = machine.now
    machine.pass_second(0.5, 0.0, 0.0)
    assert before is not None and machine.now is not None
    assert core_use(before, machine.now).free == pytest.approx(2.0)
    assert core_use(before, machine.now, 1.5).free == 1.5


@pytest.mark.skipif(openmp_parallel() is None, reason="PyTorch does not use the GNU OpenMP interface here")
def test_spare_threads_come_and_go() -> None:
    def threads() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    pool, before = SparePool(), threads()
    for _ in range(3):
        pool.start()
        pool.start()  # once is enough
        until(lambda: threads() == before + (os.cpu_count() or 1) + 1, lambda: (before, threads()))
        pool.stop()
        pool.stop()
        until(lambda: threads() == before, lambda: (before, threads()))


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the system does not say when threads wait")
def test_the_time_of_threads_is_that_of_the_system() -> None:
    before, began = read_clocks(), time.process_time()
    while time.process_time() - began < 0.2:
        pass
    after = read_clocks()
    assert before is not None and after is not None
    use = core_use(before, after)
    assert use.ran > 0.15 and use.waited >= 0 and after.own - before.own > 0.15
    assert use.free is None or 0 < use.free < 1.1 * (os.cpu_count() or 1) + 1


@pytest.mark.parametrize("fixed", ["", "results depend on it"])
def test_a_worker_computes_with_as_many_threads_as_it_may(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fixed: str
) -> None:
    """From the next slice on, and its texts are the same bits."""
    decoder, used, compute = small("llama", torch.bfloat16), list[int](), list[Compute]()

    def load(*_: object, **__: object) -> WorkerCore:
        loras = LoraManager(decoder.config, decoder.dtype, decoder.device, 64)
        engine = NativeEngine(decoder, loras, lambda _: "", max_rows=8, kv_budget_bytes=1 << 26)
        step = engine.step

        def watched() -> bool:
            used.append(torch.get_num_threads())
            if compute and len(used) == 20:
                compute[0].limit_threads(1)
            return step()

        monkeypatch.setattr(engine, "step", watched)
        return WorkerCore(engine, Trainers(OperationQueue()), fixed_threads=fixed)

    def texts(threads: int, *, limited: bool) -> dict[str, list[int]]:
        used.clear()
        made = Compute(lambda: tmp_path, Settings.load(threads=threads), lambda: None)
        compute[:] = [made] if limited else []
        made.start()
        for number in range(3):
            order = protocol.Generate(
                request=str(number), adapter=None, prompt=[3, 4, number], shared_prefix=0, max_tokens=40,
                temperature=1.0, seed=number, stop_tokens=[],
            )  # fmt: skip
            made.call(lambda core, order=order: core.submit(order, None, 0.0)).result()
        found: dict[str, list[int]] = defaultdict(list)

        def take() -> bool:
            for chunk in made.take()[0]:
                found[chunk.request] += chunk.tokens
            return sum(map(len, found.values())) == 120

        until(take)
        made.stop()
        made.ended.result()
        return found

    monkeypatch.setattr(compute_module, "load_core", load)
    alone = texts(1, limited=False)
    assert set(used) == {1}
    assert texts(2, limited=True) == alone
    assert used[:20] == [2] * 20 and set(used[20:]) == ({2} if fixed else {1})
