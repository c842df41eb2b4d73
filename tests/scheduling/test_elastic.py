"""The number of rollout workers: the rule, and pools that follow it through a replayed trace."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.scheduling import elastic
from rookery.scheduling.elastic import PoolStep, StepWindow, change_of, step_window, wanted_workers, within
from rookery.simulation.elastic import WINDOW, StepTrace, best_fixed, published, replay, shipped

SEEDS = range(20)


def window(
    workers: int, wait: float, busy: float = 1.0, entered: int = 100, consumed: int = 100, steps: int = 30
) -> StepWindow:
    return StepWindow(workers, steps, wait * 50.0, 50.0, entered, consumed, busy)


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (window(4, 0.5), 9),
        (window(4, 0.5, steps=3), 8),  # the number that so few steps make certain
        (window(4, 0.02), 5),
        (window(4, 0.02, busy=0.96), 4),
        (window(4, 0.08), 5),
        (window(4, 0.08, steps=3), 4),
        (window(8, 0.0, busy=0.5), 5),
        (window(8, 0.0, busy=0.9), 8),
        (window(20, 0.0, busy=0.85), 18),
        (window(20, 0.0, busy=0.85, steps=3), 20),
        (window(20, 0.0, busy=0.5, steps=3), 11),
        (window(2, 0.95, busy=0.4), 2),  # environments are what trainers wait for
        (window(8, 0.07, busy=0.1), 8),  # nothing shrinks while trainers wait
        (window(8, 0.0, entered=200), 5),  # half of the trajectories were evicted
        (window(8, 0.0, consumed=200), 9),  # of earlier steps, which does not make them more
        (window(8, 0.0, busy=0.0), 8),
        (window(8, 0.0, entered=0), 8),
        (window(8, 0.0, consumed=0), 8),
        (window(1, 0.0, busy=0.01), 1),
        (window(2, 3.0), 41),  # no share is above 0.95
        (StepWindow(3, 0, 0.0, 0.0, 0, 0, 0.0), 3),
    ],
)
def test_rule_follows_the_need_as_far_as_it_is_certain(seen: StepWindow, wanted: int) -> None:
    assert wanted_workers(seen) == wanted


@given(
    st.integers(1, 500), st.floats(0, 2), st.floats(0, 1), st.integers(0, 1000), st.integers(0, 1000),
    st.integers(0, 30),
)  # fmt: skip
def test_rule_never_shrinks_a_pool_that_waits_nor_grows_one_with_room(
    workers: int, wait: float, busy: float, entered: int, consumed: int, steps: int
) -> None:
    seen = window(workers, wait, busy, entered, consumed, steps)
    wanted = wanted_workers(seen)
    assert 1 <= wanted <= 22 * workers + 1
    if wanted > workers:
        assert seen.busy > elastic.FILLED * (1.0 - seen.busy) and seen.need > elastic.FILLED * workers
    if wanted < workers:
        assert seen.wait < elastic.WAITS_LITTLE and seen.need * elastic.HEADROOM <= wanted + 1e-6


@given(st.integers(1, 200), st.floats(0, 0.9), st.floats(0.01, 1))
def test_more_steps_never_undo_the_certainty_of_fewer(workers: int, wait: float, busy: float) -> None:
    sizes = [wanted_workers(window(workers, wait, busy, steps=steps)) for steps in range(1, 31)]
    changed = [size - workers for size in sizes]
    assert all(a * b >= 0 and (b or not a) for a, b in pairwise(changed)), sizes


@given(st.integers(0, 99), st.integers(0, 20), st.integers(20, 40))
def test_bounds_hold(wanted: int, least: int, most: int) -> None:
    assert within(wanted, least, most) == sorted((least, wanted, most))[1]


def reversals(sizes: Sequence[int]) -> int:
    moves = [after - before for before, after in pairwise(sizes) if after != before]
    return sum(a * b < 0 for a, b in pairwise(moves))


def noisy_steps(workers: int, load: float, idle: float, noise: float, seed: int) -> Iterator[PoolStep]:
    """Steps of a fixed pool whose load does not change: each needs ``load`` times the time of the training for its
    generation, and ``idle`` times that of environments, with groups that become complete in lumps."""
    random, owed = Random(f"{workers} {load} {idle} {noise} {seed}"), 0.0

    def factor() -> float:
        return math.exp(random.gauss(0.0, noise))

    while True:
        training, generation = factor(), load * factor()
        time = max(training, generation + idle * factor())
        owed += 4 * factor()  # groups of eight; four are consumed
        entered = int(owed)
        owed -= entered
        yield PoolStep(time - training, time, 8 * entered, 32, time, workers * min(time, generation))


@pytest.mark.parametrize("workers", [1, 2, 8, 40])
@pytest.mark.parametrize("noise", [0.1, 0.2, 0.3])
def test_wanted_number_is_steady_while_the_load_is(workers: int, noise: float) -> None:
    """Also where workers have requests for about half of the time, and trainers wait about as much as matters."""
    for load, idle, seed in itertools.product((0.5, 0.9, 1.0, 2.5), (0.0, 0.5, 1.0, 2.5), range(3)):
        steps, shown, change = deque[PoolStep](maxlen=WINDOW), [workers], 0
        for step in itertools.islice(noisy_steps(workers, load, idle, noise, seed), 120):
            steps.append(step)
            if len(steps) >= elastic.LEAST_STEPS:
                shown.append(wanted_workers(step_window(workers, steps), shown[-1], change))
                change = change_of(shown[-2], shown[-1], change)
        assert reversals(shown) <= 1, (load, idle, seed, [size for size, _ in itertools.groupby(shown)])


@pytest.mark.parametrize(("workers", "shown", "load"), [(1, 3, 1.0), (1, 1, 3.0), (8, 8, 0.5), (8, 4, 1.0)])
def test_wanted_number_follows_a_load_that_changes(workers: int, shown: int, load: float) -> None:
    steps, wanted = deque[PoolStep](maxlen=WINDOW), shown
    for step in itertools.islice(noisy_steps(workers, load, 0.0, 0.1, seed=0), 2 * WINDOW):
        steps.append(step)
        wanted = wanted_workers(step_window(workers, steps), wanted, change=1 if load * workers < shown else -1)
    assert load * workers <= wanted <= 1.25 * load * workers + 1 and wanted != shown


@pytest.mark.parametrize("right", [4, 10, 40])
@pytest.mark.parametrize("share", [0.5, 2.0])
def test_pool_converges_from_half_and_from_double_with_one_reversal(right: int, share: float) -> None:
    waits = []
    for seed in SEEDS:
        trace = StepTrace.steady(right, steps=120, seed=seed)
        run = replay(trace, int(right * share), shipped)
        assert reversals(run.sizes) <= 1, (seed, run.sizes)
        settled = run.sizes[len(run.sizes) // 2 :]
        assert 0.9 * right <= min(settled) and max(settled) <= right * 1.25 + 1, (seed, run.sizes)
        waits.append(run.wait_share_late)
    assert statistics.median(waits) <= 0.05


def test_elastic_pool_costs_fewer_worker_hours_than_a_fixed_one_while_replies_grow() -> None:
    gains: dict[str, list[float]] = {"few": [], "many": []}
    for seed in SEEDS:
        trace = StepTrace.growing(4, 12, steps=200, seed=seed)
        ours = replay(trace, 4, shipped).worker_seconds
        gains["few"].append(ours / replay(trace, 4).worker_seconds)
        gains["many"].append(replay(trace, 24, shipped).worker_seconds / replay(trace, 4).worker_seconds)
    assert all(max(found) < 1.0 for found in gains.values()), gains


def test_trainer_of_an_elastic_pool_waits_little_while_replies_grow() -> None:
    for first in (4, 24):
        runs = [replay(StepTrace.growing(4, 12, steps=200, seed=seed), first, shipped) for seed in SEEDS]
        assert max(run.wait_share_late for run in runs) <= 0.05


def test_headroom_and_margin_are_needed() -> None:
    """Without either the pool moves to and fro: by the margin a number that turns back needs more certainty, so the
    headroom's part is smaller."""

    def moves(**change: float) -> float:
        traces = [StepTrace.steady(40, 200, seed) for seed in SEEDS]
        return statistics.fmean(reversals(replay(trace, 80, partial(shipped, **change)).sizes) for trace in traces)

    whole = moves()
    assert moves(headroom=1.0) > 2 * whole
    assert moves(certain=0.0) > whole + 1


