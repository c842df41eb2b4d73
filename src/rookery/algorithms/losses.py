"""Losses: pure sums over tokens, as their sources state them.

Promises:

* A loss is ``Σ weight · term`` over the tokens it is given. Nothing is averaged or normalised here: an algorithm's
  normalisation lies in the weights. Twice the weights, or the batch given twice, is twice the gradient.
* A token's loss depends on the model through that token's log-probability alone (``gspo`` adds its sequence's mean
  ratio as a constant), so a caller needs no more than ``d total / d logp`` to differentiate a whole model.
* Works in whatever floating type it is given; no parameter has a default here (``spec.LOSS_PARAMETERS`` holds them).

Notation, per token: ``logp`` the log-probability under the policy that is trained, ``q`` the one recorded by the
engine under the policy that sampled it (same temperature), ``r = exp(logp - q)``, ``A`` the advantage, ``sg`` a
constant for differentiation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


@dataclass(frozen=True)
class LossOut:
    """``total`` is a scalar that can be differentiated with respect to ``logp``; ``metrics`` are sums over tokens."""

    total: Tensor
    metrics: dict[str, float] = field(default_factory=dict)


LossFn = Callable[..., LossOut]
"""``loss(logp, q, advantages, weights, segments, **params)``: four floating tensors ``[tokens]`` and ``segments``,
int64 ``[tokens]``, numbers from 0 that say which trajectory a token belongs to. Tokens without loss are left out by
the caller. Unknown or missing parameters raise ``TypeError``."""


def _count(which: Tensor) -> float:
    return float(which.sum())


def cross_entropy(logp: Tensor, q: Tensor, advantages: Tensor, weights: Tensor, segments: Tensor) -> LossOut:
    """``Σ −w·logp``: maximum likelihood on the given tokens (advantages and ``q`` play no part)."""
    return LossOut((-weights * logp).sum())


def importance_sampling(logp: Tensor, q: Tensor, advantages: Tensor, weights: Tensor, segments: Tensor) -> LossOut:
    """``Σ −w·r·A``: the off-policy policy gradient, unclipped (as in the Tinker API's ``importance_sampling``)."""
    ratio = (logp - q).exp()
    return LossOut((-weights * ratio * advantages).sum())


def _clipped(ratio: Tensor, advantages: Tensor, weights: Tensor, low: float, high: float) -> LossOut:
    plain = ratio * advantages
    bounded = ratio.clamp(low, high) * advantages
    return LossOut(
        (-weights * torch.minimum(plain, bounded)).sum(), {"clipped:sum": _count((bounded < plain).detach())}
    )


def ppo(
    logp: Tensor,
    q: Tensor,
    advantages: Tensor,
    weights: Tensor,
    segments: Tensor,
    *,
    clip_low_threshold: float,
    clip_high_threshold: float,
) -> LossOut:
    """``Σ −w·min(r·A, clamp(r, lo, hi)·A)``: Schulman et al. 2017 (arXiv 1707.06347), eq. 7, with separate bounds
    ``lo`` = 1 − ε and ``hi`` = 1 + ε. Clipped tokens, those without gradient, are counted."""
    return _clipped((logp - q).exp(), advantages, weights, clip_low_threshold, clip_high_threshold)


def cispo(
    logp: Tensor,
    q: Tensor,
    advantages: Tensor,
    weights: Tensor,
    segments: Tensor,
    *,
    clip_low_threshold: float,
    clip_high_threshold: float,
) -> LossOut:
    """``Σ −w·sg(clamp(r, lo, hi))·A·logp``: MiniMax-M1 (arXiv 2506.13585), eq. 4–5. The clamp is a weight, not a gate:
    a clipped token keeps a gradient."""
    ratio = (logp.detach() - q).exp()
    weight = ratio.clamp(clip_low_threshold, clip_high_threshold)
    return LossOut((-weights * weight * advantages * logp).sum(), {"clipped:sum": _count(weight != ratio)})


def aipo(logp: Tensor, q: Tensor, advantages: Tensor, weights: Tensor, segments: Tensor, *, rho: float) -> LossOut:
    """``Σ −w·sg(min(r, ρ))·A·logp``: LlamaRL (arXiv 2505.24034), section on AIPO; one-sided.

    The bounded ratio is a constant: the published update is ``min(r, ρ)·A·∇logp``, which keeps ``ρ·A·∇logp`` above the
    bound. A differentiable ``min(r, ρ)·A`` would have no gradient there."""
    ratio = (logp.detach() - q).exp()
    return LossOut((-weights * ratio.clamp(max=rho) * advantages * logp).sum(), {"clipped:sum": _count(ratio > rho)})


def dro(logp: Tensor, q: Tensor, advantages: Tensor, weights: Tensor, segments: Tensor, *, beta: float) -> LossOut:
    """``Σ −w·(A·logp − β/2·(logp − q)²)``: direct reward optimisation (Richemond et al. 2024, arXiv 2405.19107), per
    token and with the advantage in the place of reward minus value, as the Tinker API states it."""
    return LossOut((-weights * (advantages * logp - beta / 2 * (logp - q).square())).sum())


def gspo(
    logp: Tensor,
    q: Tensor,
    advantages: Tensor,
    weights: Tensor,
    segments: Tensor,
    *,
    clip_low_threshold: float,
    clip_high_threshold: float,
) -> LossOut:
    """``ppo`` with the sequence's ratio ``exp(mean(sg(logp) − q) + logp − sg(logp))``, the mean over the trajectory's
    tokens whose weight is not 0: GSPO-token (Zheng et al. 2025, arXiv 2507.18071), eq. 13–14. Its value is the same for
    all tokens of a trajectory, its gradient is each token's own."""
    counted = weights != 0
    gap = (logp.detach() - q).where(counted, 0)
    sequences = int(segments.max()) + 1 if segments.numel() else 0
    sums = torch.zeros(sequences, dtype=gap.dtype, device=gap.device).index_add_(0, segments, gap)
    means = sums / torch.bincount(segments[counted], minlength=sequences).clamp(min=1)
    ratio = (means[segments] + logp - logp.detach()).exp()
    return _clipped(ratio, advantages, weights, clip_low_threshold, clip_high_threshold)


def dpo(logp: Tensor, q: Tensor, advantages: Tensor, weights: Tensor, segments: Tensor, *, beta: float) -> LossOut:
    """``Σ −w·log σ(β·Σ A·(logp − q))``, the inner sum over the tokens of a pair: direct preference optimisation
    (Rafailov et al. 2023, arXiv 2305.18290), eq. 7. Segments 2k and 2k + 1 are a pair; ``A`` is 1 on the tokens of the
    preferred reply and −1 on those of the other, ``q`` the reference's log-probability, ``w`` the same on all tokens of
    a pair. Metrics are sums over pairs: those in which the preferred reply gained more than the other, and the implicit
    rewards ``β·Σ(logp − q)`` of both."""
    pair = segments // 2
    pairs = int(pair.max()) + 1 if pair.numel() else 0

    def sums(values: Tensor) -> Tensor:
        return torch.zeros(pairs, dtype=values.dtype, device=values.device).index_add(0, pair, values)

    gains = beta * (logp - q)
    margin = sums(gains * advantages)
    of_pair = sums(weights) / torch.bincount(pair, minlength=pairs).clamp(min=1)
    with torch.no_grad():
        chosen, rejected = sums(gains * (advantages > 0)), sums(gains * (advantages < 0))
    return LossOut(
        (-of_pair * logsigmoid(margin)).sum(),
        {
            "pairs": float(pairs),
            "accuracy:pairs": _count(margin.detach() > 0),
            "margin:pairs": float(margin.detach().sum()),
            "chosen_reward:pairs": float(chosen.sum()),
            "rejected_reward:pairs": float(rejected.sum()),
        },
    )


LOSSES: dict[str, LossFn] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "aipo": aipo,
    "dro": dro,
    "gspo": gspo,
}
"""By the names that a job and the wire use."""

