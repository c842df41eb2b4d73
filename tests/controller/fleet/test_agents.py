"""The sessions of agents in one process, with an agent that the test plays."""

from __future__ import annotations

import asyncio
import gc
import weakref
from itertools import product
from typing import Any, Literal, get_args

import pytest
from tests.support.peers import ManualClock, settle

from rookery.aio import cancel_all
from rookery.controller.fleet.agents import (
    KEYS_KEPT,
    OVER,
    TRANSITIONS,
    Agents,
    AgentSession,
    EpisodeAway,
    EpisodeEnded,
    Event,
    State,
)
from rookery.errors import Conflict, Unauthorized
from rookery.storage.data_dir import hash_key


async def saved(keys: str) -> None:
    del keys


async def nothing_stored(episode: str) -> None:
    del episode


class Sampler:
    """In place of the calls of an episode."""


def session_of(clock: ManualClock, split: Literal["train", "eval"] = "train", **more: Any) -> AgentSession:
    return AgentSession("job-e0", "job", "tenant", split, b"{}", 1, ["main"], Sampler(), saved, clock, **more)


WAYS: dict[State, tuple[Event, ...]] = {
    "waiting": (), "running": ("opened",), "ended": ("opened", "finished"),
    "stored": ("opened", "finished", "stored"), "left": ("opened", "finished", "left"),
}  # fmt: skip
"""The events that lead to each state."""


@pytest.mark.parametrize(("state", "event"), list(product(get_args(State), get_args(Event))))
async def test_each_event_of_each_state_is_in_the_table_or_refused(state: State, event: Event) -> None:
    session = session_of(ManualClock())
    for before in WAYS[state]:
        session.advance(before)
    assert session.state == state
    if (following := TRANSITIONS.get((state, event))) is None:
        with pytest.raises(EpisodeEnded if state in OVER else Conflict):
            session.advance(event)
        following = state
    else:
        session.advance(event)
    assert session.state == following


@pytest.mark.parametrize("stored", [True, False])
async def test_the_end_of_an_agent_waits_until_it_is_stored_or_its_job_has_left_it(stored: bool) -> None:
    clock = ManualClock()
    agents = Agents(clock, lambda count: bytes(count), nothing_stored)
    session = session_of(clock)
    with agents.present(session):
        await agents.give(session)
        session.end("no answer")
        settled = asyncio.create_task(session.settled())
        await settle(1)
    await settle(1)
    assert not settled.done()
    if stored:
        session.store("its agent failed: no answer")
    session.advance("left")
    assert await settled is stored and session.failure == ("its agent failed: no answer" if stored else "")
    with pytest.raises(EpisodeEnded, match=r"has ended \(failed\)"):
        session.advance("called")


async def test_a_call_of_an_episode_whose_job_pauses_is_to_come_again() -> None:
    clock = ManualClock()
    session = session_of(clock)
    with Agents(clock, lambda count: bytes(count), nothing_stored).present(session):
        pass
    session.advance("left")
    with pytest.raises(EpisodeAway, match="does not run now"):
        session.advance("called")


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
