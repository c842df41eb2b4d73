"""One trainer of two: LoRA policies go to the first, full-parameter policies to the second.

Promise: while both have operations, they take turns by slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rookery import protocol
from rookery.worker.memory import MemoryUse
from rookery.worker.trainer.base import Export, Trainer, TrainerResult


class TrainerRouter:
    """See :class:`rookery.worker.trainer.base.Trainer`."""

    def __init__(self, lora: Trainer, full: Trainer) -> None:
        self._lora = lora
        self._full = full
        self._both = [lora, full]
        """The one whose turn it is first."""

    def _of(self, ref: protocol.AdapterRef) -> Trainer:
        return self._lora if ref.rank else self._full

    @property
    def trained(self) -> int:
        return self._lora.trained + self._full.trained

    @property
    def pending(self) -> int:
        return self._lora.pending + self._full.pending

    def initial_version(self, op: protocol.InitAdapter, source: Path | None) -> Export:
        return (self._lora if op.rank else self._full).initial_version(op, source)

    def holds(self, policy: str, lease: int, parent_hash: str, steps: int) -> bool:
        return any(trainer.holds(policy, lease, parent_hash, steps) for trainer in self._both)

    def load(self, policy: str, lease: int, parent: protocol.AdapterRef, folder: Path) -> None:
        self._of(parent).load(policy, lease, parent, folder)

    def restore(self, policy: str, lease: int, parent: protocol.AdapterRef) -> bool:
        return self._of(parent).restore(policy, lease, parent)

    def offload(self, policy: str) -> None:
        for trainer in self._both:
            trainer.offload(policy)

    def evict(self, policy: str) -> None:
        for trainer in self._both:
            trainer.evict(policy)

    def discard_offloaded(self, parent_hash: str) -> None:
        for trainer in self._both:
            trainer.discard_offloaded(parent_hash)

    def clear_offloaded(self) -> None:
        for trainer in self._both:
            trainer.clear_offloaded()

    def mark_committed(self, policy: str, lease: int, ref: protocol.AdapterRef) -> None:
        self._of(ref).mark_committed(policy, lease, ref)

    def forward_backward(
        self, op: protocol.ForwardBackward, batch: protocol.TrainingBatch, gradients: Sequence[Path] = ()
    ) -> None:
        self._of(op.parent).forward_backward(op, batch, gradients)

    def optim_step(self, op: protocol.OptimStep) -> None:
        self._of(op.parent).optim_step(op)

    def memory(self) -> dict[str, MemoryUse]:
        parts = self._lora.memory()
        for part, use in self._full.memory().items():
            parts[part] = MemoryUse(parts[part].used + use.used if part in parts else use.used, use.budget)
        return parts

    def cancel(self, op: str) -> None:
        for trainer in self._both:
            trainer.cancel(op)

    def step(self) -> bool:
        self._both.reverse()
        return any(trainer.step() for trainer in self._both)

    def drain(self) -> list[TrainerResult]:
        return [*self._lora.drain(), *self._full.drain()]
