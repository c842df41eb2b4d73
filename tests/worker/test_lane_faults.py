"""Both lanes under faults: neither waits for ever or starves the other, and a fault is that of the part that had it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.draws import examples
from tests.support.tiny import native_engine, small
from tests.support.waiting import until
from tests.worker.test_lanes import Counted, Sleeping, computing
from tests.worker.trainer.test_kernel_pass import LOSS, adapters, reference, sample, written

from rookery import protocol
from rookery.settings import Settings
from rookery.worker import running_time
from rookery.worker.compute import Compute
from rookery.worker.core import Implementation, WorkerCore
from rookery.worker.model.lora import LoraManager
from rookery.worker.trainer.native.backbone import NativeBackbone
from rookery.worker.trainer.operation_queue import OperationQueue
from rookery.worker.trainer.packed_trainer import PackedTrainer

MODES: list[Literal["turns", "beside"]] = ["turns", "beside"]


@contextmanager
def worker(folder: Path, engine: Sleeping, trainer: Sleeping, lanes: str) -> Iterator[Compute]:
    core = WorkerCore(engine, trainer, implementation=Implementation(device="cpu"), no_lanes="")  # type: ignore[arg-type]
    compute = computing(core, folder, lanes=lanes)
    compute.ready.result()
    yield compute
    compute.stop()
    compute.ended.result(timeout=60)


# --- faults of a part -------------------------------------------------------------------------------------------------


def fails(error: BaseException) -> Callable[[], bool]:
    def step() -> bool:
        raise error

    return step


@pytest.mark.parametrize("error", [RuntimeError("on fire"), MemoryError("no memory"), SystemExit(3)], ids=repr)
@pytest.mark.parametrize("part", ["engine", "trainer"])
@pytest.mark.parametrize("lanes", MODES)
def test_a_fault_in_a_slice_ends_both_threads(tmp_path: Path, lanes: str, part: str, error: BaseException) -> None:
    engine, trainer, closed = Sleeping("a", 0.002), Sleeping("b", 0.002), threading.Event()
    engine.close = closed.set  # type: ignore[method-assign]
    with worker(tmp_path, engine, trainer, lanes) as compute:
        until(lambda: compute.status.beat.progress > 20)
        chosen = engine if part == "engine" else trainer
        chosen.step = fails(error)  # type: ignore[method-assign]
        compute.ended.result(timeout=60)
        assert compute.failure is error and closed.is_set()
        compute.take()
        with pytest.raises(asyncio.CancelledError):
            asyncio.run(compute.call(lambda _: None))
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "engine"])


@pytest.mark.parametrize("error", [MemoryError("no memory for the cache"), OSError(28, "no space"), RuntimeError("?")])
def test_a_fault_of_the_engine_between_two_layers_is_none_of_the_training_operation(
    tmp_path: Path, error: Exception
) -> None:
    """The trainer survives a lack of memory in its own pass: the operation is lost, and the policy's state deleted."""
    decoder = small("llama")
    made = adapters(decoder, 0.1)
    groups, folders = sample(decoder, made, 6), written(made, tmp_path)
    policy = next(iter(made))
    within: list[bool] = []

    def load(_: Path, __: Settings, between_layers: Callable[[], None], *, trains: bool) -> WorkerCore:
        engine = native_engine(decoder, LoraManager(decoder.config, decoder.dtype, decoder.device, 64))
        step = engine.step

        def broken() -> bool:
            if within:
                raise error
            return step()

        engine.step = broken  # type: ignore[method-assign]

        def between() -> None:
            within.append(True)
            between_layers()
            within.pop()

        trainer = PackedTrainer(NativeBackbone(decoder, between_layers=between), max_rank=64, slice_tokens=64)
        trainer.load(policy, 1, reference(policy), folders[policy])
        return WorkerCore(engine, OperationQueue(trainer))

    compute = Compute(lambda: tmp_path, Settings.load(threads=1, lanes="turns"), lambda: None, load=load)

    def enqueue(core: WorkerCore) -> None:
        op = protocol.ForwardBackward(
            op="f", policy=policy, tenant="trains", lease=1, parent=reference(policy), steps=0, batch_ticket="",
            loss=LOSS, temperature=1.0,
        )  # fmt: skip
        core.queue.trainer_of(64).forward_backward(op, protocol.TrainingBatch(groups=groups[policy]))
        for number in range(4):
            core.engine.submit(
                protocol.Generate(
                    request=str(number), adapter=None, prompt=[3, 4, number], shared_prefix=0, max_tokens=4000,
                    temperature=1.0, seed=number, stop_tokens=[], tenant="decodes",
                )
            )  # fmt: skip

    compute.post("work", enqueue)
    compute.start()
    compute.ended.result(timeout=60)
    assert compute.failure is error
    _, results = compute.take()
    assert [done.error for done, _ in results if done.error] == []


