"""Training operations of a worker: their order, what they need fetched, what they leave uploaded.

Promises:

* A policy's operations reach the trainer in the order in which they came, each with its batch already here; policies do
  not wait for each other.
* A gradient that never reached the trainer is not stepped over: what follows it on that policy answers ``stale`` until
  an operation begins a step anew (``fresh``). For those that reached it, the trainer sees to the same.
* An operation whose parent is not held loads the parent by its hash if it is the first of its step, else ``stale``.
* A commit is uploaded while computing goes on.
* An operation that fails answers with one line; it touches no other policy and never ends the process. Where it is this
  worker's own trouble (its disk or its memory is full), the answer is ``lost``: another worker may do better.
* The link's end ends every operation: the controller sends anew what it still wants.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeVar

import torch

from rookery import protocol
from rookery.worker.compute import Compute, WorkerCore
from rookery.worker.trainer.native.optim import Export
from rookery.worker.trainer.native.trainer import TrainerResult
from rookery.worker.transfer.client import TransferClient
from rookery.worker.transfer.http import CorruptArtifact, TransferFailed, errno_of, is_plain, one_line

log = logging.getLogger("rookery.worker.training_ops")

T = TypeVar("T")
Operation = protocol.ForwardBackward | protocol.OptimStep | protocol.InitAdapter
Queued = protocol.ForwardBackward | protocol.OptimStep | protocol.VersionCommitted


class Answer(Protocol):
    """Sends a ``Done`` on the present connection, or drops it when there is none."""

    def __call__(
        self,
        op: str,
        *,
        error: str = "",
        category: Literal["", "stale", "failed", "lost"] = "",
        metrics: dict[str, float] = ...,
        logprobs: bytes = b"",
        manifest: protocol.Manifest | None = None,
    ) -> Awaitable[None]: ...


class StaleState(Exception):
    """The state that the operation builds on is not here."""


@dataclass(eq=False)
class PolicyQueue:
    """One policy's operations in order."""

    queue: asyncio.Queue[Queued] = field(default_factory=asyncio.Queue)
    batches: dict[str, asyncio.Task[bytes] | None] = field(default_factory=dict)
    """Operations that the trainer does not have yet, with their batch, which is fetched from the moment of arrival."""
    runner: asyncio.Task[None] | None = None


