"""The cost of the shipped worker in a simulation: the same run under the virtual clock, once with the fake worker of
:mod:`rookery.simulation.fakes`, once with the shipped :class:`~rookery.worker.generation.GenerationManager` and
:class:`~rookery.worker.training_ops.TrainingOps` on the same fake engine and fake trainer.

``python -m benchmarks.scale.shipped_worker [--workers N ...] [--repeats N]``. The controller, the jobs, the environment
hosts and the virtual seconds are equal. An event is a frame between the controller and a peer; a frame of tokens counts
as many events as it has requests. The time is that of the process's one thread, whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tests.chaos.machines
from benchmarks.lib.harness import Result, command
from benchmarks.scale.controller_scaling import QUIET, Quiet, scaling_options

from rookery import protocol
from rookery.simulation.clock import VirtualLoop
from rookery.simulation.fakes.service import MEMORY
from rookery.simulation.fakes.trainer import ADAPTER, CONFIG, GRADIENT, FakeOperationResult
from rookery.simulation.fakes.worker import HOLD_SECONDS, FakeWorker
from rookery.worker.generation import GenerationManager
from rookery.worker.trainer.operation_queue import TrainerResult
from rookery.worker.training_ops import TrainingOps

WORKERS = (100, 1000)
WORKERS_PER_JOB = 10
MOST_RATIO = 3.0
"""Beyond it, simulations stay with the fakes."""
EXPIRE_SECONDS = 5.0
"""Between two looks for requests that nobody claims."""


@dataclass
class Files:
    """An export: the files of a version or of a gradient."""

    content: dict[str, bytes]

    def write(self, folder: Path) -> None:
        raise NotImplementedError("the transfers of this simulation take the content")


@dataclass
class StateName:
    """The state that an operation names."""

    policy: str
    lease: int
    parent: protocol.AdapterRef
    steps: int
    operations: int = 0


class FakeCore:
    """The fake engine and trainer behind the methods that the shipped operations call in the compute thread."""

    def __init__(self, worker: ShippedWorker) -> None:
        self._worker = worker
        self.engine = self.queue = self

    def submit(self, generate: protocol.Generate, folder: Path | None, arrived: float, grammar: object = None) -> bool:
        self._worker.engine.submit(generate)
        self._worker.compute.wake()
        return True

    def switch(self, key: str, ref: protocol.AdapterRef, folder: Path | None, *, recompute: bool) -> bool:
        assignment = key.rpartition("/")[2]
        self._worker.compute.switch(
            protocol.SwitchAdapter(request=key, assignment=assignment, adapter=ref, recompute=recompute)
        )
        return True

    def abort(self, key: str) -> None:
        self._worker.compute.release(protocol.Abort(request=key, assignment=key.rpartition("/")[2], resume=True))

    def trainer_of(self, rank: int) -> FakeCore:
        return self

    def holds(self, policy: str, lease: int, parent_hash: str, steps: int) -> bool:
        ref = protocol.AdapterRef(policy=policy, version=0, hash=parent_hash, rank=1, alpha=1.0)
        named: Any = StateName(policy, lease, ref, steps)
        return self._worker.trainer.holds(named, self._worker.compute.steps_ahead(policy))

    def restore(self, policy: str, lease: int, parent: protocol.AdapterRef) -> bool:
        return False

    def load(
        self, policy: str, lease: int, parent: protocol.AdapterRef, folder: Path, *, optimizer: bool = True
    ) -> None:
        files = {name: (folder / name).read_bytes() for name in (ADAPTER, CONFIG)}
        self._worker.trainer.load(policy, lease, parent.hash, files)

    def forward_backward(
        self, op: protocol.ForwardBackward, batch: protocol.TrainingBatch, gradients: list[Path]
    ) -> None:
        others = [(folder / GRADIENT).read_bytes() for folder in gradients]
        self._worker.compute.queue(op, lambda: self._worker.trainer.apply(op, batch, others), batch)

    def optim_step(self, op: protocol.OptimStep) -> None:
        self._worker.compute.queue(op, lambda: self._worker.trainer.apply(op))

    def initial_version(self, op: protocol.InitAdapter, source: Path | None) -> Files:
        weights = (source / ADAPTER).read_bytes() if source is not None else None
        return Files(self._worker.trainer.init_adapter(op, weights).upload or {})

    def mark_committed(self, policy: str, lease: int, ref: protocol.AdapterRef) -> None:
        self._worker.trainer.committed(protocol.VersionCommitted(policy=policy, lease=lease, ref=ref))

    def cancel(self, op: str) -> None:
        self._worker.compute.cancel(op)

    def evict_state(self, policy: str, *, offload: bool) -> None:
        self._worker.trainer.evict(policy)


@dataclass
class Status:
    adapters: list[str]


class InlineCompute:
    """The compute thread's methods; each function runs at once."""

    def __init__(self, worker: ShippedWorker) -> None:
        self._worker, self._core = worker, FakeCore(worker)

    @property
    def status(self) -> Status:
        return Status(self._worker.cached_adapters)

    async def call(self, function: Callable[[Any], Any], *, touches: str = "states") -> Any:
        await asyncio.sleep(0)  # a thread's answer comes with the loop's next round
        return function(self._core)

    def post(self, name: str, function: Callable[[Any], Any], *, touches: str = "states", **concerns: object) -> None:
        function(self._core)


