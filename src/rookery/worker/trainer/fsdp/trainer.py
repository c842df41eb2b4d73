"""The sharded trainer: one policy at a time over a :class:`~rookery.worker.trainer.fsdp.group.TrainingGroup`.

Promises, in addition to those of :class:`rookery.worker.trainer.base.Trainer`:

* It holds a LoRA or a full-parameter policy. Another policy's operations wait until the held one has had none for a
  while; then its state is read again from its version's files.
* ``step`` is one bounded slice: at most ``slice_tokens`` tokens in each process, padding included, or one trajectory,
  or one optimizer step with its export.
* A LoRA's versions are those of the native trainer: a policy moves between the two.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from rookery import protocol
from rookery.algorithms.losses import PAIRED_LOSSES
from rookery.tokenization.registry import WEIGHTS, base_reference
from rookery.worker.failures import SURVIVED
from rookery.worker.memory import MemoryUse, NoRoom, require
from rookery.worker.model.config import DecoderConfig
from rookery.worker.trainer.base import Trainer, check_rank, initial_adapter, packed_groups
from rookery.worker.trainer.fsdp import versions
from rookery.worker.trainer.microbatch import QueuedBatch
from rookery.worker.trainer.operation_queue import Export
from rookery.worker.trainer.optim import AdapterExport
from rookery.worker.trainer.packing import PackedGroup, plan_passes
from rookery.worker.trainer.states import HeldPolicy
from rookery.worker.transfer.cache import PrivateFolder

if TYPE_CHECKING:  # a second of imports, which only a group needs
    from rookery.worker.trainer.fsdp.group import TrainingGroup
    from rookery.worker.trainer.fsdp.shard import PassResult

STATE_BYTES = 16
"""Bytes per trained parameter in float32: weight, gradient and two moments."""

FLOAT32_BYTES = 4
"""Of a weight that is kept and not trained."""


class FolderExport:
    """A full-parameter version in a private folder, which is deleted with this object. See
    :class:`~rookery.worker.trainer.operation_queue.Export`."""

    def __init__(self, parent: Path, write: Callable[[Path], object]) -> None:
        """``write`` creates the files now. ``parent`` is the folder of the worker's cache of adapters."""
        self._folder = PrivateFolder(parent)
        write(self._folder.path)

    def write(self, folder: Path) -> list[str]:
        """Give the files a second name in ``folder``, or copy them where the disk has no hard links."""
        for path in self._folder.path.iterdir():
            try:
                os.link(path, folder / path.name)
            except OSError:
                shutil.copyfile(path, folder / path.name)
        return sorted(path.name for path in folder.iterdir())


@dataclass(eq=False)
class PlannedGroups:
    """Groups of ``batch`` as ``sequences``, and those of their ``passes`` (:func:`plan_passes`) that are not computed;
    ``logprobs`` are those of the computed sequences."""

    batch: QueuedBatch
    sequences: list[protocol.Datum]
    passes: list[list[list[int]]]
    logprobs: dict[int, Tensor] = field(default_factory=dict)


@dataclass(eq=False)
class PolicyInGroup:
    """The group's state is that of a policy which is held."""

    policy: str
    held: HeldPolicy[TrainingGroup]
    planned: PlannedGroups | None = None
    """The plan of the batch that is being computed."""


@dataclass(frozen=True)
class VersionInGroup:
    """The group still has the state of a version that was offloaded; no policy is held."""

    policy: str
    version: str


