"""Generation through workers that vanish, repeat themselves, come too late or talk nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peers import ManualClock, ScriptedWorker, eventually, settle, text_of
from rookery import wire
from rookery.controller.fleet import Fleet
from rookery.controller.rollouts import GenerationFailed, Reply, Request, Rollouts
from rookery.controller.tickets import Tickets
from rookery.errors import Unavailable
from rookery.settings import Settings
from rookery.storage.artifacts import Artifacts

ADAPTER = wire.AdapterRef(policy="p", version=7, hash="0" * 64, rank=8, alpha=16.0)


class Room:
    """A fleet and its rollouts, with nothing else around them."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.clock = ManualClock()
        self.settings = Settings(data=folder, cache=folder, **changes)
        self.tickets = Tickets(Artifacts(folder / "artifacts"), self.clock, 600)
        self.fleet = Fleet(self.settings, self.clock, "worker-token", self.tickets)
        self.rollouts = Rollouts(self.fleet, self.settings, self.clock)
        self.watches = [asyncio.create_task(watch()) for watch in (self.fleet.watch, self.rollouts.watch)]
        self.workers: list[ScriptedWorker] = []

    async def worker(self, name: str = "worker", **script: Any) -> ScriptedWorker:
        worker = ScriptedWorker(self.fleet.serve, self.tickets, name, **script)
        self.workers.append(await worker.join())
        return worker

    def sample(
        self,
        number: int,
        tenant: str = "a",
        job: str = "job",
        grown: Callable[[Reply], None] | None = None,
        **changes: Any,
    ) -> asyncio.Task[Reply]:
        fields: dict[str, Any] = {
            "id": f"{job}-{number}", "tenant": tenant, "job": job, "model": "smollm2-135m-instruct",
            "adapter": ADAPTER, "prompt": [1, 5, 6], "shared": 3, "max_tokens": 12, "temperature": 1.0, "seed": number,
            "stop_tokens": [2], "stop": [], "episode": f"e{number}",
        }  # fmt: skip
        return asyncio.create_task(self.rollouts.sample(Request(**{**fields, **changes}), grown))

    async def close(self) -> None:
        for worker in self.workers:
            await worker.die()
        for watch in self.watches:
            watch.cancel()
        await asyncio.gather(*self.watches, return_exceptions=True)


def check(reply: Reply, seed: int, max_tokens: int = 12) -> None:
    tokens, logprobs, finish = text_of(seed, max_tokens)
    assert (reply.tokens, reply.logprobs, reply.finish) == (tokens, logprobs, finish)
    assert reply.versions == [7] * len(tokens)


async def test_a_reply_is_what_the_worker_sampled(tmp_path: Path) -> None:
    room = Room(tmp_path)
    worker = await room.worker()
    for number, reply in enumerate(await asyncio.gather(*(room.sample(number) for number in range(20)))):
        check(reply, number)
    first = worker.generates[0]
    assert first.adapter is not None
    assert room.tickets.reads(first.adapter.ticket, ADAPTER.hash), "the adapter's ticket is good"
    assert room.rollouts.sampled == sum(len(text_of(n, 12)[0]) for n in range(20))
    [known] = room.fleet.all()
    assert 0 < known.unsent_most <= 12 * known.hello.max_rows, "what one flush brought is seen"
    await room.close()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lives=st.lists(st.integers(0, 12), max_size=6),
    chunk=st.integers(1, 5),
    requests=st.integers(1, 6),
    back=st.booleans(),
)
def test_no_token_is_lost_or_sampled_twice(
    tmp_path: Path, lives: list[int], chunk: int, requests: int, back: bool
) -> None:
    """Workers die after so many chunks each, at whatever boundary that is; texts go on where they stopped."""

    async def run() -> None:
        room = Room(tmp_path)
        replies = [room.sample(number) for number in range(requests)]
        for number, chunks in enumerate(lives):
            name = "same" if back else f"w{number}"
            worker = await room.worker(name, chunk=chunk, instance=f"{name}-{number}")
            worker.chunks_left = chunks
            await eventually(lambda: room.fleet.all()[-1].state != "serving" or all(r.done() for r in replies))
        await room.worker("last", chunk=chunk)
        for number, reply in enumerate(await asyncio.gather(*replies)):
            check(reply, number)
        sampled = sum((worker.sampled for worker in room.workers), start=room.workers[0].sampled.__class__())
        assert set(sampled.values()) == {1}
        assert len(sampled) == room.rollouts.sampled == sum(len(text_of(n, 12)[0]) for n in range(requests))
        assert not room.rollouts.waiting()
        assert not any(room.rollouts.outstanding(worker) for worker in room.fleet.all())
        await room.close()

    asyncio.run(run())


