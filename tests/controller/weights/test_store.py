"""Workers that load, catch up, read from each other, fall behind and lose what they should have."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Literal

import msgspec
import pytest
from tests.support.peers import (
    MODEL,
    ScriptedWorker,
    Service,
    eventually,
    job_of,
    settle,
    text_of,
)
from tests.support.replies import full_length
from tests.support.room import Room, beat
from tests.support.virtual import by_number, machine
from tests.support.weights import VirtualStore
from tests.support.work import work_of

from rookery import protocol
from rookery.controller.fleet.worker import AdapterOrder, AdapterOrders
from rookery.controller.weights.store import AT_ONCE, MOST_RETAINED, ArtifactReferences
from rookery.protocol.connection import ConnectionClosed
from rookery.simulation.clock import EPOCH, run
from rookery.simulation.fakes.service import MEMORY, SimulatedService


def ready() -> protocol.Ready:
    return protocol.Ready(epoch=0, model_hash="m", max_context=256, device="cpu", dtype="bfloat16")


def held(worker: ScriptedWorker) -> list[protocol.AdapterRef]:
    """The versions that it was asked to hold, in order."""
    return [ref for message in worker.other if isinstance(message, protocol.Replicate) for ref in message.refs]


def bare(ref: protocol.AdapterRef) -> protocol.AdapterRef:
    return msgspec.structs.replace(ref, sources=[])


# --- joining and catching up ------------------------------------------------------------------------------------------


async def test_loading_worker_gets_no_work_and_is_not_suspect(room: Room) -> None:
    worker = await room.worker(loading=True, max_context=0, device="").join()
    for _ in range(100):
        await worker.say(beat())
        await settle()
        await room.clock.advance(6, steps=1)
    assert room.states() == {"worker": "joining"}
    assert room.able("rollout") == room.able("train") == []
    assert not room["worker"].accepts(None)
    assert room.fleet.missing("train", MODEL) == f"no worker serves {MODEL} for train (worker is joining)"
    await worker.say(ready())
    await eventually(lambda: room.states() == {"worker": "serving"})
    assert (room["worker"].hello.max_context, room["worker"].hello.device) == (256, "cpu")
    assert room.able("rollout") == room.able("train") == ["worker"]
    await worker.say(ready())
    await eventually(lambda: room.states() == {"worker": "suspect"})  # it cannot become ready twice


async def test_joining_worker_catches_up_and_accepts_cached_versions(room: Room) -> None:
    one, two = room.ref(1), room.ref(7, "q")
    room.used = [one, two]
    worker = room.worker(loading=True)
    worker.pulling.clear()
    await worker.join()
    await worker.say(ready())
    await eventually(lambda: len(held(worker)) == 2)
    assert [bare(ref) for ref in held(worker)] == [one, two]
    assert all(ref.sources == [] for ref in held(worker)), "only the service has them"
    assert room.states() == {"worker": "catching up"}
    assert (room.able("rollout"), room.able("train")) == (["worker"], [])
    here = room["worker"]
    assert (here.accepts(None), here.accepts(one), here.accepts(two)) == (True, False, False)
    await worker.say(protocol.AdaptersCached(epoch=0, hashes=[one.hash]))
    await eventually(lambda: here.accepts(one))
    assert not here.accepts(two)
    assert room.states() == {"worker": "catching up"}
    await worker.say(protocol.AdaptersCached(epoch=0, hashes=[two.hash]))
    await eventually(lambda: room.states() == {"worker": "serving"})
    assert room.able("train") == ["worker"]
    assert here.accepts(room.ref(99)), "it pulls what work names"


async def test_reconnected_worker_keeps_its_adapters(room: Room) -> None:
    room.used = [room.ref(1)]
    worker = await room.worker().join()
    await eventually(lambda: room.states() == {"worker": "serving"})
    first = worker.epoch
    await worker.die()
    await worker.join()
    assert worker.epoch > first
    assert room.states() == {"worker": "serving"}, "at once"
    assert len(held(worker)) == 1, "it was asked once"


async def test_nothing_is_kept_about_artifacts_that_are_nowhere(room: Room) -> None:
    """However many a worker reports and evicts."""

    def known() -> int:
        return sum(type(one) is ArtifactReferences for one in gc.get_objects())

    before = known()
    worker = await room.worker().join()
    for number in range(50):
        hashes = [f"{number}-{i}" for i in range(20)]
        await worker.say(protocol.AdaptersCached(epoch=0, hashes=hashes))
        await eventually(lambda: len(room["worker"].cached) == 20)
        await worker.say(protocol.AdaptersEvicted(epoch=0, hashes=hashes))
        await eventually(lambda: not room["worker"].cached)
    assert known() <= before


async def test_newer_version_supersedes_an_older_order(room: Room) -> None:
    old, new, other = room.ref(1), room.ref(2), room.ref(1, "q")
    room.used = [old, other]
    worker = room.worker()
    worker.pulling.clear()
    await worker.join()
    room.weights.publish(MODEL, new)
    await worker.say(protocol.AdaptersCached(epoch=0, hashes=[new.hash]))
    await eventually(lambda: room["worker"].accepts(new))
    assert room.states() == {"worker": "catching up"}, "the other policy's is still to come"
    await worker.say(protocol.AdaptersCached(epoch=0, hashes=[other.hash]))
    await eventually(lambda: room.states() == {"worker": "serving"})


async def test_unpublished_version_need_not_be_received(room: Room) -> None:
    room.used = [room.ref(1)]
    worker = room.worker()
    worker.pulling.clear()
    await worker.join()
    assert room.states() == {"worker": "catching up"}
    room.weights.unpublish([room.used[0].hash])
    assert room.states() == {"worker": "serving"}
    await eventually(lambda: any(isinstance(message, protocol.EvictArtifacts) for message in worker.other))


async def test_worker_without_rollout_role_catches_up_with_nothing(room: Room) -> None:
    room.used = [room.ref(1)]
    await room.worker("trainer", roles=["train"]).join()
    assert room.states() == {"trainer": "serving"}


async def test_serving_list_agrees_with_the_state_of_each_worker(room: Room) -> None:
    room.used = [room.ref(1)]
    workers = [room.worker(f"w{n}", roles=roles) for n, roles in enumerate([["train"], ["rollout"]] * 3)]
    for number, worker in enumerate(workers):
        if number % 3 == 0:
            worker.pulling.clear()
        await worker.join()
    await workers[1].die()
    await workers[2].say(protocol.Draining(epoch=0))
    await settle()
    for role in ("train", "rollout"):
        assert room.able(role) == [w.name for w in room.fleet.all() if w.has_role(role, MODEL)]
    before = room.fleet.serving("rollout", MODEL)
    names = [worker.name for worker in before]
    await workers[3].die()
    assert [worker.name for worker in before] == names, "who looks at the list keeps it as it was"


async def test_tokens_per_second_cover_the_last_heartbeats(room: Room) -> None:
    worker = await room.worker().join()
    assert room["worker"].tokens_per_second() == 0.0
    for generated in (0, 100, 200, 400, 600, 800, 1000):
        await worker.say(beat(generated=generated))
        await settle()
        await room.clock.advance(2, steps=1)
    assert room["worker"].tokens_per_second() == pytest.approx(90.0), "from the second beat on: 900 in 10 s"


# --- published versions -----------------------------------------------------------------------------------------------


async def test_published_version_is_received_by_rollout_workers_without_it(room: Room) -> None:
    lacking, holding = await room.worker("lacking").join(), room.worker("holding")
    trainer = await room.worker("trainer", roles=["train"]).join()
    new = room.ref(3)
    holding.adapters = {new.hash}
    await holding.join()
    room.weights.publish("another model", room.ref(9))
    room.weights.publish(MODEL, new)
    await eventually(lambda: [bare(ref) for ref in held(lacking)] == [new])
    assert held(holding) == held(trainer) == []
    await eventually(lambda: new.hash in room["lacking"].cached)


async def test_slow_worker_gets_no_request_for_a_version_that_it_misses(room: Room) -> None:
    quick, slow = await room.worker("quick").join(), await room.worker("slow").join()
    slow.pulling.clear()
    first, second = room.ref(1), room.ref(2)
    room.weights.publish(MODEL, first)
    assert room["slow"].accepts(first), "nobody knows yet that it is slow"
    await eventually(lambda: first.hash in room["quick"].cached)
    await room.clock.advance(5, steps=1)
    slow.pulling.set()
    await eventually(lambda: first.hash in room["slow"].cached)
    slow.pulling.clear()
    room.weights.publish(MODEL, second)
    await eventually(lambda: second.hash in room["quick"].cached)
    here = room["slow"]
    assert (here.accepts(second), here.accepts(first), here.accepts(None)) == (False, True, True)
    slow.pulling.set()
    await eventually(lambda: here.accepts(second))
    room.weights.publish(MODEL, room.ref(3))
    await eventually(lambda: not here.orders)
    assert not here.slow, "this time it was as quick as the other"
    assert room.states() == {"quick": "serving", "slow": "serving"}
    await quick.die()


async def test_worker_that_misses_a_version_is_marked_slow(room: Room) -> None:
    slow = await room.worker("slow").join()
    slow.pulling.clear()
    for version in (1, 2, 3):
        room.weights.publish(MODEL, room.ref(version))
    here = room["slow"]
    assert here.slow
    assert [asked.ref.version for asked in here.orders.values()] == [3]
    assert here.accepts(room.ref(1)), "nobody pulls it ahead any more: work that names it does"


async def test_worker_that_does_not_read_its_frames_is_suspect(room: Room) -> None:
    deaf, other = await room.worker("deaf").join(), await room.worker("other").join()
    link = room["deaf"].connection
    hangs = asyncio.Event()

    async def never(frame: bytes) -> None:
        hangs.set()
        await asyncio.Event().wait()

    link.send = never  # type: ignore[method-assign]
    room.weights.publish(MODEL, room.ref(1))
    await hangs.wait()
    for _ in range(6):
        for worker in (deaf, other):
            await worker.say(beat())
        await settle()
        await room.clock.advance(2, steps=2)
    assert room.states() == {"deaf": "suspect", "other": "serving"}
    assert room.lost == [("deaf", room.lost[0][1])]
    assert "has not read a frame for" in room.lost[0][1]


SETTLED = 20.0
"""Seconds after which everybody has been judged."""


def widest_gap(times: list[float]) -> float:
    return max(later - sooner for sooner, later in pairwise(times))


def test_slow_receiver_delays_no_commit() -> None:
    """In virtual time: the same job with two quick generating workers, and with a third whose network is slow."""
    usual = machine(16).model_copy(update={"adapter_bytes": 10_000_000, "download": 20e6, "latency": 0.01})
    algorithm = {"group_size": 4, "groups_per_step": 4, "max_staleness": 1}
    job = job_of(environment={"id": "task"}, algorithm=algorithm, sampling={"max_tokens": 64}, stop={"steps": 1000})

    async def commits(folder: str, slow: bool) -> list[float]:
        site = SimulatedService(Path(folder), full_length, context=512, seed=1, tenants=["alice"])
        await site.controller.start()
        roles: dict[str, Literal["train", "rollout"]] = {"trainer": "train", "one": "rollout", "two": "rollout"}
        if slow:
            roles["slow"] = "rollout"
        workers = []
        for name, role in roles.items():
            speed = usual.download / (10 if name == "slow" else 1)
            workers.append(site.worker(name, usual.model_copy(update={"download": speed}), roles=[role]))
            workers[-1].start()
        host = site.host({"builtin:task": 0.05}, prompt_tokens=8, turns=1, reward=by_number)
        await host.join()
        view, _ = await site.controller.submit("alice", job)
        await asyncio.sleep(60)
        rows = await site.controller.queries.metrics("alice", view.id)
        if slow:
            assert workers[-1].pulled_bytes > 0
            assert {row.state for row in site.controller.queries.workers()} == {"serving"}
        for worker in workers:
            await worker.kill()
        await site.close()
        return [row["time"] - EPOCH for row in rows]

    def play(slow: bool) -> list[float]:
        with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
            return run(commits(folder, slow))

    without, beside = play(False), play(True)
    # until its first pull is over nobody knows that it is slow: that costs one of its pulls' time, once
    without, beside = ([time for time in times if time > SETTLED] for times in (without, beside))
    assert len(without) > 20
    assert len(beside) >= len(without) - 1
    assert widest_gap(beside) <= 1.1 * widest_gap(without)


# --- what cannot be pulled --------------------------------------------------------------------------------------------


async def test_worker_that_cannot_pull_an_intact_artifact_is_suspect(room: Room) -> None:
    room.used = [room.ref(1)]
    worker, other = room.worker(), room.worker("other")
    worker.pulling.clear()
    await worker.join()
    await other.join()
    await worker.say(protocol.PullFailed(epoch=0, hash=room.used[0].hash, error="HTTP 500"))
    await eventually(lambda: room.states() == {"worker": "suspect", "other": "serving"})
    assert "which the service has: HTTP 500" in room.lost[0][1]
    await worker.die()
    worker.pulling.set()
    await worker.join()
    await eventually(lambda: room.states() == {"worker": "serving", "other": "serving"})


@pytest.mark.parametrize("damage", ["changed", "gone"])
async def test_no_worker_is_suspect_when_the_copy_of_the_service_is_damaged(room: Room, damage: str) -> None:
    room.used = [room.ref(1)]
    looked: list[str] = []
    verify = room.artifacts.verify

    def counted(digest: str) -> protocol.Manifest:
        looked.append(digest)
        return verify(digest)

    room.artifacts.verify = counted  # type: ignore[method-assign]
    path = room.artifacts.path(room.used[0].hash, "adapter_model.safetensors")
    if damage == "changed":
        path.write_bytes(b"x" * path.stat().st_size)
    else:
        room.artifacts.delete(room.used[0].hash)
    workers = [room.worker(f"w{n}") for n in range(3)]
    for worker in workers:
        worker.pulling.clear()
        await worker.join()
    assert set(room.states().values()) == {"catching up"}
    for worker in workers:
        await worker.say(protocol.PullFailed(epoch=0, hash=room.used[0].hash, error="another hash"))
    await eventually(lambda: set(room.states().values()) == {"serving"})
    assert room.lost == []
    assert looked == [room.used[0].hash], "hashed once, however many complain"


async def test_failed_pull_of_an_unnamed_artifact_is_ignored(room: Room) -> None:
    ref = room.ref(1)
    worker = await room.worker().join()
    await worker.say(protocol.PullFailed(epoch=0, hash=ref.hash, error="I want it"))
    await settle()
    assert room.states() == {"worker": "serving"}
    assert room.weights.failed_pulls == 0


# --- sources ----------------------------------------------------------------------------------------------------------


async def holding(room: Room, name: str, ref: protocol.AdapterRef, **hello: object) -> ScriptedWorker:
    worker = room.worker(name, **{"address": f"http://{name}:1", **hello})
    worker.adapters = {ref.hash}
    return await worker.join()


def sources(room: Room, name: str, ref: protocol.AdapterRef) -> list[str]:
    return room.weights.adapter_ref(room[name], ref).sources


async def test_request_names_the_holders_that_serve_and_no_source_where_the_artifact_is(room: Room) -> None:
    ref = room.ref(1)
    await holding(room, "a", ref)
    await holding(room, "mute", ref, address="")
    await room.worker("asker").join()
    assert sources(room, "asker", ref) == ["http://a:1"]
    assert sources(room, "asker", ref) == ["http://a:1"], "while it receives it"
    assert sources(room, "a", ref) == []
    assert room.weights.routed == {"site": 1}, "one transfer"


async def test_worker_that_receives_is_a_source_of_the_next(room: Room) -> None:
    ref = room.ref(1)
    await holding(room, "trainer", ref, roles=["train"])
    receivers = [room.worker(name, address=f"http://{name}:1") for name in ("a", "b", "c")]
    for worker in receivers:
        worker.pulling.clear()
        await worker.join()
    room.weights.publish(MODEL, ref)
    await eventually(lambda: all(held(worker) for worker in receivers))
    first = [held(worker)[0].sources[0] for worker in receivers]
    assert first == ["http://trainer:1", "http://a:1", "http://b:1"]
    for worker in receivers:
        worker.pulling.set()
    await eventually(lambda: all(ref.hash in room[name].cached for name in "abc"))
    await room.worker("late").join()
    assert sources(room, "late", ref)[0] in {f"http://{name}:1" for name in ("trainer", "a", "b", "c")}


async def test_one_copy_crosses_to_each_site(room: Room) -> None:
    ref = room.ref(1)
    await holding(room, "trainer", ref, roles=["train"], site="s0")
    for site in range(3):
        for number in range(4):
            name = f"s{site}w{number}"
            worker = room.worker(name, address=f"http://{name}:1", site=f"s{site}")
            worker.pulling.clear()
            await worker.join()
    room.weights.publish(MODEL, ref)
    assert room.weights.routed["elsewhere"] == 2
    assert room.weights.routed["service"] == 0


async def test_lost_draining_and_unpublished_sources_are_not_named(room: Room) -> None:
    ref = room.ref(1)
    a, b = await holding(room, "a", ref), await holding(room, "b", ref)
    for name in ("one", "two", "three", "four", "five"):
        await room.worker(name).join()
    assert set(sources(room, "one", ref)) == {"http://a:1", "http://b:1"}
    await a.die()
    assert sources(room, "two", ref) == ["http://b:1"]
    await b.say(protocol.Draining(epoch=0))
    await settle()
    assert sources(room, "three", ref) == []
    await b.say(protocol.AdaptersCached(epoch=0, hashes=[ref.hash]))
    await settle()
    assert sources(room, "four", ref) == [], "it still drains"
    await a.join()
    await a.say(protocol.AdaptersEvicted(epoch=0, hashes=[ref.hash]))
    await settle()
    assert sources(room, "five", ref) == []
    await a.say(protocol.AdaptersCached(epoch=0, hashes=[ref.hash]))
    await settle()
    room.weights.unpublish([ref.hash])
    assert sources(room, "one", ref) == []


async def test_workers_of_another_key_are_no_sources(room: Room) -> None:
    ref = room.ref(1)
    foreign = room.worker("foreign", address="http://foreign:1")
    foreign.serve = partial(room.fleet.serve, reads=protocol.read_key("another"))
    foreign.adapters = {ref.hash}
    await foreign.join()
    await room.worker("asker").join()
    assert sources(room, "asker", ref) == []


async def test_process_that_takes_over_an_address_ends_the_earlier_source(room: Room) -> None:
    """The earlier one is dead; that its connection is, is not known yet."""
    ref = room.ref(1)
    await holding(room, "a", ref, instance="first")
    await room.worker("one").join()
    assert sources(room, "one", ref) == ["http://a:1"]
    again = room.worker("a", address="http://a:1", instance="second", loading=True)
    await again.join()
    await room.worker("two").join()
    assert sources(room, "two", ref) == []
    assert sources(room, again.name, ref) == []


async def test_failed_source_is_replaced(room: Room) -> None:
    ref = room.ref(1)
    for name in ("a", "b"):
        await holding(room, name, ref)
    asker = room.worker("asker", address="http://asker:1")
    asker.pulling.clear()
    await asker.join()
    first = sources(room, "asker", ref)[0]
    follower = room.worker("follower", address="http://follower:1")
    await follower.join()
    second = ({"http://a:1", "http://b:1"} - {first}).pop()
    for failed in (first, second):
        await asker.say(protocol.SourcesRequest(epoch=0, hash=ref.hash, failed=failed))

    def answers() -> list[list[str]]:
        return [message.sources for message in asker.other if isinstance(message, protocol.Sources)]

    await eventually(lambda: len(answers()) == 2)
    assert answers() == [[second], []], "the service is left"


async def test_a_source_that_failed_while_it_started_again_is_not_named_again(room: Room) -> None:
    """Its new process has the artifact on its disk, and counts as a holder only when its model is loaded."""
    ref = room.ref(1)
    await holding(room, "a", ref, instance="first")
    asker = room.worker("asker", address="http://asker:1")
    asker.pulling.clear()
    await asker.join()
    assert sources(room, "asker", ref) == ["http://a:1"]
    again = room.worker("a", address="http://a:1", instance="second", loading=True)
    again.adapters = {ref.hash}
    await again.join()
    await holding(room, "b", ref)

    def answers() -> list[list[str]]:
        return [message.sources for message in asker.other if isinstance(message, protocol.Sources)]

    await asker.say(protocol.SourcesRequest(epoch=0, hash=ref.hash, failed="http://a:1"))
    await eventually(lambda: answers()[-1:] == [["http://b:1"]])
    before = len(answers())
    await again.say(ready())
    await eventually(lambda: room[again.name].state == "serving")
    await asker.say(protocol.SourcesRequest(epoch=0, hash=ref.hash, failed="http://b:1"))
    await eventually(lambda: len(answers()) > before)
    assert answers()[-1] == [], "the service is left"


async def test_transfer_that_a_worker_does_not_mention_ends(room: Room) -> None:
    ref = room.ref(1)
    await holding(room, "a", ref)
    worker = await room.worker("asker", address="http://asker:1").join()
    sources(room, "asker", ref)
    await room.worker("next").join()
    for receiving, there in (({ref.hash: 5}, True), ({}, False)):
        for _ in range(8):
            await worker.say(beat(receiving=receiving))
            await settle()
            await room.clock.advance(2, steps=1)
        assert (ref.hash in room["asker"].receiving) == there


async def test_last_reserved_holder_retains_the_newest_versions(room: Room) -> None:
    def retained(worker: ScriptedWorker) -> list[str]:
        lists = [message.hashes for message in worker.other if isinstance(message, protocol.Retain)]
        return lists[-1] if lists else []

    first, second, third = room.ref(1), room.ref(2), room.ref(3)
    trainer = await holding(room, "trainer", first, roles=["train"])
    spot = await holding(room, "spot", first, kind="preemptible")
    room.weights.publish(MODEL, first)
    await eventually(lambda: retained(trainer) == [first.hash])
    assert retained(spot) == []
    other = await holding(room, "other", first, roles=["train"])
    await eventually(lambda: retained(trainer) == [])
    await trainer.die()
    await eventually(lambda: retained(other) == [first.hash])
    for ref in (second, third):
        await other.say(protocol.AdaptersCached(epoch=0, hashes=[ref.hash]))
        await settle()
        room.weights.publish(MODEL, ref)
    await eventually(lambda: retained(other) == sorted([second.hash, third.hash]))
    room.weights.unpublish([third.hash])
    assert room["other"].retained == {second.hash}


@pytest.mark.parametrize("count", [MOST_RETAINED - 1, 3 * MOST_RETAINED])
def test_a_joining_worker_changes_nothing_that_is_retained(count: int) -> None:
    """Policies that published last are retained, whatever else is in use."""
    virtual, refs = VirtualStore(), [version_of(f"p{number}", 1, number) for number in range(count)]
    keeper = virtual.join("keeper", [ref.hash for ref in refs], in_use=refs)
    newest = version_of("p0", 2, count)
    virtual.store.publish(MODEL, newest)
    virtual.store.on_cached(keeper, protocol.AdaptersCached(epoch=1, hashes=[newest.hash]))
    before, _ = {*keeper.retained}, virtual.messages(keeper)
    assert newest.hash in before and MOST_RETAINED <= len(before) <= MOST_RETAINED + 1
    in_use = [newest, *refs[1:]]
    virtual.join("joining", [ref.hash for ref in in_use], in_use=in_use, kind="preemptible")
    assert keeper.retained == before
    assert not [message for message in virtual.messages(keeper) if isinstance(message, protocol.Retain)]


def test_unpublished_versions_take_no_place_of_retained_ones() -> None:
    virtual, live = VirtualStore(), version_of("live", 1, 0)
    keeper = virtual.join("keeper", [live.hash])
    virtual.store.publish(MODEL, live)
    for number in range(1, 2 * MOST_RETAINED):
        deleted = version_of(f"p{number}", 1, number)
        virtual.store.publish(MODEL, deleted)
        virtual.store.unpublish([deleted.hash])
    assert keeper.retained == {live.hash}


async def test_few_versions_are_received_at_a_time(room: Room) -> None:
    room.used = [room.ref(version, f"policy {version}") for version in range(5)]
    worker = room.worker()
    worker.pulling.clear()
    await worker.join()
    await eventually(lambda: len(held(worker)) == AT_ONCE)
    await settle()
    assert len(held(worker)) == AT_ONCE
    worker.pulling.set()
    await eventually(lambda: room.states() == {"worker": "serving"})
    assert [bare(ref) for ref in held(worker)] == room.used


async def work_of_reports(count: int, *, at_once: bool) -> int:
    """Instructions in which the reports of a worker are taken that received a version of so many policies."""
    virtual, refs = VirtualStore(), [version_of(f"p{number}", 1, number) for number in range(count)]
    virtual.join("trainer", [ref.hash for ref in refs], roles=["train"])
    worker = virtual.join("worker", in_use=refs)
    assert len(worker.orders) == count
    reports = [[ref.hash for ref in refs]] if at_once else [[ref.hash] for ref in refs]

    async def take() -> None:
        for hashes in reports:
            virtual.store.on_cached(worker, protocol.AdaptersCached(epoch=1, hashes=hashes))

    work = await work_of(take, "controller/weights/", "controller/fleet/")
    assert not worker.orders and len(worker.cached) == count
    return work


def version_of(policy: str, version: int, number: int) -> protocol.AdapterRef:
    return protocol.AdapterRef(policy=policy, version=version, hash=f"{number:064}", rank=4, alpha=8.0)


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_report_takes_as_long_however_many_others_are_awaited(at_once: bool) -> None:
    few, many = [await work_of_reports(count, at_once=at_once) for count in (200, 800)]
    assert few < many < 5 * few


@pytest.mark.parametrize("seed", range(20))
def test_orders_begin_in_turn_and_older_ones_are_those_of_one_policy(seed: int) -> None:
    """As in a plain list of all orders."""
    random, orders = Random(seed), AdapterOrders()
    listed: list[protocol.AdapterRef] = []
    waiting: list[protocol.AdapterRef] = []
    for _ in range(200):
        ref = version_of(random.choice("ab"), random.randrange(4), random.randrange(6))
        same = [one for one in listed if one.hash == ref.hash]
        match random.choice(("add", "remove", "begin")):
            case "add":
                orders.add(AdapterOrder(ref, 0.0, 0.0))
                listed = [*(one for one in listed if one not in same), ref]
                waiting = [*(one for one in waiting if one not in same), ref]
            case "remove":
                removed = orders.remove(ref.hash)
                assert ([removed.ref] if removed is not None else []) == same
                listed, waiting = ([one for one in those if one not in same] for those in (listed, waiting))
            case "begin":
                most = random.randrange(-1, 3)
                assert [order.ref for order in orders.begin(most)] == waiting[: max(0, most)]
                waiting = waiting[max(0, most) :]
        assert [order.ref for order in orders.values()] == listed
        older = [one.hash for one in listed if one.policy == ref.policy and one.version < ref.version]
        assert sorted(orders.older(ref)) == sorted(older)


async def test_registration_brings_the_table_back(room: Room) -> None:
    """After a restart of the service nothing but the workers knows who has what."""
    ref = room.ref(1)
    workers = [await holding(room, name, ref) for name in ("a", "b")]
    again = Room(room.settings.data)
    for worker in workers:
        await worker.die()
        worker.serve = again.fleet.serve
        await worker.join()
    await again.worker("asker").join()
    assert set(sources(again, "asker", ref)) == {"http://a:1", "http://b:1"}
    await again.close()


# --- the whole service ------------------------------------------------------------------------------------------------


async def test_worker_that_joins_during_a_step_gets_rollouts_of_it(service: Service) -> None:
    first = service.worker("first", chunk=1, shortest=1 << 20)
    await first.join()
    await service.host().join()
    view, _ = await service.controller.submit("alice", job_of(stop={"steps": 3}, sampling={"max_tokens": 30}))
    await eventually(lambda: len(first.active) == 4 and service.controller.context.rooms.rollouts.sampled_tokens >= 4)
    first.generating.clear()
    second = service.worker("second", loading=True)
    second.pulling.clear()
    await second.join()
    await second.say(ready())
    await eventually(lambda: bool(held(second)))
    rows = {row.name: row for row in service.controller.queries.workers()}
    assert rows["second"].state == "catching up"
    assert second.generates == []
    await first.die()  # all it had is at stake
    await settle()
    assert second.generates == [], "it has not the adapter yet"
    second.pulling.set()
    await eventually(lambda: len(second.generates) == 4)
    assert any(generate.prefix_tokens for generate in second.generates), "received tokens are kept"
    await service.ends(view.id)
    service.check_history(view.id)


async def test_versions_in_use_are_those_that_jobs_sample_from(service: Service) -> None:
    worker = await service.worker("first", chunk=1, shortest=1 << 20).join()
    await service.host().join()
    view, _ = await service.controller.submit("alice", job_of(stop={"steps": 50}, sampling={"max_tokens": 20}))

    async def committed() -> bool:
        return (await service.controller.queries.show("alice", view.id)).step >= 2

    await eventually(committed)
    worker.generating.clear()
    await settle()
    versions = [ref.version for ref in service.controller.jobs.versions_in_use(MODEL)]
    sampled = {generate.adapter.version for generate, _ in worker.active.values() if generate.adapter is not None}
    assert sampled <= set(versions)
    assert versions == sorted(versions)
    assert service.controller.jobs.versions_in_use("another model") == []
    worker.generating.set()


@pytest.mark.parametrize("how", ["killed", "garbage", "closes", "frozen", "says goodbye"])
async def test_requests_of_a_worker_that_leaves_resume_from_their_last_token(service: Service, how: str) -> None:
    first = await service.worker("first", chunk=2, shortest=1 << 20).join()
    await service.host().join()
    first.generating.clear()  # until all four requests are there
    algorithm = {"group_size": 4, "groups_per_step": 1}
    view, _ = await service.controller.submit(
        "alice", job_of(stop={"steps": 1}, sampling={"max_tokens": 40}, algorithm=algorithm)
    )
    rollouts = service.controller.context.rooms.rollouts
    await eventually(lambda: len(first.active) == 4)
    first.generating.set()
    await eventually(lambda: rollouts.sampled_tokens >= 12)
    first.generating.clear()
    await settle()
    had = {name: live.result.tokens[:] for (_, name), live in rollouts.requests.items()}
    logprobs = {name: live.result.logprobs[:] for (_, name), live in rollouts.requests.items()}
    assert sum(map(len, had.values())) == rollouts.sampled_tokens
    late = [first.next_chunk(name) for name in list(first.active)]
    second = await service.worker("second", chunk=3, shortest=1 << 20).join()
    await eventually(lambda: service.controller.context.rooms.fleet.serving("train", MODEL) != [])
    assert first.link is not None
    if how == "killed":
        first.link.cut()
    elif how == "garbage":
        await first.link.send(b"\xc1 no message")
    elif how == "closes":
        await first.link.close("done")
    elif how == "says goodbye":
        await first.say(protocol.Draining(epoch=0))
    else:
        while not second.generates:
            await second.say(beat())
            await service.clock.advance(1, steps=2)
    await eventually(lambda: {g.request for g in second.generates} >= set(had))
    for generate in second.generates[:4]:
        assert generate.prefix_tokens[: len(had[generate.request])] == had[generate.request]
    if how == "frozen":  # it wakes, and sends what it had on the connection that was given up
        ignored = service.controller.context.rooms.fleet.ignored_frames
        for chunk in late:
            with contextlib.suppress(ConnectionClosed):
                await first.say(protocol.Output(epoch=0, chunks=[chunk]))
        assert service.controller.context.rooms.fleet.ignored_frames >= ignored
    await service.ends(view.id)
    for row in await service.controller.queries.episodes.trajectories("alice", view.id, 100):
        (trajectory,) = row.trajectories or ()
        (request,) = [name for name in had if name.startswith(row.episode)]
        generate = next(g for g in second.generates if g.request == request)
        tokens, values, _ = text_of(generate.seed, 40, 1 << 20)
        mask = trajectory.mask
        assert [t for t, own in zip(trajectory.tokens, mask, strict=True) if own] == tokens
        assert [v for v, own in zip(trajectory.logprobs, mask, strict=True) if own][: len(values)] == values
        assert logprobs[request] == values[: len(logprobs[request])]
    twice = first.sampled + second.sampled
    assert max(twice.values()) == 1, "no token that had been received was sampled again"
    service.check_history(view.id)


async def test_restarted_controller_resumes_running_requests(service: Service) -> None:
    """Three workers generate when the controller dies; each keeps what it sampled, and the next controller goes on
    from there: nothing is generated twice, whatever had been received."""
    workers = [await service.worker(f"w{n}", chunk=1, max_rows=2, shortest=1 << 20).join() for n in range(3)]
    host = await service.host().join()
    view, _ = await service.controller.submit("alice", job_of(stop={"steps": 2}, sampling={"max_tokens": 12}))
    await eventually(lambda: sum(len(worker.active) for worker in workers) >= 4)
    await eventually(lambda: service.controller.context.rooms.rollouts.sampled_tokens >= 6)
    running = {worker.name: dict(worker.active) for worker in workers}
    service.peers.clear()
    await service.crash()
    await host.leave()
    for worker in workers:
        worker.generating.clear()
    await service.start()
    for worker in workers:
        again = ScriptedWorker(
            service.controller.serve_worker, service.controller.tickets, worker.name, chunk=1, max_rows=2,
            shortest=1 << 20, instance=worker.instance,
        )  # fmt: skip
        again.adapters = worker.adapters
        service.peers.append(again)
        await again.join(running=sorted(running[worker.name]))
    service.reconnect(host)
    await host.join()
    news = {peer.name: peer for peer in service.peers if isinstance(peer, ScriptedWorker)}
    claimed = {name for requests in running.values() for name in requests}
    await eventually(lambda: claimed <= {g.request for peer in news.values() for g in peer.generates})
    for name, requests in running.items():
        assert set(requests) <= {generate.request for generate in news[name].generates}, "where they ran before"
    await service.ends(view.id)
    service.check_history(view.id)
