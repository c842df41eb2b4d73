"""Agentic jobs of many tenants: what is made of the measured cells."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmarks.jobs import agentic
from benchmarks.jobs.agentic import Barrier
from benchmarks.jobs.agentic_figures import LATENCIES, TENANTS, figures, points, saturation
from benchmarks.lib.harness import ResultFolders
from tests.support.measured import agentic_cells
from tests.support.peers import settle

pytestmark = pytest.mark.heavy


def test_points_and_verdicts() -> None:
    cells = agentic_cells()
    found = {(point["latency"], point["tenants"]): point for point in points(cells)}
    assert len(found) == len(LATENCIES) * len(TENANTS)
    many = found[2.0, 32]
    assert many["busy"] == pytest.approx(0.9)
    assert many["efficiency"] == pytest.approx(3 * 32 / (4 * 32 / 0.9)), "decoding alone, of the makespan"
    assert many["busy_gain"] == pytest.approx(0.9 / (4 / 34))
    assert many["rate"] == pytest.approx(32 * 8 * 60 * 5 / (128 / 0.9))
    assert many["saved"] == pytest.approx(1 - 4 / 0.9 / 34) and many["runs"] == 3
    assert found[0.0, 32]["saved"] < 0  # a full worker gains nothing
    predicted, measured = saturation(cells, points(cells), 2.0) or (0, 0)
    assert predicted == pytest.approx(14 / 4) and measured == pytest.approx(0.9 * 14 / 4)
    assert many["saved_async"] == pytest.approx(1 - 4 / 0.9 / 14)


def test_the_bound_does_not_depend_on_the_concurrent_run() -> None:
    """A crowd that computes twice as much for the same jobs is further from it."""
    cells = agentic_cells()
    before = {(p["latency"], p["tenants"]): p for p in points(cells)}
    for key, cell in cells.items():
        if key.startswith("crowd/"):
            cell |= {"decode": 2 * cell["decode"], "train": 2 * cell["train"], "makespan": 2 * cell["makespan"]}
    for point in points(cells):
        earlier = before[point["latency"], point["tenants"]]
        assert point["bound"] == earlier["bound"]
        assert point["efficiency"] == pytest.approx(earlier["efficiency"] / 2)


def test_all_targets_are_met_where_the_stages_of_tenants_overlap() -> None:
    """32 tenants that take 110 s where 128 s are computed: decoding beside training."""
    verdicts = [one for one in figures(agentic_cells(idle=-0.16)).verdicts if "with lanes" not in one.target]
    assert [verdict.met for verdict in verdicts] == [True] * (4 * len(LATENCIES) + 1), verdicts


def test_lanes_are_compared_with_turns_of_the_same_run() -> None:
    seconds = {"auto/8/0": 90.0, "turns/8/0": 100.0, "auto/32/0": 88.0, "turns/32/0": 100.0, "auto/32/1": 85.0}
    for number, alone in enumerate((9.9, 10.1, 10.5)):
        seconds |= {f"auto/1/{number}": alone, f"turns/1/{number}": 10.0}
    cells = {f"lanes/{key}": {"latency": 0.0, "makespan": value, "jobs": []} for key, value in seconds.items()}
    cells["lanes/auto/1/0"]["beside"] = 0.0
    found = [one for one in figures(cells).verdicts if "with lanes" in one.target]
    assert found[0].why == "3 runs of each; lanes ran 0.0 of 10.1 s"
    assert [(one.measured, one.met) for one in found] == [("1.01", True), ("0.90", False), ("0.88", True)]


def test_a_figure_names_its_seeds_and_missing_counts() -> None:
    cells = agentic_cells(seeds=(0,))
    del cells["crowd/2/16/0"]
    [whole, less] = [
        one.why
        for one in figures(cells).verdicts
        if "same staleness" in one.target and ("8 s" in one.target or " 2 s" in one.target)
    ]
    assert (whole, less) == ("1 seed; no run of 16 tenants", "1 seed")


def test_a_target_that_is_missed_is_not_met() -> None:
    slow = figures(agentic_cells(idle=0.6)).verdicts
    assert [verdict.met for verdict in slow if "overlap" in verdict.target] == [False] * len(LATENCIES)


def test_missing_measurements_are_not_reported() -> None:
    cells = agentic_cells()
    assert not any(verdict.met is not None for verdict in figures({}).verdicts)
    for count in range(0, len(cells), 7):
        json.dumps(figures(dict(list(cells.items())[:count])).data, allow_nan=False)
    assert points({key: cell for key, cell in cells.items() if key.startswith("crowd")}) == []


def test_interrupted_run_continues_with_the_missing_cells(tmp_path: Path) -> None:
    made, measured, ends = agentic_cells(), list[str](), [3, 20]

    def take(key: str) -> dict[str, Any]:
        if ends and len(measured) == ends[0]:
            del ends[0]
            raise KeyboardInterrupt
        measured.append(key)
        return made[key]

    measures = {kind: lambda *key, kind=kind: take("/".join([kind, *map(named, key)])) for kind in agentic.MEASURES}
    measure = partial(agentic.main, [], measures, ResultFolders(tmp_path))
    while ends:
        with pytest.raises(KeyboardInterrupt):
            measure()
    measure()
    assert len(set(measured)) == len(measured) == len([key for key in made if key.endswith("/0")])
    stored = json.loads((tmp_path / "agentic.json").read_text())["data"]["cells"]
    added = {"took", "date", "commit"}
    found = {key: {name: cell[name] for name in cell.keys() - added} for key, cell in stored.items()}
    assert found == {key: made[key] for key in measured}
    assert all(cell.keys() >= added for cell in stored.values())


def named(part: object) -> str:
    return f"{part:g}" if isinstance(part, float) else str(part)


async def test_barrier_holds_until_all_have_arrived() -> None:
    barrier = Barrier(3)
    early = [asyncio.create_task(barrier.wait()) for _ in range(2)]
    await settle()
    assert not any(task.done() for task in early)
    async with asyncio.timeout(60):
        await barrier.wait()
        await asyncio.gather(*early)