@pytest.mark.parametrize(
    ("workers", "waited", "busy", "count", "wanted"),
    [
        (4, 0.5, 1.0, 10, 8),
        (4, 0.11, 1.0, 10, 5),
        (8, 0.07, 0.9, 10, 8),
        (20, 0.0, 0.5, 10, 11),
        (20, 0.0, 0.5, 9, 20),
        (8, 0.04, 0.95, 10, 8),
        (2, 1.0, 1.0, 10, 40),
    ],
)
def test_published_rule_looks_at_the_wait_in_bands(
    workers: int, waited: float, busy: float, count: int, wanted: int
) -> None:
    steps = [PoolStep(waited * 50.0, 50.0, 64, 64, 50.0, workers * busy * 50.0)] * count
    assert published(workers, steps, 0, window=10) == wanted


def test_best_fixed_size_is_the_right_one_where_that_is_constant() -> None:
    """Half of it costs little more, as the trainer, which waits, is one worker of eleven: no pool saves a tenth."""
    for seed in SEEDS:
        trace = StepTrace.steady(10, 200, seed)
        best = best_fixed(trace, 0.05)
        assert set(best.sizes) == {10}
        assert best.worker_seconds < replay(trace, 5, shipped).worker_seconds < 1.1 * best.worker_seconds
        assert 1.02 * trace.floor < best.worker_seconds
        assert replay(trace, 5).worker_seconds < 1.1 * trace.floor


@pytest.mark.parametrize("size", [1, 4, 9, 40])
def test_no_pool_costs_less_than_the_floor(size: int) -> None:
    for trace in (StepTrace.steady(10, 60, 1), StepTrace.growing(4, 12, 60, 2)):
        for rule in (None, shipped, published):
            assert replay(trace, size, rule).worker_seconds >= trace.floor * (1 - 1e-12)