async def test_requests_of_a_lost_worker_go_first_and_to_who_has_least(tmp_path: Path) -> None:
    room = Room(tmp_path, dispatch_ahead=0)
    one = await room.worker("one", max_rows=2)
    one.generating.clear()
    replies = [room.sample(number) for number in range(4)]
    await eventually(lambda: len(one.generates) == 2)
    assert room.rollouts.waiting() == 2
    await one.die()
    two = await room.worker("two", max_rows=2)
    await asyncio.gather(*replies)
    assert [g.request for g in two.generates] == ["job-0", "job-1", "job-2", "job-3"]
    assert room.rollouts.migrated == 2
    await room.close()


async def test_late_and_repeated_chunks_change_nothing(tmp_path: Path) -> None:
    room = Room(tmp_path)
    worker = await room.worker(chunk=2)
    worker.generating.clear()
    seed = next(s for s in range(100) if len(text_of(s, 12)[0]) == 12)
    reply = room.sample(seed)
    await eventually(lambda: bool(worker.active))
    request, (tokens, logprobs, _) = f"job-{seed}", text_of(seed, 12)

    def chunk(start: int, end: int, request: str = request, **changes: Any) -> wire.Output:
        part = {"tokens": tokens[start:end], "logprobs": logprobs[start:end], "version": 7, "policy": "p", **changes}
        return wire.Output(epoch=0, chunks=[wire.Chunk(request=request, offset=start, **part)])

    await worker.say(chunk(0, 5))
    await worker.say(chunk(0, 5))
    await worker.say(chunk(3, 8))
    await worker.say(chunk(8, 12), epoch=worker.epoch - 1)
    await worker.say(chunk(0, 3, request="unknown"))
    await settle()
    assert room.rollouts.sampled == 8
    assert room.rollouts.late_chunks == 1
    assert room.fleet.ignored_frames == 1
    await worker.say(chunk(6, 12, finish="length"))
    check(await reply, seed)
    await worker.say(chunk(6, 12, finish="length"))
    await settle()
    assert room.rollouts.late_chunks == 2
    await room.close()


async def test_a_lost_workers_frames_are_ignored_after_it_came_back(tmp_path: Path) -> None:
    room = Room(tmp_path)
    worker = await room.worker(chunk=1)
    worker.chunks_left = 2
    reply = room.sample(3)
    await eventually(lambda: room.fleet.all()[0].state == "suspect")
    old = worker.epoch
    other = await room.worker("other", chunk=1)
    other.generating.clear()
    await eventually(lambda: bool(other.active))
    worker.chunks_left = None
    await worker.die()
    await worker.join()
    assert worker.epoch > old
    stale = wire.Chunk(request="job-3", offset=2, tokens=[9], logprobs=[-1.0], version=7, policy="p", finish="stop")
    await worker.say(wire.Output(epoch=0, chunks=[stale]), epoch=old)
    await worker.say(wire.Output(epoch=0, chunks=[stale]))
    await settle()
    assert not reply.done()
    assert (room.fleet.ignored_frames, room.rollouts.late_chunks) == (1, 1)
    other.generating.set()
    check(await reply, 3)
    await room.close()


async def test_a_chunk_of_an_earlier_time_with_the_same_worker_is_no_gap(tmp_path: Path) -> None:
    """Its caller gives up and returns while tokens are under way: the worker had gone further than was received."""
    room = Room(tmp_path)
    worker = await room.worker()
    worker.generating.clear()
    reply = room.sample(4)
    await eventually(lambda: bool(worker.active))
    tokens, logprobs, _ = text_of(4, 12)
    chunks = [
        wire.Chunk(request="job-4", offset=at, tokens=tokens[at:end], logprobs=logprobs[at:end], version=7, policy="p")
        for at, end in ((0, 2), (2, 4), (4, 6))
    ]
    await worker.say(wire.Output(epoch=0, chunks=chunks[:1]))
    await eventually(lambda: room.rollouts.sampled == 2)
    reply.cancel()
    await asyncio.gather(reply, return_exceptions=True)
    await worker.say(wire.Output(epoch=0, chunks=chunks[1:2]))  # nobody waits for it
    await settle()
    reply = room.sample(4)
    await worker.say(wire.Output(epoch=0, chunks=chunks[2:]))  # said before the worker heard of either
    await settle()
    assert not reply.done()
    assert (room.rollouts.sampled, room.rollouts.late_chunks) == (2, 2)
    worker.generating.set()
    check(await reply, 4)
    assert worker.generates[-1].given == tokens[:2]
    await room.close()


