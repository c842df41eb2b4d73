"""The planner of lanes: slowdowns, predicted finishes, choices with look-ahead, and durations of the last step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples

from rookery.scheduling.costs import CostTable
from rookery.scheduling.divided_rollout import DecodingWorker
from rookery.scheduling.pipelines import (
    BUCKETS,
    LEAST_GAIN,
    MOST_STAGES,
    RELIABLE,
    TAKING_TURNS,
    TRAINER,
    TURNS,
    JobStages,
    LaneCosts,
    SlowdownTable,
    Stage,
    StagePredictor,
    State,
    advance,
    choose,
    complete,
    overlaps,
    predicted,
    rates,
)
from rookery.scheduling.tails import WorkerRollouts, merge


def costs_of(*slow: tuple[float, float]) -> LaneCosts:
    """The slowdowns of engine and trainer with 1, 2, … threads in the engine's lane, whatever decodes."""
    table = SlowdownTable()
    for threads, (engine, trainer) in enumerate(slow, 1):
        for rows in BUCKETS:
            table.record(threads, "decode", rows, engine=engine, trainer=trainer)
        table.record(threads, "prefill", 0, engine=engine, trainer=trainer)
    return LaneCosts(table, lambda rows: 1.0 + rows / 8)


BOTH: list[JobStages] = [(Stage("decode", 4.0, 8),), (Stage("train", 4.0),)]
GAINS, LOSES = (1.6, 1.7), (2.1, 2.2)

