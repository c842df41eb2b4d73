"""The trainer of a worker: packs several tenants' trajectories into one pass, keeps their gradients and steps apart.

Promises:

* ``step`` is one bounded slice: one packed pass of at most ``slice_tokens`` tokens, or one optimizer step. A larger
  unit is cut between its members. A trajectory stays whole: a longer one runs alone, and where memory does not hold it,
  or a GPU's not the pass, the operation is answered ``lost``: another worker may have more. Slices go round the
  tenants, within a tenant round its policies, within a policy in order of arrival.
* An operation runs only on the state it names: (policy, lease, parent, steps). Anything else is answered ``stale``. So
  is an optimizer step whose gradient is not whole (an operation before it failed or was cancelled).
* What is wrong with one policy's operation is answered for that operation. A loss or gradient that is not finite skips
  that policy's step and touches no other policy.
* Metrics are finite numbers: what is not is left out, and ``nonfinite`` counts it.

All methods belong to one thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from rookery import protocol
from rookery.algorithms.losses import LOSSES
from rookery.errors import UserError
from rookery.worker.device import finish, fuses
from rookery.worker.model.adapter import init_adapter, read_adapter
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import Decoder
from rookery.worker.trainer.native.attention import ChunkedAttention, ChunkSizes
from rookery.worker.trainer.native.backbone import PassLimits, lengths_for
from rookery.worker.trainer.native.microbatch import Attention, PassItem, QueuedBatch, run_pass
from rookery.worker.trainer.native.optim import Export, PolicyState
from rookery.worker.trainer.native.packing import PackedGroup
from rookery.worker.trainer.native.state_cache import TrainerStateCache
from rookery.worker.trainer.native.varlen_attention import VarlenAttention

log = logging.getLogger("rookery.worker.trainer")

PROMPT_SHARE = 0.5
"""What a prompt may take of a piece of a unit that is cut. Every piece computes the prompt once more, so those of a
long prompt may be longer than a slice, up to about twice the shortest possible, and are not nearly all prompt. What
memory holds bounds them all the same."""


@dataclass(frozen=True)
class TrainerResult:
    """An operation's answer, as ``wire.Done`` carries it; ``export`` is what a commit has to write and upload."""

    op: str
    error: str = ""
    category: Literal["", "stale", "failed", "lost"] = ""
    metrics: dict[str, float] = field(default_factory=dict)
    logprobs: bytes = b""
    export: Export | None = None


@dataclass
class _Held:
    """A policy in memory. ``marks`` maps hashes of versions that this state descends from to the number of steps taken
    when it was that version; ``taken`` counts all steps since the load, ``exported`` those before the last export.
    ``batches`` counts operations in the gradient; ``whole`` turns False when one of them is missing."""

    lease: int
    state: PolicyState
    marks: dict[str, int]
    taken: int = 0
    exported: int | None = None
    batches: int = 0
    whole: bool = True


