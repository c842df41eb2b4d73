"""Metrics survive crashes as whole rows; Prometheus, sinks and logs say what they are given."""

from __future__ import annotations

import math
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rookery.telemetry.metrics import MetricsLog


def test_rows_come_back_in_order_and_after_a_step(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "job")
    assert log.read() == []
    for step in range(4):
        log.append({"step": step, "reward": step / 2, "nested": {"nan": math.nan}})
    assert [row["step"] for row in log.read()] == [0, 1, 2, 3]
    assert [row["step"] for row in log.read(after=1)] == [2, 3]
    assert log.read()[0]["nested"] == {"nan": None}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(min_value=0, max_value=10_000), rows=st.integers(min_value=1, max_value=6))
def test_a_file_cut_anywhere_keeps_its_whole_rows_and_takes_new_ones(tmp_path: Path, cut: int, rows: int) -> None:
    log = MetricsLog(tmp_path / "job")
    log.path.unlink(missing_ok=True)
    for step in range(rows):
        log.append({"step": step, "text": "häßlich\n"})
    content = log.path.read_bytes()[: cut % (log.path.stat().st_size + 1)]
    log.path.write_bytes(content)
    whole = content.count(b"\n")
    assert [row["step"] for row in log.read()] == list(range(whole))
    log.append({"step": whole, "text": "after"})
    assert [row["step"] for row in log.read()] == list(range(whole + 1))


def test_rows_after_the_last_commit_are_dropped(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.truncate_after(3)
    for step in range(6):
        log.append({"step": step})
    log.truncate_after(3)
    assert [row["step"] for row in log.read()] == [0, 1, 2, 3]
    log.append({"step": 4})
    assert log.read(after=2) == [{"step": 3}, {"step": 4}]
    log.truncate_after(-1)
    assert log.read() == []
