"""The base class of trainers.

A trainer differentiates the base model's adapters for many policies at once. It holds the training state of each policy
(weights, gradient, optimizer moments) and computes the operations of its policies, which wait in an
:class:`~rookery.worker.trainer.operation_queue.OperationQueue`, in bounded slices. It names policies, leases and
versions only; how it packs, shards or places tensors is its own concern, so a trainer over several processes is one,
too.

Rules for every implementation:

* A policy's operations run in the order in which they were queued. A slice may serve several policies.
* An operation runs only on the state that it names: (policy, lease, parent version, steps since, operations in the
  gradient). Otherwise its result has category ``stale``: so no step is taken on a gradient that misses an operation, or
  contains a part of one.
* An error of one policy's operation is the result of that operation. A loss, a gradient or a step's result that is not
  finite skips that policy's step and changes no other policy.
* All methods belong to one thread.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rookery import protocol
from rookery.algorithms.losses import PAIRED_LOSSES
from rookery.errors import UserError
from rookery.worker.memory import MemoryUse, TooSmall
from rookery.worker.model.adapter import Adapter, Projections, init_adapter, read_adapter
from rookery.worker.trainer.microbatch import Queued, QueuedBatch, operation_of
from rookery.worker.trainer.operation_loss import check_loss
from rookery.worker.trainer.operation_queue import Export, OperationQueue
from rookery.worker.trainer.packing import PackedGroup
from rookery.worker.trainer.states import OTHER_STATE, HeldPolicy, StaleOperation

log = logging.getLogger("rookery.worker.trainer")


class Trainer(ABC):
    """Subclasses hold the states and compute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.trained = 0
        """Tokens trained on so far; a shared prompt counts once per pass."""
        self.queue: OperationQueue[Trainer] = OperationQueue(clock=clock)
        """Its own, until one is built with this trainer."""

    def gauges(self) -> dict[str, float]:
        """Figures for the operator, as an engine's."""
        return {"worker_trained_tokens": self.trained}

    @abstractmethod
    def memory(self) -> dict[str, MemoryUse]:
        """Bytes of each part of the memory budget that this trainer uses: ``training_states``, offloaded ones and
        exports included, and ``activations``."""

    # --- training state of a policy ---------------------------------------------------------------------------------

    @abstractmethod
    def initial_version(self, op: protocol.InitAdapter, source: Path | None) -> Export:
        """Version 0 of a policy: new weights, or those of the version in the folder ``source``. Raises ``UserError`` if
        ``source`` does not fit the request, ``NoRoom`` as :meth:`load`."""

    def holds(self, policy: str, lease: int, parent_hash: str, steps: int) -> bool:
        """Whether an operation that names this state can be queued now; queued optimizer steps count as taken."""
        held = self._held_by(policy)
        queued = sum(isinstance(op, protocol.OptimStep) and op.adam is not None for op in self.queue.of(policy))
        if held is None or not held.matches(lease, parent_hash, steps - queued):
            return False
        held.use()
        held.expected = True
        return True

    @abstractmethod
    def load(
        self, policy: str, lease: int, parent: protocol.AdapterRef, folder: Path, *, optimizer: bool = True
    ) -> None:
        """Hold ``policy`` in the state of the version in ``folder``, without a gradient. If ``optimizer`` is False, the
        folder may lack the optimizer's state: the state computes gradients for other workers, takes no step and is not
        offloaded. Raises ``UserError`` for files that do not fit the base model or exceed the trainer's limits,
        ``NoRoom`` while the states in use leave no memory for one more."""

    @abstractmethod
    def restore(self, policy: str, lease: int, parent: protocol.AdapterRef) -> bool:
        """:meth:`load` from the offloaded state of that version; False if there is none. Raises ``NoRoom``."""

    def has_reference(self, policy: str, reference_hash: str) -> bool:
        """Whether KL penalties of the policy can compare with that version now."""
        held = self._held_by(policy)
        return held is not None and held.has_reference(reference_hash)

    @abstractmethod
    def load_reference(self, policy: str, reference: protocol.AdapterRef, folder: Path) -> None:
        """Keep the version in ``folder``, with the policy's state, as the one that its KL penalties compare with; it
        replaces another one. Nothing happens if the policy is not held. Raises as :meth:`load`."""

    @abstractmethod
    def offload(self, policy: str) -> None:
        """:meth:`evict`, but keep the state for :meth:`restore` if it is a committed version with its optimizer's
        state: steps since then are lost, and so is a gradient."""

    @abstractmethod
    def evict(self, policy: str) -> None:
        """Delete the policy's state; its queued operations get results of category ``lost``."""

    @abstractmethod
    def discard_offloaded(self, parent_hash: str) -> None:
        """Delete the offloaded state of that version, if any."""

    @abstractmethod
    def clear_offloaded(self) -> None:
        """Delete all offloaded states."""

    def mark_committed(self, policy: str, lease: int, ref: protocol.AdapterRef) -> None:
        """The last export of ``policy`` is the version ``ref`` from now on. Operations may still name its parent."""
        held = self._held_by(policy)
        if held is None or held.lease != lease or held.exported_steps is None:
            log.info("commit of a state that is not held here", extra={"policy": policy, "version": ref.version})
            return
        newest = max(held.versions, key=held.versions.__getitem__)
        held.versions = {newest: held.versions[newest], ref.hash: held.exported_steps}

    # --- operations -------------------------------------------------------------------------------------------------

    @abstractmethod
    def forward_backward(
        self, op: protocol.ForwardBackward, batch: protocol.TrainingBatch, gradients: Sequence[Path] = ()
    ) -> None:
        """Queue a pass: gradients add up in the policy's state, or, with ``op.forward_only``, log-probabilities are
        returned and the state does not change. Exports in the folders ``gradients`` are added after the batch's
        gradient, in order; the folders stay until the result is there. With ``op.upload`` the result has an
        :class:`Export` of the gradient."""

    def optim_step(self, op: protocol.OptimStep) -> None:
        """Queue an optimizer step; with ``op.upload`` its result has an :class:`Export` of the state after it. Raises
        ``NoRoom`` while there is no memory for the export."""
        self._enqueue(op)

    # --- from the queue ---------------------------------------------------------------------------------------------

    @abstractmethod
    def compute(self, batches: list[QueuedBatch]) -> None:
        """One slice with the first of ``batches``, each the first operation of its policy, and perhaps others. An error
        that the worker survives is the result of those that the slice computed."""

    def optimise(self, op: protocol.OptimStep) -> None:
        """Take an optimizer step, which has left the queue."""
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
        if op.upload:
            export, held.exported_steps = self._export(op, held), held.steps
        metrics["seconds"] = time.perf_counter() - began
        self.queue.add(protocol.OperationDone(op=op.op, metrics=metrics), export)

    # --- of subclasses ----------------------------------------------------------------------------------------------

    @abstractmethod
    def _held_by(self, policy: str) -> HeldPolicy[Any] | None:
        """The policy's state, if it is held."""

    @abstractmethod
    def _export(self, op: protocol.OptimStep, held: HeldPolicy[Any]) -> Export:
        """The state after the step ``op``."""

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

    def _fail(self, batch: QueuedBatch, error: Exception) -> None:
        """A slice with a part of ``batch`` ended with ``error``: the gradient may contain a part of that."""
        self.queue.remove(batch)
        self.queue.fail(batch.op, self, error)

    def _begin(self, batch: QueuedBatch) -> bool:
        """Whether ``batch`` can run on the state that it names; otherwise it is removed, with a result."""
        held = self._held_by(batch.op.policy)
        if held is not None and held.begin(batch):
            return True
        self.queue.remove(batch)
        self.queue.finish(batch.op.op, OTHER_STATE, "stale")
        return False


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
