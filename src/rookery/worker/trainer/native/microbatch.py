"""One packed pass: units of several operations through the decoder, each operation's loss on its own tokens, one
backward pass for all.

Promise: an operation's loss, metrics and gradient are those of its units alone; a loss that is not finite sends back
nothing and marks its policy.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rookery import protocol
from rookery.algorithms.losses import LOSSES, kl_penalty
from rookery.worker.device import finish
from rookery.worker.model.decoder import Attend, Decoder
from rookery.worker.trainer.native.backbone import forward, infer
from rookery.worker.trainer.native.lora import PackedLora, PolicyRows
from rookery.worker.trainer.native.loss_head import token_logprobs
from rookery.worker.trainer.native.optim import PolicyState
from rookery.worker.trainer.native.packing import PackedBatch, PackedGroup, pack

Attention = Callable[[Decoder, PackedBatch], Attend]
"""Makes the attention over a packed stream."""


class QueuedBatch:
    """A forward-backward operation and how far it has come: units without loss are nothing to do. ``state`` is set when
    it begins. One that is ``given_up`` (cancelled, or without ``units`` from the start) keeps its place in the queue,
    because the gradient lacks it from there on; it has, or wants, no answer."""

    def __init__(self, op: protocol.ForwardBackward, units: Sequence[PackedGroup] | None) -> None:
        self.op = op
        self.left = deque(unit for unit in units or () if unit.targets)
        self.given_up = units is None
        self.state: PolicyState | None = None
        self._metrics: dict[str, float] = {"loss:sum": 0.0, "tokens": 0.0, "seconds": 0.0}
        self._logprobs: list[bytes] = []

    def give_up(self) -> None:
        self.left.clear()
        self.given_up = True

    def add(self, metrics: dict[str, float]) -> None:
        """Sums by name, maxima where the name ends in ``:max``; what is not finite is counted instead."""
        for name, value in metrics.items():
            if not math.isfinite(value):
                name, value = "nonfinite", 1.0
            before = self._metrics.get(name, 0.0)
            self._metrics[name] = max(before, value) if name.endswith(":max") else before + value

    def add_logprobs(self, logp: Tensor) -> None:
        self._logprobs.append(logp.cpu().numpy().astype("<f4").tobytes())

    def summary(self) -> dict[str, float]:
        return dict(self._metrics)

    def logprobs(self) -> bytes:
        """float32 little-endian, the loss tokens in order of the batch (forward-only operations, and where asked)."""
        return b"".join(self._logprobs)


@dataclass(frozen=True)
class PassItem:
    """The units of one operation in a pass."""

    work: QueuedBatch
    policy: PolicyState
    units: list[PackedGroup]


def run_pass(
    decoder: Decoder, items: Sequence[PassItem], attention: Attention, recompute_tokens: int, copied: float = 0.0
) -> int:
    """Runs ``items`` in one pass (all forward-only or none) and books the results; returns the stream's tokens. Where
    they take more room than ``recompute_tokens``, copied keys counted as ``copied``, layers are computed twice."""
    began = time.perf_counter()
    units = [unit for item in items for unit in item.units]
    stream = pack(units, decoder.device)
    attend = attention(decoder, stream)
    spans, loss_spans = _spans(items, stream.spans), _spans(items, stream.loss_spans)
    lora = PackedLora([PolicyRows(s.start, s.stop, i.policy) for i, s in zip(items, spans, strict=True)])
    temperatures = _temperatures(items, loss_spans, len(stream.rows), decoder.device)
    if items[0].work.op.forward_only:
        hidden = infer(decoder, stream, attend, lora)[stream.rows]
        logp = token_logprobs(decoder, hidden, stream.targets, temperatures, derivatives=False).logp
        for item, span in zip(items, loss_spans, strict=True):
            item.work.add_logprobs(logp[span])
            _value(item, stream, span, logp[span])
    else:
        recompute = sum(unit.room(copied) for unit in units) > recompute_tokens
        passed = forward(decoder, stream, attend, lora, recompute=recompute)
        scores = token_logprobs(decoder, passed.hidden[stream.rows], stream.targets, temperatures, derivatives=True)
        assert scores.slopes is not None and scores.entropy is not None
        base = _base_logprobs(decoder, items, loss_spans, scores.logp, temperatures, attention)
        d_logp = torch.zeros_like(scores.logp)
        for item, span in zip(items, loss_spans, strict=True):
            d_logp[span] = _loss(item, stream, span, scores.logp[span], base[span])
            item.work.add({"entropy:sum": float(scores.entropy[span].sum())})
            if item.work.op.logprobs:
                item.work.add_logprobs(scores.logp[span])
        d_hidden = torch.zeros(passed.hidden.shape, dtype=scores.slopes.dtype, device=decoder.device)
        d_hidden.index_add_(0, stream.rows, scores.slopes.mul_(d_logp[:, None]))
        passed.backward(d_hidden.to(decoder.dtype))
    finish(decoder.device)
    seconds = time.perf_counter() - began
    for item, span in zip(items, spans, strict=True):
        item.work.add({"seconds": seconds * (span.stop - span.start) / len(stream.tokens)})
    return len(stream.tokens)


def _spans(items: Sequence[PassItem], of_units: Sequence[tuple[int, int]]) -> list[slice]:
    """From units' (start, stop) to items'."""
    spans, at = [], 0
    for item in items:
        own = of_units[at : at + len(item.units)]
        spans.append(slice(own[0][0], own[-1][1]))
        at += len(item.units)
    return spans


def _temperatures(
    items: Sequence[PassItem], loss_spans: Sequence[slice], rows: int, device: torch.device
) -> Tensor | None:
    """Those of the loss tokens, [rows]; None where all are 1, which saves dividing their logits."""
    if all(item.work.op.temperature == 1.0 for item in items):
        return None
    temperatures = torch.empty(rows, device=device)
    for item, span in zip(items, loss_spans, strict=True):
        temperatures[span] = item.work.op.temperature
    return temperatures


def _loss(item: PassItem, stream: PackedBatch, span: slice, logp: Tensor, base: Tensor) -> Tensor:
    """d loss / d logp of an item's tokens; books its sums. Zeros if the loss is not finite."""
    op = item.work.op
    leaf = logp.detach().requires_grad_()
    q, advantages, weights = stream.logprobs[span], stream.advantages[span], stream.weights[span]
    with torch.enable_grad():
        out = LOSSES[op.loss.name](leaf, q, advantages, weights, _sequences(item, stream, span), **op.loss.params)
        total, metrics = out.total, dict(out.metrics)
        if op.kl_weight:
            penalty = kl_penalty(leaf, base, weights)
            total = total + op.kl_weight * penalty.total
            metrics |= penalty.metrics
    value = float(total.detach())
    item.work.add({"loss:sum": value} | metrics | _agreement(logp, q))
    if not math.isfinite(value):
        item.policy.broken = True
        return torch.zeros_like(logp)
    (gradient,) = torch.autograd.grad(total, leaf)
    return gradient


