"""The figures of serving: shares of windows, and the trace that every arm replays."""

from __future__ import annotations

import pytest
from benchmarks.jobs.serving import ARMS, LOADS, QUICK, TPOT, TRACE_SECONDS, TTFT, arrivals, figures, windows

pytestmark = pytest.mark.heavy


def test_a_window_is_within_if_enough_of_its_requests_are() -> None:
    good, late, slow = [TTFT / 2, TPOT / 2, 9], [2 * TTFT, 0.0, 9], [0.0, 2 * TPOT, 9]
    first, second = [[1.0, *good]] * 99, [[61.0, *good]] * 99
    assert windows([*first, [2.0, *late], *second, [62.0, *good]]) == 1
    assert windows([*first, [2.0, *late], [3.0, *slow], *second]) == 0.5


def test_the_trace_is_thinned_alike_each_time_and_keeps_its_peaks() -> None:
    first, again = list(arrivals(4.0, 120.0)), list(arrivals(4.0, 120.0))
    assert first == again and first[-1][0] > TRACE_SECONDS
    assert 0.8 < len(first) / (4.0 * 120.0) < 1.2
    seconds = [int(at) for at, _, _ in first]
    peak = sum(second % TRACE_SECONDS % 8 == 0 for second in seconds) / 16
    assert peak > 2 * (len(seconds) - 16 * peak) / 104


def test_arms_of_a_load_are_compared_with_serving_alone() -> None:
    arm = {"seen": [[1.0, 0.2, 0.05, 20]], "rollouts": 50.0, "machine": 1.0}
    cells = {"capacity": {"rate": 4.0}, f"rollouts only{QUICK}": {**arm, "rollouts": 100.0}}
    cells |= {f"50% {name}{QUICK}": arm for name in ARMS}
    result = figures(cells)
    [table] = result.data["tables"]
    assert [row[0] for row in table["rows"]] == [f"50% {name}{QUICK}" for name in ARMS]
    [quick] = [one for one in result.verdicts if QUICK in one.target]
    assert table["rows"][0][8] == 0.5 and quick.met and quick.why == "serving only: 100%; one window"
    assert [one.met for one in result.verdicts if one is not quick] == [None] * len(LOADS), "ten minutes of each"
    assert "gate 1.00 x, no gate 1.00 x" in result.notes[0]
    assert figures({}).data["tables"][0]["rows"] == []
