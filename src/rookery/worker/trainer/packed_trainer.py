"""The trainer of LoRA policies: packs trajectories of several tenants into one pass of a ``Backbone`` and keeps their
gradients and steps apart.

Promises, in addition to those of :class:`rookery.worker.trainer.base.Trainer`:

* ``step`` is one bounded slice: one packed pass of at most ``slice_tokens`` tokens, or one optimizer step. A larger
  group is split between its members. A trajectory stays whole: a longer one runs alone; if memory does not hold it, or
  a GPU runs out of memory in the pass, the result is ``lost``, because another worker may have more.
* A metric with a part that is not finite is not finite, so that no sum of the other parts stands for it; ``nonfinite``
  counts such parts.
"""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from rookery import protocol
from rookery.algorithms.losses import PAIRED_LOSSES
from rookery.errors import UserError
from rookery.scheduling.fair_slices import fair_amount
from rookery.tokenization.registry import UNNAMED, BaseReference
from rookery.worker.failures import SURVIVED
from rookery.worker.memory import MemoryUse, NoRoom
from rookery.worker.model.adapter import WEIGHTS_FILE, adapter_numbers
from rookery.worker.trainer.base import Trainer, check_rank, initial_adapter, packed_groups
from rookery.worker.trainer.microbatch import PassItem, QueuedBatch, canary_logprobs, run_pass
from rookery.worker.trainer.optim import AdapterExport, PolicyState
from rookery.worker.trainer.packed_pass import Backbone
from rookery.worker.trainer.packing import PackedGroup
from rookery.worker.trainer.states import EXPORT_BYTES, IDLE_STATES, HeldPolicy, PolicyStates

log = logging.getLogger("rookery.worker.trainer")

PROMPT_SHARE = 0.5
"""Share of its prompt in a piece of a split group. Every piece computes the prompt again, so pieces with a long prompt
may be longer than a slice, up to about twice the shortest possible, and are not nearly all prompt. The memory limit
bounds them all the same."""

LEAST_PASS_SHARE = 8
"""A pass has at least this fraction of ``slice_tokens``, however little work some tenant has: below, a pass takes about
as long for fewer tokens."""