def _value(item: PassItem, stream: PackedBatch, span: slice, logp: Tensor) -> None:
    """Books the loss of a forward-only operation."""
    loss, q = item.work.op.loss, stream.logprobs[span]
    sequences = _sequences(item, stream, span)
    out = LOSSES[loss.name](logp, q, stream.advantages[span], stream.weights[span], sequences, **loss.params)
    item.work.add({"loss:sum": float(out.total)} | out.metrics | _agreement(logp, q))


def _agreement(logp: Tensor, q: Tensor) -> dict[str, float]:
    """How far the trainer's log-probabilities are from the engine's."""
    gap = logp - q
    return {
        "tokens": float(len(logp)),
        "ratio:sum": float(gap.exp().sum()),
        "logp_diff:sum": float(gap.abs().sum()),
        "logp_diff:max": float(gap.abs().max()) if len(logp) else 0.0,
    }


def _sequences(item: PassItem, stream: PackedBatch, span: slice) -> Tensor:
    """Numbers from 0 for the trajectories of an item's loss tokens."""
    counts = torch.tensor([len(unit.sources) for unit in item.units], device=stream.members.device)
    most = max((max(unit.members, default=0) for unit in item.units), default=0) + 1
    units = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
    return (units * most + stream.members[span]).unique(return_inverse=True)[1]


def _base_logprobs(
    decoder: Decoder,
    items: Sequence[PassItem],
    spans: Sequence[slice],
    logp: Tensor,
    temperatures: Tensor | None,
    attention: Attention,
) -> Tensor:
    """Like ``logp``, under the base model, where an operation's KL penalty needs it, zeros elsewhere: the decoder with
    every adapter switched off."""
    base = torch.zeros_like(logp)
    needed = [(item, span) for item, span in zip(items, spans, strict=True) if item.work.op.kl_weight]
    if needed:
        part = pack([unit for item, _ in needed for unit in item.units], decoder.device)
        hidden = infer(decoder, part, attention(decoder, part), None)[part.rows]
        rows = torch.cat([torch.arange(span.start, span.stop, device=decoder.device) for _, span in needed])
        warmth = None if temperatures is None else temperatures[rows]
        base[rows] = token_logprobs(decoder, hidden, part.targets, warmth, derivatives=False).logp
    return base
