"""Training operations of a fake worker: they take the time that transfers and computing take, and fail at the hooks."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Coroutine
from typing import Any, Literal, Protocol

import msgspec

from rookery import protocol
from rookery.errors import RookeryError
from rookery.simulation.fakes.compute import FakeCompute
from rookery.simulation.fakes.connection import TicketRoutes
from rookery.simulation.fakes.faults import FaultyProcess, Phase
from rookery.simulation.fakes.trainer import (
    ADAPTER,
    CONFIG,
    GRADIENT,
    FakeOperationResult,
    FakeTrainer,
    stale,
)
from rookery.spec.machine import Machine


class TrainingProcess(FaultyProcess, Protocol):
    """The part of a fake worker that its training operations use."""

    trainer: FakeTrainer
    compute: FakeCompute
    machine: Machine
    tickets: TicketRoutes
    pulled_bytes: int
    handed: set[str]

    def adopt(self, digest: str) -> None: ...

    async def send(self, message: protocol.EpochMessage) -> bool: ...

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]: ...


UPLOAD_ATTEMPTS = 3


class FakeTrainingOps:
    """Carries out an operation in four parts: fetch its batch and state, queue it, upload its artifact, reply. A
    policy's operations keep their order; policies do not wait for each other."""

    def __init__(self, worker: TrainingProcess) -> None:
        self.trainer = worker.trainer
        self._worker = worker
        self._compute = worker.compute
        self._machine = worker.machine
        self._tickets = worker.tickets
        self._faults = worker.faults
        self._policies: dict[str, tuple[asyncio.Queue[Any], asyncio.Task[None]]] = {}
        """Each policy's operations in order, and the task that prepares them."""
        self._cancelled: set[str] = set()

    def handle(self, message: Any) -> None:
        """Act on a message about training."""
        match message:
            case protocol.ForwardBackward() | protocol.OptimStep() | protocol.VersionCommitted():
                self._enqueue(message)
            case protocol.InitAdapter():
                self._worker.spawn(self._init_adapter(message))
            case protocol.CancelOperation():
                if not self._compute.cancel(message.op):
                    self._cancelled.add(message.op)

    def disconnected(self) -> None:
        """Drop every operation: the connection that asked for them ended."""
        for _, runner in self._policies.values():
            runner.cancel()
        self._policies.clear()
        self._compute.clear()

    def evict(self, policy: str) -> None:
        """Delete the policy's state, and its operations that are not queued yet."""
        self.trainer.evict(policy)
        if (operations := self._policies.pop(policy, None)) is not None:
            operations[1].cancel()

    def _enqueue(self, message: protocol.StateOperation | protocol.VersionCommitted) -> None:
        """Put ``message`` behind the earlier ones of its policy."""
        if message.policy not in self._policies:
            queue: asyncio.Queue[Any] = asyncio.Queue()
            self._policies[message.policy] = queue, self._worker.spawn(self._prepare_all(queue))
        self._policies[message.policy][0].put_nowait(message)

    async def _prepare_all(self, queue: asyncio.Queue[Any]) -> None:
        while True:
            message = await queue.get()
            if isinstance(message, protocol.VersionCommitted):
                await self._die_in("committed")
                self._worker.adopt(message.ref.hash)
                self.trainer.committed(message)
            else:
                await self._prepare(message)

    async def _prepare(self, op: protocol.StateOperation) -> None:
        """Fetch the operation's batch and state, and queue it."""
        await self._die_in("begin")
        batch: protocol.TrainingBatch | None = None
        gradients: list[bytes] = []
        if isinstance(op, protocol.ForwardBackward):
            content = self._tickets.open_batch(op.batch_ticket)
            seconds = self._machine.latency + len(content or b"") / self._machine.download
            await asyncio.sleep(self._faults.delay("batch", seconds))
            if content is None:
                await self._reject(op, "the batch is not available", "lost")
                return
            batch = protocol.decode(protocol.batches, content)
            for ref in op.gradients:
                await asyncio.sleep(self._faults.delay("pull", self._machine.pull()))
                try:
                    gradients.append(self._read(ref.hash, GRADIENT))
                except RookeryError as error:
                    await self._reject(op, str(error), "lost")
                    return
        if op.op in self._cancelled:
            self._cancelled.remove(op.op)
        elif self.trainer.holds(op, self._compute.steps_ahead(op.policy)) or (
            self.trainer.may_load(op) and await self._load_parent(op)
        ):
            self._compute.queue(op, lambda: self.trainer.apply(op, batch, gradients), batch)
        else:
            await self._reject(op, f"policy {op.policy} is not held in that state")

    async def _reject(
        self, op: protocol.StateOperation, reason: str, category: Literal["stale", "lost"] = "stale"
    ) -> None:
        await self.answer(FakeOperationResult(msgspec.structs.replace(stale(op, reason), category=category)))

    async def _load_parent(self, op: protocol.StateOperation) -> bool:
        """Whether the trainer has loaded the version that ``op`` names; not one whose artifact is gone."""
        await asyncio.sleep(self._faults.delay("pull", self._machine.pull(state=True)))
        self._worker.pulled_bytes += self._machine.adapter_bytes + self._machine.state_bytes
        try:
            files = {name: self._read(op.parent.hash, name) for name in (ADAPTER, CONFIG)}
        except RookeryError:
            return False
        self.trainer.load(op.policy, op.lease, op.parent.hash, files)
        return True

    def _read(self, digest: str, name: str) -> bytes:
        return self._tickets.artifacts.path(digest, name).read_bytes()

    async def _init_adapter(self, op: protocol.InitAdapter) -> None:
        await self._die_in("begin")
        source = self._read(op.source.hash, ADAPTER) if op.source is not None else None
        self._compute.queue(op, lambda: self.trainer.init_adapter(op, source))

    async def answer(self, result: FakeOperationResult) -> None:
        """Upload the artifact of an operation that has one, and reply."""
        reply = result.reply
        if result.upload is not None:
            if ADAPTER in result.upload:
                staged = protocol.manifest_of(_shard(*file) for file in result.upload.items()).hash
                await self._worker.send(protocol.VersionStaged(op=reply.op, hash=staged, folder=f".1.{staged[:32]}"))
            share = self._machine.push() / len(result.upload)
            written = [await self._upload(result.ticket, name, file, share) for name, file in result.upload.items()]
            shards = [shard for shard in written if shard is not None]
            if len(shards) < len(written):
                reply = protocol.OperationDone(op=reply.op, error="the upload was rejected", category="lost")
            else:
                reply = msgspec.structs.replace(reply, manifest=protocol.manifest_of(shards))
                if ADAPTER in result.upload:
                    self._worker.handed.add(staged)
        await self._die_in("reply")
        await self._worker.send(reply)
        await self._die_in("replied")

    async def _upload(self, ticket: str, name: str, content: bytes, seconds: float) -> protocol.Shard | None:
        """The file's shard, or None where the service rejected it."""
        for attempt in range(UPLOAD_ATTEMPTS):
            await self._die_in("upload")
            await asyncio.sleep(self._faults.delay("upload", seconds))
            if attempt + 1 == UPLOAD_ATTEMPTS or not self._faults.upload_fails():
                break
        arrives = self._faults.corrupt(name, content)
        if (later := self._faults.repeats_upload()) is not None:
            asyncio.get_running_loop().call_later(later, self._write, ticket, name, arrives)
        if self._write(ticket, name, arrives) is None:
            return None
        return _shard(name, content)

    def _write(self, ticket: str, name: str, content: bytes) -> protocol.Shard | None:
        try:
            staging = self._tickets.staging(ticket)
            return staging.write(name, [content]) if staging is not None else None
        except RookeryError:
            return None

    async def _die_in(self, phase: Phase) -> None:
        """Return unless the process dies in this phase of the operation."""
        if self._faults.dies(self._worker, phase):
            await asyncio.Event().wait()  # cancelled with the process


def _shard(name: str, content: bytes) -> protocol.Shard:
    return protocol.Shard(name=name, size=len(content), sha256=hashlib.sha256(content).hexdigest())
