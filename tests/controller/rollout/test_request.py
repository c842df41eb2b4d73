"""The life cycle of a request: every event in every state, with the actions of the shipped scheduler."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.peers import MODEL, ScriptedWorker, settle
from tests.support.room import Room

from rookery import protocol
from rookery.controller.rollout.request import (
    AT_WORKER,
    TRANSITIONS,
    Event,
    InflightRequest,
    InvalidEvent,
    SamplingRequest,
    SamplingResult,
    State,
)
from rookery.controller.rollout.scheduler import Details, RolloutScheduler

STATES: tuple[State, ...] = get_args(State)
EVENTS: tuple[Event, ...] = get_args(Event)
LIMIT = 512


def paths() -> dict[State, list[Event]]:
    """The shortest sequence of events that leads to each state."""
    found: dict[State, list[Event]] = {"new": []}
    unvisited: list[State] = ["new"]
    while unvisited:
        state = unvisited.pop(0)
        for (begin, event), transition in TRANSITIONS.items():
            if begin == state and transition.state not in found:
                found[transition.state] = [*found[state], event]
                unvisited.append(transition.state)
    return found


def test_every_state_is_reached_and_can_end() -> None:
    assert set(paths()) == set(STATES)
    ends: set[State] = {"ended"}
    for _ in STATES:
        ends |= {begin for (begin, _), transition in TRANSITIONS.items() if transition.state in ends}
    assert ends == set(STATES)
    assert {event for _, event in TRANSITIONS} == set(EVENTS)


@pytest.mark.parametrize(("begin", "event"), TRANSITIONS, ids=lambda value: str(value))
def test_actions_fit_the_states_that_they_connect(begin: State, event: Event) -> None:
    """A request at a worker has an assignment, one that waits is in its queue, and nothing is done twice."""
    state, actions = TRANSITIONS[begin, event]
    assert len(set(actions)) == len(actions)
    held, queued = begin in AT_WORKER, begin == "waiting" and event != "assign"  # the queue has yielded that one
    for action in actions:
        match action:
            case "give":
                assert not held
                held = True
            case "drop":
                assert held
                held = False
            case "abort" | "recall" | "retarget" | "expect" | "begin":
                assert held
            case "enqueue" | "requeue":
                assert not held and not queued
                queued = True
            case "dequeue":
                assert queued
                queued = False
            case "settle" | "forget":
                assert not held and not queued
    assert held == (state in AT_WORKER)
    assert queued == (state == "waiting")
    assert actions or state == begin or event == "tokens", "a change of state has an action"


def snapshot(inflight: InflightRequest) -> tuple[State, str, list[tuple[Event, str, State]]]:
    """Its state, the name of its assignment, and its story."""
    return inflight.state, inflight.assignment.name if inflight.at_worker else "", list(inflight.story)


def is_known(rollouts: RolloutScheduler) -> bool:
    return rollouts.requests.has(job="job")


class Machine:
    """One request in the shipped scheduler, with two workers that sample nothing by themselves."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.rollouts = RolloutScheduler(room.fleet, room.weights, room.settings, room.clock)
        generate = protocol.Generate(
            request="job-1", adapter=room.ref(1), prompt=[1, 2], shared_prefix=2, max_tokens=LIMIT, temperature=1.0,
            seed=1, stop_tokens=[2], episode="e", in_flight="switch",
        )  # fmt: skip
        done: asyncio.Future[SamplingResult] = asyncio.get_running_loop().create_future()
        self.inflight = InflightRequest(SamplingRequest("a", "job", MODEL, generate), SamplingResult(), done)
        self.rollouts.requests["job", "job-1"] = self.inflight

    async def workers(self) -> list[ScriptedWorker]:
        workers = []
        for name in ("one", "two"):
            workers.append(await self.room.worker(name).join())
            workers[-1].generating.clear()
            self.rollouts.on_worker_changed(self.room[name])
        return workers

    def apply(self, event: Event) -> None:
        """The event with its data, as the scheduler gives them."""
        inflight, rollouts = self.inflight, self.rollouts
        if event == "assign" and inflight.state == "waiting":
            rollouts.queues.remove(inflight)
        if event == "tokens" and inflight.at_worker:
            count, assignment = len(inflight.result.tokens), inflight.assignment
            assignment.tokens += inflight.result.receive(self.chunk(count, assignment.name))
        elsewhere = not inflight.at_worker or inflight.assignment.worker.name == "two"
        rollouts.apply(inflight, event, Details(self.room["one" if elsewhere else "two"]))

    @staticmethod
    def chunk(offset: int, assignment: str) -> protocol.TokenChunk:
        fields = {"tokens": [offset + 5], "logprobs": [-1.0], "version": 1, "policy": "p"}
        return protocol.TokenChunk(request="job-1", assignment=assignment, offset=offset, **fields)

    def check(self) -> None:
        """The indexes agree with the state."""
        inflight, rollouts = self.inflight, self.rollouts
        state = inflight.state
        assert inflight.at_worker == (state in AT_WORKER)
        for name in ("one", "two"):
            slots = rollouts.pool.slots(self.room[name])
            here = inflight.at_worker and inflight.assignment.worker is self.room[name]
            assert list(slots.requests.values()) == [inflight] * here
            assert slots.decoding == (here and state != "assigned")
            assert slots.leaving == (here and state == "returning")
            assert slots.arriving == (not here and state == "returning")
        assert list(rollouts.queues.models[MODEL]) == [inflight] * (state == "waiting")
        assert is_known(rollouts) or state == "ended"
        count = len(inflight.result.tokens)
        assert inflight.result.tokens == [number + 5 for number in range(count)], "no token is lost or taken twice"