class FakeTransfers:
    """Transfers that take the machine's time, as those of the fake worker."""

    def __init__(self, worker: ShippedWorker) -> None:
        self._worker = worker

    @contextlib.asynccontextmanager
    async def pulled(self, ref: protocol.AdapterRef, *, state: bool = False) -> AsyncIterator[Path]:
        worker = self._worker
        if state:
            await asyncio.sleep(worker.faults.delay("pull", worker.machine.pull(state=True)))
        else:
            await asyncio.shield(worker.pull(ref))
        manifest = worker.tickets.artifacts.open(ref.hash)
        yield worker.tickets.artifacts.path(ref.hash, manifest.shards[0].name).parent

    async def fetch_batch(self, ticket: str) -> bytes:
        worker, content = self._worker, self._worker.tickets.open_batch(ticket)
        assert content is not None
        seconds = worker.machine.latency + len(content) / worker.machine.download
        await asyncio.sleep(worker.faults.delay("batch", seconds))
        return content

    async def upload(self, ticket: str, write: Any, staged: object = None) -> protocol.Manifest:
        worker, shards = self._worker, []
        files: dict[str, bytes] = write.__self__.content
        for name, content in files.items():
            await asyncio.sleep(worker.faults.delay("upload", worker.machine.push() / len(files)))
            staging = worker.tickets.staging(ticket)
            assert staging is not None
            staging.write(name, [content])
            shards.append(protocol.Shard(name=name, size=len(content), sha256=hashlib.sha256(content).hexdigest()))
        return protocol.manifest_of(shards)

    def adopt(self, ref: protocol.AdapterRef) -> None:
        pass


class ShippedWorker(FakeWorker):
    """The connection, the loading and the computing of the fake worker; requests and training operations are
    the shipped ones."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        compute: Any = InlineCompute(self)
        transfers: Any = FakeTransfers(self)
        self.generation = GenerationManager(compute, transfers, lambda urgent: None)
        self.operations = TrainingOps(compute, transfers, self.send_answer, self.announce)
        self._expired = 0.0

    def pull(self, ref: protocol.AdapterRef) -> asyncio.Future[bool]:
        return self._pull(ref)

    async def send_answer(self, done: protocol.OperationDone) -> None:
        await self.send(done)

    async def announce(self, op: str, ref: protocol.AdapterRef, folder: Path) -> None:
        pass

    def _handle(self, message: Any) -> None:
        match message:
            case protocol.Generate():
                self.generation.generate(message)
            case protocol.Abort():
                self.generation.abort(message)
            case protocol.SwitchAdapter():
                self.generation.switch(message)
            case protocol.ForwardBackward() | protocol.OptimStep() | protocol.InitAdapter():
                self.operations.start(message)
            case protocol.VersionCommitted():
                self.operations.mark_committed(message)
            case protocol.CancelOperation():
                self.operations.cancel(message.op)
            case protocol.EvictArtifacts(policy=policy) if policy:
                self.operations.evict(policy, offload=message.offload)
            case _:
                super()._handle(message)

    def _answer(self, result: FakeOperationResult) -> None:
        reply = result.reply
        export = Files(result.upload) if result.upload is not None else None
        self.operations.collect([TrainerResult(reply, export)])  # type: ignore[arg-type]

    async def _flush(self) -> None:
        now = self._loop.time()
        if self.connection is None:
            return
        self.generation.collect(self.engine.drain(now))
        while chunks := self.generation.take(now):
            self.sent += sum(len(chunk.tokens) for chunk in chunks)
            await self.send(protocol.Output(chunks=chunks))
        if now - self._expired > EXPIRE_SECONDS:
            self._expired = now
            self.generation.expire(now - HOLD_SECONDS)


def measure(kind: type[FakeWorker], workers: int) -> dict[str, Any]:
    """One run with workers of this kind: its events, versions, and seconds of the processor."""
    before, tests.chaos.machines.FakeWorker = tests.chaos.machines.FakeWorker, kind
    plan = replace(QUIET, workers=workers, jobs=max(1, workers // WORKERS_PER_JOB))
    try:
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder, asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(Quiet(plan, Path(folder), time.monotonic()).measure())
    finally:
        tests.chaos.machines.FakeWorker = before


def main() -> None:
    options = scaling_options(__doc__, WORKERS)
    result = Result("shipped_worker", "The shipped worker under the virtual clock", command(), simulated=True)
    ratios = {}
    for workers in options.workers:
        runs = [
            {kind.__name__: measure(kind, workers) for kind in (FakeWorker, ShippedWorker)}
            for _ in range(options.repeats)
        ]
        for name in ("FakeWorker", "ShippedWorker"):
            rates = [run[name]["events"] / run[name]["thread_seconds"] for run in runs]
            one = runs[0][name]
            note = f"{one['events']:,} events, {one['versions']} versions in {one['seconds']:.0f} virtual seconds"
            result.add(f"{workers} workers: {name}", rates, "events/s", note)
        per_event = [
            statistics.median(run[name]["thread_seconds"] / run[name]["events"] for run in runs)
            for name in ("ShippedWorker", "FakeWorker")
        ]
        ratios[workers] = per_event[0] / per_event[1]
    most = max(options.workers)
    result.judge(
        f"time of a simulated event with {most} shipped workers, at most {MOST_RATIO:g} times that with fakes",
        ", ".join(f"{workers} workers: {ratio:.2f}" for workers, ratio in ratios.items()),
        ratios[most] <= MOST_RATIO,
    )
    result.notes.append(
        "The shipped part is the I/O side: requests, token logs, training operations. The compute thread has no place"
        " under a virtual clock, so both run the fake engine, trainer and time slices."
    )
    result.save()


if __name__ == "__main__":
    main()
