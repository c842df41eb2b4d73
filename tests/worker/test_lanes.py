"""Training beside decoding: the same texts, log-probabilities and gradients as in turns, and no third team."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tiny import native_engine, small
from tests.support.waiting import until
from tests.worker.trainer.test_kernel_pass import LOSS, RANKS, adapters, reference, sample, train, written

from rookery import protocol
from rookery.errors import UserError
from rookery.scheduling.pipelines import BUCKETS, SlowdownTable, StagePredictor
from rookery.scheduling.worker_time import WorkerTime
from rookery.settings import Settings
from rookery.worker import compute as compute_module
from rookery.worker import teams
from rookery.worker.compute import BEHIND_SECONDS, Compute
from rookery.worker.core import NO_TRAINING, Implementation, WorkerCore
from rookery.worker.engine.native import kernels
from rookery.worker.engine.native.runner import KernelRunner
from rookery.worker.engine.slo_gate import SloGate
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


def computing(
    core: WorkerCore,
    folder: Path,
    behind_seconds: float = BEHIND_SECONDS,
    plan: Callable[..., LanePlan] = LanePlan,
    **settings: Any,
) -> Compute:
    """The thread with this engine and trainer, which runs."""
    chosen, made = Settings.load(**{"threads": 2, **settings}), {"behind_seconds": behind_seconds, "plan": plan}
    compute = Compute(lambda: folder, chosen, lambda: None, load=lambda *_, **__: core, **made)
    compute.start()
    return compute


def in_thread(function: Any) -> Any:
    """Its result in a thread of its own, whose number of threads ends with it."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


def answer(compute: Compute, function: Callable[[WorkerCore], Any]) -> Any:
    """Its result in the compute thread."""
    return asyncio.run(compute.call(function))


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


def test_a_failed_call_ends_for_its_caller_and_one_that_breaks_the_worker_ends_the_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A call raises to its caller, a post is logged and counted. A training group whose process ended is not
    repaired: the worker starts again."""
    decoder = small("llama", torch.bfloat16)
    engine = native_engine(
        decoder,
        LoraManager(decoder.config, decoder.dtype, decoder.device, 64),
        lambda _: "",
        max_rows=1,
        kv_budget_bytes=1 << 26,
    )
    compute = computing(WorkerCore(engine, OperationQueue()), tmp_path, threads=1)

    def fail(error: Exception) -> Callable[[WorkerCore], None]:
        def call(_: WorkerCore) -> None:
            raise error

        return call

    with pytest.raises(UserError, match="a wrong file"):
        answer(compute, fail(UserError("a wrong file")))
    assert compute.failure is None
    compute.post("the eviction of a", fail(ValueError("no a")), tenant="ann", policy="a")
    compute.post("the eviction of b", fail(KeyError("b")), touches="engine", policy="b")
    compute.post("the eviction of c", lambda _: None, policy="c")
    with pytest.raises(GroupLost):
        answer(compute, fail(GroupLost("process 1 has ended")))
    compute.ended.result(timeout=60)
    posts = [record for record in caplog.records if record.name == "rookery.worker.compute"]
    assert [(record.getMessage(), vars(record).get("tenant"), vars(record)["policy"]) for record in posts] == [
        ("the eviction of a failed: no a", "ann", "a"),
        ("the eviction of b failed: KeyError: 'b'", None, "b"),
    ]
    assert [record.levelno == logging.WARNING for record in posts] == [True, True]
    assert [bool(record.exc_info) for record in posts] == [False, True], "a message for users needs no traceback"
    assert compute.failed_posts == 2
    compute.post("a call after the end", fail(ValueError("never runs")))
    assert compute.failed_posts == 2
    assert isinstance(compute.failure, GroupLost)
    assert failure_category(compute.failure) == "lost"


def run_worker(
    folder: Path, lanes: str, after_training: Callable[[], None] = lambda: None
) -> tuple[Any, Any, dict[str, set[int]]]:
    """Texts, gradients after all batches, and the numbers of threads of the engine's slices by the thread's name.
    ``after_training`` is called after each of the trainer's slices."""
    decoder = small("llama", torch.bfloat16)
    made = adapters(decoder, 0.1)
    groups, folders = sample(decoder, made, 20), written(made, folder)
    threads: dict[str, set[int]] = defaultdict(set)

    def load(_: Path, settings: Settings, between_layers: Any, *, trains: bool) -> WorkerCore:
        loras = LoraManager(decoder.config, decoder.dtype, decoder.device, 64)
        runner = KernelRunner(decoder, loras, 1 << 26)
        engine = native_engine(decoder, loras, lambda _: "", max_rows=8, kv_budget_bytes=1 << 26, runner=runner)
        step = engine.step

        def watched() -> bool:
            threads[threading.current_thread().name].add(torch.get_num_threads())
            return step()

        engine.step = watched  # type: ignore[method-assign]
        backbone = NativeBackbone(decoder, between_layers=between_layers)
        trainer = PackedTrainer(backbone, max_rank=64, slice_tokens=64)
        for policy in made:
            trainer.load(policy, 1, reference(policy), folders[policy])
        queue = OperationQueue(trainer)
        train = queue.step

        def trained() -> bool:
            stepped = train()
            after_training()
            return stepped

        queue.step = trained  # type: ignore[method-assign]
        return WorkerCore(engine, queue, implementation=Implementation(device="cpu"), no_lanes="")

    compute = Compute(lambda: folder, Settings.load(threads=2, lanes=lanes), lambda: None, load=load)
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
        """At the same moment: else the engine might be done before the trainer begins."""
        enqueue(core)
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
        assert not any(done.error for done, _ in results) and compute.failure is None
        for chunk in chunks:
            texts[chunk.request] += zip(chunk.tokens, chunk.logprobs, strict=True)
        ended.extend([done.op for done, _ in results] + [chunk.request for chunk in chunks if chunk.finish])
        return len(ended) == 12 + STEPS * len(groups)

    compute.post("operations and requests", submit)
    until(all_ended)
    core = compute.ready.result()
    gradients = answer(compute, lambda _: {p: core.queue.lora.held[p].state.gradient.clone() for p in made})  # type: ignore[union-attr]
    beat = compute.status.beat
    assert beat.generated == 12 * REPLY and not beat.active + beat.waiting + beat.training and beat.progress > 0
    compute.stop()
    compute.ended.result()
    return texts, gradients, threads


