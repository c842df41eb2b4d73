"""One packed pass: groups of several operations through the decoder, each operation's loss on its own tokens, one
backward pass for all.

Promise: an operation's loss, metrics and gradient are those of its groups alone; a loss that is not finite sends back
no gradient and marks its policy.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rookery import protocol
from rookery.algorithms.losses import LossOut
from rookery.worker.device import finish
from rookery.worker.trainer.loss_head import TokenLogprobs
from rookery.worker.trainer.operation_loss import compares, operation_loss
from rookery.worker.trainer.optim import PolicyState
from rookery.worker.trainer.packed_pass import Backbone, PolicyRows
from rookery.worker.trainer.packing import LossToken, LossTokens, PackedBatch, PackedGroup, pack_groups


class QueuedBatch:
    """A forward-backward operation and its progress. ``groups`` are those not yet computed; ``state`` is set when the
    operation begins."""

    def __init__(
        self, op: protocol.ForwardBackward, groups: Sequence[PackedGroup], gradients: Sequence[Path] = ()
    ) -> None:
        """Groups without loss tokens are skipped. ``gradients`` are folders of gradients to add after them."""
        self.op = op
        self.gradients = gradients
        self.groups = deque(group for group in groups if len(group.loss))
        self.state: object = None
        self.metrics: dict[str, float] = {"loss:sum": 0.0, "tokens": 0.0, "seconds": 0.0}
        self._logprobs: list[bytes] = []

    def add_metrics(self, metrics: dict[str, float]) -> None:
        """As :func:`protocol.add_metrics`; ``nonfinite`` counts the values that are not finite."""
        protocol.add_metrics(self.metrics, metrics)
        if count := sum(not math.isfinite(value) for value in metrics.values()):
            protocol.add_metrics(self.metrics, {"nonfinite": float(count)})

    def add_logprobs(self, logp: Tensor) -> None:
        self._logprobs.append(logp.cpu().numpy().astype("<f4").tobytes())

    def logprobs(self) -> bytes:
        """float32 little-endian, the loss tokens in order of the batch (of forward-only operations, and on request)."""
        return b"".join(self._logprobs)


Queued = QueuedBatch | protocol.OptimStep


def operation_of(queued: Queued) -> protocol.StateOperation:
    return queued.op if isinstance(queued, QueuedBatch) else queued


@dataclass(frozen=True)
class PassItem:
    """The groups of one operation in a pass. A KL penalty compares with ``reference``, or with the base model."""

    queued: QueuedBatch
    policy: PolicyState
    groups: list[PackedGroup]
    reference: PolicyState | None = None


def run_pass(backbone: Backbone, items: Sequence[PassItem]) -> int:
    """Computes ``items`` in one pass (all forward-only or none) and records the results in their operations; the number
    of tokens. Layers are recomputed if the groups exceed ``resident_tokens`` of the backbone's limits."""
    began = time.perf_counter() - backbone.paused
    groups = [group for item in items for group in item.groups]
    batch, limits = pack_groups(groups, backbone.model.device), backbone.limits
    rows, loss_rows = _by_item(items, batch.row_ranges), _by_item(items, batch.loss_ranges)
    policies = [PolicyRows(r.start, r.stop, item.policy) for item, r in zip(items, rows, strict=True)]
    temperatures = _temperatures(items, loss_rows, len(batch.sources), backbone.model.device)
    if items[0].queued.op.forward_only:
        logp = _scores(backbone, backbone.infer(batch, policies), batch, temperatures, derivatives=False).logp
        reference = _reference_logprobs(backbone, items, loss_rows, logp, temperatures)
        for item, span in zip(items, loss_rows, strict=True):
            item.queued.add_logprobs(logp[span])
            _add_loss(item, batch, span, logp[span], reference[span])
    else:
        recompute = sum(group.memory(limits.copied_key_share) for group in groups) > limits.resident_tokens
        passed = backbone.forward(batch, policies, recompute=recompute)
        scores = _scores(backbone, passed.hidden, batch, temperatures, derivatives=True)
        assert scores.entropy is not None
        reference = _reference_logprobs(backbone, items, loss_rows, scores.logp, temperatures)
        d_logp = torch.zeros_like(scores.logp)
        for item, span in zip(items, loss_rows, strict=True):
            d_logp[span] = _loss_gradient(item, batch, span, scores.logp[span], reference[span])
            item.queued.add_metrics({"entropy:sum": float(scores.entropy[span].sum())})
            if item.queued.op.logprobs:
                item.queued.add_logprobs(scores.logp[span])
        d_hidden = torch.zeros(passed.hidden.shape, dtype=d_logp.dtype, device=backbone.model.device)
        d_hidden.index_add_(0, batch.predictors, scores.gradient(d_logp))
        passed.backward(d_hidden.to(backbone.model.dtype))
    finish(backbone.model.device)
    seconds = time.perf_counter() - backbone.paused - began
    for item, span in zip(items, rows, strict=True):
        item.queued.add_metrics({"seconds": seconds * (span.stop - span.start) / len(batch.tokens)})
    return len(batch.tokens)


