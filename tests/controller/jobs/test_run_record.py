"""The record of a run, by which the next one finds the job that ended it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.peers import ManualClock

from rookery.controller.jobs.run_record import RunRecord


@pytest.mark.parametrize("jump", [86400.0, -86400.0])
async def test_a_wall_clock_that_is_set_changes_no_evidence(tmp_path: Path, jump: float) -> None:
    """Three short lives in a row, in each of which the clock is set while a job starts."""
    path, clock = tmp_path / "running.json", ManualClock()
    for life in range(3):
        record = RunRecord(path, clock)
        last, _ = await record.begin()
        assert (last.short_lives if last is not None else 0) == life
        clock.now += 2.0
        await record.starts("job")
        clock.ahead += jump
        clock.now += 3.0
        await record.assembled("job")
    last, _ = await RunRecord(path, clock).begin()
    assert last is not None and last.short_lives == 3
    assert last.now - last.began == 5.0 and last.now - last.jobs["job"].since == 3.0
