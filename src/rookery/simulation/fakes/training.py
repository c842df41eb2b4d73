"""Training operations of a fake worker: fetches what an operation needs, queues it, uploads what it made, and replies.

* A policy's operations keep their order; policies do not wait for each other.
* After a part of a step was lost, the rest of the step is answered ``stale``.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Literal

import msgspec

from rookery import protocol
from rookery.errors import RookeryError
from rookery.protocol.connection import ConnectionClosed
from rookery.simulation.fakes.compute import FakeCompute
from rookery.simulation.fakes.faults import Faults, Phase, TicketRoutes
from rookery.simulation.fakes.trainer import ADAPTER, CONFIG, FakeOperationResult, stale
from rookery.simulation.profiles import Machine

UPLOAD_ATTEMPTS = 3


class FakeTrainingOps:
    def __init__(
        self,
        compute: FakeCompute,
        machine: Machine,
        tickets: TicketRoutes,
        faults: Faults,
        *,
        spawn: Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]],
        send: Callable[[protocol.Message], Awaitable[None]],
        wait_readable: Callable[[protocol.AdapterRef], Awaitable[None]],
        dies: Callable[[Phase], bool],
    ) -> None:
        """``spawn`` starts a task of the worker; ``send`` sends a frame, or raises ``ConnectionClosed``;
        ``wait_readable`` waits for a ticket that opens an artifact; ``dies``: whether the process dies in a phase."""
        self.trainer = compute.trainer
        self.pulled_bytes = 0
        """Of states."""
        self._compute = compute
        self._machine = machine
        self._tickets = tickets
        self._faults = faults
        self._spawn = spawn
        self._send = send
        self._wait_readable = wait_readable
        self._dies = dies
        self._policies: dict[str, tuple[asyncio.Queue[Any], asyncio.Task[None]]] = {}
        """Each policy's operations in order, and the task that prepares them."""
        self._cancelled: set[str] = set()
        self._broken: set[str] = set()
        """Policies of which a part of the present step was lost."""

    def handle(self, message: Any) -> None:
        """Act on a message about training."""
        match message:
            case protocol.ForwardBackward() | protocol.OptimStep() | protocol.VersionCommitted():
                self._enqueue(message)
            case protocol.InitAdapter():
                self._spawn(self._init_adapter(message))
            case protocol.CancelOperation():
                if not self._compute.cancel(message.op):
                    self._cancelled.add(message.op)

    def disconnected(self) -> None:
        """Drop every operation: the connection that asked for them ended."""
        for policy, (_, runner) in self._policies.items():
            runner.cancel()
            self._broken.add(policy)
        self._policies.clear()
        self._compute.clear()

    def evict(self, policy: str) -> None:
        self.trainer.evict(policy)
        self._broken.discard(policy)
        if (operations := self._policies.pop(policy, None)) is not None:
            operations[1].cancel()

    def _enqueue(self, message: protocol.ForwardBackward | protocol.OptimStep | protocol.VersionCommitted) -> None:
        """A policy's operations keep their order; policies do not wait for each other."""
        if message.policy not in self._policies:
            queue: asyncio.Queue[Any] = asyncio.Queue()
            self._policies[message.policy] = queue, self._spawn(self._prepare_all(queue))
        self._policies[message.policy][0].put_nowait(message)

    async def _prepare_all(self, queue: asyncio.Queue[Any]) -> None:
        while True:
            message = await queue.get()
            if isinstance(message, protocol.VersionCommitted):
                await self._die_in("committed")
                self.trainer.committed(message)
            else:
                await self._prepare(message)

    async def _prepare(self, op: protocol.ForwardBackward | protocol.OptimStep) -> None:
        """Fetch the operation's batch and state, and queue it."""
        await self._die_in("begin")
        batch: protocol.TrainingBatch | None = None
        if isinstance(op, protocol.ForwardBackward):
            if op.zero_grad:
                self._broken.discard(op.policy)
            content = self._tickets.open_batch(op.batch_ticket)
            seconds = self._machine.latency + len(content or b"") / self._machine.download
            await asyncio.sleep(self._faults.delay("batch", seconds))
            if content is None:
                await self._reject(op, "the batch is not available", "lost")
                return
            batch = protocol.decode(protocol.batches, content)
        if op.op in self._cancelled:
            self._cancelled.remove(op.op)
            self._broken.add(op.policy)
        elif op.policy in self._broken:
            await self._reject(op, "a part of this step did not arrive")
        elif self.trainer.holds(op, self._compute.steps_ahead(op.policy)) or (
            self.trainer.may_load(op) and await self._load_parent(op)
        ):
            self._compute.queue(op, lambda: self.trainer.apply(op, batch), batch)
        else:
            await self._reject(op, f"policy {op.policy} is not held in that state")

    async def _reject(
        self,
        op: protocol.ForwardBackward | protocol.OptimStep,
        reason: str,
        category: Literal["stale", "lost"] = "stale",
    ) -> None:
        self._broken.add(op.policy)
        await self.answer(FakeOperationResult(msgspec.structs.replace(stale(op, reason), category=category)))

    async def _load_parent(self, op: protocol.ForwardBackward | protocol.OptimStep) -> bool:
        await self._wait_readable(op.parent)
        await asyncio.sleep(self._faults.delay("pull", self._machine.pull(state=True)))
        self.pulled_bytes += self._machine.adapter_bytes + self._machine.state_bytes
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
        source = None
        if op.source is not None:
            await self._wait_readable(op.source)
            source = self._read(op.source.hash, ADAPTER)
        self._compute.queue(op, lambda: self.trainer.init_adapter(op, source))

    async def answer(self, result: FakeOperationResult) -> None:
        """Upload what the operation made, and reply."""
        reply = result.reply
        if result.upload is not None:
            share = self._machine.push() / len(result.upload)
            written = [
                await self._upload(result.ticket, name, content, share) for name, content in result.upload.items()
            ]
            shards = [shard for shard in written if shard is not None]
            if len(shards) < len(written):
                reply = protocol.OperationDone(epoch=0, op=reply.op, error="the upload was rejected", category="lost")
            else:
                reply = msgspec.structs.replace(reply, manifest=protocol.manifest_of(shards))
        await self._die_in("reply")
        with suppress(ConnectionClosed):
            await self._send(reply)
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
        return protocol.Shard(name=name, size=len(content), sha256=hashlib.sha256(content).hexdigest())

    def _write(self, ticket: str, name: str, content: bytes) -> protocol.Shard | None:
        try:
            staging = self._tickets.staging(ticket)
            return staging.write(name, [content]) if staging is not None else None
        except RookeryError:
            return None

    async def _die_in(self, phase: Phase) -> None:
        if self._dies(phase):
            await asyncio.Event().wait()  # cancelled with the process
