"""The timeline of the workers, and its route."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from tests.support.peers import ManualClock, eventually
from tests.support.room import Room

from rookery import protocol
from rookery.controller.fleet.events import AdapterLoaded, WorkerEvent, WorkerReady, WorkerSuspect
from rookery.controller.timeline import EVENTS_KEPT, MOST_TEXT, WorkerTimeline


def subclasses(kind: type[WorkerEvent]) -> list[type[WorkerEvent]]:
    return [found for one in kind.__subclasses__() for found in (one, *subclasses(one))]


async def one_worker(room: Room) -> WorkerReady:
    await room.worker("one").join()
    return next(event for event in room.events if isinstance(event, WorkerReady))


async def test_a_frequent_kind_does_not_push_out_a_rare_one(room: Room) -> None:
    ready = await one_worker(room)
    timeline = WorkerTimeline(ManualClock())
    timeline.add(WorkerSuspect(ready.time, ready.worker, "its connection closed"))
    for _ in range(EVENTS_KEPT + 5):
        timeline.add(ready)
    rows = timeline.after(0, 10 * EVENTS_KEPT)
    assert [row.event for row in rows] == ["suspect"] + ["ready"] * EVENTS_KEPT
    assert all(before.number < after.number for before, after in pairwise(rows))


async def test_pages_of_the_timeline_give_every_event_once(room: Room) -> None:
    ready = await one_worker(room)
    timeline, read, last = WorkerTimeline(ManualClock()), [], 0
    for number in range(20):
        timeline.add(ready if number % 3 else WorkerSuspect(ready.time, ready.worker, str(number)))
    while page := timeline.after(last, 7):
        read += page
        last = page[-1].number
    assert read == timeline.after(0, 100) and len(read) == 20


async def test_newest_events_of_all_kinds_are_given_oldest_first(room: Room) -> None:
    ready = await one_worker(room)
    timeline = WorkerTimeline(ManualClock())
    for number in range(20):
        timeline.add(ready if number % 3 else WorkerSuspect(ready.time, ready.worker, str(number)))
    every = timeline.after(0, 100)
    assert [timeline.newest(count) for count in (1, 7, 20, 100)] == [every[-1:], every[-7:], every, every]
    for kinds in ({one.event for one in every[:1]}, {one.event for one in every}, {"none"}):
        assert (
            timeline.newest(100, kinds) == timeline.after(0, 100, kinds) == [one for one in every if one.event in kinds]
        )
    assert WorkerTimeline(ManualClock()).newest(5) == []


async def test_numbers_of_a_later_process_are_larger(room: Room) -> None:
    ready, clock = await one_worker(room), ManualClock()
    first = WorkerTimeline(clock)
    first.add(ready)
    clock.now += 10
    second = WorkerTimeline(clock)
    second.add(ready)
    assert second.after(first.after(0, 1)[0].number, 10) == second.after(0, 10)


async def test_a_number_of_a_process_whose_clock_was_ahead_hides_no_event(room: Room) -> None:
    """As where a standby on another machine takes over."""
    ready, clock = await one_worker(room), ManualClock()
    clock.now += 7200
    first = WorkerTimeline(clock)
    first.add(ready)
    clock.now -= 7200
    second = WorkerTimeline(clock)
    second.add(ready)
    assert second.after(first.after(0, 1)[0].number, 10) == second.after(0, 10) != []


async def test_a_line_of_a_worker_is_cut(room: Room) -> None:
    ready = await one_worker(room)
    timeline = WorkerTimeline(ManualClock())
    timeline.add(WorkerSuspect(ready.time, ready.worker, "x" * 100_000))
    assert timeline.after(0, 1)[0].text == "x" * MOST_TEXT


async def test_an_event_of_a_policy_names_its_tenant_and_job(room: Room) -> None:
    ready = await one_worker(room)
    timeline = WorkerTimeline(ManualClock())
    timeline.add(AdapterLoaded(ready.time, ready.worker, room.ref(3), 1.25), "alice", "job-1")
    (row,) = timeline.after(0, 1)
    assert (row.tenant, row.job, row.policy, row.worker) == ("alice", "job-1", "p", "one")
    assert row.text == "version 3 after 1.2 s"


async def test_every_kind_of_event_has_a_name_and_plain_values(room: Room) -> None:
    ready = await one_worker(room)
    step = protocol.OptimStep(op="o", policy="p", lease=1, parent=room.ref(1), steps=0, adam=None)
    fields = {
        "request": None, "tokens": 3, "operation": step, "beat": None, "message": None, "reason": "r", "moved": "p",
        "versions": 2, "ref": room.ref(2), "seconds": 1.0, "hash": "h", "error": "e", "last": True, "parts": (),
        "done": protocol.OperationDone(epoch=0, op="o"),
    }  # fmt: skip
    kinds = [kind for kind in subclasses(WorkerEvent) if not kind.__subclasses__()]
    assert len({kind.kind for kind in kinds} - {""}) == len(kinds) > 10
    timeline = WorkerTimeline(ManualClock())
    for kind in kinds:
        own = {field.name: fields[field.name] for field in msgspec.structs.fields(kind) if field.name in fields}
        timeline.add(kind(time=1.0, worker=ready.worker, **own))
    values = [row.model_dump() for row in timeline.after(0, len(kinds))]
    assert [row["event"] for row in values] == [kind.kind for kind in kinds]
    assert {type(value) for row in values for value in row.values()} == {str, float, int}


async def test_a_worker_leaves_the_story_of_its_life(room: Room) -> None:
    room.used = [room.ref(1)]
    worker = room.worker("one")
    await worker.join()
    await eventually(lambda: room.states() == {"one": "serving"})
    await worker.say(protocol.Draining(epoch=0))
    await eventually(lambda: room.states() == {"one": "draining"})
    await worker.die()
    await eventually(lambda: room.states() == {"one": "gone"})
    shown = [event.kind for event in room.events if event.shown]
    assert shown == ["joined", "loaded", "catching up", "adapter loaded", "ready", "draining", "gone"]