kinds = st.sampled_from(["prefill", "decode", "tail", "environment", "train", "optimizer"])
stages = st.builds(Stage, kinds, st.floats(0.1, 5), st.integers(1, 64))
chains = st.lists(st.lists(stages, min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)
slows = st.tuples(st.floats(1.0, 3.0), st.floats(1.0, 3.0))


def test_slowdowns_are_those_of_their_bucket_corrected_by_slices() -> None:
    table = SlowdownTable()
    assert table.slowdown(1, "decode", 8) == TAKING_TURNS
    table.record(1, "decode", 16, engine=1.6)
    assert table.slowdown(1, "decode", 8) == TAKING_TURNS, "half of a pair says nothing"
    table.record(1, "decode", 5, trainer=1.7)
    assert table.slowdown(1, "decode", 16) == table.slowdown(1, "tail", 5) == (1.6, 1.7)
    assert table.slowdown(1, "decode", 17) == table.slowdown(2, "decode", 16) == TAKING_TURNS
    assert table.slowdown(TURNS, "decode", 16) == TAKING_TURNS
    for _ in range(40):
        table.record(1, "decode", 16, engine=1.2)
    assert table.slowdown(1, "decode", 16)[0] == pytest.approx(1.2, abs=0.01)
    assert table.reliable(1, "decode", 16)
    for number in range(20):
        table.record(1, "decode", 16, engine=1.0 + 3 * (number % 2))
    assert not table.reliable(1, "decode", 16)
    for bad in (0.0, math.inf, math.nan):
        table.record(3, "decode", 4, engine=bad, trainer=bad)
    assert table.slowdown(3, "decode", 4) == TAKING_TURNS


@settings(max_examples=examples(60), deadline=None)
@given(chains, st.lists(slows, min_size=1, max_size=2))
def test_work_is_conserved_and_no_choice_is_predicted_to_lose(
    found: Sequence[JobStages], slow: list[tuple[float, float]]
) -> None:
    costs, modes = costs_of(*slow), range(len(slow) + 1)
    state = State(tuple(found))
    for mode in modes:
        done = complete(state, mode, costs)
        assert len(done.ends) == len(found) and not done.chains
        longest = [max(sum(s.seconds for s in chain) for chain in found)]
        serial = sum(s.seconds for chain in found for s in chain if s.kind in TRAINER)
        assert max(done.ends) >= max(*longest, serial) - 1e-6
    least = [predicted(state, modes, depth, costs) for depth in (0, 1, 2)]
    assert all(deeper <= shallower + 1e-9 for shallower, deeper in itertools.pairwise(least))
    for depth in (0, 1, 2):
        choice = choose(found, modes, costs, TURNS, depth)
        assert choice == choose(found, modes, costs, TURNS, depth), "a pure function"
        if choice.active:
            assert overlaps(found) and choice.gain >= LEAST_GAIN
            if depth:
                ahead = predicted(advance(state, choice.threads, costs), modes, depth - 1, costs)
                assert ahead < complete(state, TURNS, costs).cost


@settings(max_examples=examples(40), deadline=None)
@given(chains, st.integers(0, 2))
def test_inactive_where_nothing_gains(found: Sequence[JobStages], depth: int) -> None:
    assert not choose(found, (0, 1), costs_of(LOSES), TURNS, depth).active
    alone = [chain for chain in found if chain[0].kind not in TRAINER]
    assert not choose(alone, (0, 1), costs_of(GAINS), TURNS, depth).active
    assert not choose(found, (0, 1), costs_of(TAKING_TURNS), 1, depth).active


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_lanes_run_where_both_gain_and_do_not_alternate(depth: int) -> None:
    costs = costs_of(GAINS)
    choice = choose(BOTH, (0, 1), costs, TURNS, depth)
    assert choice.threads == 1 and choice.why == ""
    nearly = costs_of((1.70, 1.70), (1.69, 1.70))
    assert [choose(BOTH, (0, 1, 2), nearly, present, depth).threads for present in (1, 2)] == [1, 2]
    split = costs_of((1.95, 1.6), (1.5, 1.5))
    assert choose(BOTH, (0, 1, 2), split, 1, depth).threads == 2, "threads of a lane are a choice as well"


def test_unknown_durations_allow_a_small_loss_of_one_part() -> None:
    endless: list[JobStages] = [(Stage("decode", math.inf, 8),), (Stage("train", 4.0),)]
    assert choose(endless, (0, 1), costs_of(GAINS), TURNS, 2).threads == 1
    assert not choose(endless, (0, 1), costs_of((1.05, 2.3)), TURNS, 2).active, "training would pay for decoding"
    assert choose(endless, (0, 1), costs_of((1.2, 2.1)), TURNS, 2).threads == 1


def test_turns_while_slices_are_not_as_predicted() -> None:
    costs = costs_of(GAINS)
    for number in range(20):
        costs.table.record(1, "decode", 8, engine=1.0 + 3 * (number % 2))
    assert choose(BOTH, (0, 1), costs, 1, 1) == (TURNS, 0.0, "slices beside each other are not as predicted")


def test_look_ahead_sees_what_greed_does_not() -> None:
    """Beside, decoding is quick and training slow: most work per second, but an environment waits for the training."""
    costs = costs_of((1.05, 5.0))
    work: list[JobStages] = [(Stage("decode", 10.0, 8),), (Stage("train", 2.0), Stage("environment", 8.0))]
    assert choose(work, (0, 1), costs, TURNS, 0).active
    assert not choose(work, (0, 1), costs, TURNS, 1).active


def test_stages_of_the_engine_share_passes_and_those_of_the_trainer_take_turns() -> None:
    costs = costs_of(GAINS)
    decodes: list[JobStages] = [(Stage("decode", 4.0, 8),), (Stage("decode", 4.0, 8),)]
    assert rates(decodes, 1, costs) == pytest.approx([2 / 3] * 2)
    assert rates([(Stage("train", 1.0),), (Stage("optimizer", 1.0),)], 1, costs) == [0.5, 0.5]
    assert rates([(Stage("environment", 1.0),), (Stage("train", 1.0),)], 1, costs) == [1.0, 1.0]
    assert rates(BOTH, 1, costs) == pytest.approx([1 / 1.6, 1 / 1.7]) and rates(BOTH, 0, costs) == [0.5, 0.5]


def worker(
    name: str, rows: int, steps: int, train: float = 0.0, slow: tuple[float, float] = TAKING_TURNS
) -> WorkerRollouts:
    return WorkerRollouts(name, DecodingWorker(CostTable(), rows, 0, 64, 100_000), steps, rows * 100, train, slow)


def test_a_tail_moves_where_that_ends_all_sooner_than_its_tokens_cost() -> None:
    costs = CostTable()
    for rows in (1, 4, 16, 64):
        costs.record("decode", rows, 0.01 + rows * 1e-4)
    costs.record("prefill", 512, 0.3)
    taker = worker("b", 8, 200)
    assert merge(worker("a", 4, 400, 20.0), taker, costs) is not None
    assert merge(worker("a", 4, 10, 20.0), taker, costs) is None, "the prefill costs more"
    assert merge(worker("a", 4, 400, 0.0), taker, costs) is None, "nothing trains"
    assert merge(worker("a", 0, 400, 20.0), taker, costs) is None
    assert merge(worker("a", 4, 400, 20.0), taker, CostTable()) is None, "nothing was measured"
    assert merge(worker("a", 4, 400, 20.0, (1.01, 1.01)), taker, costs) is None, "beside training it loses nothing"


def test_durations_of_the_last_step_predict_steady_work_and_not_what_doubles() -> None:
    steady, doubles = StagePredictor(), StagePredictor()
    assert steady.predict("train") is None and math.isinf(steady.error("train"))
    for step in range(6):
        steady.record("train", 4.0 + 0.3 * (step % 2))
        doubles.record("train", 2.0**step)
        assert doubles.predict("train") is None
    assert steady.predict("train") == 4.3 and steady.error("train") < RELIABLE < doubles.error("train")


def test_durations_of_the_oldest_stages_are_forgotten() -> None:
    predictor = StagePredictor()
    for step in range(3):
        for name in range(MOST_STAGES + 5):
            predictor.record("kept", 1.0)
            predictor.record(f"{step} {name}", 1.0)
    known = [name for name in range(MOST_STAGES + 5) if not math.isinf(predictor.error(f"2 {name}"))]
    assert known == [] and predictor.predict("kept") == 1.0
    predictor.record(f"2 {MOST_STAGES + 4}", 1.0)
    assert predictor.predict(f"2 {MOST_STAGES + 4}") == 1.0
    predictor.record("2 0", 1.0)
    assert predictor.predict("2 0") is None, "it was forgotten"
