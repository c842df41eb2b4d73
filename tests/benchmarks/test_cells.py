"""Cells that survive; intervals; the page of results."""

from __future__ import annotations

import json
import math
import re
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from benchmarks.jobs.agentic_figures import figures
from benchmarks.lib import ages, harness, pages, plots, report
from benchmarks.lib.cells import Cells
from benchmarks.lib.harness import Result, ResultFolders, Row, commit
from benchmarks.lib.intervals import alternated, paired, t_quantile, welch
from benchmarks.lib.plots import FOLDER, draw
from hypothesis import given
from hypothesis import strategies as st
from tests.support.measured import agentic_cells

pytestmark = pytest.mark.heavy

VALUES = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=6)


# --- intervals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [(0.975, 1, 12.7062), (0.975, 2, 4.30265), (0.975, 4, 2.77645), (0.975, 10, 2.22814), (0.95, 5, 2.01505)],
)
def test_quantiles_are_those_of_published_tables(probability: float, freedom: float, value: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(value, rel=1e-5)


def test_quantiles_between_whole_degrees_of_freedom_lie_between() -> None:
    assert t_quantile(0.975, 4) < t_quantile(0.975, 3.5) < t_quantile(0.975, 3)


def test_welch_is_welch() -> None:
    found = welch([1.0, 2.0, 3.0], [2.0, 4.0, 6.0])
    error, freedom = math.sqrt(1 / 3 + 4 / 3), (5 / 3) ** 2 / (1 / 18 + 16 / 18)
    assert found.difference == pytest.approx(2.0)
    assert found.high - found.difference == pytest.approx(t_quantile(0.975, freedom) * error)
    assert found.null
    assert not welch([1.0, 1.1, 0.9], [2.0, 2.1, 1.9]).null


@given(VALUES, VALUES, st.floats(-100, 100))
def test_a_shift_shifts_the_interval(first: list[float], second: list[float], shift: float) -> None:
    plain, moved = welch(first, second), welch(first, [value + shift for value in second])
    for name in ("difference", "low", "high"):
        assert getattr(moved, name) == pytest.approx(getattr(plain, name) + shift, rel=1e-3, abs=1e-2)


def test_one_run_is_not_significant() -> None:
    assert welch([1.0], [2.0, 3.0]).null
    assert paired([5.0]).null


@pytest.mark.parametrize("turns", [1, 2, 3, 5, 8])
def test_order_within_a_turn_decides_no_comparison(turns: int) -> None:
    """It takes a fortieth longer; in one turn alone that cannot be told from a difference."""
    ratios = [1.1 * 1.025 ** (-1) ** turn for turn in range(turns)]
    assert alternated(ratios) == pytest.approx(1.1 if turns > 1 else 1.1 * 1.025)


# --- cells ------------------------------------------------------------------------------------------------------------


class Ended(Exception):
    """Stands for whatever ends a start early."""


def counted(cells: dict[str, Any]) -> Result:
    result = Result("counted", "Counted", "python x.py")
    result.rows = [Row(key, [cell["value"]], "") for key, cell in cells.items()]
    return result


def test_a_second_start_resumes_with_the_missing_parts(tmp_path: Path) -> None:
    ran, folders = [], ResultFolders(tmp_path)

    def run(value: int) -> dict[str, Any]:
        if value == 2 and len(ran) == 1:
            raise Ended
        ran.append(value)
        return {"value": value}

    def start(**more: Any) -> Cells:
        cells = Cells(counted, {"steps": 5}, folders=folders, **more)
        for value in (1, 2, 3):
            cells.measure(str(value), lambda value=value: run(value))
        return cells

    Cells(counted, {"steps": 4}, folders=folders)
    with pytest.raises(SystemExit):  # that plan is kept, though nothing has been measured
        start()
    with pytest.raises(Ended):
        start(discard=True)
    assert json.loads((tmp_path / "counted.json").read_text())["rows"][0]["values"] == [1]
    ran.append(0)  # it is not interrupted again
    cells = start()
    assert ran == [1, 0, 2, 3]
    assert [row.what for row in cells.result().rows] == ["1", "2", "3"]
    start()
    assert ran == [1, 0, 2, 3]
    start(discard=True)
    assert ran == [1, 0, 2, 3, 1, 2, 3]
    assert not list(tmp_path.glob("*.new"))


def test_a_result_of_several_commits_has_the_oldest_and_names_the_others(tmp_path: Path) -> None:
    folders = ResultFolders(tmp_path)

    def start() -> Cells:
        return Cells(counted, {"steps": 5}, folders=folders)

    def stored() -> dict[str, Any]:
        content: dict[str, Any] = json.loads((tmp_path / "counted.json").read_text())
        return content

    start().measure("1", lambda: {"value": 1})
    assert stored()["commit"] == commit() and stored()["notes"] == []
    old = stored()
    old |= {"date": "2020-02-02", "commit": "abcdef12"}
    for cell in old["data"]["cells"].values():
        del cell["date"], cell["commit"]
    (tmp_path / "counted.json").write_text(json.dumps(old))
    start().measure("2", lambda: {"value": 2})
    assert (stored()["date"], stored()["commit"]) == ("2020-02-02", "abcdef12")
    assert stored()["notes"] == [f"Of the 2 cells, 1 of {commit()}; the others of abcdef12."]


def test_a_result_is_replaced_atomically(tmp_path: Path) -> None:
    """A reader that opened the file before reads its old content to the end; the new content is another file."""
    path = tmp_path / "agentic.json"
    stored = asdict(figures(agentic_cells(seeds=(0,))))
    stored["title"] = "An old title"
    stored["data"] |= {"plan": {}, "cells": agentic_cells(seeds=(0,))}
    stored = json.loads(json.dumps(stored))
    path.write_text(json.dumps(stored))
    with path.open() as before:
        assert report.read(path)["title"] != stored["title"]
        assert json.loads(before.read()) == stored
    assert json.loads(path.read_text())["title"] != stored["title"]
    assert [file.name for file in tmp_path.iterdir()] == ["agentic.json"]


def results() -> list[dict[str, Any]]:
    paths = [*sorted(harness.RESULTS.glob("*.json")), *sorted((harness.RESULTS / "other").glob("*.json"))]
    return [json.loads(path.read_text()) for path in paths]


def test_the_page_is_made_from_the_results_and_every_picture_exists() -> None:
    text = (harness.HERE / "RESULTS.md").read_text()
    plots = {path.stem: path for path in FOLDER.glob("*.png")}
    assert ages.unmarked(report.page(results(), plots)) == ages.unmarked(text), "run: python -m benchmarks.lib.report"
    assert set(plots) == {"speed", "agentic", "tenants"}


def test_every_result_has_a_day_a_commit_and_a_machine() -> None:
    for result in results():
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", result["date"]), result["name"]
        assert re.fullmatch(r"[0-9a-f]{7,}\+?", result["commit"]), result["name"]
        assert result["machine"], result["name"]


def test_a_new_result_records_its_day_and_commit(tmp_path: Path) -> None:
    result = Result("made", "Made", "python x.py")
    result.add("a step", [1.0], "s")
    result.save(ResultFolders(tmp_path))
    made = json.loads((tmp_path / "made.json").read_text())
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", made["date"]) and made["commit"] == harness.commit()


def test_no_figure_of_a_simulation_stands_among_the_measured_ones() -> None:
    text = (harness.HERE / "RESULTS.md").read_text()
    measured, _, simulated = text.partition("## Simulated")
    for result in results():
        assert f"[{result['name']}]" not in (measured if result["simulated"] else simulated)


def test_plots_are_drawn_of_the_results_that_exist(tmp_path: Path) -> None:
    cells = {"agentic": {**asdict(figures(agentic_cells())), "date": "2026-11-25", "machine": "two cores"}}
    assert [path.name for path in draw(json.loads(json.dumps(cells)), tmp_path).values()] == ["agentic.png"]
    assert (tmp_path / "agentic.png").read_bytes().startswith(b"\x89PNG")
    assert draw({"agentic": asdict(figures({}))}, tmp_path) == {} and draw({}, tmp_path) == {}


@pytest.mark.parametrize(("machines", "runs"), [(["two cores"], 1), (["two cores", "a slow one"], 3)])
def test_captions_say_the_machines_the_days_and_the_runs(machines: list[str], runs: int) -> None:
    stored = asdict(figures(agentic_cells())) | {"date": "2026-11-25", "machine": f"{machines[0]}, Python 3.11"}
    for point in stored["data"]["points"]:
        point["runs"] = runs
    crowd = plots.agentic({"agentic": stored})
    assert crowd is not None
    title = crowd.axes[0].get_title()
    assert f"{machines[0]}, 2026-11-25" in title and ("one run" in title) == (runs == 1)
    results = {}
    for (name, ours, theirs, _), machine in zip(plots.COMPARED[-2:], (machines * 2)[:2], strict=True):
        made = Result(name, name, "", machine=machine, date="2026-11-25", commit="")
        made.add(ours, [2.0], "s")
        made.add(theirs, [3.0], "s")
        results[name] = asdict(made)
    speeds = plots.speed(results)
    assert speeds is not None and all(machine in speeds.get_suptitle() for machine in machines)


@pytest.mark.parametrize("page", pages.PAGES)
def test_pages_have_the_figures_of_the_results(page: str) -> None:
    found = {path.stem: json.loads(path.read_text()) for path in harness.RESULTS.glob("*.json")}
    plots = {path.stem: path for path in FOLDER.glob("*.png")}
    text = (harness.ROOT / page).read_text(encoding="utf-8")
    assert pages.filled(harness.ROOT / page, found, plots) == text, "run: python -m benchmarks.lib.report"
    assert {match[2] for match in pages.MARKED.finditer(text)} <= found.keys()


def test_a_folder_is_complete_or_absent(tmp_path: Path) -> None:
    for ends_early in (True, True, False):
        with suppress(Ended), harness.whole(tmp_path / "work" / "model") as folder:
            (folder / str(len(list(folder.iterdir())))).write_text("x")
            if ends_early:
                raise Ended
        assert (tmp_path / "work" / "model").exists() != ends_early
    assert [file.name for file in (tmp_path / "work" / "model").iterdir()] == ["0"]  # nothing of the attempts before
    assert [file.name for file in (tmp_path / "work").iterdir()] == ["model"]


def test_cells_of_another_plan_are_not_mixed(tmp_path: Path) -> None:
    folders = ResultFolders(tmp_path)
    Cells(counted, {"steps": 5}, folders=folders).measure("1", lambda: {"value": 1})
    with pytest.raises(SystemExit, match=r"another plan.*--discard"):
        Cells(counted, {"steps": 6}, folders=folders)
    assert Cells(counted, {"steps": 5}, discard=True, folders=folders).cells == {}


def test_each_machine_resumes_with_the_cells_assigned_to_it(tmp_path: Path) -> None:
    def start(name: str, value: int, *, publishes: bool = False) -> dict[str, Any]:
        folders = ResultFolders(tmp_path, tmp_path / "local", name, publishes)
        cells = Cells(counted, {"steps": 5}, folders=folders)
        cells.measure(str(value), lambda: {"value": value})
        return {key: cell["value"] for key, cell in cells.cells.items()}

    assert start("first", 1) == {"1": 1}
    assert start("second", 2) == {"2": 2}
    assert start("first", 3) == {"1": 1, "3": 3}
    committed = (tmp_path / "counted.json").read_bytes()
    assert start("second", 4) == {"2": 2, "4": 4}
    assert (tmp_path / "counted.json").read_bytes() == committed
    assert [path.name for path in (tmp_path / "local").iterdir()] == ["counted.json"]
    assert start("second", 5, publishes=True) == {"5": 5}
    assert (tmp_path / "counted.json").read_bytes() != committed