@settings(max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(EVENTS), max_size=30))
@pytest.mark.parametrize("begin", STATES)
def test_each_event_is_in_the_table_or_raises_the_requests_story(
    tmp_path: Path, begin: State, events: list[Event]
) -> None:
    """From each state, every event, and then any sequence of events: indexes, room and text agree with the state; an
    event outside the table changes nothing; no assignment has the name of an earlier one."""

    async def run() -> None:
        room = Room(tmp_path)
        machine = Machine(room)
        workers = await machine.workers()
        for event in paths()[begin]:
            machine.apply(event)
            machine.check()
        assert machine.inflight.state == begin
        for event in events:
            inflight = machine.inflight
            before = snapshot(inflight)
            wanted = TRANSITIONS.get((inflight.state, event))
            if event in ("leave", "retain") and not is_known(machine.rollouts):
                break  # a caller leaves once
            if wanted is not None:
                machine.apply(event)
                assert inflight.state == wanted.state
            else:
                with pytest.raises(InvalidEvent) as raised:
                    machine.apply(event)
                text = str(raised.value)
                assert f"request job-1 is {before[0]}" in text and repr(event) in text
                assert all(f"{told}" in text and f"-> {state}" in text for told, _, state in before[2])
                assert snapshot(inflight) == before
            machine.check()
        await settle()
        names = [generate.assignment for worker in workers for generate in worker.generates]
        assert len(set(names)) == len(names)
        await room.close()

    asyncio.run(run())


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("event", EVENTS)
async def test_every_pair_of_state_and_event(room: Room, state: State, event: Event) -> None:
    machine = Machine(room)
    await machine.workers()
    for step in paths()[state]:
        machine.apply(step)
    if (state, event) in TRANSITIONS:
        machine.apply(event)
        assert machine.inflight.state == TRANSITIONS[state, event].state
    else:
        with pytest.raises(InvalidEvent, match=f"request job-1 is {state}, which has no event '{event}'"):
            machine.apply(event)
        assert machine.inflight.state == state
    machine.check()


async def test_tokens_of_an_earlier_assignment_change_nothing(room: Room) -> None:
    """Also where the request is back at the same worker, which sent them before it received the abort."""
    machine = Machine(room)
    await machine.workers()
    machine.apply("submit")
    machine.apply("claim")
    first = machine.inflight.assignment
    machine.rollouts.on_output(first.worker, protocol.Output(epoch=0, chunks=[machine.chunk(0, first.name)]))
    machine.apply("move")
    machine.apply("move")
    again = machine.inflight.assignment
    assert again.worker is first.worker and again.name != first.name
    for late in (machine.chunk(0, first.name), machine.chunk(1, first.name)):
        late.finish = "stop"
        machine.rollouts.on_output(first.worker, protocol.Output(epoch=0, chunks=[late]))
    assert (machine.inflight.state, machine.rollouts.sampled_tokens, machine.rollouts.late_chunks) == ("assigned", 1, 2)
    machine.rollouts.on_output(first.worker, protocol.Output(epoch=0, chunks=[machine.chunk(1, again.name)]))
    assert (machine.inflight.state, machine.rollouts.sampled_tokens) == ("decoding", 2)
    machine.check()


async def test_story_is_bounded_and_reports_the_last_events(room: Room) -> None:
    machine = Machine(room)
    await machine.workers()
    machine.apply("submit")
    machine.apply("claim")
    for _ in range(30):
        machine.apply("move")
        for _ in range(3):
            machine.apply("tokens")
    with pytest.raises(InvalidEvent) as raised:
        machine.apply("submit")
    told = str(raised.value).partition("before: ")[2].split("; ")
    assert len(told) <= 20 and told[-2:] == ["move (two) -> assigned", "tokens (one) -> decoding"]