def test_lanes_compute_the_same_bits_as_turns(tmp_path: Path) -> None:
    turns, beside = (run_worker(tmp_path / lanes, lanes) for lanes in ("turns", "beside"))
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


def test_all_libraries_compute_with_the_threads_of_their_team() -> None:
    """MKL, which multiplies float32, has a separate number of threads. Threads have the name of the one that starts
    them, which others of this process have not."""
    name = "computes"

    def seconds() -> dict[str, float]:
        found = {}
        for task in NATIVE.iterdir():
            with suppress(OSError):  # a thread that ends
                if (task / "comm").read_text().strip() == name:
                    found[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
        return found

    def run() -> list[float]:
        own, shares = str(threading.get_native_id()), []
        (NATIVE / own / "comm").write_text(name)
        teams.reserve(2)
        for threads in (1, 2):
            teams.use(threads)
            before = seconds()
            for _ in range(40):
                torch.bmm(torch.ones(4, 512, 64), torch.ones(4, 64, 512))
                torch.ones(512, 512) @ torch.ones(512, 512)
                torch.ones(512, 512, dtype=torch.bfloat16) @ torch.ones(512, 512, dtype=torch.bfloat16)
            used = {task: time - before.get(task, 0.0) for task, time in seconds().items()}
            shares.append(1 - used[own] / sum(used.values()))
        return shares

    alone, shared = in_thread(run)
    assert alone < 0.05 and shared > 0.3


class Sleeping:
    """An engine or a trainer with its queue whose slices take time and no core; it has work of one tenant always."""

    def __init__(self, tenant: str, seconds: float) -> None:
        self.tenant, self.seconds = tenant, seconds
        self.beside = self.alone = 0.0
        self.weights: dict[str, float] = {}
        self.time = WorkerTime(self.weights)
        self.full: Any = None
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

    def pending_of(self, trainer: Any) -> bool:
        return trainer is not None

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
def test_tenants_keep_their_shares_of_the_cores_in_both_lanes(tmp_path: Path, weight: float) -> None:
    """A slice that a busy machine makes longer is made up for."""
    engine, trainer = Sleeping("a", 0.004), Sleeping("b", 0.016)
    trainer.weights["a"] = weight
    core = WorkerCore(engine, trainer, implementation=Implementation(device="cpu"), no_lanes="")  # type: ignore[arg-type]
    compute = computing(core, tmp_path, behind_seconds=0.05, lanes="beside")

    def shared() -> bool:
        spent = engine.core_seconds, trainer.core_seconds
        return sum(spent) > 1.0 and spent[0] / spent[1] == pytest.approx(weight, rel=0.35)

    until(shared, lambda: (engine.core_seconds, trainer.core_seconds))
    compute.stop()
    compute.ended.result()
    assert engine.beside > 0 and trainer.beside > 0


class Counted(Sleeping):
    """It has work for so many slices, of a hundred tokens each."""

    def __init__(self, tenant: str, seconds: float) -> None:
        super().__init__(tenant, seconds)
        self.active = self.pending = self.taken = 0
        self.rollouts = True
        """Whether its work is that of tenants' rollouts, and not of clients."""

    def step(self) -> bool:
        super().step()
        self.active, self.pending, self.taken = max(0, self.active - 1), max(0, self.pending - 1), self.taken + 1
        return True

    def tenants(self) -> dict[str, int]:
        return {self.tenant: 1} if self.active + self.pending and self.rollouts else {}

    def gauges(self) -> dict[str, float]:
        return {compute_module.TRAINED: 100.0 * self.taken}


@contextmanager
def planned_worker(
    folder: Path,
    engine: Sleeping,
    trainer: Sleeping,
    *,
    slow: Sequence[float] = (1.1,),
    lanes: str = "auto",
    no_lanes: str = "",
    gate: SloGate | None = None,
    plan: Callable[..., LanePlan] = LanePlan,
) -> Iterator[tuple[Compute, SloGate]]:
    """A worker with the planner, for which two lanes are quicker. It runs, and ends without a fault."""
    gate, slowdowns = gate or SloGate(), SlowdownTable()
    gate.costs.record("decode", 1, engine.seconds)
    gate.last = "decode", 1, engine.seconds
    for rows, measured in itertools.product(BUCKETS, slow):
        slowdowns.record(1, "decode", rows, engine=measured, trainer=measured)
    core = WorkerCore(
        engine,
        trainer,
        gate=gate,
        implementation=Implementation(device="cpu"),
        no_lanes=no_lanes,
        slowdowns=slowdowns,  # type: ignore[arg-type]
    )
    compute = computing(core, folder, lanes=lanes, plan=plan)
    compute.ready.result()
    try:
        yield compute, gate
    finally:
        compute.stop()
        compute.ended.result()
    assert compute.failure is None


def test_the_planner_knows_the_end_of_a_stage_while_nothing_else_trains_or_decodes(tmp_path: Path) -> None:
    ended: list[str] = []

    class Recorded(StagePredictor):
        def record(self, name: str, seconds: float) -> None:
            ended.append(name)

    engine, trainer, plan = Counted("a", 0.002), Counted("b", 0.002), partial(LanePlan, predictor=Recorded())
    with planned_worker(tmp_path, engine, trainer, plan=plan) as (compute, _):
        for step in range(3):
            compute.post("training", lambda _: setattr(trainer, "pending", 3))
            until(lambda step=step: ended.count("b train") == step + 1)
            compute.post("decoding", lambda _: setattr(engine, "active", 3), touches="engine")
            until(lambda step=step: ended.count("a tail") == step + 1)


def test_the_planner_learns_nothing_from_slices_of_fewer_threads(tmp_path: Path) -> None:
    seen: dict[str, list[int | None]] = {"engine": [], "trainer": []}

    class Watched(LanePlan):
        def on_engine(self, kind: Any, size: int, seconds: float, threads: int | None, tokens: Any) -> None:
            seen["engine"].append(threads)
            super().on_engine(kind, size, seconds, threads, tokens)

        def on_trainer(self, seconds: float, tokens: Any, trained: float, threads: int | None, rows: int) -> None:
            seen["trainer"].append(threads)
            super().on_trainer(seconds, tokens, trained, threads, rows)

    engine, trainer = Counted("a", 0.002), Counted("b", 0.002)
    with planned_worker(tmp_path, engine, trainer, plan=Watched) as (compute, _):

        def ten_of_each() -> None:
            def begin(_: WorkerCore) -> None:
                engine.active = trainer.pending = 10

            answer(compute, begin)
            until(lambda: answer(compute, lambda _: engine.active + trainer.pending) == 0)

        compute.crowd(True)
        ten_of_each()
        assert seen == {"engine": [None] * 10, "trainer": [None] * 10}
        compute.crowd(False)
        until(lambda: ten_of_each() or 1 in seen["engine"][10:])  # its lane may begin when the trainer's work is over
        assert set(seen["engine"][10:]) <= {0, 1}
        assert {0, 1} & set(seen["trainer"][10:])


IDLE = "turns: no work to run beside"
MANY = 1 << 20


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"no_lanes": "the trainer is a group of processes"}, "turns: the trainer is a group of processes"),
        (
            {"no_lanes": "the worker computes with one core", "lanes": "turns"},
            "turns: the worker computes with one core",
        ),
        ({"no_lanes": NO_TRAINING}, ""),
        ({"lanes": "turns"}, "turns: as set"),
        ({"lanes": "beside"}, IDLE),
        ({}, IDLE),
    ],
)
def test_reasons_for_turns_that_are_there_from_the_start(tmp_path: Path, given: dict[str, Any], reason: str) -> None:
    with planned_worker(tmp_path, Counted("a", 0.002), Counted("b", 0.002), **given) as (compute, _):
        answer(compute, lambda _: None)
        until(lambda: compute.status.beat.lanes == reason)
        answer(compute, lambda core: setattr(core.queue, "full", "trainer"))
        while_full = "turns: a full-parameter policy trains" if reason == IDLE else reason
        until(lambda: compute.status.beat.lanes == while_full)


