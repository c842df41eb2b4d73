"""Workers dialling in, staying healthy, getting stuck, going and coming back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.peers import WORKER_TOKEN, ManualClock, ScriptedWorker, connection_pair, eventually, settle

from rookery import protocol
from rookery.controller.fleet.fleet import Fleet, FleetListener
from rookery.controller.fleet.worker import Worker
from rookery.controller.weights.tickets import Tickets
from rookery.protocol.connection import ConnectionClosed
from rookery.settings import Settings
from rookery.storage.artifacts import Artifacts

MODEL = "smollm2-135m-instruct"


class Room(FleetListener):
    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.settings = Settings(
            data=folder,
            cache=folder,
            heartbeat_seconds=2,
            suspect_seconds=10,
            rejoin_seconds=60,
            stuck_seconds=120,
        )
        self.tickets = Tickets(Artifacts(folder / "artifacts"), self.clock, 600)
        self.fleet = Fleet(self.settings, self.clock, WORKER_TOKEN)
        self.lost: list[tuple[str, str]] = []
        self.changes = 0
        self.fleet.listeners.append(self)
        self.outputs: list[Worker] = []
        self.fleet.route(protocol.Output, lambda worker, message: self.outputs.append(worker))
        self.fleet.route(protocol.OperationDone, lambda worker, message: None)

    def on_worker_changed(self, worker: Worker) -> None:
        self.changes += worker.state == "serving"

    def on_worker_lost(self, worker: Worker, reason: str) -> None:
        self.lost.append((worker.name, reason))

    def worker(self, name: str = "worker", **script: object) -> ScriptedWorker:
        return ScriptedWorker(self.fleet.serve, self.tickets, name, **script)  # type: ignore[arg-type]

    def states(self) -> dict[str, str]:
        return {worker.name: worker.state for worker in self.fleet.all()}


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    room = Room(tmp_path)
    watch = asyncio.create_task(room.fleet.watch())
    yield room
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)


def beat(progress: int = 0, active: int = 0) -> protocol.Heartbeat:
    return protocol.Heartbeat(
        epoch=0, progress=progress, active=active, waiting=0, training=0, adapters=0, generated=0, trained=0,
        decode_seconds=0.0, train_seconds=0.0, memory_bytes=0,
    )  # fmt: skip


async def test_worker_joins_and_is_lost(room: Room) -> None:
    worker = await room.worker().join()
    assert room.states() == {"worker": "serving"}
    assert room.changes == 1
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
    later = Fleet(room.settings, ManualClock(), WORKER_TOKEN)
    assert later.epoch >= int(room.clock.time() * 1000), "a later process gives later epochs"
    await worker.die()


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
    await second.die()


async def test_two_processes_with_one_name_both_work(room: Room) -> None:
    one = await room.worker(instance="aaaaaaaa").join()
    two = await room.worker(instance="bbbbbbbb").join()
    assert (one.name, two.name) == ("worker", "worker-bbbbbb")
    assert set(room.states().values()) == {"serving"}
    await two.die()
    await two.join()
    assert two.name == "worker-bbbbbb"
    for worker in (one, two):
        await worker.die()


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
    await quiet.join()
    assert room.states()["quiet"] == "serving"
    for worker in (quiet, lively):
        await worker.die()


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
    for worker in (stuck, busy, idle):
        await worker.die()


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
    await serving
    assert ours.closed
    await worker.die()


async def test_refused_worker_gets_the_reason(room: Room) -> None:
    with pytest.raises(PermissionError, match="wrong worker token"):
        await room.worker().join(token="guess")
    ours, theirs = connection_pair()
    serving = asyncio.create_task(room.fleet.serve(theirs))
    await ours.send(protocol.encode(beat()))
    refused = protocol.decode(protocol.to_worker, await ours.receive())
    assert refused == protocol.HelloRejected(reason="the first frame must be a Hello")
    await serving
    ours, theirs = connection_pair()
    serving = asyncio.create_task(room.fleet.serve(theirs))
    hello = protocol.Hello(
        protocol=99, token=WORKER_TOKEN, name="w", instance="w", model=MODEL, model_hash="", roles=["train"],
        max_rows=1, max_context=1, max_rank=1, device="cpu", dtype="float32",
    )  # fmt: skip
    await ours.send(protocol.encode(hello))
    refused = protocol.decode(protocol.to_worker, await ours.receive())
    assert isinstance(refused, protocol.HelloRejected)
    assert "protocol 99 is not supported" in refused.reason
    await serving
    assert room.states() == {}


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
    hello = protocol.Hello(
        protocol=protocol.PROTOCOL, token=WORKER_TOKEN, name="deaf", instance="d", model=MODEL, model_hash="",
        roles=["train"], max_rows=1, max_context=1, max_rank=1, device="cpu", dtype="float32",
    )  # fmt: skip
    await ours.send(protocol.encode(hello))
    await stuck.sending.wait()
    deaf = room.fleet.get("deaf")
    assert deaf is not None
    for _ in range(100):
        deaf.post(protocol.Abort(request="x"))
    other = await room.worker("other").join()
    assert room.states() == {"deaf": "serving", "other": "serving"}
    ours.cut()
    await serving
    assert room.states()["deaf"] == "suspect"
    await other.die()
    with pytest.raises(ConnectionClosed):
        await ours.send(b"")