@pytest.mark.parametrize(
    ("chunk", "problem"),
    [
        ({"version": 6}, r"\('p', 6\)"),
        ({"policy": "q"}, r"\('q', 7\)"),
        ({"logprobs": []}, "wanted"),
        ({"finish": "error", "error": "no such luck"}, "no such luck"),
        ({"finish": "error"}, "gave no reason"),
    ],
)
async def test_nonsense_fails_that_request_alone(tmp_path: Path, chunk: dict[str, Any], problem: str) -> None:
    room = Room(tmp_path)
    worker = await room.worker()
    worker.generating.clear()
    bad, good = room.sample(1), room.sample(2)
    await eventually(lambda: len(worker.active) == 2)
    fields = {"offset": 0, "tokens": [5], "logprobs": [-1.0], "version": 7, "policy": "p", **chunk}
    await worker.say(wire.Output(epoch=0, chunks=[wire.Chunk(request="job-1", **fields)]))
    with pytest.raises(GenerationFailed, match=problem):
        await bad
    worker.active.pop("job-1")
    worker.generating.set()
    check(await good, 2)
    await room.close()


async def test_what_a_worker_gives_up_goes_on_elsewhere(tmp_path: Path) -> None:
    room = Room(tmp_path)
    worker = await room.worker(chunk=1)
    worker.generating.clear()
    reply = room.sample(3)
    await eventually(lambda: bool(worker.active))
    chunk = worker.next_chunk("job-3")
    worker.active.clear()
    chunk.finish = "abort"
    await worker.say(wire.Output(epoch=0, chunks=[chunk]))
    worker.generating.set()
    check(await reply, 3)
    assert [len(g.given) for g in worker.generates] == [0, 1]
    await room.close()


async def test_draining_hands_over_and_loses_nothing(tmp_path: Path) -> None:
    room = Room(tmp_path)
    worker = await room.worker("old", chunk=2)
    worker.generating.clear()
    reply = room.sample(3)
    await eventually(lambda: bool(worker.active))
    await worker.say(wire.Output(epoch=0, chunks=[worker.next_chunk("job-3")]))
    await worker.say(wire.Bye(epoch=0))
    await eventually(lambda: room.fleet.all()[0].state == "draining")
    new = await room.worker("new", chunk=2)
    check(await reply, 3)
    assert new.generates[0].given == text_of(3, 12)[0][:2]
    assert room.fleet.losses == 0
    await worker.die()
    assert room.fleet.all()[0].state == "gone"
    await room.close()


async def test_tenants_take_turns_whoever_came_first(tmp_path: Path) -> None:
    room = Room(tmp_path, dispatch_ahead=0)
    greedy = [room.sample(n, "greedy", "big") for n in range(30)]
    modest = [room.sample(n, "modest", "small") for n in range(3)]
    await settle()
    assert room.rollouts.position("modest", "small") == 1
    assert room.rollouts.position("nobody", "x") is None
    worker = await room.worker(max_rows=1)
    await asyncio.gather(*greedy, *modest)
    order = [generate.request.split("-")[0] for generate in worker.generates]
    assert order[:6] == ["big", "small"] * 3
    await room.close()


async def test_a_worker_holds_its_rows_and_a_few_more(tmp_path: Path) -> None:
    room = Room(tmp_path, dispatch_ahead=3)
    workers = [await room.worker(name, max_rows=2) for name in ("a", "b")]
    for worker in workers:
        worker.generating.clear()
    replies = [room.sample(number) for number in range(14)]
    await eventually(lambda: sum(len(w.active) for w in workers) == 10)
    assert room.rollouts.waiting() == 4
    for worker in workers:
        worker.generating.set()
    await asyncio.gather(*replies)
    await room.close()


