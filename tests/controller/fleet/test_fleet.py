"""Workers dialling in, staying healthy, getting stuck, going and coming back."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any, get_args

import pytest
from tests.support.peers import MODEL, ManualClock, connection_pair, eventually, settle
from tests.support.room import Room, beat
from tests.support.virtual import machine

from rookery import protocol
from rookery.controller.fleet.events import WorkerFailed
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.fleet.worker import TRANSITIONS, State
from rookery.controller.weights.tickets import ReadKeys
from rookery.protocol.connection import ConnectionClosed, RegistrationRefused, introduce
from rookery.simulation.fakes.worker import worker_hello
from rookery.worker.transfer.published import Reads


async def test_worker_joins_and_is_lost(room: Room) -> None:
    worker = await room.worker().join()
    assert room.states() == {"worker": "serving"}
    assert [w.name for w in room.fleet.serving("train", MODEL)] == ["worker"]
    assert room.fleet.serving("train", "another") == []
    await worker.die()
    assert room.states() == {"worker": "suspect"}
    assert room.lost == [("worker", "its connection closed")]
    assert room.fleet.missing("train", MODEL) == f"no worker serves {MODEL} for train (worker is suspect)"
    await room.clock.advance(65)
    assert room.states() == {"worker": "gone"}
    await room.clock.advance(65)
    assert room.states() == {}, "and forgotten"


async def test_reconnected_worker_gets_a_new_epoch(room: Room) -> None:
    worker = await room.worker().join()
    first = worker.epoch
    await worker.die()
    await worker.join()
    assert worker.epoch > first
    assert room.states() == {"worker": "serving"}
    await worker.say(beat(), epoch=first)
    await settle()
    assert room.fleet.ignored_frames == 1
    later = Fleet(room.settings, ManualClock(), room.on_event)
    assert later.epoch >= int(room.clock.time() * 1000), "a later process gives later epochs"


async def test_second_connection_of_a_process_ends_the_first(room: Room) -> None:
    first = await room.worker(instance="one").join()
    second = await room.worker(instance="one").join()
    assert room.lost == [("worker", "it reconnected")]
    await first.say(protocol.Output(epoch=0, chunks=[]))
    await second.say(protocol.Output(epoch=0, chunks=[]))
    await eventually(lambda: bool(room.outputs))
    assert [worker.epoch for worker in room.outputs] == [second.epoch]
    await first.die()
    assert room.states() == {"worker": "serving"}, "the end of the first one is no news"


async def test_a_worker_for_lower_ranks_than_the_jobs_is_refused(room: Room) -> None:
    with pytest.raises(
        RegistrationRefused, match="at most rank 32, jobs here up to 64: start it with ROOKERY_MAX_RANK=64"
    ):
        await room.worker(max_rank=32).join()
    assert room.states() == {"worker": "gone"}
    assert room.fleet.all()[0].note.startswith("refused: its adapters have at most rank 32")


@pytest.mark.parametrize(
    "spelt", ["smollm2-135m-instruct", "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"]
)
async def test_a_worker_serves_its_base_model_under_the_name_that_jobs_have(room: Room, spelt: str) -> None:
    await room.worker(model=spelt).join()
    assert [worker.name for worker in room.fleet.serving("train", MODEL)] == ["worker"]
    assert room.fleet.missing("train", MODEL).endswith("(worker is serving)")


@pytest.mark.parametrize("state", get_args(State))
async def test_a_worker_is_admitted_once_and_may_be_lost_in_every_state(room: Room, state: State) -> None:
    await room.worker().join()
    worker = room.fleet.get("worker")
    assert worker is not None
    worker.state = state
    if state in ("joining", "catching up"):
        room.fleet.admit(worker)
        assert worker.state == "serving"
    else:
        with pytest.raises(RuntimeError, match=f"worker worker is {state}, which has no event 'ready'"):
            room.fleet.admit(worker)
    before = worker.state
    room.fleet.suspect(worker, "it is lost")
    assert worker.state == TRANSITIONS[before, "lost"]
    assert len(room.lost) == (before not in ("suspect", "gone", "draining"))


async def test_two_processes_with_one_name_both_work(room: Room) -> None:
    one = await room.worker(instance="aaaaaaaa").join()
    two = await room.worker(instance="bbbbbbbb").join()
    assert (one.name, two.name) == ("worker", "worker-bbbbbb")
    assert set(room.states().values()) == {"serving"}
    await two.die()
    await two.join()
    assert two.name == "worker-bbbbbb"


async def test_worker_without_heartbeats_is_suspect(room: Room) -> None:
    quiet, lively = await room.worker("quiet").join(), await room.worker("lively").join()
    for _ in range(4):
        await lively.say(beat())
        await room.clock.advance(3)
    assert room.states() == {"quiet": "suspect", "lively": "serving"}
    assert quiet.link is not None
    assert quiet.link.closed, "its connection is closed: it shall dial in again"
    assert room.lost == [("quiet", room.lost[0][1])]
    assert "no heartbeat for" in room.lost[0][1]
    known = room.fleet.get("quiet")
    assert known is not None and known.note == room.lost[0][1], "its operator reads why"
    await quiet.join()
    assert room.states()["quiet"] == "serving"


async def test_worker_with_heartbeats_but_no_progress_is_suspect(room: Room) -> None:
    stuck, busy, idle = [await room.worker(name).join() for name in ("stuck", "busy", "idle")]
    for round in range(45):
        await stuck.say(beat(progress=5, active=3))
        await busy.say(beat(progress=round, active=3))
        await idle.say(beat(progress=5))
        await settle()
        await room.clock.advance(3, steps=2)
        if room.states()["stuck"] != "serving":
            break
    assert room.states() == {"stuck": "suspect", "busy": "serving", "idle": "serving"}
    assert 40 <= round <= 42
    assert "no compute progress for" in room.lost[0][1]


@pytest.mark.parametrize(
    "frame", [b"", b"\xc1", b"\x80", b"\x81\xa4type\xa3Foo", protocol.encode(protocol.Abort(request="x"))]
)
async def test_bad_frame_closes_the_connection(room: Room, frame: bytes) -> None:
    worker = await room.worker().join()
    assert worker.link is not None
    await worker.link.send(frame)
    await eventually(lambda: room.states() == {"worker": "suspect"})
    assert room.fleet.bad_frames == 1
    await eventually(lambda: worker.link is not None and worker.link.closed)
    ours, theirs = connection_pair()
    serving = asyncio.create_task(room.fleet.serve(theirs))
    await ours.send(frame)
    refused = protocol.decode(protocol.to_worker, await ours.receive())
    assert isinstance(refused, protocol.HelloRejected), "else its process would send it again for ever"
    await serving
    assert ours.closed and room.fleet.bad_frames == 2


@pytest.mark.parametrize(
    ("name", "rows", "named"), [("w" * 201, 8, r"length <= 200 .*\$\.name"), ("w", -1, r">= 0 .*\$\.max_rows")]
)
async def test_hello_out_of_bounds_is_refused_with_its_field(room: Room, name: str, rows: int, named: str) -> None:
    ours, theirs = connection_pair()
    serving = asyncio.create_task(room.fleet.serve(theirs))
    await ours.send(protocol.encode(worker_hello(machine(1), name, MODEL, max_rows=rows)))
    refused = protocol.decode(protocol.to_worker, await ours.receive())
    assert isinstance(refused, protocol.HelloRejected) and re.search(named, refused.reason), refused
    await serving
    assert room.fleet.bad_frames == 1 and not room.fleet.all()


async def test_refused_worker_gets_the_reason(room: Room) -> None:
    ours, theirs = connection_pair()
    serving = asyncio.create_task(room.fleet.serve(theirs))
    await ours.send(protocol.encode(beat()))
    refused = protocol.decode(protocol.to_worker, await ours.receive())
    assert refused == protocol.HelloRejected(reason="the first frame must be a Hello")
    await serving
    ours, theirs = connection_pair()
    serving = asyncio.create_task(room.fleet.serve(theirs))
    await ours.send(protocol.encode(worker_hello(machine(1), "w", MODEL, protocol=99)))
    refused = protocol.decode(protocol.to_worker, await ours.receive())
    assert isinstance(refused, protocol.HelloRejected)
    assert "protocol 99 is not supported" in refused.reason
    await serving
    assert room.states() == {"w": "gone"}


async def welcomed(room: Room, name: str, key: protocol.ReadKey) -> Reads:
    """The signatures of a worker that has joined now."""
    ours, theirs = connection_pair()
    serving = asyncio.ensure_future(room.fleet.serve(theirs, key))  # type: ignore[arg-type]
    reads = Reads()
    reads.use(await introduce(ours, worker_hello(machine(1), name, MODEL), protocol.to_worker))
    ours.cut()
    await serving
    return reads


@pytest.mark.parametrize("ahead", [600.0, -600.0, 86400.0])
async def test_a_wall_clock_that_is_set_refuses_no_signature(room: Room, ahead: float) -> None:
    """Of a worker that was welcomed before: others that join read from it, and it reads from the service."""
    keys, digest = ReadKeys(room.fleet.signing_time), "a" * 64
    key = keys.add("the hash of an API key")
    early = await welcomed(room, "early", key)
    room.clock.ahead = ahead
    late = await welcomed(room, "late", key)
    for reader in (early, late):
        header = reader.sign(digest)
        assert early.permits(header, digest) and late.permits(header, digest)
        assert keys.reader(header, digest) == "the hash of an API key"
    await room.clock.advance(600)
    assert keys.reader(early.sign(digest), digest) is None, "it is old in the service's time"


async def test_draining_worker_is_not_counted_as_lost(room: Room) -> None:
    worker = await room.worker().join()
    await worker.say(protocol.Draining(epoch=0))
    await eventually(lambda: room.states() == {"worker": "draining"})
    assert room.fleet.serving("rollout", MODEL) == []
    await worker.say(protocol.Output(epoch=0, chunks=[]))
    await eventually(lambda: bool(room.outputs))
    await worker.die()
    assert room.states() == {"worker": "gone"}
    assert room.fleet.losses == 0


async def test_a_worker_that_does_not_work_reports_why(room: Room) -> None:
    """The operator reads its line; tenants read it without paths, while no other worker may serve the model."""
    line = "ROOKERY_CACHE=/srv/cache is not writable; see http://host/x and/or q/k"
    other = await room.worker(name="other", loading=True).join()
    for name, refused in (("first", True), ("second", False), ("third", True)):
        worker = await room.worker(name=name, loading=True).join()
        if name == "third":
            await other.say(protocol.Draining(epoch=0))
            await eventually(lambda: room.states()["other"] == "draining")
        await worker.say(protocol.Draining(epoch=0, reason=line, refused=refused))
        await eventually(lambda name=name: room.states().get(name) == "draining")
        assert next(one.note for one in room.fleet.all() if one.name == name) == line
    shown = "ROOKERY_CACHE=(a path of the worker) is not writable; see http://host/x and/or q/k"
    events = [event for event in room.events if isinstance(event, WorkerFailed)]
    assert [(event.worker.name, event.last) for event in events] == [
        ("first", False),
        ("second", False),
        ("third", True),
    ]
    assert room.fleet.fail(MODEL, events[-1].reason) == (f"the worker of {MODEL} does not work: {shown}")


@pytest.mark.parametrize(
    ("state", "failed", "fails"),
    [
        ("joining", "another", False),
        ("serving", "another", False),
        ("suspect", "another", False),
        ("draining", "another", True),
        ("joining", "worker", True),
        ("suspect", "worker", True),
    ],
)
async def test_a_failed_worker_stops_no_model_that_another_one_trains(
    room: Room, state: str, failed: str, fails: bool
) -> None:
    """The other one is ``worker``, in this state; it cannot stand in for itself."""
    worker = await room.worker(loading=state == "joining").join()
    if state == "draining":
        await worker.say(protocol.Draining(epoch=0))
    elif state == "suspect":
        await worker.die()
    await eventually(lambda: room.states() == {"worker": state})
    assert bool(room.fleet.fail(MODEL, "it refuses", failed)) == fails
    assert bool(room.fleet.failures) == fails, "no reason is left for a later absence"


async def test_worker_that_does_not_read_delays_no_other(room: Room) -> None:
    class Stuck:
        """A link whose sends never end."""

        def __init__(self, link: object) -> None:
            self.link = link
            self.sending = asyncio.Event()

        async def send(self, frame: bytes) -> None:
            self.sending.set()
            await asyncio.Event().wait()

        async def receive(self) -> bytes:
            return await self.link.receive()  # type: ignore[attr-defined,no-any-return]

        async def close(self, reason: str) -> None:
            await self.link.close(reason)  # type: ignore[attr-defined]

    ours, theirs = connection_pair()
    stuck = Stuck(theirs)
    serving = asyncio.create_task(room.fleet.serve(stuck))
    await ours.send(protocol.encode(worker_hello(machine(1), "deaf", MODEL)))
    await stuck.sending.wait()
    deaf = room.fleet.get("deaf")
    assert deaf is not None
    for _ in range(100):
        deaf.post(protocol.Abort(request="x"))
    await room.worker("other").join()
    assert room.states() == {"deaf": "serving", "other": "serving"}
    ours.cut()
    await serving
    assert room.states()["deaf"] == "suspect"
    with pytest.raises(ConnectionClosed):
        await ours.send(b"")


@pytest.mark.parametrize(
    ("rows", "refusal", "notes", "bad_frames"),
    [
        (-1, pytest.raises(RegistrationRefused, match="none of this service's protocol"), {}, 1),  # no message has it
        (
            1 << 40,
            pytest.raises(RegistrationRefused, match="must be 0 to 65536"),
            {("worker", "gone"): f"refused: invalid number of rows {1 << 40}: must be 0 to 65536"},
            0,
        ),
    ],
)
async def test_worker_with_absurd_rows_is_refused(
    room: Room, rows: int, refusal: Any, notes: dict[tuple[str, str], str], bad_frames: int
) -> None:
    with refusal:
        await room.worker(max_rows=rows).join()
    assert {(one.name, one.state): one.note for one in room.fleet.all()} == notes
    assert room.fleet.bad_frames == bad_frames


@pytest.mark.parametrize("hashes", [[f"{number:064x}" for number in range(60_000)], ["x" * 65]])
async def test_worker_cannot_report_adapters_without_end(room: Room, hashes: list[str]) -> None:
    worker = await room.worker().join()
    with contextlib.suppress(ConnectionClosed):
        for _ in range(2):
            await worker.say(protocol.AdaptersCached(epoch=0, hashes=hashes))
            hashes = [digest[::-1] for digest in hashes]
            await settle()
    await eventually(lambda: room.states() == {"worker": "suspect"})
    assert room.fleet.bad_frames == 1 and len(room["worker"].cached) <= 60_000
