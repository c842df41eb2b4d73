"""The draft budget against exhaustive search and fixed lengths, on two curves of step times."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples

from rookery.scheduling.speculation import (
    FORGET,
    LEAST_GAIN,
    PLAIN_EVERY,
    TRIAL_SHARE,
    TRIAL_STEPS,
    Acceptance,
    DraftAccount,
    StepCosts,
    draft_budget,
    kind_of,
    spread,
)

Curve = Callable[[int, int], float]


def least_gain(rows: int) -> float:
    """Of speed, where further requests are there."""
    return LEAST_GAIN * (1 + spread(rows, others=True))


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
    least = min(0.97, 1 / least_gain(rows))  # a smaller gain is given up
    assert all(ours >= least * speed(curve, chances, [gamma] * rows) for gamma in (0, 1, 2, 4, 8))


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
    assert speed(curve, chances, lengths) >= best / least_gain(len(chances)) / 1.02


def test_where_every_position_costs_the_same_there_are_no_drafts() -> None:
    for rows in (1, 4, 64):
        assert draft_budget(fixed(0.99, rows, 8), measured(linear, rows)) == [0] * rows


def test_drafts_that_take_longer_to_find_than_they_save_are_not_verified() -> None:
    chances, costs = fixed(0.9, 4, 8), measured(this_machine, 4)
    assert any(draft_budget(chances, costs, 0.001))
    assert draft_budget(chances, costs, 1.0) == [0] * 4


@pytest.mark.parametrize(("rows", "more"), [(1, 1.035), (4, 1.035), (4, 1.15), (64, 1.15)])
def test_a_batch_that_nothing_follows_needs_a_higher_gain(rows: int, more: float) -> None:
    """Its texts end at different times. ``more``: times as many tokens in a step that takes no longer."""
    costs, chances = StepCosts(), [[more - 1.0]] * rows
    costs.observe(rows, rows, 1.0)
    costs.observe(rows, 2 * rows, 1.0)
    assert any(draft_budget(chances, costs, others=False)) == (more > 1.1 or rows == 1)
    assert any(draft_budget(chances, costs, others=True)) == (more > 1.1 or rows <= 16)


def test_plain_steps_of_more_rows_foretell_the_cost_of_drafts() -> None:
    """Where a position more costs its part, nothing is tried; where steps of more rows take no longer, it is."""
    chances = fixed(0.9, 4, 8)
    for each, tried in ((1.0, False), (0.01, True)):
        costs = StepCosts()
        for rows in (4, 6, 8, 12):
            costs.observe(rows, rows, 4.0 + each * (rows - 4))
        assert any(draft_budget(chances, costs)) is tried
        assert costs.seconds(4, 4)[4] == pytest.approx(4.0 + 4 * each)
    costs = StepCosts()
    for rows in (32, 64):
        costs.observe(rows, rows, 0.01 * rows)
    assert costs.seconds(64, 64)[64] == pytest.approx(1.28), "beyond the largest it grows as before"
    assert not any(draft_budget(fixed(0.9, 64, 8), costs))


def test_equally_likely_drafts_of_shorter_texts_come_first() -> None:
    costs = StepCosts()
    costs.observe(8, 8, 1.0)
    costs.observe(8, 10, 1.001)
    costs.observe(8, 16, 1.9)
    chances = [[0.5]] * 8
    assert draft_budget(chances, costs, texts=[9, 9, 3, 9, 9, 2, 9, 9]) == [0, 0, 1, 0, 0, 1, 0, 0]


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


def test_acceptance_follows_the_accepted_drafts() -> None:
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


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 32), st.floats(0.01, 1.0)), max_size=30),
    st.lists(st.lists(st.floats(0.01, 1.0), max_size=8), min_size=1, max_size=6),
    st.floats(0.0, 0.5),
)
def test_no_draft_is_verified_where_the_prediction_loses(
    steps: list[tuple[int, int, float]], given_chances: list[list[float]], drafting: float
) -> None:
    """Whatever was observed before."""
    costs, rows = StepCosts(), len(given_chances)
    for count, drafts, seconds in steps:
        costs.observe(count, count + drafts, seconds)
    chances = [list(np.cumprod(along)) for along in given_chances]
    lengths = draft_budget(chances, costs, drafting)
    if any(lengths):
        expected = rows + sum(sum(along[:length]) for along, length in zip(chances, lengths, strict=True))
        seconds = costs.seconds(rows, sum(lengths))
        assert expected / (seconds[-1] + drafting) >= 0.999 * least_gain(rows) * rows / seconds[0]


class Batches:
    """An engine of so many rows in a model: the shipped decision, a ``curve`` of step times with relative ``noise``,
    and drafts of which each token is right with the probability ``alpha``, found in ``looking`` seconds per row."""

    def __init__(self, curve: Curve, rows: int, alpha: float, *, noise: float = 0.0, looking: float = 0.0) -> None:
        self.curve, self.rows, self.alpha = curve, rows, alpha
        self.noise, self.looking = noise, looking
        self.costs, self.account, self.acceptance = StepCosts(), DraftAccount(), Acceptance()
        self.source = random.Random(1)

    def plain(self, texts: list[int]) -> float:
        """Seconds without drafts."""
        left, seconds = list(texts), 0.0
        running: list[int] = []
        while left or running:
            running += [left.pop() for _ in range(min(self.rows - len(running), len(left)))]
            seconds += self.curve(len(running), len(running))
            running = [more - 1 for more in running if more > 1]
        return seconds

    def drafted(self, texts: list[int]) -> float:
        """With them."""
        left, seconds = list(texts), 0.0
        running: list[tuple[int, int]] = []  # tokens to come, tokens so far
        while left or running:
            running += [(left.pop(), 0) for _ in range(min(self.rows - len(running), len(left)))]
            rows, others = len(running), bool(left)
            lengths, looking = [0] * rows, 0.0
            if self.account.allows(rows):
                looking, done = self.looking * rows, [so_far for _, so_far in running]
                chances = [self.acceptance.chances([KIND] * min(8, more - 1)) for more, _ in running]
                lengths = draft_budget(chances, self.costs, looking, others=others, texts=done)
            took = self.curve(rows, rows + sum(lengths)) * self.source.uniform(1 - self.noise, 1 + self.noise)
            gained = [1 + min(length, self._right()) for length in lengths]
            self.costs.observe(rows, rows + sum(lengths), took)
            self.account.observe(rows, sum(gained), sum(lengths), took, looking, others=others)
            seconds += took + looking
            moved = [(more - gain, done + gain) for (more, done), gain in zip(running, gained, strict=True)]
            running = [row for row in moved if row[0] > 0]
        return seconds

    def _right(self) -> int:
        """Tokens of a draft that are right; all of these and the first wrong one are recorded."""
        right = 0
        while right < 8 and self.source.random() < self.alpha:
            right += 1
        for at in range(min(right + 1, 8)):
            self.acceptance.record(KIND, right=at < right)
        return right


KIND = kind_of(4, 0.7)


@settings(max_examples=examples(25), deadline=None)
@given(
    rows=st.sampled_from([1, 2, 4, 8, 16, 24, 64]),
    alpha=st.floats(0.0, 1.0),
    flat=st.integers(1, 200),
    fixed_part=st.floats(0.0, 1.0),
    waves=st.sampled_from([1, 4]),
    uneven=st.booleans(),
    noise=st.sampled_from([0.0, 0.05]),
    looking=st.floats(0.0, 0.002),
)
def test_drafts_never_cost_more_than_a_hundredth(
    rows: int, alpha: float, flat: int, fixed_part: float, waves: int, uneven: bool, noise: float, looking: float
) -> None:
    """For any acceptance and any steps that take a fixed time, no longer for ``flat`` positions, and in proportion to
    those beyond: batches one after another, whether requests wait for the rows or each batch starts together and
    nothing follows. What is tried counts, but for a few steps in which the engine has seen nothing yet."""

    def curve(rows: int, positions: int) -> float:
        return fixed_part + (1 - fixed_part) * max(positions, flat) / flat

    engine, lengths = Batches(curve, rows, alpha, noise=noise, looking=looking), random.Random(2)
    spent = plain = 0.0
    for _ in range(24 // waves):  # so the steps are about as many
        texts = [lengths.randint(20, 108) if uneven else 64 for _ in range(rows * waves)]
        spent, plain = spent + engine.drafted(texts), plain + engine.plain(texts)
    assert spent <= 1.01 * plain + 6 * curve(rows, rows)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_drafts_that_are_often_right_gain_at_few_rows(rows: int) -> None:
    engine = Batches(this_machine, rows, 0.7, noise=0.05, looking=0.0001)
    texts = [64] * (8 * rows)
    engine.drafted(texts)
    assert engine.plain(texts) > 1.45 * engine.drafted(texts)


@given(st.lists(st.tuples(st.integers(0, 8), st.floats(0.0, 1.0), st.floats(0.0, 2.0)), max_size=400))
def test_the_cost_of_drafts_is_bounded(outcomes: list[tuple[int, float, float]]) -> None:
    """A plain step of four rows, or of three or of five, takes a second; each outcome is drafts, the share of them that
    is right, and how long a step with them takes, in the time of as many plain positions."""
    account, numbers = DraftAccount(), (4, 3, 5)
    lost = time = 0.0
    worst = dict.fromkeys(numbers, 0.0)
    for at, (drafts, share, factor) in enumerate(outcomes):
        rows = numbers[at % len(numbers)]
        if not account.allows(rows):
            account.observe(rows, rows, 0, 1.0, 0.0)
            time += 1.0
            continue
        tokens, seconds = rows + int(share * drafts), 1.0 if not drafts else factor * (rows + drafts) / rows
        account.observe(rows, tokens, drafts, seconds, 0.01)
        loss = 0.01 + (seconds - tokens / rows if drafts else 0.0)
        lost, time, worst[rows] = lost + loss, time + seconds, max(worst[rows], loss)
    assert lost <= TRIAL_STEPS + sum(worst.values()) + TRIAL_SHARE * time + 1e-6


def loss_and_steps(account: DraftAccount, rows: int, steps: int, tokens: int, seconds: float) -> tuple[float, int]:
    """Seconds that four drafts in a step cost against plain steps of one second, and the steps with drafts, where each
    gives so many tokens and takes so long."""
    lost, drafted = 0.0, 0
    for _ in range(steps):
        if account.allows(rows):
            account.observe(rows, tokens, 4, seconds, 0.0)
            lost, drafted = lost + seconds - tokens / rows, drafted + 1
        else:
            account.observe(rows, rows, 0, 1.0, 0.0)
    return lost, drafted


def test_drafts_that_lose_are_off_until_they_gain() -> None:
    lost, drafted = loss_and_steps(DraftAccount(), 4, 4000, 5, 1.5)
    assert 0 < drafted < 100 and lost <= TRIAL_STEPS + 0.25 + TRIAL_SHARE * 4000
    account = DraftAccount()
    loss_and_steps(account, 4, 1000, 5, 1.5)
    _, drafted = loss_and_steps(account, 4, 2000, 6, 1.2)
    assert drafted > 1000, "they are on again once they gain"


def test_drafts_that_gain_stay_on() -> None:
    lost, drafted = loss_and_steps(DraftAccount(), 4, 2000, 6, 1.2)
    assert lost < 0 and drafted >= 2000 * (1 - 2 / PLAIN_EVERY)


def test_each_number_of_rows_has_an_account() -> None:
    account = DraftAccount()
    loss_and_steps(account, 64, 50, 65, 1.5)
    assert not account.allows(64) and not account.allows(4)
    account.observe(4, 4, 0, 1.0, 0.0)
    assert not account.allows(4), "the time for trials is spent"
    loss_and_steps(account, 64, 300, 65, 1.5)
    assert account.allows(4) and not account.allows(64)


def test_drafts_that_stop_to_be_right_are_off_soon() -> None:
    account = DraftAccount()
    loss_and_steps(account, 4, 1000, 8, 1.0)
    lost, _ = loss_and_steps(account, 4, 1000, 4, 1.5)
    assert lost < 12.0