@pytest.mark.parametrize("lanes", MODES)
def test_a_call_that_is_cancelled_does_not_run_and_those_after_it_do(tmp_path: Path, lanes: str) -> None:
    engine, trainer, ran = Sleeping("a", 0.05), Sleeping("b", 0.05), list[str]()

    async def calls(compute: Compute) -> None:
        for touches in ("engine", "queue", "states"):
            gate = threading.Event()  # calls wait behind the one that it holds, so that this one is cancelled in time
            before = asyncio.ensure_future(compute.call(lambda _, gate=gate: gate.wait(60), touches=touches))  # type: ignore[misc, arg-type]
            first = asyncio.ensure_future(compute.call(lambda _: ran.append("cancelled"), touches=touches))  # type: ignore[arg-type]
            await asyncio.sleep(0)
            first.cancel()
            gate.set()
            assert await before
            await compute.call(lambda _, touches=touches: ran.append(touches), touches=touches)  # type: ignore[misc, arg-type]

    with worker(tmp_path, engine, trainer, lanes) as compute:
        until(lambda: compute.status.beat.progress > 2)
        asyncio.run(calls(compute))
    assert ran == ["engine", "queue", "states"] and compute.failure is None


# --- time -------------------------------------------------------------------------------------------------------------


SLICE, MANY, STOPPED_FOR = 0.004, 500, 3.5
"""Seconds of a slice, a number of them that takes less than the stop, and seconds of that."""


class Measured(Counted):
    """The seconds of its slices, of a stopped one a part."""

    spent = 0.0

    def step(self) -> bool:
        began = time.perf_counter()
        stepped = super().step()
        self.spent += min(time.perf_counter() - began, STOPPED_FOR / 4)
        return stepped


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="signals that stop a process are POSIX's")
@pytest.mark.parametrize("lanes", MODES)
def test_a_stop_of_the_process_lets_neither_part_wait_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lanes: str
) -> None:
    """Whatever computes at that moment did not use the time for which the process was stopped: else the other would
    take slices for that long before its next one."""
    monkeypatch.setattr(running_time, "STOPPED_SECONDS", STOPPED_FOR - 2 * running_time.TICK_SECONDS)
    engine, trainer, ahead = Measured("a", SLICE), Measured("b", SLICE), list[int]()
    engine.active = trainer.pending = 1 << 20

    def both(count: int) -> bool:
        """Each has taken so many slices since ``before``."""
        taken = engine.taken - before[0], trainer.taken - before[1]
        ahead.append(abs(taken[0] - taken[1]))
        return min(taken) > count

    with worker(tmp_path, engine, trainer, lanes) as compute:
        before = 0, 0
        until(lambda: both(20))
        began = time.monotonic()
        stop = f"kill -STOP {os.getpid()}; sleep {STOPPED_FOR}; kill -CONT {os.getpid()}"
        subprocess.run(["sh", "-c", stop], check=True)
        assert time.monotonic() - began >= STOPPED_FOR
        before = engine.taken, trainer.taken
        ahead.clear()
        until(lambda: both(20), pause=SLICE)
        assert max(ahead) < MANY, "one of both waited for the other"
        beat = compute.status.beat
        assert beat.decode_seconds + beat.train_seconds < engine.spent + trainer.spent + STOPPED_FOR / 2


work = st.tuples(st.integers(1, 60), st.floats(0.0005, 0.004))
"""Slices, and seconds of each."""
changes = st.lists(
    st.tuples(st.sampled_from(["turns", "beside", "crowd", "quiet"]), st.floats(0.0, 0.03)), min_size=0, max_size=8
)


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(work, work, st.booleans(), st.sampled_from([0.25, 1.0, 4.0]), changes)
def test_all_work_ends_in_modes_that_change(
    tmp_path: Path,
    engine_work: tuple[int, float],
    trainer_work: tuple[int, float],
    same: bool,
    weight: float,
    changes: list[tuple[str, float]],
) -> None:
    """Each slice leaves less work, no slice is empty, and none waits for ever."""
    engine, trainer = Counted("a", engine_work[1]), Counted("a" if same else "b", trainer_work[1])
    engine.active, trainer.pending = engine_work[0], trainer_work[0]
    trainer.weights["a"] = weight
    with worker(tmp_path, engine, trainer, "turns") as compute:
        for change, seconds in changes:
            time.sleep(seconds)
            if change in ("crowd", "quiet"):
                compute.crowd(change == "crowd")
            else:
                compute.lanes = change  # type: ignore[assignment]
        until(lambda: not engine.active and not trainer.pending, pause=0.005)
        until(lambda: not (beat := compute.status.beat).active + beat.training)
        assert (engine.taken, trainer.taken) == (engine_work[0], trainer_work[0])
    assert compute.failure is None


@pytest.mark.parametrize("lanes", MODES)
@pytest.mark.parametrize(("engine_seconds", "trainer_seconds"), [(0.001, 0.05), (0.05, 0.001), (0.004, 0.004)])
def test_neither_part_starves_the_other(
    tmp_path: Path, lanes: str, engine_seconds: float, trainer_seconds: float
) -> None:
    """Of two tenants with work in one part each, both have half of the time, whatever the lengths of slices."""
    engine, trainer = Sleeping("a", engine_seconds), Sleeping("b", trainer_seconds)

    def shared() -> bool:
        """A slice that a busy machine makes longer is made up for."""
        spent = engine.core_seconds, trainer.core_seconds
        return sum(spent) > 1.0 and min(spent) > 0.25 * sum(spent)

    with worker(tmp_path, engine, trainer, lanes):
        until(shared, lambda: (engine.core_seconds, trainer.core_seconds))