PAIRED_LOSSES: dict[str, LossFn] = {"dpo": dpo}
"""Losses of pairs of trajectories: both members of a group are in one call, and ``q`` is the log-probability under the
reference, the base model or the version that the operation names."""


MAX_KL_GAP = 10.0
"""Nats above which the penalty of a token grows linearly. A token that the policy sampled has a larger gap with a
probability below e^−10, one in 22,000, because exp(d) has mean 1 under the policy (Markov's inequality): the estimator
is the published one in practice. Without a bound exp(d) exceeds float32 at 89 nats, and long before that one token
outweighs its whole step. Others cut the value off instead (verl clamps d to ±20, the term to ±10), which takes away the
gradient of the very token that is furthest off."""

LEAST_LOGP = -1e4
"""Stands for smaller log-probabilities, down to that of an impossible token, −∞."""


def kl_penalty(logp: Tensor, reference: Tensor, weights: Tensor) -> LossOut:
    """``Σ w·(exp(d) − d − 1)``, d = reference − logp: the k3 estimator of KL(policy ‖ reference), unbiased for tokens
    that the policy sampled and never negative (Schulman, "Approximating KL Divergence", 2020; the penalty of GRPO,
    arXiv 2402.03300, eq. 4). ``reference`` is a constant. Above :data:`MAX_KL_GAP` the term continues along its
    tangent, so a token's gradient keeps its direction and is bounded. ``kl:sum`` is the sum without the weights."""
    gap = reference.clamp(min=LEAST_LOGP) - logp
    near, slope = gap.clamp(max=MAX_KL_GAP), math.expm1(MAX_KL_GAP)
    tangent = slope - MAX_KL_GAP + slope * (gap - MAX_KL_GAP)
    term = torch.where(gap > MAX_KL_GAP, tangent, near.exp() - near - 1)
    return LossOut((weights * term).sum(), {"kl:sum": float(term.detach().sum())})
