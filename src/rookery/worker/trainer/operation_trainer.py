"""The operations of a trainer, in the order in which they run, and their results.

Promises: tenants share the slices by the tokens that were trained for them (:mod:`rookery.scheduling.queues`), within a
tenant the policies take turns, within a policy operations run in order of arrival.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rookery import protocol
from rookery.errors import UserError
from rookery.scheduling.queues import TokenCounters
from rookery.worker.model.adapter import Adapter, Projections, init_adapter, read_adapter
from rookery.worker.trainer.base import Export, TrainerResult
from rookery.worker.trainer.microbatch import Queued, QueuedBatch, check_loss, operation_of
from rookery.worker.trainer.packing import PackedGroup
from rookery.worker.trainer.states import OTHER_STATE, HeldPolicy, StaleOperation

log = logging.getLogger("rookery.worker.trainer")

OPTIMIZER_TOKENS = 64
"""An optimizer step in trained tokens, by its time."""


class OperationTrainer:
    """What trainers share of :class:`rookery.worker.trainer.base.Trainer`. Subclasses hold the states and compute."""

    def __init__(self) -> None:
        self.trained = 0
        """Tokens trained on so far; a shared prompt counts once per pass."""
        self._queues: dict[str, dict[str, deque[Queued]]] = {}
        """Tenant → policy → operations."""
        self.weights: dict[str, float] = {}
        self._counters = TokenCounters(self.weights)
        self._slice: dict[str, float] = {}
        self._results: list[TrainerResult] = []

    # --- of subclasses ----------------------------------------------------------------------------------------------

    def _held_by(self, policy: str) -> HeldPolicy[Any] | None:
        raise NotImplementedError

    def _pass(self, batches: list[QueuedBatch]) -> None:
        """One slice with the first of ``batches``, each the first operation of its policy, and perhaps others."""
        raise NotImplementedError

    def _export(self, op: protocol.OptimStep, held: HeldPolicy[Any]) -> Export:
        """The state after the step ``op``."""
        raise NotImplementedError

    def gauges(self) -> dict[str, float]:
        """See ``Trainer``."""
        return {"worker_trained_tokens": self.trained}

    # --- the trainer protocol ---------------------------------------------------------------------------------------

    def holds(self, policy: str, lease: int, parent_hash: str, steps: int) -> bool:
        held = self._held_by(policy)
        queued = sum(isinstance(op, protocol.OptimStep) and op.adam is not None for op in self._queue(policy))
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
        for queued in list(self._queued()):
            if operation_of(queued).op == op:
                self._remove(queued)

    def drain(self) -> list[TrainerResult]:
        results, self._results = self._results, []
        return results

    @property
    def pending(self) -> int:
        return sum(1 for _ in self._queued())

    def tenants(self) -> Collection[str]:
        return self._queues.keys()

    def tenant_tokens(self) -> Mapping[str, float]:
        return self._slice

    def step(self) -> bool:
        heads = list(self._heads())
        if not heads:
            return False
        self._slice = {}
        first = operation_of(heads[0])
        policies = self._queues.pop(first.tenant)  # its tenant, and its policy within that, go to the end of the line
        policies[first.policy] = policies.pop(first.policy)
        self._queues[first.tenant] = policies
        if isinstance(first, protocol.OptimStep):
            self._charge(first.tenant, OPTIMIZER_TOKENS)
            self._optimise(first)
        else:
            self._pass([queued for queued in heads if isinstance(queued, QueuedBatch)])
        return True

    # --- for subclasses ---------------------------------------------------------------------------------------------

    def _charge(self, tenant: str, tokens: float) -> None:
        """The tenant has these tokens of the present slice."""
        self._counters.charge(tenant, tokens)
        self._slice[tenant] = self._slice.get(tenant, 0.0) + tokens

    def _queue(self, policy: str) -> deque[Queued]:
        return next((policies[policy] for policies in self._queues.values() if policy in policies), deque())

    def _queued(self) -> Iterator[Queued]:
        return (queued for policies in self._queues.values() for queue in policies.values() for queued in queue)

    def _heads(self) -> Iterator[Queued]:
        """The first operation of every policy, alternating between tenants, that of the next tenant first."""
        tenants = self._counters.order(self._queues)
        rows = [[queue[0] for queue in self._queues[tenant].values()] for tenant in tenants]
        for column in range(max(map(len, rows), default=0)):
            yield from (row[column] for row in rows if column < len(row))

    def _enqueue(self, queued: Queued) -> None:
        op = operation_of(queued)
        self.weights[op.tenant] = op.weight
        if op.tenant not in self._queues:
            self._counters.lift(op.tenant)
        if (held := self._held_by(op.policy)) is not None:
            held.expected = False
        self._queues.setdefault(op.tenant, {}).setdefault(op.policy, deque()).append(queued)

    def _enqueue_batch(
        self, op: protocol.ForwardBackward, gradients: Sequence[Path], make: Callable[[], list[PackedGroup]]
    ) -> None:
        """Queue the groups of ``make()``. A batch that cannot be computed gets its result at once: ``failed``, or
        ``lost`` if memory does not hold it."""
        try:
            self._enqueue(QueuedBatch(op, make(), gradients))
        except (ValueError, MemoryError) as error:
            self._finish(op.op, str(error), "lost" if isinstance(error, MemoryError) else "failed")

    def _remove(self, queued: Queued) -> None:
        op = operation_of(queued)
        policies = self._queues[op.tenant]
        policies[op.policy].remove(queued)
        if not policies[op.policy]:
            del policies[op.policy]
        if not policies:
            del self._queues[op.tenant]

    def _lose(self, policy: str) -> None:
        """Remove the operations of a policy whose state leaves this worker."""
        for queued in list(self._queue(policy)):
            self._remove(queued)
            self._finish(operation_of(queued).op, "the policy was evicted from this worker", "lost")

    def _begin(self, batch: QueuedBatch) -> bool:
        """Whether ``batch`` can run on the state that it names; otherwise it is removed, with a result."""
        held = self._held_by(batch.op.policy)
        if held is not None and held.begin(batch):
            return True
        self._remove(batch)
        self._finish(batch.op.op, OTHER_STATE, "stale")
        return False

    def _optimise(self, op: protocol.OptimStep) -> None:
        began = time.perf_counter()
        self._remove(op)
        held = self._held_by(op.policy)
        try:
            if held is None:
                raise StaleOperation(OTHER_STATE)
            metrics = held.optim_step(op)
        except StaleOperation as error:
            self._finish(op.op, str(error), "stale")
            return
        export = None
        if op.commit:
            export, held.exported_steps = self._export(op, held), held.steps
        metrics["seconds"] = time.perf_counter() - began
        self._results.append(TrainerResult(op.op, metrics=metrics, export=export))

    def _finish(self, op: str, error: str, category: Literal["stale", "failed", "lost"]) -> None:
        self._results.append(TrainerResult(op, error, category))


def packed_groups(
    op: protocol.ForwardBackward, batch: protocol.TrainingBatch, context: int, vocab: int, max_tokens: int
) -> list[PackedGroup]:
    """The groups of a batch that carry loss. Raises ``ValueError`` for one that a model of this context and vocabulary
    cannot compute, ``MemoryError`` for a trajectory of more than ``max_tokens``."""
    groups = [PackedGroup.from_group(group) for group in batch.groups]
    groups += [PackedGroup.from_datum(datum) for datum in batch.data]
    groups = [group for group in groups if group.loss]
    for group in groups:
        group.check(context, vocab, max_tokens)
    check_loss(op.loss)
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
    """Raises ``UserError`` for a rank above this worker's limit."""
    if adapter.rank > max_rank:
        raise UserError(f"the adapter's rank {adapter.rank} is above this worker's max_rank {max_rank}")