def _scores(
    backbone: Backbone, hidden: Tensor, batch: PackedBatch, temperatures: Tensor | None, *, derivatives: bool
) -> TokenLogprobs:
    """The scores of the batch's loss tokens, from the output of all its rows."""
    if temperatures is not None and batch.soft is not None:
        temperatures = temperatures[batch.soft.heads]
    rows = hidden[batch.predictors]
    return backbone.logprobs(rows, batch.targets, temperatures, derivatives=derivatives, soft=batch.soft)


def _by_item(items: Sequence[PassItem], of_groups: Sequence[tuple[int, int]]) -> list[slice]:
    """Slices of items, from (start, stop) of groups."""
    slices, at = [], 0
    for item in items:
        own = of_groups[at : at + len(item.groups)]
        slices.append(slice(own[0][0], own[-1][1]))
        at += len(item.groups)
    return slices


def _temperatures(
    items: Sequence[PassItem], loss_rows: Sequence[slice], count: int, device: torch.device
) -> Tensor | None:
    """The temperatures of the loss tokens, [count]; None if all are 1, which saves the division of their logits."""
    if all(item.queued.op.temperature == 1.0 for item in items):
        return None
    temperatures = torch.empty(count, device=device)
    for item, span in zip(items, loss_rows, strict=True):
        temperatures[span] = item.queued.op.temperature
    return temperatures


def _loss_gradient(item: PassItem, batch: PackedBatch, span: slice, logp: Tensor, reference: Tensor) -> Tensor:
    """d loss / d logp of an item's tokens; adds its metrics. Zeros if the loss is not finite."""
    leaf = logp.detach().requires_grad_()
    with torch.enable_grad():
        loss = _add_loss(item, batch, span, leaf, reference)
    if not math.isfinite(loss.metrics["loss:sum"]):
        item.policy.nonfinite_loss = True
        return torch.zeros_like(logp)
    (gradient,) = torch.autograd.grad(loss.total, leaf)
    return gradient


def _add_loss(item: PassItem, batch: PackedBatch, span: slice, logp: Tensor, reference: Tensor) -> LossOut:
    """The loss of an item's tokens; adds its metrics to the operation's."""
    columns = batch.logprobs[span], batch.advantages[span], batch.weights[span], _trajectories(item, batch, span)
    loss = operation_loss(item.queued.op, logp, *columns, reference)
    item.queued.add_metrics(loss.metrics)
    return loss


def _trajectories(item: PassItem, batch: PackedBatch, span: slice) -> Tensor:
    """Numbers from 0 for the trajectories of an item's loss tokens."""
    counts = torch.tensor([len(group.loss) for group in item.groups], device=batch.members.device)
    members = max((int(group.loss.members[-1]) for group in item.groups), default=0) + 1
    groups = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    return (groups * members + batch.members[span]).unique(return_inverse=True)[1]


def _reference_logprobs(
    backbone: Backbone,
    items: Sequence[PassItem],
    loss_rows: Sequence[slice],
    logp: Tensor,
    temperatures: Tensor | None,
) -> Tensor:
    """Like ``logp``, under the base model or the operation's reference, for operations that compare with it; zeros
    elsewhere."""
    found, device = torch.zeros_like(logp), backbone.model.device
    needed = [(item, span) for item, span in zip(items, loss_rows, strict=True) if compares(item.queued.op)]
    for with_reference in (False, True):  # a pass has adapters in all rows or in none
        chosen = [(item, span) for item, span in needed if (item.reference is not None) == with_reference]
        if not chosen:
            continue
        batch = pack_groups([group for item, _ in chosen for group in item.groups], device)
        ranges = _by_item([item for item, _ in chosen], batch.row_ranges)
        policies = [
            PolicyRows(rows.start, rows.stop, item.reference)
            for (item, _), rows in zip(chosen, ranges, strict=True)
            if item.reference is not None
        ]
        hidden = backbone.infer(batch, policies)
        at = torch.cat([torch.arange(span.start, span.stop, device=device) for _, span in chosen])
        of_rows = None if temperatures is None else temperatures[at]
        found[at] = _scores(backbone, hidden, batch, of_rows, derivatives=False).logp
    return found


def canary_logprobs(backbone: Backbone, policy: PolicyState, tokens: list[int]) -> list[float]:
    """Log-probabilities of ``tokens``, all but the first, under ``policy`` as it is now."""
    loss = [LossToken(row, token, 0.0, 0.0, 0.0) for row, token in enumerate(tokens[1:])]
    group = PackedGroup(tokens[:-1], [[]], LossTokens.of(loss))
    batch = pack_groups([group], backbone.model.device)
    hidden = backbone.infer(batch, [PolicyRows(0, len(batch.tokens), policy)])
    return [float(x) for x in _scores(backbone, hidden, batch, None, derivatives=False).logp]
