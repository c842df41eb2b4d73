"""The trainers of a worker: LoRA policies go to one, full-parameter policies to the other.

Promises:

* Operations of both are in one queue: tenants have fair shares, whichever trainer computes for them.
* A worker that only generates has neither: it holds nothing and takes no time. The controller sends it no operation,
  since the worker lacks the role ``train``; one that arrives all the same is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from pathlib import Path

from rookery import protocol
from rookery.errors import UserError
from rookery.scheduling.worker_time import WorkerTime
from rookery.worker.memory import MemoryUse
from rookery.worker.trainer.base import Export, Trainer, TrainerResult
from rookery.worker.trainer.operation_queue import OperationQueue

REFUSAL = "this worker only generates; it was started without the role train"


class Trainers:
    """A :class:`rookery.worker.trainer.base.Trainer` of several: their states are theirs, their operations are in one
    ``queue``."""

    def __init__(self, queue: OperationQueue, lora: Trainer | None = None, full: Trainer | None = None) -> None:
        self._queue = queue
        self._lora, self._full = lora, full
        self._all = [trainer for trainer in (lora, full) if trainer is not None]

    def _of(self, rank: int) -> Trainer:
        trainer = self._lora if rank else self._full
        if trainer is None:
            raise UserError(REFUSAL)
        return trainer

    def gauges(self) -> dict[str, float]:
        figures: dict[str, float] = {}
        for name, value in (item for trainer in self._all for item in trainer.gauges().items()):
            figures[name] = figures.get(name, 0.0) + value
        return figures

    @property
    def pending(self) -> int:
        return self._queue.pending

    def trains_full(self) -> bool:
        """Whether operations of full-parameter policies are queued."""
        return self._full is not None and self._queue.pending_of(self._full)

    def initial_version(self, op: protocol.InitAdapter, source: Path | None) -> Export:
        return self._of(op.rank).initial_version(op, source)

    def holds(self, policy: str, lease: int, parent_hash: str, steps: int) -> bool:
        return any(trainer.holds(policy, lease, parent_hash, steps) for trainer in self._all)

    def load(
        self, policy: str, lease: int, parent: protocol.AdapterRef, folder: Path, *, optimizer: bool = True
    ) -> None:
        self._of(parent.rank).load(policy, lease, parent, folder, optimizer=optimizer)

    def restore(self, policy: str, lease: int, parent: protocol.AdapterRef) -> bool:
        return self._of(parent.rank).restore(policy, lease, parent)

    def has_reference(self, policy: str, reference_hash: str) -> bool:
        return any(trainer.has_reference(policy, reference_hash) for trainer in self._all)

    def load_reference(self, policy: str, reference: protocol.AdapterRef, folder: Path) -> None:
        self._of(reference.rank).load_reference(policy, reference, folder)

    def offload(self, policy: str) -> None:
        for trainer in self._all:
            trainer.offload(policy)

    def evict(self, policy: str) -> None:
        for trainer in self._all:
            trainer.evict(policy)

    def discard_offloaded(self, parent_hash: str) -> None:
        for trainer in self._all:
            trainer.discard_offloaded(parent_hash)

    def clear_offloaded(self) -> None:
        for trainer in self._all:
            trainer.clear_offloaded()

    def mark_committed(self, policy: str, lease: int, ref: protocol.AdapterRef) -> None:
        self._of(ref.rank).mark_committed(policy, lease, ref)

    def forward_backward(
        self, op: protocol.ForwardBackward, batch: protocol.TrainingBatch, gradients: Sequence[Path] = ()
    ) -> None:
        self._of(op.parent.rank).forward_backward(op, batch, gradients)

    def optim_step(self, op: protocol.OptimStep) -> None:
        self._of(op.parent.rank).optim_step(op)

    def memory(self) -> dict[str, MemoryUse]:
        parts: dict[str, MemoryUse] = {}
        for part, use in (item for trainer in self._all for item in trainer.memory().items()):
            parts[part] = MemoryUse(parts[part].used + use.used if part in parts else use.used, use.budget)
        return parts

    def cancel(self, op: str) -> None:
        self._queue.cancel(op)

    @property
    def weights(self) -> MutableMapping[str, float]:
        return self._queue.weights

    def tenants(self) -> Collection[str]:
        return self._queue.tenants()

    def share_time(self, time: WorkerTime) -> None:
        self._queue.time = time

    def tenant_tokens(self) -> Mapping[str, float]:
        return self._queue.tenant_tokens()

    def step(self) -> bool:
        return self._queue.step()

    def drain(self) -> list[TrainerResult]:
        return self._queue.drain()
