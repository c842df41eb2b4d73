"""Losses against float64 references that are written per token, values by the formula and gradients by the calculus."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples
from torch import Tensor

from rookery.algorithms.losses import LOSSES, MAX_KL_GAP, PAIRED_LOSSES, kl_penalty
from rookery.bounds import FLOAT32
from rookery.spec.policy import LOSS_PARAMETERS

SEGMENTS = [0, 0, 0, 1, 1, 2, 2, 2, 2, 2]


def sample(seed: int, spread: float = 0.6) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Ten tokens of three trajectories in float64: logp, q, advantages, weights, segments."""
    g = torch.Generator().manual_seed(seed)
    n = len(SEGMENTS)
    q = -torch.rand(n, generator=g, dtype=torch.float64) * 3
    logp = q + torch.randn(n, generator=g, dtype=torch.float64) * spread
    advantages = torch.randn(n, generator=g, dtype=torch.float64)
    weights = torch.rand(n, generator=g, dtype=torch.float64) + 0.1
    return logp, q, advantages, weights, torch.tensor(SEGMENTS)


def mean_gap(logp: list[float], q: list[float], token: int) -> float:
    own = [i for i, s in enumerate(SEGMENTS) if s == SEGMENTS[token]]
    return sum(logp[i] - q[i] for i in own) / len(own)


# Each reference gives (term, d term / d logp) of one token from plain floats.
def clip_reference(r: float, a: float, lo: float, hi: float) -> tuple[float, float]:
    plain, bounded = r * a, min(max(r, lo), hi) * a
    return (-plain, -plain) if plain <= bounded else (-bounded, 0.0)