class PackedTrainer(Trainer):
    def __init__(
        self,
        backbone: Backbone,
        *,
        max_rank: int,
        slice_tokens: int,
        base: BaseReference = UNNAMED,
        memory_bytes: int = sys.maxsize,
        canary: Sequence[int] = (),
        most_idle: int = IDLE_STATES,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``base``: the base model in exported adapters. All training states take at most ``memory_bytes``; at most
        ``most_idle`` stay that nothing uses. Committed versions have the log-probabilities of ``canary``, if it is
        given (:mod:`rookery.worker.model.canary`)."""
        super().__init__(clock)
        self._backbone = backbone
        self._max_rank = max_rank
        self._limits = backbone.limits
        self.slice_tokens = min(slice_tokens, self._limits.max_tokens)
        self._base = base
        self._canary = list(canary)
        self.states = PolicyStates(
            memory_bytes, lambda policy: bool(self.queue.of(policy)), self._reserved_bytes, most_idle
        )
        self.held = self.states.held

    # --- state ------------------------------------------------------------------------------------------------------

    def initial_version(self, op: protocol.InitAdapter, source: Path | None) -> AdapterExport:
        model = self._backbone.model.projections
        self.states.make_room(4 * adapter_numbers(model, op.rank, op.targets))
        return self.states.track(AdapterExport(initial_adapter(op, source, model), base=self._base))

    def _held_by(self, policy: str) -> HeldPolicy[PolicyState] | None:
        return self.held.get(policy)

    def load(
        self, policy: str, lease: int, parent: protocol.AdapterRef, folder: Path, *, optimizer: bool = True
    ) -> None:
        weights = folder / WEIGHTS_FILE  # float32, as every version
        self._make_room(policy, parent.rank, weights.stat().st_size // 4 if weights.exists() else 0)
        export = AdapterExport.read(folder, self._backbone.model.projections)
        check_rank(export.adapter, self._max_rank)
        self._hold(policy, lease, parent, export, optimizer=optimizer)

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
        self.states.hold(policy, PolicyState.bytes_for(numbers, self._backbone.model.dtype), numbers, rank)

    def _hold(
        self, policy: str, lease: int, parent: protocol.AdapterRef, export: AdapterExport, *, optimizer: bool = True
    ) -> None:
        base = self._backbone.model
        state = PolicyState(export, base.projections, base.dtype, base.device)
        self.held[policy] = HeldPolicy(lease, state, {parent.hash: 0}, self.clock, optimizer=optimizer)

    def load_reference(self, policy: str, reference: protocol.AdapterRef, folder: Path) -> None:
        held, base = self.held.get(policy), self._backbone.model
        if held is None:
            return
        held.reference = None
        export = AdapterExport.read(folder, base.projections)
        size = PolicyState.bytes_for(export.numbers, base.dtype, trained=False)
        self.states.make_room(size, keep=policy, copied=held.state.masters.numel())
        weights = PolicyState(export, base.projections, base.dtype, base.device, trained=False)
        held.reference = reference.hash, weights

    def offload(self, policy: str) -> None:
        held = self.held.get(policy)
        if held is not None:
            version = held.version
            if version is not None:
                self.states.offloaded.pop(version, None)
                self.states.offloaded[version] = held.state.export(self._base)
        self.evict(policy)

    def evict(self, policy: str) -> None:
        self.queue.lose(policy)
        self.held.pop(policy, None)

    def discard_offloaded(self, parent_hash: str) -> None:
        self.states.offloaded.pop(parent_hash, None)

    def clear_offloaded(self) -> None:
        self.states.offloaded.clear()

    # --- operations -------------------------------------------------------------------------------------------------

    def forward_backward(
        self, op: protocol.ForwardBackward, batch: protocol.TrainingBatch, gradients: Sequence[Path] = ()
    ) -> None:
        base = self._backbone.model

        def pieces() -> list[PackedGroup]:
            groups = packed_groups(op, batch, base.context, base.vocab, self._limits.max_tokens)
            if op.loss.name in PAIRED_LOSSES:
                return groups
            return [piece for group in groups for piece in self._split(group)]

        self._enqueue_batch(op, gradients, pieces)

    def optim_step(self, op: protocol.OptimStep) -> None:
        if op.upload and (held := self.held.get(op.policy)) is not None:
            self.states.make_room(EXPORT_BYTES * held.state.masters.numel(), keep=op.policy)
        self._enqueue(op)

    def memory(self) -> dict[str, MemoryUse]:
        return self.states.memory()

    # --- slices -----------------------------------------------------------------------------------------------------

    def compute(self, batches: list[QueuedBatch]) -> None:
        """One packed pass with the first of ``batches`` and others of its kind."""
        ready = [b for b in batches if b.op.forward_only == batches[0].op.forward_only and self._begin(b)]
        items = self._select(ready)
        for item in items:
            self.queue.charge(item.queued.op.tenant, sum(group.tokens for group in item.groups))
        if items and not self._run(items):
            ready = [batch for batch in ready if all(batch is not item.queued for item in items)]
        for batch in ready:
            if not batch.groups:
                self._complete(batch)

    def _run(self, items: list[PassItem]) -> bool:
        """Whether the pass was computed; if not, its operations have their results."""
        try:
            self.trained += run_pass(self._backbone, items)
        except torch.OutOfMemoryError as error:
            self._on_out_of_memory(items, str(error))
            return False
        except SURVIVED as error:
            for item in items:
                self._fail(item.queued, error)
            return False
        return True

    def _complete(self, batch: QueuedBatch) -> None:
        """All groups of ``batch`` are computed: add the gradients of other workers, or export this one's."""
        held, export = self.held[batch.op.policy], None
        try:
            for folder in batch.gradients:
                held.state.add_gradient(folder)
            if batch.op.is_share:
                export = self.states.track(held.state.export_gradient())
            logprobs = batch.logprobs()
        except UserError as error:
            self.queue.remove(batch)
            self.queue.finish(batch.op.op, str(error), "failed")
        except SURVIVED as error:
            self._fail(batch, error)
        else:
            self.queue.remove(batch)
            held.complete(batch.op)
            done = protocol.OperationDone(op=batch.op.op, metrics=batch.metrics, logprobs=logprobs)
            self.queue.add(done, export)

    def _select(self, ready: list[QueuedBatch]) -> list[PassItem]:
        """Take groups for one pass from ``ready``, in order. The first batch fills the pass. Another one joins while
        the pass is less than half full, or if the rest of it fits: every policy in a pass costs separate products, so
        a nearly full pass takes no fraction of a batch. Where batches of several tenants are ready, or expected, the
        pass takes as long as leaves each its fair share: as many groups as if a tenant's time were its tokens, and at
        least a fraction of a full pass."""
        items: list[PassItem] = []
        left: Counter[str] = Counter(self.queue.expected())
        for batch in ready:
            left[batch.op.tenant] += sum(group.tokens for group in batch.groups)
        fair = fair_amount(left, self.queue.time.weights_within(left), float, self.slice_tokens)
        slice_tokens = max(self.slice_tokens // LEAST_PASS_SHARE, fair)
        share, tokens, memory = self._limits.copied_key_share, slice_tokens, float(self._limits.max_tokens)
        for batch in ready:
            if 2 * tokens <= slice_tokens and sum(group.tokens for group in batch.groups) > tokens:
                continue
            chosen: list[PackedGroup] = []
            while batch.groups:
                group = batch.groups[0]
                if (items or chosen) and (group.tokens > tokens or group.memory(share) > memory):
                    break
                chosen.append(batch.groups.popleft())
                tokens, memory = tokens - group.tokens, memory - group.memory(share)
            if chosen:
                held, reference = self.held[batch.op.policy], None
                if batch.op.reference is not None and held.reference is not None:
                    reference = held.reference[1]
                items.append(PassItem(batch, held.state, chosen, reference))
        return items

    def _on_out_of_memory(self, items: list[PassItem], error: str) -> None:
        """The pass's operations are ``lost``, and the next passes are half as long."""
        torch.cuda.empty_cache()
        self.slice_tokens = max(1, self.slice_tokens // 2)
        log.warning("out of memory in a pass; passes have at most %d tokens now: %s", self.slice_tokens, error)
        for item in items:
            self.queue.remove(item.queued)  # the gradient may contain a part of it
            self.queue.finish(item.queued.op.op, "this worker's memory did not hold the pass", "lost")

    def _export(self, op: protocol.OptimStep, held: HeldPolicy[Any]) -> AdapterExport:
        canary = canary_logprobs(self._backbone, held.state, self._canary) if self._canary else []
        return self.states.track(held.state.export(self._base, canary))

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _split(self, group: PackedGroup) -> list[PackedGroup]:
        max_tokens = max(self.slice_tokens, int(len(group.prompt) / PROMPT_SHARE))
        return group.split(max_tokens, self._limits.max_tokens, self._limits.copied_key_share)

    def _reserved_bytes(self) -> int:
        """The bytes of the copies that queued commits will make."""
        commits = [op.policy for op in self.queue.all() if isinstance(op, protocol.OptimStep) and op.upload]
        states = [held.state for policy in commits if (held := self.held.get(policy)) is not None]
        return EXPORT_BYTES * sum(state.masters.numel() for state in states)
