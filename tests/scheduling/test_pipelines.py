"""Pipelines: the slowdown table, timelines, the planner against first come and against itself with more look-ahead."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from benchmarks.scale.jigsaw import TRAP, TRAP_TABLE
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples

from rookery.scheduling.pipelines import (
    HYSTERESIS,
    RELIABLE,
    Action,
    Planner,
    Slowdown,
    StagePredictor,
    SubStage,
    Timeline,
    complete,
    pays,
    slowdowns,
)

TABLE: Slowdown = {("decode", "train"): (1.25, 1.6), ("decode", "decode"): (1.1, 1.1), ("dense", "train"): (1.95, 1.95)}


def line(*parts: tuple[str, float], job: str = "j", worker: int | None = None) -> list[SubStage]:
    """Sub-stages one after the other."""
    return [SubStage(job, kind, s, (i - 1,) if i else (), worker) for i, (kind, s) in enumerate(parts)]


def ran(stages: Sequence[SubStage], workers: int = 1, depth: int | None = None, **parts: bool) -> Timeline:
    timeline = Timeline.begin(stages, workers, TABLE, **parts)
    return complete(timeline) if depth is None else complete(timeline, Planner(depth).choose)


def test_slowdowns_are_of_the_pair_in_either_order_and_time_slices_where_unknown() -> None:
    assert slowdowns(TABLE, "decode", "train") == (1.25, 1.6) and slowdowns(TABLE, "train", "decode") == (1.6, 1.25)
    assert slowdowns(TABLE, "train", "train") == (2.0, 2.0)
    assert pays(TABLE, "train", "decode") and not pays(TABLE, "train", "dense") and not pays(TABLE, "train", "train")


def test_first_come_first_served_runs_in_order_and_shares_forward_passes_alone() -> None:
    train = [SubStage(job, "train", 2.0) for job in "ab"]
    assert ran(train).ends == pytest.approx({"a": 2.0, "b": 4.0})
    decode = [SubStage(job, "decode", 2.0) for job in "ab"]
    assert ran(decode).ends == pytest.approx({"a": 2.2, "b": 2.2}), "one batch"
    assert ran([SubStage("a", "decode", 2.0), SubStage("b", "train", 2.0)]).ends == pytest.approx({"a": 2.0, "b": 4.0})
    waits = [*line(("environment", 3.0), ("train", 1.0), job="a"), SubStage("b", "train", 2.0)]
    assert ran(waits).ends == pytest.approx({"a": 4.0, "b": 2.0}), "environments need no worker"
    with pytest.raises(ValueError, match=r"sub-stages \[0\] wait"):
        ran([SubStage("a", "train", 1.0, (0,))])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_training_runs_next_to_decoding_where_the_table_shows_a_gain(depth: int) -> None:
    pair = [SubStage("a", "decode", 4.0), SubStage("b", "train", 4.0)]
    assert max(ran(pair, depth=depth).ends.values()) < 6.9 < max(ran(pair).ends.values())
    off = ran(pair, depth=depth, multiplex=False)
    assert off.ends == ran(pair).ends
    planner = Planner(depth)
    dense = Timeline.begin([SubStage("a", "dense", 4.0), SubStage("b", "train", 4.0)], 1, TABLE)
    assert complete(dense, planner.choose).ends == complete(dense).ends and not planner.active


def tails(cost: float) -> list[SubStage]:
    """One job's tails hold two workers; another job wants to train on the second."""
    return [
        SubStage("a", "decode", 5.0, worker=0), SubStage("a", "decode", 5.0, worker=1, move_seconds=cost),
        SubStage("b", "train", 5.0, worker=1),
    ]  # fmt: skip


def test_a_tail_moves_where_freeing_its_worker_gains_more_than_its_tokens_cost() -> None:
    timeline = Timeline.begin(tails(0.2), 2, TABLE, multiplex=False)
    planner = Planner(1)
    done = complete(timeline, planner.choose)
    assert planner.active and max(done.ends.values()) < 6.0 < max(complete(timeline).ends.values())
    begun = timeline.apply(Action(0, 0)).apply(Action(1, 1))
    assert planner.choose(begun) == Action(1, 0, moves=True)
    usual = complete(begun).cost()
    for cost in (4.0, 5.0, math.inf):
        dear = Timeline.begin(tails(cost), 2, TABLE, multiplex=False)
        begun = dear.apply(Action(0, 0)).apply(Action(1, 1))
        if cost < math.inf:
            assert usual - complete(begun.apply(Action(1, 0, moves=True))).cost() < HYSTERESIS * cost
        assert Planner(1).choose(begun) is None
    assert ran(tails(0.2), 2, 1, multiplex=False, merge=False).ends == complete(timeline).ends


def test_looking_ahead_keeps_the_pair_that_the_best_pair_now_would_spoil() -> None:
    trap = Timeline.begin(TRAP, 1, TRAP_TABLE)
    costs = [complete(trap, Planner(depth).choose).cost() for depth in (0, 1, 2, 4)]
    assert costs[0] >= 1.1 * costs[2] >= 1.1 * costs[3]


stages = st.lists(
    st.tuples(st.sampled_from("abc"), st.sampled_from(["decode", "train", "dense", "environment"]), st.floats(0.1, 5)),
    min_size=1, max_size=7,
)  # fmt: skip


@settings(max_examples=examples(60), deadline=None)
@given(stages, st.integers(1, 3), st.integers(1, 2), st.randoms(use_true_random=False))
def test_look_ahead_is_never_predicted_worse_than_first_come(
    parts: list[tuple[str, str, float]], workers: int, depth: int, random: object
) -> None:
    last: dict[str, int] = {}
    graph = []
    for number, (job, kind, seconds) in enumerate(parts):
        graph.append(SubStage(job, kind, seconds, (last[job],) if job in last else (), move_seconds=0.1 * (number + 1)))
        last[job] = number
    timeline = Timeline.begin(graph, workers, TABLE)
    done = complete(timeline, Planner(depth).choose)
    assert not done.left and set(done.ends) == {job for job, _, _ in parts}
    assert done.cost() <= complete(timeline).cost() + 1e-6
    assert max(done.ends.values()) >= max(s.seconds for s in graph) - 1e-6


def test_durations_of_the_last_step_predict_steady_work_and_not_what_doubles() -> None:
    steady, doubles = StagePredictor(), StagePredictor()
    assert steady.predict("train") is None and math.isinf(steady.error("train"))
    for step in range(6):
        steady.record("train", 4.0 + 0.3 * (step % 2))
        doubles.record("train", 2.0**step)
        assert doubles.predict("train") is None
    assert steady.predict("train") == 4.3 and steady.error("train") < RELIABLE < doubles.error("train")
