"""Readiness asks the database rarely, one question at a time, and never waits for long."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.support.peers import ManualClock, settle

from rookery.aio import cancel_all
from rookery.errors import DatabaseAway
from rookery.server import launcher
from rookery.server.readiness import KEPT_SECONDS, Readiness


async def test_an_answer_is_cached_for_a_second_for_all_callers() -> None:
    clock, asked, away = ManualClock(), 0, False

    async def ask() -> None:
        nonlocal asked
        asked += 1
        await settle(1)
        if away:
            raise DatabaseAway("the database does not answer", "host:5432 refused")

    readiness = Readiness(ask, clock)
    assert await asyncio.gather(*(readiness.problem() for _ in range(100))) == [""] * 100
    assert asked == 1
    away = True
    assert await readiness.problem() == ""
    clock.now += KEPT_SECONDS
    assert await readiness.problem() == "the database does not answer" and asked == 2
    away = False
    clock.now += KEPT_SECONDS
    assert await readiness.problem() == ""


async def test_a_database_that_is_silent_is_asked_once() -> None:
    clock, asked, answer = ManualClock(), 0, asyncio.Event()

    async def ask() -> None:
        nonlocal asked
        asked += 1
        await answer.wait()

    readiness = Readiness(ask, clock, patience_seconds=0.01)
    for _ in range(5):
        assert "in time" in await readiness.problem()
        clock.now += KEPT_SECONDS
    assert asked == 1, "no thread waits behind another"
    answer.set()
    assert await readiness.problem() == ""


@pytest.mark.parametrize("renews", ["claim", "hold"])
async def test_a_service_keeps_its_places_while_all_threads_of_others_hang(renews: str) -> None:
    """As on a disk that is away, or in sinks that are closed: its claim on the database ends after half a minute, and
    another service takes over."""
    free, renewed, loop = threading.Event(), asyncio.Event(), asyncio.get_running_loop()
    hung = [loop.run_in_executor(None, free.wait) for _ in range(200)]

    def renew(*_: object) -> bool:
        loop.call_soon_threadsafe(renewed.set)
        return True

    if renews == "claim":
        service = cast(Any, SimpleNamespace(_rules=SimpleNamespace(claim_seconds=0.0)))
        work = launcher.Service.renew_claim(service, cast(Any, SimpleNamespace(claim=renew)))
    else:
        work = launcher.renew_hold(cast(Any, SimpleNamespace(hold=renew)), cast(Any, None), 0.0)
    task = asyncio.create_task(work)
    try:
        for _ in range(3):
            await asyncio.wait_for(renewed.wait(), 60)
            renewed.clear()
    finally:
        free.set()
        await cancel_all(task, *hung)
