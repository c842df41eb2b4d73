"""The loss of a training operation, from the log-probabilities of its tokens: the same for every trainer.

It is the sum that the operation names, with its KL penalty; its metrics include how far the trainer's log-probabilities
are from the engine's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rookery import protocol
from rookery.algorithms.losses import LOSSES, PAIRED_LOSSES, LossOut, kl_penalty

ALL_LOSSES = {**LOSSES, **PAIRED_LOSSES}


def operation_loss(
    op: protocol.ForwardBackward,
    logp: Tensor,
    sampled: Tensor,
    advantages: Tensor,
    weights: Tensor,
    trajectories: Tensor,
    reference: Tensor | None,
) -> LossOut:
    """The loss of ``op`` on tokens [tokens] of the given ``logp``: ``sampled`` are the engine's log-probabilities of
    them, ``trajectories`` the numbers of theirs, from 0. ``reference`` are the log-probabilities that :func:`compares`
    asks for; it is not read where that is False. The metrics are sums over tokens, ``loss:sum`` is the total."""
    q = sampled
    if op.loss.name in PAIRED_LOSSES:
        assert reference is not None
        q = reference
    out = ALL_LOSSES[op.loss.name](logp, q, advantages, weights, trajectories, **op.loss.params)
    total, metrics = out.total, dict(out.metrics)
    if _penalizes(op):
        assert reference is not None
        penalty = kl_penalty(logp, reference, weights)
        total = total + op.kl_weight * penalty.total
        metrics |= penalty.metrics
    return LossOut(total, {"loss:sum": float(total.detach())} | metrics | agreement(logp.detach(), q))


def compares(op: protocol.ForwardBackward) -> bool:
    """Whether the loss needs the log-probabilities of the reference."""
    return op.loss.name in PAIRED_LOSSES or _penalizes(op)


def _penalizes(op: protocol.ForwardBackward) -> bool:
    """Whether the loss has a KL penalty: that is of training, not of an evaluation."""
    return op.kl_weight > 0 and not op.forward_only


def agreement(logp: Tensor, q: Tensor) -> dict[str, float]:
    """Differences between the trainer's log-probabilities and the engine's. One of 100 nats exceeds float32 as a
    ratio."""
    gap = (logp - q).double()
    return {
        "tokens": float(len(logp)),
        "ratio:sum": float(gap.exp().sum()),
        "logp_diff:sum": float(gap.abs().sum()),
        "logp_diff:max": float(gap.abs().max()) if len(logp) else 0.0,
    }


def check_loss(loss: protocol.Loss) -> None:
    """Raises ``ValueError`` for a loss that does not exist or does not take these parameters."""
    if loss.name not in ALL_LOSSES:
        raise ValueError(f"no loss is named {loss.name!r}; there are {', '.join(ALL_LOSSES)}")
    empty = torch.zeros(0)
    try:
        ALL_LOSSES[loss.name](*[empty] * 4, empty.long(), **loss.params)
    except TypeError as error:
        raise ValueError(f"loss {loss.name}: {error}") from None
