"""The curve of tenants: what is made of its cells; cells that survive; intervals."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from benchmarks.jobs.curve_figures import (
    LATENCIES,
    STEPS,
    TENANTS,
    bound,
    figures,
    latency_for,
    line,
    points,
    reward_differences,
)
from benchmarks.lib import harness, report
from benchmarks.lib.cells import Cells
from benchmarks.lib.harness import Result, Row
from benchmarks.lib.intervals import paired, t_quantile, welch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.measured import CROWD_COMPUTE, SOLO_COMPUTE, SOLO_SECONDS, curve_cells

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


def test_one_run_alone_tells_nothing() -> None:
    assert welch([1.0], [2.0, 3.0]).null
    assert paired([5.0]).null


# --- the curve --------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0.1, 10), st.floats(0.1, 50)), min_size=1, max_size=32))
def test_the_bound_is_no_less_than_either_limit(jobs: list[tuple[float, float]]) -> None:
    computes, solos = [c for c, _ in jobs], [t for _, t in jobs]
    assert bound(computes, solos) >= max(solos)
    assert bound(computes, solos) >= sum(computes)
    assert bound(computes, solos) in (max(solos), sum(computes))


def test_a_worker_that_wastes_a_tenth_is_within_the_target() -> None:
    result = figures(curve_cells(idle=0.1))
    found = {(point.latency, point.tenants): point for point in points(curve_cells(idle=0.1))}
    assert len(found) == len(LATENCIES) * len(TENANTS)
    for name in LATENCIES:
        largest = found[name, 32]
        assert largest.efficiency == pytest.approx(0.9)
        assert largest.bound == pytest.approx(32 * SOLO_COMPUTE)  # not the crowd's own, which is more
        assert largest.compute == pytest.approx(CROWD_COMPUTE)
        assert largest.runs == 3
    assert found["4", 32].gains["sync"] == pytest.approx(0.9 * (SOLO_SECONDS + 4 * STEPS) / SOLO_COMPUTE)
    assert found["4", 32].gains["async"] == pytest.approx(0.9 * SOLO_SECONDS / SOLO_COMPUTE)
    assert found["4", 2].bound == SOLO_SECONDS + 4 * STEPS  # a tenant alone takes longer than the sum of computes
    assert [verdict.met for verdict in result.verdicts] == [True] * len(result.verdicts)


def test_a_worker_that_wastes_a_fifth_is_not() -> None:
    verdicts = figures(curve_cells(idle=0.2)).verdicts
    assert [verdict.met for verdict in verdicts[: len(LATENCIES)]] == [False] * len(LATENCIES)


def test_a_cheaper_crowd_makes_the_bound_stricter() -> None:
    cells = curve_cells(seeds=(0,))
    cells["crowd/0/32/0"] |= {"decode": 32.0, "train": 64.0}  # 3 s each, where a job alone takes 12
    point = next(p for p in points(cells) if (p.latency, p.tenants) == ("0", 32))
    assert point.bound == pytest.approx(96.0)


def test_gains_are_within_a_run_of_the_curve() -> None:
    """A run on a day when everything took twice as long has the same gains, whatever was measured again."""
    cells = curve_cells(seeds=(0, 1))
    told = {(p.latency, p.tenants): p.gains for p in points(cells)}
    for cell in cells.values():
        for each in ([cell, *cell.get("jobs", ())]) if cell["seed"] == 1 else ():
            for name in ("makespan", "seconds", "decode", "train"):
                if name in each:
                    each[name] = [2 * x for x in each[name]] if isinstance(each[name], list) else 2 * each[name]
    for key in [key for key in cells if key.startswith("crowd/0/16/1")]:
        del cells[key]
    slower = points(cells)
    assert {(p.latency, p.tenants): p.gains for p in slower} == {at: pytest.approx(gains) for at, gains in told.items()}
    assert any("32 tenants get 1.00 x as much done per second as 16" in note for note in figures(cells).notes)


def test_whatever_is_missing_is_not_made_up() -> None:
    cells = curve_cells()
    assert [verdict.met for verdict in figures({}).verdicts] == [None] * 5
    for count in range(0, len(cells), 7):
        some = dict(list(cells.items())[:count])
        assert json.loads(json.dumps(figures(some).data, allow_nan=False))["tables"]
    crowds = {key: cell for key, cell in cells.items() if key.startswith("crowd")}
    assert points(crowds) == []  # without solo runs there is neither bound nor gain


def test_where_the_papers_gain_begins() -> None:
    fit = line(curve_cells())
    assert fit is not None
    start, slope = fit
    assert (start, slope) == (pytest.approx(SOLO_SECONDS), pytest.approx(STEPS))
    begins = latency_for(6.7, start, slope, 13.0)
    assert (start + slope * begins) / 13.0 == pytest.approx(6.7)
    assert latency_for(1.1, start, slope, 13.0) < 0  # it is more than that already


def test_rewards_are_compared_seed_by_seed() -> None:
    cells = curve_cells()
    differences, equal, steps = reward_differences(cells)
    assert differences == [0.0] * 9  # three solo jobs of each of three runs, however often a crowd repeats them
    assert equal == steps > 9 * STEPS
    for cell in cells.values():
        if "makespan" in cell:
            for job in cell["jobs"]:
                job["rewards"] = [reward + 0.05 for reward in job["rewards"]]
    differences, equal, _ = reward_differences(cells)
    assert differences == [pytest.approx(0.05)] * 9
    assert equal == 0
    verdict = next(v for v in figures(cells).verdicts if v.target.startswith("rewards"))
    assert verdict.met is False


# --- cells ------------------------------------------------------------------------------------------------------------


class Ended(Exception):
    """Stands for whatever ends a start early."""


def counted(cells: dict[str, Any]) -> Result:
    result = Result("counted", "Counted", "python x.py")
    result.rows = [Row(key, [cell["value"]], "") for key, cell in cells.items()]
    return result


def test_a_second_start_goes_on_with_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    ran = []

    def run(value: int) -> dict[str, Any]:
        if value == 2 and len(ran) == 1:
            raise Ended
        ran.append(value)
        return {"value": value}

    def start(**more: Any) -> Cells:
        cells = Cells(counted, {"steps": 5}, **more)
        for value in (1, 2, 3):
            cells.measure(str(value), lambda value=value: run(value))
        return cells

    Cells(counted, {"steps": 4})
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


def test_a_result_said_anew_is_there_whole_whenever_it_is_read(tmp_path: Path) -> None:
    """Whoever opened the file before reads what it was to its end; the new one is another file."""
    path = tmp_path / "curve.json"
    stored = asdict(figures(curve_cells(seeds=(0,))))
    stored["title"] = "As it was said before"
    stored["data"] |= {"plan": {}, "cells": curve_cells(seeds=(0,))}
    path.write_text(json.dumps(stored))
    with path.open() as before:
        assert report._read(path)["title"] != stored["title"]
        assert json.loads(before.read()) == stored
    assert json.loads(path.read_text())["title"] != stored["title"]
    assert [file.name for file in tmp_path.iterdir()] == ["curve.json"]


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    for ends_early in (True, True, False):
        with suppress(Ended), harness.whole(tmp_path / "work" / "model") as folder:
            (folder / str(len(list(folder.iterdir())))).write_text("x")
            if ends_early:
                raise Ended
        assert (tmp_path / "work" / "model").exists() != ends_early
    assert [file.name for file in (tmp_path / "work" / "model").iterdir()] == ["0"]  # nothing of the attempts before
    assert [file.name for file in (tmp_path / "work").iterdir()] == ["model"]


def test_cells_of_another_plan_are_not_mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "ROOT", tmp_path)
    Cells(counted, {"steps": 5}).measure("1", lambda: {"value": 1})
    with pytest.raises(SystemExit, match=r"another plan.*--discard"):
        Cells(counted, {"steps": 6})
    assert Cells(counted, {"steps": 5}, discard=True).cells == {}


def test_each_machine_goes_on_with_its_own_cells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "LOCAL", tmp_path / "local")
    monkeypatch.delenv(harness.PUBLISH, raising=False)

    def start(name: str, value: int) -> dict[str, Any]:
        monkeypatch.setattr(harness, "machine", lambda: name)
        cells = Cells(counted, {"steps": 5})
        cells.measure(str(value), lambda: {"value": value})
        return {key: cell["value"] for key, cell in cells.cells.items()}

    assert start("first", 1) == {"1": 1}
    assert start("second", 2) == {"2": 2}
    assert start("first", 3) == {"1": 1, "3": 3}
    committed = (tmp_path / "counted.json").read_bytes()
    assert start("second", 4) == {"2": 2, "4": 4}
    assert (tmp_path / "counted.json").read_bytes() == committed
    assert [path.name for path in (tmp_path / "local").iterdir()] == ["counted.json"]
    monkeypatch.setenv(harness.PUBLISH, "1")
    assert start("second", 5) == {"5": 5}
    assert (tmp_path / "counted.json").read_bytes() != committed