class NativeTrainer:
    def __init__(
        self,
        decoder: Decoder,
        *,
        max_rank: int,
        slice_tokens: int,
        lengths: PassLimits | None = None,
        attention: Attention | None = None,
        base_model: str = "",
        trainer_state_cache_bytes: int = 0,
    ) -> None:
        """Without them, ``lengths`` and ``attention`` are those of the decoder's device. ``base_model`` is the name
        that exported adapters give as theirs; ``trainer_state_cache_bytes`` of states that rest stay in main memory."""
        self._decoder = decoder
        self._max_rank = max_rank
        self._lengths = lengths or lengths_for(decoder)
        self._slice_tokens = min(slice_tokens, self._lengths.max_tokens)
        self._attention = attention or attention_for(decoder)
        self._base_model = base_model
        self._held: dict[str, _Held] = {}
        self.cache = TrainerStateCache(trainer_state_cache_bytes)
        self._queues: dict[str, dict[str, deque[QueuedBatch | protocol.OptimStep]]] = {}  # tenant → policy → operations
        self._finished: list[TrainerResult] = []
        self.trained = 0
        """Tokens trained on so far, prompts counted once (in each piece of a unit that is cut)."""

    # --- state ------------------------------------------------------------------------------------------------------

    def holds(self, policy: str, lease: int, parent_hash: str, steps: int) -> bool:
        """Whether an operation that names this state can be queued now (queued optimizer steps counted as taken)."""
        held = self._held.get(policy)
        ahead = sum(isinstance(op, protocol.OptimStep) and op.adam is not None for op in self._queue(policy))
        return held is not None and self._at(held, lease, parent_hash, steps - ahead)

    def load(self, policy: str, lease: int, parent: protocol.AdapterRef, folder: Path) -> None:
        """Take up ``policy`` from a version's files, without gradient. Raises ``UserError`` for a folder that is no
        adapter of this model or one beyond ``max_rank``."""
        state = PolicyState.load(folder, self._decoder.config, self._decoder.dtype, self._decoder.device)
        if state.rank > self._max_rank:
            raise UserError(f"the adapter's rank {state.rank} is above this worker's max_rank {self._max_rank}")
        self._held[policy] = _Held(lease, state, {parent.hash: 0})

    def restore(self, policy: str, lease: int, parent: protocol.AdapterRef) -> bool:
        """Take up ``policy`` from what was put aside of its version; False where there is nothing."""
        export = self.cache.pop(parent.hash)
        if export is None:
            return False
        state = PolicyState.of(export, self._decoder.config, self._decoder.dtype, self._decoder.device)
        self._held[policy] = _Held(lease, state, {parent.hash: 0})
        return True

    def offload(self, policy: str) -> None:
        """:meth:`forget`, but the state stays aside if it is a version now: steps since are lost, as is a gradient."""
        held = self._held.get(policy)
        if held is not None:
            for version, taken in held.marks.items():
                if taken == held.taken:
                    self.cache.put(version, held.state.export(self._base_model))
                    break
        self.evict(policy)

    def mark_committed(self, policy: str, lease: int, ref: protocol.AdapterRef) -> None:
        """The last export of ``policy`` is version ``ref`` now. Operations on their way may still name its parent."""
        held = self._held.get(policy)
        if held is None or held.lease != lease or held.exported is None:
            log.info("a commit of a state that is not held", extra={"policy": policy, "version": ref.version})
            return
        newest = max(held.marks, key=lambda name: held.marks[name])
        held.marks = {newest: held.marks[newest], ref.hash: held.exported}

    def evict(self, policy: str) -> None:
        """Drop the policy's state; what is still queued for it is answered ``lost``."""
        for op in list(self._queue(policy)):
            self._remove(policy, op)
            if not (isinstance(op, QueuedBatch) and op.given_up):
                self._finished.append(TrainerResult(_name(op), "the policy was dropped from this worker", "lost"))
        self._held.pop(policy, None)

    # --- operations -------------------------------------------------------------------------------------------------

    def forward_backward(self, op: protocol.ForwardBackward, batch: protocol.TrainingBatch) -> None:
        """Queue it. A batch that cannot be computed is answered at once: ``failed``, or ``lost`` if not here."""
        units: list[PackedGroup] | None
        try:
            packed = [PackedGroup.from_wire(unit) for unit in batch.groups]
            packed += [PackedGroup.from_datum(datum) for datum in batch.data]
            units = [piece for unit in packed if unit.targets for piece in self._pieces(self._checked(unit))]
            _check_loss(op.loss)
        except (ValueError, MemoryError) as error:
            category: Literal["failed", "lost"] = "failed" if isinstance(error, ValueError) else "lost"
            self._finished.append(TrainerResult(op.op, str(error), category))
            units = None
        self._enqueue(op.tenant, op.policy, QueuedBatch(op, units))

    def optim_step(self, op: protocol.OptimStep) -> None:
        """Queue it, behind the policy's earlier operations."""
        self._enqueue(op.tenant, op.policy, op)

    def cancel(self, op: str) -> None:
        """Give up a queued or half-done operation without an answer."""
        for policies in list(self._queues.values()):
            for policy, queue in list(policies.items()):
                for found in [queued for queued in queue if _name(queued) == op]:
                    if isinstance(found, QueuedBatch):
                        found.give_up()
                    else:
                        self._remove(policy, found)

    def drain(self) -> list[TrainerResult]:
        """Answers since the last time, in order."""
        finished, self._finished = self._finished, []
        return finished

    @property
    def pending(self) -> int:
        """Operations that are queued or half done."""
        return sum(len(queue) for policies in self._queues.values() for queue in policies.values())

    # --- slices -----------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """One slice; False when nothing is queued."""
        turn = list(self._turns())
        if not turn:
            return False
        first = turn[0][0]
        self._rotate(*turn[0][1:])
        if isinstance(first, protocol.OptimStep):
            self._optimise(first)
        else:
            self._pass([op for op, _, _ in turn if isinstance(op, QueuedBatch)])
        return True

    def _turns(self) -> Iterator[tuple[QueuedBatch | protocol.OptimStep, str, str]]:
        """(operation, tenant, policy): every policy's first, tenants by turns."""
        rows = [[(queue[0], tenant, policy) for policy, queue in p.items()] for tenant, p in self._queues.items()]
        for place in range(max(map(len, rows), default=0)):
            yield from (row[place] for row in rows if place < len(row))

    def _rotate(self, tenant: str, policy: str) -> None:
        """The tenant, and the policy within it, go to the end of the line."""
        policies = self._queues.pop(tenant)
        policies[policy] = policies.pop(policy)
        self._queues[tenant] = policies

    def _pass(self, works: list[QueuedBatch]) -> None:
        """One packed pass, begun by the first of ``works``; others of its kind join while it is not half full. Every
        policy in a pass costs products of its own, so one after another gives what it has, and a pass of half a slice
        is as quick per token without company: turns are whole passes."""
        ready = [work for work in works if work.op.forward_only == works[0].op.forward_only and self._begin(work)]
        chosen: dict[QueuedBatch, list[PackedGroup]] = {work: [] for work in ready}
        fits, left, room = self._lengths, self._slice_tokens, float(self._lengths.max_tokens)
        for work in ready:
            if 2 * left <= self._slice_tokens:
                break
            while work.left:
                unit, first = work.left[0], left == self._slice_tokens
                if not first and (unit.tokens > left or unit.room(fits.copied_key_share) > room):
                    break
                chosen[work].append(work.left.popleft())
                left, room = left - unit.tokens, room - unit.room(fits.copied_key_share)
        items = [PassItem(work, self._held[work.op.policy].state, units) for work in ready if (units := chosen[work])]
        try:
            if items:
                self.trained += run_pass(
                    self._decoder, items, self._attention, fits.resident_tokens, fits.copied_key_share
                )
        except torch.OutOfMemoryError as error:
            self._too_much(items, str(error))
        for work in ready:
            if not work.left and not work.given_up:
                self._remove(work.op.policy, work)
                self._finished.append(TrainerResult(work.op.op, metrics=work.summary(), logprobs=work.logprobs()))

    def _too_much(self, items: list[PassItem], error: str) -> None:
        """A GPU had no memory for this pass: its operations are answered ``lost``, and passes are half as long now."""
        torch.cuda.empty_cache()
        self._slice_tokens = max(1, self._slice_tokens // 2)
        log.warning("no memory for a pass; passes have %d tokens now: %s", self._slice_tokens, error)
        for item in items:
            item.work.give_up()  # the gradient may have a part of it
            self._finished.append(TrainerResult(item.work.op.op, "this worker's memory did not hold the pass", "lost"))

    def _begin(self, work: QueuedBatch) -> bool:
        """Whether ``work`` can go on, on the state that it names; else it is gone, and answered if it was not yet."""
        op = work.op
        held = self._held.get(op.policy)
        named = held is not None and self._at(held, op.lease, op.parent.hash, op.steps)
        if held is None or not named or work.given_up or work.state not in (None, held.state):
            self._remove(op.policy, work)
            if not work.given_up:
                self._finished.append(TrainerResult(op.op, "this worker holds another state of the policy", "stale"))
            if held is not None and named and not op.forward_only:
                held.whole = False  # the gradient is not what the controller takes it for, until a fresh one begins
            return False
        if work.state is None:
            work.state = held.state
            if not op.forward_only:
                if op.zero_grad:
                    held.state.zero()
                    held.batches, held.whole = 0, True
                held.batches += 1
        return True

    def _optimise(self, op: protocol.OptimStep) -> None:
        began = time.perf_counter()
        self._remove(op.policy, op)
        held = self._held.get(op.policy)
        if held is None or not self._at(held, op.lease, op.parent.hash, op.steps):
            self._finished.append(TrainerResult(op.op, "this worker holds another state of the policy", "stale"))
            return
        metrics: dict[str, float] = {}
        if op.adam is not None:
            if not (held.whole and held.batches):
                self._finished.append(TrainerResult(op.op, "the gradient of this step is not whole", "stale"))
                return
            metrics = held.state.adamw(op.adam, op.scale)
            held.batches = 0
            if metrics["skipped"]:
                log.warning("a step was skipped: loss or gradient is not finite", extra={"tenant": op.tenant})
            else:
                held.taken += 1
        export = None
        if op.commit:
            export, held.exported = held.state.export(self._base_model), held.taken
        finish(self._decoder.device)
        metrics["seconds"] = time.perf_counter() - began
        self._finished.append(TrainerResult(op.op, metrics=metrics, export=export))

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _at(self, held: _Held, lease: int, parent_hash: str, steps: int) -> bool:
        mark = held.marks.get(parent_hash)
        return held.lease == lease and mark is not None and mark + steps == held.taken

    def _checked(self, unit: PackedGroup) -> PackedGroup:
        """``unit`` if this model can read it; ``ValueError`` otherwise."""
        config = self._decoder.config
        longest = len(unit.prompt) + max(map(len, unit.tails), default=0)
        if longest > config.context:
            raise ValueError(f"a trajectory of {longest} tokens is longer than the model's context of {config.context}")
        if longest > self._lengths.max_tokens:
            bound = f"the {self._lengths.max_tokens} that fit this worker's memory"
            raise MemoryError(f"a trajectory of {longest} tokens is longer than {bound}")
        read = [*unit.prompt, *unit.targets, *(token for tail in unit.tails for token in tail)]
        if min(read) < 0 or max(read) >= config.vocab:
            raise ValueError(f"a token id is outside of the vocabulary of {config.vocab}")
        return unit

    def _pieces(self, unit: PackedGroup) -> list[PackedGroup]:
        """``unit`` as slices take it."""
        most = max(self._slice_tokens, int(len(unit.prompt) / PROMPT_SHARE))
        return unit.split(most, self._lengths.max_tokens, self._lengths.copied_key_share)

    def _queue(self, policy: str) -> deque[QueuedBatch | protocol.OptimStep]:
        return next((p[policy] for p in self._queues.values() if policy in p), deque())

    def _enqueue(self, tenant: str, policy: str, op: QueuedBatch | protocol.OptimStep) -> None:
        self._queues.setdefault(tenant, {}).setdefault(policy, deque()).append(op)

    def _remove(self, policy: str, op: QueuedBatch | protocol.OptimStep) -> None:
        for tenant, policies in list(self._queues.items()):
            if policy in policies and op in policies[policy]:
                policies[policy].remove(op)
                if not policies[policy]:
                    del policies[policy]
                if not policies:
                    del self._queues[tenant]


def attention_for(decoder: Decoder) -> Attention:
    """What computes attention over packed streams on the decoder's device: without fused kernels all of a sequence's
    scores would be there at once, in chunks they are not."""
    return VarlenAttention if fuses(decoder.device, decoder.dtype) else partial(ChunkedAttention, chunks=ChunkSizes())


def _check_loss(loss: protocol.Loss) -> None:
    """``ValueError`` for a loss that does not exist or does not take these parameters."""
    if loss.name not in LOSSES:
        raise ValueError(f"no loss is named {loss.name!r}; there are {', '.join(LOSSES)}")
    nothing = torch.zeros(0)
    try:
        LOSSES[loss.name](*[nothing] * 4, nothing.long(), **loss.params)
    except TypeError as error:
        raise ValueError(f"loss {loss.name}: {error}") from None


def _name(op: QueuedBatch | protocol.OptimStep) -> str:
    return op.op.op if isinstance(op, QueuedBatch) else op.op


def initial_version(
    config: DecoderConfig, op: protocol.InitAdapter, source: Path | None, base_model: str = ""
) -> Export:
    """Version 0 of a policy: a new adapter, or ``source``'s weights (their rank and alpha, which must be the ones asked
    for). Raises ``UserError``."""
    if source is None:
        return Export(init_adapter(config, op.rank, op.alpha, op.targets, op.seed), {}, 0, base_model)
    adapter = read_adapter(source, config)
    if adapter.rank != op.rank:
        raise UserError(f"the adapter to start from has rank {adapter.rank}, the policy asks for {op.rank}")
    return Export(adapter, {}, 0, base_model)
