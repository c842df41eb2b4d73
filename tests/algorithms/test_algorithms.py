"""Advantages, weights and schedules against their definitions, written here as the sources state them."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.algorithms.advantages import ADVANTAGES, STD_FLOOR, advantages, step_scale, token_weights
from rookery.algorithms.schedules import rate

rewards = st.lists(st.floats(-100, 100), min_size=2, max_size=16)
names = st.sampled_from(sorted(ADVANTAGES))


@given(names, rewards)
def test_advantages_sum_to_zero_and_keep_the_order(name: str, given: list[float]) -> None:
    found = advantages(name, given)
    assert len(found) == len(given)
    assert math.fsum(found) == pytest.approx(0, abs=1e-6)
    if len(set(given)) == 1:
        assert found == [0.0] * len(given)
    for a, left in zip(found, given, strict=True):
        for b, right in zip(found, given, strict=True):
            assert not left < right or a <= b


@given(rewards)
def test_each_is_its_sources_formula(given: list[float]) -> None:
    mean = statistics.fmean(given)
    tolerance = {"rel": 1e-9, "abs": 1e-9}
    for name in ("mean", "dr_grpo"):
        assert advantages(name, given) == pytest.approx([r - mean for r in given], **tolerance)
    others = [r - (sum(given) - r) / (len(given) - 1) for r in given]
    assert advantages("rloo", given) == pytest.approx(others, **tolerance)
    if len(set(given)) > 1:
        spread = statistics.stdev(given) + STD_FLOOR
        assert advantages("grpo", given) == pytest.approx([(r - mean) / spread for r in given], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("bad", [[], [1.0], [1.0, math.nan], [1.0, math.inf]])
def test_a_group_needs_two_finite_rewards(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="at least two rewards, all finite"):
        advantages("grpo", bad)


@given(names, st.lists(st.integers(0, 50), min_size=1, max_size=20).filter(any))
def test_weights_normalise_as_documented(name: str, lengths: list[int]) -> None:
    scale = step_scale(name, lengths)
    weights = [scale * weight for weight in token_weights(name, lengths, 64)]
    per_trajectory = [weight * length for weight, length in zip(weights, lengths, strict=True)]
    if name == "grpo":  # each trajectory that says anything weighs the same
        assert per_trajectory == pytest.approx([1 / len(lengths) if length else 0.0 for length in lengths])
    elif name == "mean":  # each token weighs the same, all together 1
        assert sum(per_trajectory) == pytest.approx(1)
        assert len({weight for weight, length in zip(weights, lengths, strict=True) if length}) == 1
    elif name == "dr_grpo":  # a constant, whatever the lengths are
        assert weights == pytest.approx([1 / (64 * len(lengths)) if length else 0.0 for length in lengths])
    else:
        assert weights == [1 / len(lengths) if length else 0.0 for length in lengths]


@given(names, st.lists(st.lists(st.integers(0, 50), max_size=8), max_size=5))
def test_weights_do_not_depend_on_the_rest_of_the_step(name: str, parts: list[list[int]]) -> None:
    whole = [length for part in parts for length in part]
    assert [weight for part in parts for weight in token_weights(name, part, 64)] == token_weights(name, whole, 64)


def test_an_unknown_algorithm_is_named() -> None:
    with pytest.raises(ValueError, match="no algorithm 'x'; known: grpo"):
        token_weights("x", [1], 1)
    assert step_scale("mean", [0, 0]) == 1.0, "a step without a token"


# --- schedules --------------------------------------------------------------------------------------------------------


def at(name: str, step: int, total: int | None = 100, warmup: int = 0, least: float = 0.0, phi: float = 1.0) -> float:
    return rate(name, step, lr=2.0, warmup_steps=warmup, total_steps=total, min_ratio=least, phi=phi)


@given(
    st.sampled_from(["constant", "linear", "cosine", "warmup", "uba"]), st.integers(0, 300), st.integers(1, 200),
    st.integers(0, 50), st.floats(0, 1), st.floats(0.01, 2),
)  # fmt: skip
def test_rates_stay_between_their_bounds(
    name: str, step: int, total: int, warmup: int, least: float, phi: float
) -> None:
    found = at(name, step, total, warmup, least, phi)
    assert 0 <= found <= 2.0 * (1 + 1e-12)
    if step >= warmup:
        assert found >= 2.0 * least * (1 - 1e-12)
        assert at(name, step + 1, total, warmup, least, phi) <= found * (1 + 1e-12), "after warming up it never rises"
    else:
        assert found < at(name, step + 1, total, warmup, 1.0, phi)


def test_at_their_limits() -> None:
    for name in ("linear", "cosine", "uba"):
        assert at(name, 0) == 2.0
        assert at(name, 100, least=0.1) == pytest.approx(0.2)
        assert at(name, 10_000, least=0.1) == pytest.approx(0.2), "it stays at its end"
    assert at("linear", 50) == pytest.approx(1.0)
    assert at("cosine", 50) == pytest.approx(1.0)
    assert at("constant", 7, total=None) == at("warmup", 7, total=None) == 2.0
    assert [at("warmup", step, warmup=4) for step in range(5)] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert at("linear", 60, warmup=20) == pytest.approx(1.0), "the steps count after the warm-up"
    assert at("cosine", 5, total=3, warmup=5) == 2.0, "a warm-up longer than the whole"


@given(st.integers(0, 120))
def test_uba_goes_from_constant_to_cosine(step: int) -> None:
    assert at("uba", step, phi=2.0) == pytest.approx(at("cosine", step), abs=1e-12)
    if step < 95:
        assert at("uba", step, phi=1e-9) == pytest.approx(2.0, rel=1e-4)
    assert at("uba", step, phi=1.5) <= at("uba", step, phi=0.5) + 1e-12


def test_schedules_report_missing_parameters() -> None:
    with pytest.raises(ValueError, match="cosine needs total_steps"):
        at("cosine", 0, total=None)
    with pytest.raises(ValueError, match="no schedule 'x'; known: constant"):
        at("x", 0)
