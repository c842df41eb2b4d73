"""The simulated curve of tenants, on its smallest crowds."""

from __future__ import annotations

import json

import pytest
from benchmarks.scale.tenants import crowd, figures, full_cost

pytestmark = pytest.mark.heavy


def test_concurrent_tenants_are_faster_where_a_tool_waits() -> None:
    cells = {f"2/1/{staleness}": crowd(2.0, 1, staleness) for staleness in (0, 2)}
    cells["2/2/2"] = crowd(2.0, 2)
    assert cells["2/2/2"]["tokens"] == 2 * cells["2/1/2"]["tokens"] == 2 * 2400
    assert cells["2/1/0"]["makespan"] > 15 * 2.0, "fifteen tool calls in a row"
    assert full_cost(cells["2/1/2"]) < cells["2/1/2"]["decode"] + cells["2/1/2"]["train"]
    result = figures(cells)
    json.dumps(result.data, allow_nan=False)
    points = {point["tenants"]: point for point in result.data["points"]}
    assert points[2]["saved"] > 0.5 and points[2]["busy"] == pytest.approx(2 * points[1]["busy"], rel=0.3)
    assert not result.verdicts, "nothing is said of crowds that were not simulated"
    assert figures({}).data["points"] == []
