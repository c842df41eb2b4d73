"""The watch over a worker's progress: it notices work without a finished slice, tells why, and notices the end."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from rookery.bounds import LINE
from rookery.worker.compute_status import ComputeStatus
from rookery.worker.progress import STALL_SECONDS, ProgressWatch


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Waiting:
    """A compute thread that tells why its requests wait."""

    story = "two requests\nwait"

    def __init__(self) -> None:
        self.status = ComputeStatus()

    def show(self, **changes: int) -> None:
        self.status = replace(self.status, beat=msgspec.structs.replace(self.status.beat, **changes))

    async def describe(self, seconds: float) -> str:
        return self.story


async def test_work_without_a_finished_slice_is_an_alarm_until_there_is_one(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "rookery.worker")
    waiting, clock = Waiting(), Clock()
    watch: Any = ProgressWatch(waiting, clock)  # type: ignore[arg-type]
    for at, changes, stalls in (
        (3 * STALL_SECONDS, {}, 0),  # without work there is nothing to finish
        (0.0, {"active": 2}, 0),
        (STALL_SECONDS / 2, {}, 0),
        (STALL_SECONDS / 2, {}, 1),
        (STALL_SECONDS, {}, 1),  # one alarm while it lasts
        (1.0, {"progress": 1}, 1),
        (STALL_SECONDS, {}, 2),
        (1.0, {"active": 0}, 2),  # its client has left
    ):
        clock.now += at
        waiting.show(**changes)
        await watch.look()
        assert watch.stalls == stalls, at
        assert bool(watch.stalled) == (stalls > 0 and not changes), at
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0].partition(" for ")[0].partition(",")[0] for line in lines] == [
        "no progress", "the worker makes progress again", "no progress", "the worker makes progress again",
    ]  # fmt: skip
    assert "two requests wait" in lines[0]
    waiting.story = "x" * (LINE + 9)
    waiting.show(active=1)
    clock.now += 2 * STALL_SECONDS
    await watch.look()
    assert len(watch.stalled) == LINE
