"""The protocol between a worker and a trainer, and the values that cross it.

A trainer differentiates the base model's adapters for many policies at once. It holds the training state of each policy
(weights, gradient, optimizer moments), runs queued operations in bounded slices and returns their results. It names
policies, leases and versions only; how it packs, shards or places tensors is its own concern, so a trainer over several
processes fits behind the same protocol.

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

from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from rookery import protocol
from rookery.scheduling.worker_time import WorkerTime
from rookery.worker.memory import MemoryUse


class Export(Protocol):
    """A snapshot of one version, not yet written: training may continue before :meth:`write` is called."""

    def write(self, folder: Path) -> list[str]:
        """Write the version's files into the existing ``folder``; returns their names, sorted. Any thread may call
        it."""
        ...


@dataclass(frozen=True)
class TrainerResult:
    """Result of one operation, with the fields of ``protocol.OperationDone``; ``export`` is set if files must be
    written and uploaded."""

    op: str
    error: str = ""
    category: Literal["", "stale", "failed", "lost", "too small"] = ""
    metrics: dict[str, float] = field(default_factory=dict)
    logprobs: bytes = b""
    export: Export | None = None


class Trainer(Protocol):
    """One worker's trainer."""

    def gauges(self) -> dict[str, float]:
        """Figures for the operator, as an engine's."""
        ...

    @property
    def pending(self) -> int:
        """Operations that are queued or partly done."""
        ...

    @property
    def weights(self) -> MutableMapping[str, float]:
        """Shares of tenants."""
        ...

    def tenants(self) -> Collection[str]:
        """The tenants that have operations."""
        ...

    def share_time(self, time: WorkerTime) -> None:
        """The worker's time among its tenants, which divides a slice and the slices."""
        ...

    def tenant_tokens(self) -> Mapping[str, float]:
        """Tokens of the present slice, or the last one, by tenant."""
        ...

    # --- training state of a policy ---------------------------------------------------------------------------------

    def initial_version(self, op: protocol.InitAdapter, source: Path | None) -> Export:
        """Version 0 of a policy: new weights, or those of the version in the folder ``source``. Raises ``UserError`` if
        ``source`` does not fit the request, ``NoRoom`` as :meth:`load`."""
        ...

    def holds(self, policy: str, lease: int, parent_hash: str, steps: int) -> bool:
        """Whether an operation that names this state can be queued now; queued optimizer steps count as taken."""
        ...

    def load(
        self, policy: str, lease: int, parent: protocol.AdapterRef, folder: Path, *, optimizer: bool = True
    ) -> None:
        """Hold ``policy`` in the state of the version in ``folder``, without a gradient. If ``optimizer`` is False, the
        folder may lack the optimizer's state: the state computes gradients for other workers, takes no step and is not
        offloaded. Raises ``UserError`` for files that do not fit the base model or exceed the trainer's limits,
        ``NoRoom`` while the states in use leave no memory for one more."""
        ...

    def restore(self, policy: str, lease: int, parent: protocol.AdapterRef) -> bool:
        """:meth:`load` from the offloaded state of that version; False if there is none. Raises ``NoRoom``."""
        ...

    def has_reference(self, policy: str, reference_hash: str) -> bool:
        """Whether KL penalties of the policy can compare with that version now."""
        ...

    def load_reference(self, policy: str, reference: protocol.AdapterRef, folder: Path) -> None:
        """Keep the version in ``folder``, with the policy's state, as the one that its KL penalties compare with; it
        replaces another one. Nothing happens if the policy is not held. Raises as :meth:`load`."""
        ...

    def offload(self, policy: str) -> None:
        """:meth:`evict`, but keep the state for :meth:`restore` if it is a committed version with its optimizer's
        state: steps since then are lost, and so is a gradient."""
        ...

    def evict(self, policy: str) -> None:
        """Delete the policy's state; its queued operations get results of category ``lost``."""
        ...

    def discard_offloaded(self, parent_hash: str) -> None:
        """Delete the offloaded state of that version, if any."""
        ...

    def clear_offloaded(self) -> None:
        """Delete all offloaded states."""
        ...

    def mark_committed(self, policy: str, lease: int, ref: protocol.AdapterRef) -> None:
        """The last export of ``policy`` is the version ``ref`` from now on. Operations may still name its parent."""
        ...

    # --- operations -------------------------------------------------------------------------------------------------

    def forward_backward(
        self, op: protocol.ForwardBackward, batch: protocol.TrainingBatch, gradients: Sequence[Path] = ()
    ) -> None:
        """Queue a pass: gradients add up in the policy's state, or, with ``op.forward_only``, log-probabilities are
        returned and the state does not change. Exports in the folders ``gradients`` are added after the batch's
        gradient, in order; the folders stay until the result is there. With ``op.commit`` the result has an
        :class:`Export` of the gradient."""
        ...

    def optim_step(self, op: protocol.OptimStep) -> None:
        """Queue an optimizer step; with ``op.commit`` its result has an :class:`Export` of the state after it. Raises
        ``NoRoom`` while there is no memory for the export."""
        ...

    def memory(self) -> dict[str, MemoryUse]:
        """Bytes of each part of the memory budget that this trainer uses: ``training_states``, offloaded ones and
        exports included, and ``activations``."""
        ...

    def cancel(self, op: str) -> None:
        """Abandon a queued or partly done operation; it gets no result."""
        ...

    def step(self) -> bool:
        """Run one bounded slice; False if nothing is queued."""
        ...

    def drain(self) -> list[TrainerResult]:
        """Results since the last call, in order."""
        ...
