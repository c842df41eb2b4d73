"""The trainer of LoRA policies: packs trajectories of several tenants into one pass of a ``Backbone`` and keeps their
gradients and steps apart.

Promises, in addition to those of :class:`rookery.worker.trainer.base.Trainer`:

* ``step`` is one bounded slice: one packed pass of at most ``slice_tokens`` tokens, or one optimizer step. A larger
  group is split between its members. A trajectory stays whole: a longer one runs alone; if memory does not hold it, or
  a GPU runs out of memory in the pass, the result is ``lost``, because another worker may have more.
* Tenants share the slices by the tokens that were trained for them (:mod:`rookery.scheduling.queues`), within a
  tenant the policies take turns, within a policy operations run in order of arrival.
* Metrics are finite numbers: a value that is not is omitted, and ``nonfinite`` counts it.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch

from rookery import protocol
from rookery.errors import UserError
from rookery.scheduling.queues import TokenCounters
from rookery.worker.device import finish
from rookery.worker.memory import MemoryUse, NoRoom
from rookery.worker.model.adapter import WEIGHTS_FILE, adapter_numbers, init_adapter, read_adapter
from rookery.worker.trainer.base import TrainerResult
from rookery.worker.trainer.native.microbatch import (
    PassItem,
    Queued,
    QueuedBatch,
    canary_logprobs,
    check_loss,
    operation_of,
    run_pass,
)
from rookery.worker.trainer.native.optim import AdapterExport, PolicyState
from rookery.worker.trainer.native.packing import PackedGroup
from rookery.worker.trainer.native.states import (
    EXPORT_BYTES,
    OTHER_STATE,
    HeldPolicy,
    PolicyStates,
    StaleOperation,
    mark_committed,
)
from rookery.worker.trainer.packed_pass import Backbone

log = logging.getLogger("rookery.worker.trainer")

PROMPT_SHARE = 0.5
"""Share of its prompt in a piece of a split group. Every piece computes the prompt again, so pieces with a long prompt
may be longer than a slice, up to about twice the shortest possible, and are not nearly all prompt. The memory limit
bounds them all the same."""

OPTIMIZER_TOKENS = 64
"""An optimizer step in trained tokens, by its time."""


class PackedTrainer:
    """See :class:`rookery.worker.trainer.base.Trainer`."""

    def __init__(
        self,
        backbone: Backbone,
        *,
        max_rank: int,
        slice_tokens: int,
        base_model: str = "",
        memory_bytes: int = sys.maxsize,
        canary: Sequence[int] = (),
    ) -> None:
        """``base_model`` is the name in exported adapters; all training states take at most ``memory_bytes``. Committed
        versions have the log-probabilities of ``canary``, if it is given (:mod:`rookery.worker.model.canary`)."""
        self._backbone = backbone
        self._max_rank = max_rank
        self._limits = backbone.limits
        self.slice_tokens = min(slice_tokens, self._limits.max_tokens)
        self._base_model = base_model
        self._canary = list(canary)
        self.states = PolicyStates(memory_bytes, lambda policy: bool(self._queue(policy)), self._reserved_bytes)
        self.held = self.states.held
        self._queues: dict[str, dict[str, deque[Queued]]] = {}
        """Tenant → policy → operations."""
        self._weights: dict[str, float] = {}
        self._counters = TokenCounters(self._weights)
        self._results: list[TrainerResult] = []
        self.trained = 0

    # --- state ------------------------------------------------------------------------------------------------------

    def initial_version(self, op: protocol.InitAdapter, source: Path | None) -> AdapterExport:
        model = self._backbone.projections
        self.states.make_room(4 * adapter_numbers(model, op.rank, op.targets))
        if source is None:
            adapter = init_adapter(model, op.rank, op.alpha, op.targets, op.seed)
        else:
            adapter = read_adapter(source, model)
            if adapter.rank != op.rank:
                raise UserError(f"the adapter to start from has rank {adapter.rank}, the policy asks for {op.rank}")
        return self.states.track(AdapterExport(adapter, base_model=self._base_model))

    def holds(self, policy: str, lease: int, parent_hash: str, steps: int) -> bool:
        held = self.held.get(policy)
        queued = sum(isinstance(op, protocol.OptimStep) and op.adam is not None for op in self._queue(policy))
        if held is None or not held.matches(lease, parent_hash, steps - queued):
            return False
        held.used, held.expected = time.monotonic(), True
        return True

    def load(self, policy: str, lease: int, parent: protocol.AdapterRef, folder: Path) -> None:
        weights = folder / WEIGHTS_FILE  # float32, as every version
        self._make_room(policy, parent.rank, weights.stat().st_size // 4 if weights.exists() else 0)
        export = AdapterExport.read(folder, self._backbone.projections)
        rank = export.adapter.rank
        if rank > self._max_rank:
            raise UserError(f"the adapter's rank {rank} is above this worker's max_rank {self._max_rank}")
        self._hold(policy, lease, parent, export)

    def restore(self, policy: str, lease: int, parent: protocol.AdapterRef) -> bool:
        export = self.states.offloaded.pop(parent.hash, None)
        if export is not None:
            try:
                self._make_room(policy, parent.rank, export.numbers)
            except NoRoom:
                self.states.offloaded[parent.hash] = export
                raise
            self._hold(policy, lease, parent, export)
        return export is not None

    def _make_room(self, policy: str, rank: int, numbers: int) -> None:
        self.states.hold(policy, PolicyState.bytes_for(numbers, self._backbone.dtype), numbers, rank)

    def _hold(self, policy: str, lease: int, parent: protocol.AdapterRef, export: AdapterExport) -> None:
        base = self._backbone
        state = PolicyState(export, base.projections, base.dtype, base.device)
        self.held[policy] = HeldPolicy(lease, state, {parent.hash: 0})

    def offload(self, policy: str) -> None:
        held = self.held.get(policy)
        if held is not None:
            version = held.version
            if version is not None:
                self.states.offloaded.pop(version, None)
                self.states.offloaded[version] = held.state.export(self._base_model)
        self.evict(policy)

    def evict(self, policy: str) -> None:
        for queued in list(self._queue(policy)):
            self._remove(queued)
            if not (isinstance(queued, QueuedBatch) and queued.abandoned):
                self._finish(operation_of(queued).op, "the policy was evicted from this worker", "lost")
        self.held.pop(policy, None)

    def discard_offloaded(self, parent_hash: str) -> None:
        self.states.offloaded.pop(parent_hash, None)

    def clear_offloaded(self) -> None:
        self.states.offloaded.clear()

    def mark_committed(self, policy: str, lease: int, ref: protocol.AdapterRef) -> None:
        mark_committed(self.held.get(policy), policy, lease, ref)

    # --- operations -------------------------------------------------------------------------------------------------

    def forward_backward(
        self, op: protocol.ForwardBackward, batch: protocol.TrainingBatch, gradients: Sequence[Path] = ()
    ) -> None:
        """A batch that cannot be computed gets its result at once: ``failed``, or ``lost`` if memory does not hold
        it."""
        groups: list[PackedGroup] | None = None
        try:
            packed = [PackedGroup.from_group(group) for group in batch.groups]
            packed += [PackedGroup.from_datum(datum) for datum in batch.data]
            for group in packed:
                if group.targets:
                    group.check(self._backbone.context, self._backbone.vocab, self._limits.max_tokens)
            groups = [piece for group in packed if group.targets for piece in self._split(group)]
            check_loss(op.loss)
        except ValueError as error:
            groups = None
            self._finish(op.op, str(error), "failed")
        except MemoryError as error:
            self._finish(op.op, str(error), "lost")
        self._enqueue(QueuedBatch(op, groups, gradients))

    def optim_step(self, op: protocol.OptimStep) -> None:
        if op.commit and (held := self.held.get(op.policy)) is not None:
            self.states.make_room(EXPORT_BYTES * held.state.masters.numel(), keep=op.policy)
        self._enqueue(op)

    def memory(self) -> dict[str, MemoryUse]:
        return self.states.memory()

    def cancel(self, op: str) -> None:
        for queued in [q for policies in self._queues.values() for queue in policies.values() for q in queue]:
            if operation_of(queued).op != op:
                continue
            if isinstance(queued, QueuedBatch):
                queued.abandon()
            else:
                self._remove(queued)

    def drain(self) -> list[TrainerResult]:
        results, self._results = self._results, []
        return results

    @property
    def pending(self) -> int:
        return sum(len(queue) for policies in self._queues.values() for queue in policies.values())

    # --- slices -----------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        heads = list(self._heads())
        if not heads:
            return False
        self._rotate(heads[0])
        if isinstance(heads[0], protocol.OptimStep):
            self._counters.charge(heads[0].tenant, OPTIMIZER_TOKENS)
            self._optimise(heads[0])
        else:
            self._pass([queued for queued in heads if isinstance(queued, QueuedBatch)])
        return True

    def _heads(self) -> Iterator[Queued]:
        """The first operation of every policy, alternating between tenants, that of the next tenant first."""
        tenants = self._counters.order(self._queues)
        rows = [[queue[0] for queue in self._queues[tenant].values()] for tenant in tenants]
        for column in range(max(map(len, rows), default=0)):
            yield from (row[column] for row in rows if column < len(row))

    def _rotate(self, queued: Queued) -> None:
        """Move the operation's tenant, and its policy within the tenant, to the end of the line."""
        op = operation_of(queued)
        policies = self._queues.pop(op.tenant)
        policies[op.policy] = policies.pop(op.policy)
        self._queues[op.tenant] = policies

    def _pass(self, queued: list[QueuedBatch]) -> None:
        """One packed pass with the first of ``queued`` and others of its kind."""
        ready = [b for b in queued if b.op.forward_only == queued[0].op.forward_only and self._begin(b)]
        items = self._select(ready)
        for item in items:
            self._counters.charge(item.queued.op.tenant, sum(group.tokens for group in item.groups))
        try:
            if items:
                self.trained += run_pass(self._backbone, items)
        except torch.OutOfMemoryError as error:
            self._on_out_of_memory(items, str(error))
        for batch in ready:
            if not batch.groups and not batch.abandoned:
                self._remove(batch)
                self._complete(batch)

    def _complete(self, batch: QueuedBatch) -> None:
        """All groups of ``batch`` are computed: add the gradients of other workers, or export this one's."""
        held = self.held[batch.op.policy]
        try:
            for folder in batch.gradients:
                held.state.add_gradient(folder)
        except UserError as error:
            held.complete = False
            self._finish(batch.op.op, str(error), "failed")
            return
        export = self.states.track(held.state.export_gradient()) if batch.op.commit else None
        self._results.append(
            TrainerResult(batch.op.op, metrics=batch.metrics, logprobs=batch.logprobs(), export=export)
        )

    def _select(self, ready: list[QueuedBatch]) -> list[PassItem]:
        """Take groups for one pass from ``ready``, in order. The first batch fills the pass. Another one joins while
        the pass is less than half full, or if the rest of it fits: every policy in a pass costs separate products, so
        a nearly full pass takes no fraction of a batch."""
        items: list[PassItem] = []
        share, tokens, memory = self._limits.copied_key_share, self.slice_tokens, float(self._limits.max_tokens)
        for batch in ready:
            if 2 * tokens <= self.slice_tokens and sum(group.tokens for group in batch.groups) > tokens:
                continue
            chosen: list[PackedGroup] = []
            while batch.groups:
                group = batch.groups[0]
                if (items or chosen) and (group.tokens > tokens or group.memory(share) > memory):
                    break
                chosen.append(batch.groups.popleft())
                tokens, memory = tokens - group.tokens, memory - group.memory(share)
            if chosen:
                items.append(PassItem(batch, self.held[batch.op.policy].state, chosen))
        return items

    def _on_out_of_memory(self, items: list[PassItem], error: str) -> None:
        """The pass's operations are ``lost``, and the next passes are half as long."""
        torch.cuda.empty_cache()
        self.slice_tokens = max(1, self.slice_tokens // 2)
        log.warning("out of memory in a pass; passes have at most %d tokens now: %s", self.slice_tokens, error)
        for item in items:
            item.queued.abandon()  # the gradient may contain a part of it
            self._finish(item.queued.op.op, "this worker's memory did not hold the pass", "lost")

    def _begin(self, batch: QueuedBatch) -> bool:
        """Whether ``batch`` can run on the state that it names; otherwise it is removed, with a result unless it was
        abandoned."""
        held = self.held.get(batch.op.policy)
        if held is not None and held.begin(batch, held.state.zero_grad):
            return True
        self._remove(batch)
        if not batch.abandoned:
            self._finish(batch.op.op, OTHER_STATE, "stale")
        return False

    def _optimise(self, op: protocol.OptimStep) -> None:
        began = time.perf_counter()
        self._remove(op)
        held = self.held.get(op.policy)
        try:
            if held is None:
                raise StaleOperation(OTHER_STATE)
            metrics = held.optim_step(op, held.state.adamw)
        except StaleOperation as error:
            self._finish(op.op, str(error), "stale")
            return
        export = None
        if op.commit:
            canary = canary_logprobs(self._backbone, held.state, self._canary) if self._canary else []
            export, held.exported_steps = self.states.track(held.state.export(self._base_model, canary)), held.steps
        finish(self._backbone.device)
        metrics["seconds"] = time.perf_counter() - began
        self._results.append(TrainerResult(op.op, metrics=metrics, export=export))

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _finish(self, op: str, error: str, category: Literal["stale", "failed", "lost"]) -> None:
        self._results.append(TrainerResult(op, error, category))

    def _split(self, group: PackedGroup) -> list[PackedGroup]:
        max_tokens = max(self.slice_tokens, int(len(group.prompt) / PROMPT_SHARE))
        return group.split(max_tokens, self._limits.max_tokens, self._limits.copied_key_share)

    def _reserved_bytes(self) -> int:
        """Of the copies that queued commits will make."""
        queued = [op for policies in self._queues.values() for queue in policies.values() for op in queue]
        commits = [op.policy for op in queued if isinstance(op, protocol.OptimStep) and op.commit]
        states = [held.state for policy in commits if (held := self.held.get(policy)) is not None]
        return EXPORT_BYTES * sum(state.masters.numel() for state in states)

    def _queue(self, policy: str) -> deque[Queued]:
        return next((policies[policy] for policies in self._queues.values() if policy in policies), deque())

    def _enqueue(self, queued: Queued) -> None:
        op = operation_of(queued)
        self._weights[op.tenant] = op.weight
        if op.tenant not in self._queues:
            self._counters.lift(op.tenant)
        if (held := self.held.get(op.policy)) is not None:
            held.expected = False
        self._queues.setdefault(op.tenant, {}).setdefault(op.policy, deque()).append(queued)

    def _remove(self, queued: Queued) -> None:
        op = operation_of(queued)
        policies = self._queues[op.tenant]
        policies[op.policy].remove(queued)
        if not policies[op.policy]:
            del policies[op.policy]
        if not policies:
            del self._queues[op.tenant]
