"""The planner of lanes: slowdowns, predicted finishes, choices with look-ahead, and durations of the last step."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Sequence
from statistics import fmean

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
    SWITCH_GAIN,
    TAKING_TURNS,
    TRAINER,
    TURNS,
    JobStages,
    LaneCosts,
    SlowdownTable,
    Stage,
    StageKind,
    StagePredictor,
    State,
    advance,
    affordable_depth,
    choose,
    complete,
    cost_of,
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
            assert cost_of(state, choice.threads, modes, depth, costs) < complete(state, TURNS, costs).cost


def finish(work: Sequence[JobStages], costs: LaneCosts, first: Sequence[int], held: int, last: int) -> float:
    """The last end plus the mean end of these chains, scheduled: the modes ``first``, each until a stage ends, then
    ``held`` until the stages that are present then have ended, then ``last``. A mode is taken while both have work."""
    left = [[[stage.kind, stage.seconds, stage.rows] for stage in chain] for chain in work]
    modes, waited_for, clock, ends = list(first), None, 0.0, [0.0] * len(work)
    while any(left):
        heads = {number: stages[0] for number, stages in enumerate(left) if stages}
        decoding = [number for number, (kind, *_) in heads.items() if kind in ("decode", "tail")]
        prefilling = [number for number, (kind, *_) in heads.items() if kind == "prefill"]
        training = [number for number, (kind, *_) in heads.items() if kind in ("train", "optimizer")]
        rows = sum(heads[number][2] for number in decoding)
        engine_slow = trainer_slow = 1.0
        if (decoding or prefilling) and training:
            if modes:
                mode = modes.pop(0)
            else:
                waited_for = set(heads) if waited_for is None else waited_for
                mode = held if waited_for else last
            engine_slow, trainer_slow = costs.table.slowdown(mode, "decode" if decoding else "prefill", rows)
        speed = dict.fromkeys(heads, 1.0)
        passes = len(prefilling) + bool(decoding) or 1
        speed |= dict.fromkeys(prefilling, 1 / engine_slow / passes)
        speed |= {n: costs.step(heads[n][2]) / costs.step(rows) / engine_slow / passes for n in decoding}
        speed |= {number: 1 / trainer_slow / len(training) for number in training}
        spent = min(heads[number][1] / speed[number] for number in heads)
        clock += spent
        for number, head in heads.items():
            head[1] -= spent * speed[number]
            if head[1] < 1e-9:
                left[number].pop(0)
                ends[number] = clock
                waited_for = waited_for and waited_for - {number}
    return max(ends) + sum(ends) / len(ends)


def random_work(rng: random.Random) -> list[JobStages]:
    def stage(kind: StageKind) -> Stage:
        return Stage(kind, 10 ** rng.uniform(-1, 1.5), rng.randint(1, 40))

    any_of: list[StageKind] = ["prefill", "decode", "tail", "environment", "train", "optimizer"]
    others = [[rng.choice(any_of) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(0, 2))]
    both: list[list[StageKind]] = [["decode", *rng.choices(any_of, k=1)], ["train", *rng.choices(any_of, k=2)]]
    return [tuple(map(stage, kinds)) for kinds in both + others]


def random_costs(rng: random.Random, modes: Sequence[int]) -> LaneCosts:
    table = SlowdownTable()
    for mode in modes:
        for rows in (*BUCKETS, 0):
            engine, trainer = rng.uniform(1, 2.6), rng.uniform(1, 2.6)
            table.record(mode, "decode" if rows else "prefill", rows, engine=engine, trainer=trainer)
    return LaneCosts(table, lambda rows: 1.0 + rows / 8)


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 2))
def test_a_mode_is_chosen_by_the_finishes_of_its_schedules_and_costs_no_more_than_turns(seed: int, lanes: int) -> None:
    rng, modes = random.Random(seed), range(lanes + 1)
    work, costs = random_work(rng), random_costs(rng, modes[1:])
    turns = before = finish(work, costs, (), TURNS, TURNS)
    for depth in (0, 1, 2):
        least = dict.fromkeys(modes, math.inf)
        for ahead in range(depth + 1):
            for plan in itertools.product(modes, repeat=ahead + 2):
                found = finish(work, costs, plan[:ahead], *plan[ahead:])
                least[plan[0]] = min(least[plan[0]], found)
        best = min(least.values())
        choice = choose(work, modes, costs, TURNS, depth)
        if best > (1 - LEAST_GAIN) * turns:
            assert not choice.active
            continue
        cost = least[choice.threads]
        assert cost == pytest.approx(best) and cost <= turns
        assert choice.gain == pytest.approx(1 - cost / turns)
        assert cost <= before * (1 + 1e-9), "looking ahead never costs more"
        before = cost
        for present in modes[1:]:
            kept = choose(work, modes, costs, present, depth)
            assert least[kept.threads] <= min(turns, best + (SWITCH_GAIN + 1e-9) * turns)


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


def test_a_mode_that_gains_too_little_is_left_for_a_slightly_better_one() -> None:
    endless: list[JobStages] = [(Stage("decode", math.inf, 8),), (Stage("train", 4.0),)]
    costs = costs_of((1.95, 1.95), (1.92, 1.92))
    assert [choose(endless, (0, 1, 2), costs, present, 1).threads for present in (0, 1, 2)] == [2, 2, 2]


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


def test_choices_cost_little_more_than_exhaustive_search_and_least_with_look_ahead() -> None:
    """Each at the end of a stage, of jobs in the middle of their steps: the reason for the default depth."""
    above: dict[str, list[float]] = {"turns": [], "depth 0": [], "depth 1": []}
    for seed in range(40):
        rng = random.Random(seed)
        lasts = [rng.uniform(0.5, 6.0) for _ in range(8)]
        work: tuple[JobStages, ...] = (
            (Stage("decode", lasts[0], 16), Stage("tail", lasts[1], 4), Stage("train", lasts[2])),
            (Stage("train", lasts[3]), Stage("decode", lasts[4], 64)),
            (Stage("environment", lasts[5]), Stage("decode", lasts[6], 4), Stage("train", lasts[7])),
        )
        costs, state = random_costs(rng, [1]), State(work)
        least = predicted(state, (0, 1), 7, costs)
        above["turns"].append(complete(state, TURNS, costs).cost / least - 1)
        for depth in (0, 1):
            state, mode = State(work), TURNS
            while state.chains:
                mode = choose(state.chains, (0, 1), costs, mode, depth).threads
                state = advance(state, mode, costs)
            above[f"depth {depth}"].append(state.cost / least - 1)
    turns, shallow, default = map(fmean, above.values())
    assert turns > 0.08 and default < shallow < 0.01


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize(
    ("trainer", "work"),
    [
        (2.6, [(Stage("decode", 5.0, 8),), (Stage("train", 1000.0),)]),
        (5.0, [(Stage("decode", 4.0, 4),), (Stage("train", 1.0), Stage("decode", 4.0, 4))]),
        (5.0, [(Stage("decode", 10.0, 8),), (Stage("train", 2.0), Stage("environment", 8.0))]),
    ],
)
def test_more_work_per_second_is_not_enough_where_durations_are_known(
    trainer: float, work: list[JobStages], depth: int
) -> None:
    """Beside, decoding is quick and training slow, of which there is much, or for which other work waits."""
    costs = costs_of((1.05, trainer))
    assert sum(rates(work, 1, costs)) > sum(rates(work, TURNS, costs))
    assert choose(work, (0, 1), costs, TURNS, depth) == (TURNS, 0.0, "nothing gains")


@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("jobs", [1, 4, 16, 64, 256])
def test_a_choice_among_many_jobs_is_made_in_time(jobs: int, depth: int) -> None:
    """On 16 cores there are four modes. A worker computes nothing else meanwhile."""
    rng = random.Random(jobs)
    kinds: list[StageKind] = ["prefill", "decode", "tail", "environment", "train", "optimizer"]
    work = [
        tuple(Stage(kinds[(number + i) % 6], rng.uniform(0.1, 9.0), 8) for i in range(6)) for number in range(6 * jobs)
    ]
    costs, began = random_costs(rng, [1, 2, 3]), time.process_time()
    choice = choose(work, (0, 1, 2, 3), costs, TURNS, depth)
    assert time.process_time() - began < 5.0, "tenths of a second, on a machine that is not busy"
    ahead = affordable_depth(work, 4, depth)
    assert (ahead is None) == (jobs > 4) and (not choice.active or (choice.gain > 0) == (ahead is not None))


def test_choices_look_as_far_ahead_as_is_affordable() -> None:
    found = [affordable_depth(BOTH * jobs, 2, 4) for jobs in (1, 4, 16, 128)]
    assert found[0] == 4 and found[-1] is None
    lower = [-1 if one is None else one for one in found]
    assert lower == sorted(lower, reverse=True)
    many: list[JobStages] = BOTH * 128
    assert choose(many, (0, 1), costs_of(GAINS), TURNS, 2) == (1, 0.0, "jobs are too many to predict")


def test_nothing_is_predicted_of_unknown_durations() -> None:
    known = choose(BOTH, (0, 1), costs_of(GAINS), TURNS, 0)
    endless: list[JobStages] = [(Stage("decode", math.inf, 8),), (Stage("train", 4.0),)]
    assert known.active and known.gain > 0.1 and known.why == ""
    assert choose(endless, (0, 1), costs_of(GAINS), TURNS, 0) == (1, 0.0, "durations are unknown")


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


def test_durations_of_the_last_step_predict_steady_work_and_not_work_that_doubles() -> None:
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
