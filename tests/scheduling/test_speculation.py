"""The draft budget against exhaustive search and fixed lengths, on two curves of step times."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.scheduling.speculation import FORGET, LEAST_GAIN, Acceptance, StepCosts, draft_budget, kind_of

Curve = Callable[[int, int], float]


def this_machine(rows: int, positions: int) -> float:
    """Nearly flat up to about ten positions, then linear, as two cores with the compiled kernels are."""
    return 0.009 + 0.0004 * max(positions, 8) + 0.0001 * rows


def gpu_like(rows: int, positions: int) -> float:
    """Flat until about two hundred positions."""
    return 0.02 + 0.0001 * max(positions, 200)


def linear(rows: int, positions: int) -> float:
    return 0.01 * positions


def measured(curve: Curve, rows: int, longest: int = 9) -> StepCosts:
    costs = StepCosts()
    for positions in range(rows, longest * rows + 1, max(1, rows // 4)):
        costs.observe(rows, positions, curve(rows, positions))
    return costs


def speed(curve: Curve, chances: list[list[float]], lengths: list[int]) -> float:
    rows = len(chances)
    gain = sum(sum(along[:length]) for along, length in zip(chances, lengths, strict=True))
    return (rows + gain) / curve(rows, rows + sum(lengths))


def fixed(alpha: float, rows: int, gamma: int) -> list[list[float]]:
    return [[alpha ** (k + 1) for k in range(gamma)] for _ in range(rows)]


@pytest.mark.parametrize("curve", [this_machine, gpu_like, linear])
@pytest.mark.parametrize("alpha", [0.1, 0.4, 0.7, 0.9])
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32, 64, 128])
def test_no_fixed_length_is_better(curve: Curve, alpha: float, rows: int) -> None:
    chances = fixed(alpha, rows, 8)
    ours = speed(curve, chances, draft_budget(chances, measured(curve, rows)))
    assert all(ours >= 0.97 * speed(curve, chances, [gamma] * rows) for gamma in (0, 1, 2, 4, 8))


def test_on_a_gpu_like_curve_no_fixed_length_is_good_everywhere() -> None:
    for gamma in (1, 2, 4, 8):
        shares = []
        for rows, alpha in itertools.product((1, 8, 32, 128), (0.3, 0.8)):
            chances = fixed(alpha, rows, 8)
            ours = speed(gpu_like, chances, draft_budget(chances, measured(gpu_like, rows)))
            shares.append(speed(gpu_like, chances, [gamma] * rows) / ours)
        assert min(shares) < 0.97


@given(
    st.lists(st.lists(st.floats(0.01, 1.0), max_size=3), min_size=1, max_size=4),
    st.sampled_from([this_machine, gpu_like, linear]),
)
def test_the_best_of_all_budgets(given_chances: list[list[float]], curve: Curve) -> None:
    """Up to what an interpolated cost and the least gain leave."""
    chances = [list(np.cumprod(along)) for along in given_chances]
    lengths = draft_budget(chances, measured(curve, len(chances), 5))
    assert all(length <= len(along) for length, along in zip(lengths, chances, strict=True))
    best = max(
        speed(curve, chances, list(all_lengths))
        for all_lengths in itertools.product(*(range(len(along) + 1) for along in chances))
    )
    assert speed(curve, chances, lengths) >= best / LEAST_GAIN / 1.02


def test_where_every_position_costs_the_same_there_are_no_drafts() -> None:
    for rows in (1, 4, 64):
        assert draft_budget(fixed(0.99, rows, 8), measured(linear, rows)) == [0] * rows


def test_drafts_that_take_longer_to_find_than_they_save_are_not_verified() -> None:
    chances, costs = fixed(0.9, 4, 8), measured(this_machine, 4)
    assert any(draft_budget(chances, costs, 0.001))
    assert draft_budget(chances, costs, 1.0) == [0] * 4


def test_likelier_drafts_come_first() -> None:
    chances = [[0.2, 0.1], [0.95, 0.9], [], [0.6, 0.3]]
    lengths = draft_budget(chances, measured(lambda rows, n: 1.0 + 0.1 * n, 4))
    assert lengths[1] == 2 and lengths[1] >= lengths[3] >= lengths[0] and lengths[2] == 0


def test_nothing_is_verified_before_a_plain_step_was_seen() -> None:
    costs, chances = StepCosts(), fixed(1.0, 4, 8)
    assert draft_budget(chances, costs) == [0] * 4
    costs.observe(64, 64, 1.0)
    assert draft_budget(chances, costs) == [0] * 4
    costs.observe(4, 4, 1.0)
    assert sum(draft_budget(chances, costs)) == 4, "at most as many positions again"
    costs.observe(4, 8, 1.0)
    assert sum(draft_budget(chances, costs)) == 12


def test_an_expensive_trial_is_not_repeated_until_it_is_forgotten() -> None:
    costs, chances = StepCosts(), fixed(0.5, 8, 8)
    costs.observe(8, 8, 1.0)
    assert any(draft_budget(chances, costs))
    costs.observe(8, 16, 3.0)
    for _ in range(FORGET):
        assert not any(draft_budget(chances, costs))
        costs.observe(8, 8, 1.0)
    costs.observe(8, 8, 1.0)
    assert any(draft_budget(chances, costs))


def test_one_slow_step_changes_little() -> None:
    costs = measured(this_machine, 2)
    for _ in range(20):
        costs.observe(2, 2, 0.010)
    costs.observe(2, 2, 5.0)
    assert costs.seconds(2, 0)[0] < 0.0125


def test_acceptance_follows_what_happens() -> None:
    source, acceptance = random.Random(1), Acceptance()
    likely, unlikely = kind_of(8, 1.0), kind_of(1, 0.3)
    for _ in range(400):
        acceptance.record(likely, right=source.random() < 0.9)
        acceptance.record(unlikely, right=source.random() < 0.1)
    first, second = acceptance.chances([likely, unlikely])
    assert first == pytest.approx(0.9, abs=0.12) and second == pytest.approx(first * 0.1, abs=0.12)
    for _ in range(150):
        acceptance.record(likely, right=False)
    assert acceptance.chances([likely])[0] < 0.1
    assert acceptance.chances([kind_of(4, 0.7)]) == [0.5]
