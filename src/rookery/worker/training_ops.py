"""Training operations of a worker: their order, the artifacts and batches they need, the commits they upload.

Promises:

* A policy's operations reach the trainer in order of arrival, each with its batch already pulled; policies do not wait
  for each other.
* An operation whose parent is not held loads the parent by its hash if it is the first one on that, else it is
  ``stale``. Every other question about the state that an operation names is the trainer's.
* A commit is uploaded while computation continues. Before that, its version is handed over to this worker's engine and
  to other workers of the machine (:mod:`rookery.worker.transfer.handed`).
* Where training states fill their share of the memory, operations that need another one wait in order of arrival.
* An operation that fails is answered with one line; it affects no other policy and never ends the process. If the cause
  is this worker's own (its disk or memory is full), the answer is ``lost``: another worker may succeed. If its memory
  never holds the policy's state, the answer is ``too small``.
* The end of the connection ends every operation: the controller sends those that it still wants again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from rookery import protocol
from rookery.errors import count_of, next_state
from rookery.worker.compute import Compute
from rookery.worker.core import WorkerCore
from rookery.worker.failures import failure_category
from rookery.worker.memory import MemoryQueue
from rookery.worker.trainer.base import Trainer
from rookery.worker.trainer.operation_queue import Export, TrainerResult
from rookery.worker.trainer.states import StaleOperation
from rookery.worker.transfer.client import TransferClient
from rookery.worker.transfer.http import is_plain, one_line

log = logging.getLogger("rookery.worker.training_ops")

T = TypeVar("T")

Inputs = tuple[bytes, list[Path]]
"""An encoded batch, and folders of gradients to add to its own."""


SendAnswer = Callable[[protocol.OperationDone], Awaitable[None]]
"""Sends it on the present connection, or drops it if there is none."""

AnnounceVersion = Callable[[str, protocol.AdapterRef, Path], Awaitable[None]]
"""``announce(op, ref, folder)`` has a version that ``op`` made, which is in a private folder of the cache and not
committed yet, ready where it will be used."""

Stage = Literal["preparing", "queued", "computed"]
"""Of an operation here: its inputs are pulled, or its state is loaded, or it waits for its turn; the trainer has it;
the trainer has finished it, and its version is uploaded, or its answer is sent. An ``InitAdapter`` is never queued."""

StageEvent = Literal["queue", "compute"]

STAGES: dict[tuple[Stage, StageEvent], Stage] = {
    ("preparing", "queue"): "queued",
    ("queued", "queue"): "queued",  # again: there was no room for its export
    ("queued", "compute"): "computed",
    ("preparing", "compute"): "preparing",  # a result for an earlier connection
    ("computed", "compute"): "computed",
}
"""The stage that follows each event. Any other event is a mistake of this process."""


@dataclass(eq=False)
class RunningOperation:
    """An operation that has not been answered."""

    op: protocol.TrainingOperation
    task: asyncio.Task[None]
    stage: Stage = "preparing"
    result: asyncio.Future[TrainerResult] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The trainer's."""

    def queue(self) -> asyncio.Future[TrainerResult]:
        """The trainer has it; the future of its result."""
        self._advance("queue")
        return self.result

    def compute(self, result: TrainerResult) -> None:
        """The trainer has finished it. Nothing happens to one that it was not given on this connection."""
        if self._advance("compute") == "queued":
            self.result.set_result(result)

    def _advance(self, event: StageEvent) -> Stage:
        """Enter the stage that follows ``event``; returns the one before."""
        before, self.stage = self.stage, next_state(STAGES, self.stage, event, f"operation {self.op.op}")
        return before