class FsdpTrainer(Trainer):
    def __init__(
        self,
        start: Callable[[], TrainingGroup],
        model: Path,
        *,
        max_rank: int,
        slice_tokens: int,
        memory_bytes: int,
        max_tokens: int,
        exports: Path,
        claim: Callable[[int], None] | None = None,
    ) -> None:
        """``start()`` launches the group, when the first policy is loaded. ``model`` is the prepared folder.
        The group's states take at most ``memory_bytes``, each size
        after ``claim(size)``, which may raise ``NoRoom``; a process holds a pass of ``max_tokens``. Versions are
        written below ``exports`` first."""
        super().__init__()
        self._start = start
        self._group: TrainingGroup | None = None
        self._model = model
        self._config = DecoderConfig.read(model)
        self._parameters = (model / WEIGHTS).stat().st_size // 2  # stored in bfloat16
        self._max_rank = max_rank
        self._slice_tokens = slice_tokens
        self._base = base_reference(model)
        self._memory_bytes = memory_bytes
        self._max_tokens = max_tokens
        self._exports = exports
        self._claim = claim
        self._content: PolicyInGroup | VersionInGroup | None = None
        """The state in the group; None: no policy's."""
        self._bytes = 0
        self._reference_bytes = 0
        """Of those, the bytes of the version that KL penalties compare with."""

    # --- state ------------------------------------------------------------------------------------------------------

    def initial_version(self, op: protocol.InitAdapter, source: Path | None) -> Export:
        if not op.rank:
            self._fitting(None)  # before the job samples anything for it
            return FolderExport(self._exports, lambda folder: versions.write_base(folder, self._model, self._config))
        export = AdapterExport(initial_adapter(op, source, self._config), base=self._base)
        self._fitting(export)
        return export

    def load(
        self, policy: str, lease: int, parent: protocol.AdapterRef, folder: Path, *, optimizer: bool = True
    ) -> None:
        self._make_room(policy)
        export = AdapterExport.read(folder, self._config) if parent.rank else None
        if export is not None:
            check_rank(export.adapter, self._max_rank)
        size = self._fitting(export)
        if self._claim is not None:
            self._claim(size)
        if self._group is None:
            self._group = self._start()
        try:
            self._group.call("load", folder, bool(parent.rank))
        except Exception:
            self._free()
            raise
        self._bytes = size
        self._hold(policy, lease, parent, optimizer=optimizer)

    def restore(self, policy: str, lease: int, parent: protocol.AdapterRef) -> bool:
        if self._content != VersionInGroup(policy, parent.hash):
            return False
        self._hold(policy, lease, parent).zero_grad()
        return True

    def load_reference(self, policy: str, reference: protocol.AdapterRef, folder: Path) -> None:
        held = self._held_by(policy)
        if held is None:
            return
        needed = FLOAT32_BYTES * AdapterExport.read(folder, self._config).numbers
        size = self._bytes - self._reference_bytes + needed
        require("training states with the version that a KL penalty compares with", size, self._memory_bytes)
        if self._claim is not None:
            try:
                self._claim(size)
            except NoRoom:
                self._claim(self._bytes)
                raise
        held.state.call("load_reference", folder)
        held.reference, self._bytes, self._reference_bytes = (reference.hash, None), size, needed

    def _held_by(self, policy: str) -> HeldPolicy[TrainingGroup] | None:
        content = self._content
        return content.held if isinstance(content, PolicyInGroup) and content.policy == policy else None

    def _hold(self, policy: str, lease: int, parent: protocol.AdapterRef, *, optimizer: bool = True) -> TrainingGroup:
        assert self._group is not None
        held = HeldPolicy(lease, self._group, {parent.hash: 0}, self.clock, optimizer=optimizer)
        self._content = PolicyInGroup(policy, held)
        return self._group

    def _make_room(self, policy: str) -> None:
        """Free the group's state. Raises ``NoRoom`` while another policy uses it."""
        content = self._content
        if (
            isinstance(content, PolicyInGroup)
            and content.policy != policy
            and (self.queue.pending_of(self) or not content.held.idle)
        ):
            raise NoRoom
        self._free()

    def _free(self) -> None:
        self._content, self._bytes, self._reference_bytes = None, 0, 0
        if self._claim is not None:
            self._claim(0)
        if self._group is not None:
            self._group.call("unload")

    def _fitting(self, export: AdapterExport | None) -> int:
        """The bytes of a policy's state. Raises ``UserError`` if they never fit."""
        if export is None:
            what, size = "training states of a full-parameter policy", STATE_BYTES * self._parameters
        else:
            what, size = "a sharded base and its LoRA", 2 * self._parameters + STATE_BYTES * export.numbers
        require(what, size, self._memory_bytes)
        return size

    def offload(self, policy: str) -> None:
        held = self._held_by(policy)
        if held is None:
            return
        version = held.version
        self.queue.lose(policy)
        if version is None:
            self._free()
        else:
            self._content = VersionInGroup(policy, version)

    def evict(self, policy: str) -> None:
        if self._content is not None and self._content.policy == policy:
            self.queue.lose(policy)
            self._free()

    def discard_offloaded(self, parent_hash: str) -> None:
        if isinstance(self._content, VersionInGroup) and self._content.version == parent_hash:
            self._free()

    def clear_offloaded(self) -> None:
        if isinstance(self._content, VersionInGroup):
            self._free()

    # --- operations -------------------------------------------------------------------------------------------------

    def forward_backward(
        self, op: protocol.ForwardBackward, batch: protocol.TrainingBatch, gradients: Sequence[Path] = ()
    ) -> None:

        def groups() -> list[PackedGroup]:
            if op.is_share or gradients:
                raise ValueError("a training group shares no batch with other workers")
            if op.loss.name in PAIRED_LOSSES:
                raise ValueError(f"{op.loss.name}: a training group would divide pairs; train in one process")
            if op.kl_weight and not op.parent.rank:
                raise ValueError("kl_weight: a full-parameter policy has no base model to compare with")
            return packed_groups(op, batch, self._config.context, self._config.vocab, self._max_tokens)

        self._enqueue_batch(op, (), groups)

    def memory(self) -> dict[str, MemoryUse]:
        return {"training_states": MemoryUse(self._bytes, self._memory_bytes)}

    # --- slices -----------------------------------------------------------------------------------------------------

    def compute(self, batches: list[QueuedBatch]) -> None:
        """One pass of the first batch."""
        batch = batches[0]
        if not self._begin(batch):
            return
        content = self._content
        assert isinstance(content, PolicyInGroup)
        try:
            planned = self._compute_pass(content, batch)
        except SURVIVED as error:
            self._fail(batch, error)
            return
        if not (planned.passes or batch.groups):
            self.queue.remove(batch)
            content.planned = None
            content.held.complete(batch.op)
            done = protocol.OperationDone(op=batch.op.op, metrics=batch.metrics, logprobs=batch.logprobs())
            self.queue.add(done)

    def _compute_pass(self, content: PolicyInGroup, batch: QueuedBatch) -> PlannedGroups:
        """The next pass of ``batch``, on the state ``content``; its plan, with the passes that are left."""
        assert self._group is not None
        began = time.perf_counter()
        planned = content.planned
        if planned is None or planned.batch is not batch or not planned.passes:
            planned = content.planned = self._plan(batch, self._group.options.processes)
        for shares in planned.passes[:1]:
            each = [[planned.sequences[at] for at in share] for share in shares]
            results: list[PassResult] = self._group.call("forward_backward", batch.op, each=each)
            for share, result in zip(shares, results, strict=True):
                batch.add_metrics(result.metrics)
                planned.logprobs.update(zip(share, result.logprobs, strict=True))
            trained = sum(len(sequence.tokens) for part in each for sequence in part)
            self.trained += trained
            self.queue.charge(batch.op.tenant, trained)
        del planned.passes[:1]
        if not planned.passes and (batch.op.forward_only or batch.op.logprobs):
            for at in range(len(planned.sequences)):
                batch.add_logprobs(planned.logprobs[at])
        batch.add_metrics({"seconds": time.perf_counter() - began})
        return planned

    def _plan(self, batch: QueuedBatch, processes: int) -> PlannedGroups:
        """Passes of the next groups of ``batch``: as many as fill one, and at least one group."""
        sequences: list[protocol.Datum] = []
        left = self._slice_tokens * processes
        while batch.groups and (not sequences or batch.groups[0].unshared_tokens <= left):
            left -= batch.groups[0].unshared_tokens
            sequences += batch.groups.popleft().sequences()
        passes = plan_passes([len(sequence.tokens) for sequence in sequences], processes, self._slice_tokens)
        return PlannedGroups(batch, sequences, passes)

    def _export(self, op: protocol.OptimStep, held: HeldPolicy[TrainingGroup]) -> Export:
        if not op.parent.rank:
            return FolderExport(self._exports, lambda folder: held.state.call("export", folder))
        export: AdapterExport = held.state.call("export", Path())[0]
        return AdapterExport(export.adapter, export.moments, export.step, self._base)