async def test_cancelled_requests_are_aborted_parked_and_taken_up(tmp_path: Path) -> None:
    room = Room(tmp_path)
    worker = await room.worker(chunk=1)
    seed = next(s for s in range(100) if len(text_of(s, 12)[0]) == 12)
    reply, chat = room.sample(seed), room.sample(seed, job="chat", episode="")
    await eventually(lambda: sum(worker.sampled.values()) >= 6)
    worker.generating.clear()
    await settle()
    received = room.rollouts.sampled
    for task in (reply, chat):
        task.cancel()
    await asyncio.gather(reply, chat, return_exceptions=True)
    await eventually(lambda: not worker.active)
    worker.generating.set()
    check(await room.sample(seed), seed)
    check(await room.sample(seed, job="chat", episode=""), seed)
    given = [len(generate.given) for generate in worker.generates]
    assert given[:2] == [0, 0]
    assert given[2] > 0, "an episode's tokens are kept"
    assert given[3] == 0, "nobody comes back for a chat"
    assert room.rollouts.sampled == received + (12 - given[2]) + 12
    await room.close()


async def test_a_reply_that_came_with_the_cancellation_is_kept(tmp_path: Path) -> None:
    room = Room(tmp_path)
    worker = await room.worker(chunk=20)
    worker.generating.clear()
    reply = room.sample(3)
    await eventually(lambda: bool(worker.active))
    output = wire.Output(epoch=worker.epoch, chunks=[worker.next_chunk("job-3")])
    room.rollouts._output(room.fleet.all()[0], output)  # the same moment: before the waiting task has run
    reply.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reply
    check(await room.sample(3), 3)
    assert len(worker.generates) == 1
    room.rollouts.forget("job")
    await room.close()


async def test_a_wait_for_a_worker_has_its_deadline(tmp_path: Path) -> None:
    room = Room(tmp_path, worker_wait_seconds=60)
    reply = room.sample(1)
    await settle()
    await room.clock.advance(58)
    assert not reply.done()
    await room.clock.advance(10)
    with pytest.raises(Unavailable, match="no worker serves smollm2-135m-instruct for rollout"):
        await reply
    assert room.rollouts.waiting() == 0
    late = await room.worker("late")
    check(await room.sample(1), 1)
    assert len(late.generates) == 1
    await room.close()


async def test_a_worker_that_beats_and_says_nothing_is_named(tmp_path: Path) -> None:
    room = Room(tmp_path, silence_seconds=60, suspect_seconds=10**6, stuck_seconds=10**6)
    worker = await room.worker()
    worker.generating.clear()
    reply = room.sample(1)
    await settle()
    await room.clock.advance(58)
    assert not reply.done()
    await room.clock.advance(10)
    with pytest.raises(GenerationFailed, match="worker worker sent nothing of it for 60 s"):
        await reply
    worker.generating.set()
    check(await room.sample(2), 2)
    await room.close()


async def test_a_worker_gets_new_tickets_for_what_it_was_given_only(tmp_path: Path) -> None:
    room = Room(tmp_path)
    worker = await room.worker()
    await room.sample(1)
    await worker.say(wire.Want(epoch=0, hash="f" * 64))
    await worker.say(wire.Want(epoch=0, hash=ADAPTER.hash))
    await eventually(lambda: bool(worker.other))
    assert [type(message) for message in worker.other] == [wire.Granted]
    assert worker.other[0].hash == ADAPTER.hash
    assert room.tickets.reads(worker.other[0].ticket, ADAPTER.hash)
    assert not room.tickets.reads(worker.other[0].ticket, "f" * 64)
    room.clock.now += 601
    assert not room.tickets.reads(worker.other[0].ticket, ADAPTER.hash)
    await room.close()


async def test_a_new_controller_takes_up_what_a_worker_still_holds(tmp_path: Path) -> None:
    room = Room(tmp_path, dispatch_ahead=0)
    await room.worker("a", max_rows=8)
    holder = ScriptedWorker(room.fleet.serve, room.tickets, "z", max_rows=8)
    room.workers.append(await holder.join(running=["job-5"]))
    replies = [room.sample(number) for number in range(8)]
    await asyncio.gather(*replies)
    assert "job-5" in {generate.request for generate in holder.generates}
    await room.close()