class TrainingOps:
    """Belongs to the I/O thread."""

    def __init__(self, compute: Compute, transfers: TransferClient, answer: Answer) -> None:
        self._compute = compute
        self._transfers = transfers
        self._answer = answer
        self._chains: dict[str, PolicyQueue] = {}
        self._broken: dict[str, str] = {}  # policy → why a part of its gradient did not reach the trainer
        self._tasks: dict[str, asyncio.Task[None]] = {}  # operation → who sees to it now
        self._expected: dict[str, asyncio.Future[TrainerResult]] = {}
        self._policies: set[str] = set()
        self.failed = 0
        """Operations answered with an error other than ``stale``."""

    # --- from the controller ----------------------------------------------------------------------------------------

    def accept(self, message: Queued) -> None:
        """Take an operation, or the news of a commit, in its policy's order."""
        chain = self._chains.get(message.policy)
        if chain is None:
            self._policies.add(message.policy)
            chain = self._chains[message.policy] = PolicyQueue()
            chain.runner = asyncio.create_task(self._run(chain))
        if isinstance(message, protocol.ForwardBackward):
            batch = asyncio.create_task(self._transfers.fetch_batch(message.batch_ticket))
            batch.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody will ask
            chain.batches[message.op] = batch
        elif isinstance(message, protocol.OptimStep):
            chain.batches[message.op] = None
        chain.queue.put_nowait(message)

    def initialise(self, op: protocol.InitAdapter) -> None:
        """Make version 0 of a policy."""
        self._spawn(op, self._initialise(op))

    def cancel(self, op: str) -> None:
        """Give an operation up; it is not answered."""
        task = self._tasks.pop(op, None)
        if task is not None:
            task.cancel()
        for policy, chain in self._chains.items():
            if op in chain.batches:
                if (batch := chain.batches.pop(op)) is not None:
                    batch.cancel()
                self._broken[policy] = f"operation {op} of this step was cancelled"
        if (future := self._expected.pop(op, None)) is not None:
            future.cancel()
            self._compute.call(lambda core: core.trainer.cancel(op))

    def forget(self, policy: str, *, aside: bool = False) -> None:
        """Drop the policy's state and whatever is still to be done for it; ``aside``: the state may come back."""
        chain = self._chains.pop(policy, None)
        if chain is not None:
            for news in self._end(chain):  # what is put aside is known by its version
                self._committed(news)
        self._policies.discard(policy)
        self._broken.pop(policy, None)
        if aside:
            self._compute.call(partial(_rest, policy=policy))
        else:
            self._compute.call(lambda core: core.trainer.evict(policy))

    def drop(self) -> None:
        """The link is over: end every operation. Whoever comes back for a policy has another lease, and many never
        come back to this worker, so what the trainer holds rests."""
        for policy, chain in self._chains.items():
            for news in self._end(chain):
                self._committed(news)
            self._broken[policy] = "the connection was lost in the middle of this step"
        self._chains.clear()
        for op in [*self._tasks, *self._expected]:
            self.cancel(op)
        for policy in self._policies:
            self._compute.call(partial(_rest, policy=policy))
        self._policies.clear()

    def forget_all(self) -> None:
        """No controller has been here for long: keep nothing for it."""
        for policy in [*self._policies]:
            self.forget(policy)
        self._compute.call(lambda core: core.trainer.cache.clear())

    async def settle(self, seconds: float) -> None:
        """Let results that wait to be uploaded or answered come to their end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while leaving := [task for op, task in self._tasks.items() if op not in self._expected]:
                    await asyncio.wait(leaving)

    # --- from the trainer -------------------------------------------------------------------------------------------

    def collect(self, finished: list[TrainerResult]) -> None:
        """Operations that the trainer ended."""
        for result in finished:
            future = self._expected.pop(result.op, None)
            if future is not None and not future.done():
                future.set_result(result)

    # --- one policy's operations, in order --------------------------------------------------------------------------

    async def _run(self, chain: PolicyQueue) -> None:
        while True:
            message = await chain.queue.get()
            if isinstance(message, protocol.VersionCommitted):
                self._committed(message)
            elif message.op in chain.batches:  # else cancelled meanwhile
                batch = chain.batches[message.op]
                if isinstance(message, protocol.OptimStep):
                    work = self._step(message)
                else:
                    assert batch is not None
                    work = self._forward(message, batch)
                await asyncio.wait({self._spawn(message, work)})
                chain.batches.pop(message.op, None)

    def _committed(self, news: protocol.VersionCommitted) -> None:
        """Nobody waits for it: a runner that ends meanwhile does not take the news back."""
        self._compute.call(lambda core: core.trainer.mark_committed(news.policy, news.lease, news.ref))

    async def _forward(self, op: protocol.ForwardBackward, batch: asyncio.Task[bytes]) -> None:
        """Everything up to the moment at which the trainer has it in its queue."""
        if op.zero_grad:
            self._broken.pop(op.policy, None)
        try:
            self._whole(op)
            await self._hold(op)
            content = protocol.decode(protocol.batches, await batch)
        except BaseException as error:
            if not op.forward_only:
                self._broken[op.policy] = f"operation {op.op} of this step did not succeed: {one_line(error)}"
            raise
        await self._hand_over(op, lambda core: core.trainer.forward_backward(op, content))

    async def _step(self, op: protocol.OptimStep) -> None:
        self._whole(op)
        await self._hold(op)
        await self._hand_over(op, lambda core: core.trainer.optim_step(op))

    async def _hand_over(
        self, op: protocol.ForwardBackward | protocol.OptimStep, queue: Callable[[WorkerCore], None]
    ) -> None:
        future: asyncio.Future[TrainerResult] = asyncio.get_running_loop().create_future()
        self._expected[op.op] = future
        await self._call(queue)
        self._spawn(op, self._conclude(op, future))

    async def _conclude(
        self, op: protocol.ForwardBackward | protocol.OptimStep, future: asyncio.Future[TrainerResult]
    ) -> None:
        """What the trainer's answer leads to."""
        result = await future
        if result.error:
            self._failed(op, result.error)
        if isinstance(op, protocol.OptimStep) and result.export is not None:
            await self._commit(op.op, op.commit, result.export, result.metrics)
        else:
            await self._answer(
                op.op,
                error=result.error,
                category=result.category,
                metrics=result.metrics,
                logprobs=result.logprobs,
            )

    async def _initialise(self, op: protocol.InitAdapter) -> None:
        if op.source is None:
            export = await self._call(lambda core: core.initial(op, None))
        else:
            async with self._transfers.pulled(op.source) as folder:
                export = await self._call(lambda core: core.initial(op, folder))
        await self._commit(op.op, op.commit, export, {})

    async def _commit(self, op: str, ticket: str, export: Export, metrics: dict[str, float]) -> None:
        await self._answer(op, metrics=metrics, manifest=await self._transfers.upload(ticket, export.write))

    def _whole(self, op: protocol.ForwardBackward | protocol.OptimStep) -> None:
        """Raises :class:`Stale` where a part of the gradient that ``op`` adds to or steps with never arrived."""
        gradient = isinstance(op, protocol.OptimStep) or not op.forward_only
        if gradient and op.policy in self._broken:
            raise StaleState(self._broken[op.policy])

    async def _hold(self, op: protocol.ForwardBackward | protocol.OptimStep) -> None:
        """Have the trainer hold what ``op`` builds on, or raise :class:`Stale`."""
        if await self._call(lambda core: core.trainer.holds(op.policy, op.lease, op.parent.hash, op.steps)):
            return
        if op.steps or isinstance(op, protocol.OptimStep) or not (op.zero_grad or op.forward_only):
            raise StaleState(f"policy {op.policy} is not held here at {op.parent.hash[:12]} + {op.steps} steps")
        if await self._call(lambda core: core.trainer.restore(op.policy, op.lease, op.parent)):
            return
        async with self._transfers.pulled(op.parent, state=True) as folder:
            await self._call(lambda core: core.trainer.load(op.policy, op.lease, op.parent, folder))

    # --- small parts ------------------------------------------------------------------------------------------------

    def _spawn(self, op: Operation, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """See to ``op`` in a task of its own, and answer what it raises."""
        task = asyncio.create_task(self._guard(op, work))
        self._tasks[op.op] = task
        task.add_done_callback(lambda done: self._over(op.op, done))
        return task

    async def _guard(self, op: Operation, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except StaleState as error:
            await self._answer(op.op, error=str(error), category="stale")
        except Exception as error:  # whatever it is, it is this operation's alone
            self._failed(op, one_line(error), traceback=not is_plain(error))
            await self._answer(op.op, error=one_line(error), category="lost" if _own_trouble(error) else "failed")

    def _over(self, op: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(op) is task:
            del self._tasks[op]

    def _failed(self, op: Operation, error: str, *, traceback: bool = False) -> None:
        self.failed += 1
        extra = {} if isinstance(op, protocol.InitAdapter) else {"tenant": op.tenant, "version": op.parent.version}
        log.warning("operation %s of policy %s failed: %s", op.op, op.policy, error, exc_info=traceback, extra=extra)

    def _end(self, chain: PolicyQueue) -> list[protocol.VersionCommitted]:
        """Nothing more is done of it; the commits whose news were still in it."""
        if chain.runner is not None:
            chain.runner.cancel()
        for batch in chain.batches.values():
            if batch is not None:
                batch.cancel()
        chain.batches.clear()
        left = [chain.queue.get_nowait() for _ in range(chain.queue.qsize())]
        return [message for message in left if isinstance(message, protocol.VersionCommitted)]

    async def _call(self, function: Callable[[WorkerCore], T]) -> T:
        return await asyncio.wrap_future(self._compute.call(function))


def _own_trouble(error: Exception) -> bool:
    """Whether this worker, or its link, is what an operation failed for: another one may carry it out as it is."""
    if isinstance(error, TransferFailed):
        return not isinstance(error, CorruptArtifact)
    return isinstance(error, OSError | MemoryError | torch.OutOfMemoryError) or errno_of(error) != 0


def _rest(core: WorkerCore, policy: str) -> None:
    core.trainer.offload(policy)
