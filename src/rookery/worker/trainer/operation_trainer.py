"""The base class of trainers behind an :class:`~rookery.worker.trainer.operation_queue.OperationQueue`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rookery import protocol
from rookery.algorithms.losses import PAIRED_LOSSES
from rookery.errors import UserError
from rookery.scheduling.worker_time import WorkerTime
from rookery.worker.memory import TooSmall
from rookery.worker.model.adapter import Adapter, Projections, init_adapter, read_adapter
from rookery.worker.trainer.base import Export, TrainerResult
from rookery.worker.trainer.microbatch import Queued, QueuedBatch, check_loss, operation_of
from rookery.worker.trainer.operation_queue import OperationQueue
from rookery.worker.trainer.packing import PackedGroup
from rookery.worker.trainer.states import OTHER_STATE, HeldPolicy, StaleOperation

log = logging.getLogger("rookery.worker.trainer")


class OperationTrainer:
    """The shared part of :class:`rookery.worker.trainer.base.Trainer`. Subclasses hold the states and compute.
    Several may stand behind one ``queue``."""

    def __init__(self, queue: OperationQueue | None = None) -> None:
        self.trained = 0
        """Tokens trained on so far; a shared prompt counts once per pass."""
        self.queue = queue if queue is not None else OperationQueue()

    # --- of subclasses ----------------------------------------------------------------------------------------------

    def evict(self, policy: str) -> None:
        raise NotImplementedError

    def _held_by(self, policy: str) -> HeldPolicy[Any] | None:
        raise NotImplementedError

    def compute(self, batches: list[QueuedBatch]) -> None:
        """Run one slice of the queue."""
        raise NotImplementedError

    def _export(self, op: protocol.OptimStep, held: HeldPolicy[Any]) -> Export:
        """The state after the step ``op``."""
        raise NotImplementedError

    def gauges(self) -> dict[str, float]:
        return {"worker_trained_tokens": self.trained}

    # --- the trainer protocol ---------------------------------------------------------------------------------------

    def holds(self, policy: str, lease: int, parent_hash: str, steps: int) -> bool:
        held = self._held_by(policy)
        queued = sum(isinstance(op, protocol.OptimStep) and op.adam is not None for op in self.queue.of(policy))
        if held is None or not held.matches(lease, parent_hash, steps - queued):
            return False
        held.used, held.expected = time.monotonic(), True
        return True

    def has_reference(self, policy: str, reference_hash: str) -> bool:
        held = self._held_by(policy)
        return held is not None and held.has_reference(reference_hash)

    def mark_committed(self, policy: str, lease: int, ref: protocol.AdapterRef) -> None:
        held = self._held_by(policy)
        if held is None or held.lease != lease or held.exported_steps is None:
            log.info("commit of a state that is not held here", extra={"policy": policy, "version": ref.version})
            return
        newest = max(held.versions, key=held.versions.__getitem__)
        held.versions = {newest: held.versions[newest], ref.hash: held.exported_steps}

    def optim_step(self, op: protocol.OptimStep) -> None:
        self._enqueue(op)

    def cancel(self, op: str) -> None:
        self.queue.cancel(op)

    def drain(self) -> list[TrainerResult]:
        return self.queue.drain()

    @property
    def pending(self) -> int:
        return self.queue.pending

    @property
    def weights(self) -> dict[str, float]:
        return self.queue.weights

    def tenants(self) -> Collection[str]:
        return self.queue.tenants()

    def share_time(self, time: WorkerTime) -> None:
        self.queue.time = time

    def tenant_tokens(self) -> Mapping[str, float]:
        return self.queue.tenant_tokens()

    def step(self) -> bool:
        return self.queue.step()

    # --- for subclasses ---------------------------------------------------------------------------------------------

    def _enqueue(self, queued: Queued) -> None:
        if (held := self._held_by(operation_of(queued).policy)) is not None:
            held.expected = False
        self.queue.put(queued, self)

    def _enqueue_batch(
        self, op: protocol.ForwardBackward, gradients: Sequence[Path], make: Callable[[], list[PackedGroup]]
    ) -> None:
        """Queue the groups of ``make()``. A batch that cannot be computed gets its result at once: ``failed``, or
        ``lost`` if memory does not hold it."""
        try:
            self._enqueue(QueuedBatch(op, make(), gradients))
        except (ValueError, MemoryError) as error:
            self.queue.finish(op.op, str(error), "lost" if isinstance(error, MemoryError) else "failed")

    def _begin(self, batch: QueuedBatch) -> bool:
        """Whether ``batch`` can run on the state that it names; otherwise it is removed, with a result."""
        held = self._held_by(batch.op.policy)
        if held is not None and held.begin(batch):
            return True
        self.queue.remove(batch)
        self.queue.finish(batch.op.op, OTHER_STATE, "stale")
        return False

    def optimise(self, op: protocol.OptimStep) -> None:
        """Take an optimizer step of the queue."""
        began = time.perf_counter()
        held = self._held_by(op.policy)
        try:
            if held is None:
                raise StaleOperation(OTHER_STATE)
            metrics = held.optim_step(op)
        except StaleOperation as error:
            self.queue.finish(op.op, str(error), "stale")
            return
        export = None
        if op.commit:
            export, held.exported_steps = self._export(op, held), held.steps
        metrics["seconds"] = time.perf_counter() - began
        self.queue.add(TrainerResult(op.op, metrics=metrics, export=export))


def packed_groups(
    op: protocol.ForwardBackward, batch: protocol.TrainingBatch, context: int, vocab: int, max_tokens: int
) -> list[PackedGroup]:
    """The groups of a batch that carry loss. Raises ``ValueError`` for one that a model of this context and vocabulary
    cannot compute, ``MemoryError`` for a trajectory of more than ``max_tokens``."""
    groups = [PackedGroup.from_group(group) for group in batch.groups]
    groups += [PackedGroup.from_datum(datum) for datum in batch.data]
    groups = [group for group in groups if len(group.loss)]
    for group in groups:
        group.check(context, vocab, max_tokens)
    check_loss(op.loss)
    if op.loss.name in PAIRED_LOSSES:
        for group in groups:
            group.check_pair(max_tokens)
    return groups


def initial_adapter(op: protocol.InitAdapter, source: Path | None, model: Projections) -> Adapter:
    """A new adapter, or that of the version in the folder ``source``. Raises ``UserError`` if it does not fit the
    request."""
    if source is None:
        return init_adapter(model, op.rank, op.alpha, op.targets, op.seed)
    adapter = read_adapter(source, model)
    if adapter.rank != op.rank:
        raise UserError(f"the adapter to start from has rank {adapter.rank}, the policy asks for {op.rank}")
    return adapter


def check_rank(adapter: Adapter, max_rank: int) -> None:
    """Raises ``TooSmall`` for a rank above this worker's limit."""
    if adapter.rank > max_rank:
        raise TooSmall(f"the adapter's rank {adapter.rank} is above this worker's max_rank {max_rank}")
