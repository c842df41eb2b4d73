"""Verdicts and summaries of the measures."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
from benchmarks.lib.harness import Result
from benchmarks.micro import lanes, neighbours
from benchmarks.scale import callers, elastic, weights_direct

from rookery.simulation.elastic import StepTrace, replay


def test_summary_of_hostile_callers_names_its_oldest_case() -> None:
    stored, new = Result("callers", "", ""), Result("callers", "", "")
    stored.judge("C2 episodes: targets", "fine", True, "2026-11-03, bbbbbbb")
    stored.judge("C1 patterns: targets", "slow", False, "2026-11-01, aaaaaaa")
    new.judge("C1 patterns: targets", "fine", True, "2026-11-27, ccccccc")
    both = callers.merged(new, asdict(stored))
    [summary] = [one for one in both.verdicts if one.target.startswith("one hostile caller")]
    assert (summary.measured, summary.met, summary.why) == ("2 of 2", True, "the oldest: 2026-11-03, bbbbbbb")


@pytest.mark.parametrize(
    ("equal", "expected"),
    [
        ([], ("no difference written", None)),
        ([True, True], ("2 of 2 equal", True)),
        ([True, False], ("1 of 2 equal", False)),
    ],
)
def test_hashes_of_differences_are_compared(equal: list[bool], expected: tuple[str, bool | None]) -> None:
    figures: list[dict[str, Any]] = [{"bytes": 1.0}, *({"equal": one} for one in equal)]
    assert weights_direct.hashes(figures) == expected


def test_ways_next_to_programs_are_compared_with_no_control_alone() -> None:
    medians = {("step", 0, "no control"): 10.0, ("step", 0, "spinning"): 30.0}
    medians |= {("step", 1, name): 40.0 for name in neighbours.WAYS}
    assert neighbours.over_alone(medians, "step", 1) == dict.fromkeys(neighbours.WAYS, 4.0)


def test_slowdowns_are_those_of_lanes_without_a_planner_over_turns_of_the_same_round() -> None:
    rates = {"turns": [(0.5, 0.5), (0.6, 0.6), (0.5, 0.5)], "auto": [(0.55, 0.5)] * 3}
    rates["beside"] = [(0.8, 0.5), (0.96, 0.3), (0.8, 0.5)]
    assert set(rates) == set(lanes.ARMS)
    assert lanes.slowdowns_of(rates) == pytest.approx([1.25, 2.0])


def test_elastic_pool_is_compared_with_a_number_that_waits_as_little() -> None:
    trace = StepTrace.steady(elastic.RIGHT, elastic.STEPS, 0)
    right, twice, few = (replay(trace, count) for count in (elastic.RIGHT, 2 * elastic.RIGHT, 5))
    assert elastic.over_best(right, trace) == pytest.approx(1.0)
    assert elastic.over_best(twice, trace) > elastic.MOST_HOURS
    assert elastic.over_best(few, trace) >= 1.0 and few.wait_share_late > elastic.MOST_WAIT
