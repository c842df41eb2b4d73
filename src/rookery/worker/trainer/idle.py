"""The trainer of a worker that only generates, whose engine needs no decoder in this process.

Promise: it holds nothing and takes no time. The controller sends it no operation, since the worker lacks the role
``train``; one that arrives all the same is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rookery import protocol
from rookery.errors import UserError
from rookery.worker.memory import MemoryUse
from rookery.worker.trainer.base import Export, TrainerResult

REFUSAL = "this worker only generates; it was started without the role train"


class IdleTrainer:
    """See :class:`rookery.worker.trainer.base.Trainer`."""

    trained = 0
    pending = 0

    def initial_version(self, op: protocol.InitAdapter, source: Path | None) -> Export:
        raise UserError(REFUSAL)

    def holds(self, policy: str, lease: int, parent_hash: str, steps: int) -> bool:
        return False

    def load(self, policy: str, lease: int, parent: protocol.AdapterRef, folder: Path) -> None:
        raise UserError(REFUSAL)

    def restore(self, policy: str, lease: int, parent: protocol.AdapterRef) -> bool:
        return False

    def offload(self, policy: str) -> None: ...

    def evict(self, policy: str) -> None: ...

    def discard_offloaded(self, parent_hash: str) -> None: ...

    def clear_offloaded(self) -> None: ...

    def mark_committed(self, policy: str, lease: int, ref: protocol.AdapterRef) -> None: ...

    def forward_backward(
        self, op: protocol.ForwardBackward, batch: protocol.TrainingBatch, gradients: Sequence[Path] = ()
    ) -> None:
        raise UserError(REFUSAL)

    def optim_step(self, op: protocol.OptimStep) -> None:
        raise UserError(REFUSAL)

    def memory(self) -> dict[str, MemoryUse]:
        return {}

    def cancel(self, op: str) -> None: ...

    def step(self) -> bool:
        return False

    def drain(self) -> list[TrainerResult]:
        return []