class TrainingOps:
    """Belongs to the I/O thread."""

    def __init__(
        self, compute: Compute, transfers: TransferClient, send: SendAnswer, announce: AnnounceVersion
    ) -> None:
        self._compute = compute
        self._transfers = transfers
        self._send = send
        self._announce = announce
        self._room = MemoryQueue()
        self._turns: dict[str, asyncio.Lock] = {}
        """By policy, held by the operation that is next to reach the trainer; its waiters are served in order of
        arrival."""
        self._running: dict[str, RunningOperation] = {}
        self.failed = 0
        """Operations answered with an error other than ``stale``."""

    # --- from the controller ----------------------------------------------------------------------------------------

    def start(self, op: protocol.TrainingOperation) -> None:
        """Run an operation, in its policy's order, and answer it."""
        running = self._running[op.op] = RunningOperation(op, asyncio.create_task(self._run(op)))

        def finished(_: asyncio.Task[None]) -> None:
            if self._running.get(op.op) is running:
                del self._running[op.op]

        running.task.add_done_callback(finished)

    def mark_committed(self, commit: protocol.VersionCommitted) -> None:
        self._transfers.adopt(commit.ref)

        def mark(core: WorkerCore) -> None:
            core.queue.trainer_of(commit.ref.rank).mark_committed(commit.policy, commit.lease, commit.ref)

        version = commit.ref.version
        self._compute.post("the mark of a commit", mark, touches="queue", policy=commit.policy, version=version)

    def cancel(self, op: str) -> None:
        """Abandon an operation; it is not answered."""
        running = self._running.pop(op, None)
        if running is None:
            return
        running.task.cancel()
        if running.stage == "queued":
            concerns = _log_fields(running.op)
            self._compute.post("the cancellation of an operation", lambda core: core.queue.cancel(op), **concerns)

    def evict(self, policy: str, *, offload: bool = False) -> None:
        """Delete the policy's state and its operations; with ``offload``, the state can be restored."""
        self._turns.pop(policy, None)
        for running in list(self._running.values()):
            trains = not isinstance(running.op, protocol.InitAdapter)
            if trains and running.op.policy == policy and running.stage == "preparing":
                running.task.cancel()
        self._compute.post(
            "the eviction of a training state", lambda core: core.evict_state(policy, offload=offload), policy=policy
        )

    def on_disconnect(self) -> None:
        """End every operation. The next connection has other leases and may train other policies here, so the trainer's
        states are offloaded."""
        policies = list(self._turns)
        for op in list(self._running):
            self.cancel(op)
        for policy in policies:
            self.evict(policy, offload=True)
        self._turns.clear()

    def clear_offloaded(self) -> None:
        """No controller has connected for long: keep no state for it."""
        self._compute.post("the deletion of offloaded states", lambda core: core.clear_offloaded())

    async def drain(self, seconds: float) -> None:
        """Wait for uploads and answers of operations that the trainer has finished."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while leaving := [running.task for running in self._running.values() if running.stage != "queued"]:
                    await asyncio.wait(leaving)

    # --- from the trainer -------------------------------------------------------------------------------------------

    def collect(self, results: list[TrainerResult]) -> None:
        """Take the results of operations that the trainer has finished."""
        self._room.notify()
        for result in results:
            running = self._running.get(result.done.op)
            if running is not None:
                running.compute(result)

    # --- one operation ----------------------------------------------------------------------------------------------

    async def _run(self, op: protocol.TrainingOperation) -> None:
        """Every error is the operation's answer."""
        try:
            if isinstance(op, protocol.InitAdapter):
                await self._init_adapter(op)
            else:
                await self._train(op)
        except StaleOperation as error:
            await self._send(protocol.OperationDone(op=op.op, error=str(error), category="stale"))
        except Exception as error:
            self._on_failed(op, one_line(error), traceback=not is_plain(error))
            category = failure_category(error)
            await self._send(protocol.OperationDone(op=op.op, error=one_line(error), category=category))

    async def _init_adapter(self, op: protocol.InitAdapter) -> None:
        def first(source: Path | None) -> Awaitable[Export]:
            return self._call(op.rank, lambda trainer: trainer.initial_version(op, source))

        if op.source is None:
            export = await self._room.retry(lambda: first(None))
        else:
            async with self._transfers.pulled(op.source) as folder:
                export = await self._room.retry(lambda: first(folder))
        await self._commit(op, export, {})

    async def _train(self, op: protocol.StateOperation) -> None:
        async with contextlib.AsyncExitStack() as pulled:
            if isinstance(op, protocol.OptimStep):
                result = await self._submit(op, None)
            else:
                inputs = asyncio.create_task(self._fetch(op, pulled))
                inputs.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may never be awaited
                try:
                    result = await self._submit(op, inputs)
                finally:
                    inputs.cancel()
            done, export = await result
        if op.is_share:
            self.evict(op.policy)  # the policy trains on another worker
        if done.error:
            self._on_failed(op, done.error)
        if export is not None:
            await self._commit(op, export, done.metrics)
        else:
            await self._send(done)

    async def _fetch(self, op: protocol.ForwardBackward, pulled: contextlib.AsyncExitStack) -> Inputs:
        """The operation's encoded batch, and the folders of its gradients, pinned until ``pulled`` is closed."""
        batch = await self._transfers.fetch_batch(op.batch_ticket)
        return batch, [await pulled.enter_async_context(self._transfers.pulled(ref)) for ref in op.gradients]

    async def _submit(
        self, op: protocol.StateOperation, inputs: asyncio.Task[Inputs] | None
    ) -> asyncio.Future[TrainerResult]:
        """Queue ``op`` in the trainer in its turn; the future of its result."""
        async with self._turns.setdefault(op.policy, asyncio.Lock()):
            await self._ensure_held(op)
            if isinstance(op, protocol.OptimStep):
                return await self._room.retry(lambda: self._hand_over(op, lambda trainer: trainer.optim_step(op)))
            assert inputs is not None
            if op.reference is not None:
                await self._ensure_reference(op.policy, op.reference)
            content, gradients = await inputs
            batch = protocol.decode(protocol.batches, content)
            return await self._hand_over(op, lambda trainer: trainer.forward_backward(op, batch, gradients))

    async def _ensure_held(self, op: protocol.StateOperation) -> None:
        """Have the trainer hold the version and steps that ``op`` names. Raises :class:`StaleOperation`."""
        parent = op.parent
        state = op.policy, op.lease, parent.hash, op.steps
        if await self._call_soon(parent.rank, lambda trainer: trainer.holds(*state)):
            return
        if op.steps or op.operations:
            raise StaleOperation(
                f"policy {op.policy} is not held here at {parent.hash[:12]} + {count_of(op.steps, 'step')}"
            )
        load = self._room.run
        restore: Callable[[Trainer], bool] = lambda trainer: trainer.restore(op.policy, op.lease, parent)  # noqa: E731
        if not await load(lambda: self._call(parent.rank, restore)):
            whole = not op.is_share
            async with self._transfers.pulled(parent, state=whole) as folder:

                def load_parent(trainer: Trainer) -> None:
                    trainer.load(op.policy, op.lease, parent, folder, optimizer=whole)

                await load(lambda: self._call(parent.rank, load_parent))

    async def _ensure_reference(self, policy: str, reference: protocol.AdapterRef) -> None:
        """Have the trainer keep the version that the policy's KL penalties compare with."""
        rank = reference.rank
        if await self._call_soon(rank, lambda trainer: trainer.has_reference(policy, reference.hash)):
            return
        async with self._transfers.pulled(reference) as folder:
            load: Callable[[Trainer], None] = lambda trainer: trainer.load_reference(policy, reference, folder)  # noqa: E731
            await self._room.run(lambda: self._call(rank, load))

    async def _hand_over(
        self, op: protocol.StateOperation, enqueue: Callable[[Trainer], None]
    ) -> asyncio.Future[TrainerResult]:
        result = self._running[op.op].queue()
        await asyncio.shield(self._call_soon(op.parent.rank, enqueue))  # its cancellation is passed on to the trainer
        return result

    async def _commit(self, op: protocol.TrainingOperation, export: Export, metrics: dict[str, float]) -> None:
        if isinstance(op, protocol.ForwardBackward):  # a gradient, which other trainers read
            manifest = await self._transfers.upload(op.upload, export.write)
        else:

            def staged(digest: str, folder: Path) -> Awaitable[None]:
                return self._announce(op.op, protocol.made_version(op, digest), folder)

            manifest = await self._transfers.upload(op.upload, export.write, staged)
        await self._send(protocol.OperationDone(op=op.op, metrics=metrics, manifest=manifest))

    def _on_failed(self, op: protocol.TrainingOperation, error: str, *, traceback: bool = False) -> None:
        self.failed += 1
        extra = _log_fields(op)
        log.warning("operation %s of policy %s failed: %s", op.op, op.policy, error, exc_info=traceback, extra=extra)

    async def _call_soon(self, rank: int, function: Callable[[Trainer], T]) -> T:
        """:meth:`_call` of what need not wait for the end of a training slice."""
        return await self._compute.call(lambda core: function(core.queue.trainer_of(rank)), touches="queue")

    async def _call(self, rank: int, function: Callable[[Trainer], T]) -> T:
        """Call a method of the trainer of policies of this ``rank``."""
        return await self._compute.call(lambda core: function(core.queue.trainer_of(rank)))


def _log_fields(op: protocol.TrainingOperation) -> dict[str, Any]:
    """The fields of the log that name what the operation is for."""
    if isinstance(op, protocol.InitAdapter):
        return {"policy": op.policy}
    return {"policy": op.policy, "tenant": op.tenant, "version": op.parent.version}
