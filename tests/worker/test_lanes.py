"""Training beside decoding: the same texts, log-probabilities and gradients as in turns, and no third team."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import small
from tests.support.waiting import until
from tests.worker.trainer.test_kernel_pass import LOSS, RANKS, adapters, reference, sample, train, written

from rookery import protocol
from rookery.errors import UserError
from rookery.scheduling.pipelines import BUCKETS, SlowdownTable, StagePredictor
from rookery.scheduling.worker_time import WorkerTime
from rookery.settings import Settings
from rookery.worker import compute as compute_module
from rookery.worker import teams
from rookery.worker.compute import Compute
from rookery.worker.core import WorkerCore
from rookery.worker.engine.native import kernels
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.engine.native.runner import KernelRunner
from rookery.worker.engine.native.slo_gate import SloGate
from rookery.worker.failures import failure_category
from rookery.worker.lane_plan import LanePlan
from rookery.worker.model.lora import LoraManager
from rookery.worker.trainer.fsdp.group import GroupLost
from rookery.worker.trainer.native.backbone import NativeBackbone
from rookery.worker.trainer.operation_queue import OperationQueue
from rookery.worker.trainer.packed_trainer import PackedTrainer

if not kernels.load(None) or teams.why_inexact(torch.device("cpu"), torch.bfloat16, kernels=True):
    pytest.skip("no lanes on this processor", allow_module_level=True)

STEPS = 3
REPLY = 60


def in_thread(function: Any) -> Any:
    """Its result in a thread of its own, whose number of threads ends with it."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_texts_and_gradients_are_the_same_bits_by_one_thread_and_by_two(tmp_path: Path, family: str) -> None:
    decoder = small(family, torch.bfloat16)
    made = adapters(decoder, 0.1)
    folders = written(made, tmp_path)

    def run(threads: int) -> Any:
        torch.get_num_threads()
        teams.use(threads)
        groups = sample(decoder, made, 20)
        return groups, *train(decoder, groups, folders)[:2]

    one, two = in_thread(lambda: run(1)), in_thread(lambda: run(2))
    assert repr(one[0]) == repr(two[0])
    for policy in RANKS:
        assert torch.equal(one[1][policy], two[1][policy])
        assert torch.equal(one[2][policy], two[2][policy])


