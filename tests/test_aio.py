"""Waiting for an event beside cancellations that come in the same moment."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from contextvars import ContextVar
from functools import partial
from itertools import permutations

import pytest

from rookery.aio import PORTION_SECONDS, Portions, close_within, in_new_thread, in_portions, unless, wait_event

SECONDS = 0.05


async def test_it_returns_whether_the_event_came() -> None:
    event = asyncio.Event()
    assert not await wait_event(event, 0.0)
    asyncio.get_running_loop().call_soon(event.set)
    assert await wait_event(event, 60.0)
    assert await wait_event(event, 60.0), "it was set before"


@pytest.mark.parametrize("seconds", [SECONDS, 60.0])
@pytest.mark.parametrize("order", list(permutations(["event", "cancel"])), ids="-".join)
async def test_a_cancellation_that_meets_the_event_is_not_lost(order: tuple[str, ...], seconds: float) -> None:
    event = asyncio.Event()
    task = asyncio.create_task(wait_event(event, seconds))
    await asyncio.sleep(0)
    time.sleep(2 * SECONDS)  # noqa: ASYNC251  # the loop stands still: the shorter time ends in the same moment, too
    for what in order:
        _ = event.set() if what == "event" else task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("gap", [-1e-3, 1e-3])
async def test_a_cancellation_that_meets_the_end_of_the_time_is_not_lost(gap: float) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(wait_event(asyncio.Event(), SECONDS))
    await asyncio.sleep(0)
    loop.call_later(SECONDS + gap, task.cancel)
    time.sleep(2 * SECONDS)  # noqa: ASYNC251  # both are due when the loop comes round
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("ends", [False, True])
async def test_work_continues_unless_an_event_ends_it(ends: bool) -> None:
    end, ended = asyncio.Event(), []

    async def work() -> str:
        try:
            await asyncio.sleep(60.0 if ends else SECONDS)
            return "done"
        finally:
            ended.append(True)

    asyncio.get_running_loop().call_soon(end.set if ends else lambda: None)
    assert await unless(end.wait(), work()) == (None if ends else "done")
    assert ended == [True], "it has ended, also where it was cancelled"


async def test_other_tasks_run_between_portions() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    assert [(item, turns) async for item in in_portions("abcde", 2)] == [
        ("a", 0), ("b", 0), ("c", 1), ("d", 1), ("e", 2),
    ]  # fmt: skip
    portions, began = Portions(), time.monotonic()
    while time.monotonic() <= began + PORTION_SECONDS:
        pass
    before = turns
    await portions.pause()
    assert turns == before + 1
    task.cancel()


async def test_a_close_whose_thread_hangs_is_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    closed, hangs = list[int](), threading.Event()
    await close_within(lambda: closed.append(1), "reads")
    assert closed and not caplog.text
    await close_within(hangs.wait, "sinks", seconds=0.01)
    assert "sinks: a call has not ended" in caplog.text
    hangs.set()


async def test_a_close_that_fails_is_logged_and_ends_no_other(caplog: pytest.LogCaptureFixture) -> None:
    await close_within(partial(int, "seven"), "sinks", tenant="alice")
    (record,) = [one for one in caplog.records if one.name == "rookery.aio"]
    assert record.getMessage() == "sinks: not closed" and record.exc_info and record.__dict__["tenant"] == "alice"


HANGS = """
import asyncio, threading
from rookery import aio

aio.END_SECONDS = 0.1

async def work():
    asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
    {ends}

aio.run_to_end(work(), lambda error: (7, f"ended: {{error}}"))
"""


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("pass", 0, ""),
        ("raise ValueError('refused')", 7, "ended: refused\n"),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('no port')", 1, "no port\n"),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise asyncio.CancelledError", 1, ""),
    ],
)
def test_a_process_ends_although_one_of_its_threads_hangs(ends: str, code: int, said: str) -> None:
    command = [sys.executable, "-c", HANGS.format(ends=ends)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, said)


def test_a_process_ends_although_its_last_line_finds_no_room() -> None:
    command = [sys.executable, "-c", HANGS.format(ends="raise ValueError('refused')")]
    with open("/dev/full", "w", encoding="ascii") as full:
        assert subprocess.run(command, stderr=full, timeout=60, check=False).returncode == 7


async def test_a_call_in_a_new_thread_waits_for_no_other_thread() -> None:
    """All of asyncio's may hang, as on a disk that is away."""
    free, loop = threading.Event(), asyncio.get_running_loop()
    hung = [loop.run_in_executor(None, free.wait) for _ in range(200)]
    try:
        assert await in_new_thread(int, "7") == 7
        with pytest.raises(ValueError, match="invalid literal"):
            await in_new_thread(int, "seven")
        waiting = asyncio.create_task(in_new_thread(free.wait))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    finally:
        free.set()
    await asyncio.gather(*hung)


NAMED: ContextVar[str] = ContextVar("named", default="")


async def test_a_call_in_a_new_thread_has_the_context_of_its_caller() -> None:
    NAMED.set("caller")
    assert await in_new_thread(NAMED.get) == "caller"
