"""The clock of slices stands still while the process is stopped."""

from __future__ import annotations

import pytest

from rookery.worker.running_time import STOPPED_SECONDS, RunningTime


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("gap", "counts"), [(0.01, True), (STOPPED_SECONDS, True), (STOPPED_SECONDS + 0.01, False)])
def test_a_gap_in_which_no_thread_ran_is_no_time(gap: float, counts: bool) -> None:
    clock = Clock()
    running = RunningTime(clock)
    running.watch()
    running.watch()  # once is enough
    before = running()
    clock.now += gap
    assert running() - before == pytest.approx(gap if counts else 0.0)
    clock.now += 1.0
    assert running() - before == pytest.approx(1.0 + (gap if counts else 0.0)), "it goes on"


def test_a_long_slice_counts_where_nothing_else_reads_the_clock() -> None:
    clock = Clock()
    running = RunningTime(clock)
    before = running()
    clock.now += 10 * STOPPED_SECONDS
    assert running() - before == pytest.approx(10 * STOPPED_SECONDS)
    clock.now += 10 * STOPPED_SECONDS
    running.watch()
    before = running()
    clock.now += 1.0
    assert running() - before == pytest.approx(1.0)
