"""The verdicts of the benchmark of drafts."""

from __future__ import annotations

import pytest
from benchmarks.micro.speculation import GAMMAS, ROWS, SIBLINGS, TASKS, budgets, figures

pytestmark = pytest.mark.heavy


def test_the_budget_is_as_good_as_the_best_fixed_length_for_each_load() -> None:
    times = {f"{rows} {gamma}": 10.0 + 0.5 * max(8, rows * (1 + gamma)) for rows in ROWS for gamma in GAMMAS}
    table = {way: least for way, *least in budgets(times)}
    assert min(table["budget"]) >= 0.97
    assert all(min(least) < 0.97 for way, least in table.items() if way != "budget")


def test_verdicts_are_of_the_parts_that_were_measured() -> None:
    assert figures({}).verdicts == []
    cells = {task: {str(n): 1.0 + n for n in SIBLINGS} for task in TASKS}
    cells |= {f"JSON {rows}": {"off": [10.0], "on": [12.0], "acceptance": 0.5, "drafts": 1.0} for rows in ROWS}
    cells["JSON 8"]["again"] = [9.5]
    found = figures(cells)
    assert {verdict.why for verdict in found.verdicts} == {"", "a second engine without drafts: 0.95 to 0.95 x"}
    verdicts = {verdict.target: verdict.met for verdict in found.verdicts}
    assert verdicts["JSON, up to 4 rows: >= 1.3 x"] is False
    assert verdicts["JSON, up to 64 rows: >= 0.99 x"] is True
    assert verdicts["tokens per forward rise with siblings, arithmetic"] is True