def test_call_that_breaks_the_worker_ends_the_thread(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A training group whose process ended is not repaired: the worker starts again."""
    decoder = small("llama", torch.bfloat16)
    engine = NativeEngine(
        decoder,
        LoraManager(decoder.config, decoder.dtype, decoder.device, 64),
        lambda _: "",
        max_rows=1,
        kv_budget_bytes=1 << 26,
    )
    monkeypatch.setattr(compute_module, "load_core", lambda *_, **__: WorkerCore(engine, OperationQueue()))
    compute = Compute(lambda: tmp_path, Settings.load(threads=1), lambda: None)
    compute.start()

    def fail(error: Exception) -> Any:
        def call(_: WorkerCore) -> None:
            raise error

        return compute.call(call).exception(timeout=60)

    assert isinstance(fail(UserError("a wrong file")), UserError) and compute.failure is None
    assert isinstance(fail(GroupLost("process 1 has ended")), GroupLost)
    compute.ended.result(timeout=60)
    assert isinstance(compute.failure, GroupLost)
    assert failure_category(compute.failure) == "lost"


def run_worker(monkeypatch: pytest.MonkeyPatch, folder: Path, lanes: str) -> tuple[Any, Any, dict[str, set[int]]]:
    """Texts, gradients after all batches, and the numbers of threads of the engine's slices by the thread's name."""
    decoder = small("llama", torch.bfloat16)
    made = adapters(decoder, 0.1)
    groups, folders = sample(decoder, made, 20), written(made, folder)
    threads: dict[str, set[int]] = defaultdict(set)

    def load(_: Path, settings: Settings, between_layers: Any, *, trains: bool) -> WorkerCore:
        loras = LoraManager(decoder.config, decoder.dtype, decoder.device, 64)
        runner = KernelRunner(decoder, loras, 1 << 26)
        engine = NativeEngine(decoder, loras, lambda _: "", max_rows=8, kv_budget_bytes=1 << 26, runner=runner)
        step = engine.step

        def watched() -> bool:
            threads[threading.current_thread().name].add(torch.get_num_threads())
            return step()

        monkeypatch.setattr(engine, "step", watched)
        backbone = NativeBackbone(decoder, between_layers=between_layers)
        trainer = PackedTrainer(backbone, max_rank=64, slice_tokens=64)
        for policy in made:
            trainer.load(policy, 1, reference(policy), folders[policy])
        return WorkerCore(engine, OperationQueue(trainer), device_name="cpu", no_lanes="")

    monkeypatch.setattr(compute_module, "load_core", load)
    compute = Compute(lambda: folder, Settings.load(threads=2, lanes=lanes), lambda: None)
    compute.start()
    compute.ready.result()

    def enqueue(core: WorkerCore) -> None:
        for policy, found in groups.items():
            for number in range(STEPS):
                op = protocol.ForwardBackward(
                    op=f"{policy}{number}", policy=policy, tenant=policy, lease=1, parent=reference(policy), steps=0,
                    operations=number, batch_ticket="", loss=LOSS, temperature=1.0,
                )  # fmt: skip
                core.queue.trainer_of(64).forward_backward(op, protocol.TrainingBatch(groups=found))

    def submit(core: WorkerCore) -> None:
        for number in range(12):
            core.engine.submit(
                protocol.Generate(
                    request=str(number), adapter=None, prompt=[3, 4, number], shared_prefix=0, max_tokens=REPLY,
                    temperature=1.0, seed=number, stop_tokens=[],
                )
            )  # fmt: skip

    texts: dict[str, list[tuple[int, float]]] = defaultdict(list)
    ended: list[str] = []

    def all_ended() -> bool:
        chunks, results = compute.take()
        assert not any(result.error for result in results) and compute.failure is None
        for chunk in chunks:
            texts[chunk.request] += zip(chunk.tokens, chunk.logprobs, strict=True)
        ended.extend([result.op for result in results] + [chunk.request for chunk in chunks if chunk.finish])
        return len(ended) == 12 + STEPS * len(groups)

    compute.call(submit, touches="engine")
    compute.call(enqueue)
    until(all_ended)
    core = compute.ready.result()
    gradients = compute.call(lambda _: {p: core.queue.lora.held[p].state.gradient.clone() for p in made}).result()  # type: ignore[union-attr]
    beat = compute.status.beat
    assert beat.generated == 12 * REPLY and not beat.active + beat.waiting + beat.training and beat.progress > 0
    compute.stop()
    compute.ended.result()
    return texts, gradients, threads


def test_lanes_compute_what_turns_compute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    turns, beside = (run_worker(monkeypatch, tmp_path / lanes, lanes) for lanes in ("turns", "beside"))
    assert turns[0] == beside[0]
    for policy, gradient in turns[1].items():
        assert gradient.abs().max() > 0 and torch.equal(gradient, beside[1][policy])
    assert turns[2] == {"compute": {2}}
    assert beside[2]["engine"] == {1}, "with the trainer's other thread these are all cores"


def test_a_thread_without_a_team_computes_alone() -> None:
    def run() -> tuple[int, int]:
        teams.reserve(2)
        return torch.get_num_threads(), in_thread(torch.get_num_threads)

    assert in_thread(run) == (2, 1)


class Sleeping:
    """An engine or a trainer with its queue whose slices take time and no core; it has work of one tenant always."""

    def __init__(self, tenant: str, seconds: float) -> None:
        self.tenant, self.seconds = tenant, seconds
        self.beside = self.alone = 0.0
        self.weights: dict[str, float] = {}
        self.time, self.full = WorkerTime(self.weights), None
        self.active, self.waiting, self.pending, self.generated, self.free_tokens = 1, 0, 1, 0, 0

    def step(self) -> bool:
        beside = any(thread.name == "engine" for thread in threading.enumerate())
        began = time.perf_counter()
        time.sleep(self.seconds)
        if beside:
            self.beside += time.perf_counter() - began
        else:
            self.alone += time.perf_counter() - began
        return True

    def tenants(self) -> dict[str, int]:
        return {self.tenant: 1}

    def sharing(self) -> dict[str, int]:
        return self.tenants()

    def tenant_tokens(self) -> dict[str, float]:
        return {self.tenant: 1.0}

    def share_time(self, time: Any) -> None: ...

    def pending_of(self, trainer: None) -> bool:
        return False

    def drain(self) -> list[Any]:
        return []

    def gauges(self) -> dict[str, float]:
        return {}

    def memory(self) -> dict[str, Any]:
        return {}

    def adapters(self) -> list[str]:
        return []

    def close(self) -> None: ...

    @property
    def core_seconds(self) -> float:
        """Beside the other it has one of two cores."""
        return self.alone + self.beside / 2


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_tenants_keep_their_shares_of_the_cores_in_both_lanes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, weight: float
) -> None:
    engine, trainer = Sleeping("a", 0.004), Sleeping("b", 0.016)
    trainer.weights["a"] = weight
    core = WorkerCore(engine, trainer, device_name="cpu", no_lanes="")  # type: ignore[arg-type]
    monkeypatch.setattr(compute_module, "load_core", lambda *_, **__: core)
    monkeypatch.setattr(compute_module, "BEHIND_SECONDS", 0.05)
    compute = Compute(lambda: tmp_path, Settings.load(threads=2, lanes="beside"), lambda: None)
    compute.start()
    until(lambda: engine.core_seconds + trainer.core_seconds > 1.0)
    compute.stop()
    compute.ended.result()
    assert engine.beside > 0 and trainer.beside > 0
    assert engine.core_seconds / trainer.core_seconds == pytest.approx(weight, rel=0.35)


class Counted(Sleeping):
    """It has work for so many slices, of a hundred tokens each."""

    def __init__(self, tenant: str, seconds: float) -> None:
        super().__init__(tenant, seconds)
        self.active = self.pending = self.taken = 0

    def step(self) -> bool:
        super().step()
        self.active, self.pending, self.taken = max(0, self.active - 1), max(0, self.pending - 1), self.taken + 1
        return True

    def tenants(self) -> dict[str, int]:
        return {self.tenant: 1} if self.active + self.pending else {}

    def gauges(self) -> dict[str, float]:
        return {compute_module.TRAINED: 100.0 * self.taken}


@contextmanager
def planned_worker(
    monkeypatch: pytest.MonkeyPatch, folder: Path, engine: Sleeping, trainer: Sleeping
) -> Iterator[tuple[Compute, SloGate]]:
    """A worker with the planner, for which two lanes are quicker. It runs, and ends without a fault."""
    gate, slowdowns = SloGate(), SlowdownTable()
    gate.costs.record("decode", 1, engine.seconds)
    gate.last = "decode", 1, engine.seconds
    for rows in BUCKETS:
        slowdowns.record(1, "decode", rows, engine=1.1, trainer=1.1)
    core = WorkerCore(engine, trainer, gate=gate, device_name="cpu", no_lanes="", slowdowns=slowdowns)  # type: ignore[arg-type]
    monkeypatch.setattr(compute_module, "load_core", lambda *_, **__: core)
    compute = Compute(lambda: folder, Settings.load(threads=2, lanes="auto"), lambda: None)
    compute.start()
    compute.ready.result()
    try:
        yield compute, gate
    finally:
        compute.stop()
        compute.ended.result()
    assert compute.failure is None


def test_the_planner_knows_the_end_of_a_stage_while_nothing_else_trains_or_decodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended: list[str] = []
    monkeypatch.setattr(StagePredictor, "record", lambda _, name, seconds: ended.append(name))
    engine, trainer = Counted("a", 0.002), Counted("b", 0.002)
    with planned_worker(monkeypatch, tmp_path, engine, trainer) as (compute, _):
        for step in range(3):
            compute.call(lambda _: setattr(trainer, "pending", 3))
            until(lambda step=step: ended.count("b train") == step + 1)
            compute.call(lambda _: setattr(engine, "active", 3), touches="engine")
            until(lambda step=step: ended.count("a tail") == step + 1)


def test_the_planner_learns_nothing_from_slices_of_fewer_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: dict[str, list[int | None]] = {"engine": [], "trainer": []}

    class Told(LanePlan):
        def on_engine(self, kind: Any, size: int, seconds: float, threads: int | None, tokens: Any) -> None:
            told["engine"].append(threads)
            super().on_engine(kind, size, seconds, threads, tokens)

        def on_trainer(self, seconds: float, tokens: Any, trained: float, threads: int | None, rows: int) -> None:
            told["trainer"].append(threads)
            super().on_trainer(seconds, tokens, trained, threads, rows)

    monkeypatch.setattr(compute_module, "LanePlan", Told)
    engine, trainer = Counted("a", 0.002), Counted("b", 0.002)
    with planned_worker(monkeypatch, tmp_path, engine, trainer) as (compute, _):

        def ten_of_each() -> None:
            def begin(_: WorkerCore) -> None:
                engine.active = trainer.pending = 10

            compute.call(begin).result()
            until(lambda: compute.call(lambda _: engine.active + trainer.pending).result() == 0)

        compute.crowd(True)
        ten_of_each()
        assert told == {"engine": [None] * 10, "trainer": [None] * 10}
        compute.crowd(False)
        ten_of_each()
        assert 1 in told["engine"][10:] and set(told["engine"][10:]) <= {0, 1}
        assert {0, 1} & set(told["trainer"][10:])


def test_the_reason_for_turns_ends_with_the_requests_that_were_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine, trainer = Counted("a", 0.002), Counted("b", 0.002)
    request: Any = object()
    monkeypatch.setattr(SloGate, "least_slack", lambda _: 0.0)
    with planned_worker(monkeypatch, tmp_path, engine, trainer) as (compute, gate):
        compute.call(lambda _: gate.tracked.update({"r": request}), touches="engine")
        until(lambda: compute.status.beat.lanes == "turns: requests have objectives")
        compute.call(lambda _: gate.tracked.clear(), touches="engine")
        until(lambda: compute.status.beat.lanes == "turns: no work to run beside")


NATIVE = Path("/proc/self/task")


@pytest.mark.parametrize("lanes", ["turns", "beside"])
def test_teams_have_as_many_threads_as_there_are_processors_to_compute_with(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lanes: str
) -> None:
    """Threads of this process beyond those of Python are those of teams; the first of a team is one of Python's."""
    beyond = lambda: len(list(NATIVE.iterdir())) - threading.active_count()  # noqa: E731
    in_thread(lambda: None)
    before, most = beyond(), 0
    real = OperationQueue.step

    def watched(queue: OperationQueue) -> bool:
        nonlocal most
        stepped = real(queue)
        most = max(most, beyond())
        return stepped

    monkeypatch.setattr(OperationQueue, "step", watched)
    run_worker(monkeypatch, tmp_path, lanes)
    assert most <= before + 1, "the compute thread's team of two is all"
