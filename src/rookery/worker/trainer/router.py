"""The trainers of a worker: LoRA policies go to one, full-parameter policies to the other.

Promises:

* While both have operations, they take turns by slices.
* A worker that only generates has neither: it holds nothing and takes no time. The controller sends it no operation,
  since the worker lacks the role ``train``; one that arrives all the same is refused.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from pathlib import Path

from rookery import protocol
from rookery.errors import UserError
from rookery.worker.memory import MemoryUse
from rookery.worker.trainer.base import Export, Trainer, TrainerResult

REFUSAL = "this worker only generates; it was started without the role train"


class TrainerRouter:
    """See :class:`rookery.worker.trainer.base.Trainer`."""

    def __init__(self, lora: Trainer | None = None, full: Trainer | None = None) -> None:
        self._lora, self._full = lora, full
        self._all = [trainer for trainer in (lora, full) if trainer is not None]
        """The one whose turn it is first."""
        self._stepped: Trainer | None = None

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
        return sum(trainer.pending for trainer in self._all)

    def initial_version(self, op: protocol.InitAdapter, source: Path | None) -> Export:
        return self._of(op.rank).initial_version(op, source)

    def holds(self, policy: str, lease: int, parent_hash: str, steps: int) -> bool:
        return any(trainer.holds(policy, lease, parent_hash, steps) for trainer in self._all)

    def load(self, policy: str, lease: int, parent: protocol.AdapterRef, folder: Path) -> None:
        self._of(parent.rank).load(policy, lease, parent, folder)

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
        for trainer in self._all:
            trainer.cancel(op)

    @property
    def weights(self) -> MutableMapping[str, float]:
        return ChainMap(*(trainer.weights for trainer in self._all))

    def tenants(self) -> Collection[str]:
        return {tenant for trainer in self._all for tenant in trainer.tenants()}

    def tenant_tokens(self) -> Mapping[str, float]:
        return self._stepped.tenant_tokens() if self._stepped is not None else {}

    def step(self) -> bool:
        self._all.reverse()
        for trainer in self._all:
            self._stepped = trainer
            if trainer.step():
                return True
        return False

    def drain(self) -> list[TrainerResult]:
        return [result for trainer in self._all for result in trainer.drain()]
