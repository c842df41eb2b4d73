"""The sessions of agents in one process, with an agent that the test plays."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any, Literal

import pytest
from tests.support.peers import ManualClock, settle

from rookery.aio import cancel_all
from rookery.controller.fleet.agents import KEYS_KEPT, Agents, AgentSession, EpisodeEnded
from rookery.errors import Unauthorized
from rookery.storage.data_dir import hash_key


async def saved(keys: str) -> None:
    del keys


async def nothing_stored(episode: str) -> None:
    del episode


class Sampler:
    """In place of the calls of an episode."""


def session_of(clock: ManualClock, split: Literal["train", "eval"] = "train", **more: Any) -> AgentSession:
    return AgentSession("job-e0", "job", "tenant", split, b"{}", 1, ["main"], Sampler(), saved, clock, **more)


async def test_nothing_but_the_keys_of_an_evaluation_is_kept_after_its_end() -> None:
    clock = ManualClock()
    agents = Agents(clock, lambda count: bytes(count), nothing_stored)
    session = session_of(clock, "eval")
    with agents.present(session):
        key = hash_key(await agents.give(session))
        assert await agents.find("job-e0", key, nothing_stored) == ("tenant", session)
    sampler = weakref.ref(session.sampler)
    del session
    gc.collect()
    assert sampler() is None
    tenant, error = await agents.find("job-e0", key, nothing_stored)
    assert tenant == "tenant" and isinstance(error, EpisodeEnded)
    with pytest.raises(Unauthorized, match="does not open the episode"):
        await agents.find("job-e0", hash_key("another"), nothing_stored)


async def test_the_first_key_of_an_agent_stays_valid_however_often_it_is_given_another() -> None:
    """A host answers the repeated reset from memory: its agent keeps the first key."""
    numbers = iter(range(100))
    clock = ManualClock()
    agents = Agents(clock, lambda count: next(numbers).to_bytes(count), nothing_stored)
    keys, given = list[str](), list[str]()
    for _ in range(10):
        session = session_of(clock, hosted=True, keys=keys)
        with agents.present(session):
            given.append(hash_key(await agents.give(session)))
            keys = session.keys
            for key in (given[0], given[-1]):
                assert await agents.find("job-e0", key, nothing_stored) == ("tenant", session)
    assert keys == [given[0], *given[-KEYS_KEPT + 1 :]]


async def test_an_episode_whose_process_goes_before_it_has_the_key_waits_for_another() -> None:
    clock, storing, stored = ManualClock(), asyncio.Event(), asyncio.Event()

    async def slow(keys: str) -> None:
        storing.set()
        await stored.wait()

    agents = Agents(clock, lambda count: bytes(count), nothing_stored)
    session = session_of(clock)
    session.save = slow
    with agents.present(session):
        gone = asyncio.create_task(agents.open("job", 30.0))
        await storing.wait()
        assert session.state == "running" and not agents.waiting("job")
        await cancel_all(gone)
        assert session.state == "waiting" and agents.waiting("job") == 1
        stored.set()
        opened = await agents.open("job", 0.0)
        assert opened is not None and session.keys == [hash_key(opened[1])]


async def test_an_episode_wakes_only_processes_that_wait_for_its_job() -> None:
    class Counting(ManualClock):
        read = 0

        def monotonic(self) -> float:
            self.read += 1
            return super().monotonic()

    clock = Counting()
    agents = Agents(clock, lambda count: bytes(count), nothing_stored)
    others = [asyncio.create_task(agents.open(f"job-{number}", 30.0)) for number in range(50)]
    asked = asyncio.create_task(agents.open("job", 30.0))
    await settle(1)
    session = session_of(clock)
    before = clock.read
    with agents.present(session):
        opened = await asked
        assert opened is not None and opened[0] is session
        assert clock.read - before < 10 and not any(task.done() for task in others)
    await cancel_all(*others)
    with agents.present(session_of(clock)):
        assert await agents.open("job", 0.0) is not None
