"""Versions that workers of one machine have before they are committed, as the controller sees it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from tests.support.peers import MODEL, ScriptedWorker, eventually, settle
from tests.support.room import Room

from rookery import protocol
from rookery.controller.training.dispatcher import TrainingDispatcher
from rookery.controller.training.policy_run import PolicyRun
from rookery.controller.training.policy_versions import PolicyVersions
from rookery.controller.weights.handed import HandedVersions

FOLDER = ".1." + "0" * 32


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    room = Room(tmp_path)
    yield room
    await room.close()


async def joined(room: Room, name: str, **hello: Any) -> ScriptedWorker:
    usual = {"address": f"http://{name}:1", "host": "here", "cache": "shared"}
    return await room.worker(name, **usual | hello).join()


def sent(worker: ScriptedWorker, kind: type) -> list[Any]:
    return [message for message in worker.other if isinstance(message, kind)]


async def test_workers_of_the_machine_have_a_version_when_it_is_committed(room: Room) -> None:
    ref = room.ref(1)
    trainer = await joined(room, "trainer", roles=["train"])
    beside, slow = await joined(room, "beside"), await joined(room, "slow")
    others = [
        await joined(room, "far", host="there"),
        await joined(room, "alone", cache=""),
        await joined(room, "apart", cache="another"),
        await joined(room, "only-trains", roles=["train"]),
    ]
    room.weights.hand_over(room["trainer"], ref, FOLDER)
    await eventually(lambda: bool(sent(beside, protocol.HandOver) and sent(slow, protocol.HandOver)))
    assert sent(beside, protocol.HandOver)[0].folder == FOLDER
    assert not any(sent(worker, protocol.HandOver) for worker in [trainer, *others])
    room.weights.on_handed_over(room["beside"], protocol.HandedOver(epoch=0, hash=ref.hash))
    assert not any(ref.hash in worker.cached for worker in room.fleet.all()), "it is not committed"
    room.weights.publish(MODEL, ref)
    assert {worker.name for worker in room.fleet.all() if ref.hash in worker.cached} == {"trainer", "beside"}
    assert room.weights.routed["handed"] == 2
    await eventually(lambda: bool(sent(slow, protocol.Replicate) and sent(beside, protocol.Replicate)))
    assert sent(beside, protocol.Replicate)[0].refs[0].sources == []
    assert sent(slow, protocol.Replicate)[0].refs[0].sources, "it did not report in time: it reads"
    assert room.weights.adapter_ref(room["beside"], ref).sources == []


@pytest.mark.parametrize("end", ["withdraw", "unpublish", "another"])
async def test_version_that_is_not_committed_is_withdrawn(room: Room, end: str) -> None:
    ref = room.ref(1)
    trainer, beside = await joined(room, "trainer"), await joined(room, "beside")
    room.weights.hand_over(room["trainer"], ref, FOLDER)
    room.weights.on_handed_over(room["beside"], protocol.HandedOver(epoch=0, hash=ref.hash))
    match end:
        case "withdraw":
            room.weights.withdraw(ref.hash)
        case "unpublish":
            room.weights.unpublish([ref.hash])
        case "another":
            room.weights.hand_over(room["trainer"], room.ref(2), FOLDER)
    await eventually(lambda: bool(sent(trainer, protocol.Withdraw) and sent(beside, protocol.Withdraw)))
    assert sent(beside, protocol.Withdraw)[0].hashes == [ref.hash]
    room.weights.publish(MODEL, ref)  # the same bytes, uploaded again
    assert not any(ref.hash in worker.cached for worker in room.fleet.all())


class Committed:
    """The history of a policy whose next version is ``ref``."""

    row, head = SimpleNamespace(id="p"), None

    def __init__(self, ref: protocol.AdapterRef) -> None:
        self._ref = ref

    async def commit(self, *_: Any, **__: Any) -> protocol.AdapterRef:
        return self._ref


class Idle:
    def forget_policy(self, policy: str) -> None:
        pass

    @asynccontextmanager
    async def with_ticket(self, policy: str, digest: str) -> AsyncIterator[None]:
        yield


async def next_lease(policy: str) -> int:
    return 1


@pytest.mark.parametrize("call", ["commit", "load"])
async def test_version_that_is_committed_and_not_published_is_kept(room: Room, call: str) -> None:
    ref = room.ref(1)
    trainer, beside = await joined(room, "trainer"), await joined(room, "beside")
    versions = cast(PolicyVersions, Committed(ref))
    run = PolicyRun(cast(TrainingDispatcher, Idle()), room.weights, next_lease, MODEL, versions)
    room.weights.hand_over(room["trainer"], ref, FOLDER)
    room.weights.on_handed_over(room["beside"], protocol.HandedOver(epoch=0, hash=ref.hash))
    manifest = protocol.manifest_of([])
    write = cast(Any, None)
    await (run.commit(write, manifest) if call == "commit" else run.load(write, ref, manifest))
    room.weights.hand_over(room["trainer"], room.ref(2), FOLDER)
    await eventually(lambda: bool(sent(trainer, protocol.Replicate) and len(sent(beside, protocol.HandOver)) == 2))
    assert [ref.hash for message in sent(beside, protocol.Replicate) for ref in message.refs] == [ref.hash]
    assert not sent(trainer, protocol.Withdraw) + sent(beside, protocol.Withdraw)
    assert all(ref.hash in worker.cached for worker in room.fleet.all())


@pytest.mark.parametrize("first", ["commit", "end"])
async def test_policies_with_equal_weights_have_one_version_each(room: Room, first: str) -> None:
    """Their files have one hash: a report counts for both, and the end of one deletes nothing of the other."""
    refs = [replace(room.ref(1), policy=policy) for policy in "pqrs"]
    trainer, beside = await joined(room, "trainer", roles=["train"]), await joined(room, "beside")
    handed = HandedVersions()
    for ref in refs:
        handed.begin(room["trainer"], ref, FOLDER, [room["beside"]])
    handed.received(room["beside"], refs[0].hash)
    for ref in refs[:-1]:
        if first == "commit":
            assert handed.commit(ref) == [room["trainer"], room["beside"]]
        else:
            handed.begin(room["trainer"], room.ref(2, ref.policy), FOLDER, [])
    await settle()
    assert not sent(trainer, protocol.Withdraw) + sent(beside, protocol.Withdraw)
    assert handed.commit(refs[-1]) == [room["trainer"], room["beside"]]


async def test_late_report_of_a_version_that_ended_is_answered(room: Room) -> None:
    ref = room.ref(1)
    await joined(room, "trainer")
    beside = await joined(room, "beside")
    room.weights.on_handed_over(room["beside"], protocol.HandedOver(epoch=0, hash=ref.hash))
    await eventually(lambda: bool(sent(beside, protocol.Withdraw)))


async def test_late_report_of_a_version_that_is_committed_withdraws_nothing(room: Room) -> None:
    ref = room.ref(1)
    await joined(room, "trainer", roles=["train"])
    beside = await joined(room, "beside")
    room.weights.hand_over(room["trainer"], ref, FOLDER)
    room.weights.publish(MODEL, ref)
    room.weights.on_cached(room["beside"], protocol.AdaptersCached(epoch=0, hashes=[ref.hash]))
    room.weights.on_handed_over(room["beside"], protocol.HandedOver(epoch=0, hash=ref.hash))
    await settle()
    assert not sent(beside, protocol.Withdraw)


async def test_lost_worker_has_nothing_that_it_was_handed(room: Room) -> None:
    ref = room.ref(1)
    await joined(room, "trainer", roles=["train"])
    beside = await joined(room, "beside")
    room.weights.hand_over(room["trainer"], ref, FOLDER)
    room.weights.on_handed_over(room["beside"], protocol.HandedOver(epoch=0, hash=ref.hash))
    await beside.die()
    await beside.join()
    room.weights.publish(MODEL, ref)
    assert ref.hash not in room["beside"].cached, "it deleted what was not committed when its connection ended"
    await settle()
    assert [ref.hash for message in sent(beside, protocol.Replicate) for ref in message.refs] == [ref.hash]


async def test_adapter_in_memory_only_is_used_and_not_served(room: Room) -> None:
    ref = room.ref(1)
    worker = room.worker("a", address="http://a:1", loaded=[ref.hash])
    await worker.join()
    assert ref.hash in room["a"].cached
    await room.worker("asker").join()
    assert room.weights.adapter_ref(room["asker"], ref).sources == []
    await worker.say(protocol.AdaptersCached(epoch=0, hashes=[ref.hash]))
    await settle()
    await room.worker("late").join()
    assert room.weights.adapter_ref(room["late"], ref).sources == ["http://a:1"]