REFERENCES: dict[str, Callable[[list[float], list[float], list[float], int], tuple[float, float]]] = {
    "cross_entropy": lambda p, q, a, i: (-p[i], -1.0),
    "importance_sampling": lambda p, q, a, i: (-math.exp(p[i] - q[i]) * a[i],) * 2,
    "ppo": lambda p, q, a, i: clip_reference(math.exp(p[i] - q[i]), a[i], 0.8, 1.2),
    "cispo": lambda p, q, a, i: (
        -min(max(math.exp(p[i] - q[i]), 0.8), 1.2) * a[i] * p[i],
        -min(max(math.exp(p[i] - q[i]), 0.8), 1.2) * a[i],
    ),
    "aipo": lambda p, q, a, i: (
        -min(math.exp(p[i] - q[i]), 4.0) * a[i] * p[i],
        -min(math.exp(p[i] - q[i]), 4.0) * a[i],
    ),
    "dro": lambda p, q, a, i: (
        -(a[i] * p[i] - 0.025 * (p[i] - q[i]) ** 2),
        -(a[i] - 0.05 * (p[i] - q[i])),
    ),
    "gspo": lambda p, q, a, i: clip_reference(math.exp(mean_gap(p, q, i)), a[i], 0.8, 1.2),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_largest_and_the_smallest_parameters_are_computed_in_float32(name: str) -> None:
    """Torch does not compare float32 with larger parameters, which a job is refused for."""
    drawn = [part.float() if part.is_floating_point() else part for part in sample(0)]
    for parameter in LOSS_PARAMETERS[name]:
        for value in (0.99 * FLOAT32, 5e-324):
            params = LOSS_PARAMETERS[name] | {parameter: value}
            assert LOSSES[name](*drawn, **params).total.dtype == torch.float32


def test_every_loss_has_a_reference_and_its_parameters() -> None:
    assert set(LOSSES) == set(REFERENCES) == set(LOSS_PARAMETERS)


@pytest.mark.parametrize("name", sorted(LOSSES))
@pytest.mark.parametrize("seed", range(6))
def test_value_and_gradient(name: str, seed: int) -> None:
    logp, q, advantages, weights, segments = sample(seed, spread=0.6 if seed % 2 else 2.0)
    logp.requires_grad_()
    out = LOSSES[name](logp, q, advantages, weights, segments, **LOSS_PARAMETERS[name])
    (gradient,) = torch.autograd.grad(out.total, logp)
    p, behaviour, a = logp.tolist(), q.tolist(), advantages.tolist()
    terms = [REFERENCES[name](p, behaviour, a, i) for i in range(len(p))]
    w = weights.tolist()
    assert out.total.item() == pytest.approx(sum(w[i] * term for i, (term, _) in enumerate(terms)), rel=1e-12)
    assert gradient.tolist() == pytest.approx([w[i] * slope for i, (_, slope) in enumerate(terms)], rel=1e-12)


@pytest.mark.parametrize("name", sorted(LOSSES))
@given(scale=st.floats(0.01, 100), seed=st.integers(0, 1000))
@settings(max_examples=examples(20))
def test_losses_are_pure_sums(name: str, scale: float, seed: int) -> None:
    """Scaled weights scale the loss; a batch given twice is twice the loss, without any normalisation."""
    logp, q, advantages, weights, segments = sample(seed)
    loss = LOSSES[name]
    once = loss(logp, q, advantages, weights, segments, **LOSS_PARAMETERS[name])
    scaled = loss(logp, q, advantages, weights * scale, segments, **LOSS_PARAMETERS[name])
    doubled = loss(
        *(torch.cat([x, x]) for x in (logp, q, advantages, weights)),
        torch.cat([segments, segments + 3]),
        **LOSS_PARAMETERS[name],
    )
    assert scaled.total.item() == pytest.approx(scale * once.total.item(), rel=1e-9, abs=1e-9)
    assert doubled.total.item() == pytest.approx(2 * once.total.item(), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_dpo_is_the_published_loss_of_pairs(seed: int, beta: float) -> None:
    """Rafailov et al. 2023, eq. 7 and its gradient (section 4), per pair, in plain floats."""
    logp, q, _, _, _ = sample(seed)
    segments = [0, 0, 0, 1, 1, 2, 2, 3, 3, 3]  # two pairs; the even segment of each is preferred
    weight = {0: 1.0, 1: 0.25}
    signs = torch.tensor([1.0 if s % 2 == 0 else -1.0 for s in segments], dtype=torch.float64)
    weights = torch.tensor([weight[s // 2] for s in segments], dtype=torch.float64)
    logp.requires_grad_()
    out = PAIRED_LOSSES["dpo"](logp, q, signs, weights, torch.tensor(segments), beta=beta)
    (gradient,) = torch.autograd.grad(out.total, logp)

    gaps = [(p - r) for p, r in zip(logp.tolist(), q.tolist(), strict=True)]
    reward = {s: beta * sum(gap for gap, of in zip(gaps, segments, strict=True) if of == s) for s in range(4)}
    margins = [reward[0] - reward[1], reward[2] - reward[3]]
    wrong = [1 / (1 + math.exp(margin)) for margin in margins]
    assert out.total.item() == pytest.approx(sum(-weight[k] * math.log(1 - wrong[k]) for k in (0, 1)), rel=1e-12)
    slopes = [-weight[s // 2] * beta * wrong[s // 2] * (1 if s % 2 == 0 else -1) for s in segments]
    assert gradient.tolist() == pytest.approx(slopes, rel=1e-12)
    assert out.metrics == pytest.approx(
        {
            "pairs": 2.0, "accuracy:pairs": sum(margin > 0 for margin in margins), "margin:pairs": sum(margins),
            "chosen_reward:pairs": reward[0] + reward[2], "rejected_reward:pairs": reward[1] + reward[3],
        }
    )  # fmt: skip


def test_dpo_stays_finite_where_a_reply_is_nearly_impossible() -> None:
    logp = torch.tensor([-1e4, 0.0], requires_grad=True)
    out = PAIRED_LOSSES["dpo"](
        logp, torch.zeros(2), torch.tensor([1.0, -1.0]), torch.ones(2), torch.tensor([0, 1]), beta=1.0
    )
    (gradient,) = torch.autograd.grad(out.total, logp)
    assert out.total.item() == pytest.approx(1e4)
    assert gradient.tolist() == [-1.0, 1.0]


def test_aipo_keeps_its_gradient_above_rho() -> None:
    """The trap: a differentiable min(r, ρ)·A is flat above ρ; the published update keeps ρ·A·∇logp."""
    logp = torch.tensor([0.0], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([-3.0], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    out = LOSSES["aipo"](logp, q, one, one, torch.zeros(1, dtype=torch.int64), rho=4.0)
    (gradient,) = torch.autograd.grad(out.total, logp)
    assert gradient.item() == -4.0
    assert out.metrics == {"clipped:sum": 1.0}


def test_clipped_tokens_are_counted() -> None:
    q = torch.zeros(4, dtype=torch.float64)
    logp = torch.tensor([0.5, 0.5, -0.5, 0.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, -1.0, -1.0, 1.0], dtype=torch.float64)
    given_ = (logp, q, advantages, torch.ones(4, dtype=torch.float64), torch.arange(4))
    assert LOSSES["ppo"](*given_, **LOSS_PARAMETERS["ppo"]).metrics["clipped:sum"] == 2
    assert LOSSES["cispo"](*given_, **LOSS_PARAMETERS["cispo"]).metrics["clipped:sum"] == 3


def test_kl_penalty_is_k3() -> None:
    logp, base, _, weights, _ = sample(3)
    logp.requires_grad_()
    out = kl_penalty(logp, base, weights)
    (gradient,) = torch.autograd.grad(out.total, logp)
    gaps = [b - p for p, b in zip(logp.tolist(), base.tolist(), strict=True)]
    assert out.total.item() == pytest.approx(
        sum(w * (math.exp(d) - d - 1) for w, d in zip(weights.tolist(), gaps, strict=True)), rel=1e-12
    )
    assert gradient.tolist() == pytest.approx(
        [w * (1 - math.exp(d)) for w, d in zip(weights.tolist(), gaps, strict=True)], rel=1e-12
    )
    assert out.metrics["kl:sum"] == pytest.approx(sum(math.exp(d) - d - 1 for d in gaps), rel=1e-12)


def kl_gradient(logp: float, reference: float, weight: float = 1.0) -> tuple[float, float, float]:
    """The penalty of one token, its gradient by logp, and its ``kl:sum``."""
    leaf = torch.tensor([logp], requires_grad=True)
    out = kl_penalty(leaf, torch.tensor([reference]), torch.tensor([weight]))
    (gradient,) = torch.autograd.grad(out.total, leaf)
    return out.total.item(), gradient.item(), out.metrics["kl:sum"]


@pytest.mark.parametrize("logp", [-0.1, -20.0, -100.0, -1e4])
@pytest.mark.parametrize("reference", [0.0, -0.1, -60.0, -1e4, -math.inf])
def test_no_token_makes_the_kl_penalty_infinite(logp: float, reference: float) -> None:
    """In float32, for tokens that one of the two gives (almost) no probability. The gradient keeps its direction, and
    is at most that of a gap of ten nats."""
    value, gradient, total = kl_gradient(logp, reference)
    assert 0 <= value < math.inf and total == value
    gap = max(reference, -1e4) - logp
    assert abs(gradient) <= math.expm1(MAX_KL_GAP) * (1 + 1e-6)
    assert gradient * -gap >= 0, "towards the reference"
    assert gradient != 0 or abs(gap) < 1e-6
    weighted, slope, _ = kl_gradient(logp, reference, 0.25)
    assert (weighted, slope) == pytest.approx((value / 4, gradient / 4), rel=1e-6)


@given(st.floats(0, 300))
def test_kl_penalty_is_published_up_to_its_bound_and_smooth_there(gap: float) -> None:
    leaf = torch.tensor([-gap], dtype=torch.float64, requires_grad=True)
    one = torch.ones(1, dtype=torch.float64)
    out = kl_penalty(leaf, 0 * one, one)
    (gradient,) = torch.autograd.grad(out.total, leaf)
    near = min(gap, MAX_KL_GAP)
    assert out.total.item() == pytest.approx(
        math.exp(near) - near - 1 + math.expm1(MAX_KL_GAP) * (gap - near), abs=1e-12
    )
    assert gradient.item() == pytest.approx(1 - math.exp(near), abs=1e-12), "monotonic, without a jump"


def test_one_impossible_token_leaves_the_others_their_gradient() -> None:
    logp = torch.tensor([-1.0, -2.0, -120.0], requires_grad=True)
    reference, weights = torch.tensor([-1.5, -math.inf, -0.1]), torch.tensor([0.5, 0.5, 0.5])
    (gradient,) = torch.autograd.grad(kl_penalty(logp, reference, weights).total, logp)
    assert gradient.isfinite().all()
    assert gradient[0].item() == pytest.approx(0.5 * (1 - math.exp(-0.5)))
    assert gradient[1].item() == pytest.approx(0.5) and gradient[2].item() < -1000


def test_parameters_are_checked_by_name() -> None:
    logp, q, advantages, weights, segments = sample(0)
    with pytest.raises(TypeError):
        LOSSES["aipo"](logp, q, advantages, weights, segments)
    with pytest.raises(TypeError):
        LOSSES["cross_entropy"](logp, q, advantages, weights, segments, rho=1.0)