@pytest.mark.parametrize(
    ("reason", "slow", "begin", "end"),
    [
        ("a full-parameter policy trains", [1.1], lambda w: w.trains_all(1), lambda w: w.trains_all(None)),
        (compute_module.CROWDED, [1.1], lambda w: w.crowd(True), lambda w: w.crowd(False)),
        (compute_module.CLIENTS, [1.1], lambda w: w.serves(MANY), lambda w: w.serves(0)),
        ("requests have objectives", [1.1], lambda w: w.gate.tracked.update(r=0), lambda w: w.gate.tracked.clear()),
        ("requests have objectives", [1.1], lambda w: w.expects(MANY), lambda w: w.expects(0)),
        ("nothing gains", [2.1], lambda w: w.works(MANY), lambda w: w.works(0)),
        ("slices beside each other are not as predicted", [1, 4] * 10, lambda w: w.works(MANY), lambda w: w.works(0)),
        ("one of both catches up with its share", [1.1], lambda w: w.works(MANY, 100.0), lambda w: w.works(0)),
    ],
)  # fmt: skip
def test_the_reason_for_turns_begins_and_ends_with_its_cause(
    tmp_path: Path, reason: str, slow: list[float], begin: Any, end: Any
) -> None:
    engine, trainer = Counted("a", 0.002), Counted("b", 0.002)

    @dataclass
    class Worker:
        compute: Compute
        gate: Pressed

        def crowd(self, crowded: bool) -> None:
            self.compute.crowd(crowded)

        def trains_all(self, full: Any) -> None:
            trainer.full = full

        def serves(self, slices: int) -> None:
            engine.rollouts = False
            self.works(slices)

        def expects(self, slices: int) -> None:
            self.gate.expected = bool(slices)
            self.works(slices)

        def works(self, slices: int, weight: float = 1.0) -> None:
            self.compute.post("decoding", lambda _: setattr(engine, "active", slices), touches="engine")
            trainer.pending, trainer.weights["a"] = slices, weight

    with planned_worker(tmp_path, engine, trainer, slow=slow, gate=Pressed()) as (compute, gate):
        worker = Worker(compute, gate)
        for change, shown in ((begin, f"turns: {reason}"), (end, IDLE)):
            compute.post("the change", lambda _, change=change: change(worker), touches="states")
            until(lambda shown=shown: compute.status.beat.lanes == shown)


class Pressed(SloGate):
    """Whatever it tracks has no slack."""

    expected = False

    @property
    def expects_clients(self) -> bool:
        return self.expected or bool(self.tracked)

    def least_slack(self) -> float:
        return 0.0


NATIVE = Path("/proc/self/task")


@pytest.mark.parametrize("lanes", ["turns", "beside"])
def test_teams_have_as_many_threads_as_there_are_processors_to_compute_with(tmp_path: Path, lanes: str) -> None:
    """Threads of this process beyond those of Python are those of teams; the first of a team is one of Python's."""
    beyond = lambda: len(list(NATIVE.iterdir())) - threading.active_count()  # noqa: E731
    in_thread(lambda: None)
    before = beyond()

    def no_third_team() -> None:
        """A thread that ends is one of Python's no more a little earlier than it is one of the process."""
        until(lambda: beyond() <= before + 1, "there is more than the compute thread's team of two")

    run_worker(tmp_path, lanes, no_third_team)
