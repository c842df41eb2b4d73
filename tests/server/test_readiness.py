"""Readiness asks the database rarely, one question at a time, and never waits for long."""

from __future__ import annotations

import asyncio

from tests.support.peers import ManualClock, settle

from rookery.errors import DatabaseAway
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
