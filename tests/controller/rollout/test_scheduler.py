"""Generation through workers that vanish, repeat themselves, come too late or talk nonsense."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.draws import examples
from tests.support.peers import ManualClock, ScriptedWorker, eventually, settle, text_of
from tests.support.room import beat, react
from tests.support.rules import split
from tests.support.work import work_of

from rookery import protocol
from rookery.aio import cancel_all
from rookery.controller.fleet.events import WorkerEvent, WorkerJoined
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.rollout.request import GenerationFailed, SamplingRequest, SamplingResult
from rookery.controller.rollout.scheduler import RolloutScheduler
from rookery.controller.weights.store import WeightStore
from rookery.controller.weights.tickets import Tickets
from rookery.errors import Unavailable
from rookery.settings import Settings
from rookery.simulation.clock import InlineWriter
from rookery.storage.artifacts import Artifacts

LINEAR = {"decode": [(1, 0.01), (64, 0.64)], "prefill": [(1, 1e-5), (512, 5e-3)]}
ADAPTER = protocol.AdapterRef(policy="p", version=7, hash="0" * 64, rank=8, alpha=16.0)


class Room:
    """A fleet and its rollouts, with nothing else around them."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.clock = ManualClock()
        changed, self.rules = split(changes)
        self.settings = Settings(data=folder, cache=folder, **changed)
        self.tickets = Tickets(Artifacts(folder / "artifacts"), self.clock, 600)
        self.fleet = Fleet(self.settings, self.clock, self.on_event)
        artifacts = self.tickets.artifacts
        self.weights = WeightStore(self.fleet, artifacts, InlineWriter(), self.clock)
        self.shares: dict[str, float] = {}
        """Of tenants."""
        self.rollouts = RolloutScheduler(
            self.fleet, self.weights, self.settings, self.clock, self.shares, rules=self.rules.rollouts
        )
        self.watches = [asyncio.create_task(watch()) for watch in (self.fleet.watch, self.rollouts.watch)]
        self.workers: list[ScriptedWorker] = []
        self.used: list[protocol.AdapterRef] = []
        """The versions that jobs sample from."""
        self.closed: set[str] = set()
        """Names of workers that get no rollouts."""

    def on_event(self, event: WorkerEvent) -> None:
        if isinstance(event, WorkerJoined) and event.worker.name in self.closed:
            self.rollouts.closed.add(event.worker)
        react(event, self.fleet, self.weights, in_use=self.used, rollouts=self.rollouts)

    def apply_closed(self) -> None:
        self.rollouts.closed = {worker for worker in self.fleet.all() if worker.name in self.closed}
        self.rollouts.on_closed_changed()

    async def worker(self, name: str = "worker", **script: Any) -> ScriptedWorker:
        worker = ScriptedWorker(self.fleet.serve, self.tickets, name, **script)
        self.workers.append(await worker.join())
        return worker

    def sample(
        self,
        number: int,
        tenant: str = "a",
        job: str = "job",
        on_tokens: Callable[[SamplingResult], None] | None = None,
        **changes: Any,
    ) -> asyncio.Task[SamplingResult]:
        fields: dict[str, Any] = {
            "request": f"{job}-{number}", "adapter": ADAPTER, "prompt": [1, 5, 6], "shared_prefix": 3, "max_tokens": 12,
            "temperature": 1.0, "seed": number, "stop_tokens": [2], "stop": [], "episode": f"e{number}",
        }  # fmt: skip
        flags = {name: changes.pop(name, False) for name in ("continues", "synchronous")}
        generate = protocol.Generate(**{**fields, **changes})
        request = SamplingRequest(tenant, job, "smollm2-135m-instruct", generate, **flags)
        return asyncio.create_task(self.rollouts.sample(request, on_tokens))

    async def close(self) -> None:
        for worker in self.workers:
            await worker.die()
        await cancel_all(*self.watches)


def check(reply: SamplingResult, seed: int, max_tokens: int = 12) -> None:
    tokens, logprobs, finish = text_of(seed, max_tokens)
    assert (reply.tokens, reply.logprobs, reply.finish) == (tokens, logprobs, finish)
    assert reply.versions == [7] * len(tokens)


def parts(seed: int, *spans: tuple[int, int]) -> list[protocol.TokenChunk]:
    """The samples for ``room.sample(seed)``, each from one token to another."""
    tokens, logprobs, _ = text_of(seed, 12)
    return [
        protocol.TokenChunk(
            request=f"job-{seed}", offset=at, tokens=tokens[at:end], logprobs=logprobs[at:end], version=7, policy="p"
        )
        for at, end in spans
    ]


async def test_a_result_has_the_tokens_that_the_worker_sampled(tmp_path: Path) -> None:
    room = Room(tmp_path)
    worker = await room.worker()
    for number, reply in enumerate(await asyncio.gather(*(room.sample(number) for number in range(20)))):
        check(reply, number)
    first = worker.generates[0]
    assert first.adapter is not None
    assert room.rollouts.sampled_tokens == sum(len(text_of(n, 12)[0]) for n in range(20))
    [known] = room.fleet.all()
    assert 0 < known.max_flush_tokens <= 12 * known.hello.max_rows, "what one flush brought is seen"
    await room.close()


@settings(max_examples=examples(150), suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        assert len(sampled) == room.rollouts.sampled_tokens == sum(len(text_of(n, 12)[0]) for n in range(requests))
        assert not room.rollouts.waiting()
        assert not any(room.rollouts.pool.outstanding(worker) for worker in room.fleet.all())
        await room.close()

    asyncio.run(run())


async def test_requests_of_a_lost_worker_go_first_to_the_least_loaded_worker(tmp_path: Path) -> None:
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

    def chunk(start: int, end: int, request: str = request, **changes: Any) -> protocol.Output:
        part = {"tokens": tokens[start:end], "logprobs": logprobs[start:end], "version": 7, "policy": "p", **changes}
        return protocol.Output(epoch=0, chunks=[protocol.TokenChunk(request=request, offset=start, **part)])

    await worker.say(chunk(0, 5))
    await worker.say(chunk(0, 5))
    await worker.say(chunk(3, 8))
    await worker.say(chunk(8, 12), epoch=worker.epoch - 1)
    await worker.say(chunk(0, 3, request="unknown"))
    await settle()
    assert room.rollouts.sampled_tokens == 8
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
    stale = protocol.TokenChunk(
        request="job-3", offset=2, tokens=[9], logprobs=[-1.0], version=7, policy="p", finish="stop"
    )
    await worker.say(protocol.Output(epoch=0, chunks=[stale]), epoch=old)
    await worker.say(protocol.Output(epoch=0, chunks=[stale]))
    await settle()
    assert not reply.done()
    assert (room.fleet.ignored_frames, room.rollouts.late_chunks) == (1, 1)
    other.generating.set()
    check(await reply, 3)
    await room.close()


@pytest.mark.parametrize("received", [0, 2])
async def test_tokens_in_flight_to_a_cancelled_caller_leave_no_gap(tmp_path: Path, received: int) -> None:
    """It gives up and returns meanwhile: the worker had gone further than was received."""
    room = Room(tmp_path)
    worker = await room.worker()
    worker.generating.clear()
    reply = room.sample(4)
    await eventually(lambda: bool(worker.active))
    if received:
        await worker.say(protocol.Output(epoch=0, chunks=parts(4, (0, received))))
        await eventually(lambda: room.rollouts.sampled_tokens == received)
    await cancel_all(reply)
    await worker.say(protocol.Output(epoch=0, chunks=parts(4, (received, received + 2))))  # nobody waits for it
    await settle()
    reply = room.sample(4)
    # said before the worker received of either
    await worker.say(protocol.Output(epoch=0, chunks=parts(4, (received + 2, received + 4))))
    await settle()
    assert not reply.done()
    assert (room.rollouts.sampled_tokens, room.rollouts.late_chunks) == (received, 2)
    worker.generating.set()
    check(await reply, 4)
    assert worker.generates[-1].prefix_tokens == parts(4, (0, received))[0].tokens
    await room.close()


@pytest.mark.parametrize(
    ("chunk", "problem"),
    [
        ({"offset": 1, "tokens": [5], "logprobs": [-1.0]}, "from 1, wanted"),
        ({"version": 6}, r"\('p', 6\)"),
        ({"policy": "q"}, r"\('q', 7\)"),
        ({"logprobs": []}, "wanted"),
        ({"finish": "error", "error": "no such luck"}, "no such luck"),
        ({"finish": "error"}, "gave no reason"),
    ],
)
async def test_invalid_chunks_fail_only_their_request(tmp_path: Path, chunk: dict[str, Any], problem: str) -> None:
    room = Room(tmp_path)
    worker = await room.worker()
    worker.generating.clear()
    bad, good = room.sample(1), room.sample(2)
    await eventually(lambda: len(worker.active) == 2)
    fields = {"offset": 0, "tokens": [5], "logprobs": [-1.0], "version": 7, "policy": "p", **chunk}
    await worker.say(protocol.Output(epoch=0, chunks=[protocol.TokenChunk(request="job-1", **fields)]))
    with pytest.raises(GenerationFailed, match=problem):
        await bad
    worker.active.pop("job-1")
    worker.generating.set()
    check(await good, 2)
    await room.close()


SCORED = {"prompt_logprobs": protocol.PromptLogprobs(logprobs=bytes(8))}
LONG = {"tokens": [5] * 4096, "logprobs": [-1.0] * 4096}


@pytest.mark.parametrize(
    "absurd",
    [{"logprobs": [math.nan]}, {"logprobs": [-math.inf]}, {"tokens": [-1]}, {"tokens": [1 << 31]}, LONG, SCORED],
)
async def test_worker_that_sends_absurd_tokens_loses_its_requests(tmp_path: Path, absurd: dict[str, Any]) -> None:
    """Another one continues them. After the third time a request fails."""
    room = Room(tmp_path)
    fields = {"offset": 0, "tokens": [5], "logprobs": [-1.0], "version": 7, "policy": "p", **absurd}
    output = protocol.Output(epoch=0, chunks=[protocol.TokenChunk(request="job-1", **fields)])
    hostile = await room.worker("hostile")
    hostile.generating.clear()
    replies = [room.sample(1), room.sample(2)]
    await eventually(lambda: len(hostile.active) == 2)
    await hostile.say(output)
    await eventually(lambda: room.fleet.bad_frames == 1)
    assert not any(reply.done() for reply in replies) and room.rollouts.sampled_tokens == 0
    good = await room.worker("good")
    for seed, reply in zip((1, 2), replies, strict=True):
        check(await reply, seed)
    assert room.rollouts.requeues["lost"] == 2
    await good.die()
    reply = room.sample(1)
    for _ in range(3):
        hostile = await room.worker("hostile")
        hostile.generating.clear()
        await eventually(lambda: "job-1" in hostile.active)  # noqa: B023
        await hostile.say(output)
        await settle()
    with pytest.raises(GenerationFailed, match="log-probability"):
        await reply
    await room.close()


async def test_a_rejected_request_resumes_at_another_worker(tmp_path: Path) -> None:
    room = Room(tmp_path)
    worker = await room.worker(chunk=1)
    worker.generating.clear()
    reply = room.sample(3)
    await eventually(lambda: bool(worker.active))
    chunk = worker.next_chunk("job-3")
    worker.active.clear()
    chunk.finish = "abort"
    await worker.say(protocol.Output(epoch=0, chunks=[chunk]))
    worker.generating.set()
    check(await reply, 3)
    assert [len(g.prefix_tokens) for g in worker.generates] == [0, 1]
    await room.close()


async def test_a_request_goes_to_each_worker_once_that_cannot_generate_it(tmp_path: Path) -> None:
    """A worker that refuses at once is always the emptiest one."""
    room = Room(tmp_path)
    small = [await room.worker(name) for name in "ab"]
    large = await room.worker("c", max_rows=1)
    for worker in small:
        worker.refuses = f"its cache is full on {worker.name}"
    replies = [room.sample(number) for number in range(4)]
    for number, reply in enumerate(await asyncio.gather(*replies)):
        check(reply, number)
    assert all(len(worker.generates) <= 4 for worker in small) and len(large.generates) == 4
    assert room.rollouts.requeues["rejected"] == sum(len(worker.generates) for worker in small)
    large.refuses = "its text is too long"
    with pytest.raises(GenerationFailed, match="its"):
        await room.sample(5)
    large.generating.clear()
    large.refuses = ""
    waits = room.sample(6)
    await eventually(lambda: bool(large.active))
    await large.die()
    room.workers.remove(large)
    await room.clock.advance(60)
    with pytest.raises(GenerationFailed, match="its cache is full on"):
        await waits
    await room.close()


async def test_requests_of_a_draining_worker_resume_elsewhere(tmp_path: Path) -> None:
    room = Room(tmp_path)
    worker = await room.worker("old", chunk=2)
    worker.generating.clear()
    reply = room.sample(3)
    await eventually(lambda: bool(worker.active))
    await worker.say(protocol.Output(epoch=0, chunks=[worker.next_chunk("job-3")]))
    await worker.say(protocol.Draining(epoch=0))
    await eventually(lambda: room.fleet.all()[0].state == "draining")
    new = await room.worker("new", chunk=2)
    check(await reply, 3)
    assert new.generates[0].prefix_tokens == text_of(3, 12)[0][:2]
    assert (room.rollouts.migrated, room.rollouts.migrated_tokens, room.fleet.losses) == (1, 2, 0)
    await worker.die()
    assert room.fleet.all()[0].state == "gone"
    await room.close()


async def test_tenants_take_turns_in_any_order_of_arrival(tmp_path: Path) -> None:
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


async def test_a_request_carries_the_weight_that_its_tenant_has_when_it_is_assigned(tmp_path: Path) -> None:
    room = Room(tmp_path)
    waiting = [room.sample(0, "heavy", "one"), room.sample(1, "usual", "two")]
    await settle()
    room.shares["heavy"] = 3.0
    worker = await room.worker()
    await asyncio.gather(*waiting)
    assert {generate.tenant: generate.weight for generate in worker.generates} == {"heavy": 3.0, "usual": 1.0}
    await room.close()


@pytest.mark.parametrize(("synchronous", "context_order"), [(True, True), (True, False), (False, True)])
async def test_a_synchronous_job_begins_with_a_probe_of_each_group(
    tmp_path: Path, synchronous: bool, context_order: bool
) -> None:
    """Then with the group whose probe was longest, while another tenant gets its share as ever."""
    room = Room(tmp_path, dispatch_ahead=0, context_order=context_order)
    lengths = {seed: len(text_of(seed, 12)[0]) for seed in range(100)}
    short, longest = (next(s for s in lengths if lengths[s] == length) for length in (3, 12))
    seeds = [short, 101, 102, longest, 104, 105]
    replies = [room.sample(seed, group="ab"[number // 3], synchronous=synchronous) for number, seed in enumerate(seeds)]
    others = [room.sample(seed, "other", "small") for seed in range(3)]
    worker = await room.worker(max_rows=1)
    await settle()
    assert room.rollouts.queues.active_orders() == (synchronous and context_order)
    await asyncio.gather(*replies, *others)
    begun = [generate.request for generate in worker.generates]
    assert {request.split("-")[0] for request in begun[:2]} == {"job", "small"}
    wanted = [short, longest, 104, 105, 101, 102] if synchronous and context_order else seeds
    assert [request for request in begun if request.startswith("job")] == [f"job-{seed}" for seed in wanted]
    assert room.rollouts.queues.probes == 2 * (synchronous and context_order)
    room.rollouts.close_job("job")
    assert not room.rollouts.queues.orders
    await room.close()


async def test_a_worker_holds_its_rows_and_a_few_more(tmp_path: Path) -> None:
    """However many rollouts a job has; and chats, which do not wait for rollouts, as many as it has rows."""
    room = Room(tmp_path, dispatch_ahead=3)
    workers = [await room.worker(name, max_rows=2) for name in ("a", "b")]
    for worker in workers:
        worker.generating.clear()
    replies = [room.sample(number) for number in range(14)]
    await eventually(lambda: sum(len(w.active) for w in workers) == 10)
    assert room.rollouts.waiting() == 4
    replies += [room.sample(number, "a", "chat", client=True, episode="") for number in range(20, 29)]
    await eventually(lambda: sum(len(w.active) for w in workers) == 14)
    await settle()
    assert room.rollouts.waiting() == 9
    assert [room.rollouts.pool.outstanding(worker) for worker in room.fleet.all()] == [7, 7]
    for worker in workers:
        worker.generating.set()
    await asyncio.gather(*replies)
    await room.close()


async def test_cancelled_requests_are_aborted_and_resume_from_their_tokens(tmp_path: Path) -> None:
    room = Room(tmp_path)
    worker = await room.worker(chunk=1)
    seed = next(s for s in range(100) if len(text_of(s, 12)[0]) == 12)
    reply, chat = room.sample(seed), room.sample(seed, job="chat", episode="")
    await eventually(lambda: sum(worker.sampled.values()) >= 6)
    worker.generating.clear()
    await settle()
    received = room.rollouts.sampled_tokens
    for task in (reply, chat):
        task.cancel()
    await asyncio.gather(reply, chat, return_exceptions=True)
    await eventually(lambda: not worker.active)
    worker.generating.set()
    check(await room.sample(seed), seed)
    check(await room.sample(seed, job="chat", episode=""), seed)
    given = [len(generate.prefix_tokens) for generate in worker.generates]
    assert given[:2] == [0, 0]
    assert given[2] > 0, "an episode's tokens are kept"
    assert given[3] == 0, "nobody comes back for a chat"
    assert room.rollouts.sampled_tokens == received + (12 - given[2]) + 12
    await room.close()


async def test_a_reply_that_came_with_the_cancellation_is_kept(tmp_path: Path) -> None:
    room = Room(tmp_path)
    worker = await room.worker(chunk=20)
    worker.generating.clear()
    reply = room.sample(3)
    await eventually(lambda: bool(worker.active))
    output = protocol.Output(epoch=worker.epoch, chunks=[worker.next_chunk("job-3")])
    room.rollouts.on_output(room.fleet.all()[0], output)  # the same moment: before the waiting task has run
    reply.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reply
    check(await room.sample(3), 3)
    assert len(worker.generates) == 1
    room.rollouts.close_job("job")
    await room.close()


async def test_the_time_of_a_frame_is_charged_to_the_tenants_of_its_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker's connection is nobody's: its frames carry the tokens of all tenants, and are decoded for them."""
    charged: dict[str, float] = {}
    monkeypatch.setattr(asyncio.get_running_loop(), "charge", charged.__setitem__, raising=False)
    room = Room(tmp_path)
    worker = await room.worker(chunk=20)
    worker.generating.clear()
    replies = [room.sample(number, tenant="ab"[number]) for number in range(2)]
    await eventually(lambda: len(worker.active) == 2)
    [known] = room.fleet.all()
    await worker.say(beat())
    await eventually(lambda: known.decoding > 0)
    known.decoding = 1000.0
    first, second = (worker.next_chunk(f"job-{number}") for number in range(2))
    room.rollouts.on_output(known, protocol.Output(epoch=worker.epoch, chunks=[first, second]))
    entries = [1 + len(chunk.tokens) for chunk in (first, second)]
    for tenant, count in zip("ab", entries, strict=True):
        assert charged[tenant] == pytest.approx(1000.0 * count / sum(entries), abs=10.0)
    await asyncio.gather(*replies)
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


async def test_a_worker_that_sends_heartbeats_but_no_tokens_is_named(tmp_path: Path) -> None:
    room = Room(tmp_path, request_timeout_seconds=60, suspect_seconds=10**6, stuck_seconds=10**6)
    worker = await room.worker()
    worker.generating.clear()
    reply = room.sample(1)
    await settle()
    await room.clock.advance(58)
    assert not reply.done()
    await room.clock.advance(10)
    with pytest.raises(GenerationFailed, match="worker worker sent no tokens for 60 s"):
        await reply
    worker.generating.set()
    check(await room.sample(2), 2)
    await room.close()


@pytest.mark.parametrize(("waiting", "fails"), [(1, False), (0, True)], ids=["it waits there", "nothing waits there"])
async def test_a_request_may_wait_for_a_row_of_a_worker_that_computes(
    tmp_path: Path, waiting: int, fails: bool
) -> None:
    room = Room(tmp_path, request_timeout_seconds=60, suspect_seconds=10**6, stuck_seconds=10**6)
    worker = await room.worker()
    [known] = room.fleet.all()
    worker.generating.clear()
    reply = room.sample(1)
    for number in range(20):
        room.rollouts.on_heartbeat(known, beat(active=1, waiting=waiting, generated=100 * number))
        await room.clock.advance(10)
    assert reply.done() is fails
    if fails:
        with pytest.raises(GenerationFailed, match="sent no tokens"):
            await reply
    else:
        worker.generating.set()
        check(await reply, 1)
    await room.close()


async def test_a_worker_gets_other_sources_only_of_artifacts_that_its_work_names(tmp_path: Path) -> None:
    room = Room(tmp_path)
    worker = await room.worker()
    await room.sample(1)
    for digest in ("f" * 64, ADAPTER.hash):
        await worker.say(protocol.SourcesRequest(epoch=0, hash=digest, failed="http://a:1"))
    await eventually(lambda: any(isinstance(message, protocol.Sources) for message in worker.other))
    answers = [message for message in worker.other if isinstance(message, protocol.Sources)]
    assert answers == [protocol.Sources(hash=ADAPTER.hash, sources=[])], "only the service has it"
    await room.close()


async def test_a_new_controller_resumes_requests_that_a_worker_still_holds(tmp_path: Path) -> None:
    room = Room(tmp_path, dispatch_ahead=0)
    await room.worker("a", max_rows=8)
    holder = ScriptedWorker(room.fleet.serve, room.tickets, "z", max_rows=8)
    room.workers.append(await holder.join(running=["job-5"]))
    replies = [room.sample(number) for number in range(8)]
    await asyncio.gather(*replies)
    assert "job-5" in {generate.request for generate in holder.generates}
    await room.close()


async def test_a_resumption_expires(tmp_path: Path) -> None:
    """A worker drops requests that nobody asked for in time; later ones wait until it is open."""
    room = Room(tmp_path, resume_seconds=15)
    room.closed = {"worker"}
    holder = ScriptedWorker(room.fleet.serve, room.tickets)
    room.workers.append(await holder.join(running=["job-1", "job-2", "job-3", "another-1"]))
    room.clock.now += 14
    check(await room.sample(1), 1)
    room.clock.now += 2
    late = room.sample(2)
    await settle()
    assert room.rollouts.waiting() == 1
    assert [generate.request for generate in holder.generates] == ["job-1"]
    room.closed.clear()
    room.apply_closed()
    check(await late, 2)
    assert set(room.rollouts.resumptions) == {"job-3", "another-1"}
    room.rollouts.close_job("job")
    assert set(room.rollouts.resumptions) == {"another-1"}
    await room.close()


# --- versions that change under way, and who may take what ------------------------------------------------------------

NEWER = protocol.AdapterRef(policy="p", version=8, hash="1" * 64, rank=8, alpha=16.0)


def full(count: int) -> list[int]:
    """Seeds whose texts have all twelve tokens."""
    return [seed for seed in range(1000) if len(text_of(seed, 12)[0]) == 12][:count]


async def send(worker: ScriptedWorker, request: str, finish: str | None = None) -> protocol.TokenChunk:
    """One chunk of the request; ``finish`` instead of its own. Returns the chunk."""
    chunk = worker.next_chunk(request)
    if finish is not None:
        worker.active.pop(request, None)
        chunk.finish = finish  # type: ignore[assignment]
    await worker.say(protocol.Output(epoch=0, chunks=[chunk]))
    return chunk


@pytest.mark.parametrize("in_flight", ["switch", "recompute"])
async def test_a_new_version_reaches_running_waiting_and_retained_requests(tmp_path: Path, in_flight: Any) -> None:
    room = Room(tmp_path, dispatch_ahead=0)
    worker = await room.worker(max_rows=2, chunk=4)
    worker.generating.clear()
    runs, waits, finishes, parked = full(4)
    away = room.sample(parked, in_flight=in_flight)
    await eventually(lambda: bool(worker.active))
    await send(worker, f"job-{parked}")
    await eventually(lambda: room.rollouts.sampled_tokens == 4)
    await cancel_all(away)

    replies = [room.sample(runs, in_flight=in_flight), room.sample(finishes)]
    await eventually(lambda: len(worker.active) == 2)
    replies.append(room.sample(waits, in_flight=in_flight))
    other = room.sample(waits, job="another", in_flight=in_flight)
    await settle()
    for seed in (runs, finishes):
        await send(worker, f"job-{seed}")
    await eventually(lambda: room.rollouts.sampled_tokens == 12)
    room.rollouts.switch("job", NEWER, recompute=in_flight == "recompute")
    room.rollouts.switch("job", ADAPTER, recompute=False)  # older: nobody goes back
    late = worker.next_chunk(f"job-{runs}")  # sampled before the worker received of it
    await worker.say(protocol.Output(epoch=0, chunks=[late]))
    await settle()
    [switch] = worker.other
    assert (switch.request, switch.recompute) == (f"job-{runs}", in_flight == "recompute")
    worker.generating.set()
    replies.append(room.sample(parked, in_flight=in_flight))  # its episode knows the old one only
    texts = [(reply.tokens, reply.versions) for reply in await asyncio.gather(*replies)]
    assert [tokens for tokens, _ in texts] == [text_of(s, 12)[0] for s in (runs, finishes, waits, parked)]
    assert [versions for _, versions in texts] == [[7] * 8 + [8] * 4, [7] * 12, [8] * 12, [7] * 4 + [8] * 8]
    assert (await other).versions == [7] * 12, "another job's stays"
    await room.close()


async def test_a_retained_request_keeps_no_base_model_in_use(tmp_path: Path) -> None:
    room = Room(tmp_path)
    worker = await room.worker()
    worker.generating.clear()
    seed = full(1)[0]
    waits = room.sample(seed)
    await eventually(lambda: bool(worker.active))
    assert room.rollouts.models() == {"smollm2-135m-instruct"}
    await worker.say(protocol.Output(epoch=0, chunks=parts(seed, (0, 3))))
    await eventually(lambda: room.rollouts.sampled_tokens == 3)
    await cancel_all(waits)
    assert room.rollouts.requests.has(job="job") and not room.rollouts.models(), "its tokens are retained"
    again = room.sample(seed)
    await settle()
    assert room.rollouts.models() == {"smollm2-135m-instruct"}
    worker.generating.set()
    check(await again, seed)
    assert not room.rollouts.models()
    await room.close()


async def test_the_end_of_an_episode_drops_its_tokens_and_looks_at_no_other_request(tmp_path: Path) -> None:
    """A job has thousands of requests, and as many ends of episodes in a step."""
    room = Room(tmp_path)
    worker = await room.worker()
    worker.generating.clear()
    seed = full(1)[0]
    waits = room.sample(seed, request="job-g7-1.0")
    await eventually(lambda: bool(worker.active))
    chunks = [msgspec.structs.replace(chunk, request="job-g7-1.0") for chunk in parts(seed, (0, 3))]
    await worker.say(protocol.Output(epoch=0, chunks=chunks))
    await eventually(lambda: room.rollouts.sampled_tokens == 3)
    await cancel_all(waits)
    for job, episode in (("job", "job-g7-10"), ("job", "job-g7"), ("other", "job-g7-1"), ("job", "")):
        room.rollouts.close_episode(job, episode)
        assert room.rollouts.requests.has(job="job"), "its tokens are retained"
    room.rollouts.close_episode("job", "job-g7-1")
    assert not room.rollouts.requests
    others, costs = list[asyncio.Task[SamplingResult]](), list[int]()

    async def end() -> None:
        room.rollouts.close_episode("job", "job-g7-1")

    for _ in range(2):
        others += [room.sample(number, request=f"job-g{len(others) + number}-0.0") for number in range(50)]
        await settle()
        costs.append(await work_of(end, "controller/rollout", "controller/indexed"))
    assert costs[0] == costs[1] > 0
    await cancel_all(*others)
    await room.close()


@pytest.mark.parametrize(
    "changes", [{"prompt": [1, 5, 7]}, {"temperature": 0.5}, {"max_tokens": 11}, {"adapter": NEWER}, {"seed": 10**6}]
)
async def test_a_resubmitted_request_with_another_prompt_starts_over(tmp_path: Path, changes: dict[str, Any]) -> None:
    """As after a new reset of its environment: nothing of before is gone on with, or taken for it."""
    room = Room(tmp_path)
    worker = await room.worker()
    worker.generating.clear()
    seed = full(1)[0]
    reply = room.sample(seed)
    await eventually(lambda: bool(worker.active))
    await worker.say(protocol.Output(epoch=0, chunks=parts(seed, (0, 3))))
    await eventually(lambda: room.rollouts.sampled_tokens == 3)
    await cancel_all(reply)
    reply = room.sample(seed, **changes)
    await eventually(lambda: len(worker.generates) == 2)
    again = worker.generates[1]
    assert again.prefix_tokens == []
    [late] = parts(seed, (3, 6))  # sampled for the first submission
    late.assignment = worker.generates[0].assignment
    await worker.say(protocol.Output(epoch=0, chunks=[late]))
    await settle()
    assert (room.rollouts.sampled_tokens, room.rollouts.late_chunks) == (3, 1)
    worker.generating.set()
    got = await reply
    assert again.adapter is not None
    assert (got.tokens, got.logprobs, got.finish) == text_of(again.seed, again.max_tokens)
    assert set(got.versions) == {again.adapter.version}
    await room.close()


@pytest.mark.parametrize(("in_flight", "claims"), [("switch", True), ("finish", True), ("switch", False)])
async def test_older_versions_are_accepted_only_from_resumed_requests(
    tmp_path: Path, in_flight: Any, claims: bool
) -> None:
    """A service that was restarted knows the newest version alone; its worker sampled some tokens before that."""
    room = Room(tmp_path)
    seed = full(1)[0]
    worker = ScriptedWorker(room.fleet.serve, room.tickets)
    worker.generating.clear()
    room.workers.append(await worker.join(running=[f"job-{seed}"] if claims else []))
    reply = room.sample(seed, adapter=NEWER, in_flight=in_flight)
    await eventually(lambda: bool(worker.active))
    await worker.say(protocol.Output(epoch=0, chunks=parts(seed, (0, 3))))
    worker.active[f"job-{seed}"] = (worker.active[f"job-{seed}"][0], 3)
    await settle()
    worker.generating.set()
    if claims and in_flight == "switch":
        assert (await reply).versions == [7] * 3 + [8] * 9
    else:
        with pytest.raises(GenerationFailed, match="wanted"):
            await reply
    await room.close()


async def test_a_closed_gate_admits_only_clients_requests(tmp_path: Path) -> None:
    room = Room(tmp_path)
    room.closed = {"one"}
    one = await room.worker("one")
    replies = [room.sample(number) for number in range(3)]
    chat = room.sample(9, "b", "chat", client=True, episode="")
    check(await chat, 9)
    await settle()
    assert room.rollouts.waiting() == 3
    [known] = room.fleet.all()
    assert not room.rollouts.pool.outstanding(known)
    room.rollouts.closed.clear()
    room.rollouts.on_closed_changed(known)
    for number, reply in enumerate(await asyncio.gather(*replies)):
        check(reply, number)
    assert len(one.generates) == 4
    await room.close()


async def test_migrated_requests_resume_elsewhere_with_their_tokens(tmp_path: Path) -> None:
    """Requests that do not decode yet move first, then those with the fewest tokens; clients' stay."""
    room = Room(tmp_path, dispatch_ahead=0)
    one = await room.worker("one", max_rows=4, chunk=2)
    one.generating.clear()
    seeds = full(5)
    replies = [room.sample(seed, client=seed == seeds[4]) for seed in seeds]
    await eventually(lambda: len(one.active) == 5)
    for times, seed in ((3, seeds[0]), (1, seeds[1]), (2, seeds[2])):
        for _ in range(times):
            await send(one, f"job-{seed}")
    await eventually(lambda: room.rollouts.sampled_tokens == 12)
    room.closed = {"one"}
    room.apply_closed()
    [first] = room.fleet.all()
    assert room.rollouts.pool.outstanding(first) == 5
    assert room.rollouts.migrate(first, limit=2) == 2
    assert (room.rollouts.pool.outstanding(first), room.rollouts.waiting()) == (3, 2)
    two = await room.worker("two", chunk=2)
    assert room.rollouts.migrate(first) == 2
    assert room.rollouts.migrate(first) == 0, "the chat is all that is left"
    assert room.rollouts.requeues["offloaded"] == 4
    await eventually(lambda: len(two.generates) == 4)
    given = [(g.request, len(g.prefix_tokens)) for g in two.generates]
    assert given == [(f"job-{seeds[n]}", tokens) for n, tokens in ((3, 0), (1, 2), (2, 4), (0, 6))]
    one.generating.set()
    for seed, reply in zip(seeds, await asyncio.gather(*replies), strict=True):
        check(reply, seed)
    assert {g.request for g in one.generates if g.reserved} == {f"job-{seeds[4]}"}
    await room.close()


@pytest.mark.parametrize("why_not", ["", "off", "no gain", "no memory", "no adapter", "gone"])
async def test_a_chunk_continues_where_that_saves_time(tmp_path: Path, why_not: str) -> None:
    """From the tokens received, under the same version; no token is sampled twice."""
    room = Room(tmp_path, rollout_chunk_tokens=0 if why_not == "off" else 4)
    one = await room.worker("one", chunk=1)
    one.generating.clear()
    seeds = [seed for seed in range(200) if len(text_of(seed, 12)[0]) == 12][:8]
    replies = [room.sample(seed) for seed in seeds]
    await eventually(lambda: len(one.active) == 8)
    for seed in seeds:
        await one.say(protocol.Output(epoch=0, chunks=parts(seed, (0, 3))))
        one.active[f"job-{seed}"] = (one.active[f"job-{seed}"][0], 3)
    two = await room.worker("two", chunk=1)
    two.generating.clear()
    fields = {"costs": {} if why_not == "no gain" else LINEAR, "free_tokens": 2 if why_not == "no memory" else 1000}
    for worker in (one, two):
        await worker.say(beat(active=len(worker.active), **fields))
        if why_not != "no adapter":
            await worker.say(protocol.AdaptersCached(epoch=0, hashes=[ADAPTER.hash]))
    await settle()
    for seed in seeds[:6]:
        await one.say(protocol.Output(epoch=0, chunks=parts(seed, (3, 4))))
        if f"job-{seed}" in one.active:
            one.active[f"job-{seed}"] = (one.active[f"job-{seed}"][0], 4)
        await settle()
        if why_not == "gone" and seed == seeds[2]:
            await two.die()
    moved = {"": 4, "gone": 3}.get(why_not, 0)  # then both have as many
    assert room.rollouts.requeues["divided"] == moved
    if not why_not:
        assert [len(g.prefix_tokens) for g in two.generates] == [4] * moved
        assert {g.adapter.version for g in two.generates if g.adapter is not None} == {7}
    for worker in (one, two):
        worker.generating.set()
    for seed, reply in zip(seeds, await asyncio.gather(*replies), strict=True):
        check(reply, seed)
    assert room.rollouts.sampled_tokens == 12 * len(seeds), "no token is regenerated"
    assert not any(room.rollouts.pool.slots(worker).load[1] for worker in room.fleet.all())
    await room.close()


async def test_a_worker_that_catches_up_gets_requests_for_cached_adapters(tmp_path: Path) -> None:
    room = Room(tmp_path)
    room.used = [ADAPTER, NEWER]
    worker = ScriptedWorker(room.fleet.serve, room.tickets)
    worker.pulling.clear()
    worker.adapters.add(ADAPTER.hash)
    room.workers.append(await worker.join())
    old, new, base = room.sample(1), room.sample(2, adapter=NEWER), room.sample(3, job="plain", adapter=None)
    check(await old, 1)
    assert (await base).versions == [0] * len(text_of(3, 12)[0])
    await settle()
    assert room.fleet.all()[0].state == "catching up"
    assert not new.done() and room.rollouts.waiting() == 1
    worker.pulling.set()
    assert (await new).versions == [8] * len(text_of(2, 12)[0])
    await room.close()


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**32))
def test_every_request_ends_once_with_its_text_under_all_events(tmp_path: Path, seed: int) -> None:
    """Workers come, go, return with their requests, drain, reject, send heartbeats, and are closed; requests are moved,
    divided, cancelled and submitted again; versions change; chunks of earlier assignments arrive again."""

    async def run() -> None:
        random = Random(seed)
        room = Room(tmp_path, dispatch_ahead=random.randint(0, 3), rollout_chunk_tokens=random.randint(0, 3))
        rollouts, closed = room.rollouts, room.closed
        asked: dict[int, dict[str, Any]] = {}
        replies: dict[int, asyncio.Task[SamplingResult]] = {}
        alive: list[ScriptedWorker] = []
        sent: list[tuple[ScriptedWorker, protocol.TokenChunk]] = []
        head = ADAPTER

        def sample(number: int) -> None:
            replies[number] = room.sample(number, **{**asked[number], "adapter": asked[number]["adapter"]})

        async def act() -> None:
            nonlocal head
            running = [(worker, request) for worker in alive for request in worker.active]
            match random.randrange(15):
                case 0:
                    number = len(asked)
                    first = random.random() < 0.2
                    in_flight = "finish" if first else random.choice(["finish", "switch", "recompute"])
                    asked[number] = {
                        "adapter": head, "in_flight": in_flight, "client": first, "tenant": random.choice("ab"),
                        "episode": "" if first else f"e{number}",
                    }  # fmt: skip
                    sample(number)
                case 1 if len(alive) < 4:
                    worker = await room.worker(f"w{len(room.workers)}", max_rows=random.randint(1, 4), chunk=1)
                    worker.generating.clear()
                    alive.append(worker)
                case 2 if alive and random.random() < 0.5:
                    await alive.pop(random.randrange(len(alive))).die()
                case 3 if alive and random.random() < 0.3:
                    worker = alive.pop(random.randrange(len(alive)))
                    await worker.say(protocol.Draining(epoch=0))
                case 4:
                    head = msgspec.structs.replace(head, version=head.version + 1, hash=f"{head.version:064}")
                    rollouts.switch("job", head, recompute=random.random() < 0.5)
                case 5 if alive:
                    closed.symmetric_difference_update({random.choice(alive).name})
                    room.apply_closed()
                case 6 if alive:
                    known = room.fleet.get(random.choice(alive).name)
                    assert known is not None
                    before = rollouts.pool.outstanding(known)
                    limit = random.choice([None, 0, 1, 2])
                    assert rollouts.migrate(known, limit) <= min(before, before if limit is None else limit)
                case 7 if alive:
                    worker = random.choice(alive)
                    active = random.randint(0, len(worker.active))
                    fields = {"active": active, "waiting": len(worker.active) - active}
                    await worker.say(beat(**fields, costs=LINEAR, free_tokens=random.choice([0, 1000])))
                    await worker.say(protocol.AdaptersCached(epoch=0, hashes=[ADAPTER.hash, head.hash]))
                case 8 if replies and random.random() < 0.4:
                    number = random.choice(list(replies))
                    if not replies[number].done():
                        await cancel_all(replies[number])
                        sample(number)
                case 9 if running:
                    await send(*random.choice(running), finish="abort")
                case 10 if alive and random.random() < 0.5:
                    worker = random.choice(alive)
                    held = list(worker.active)
                    await worker.die()
                    worker.active.clear()
                    await worker.join(running=held)
                case 11 | 12 if sent:
                    worker, old = random.choice(sent)
                    now = rollouts.requests.get(("job", old.request))
                    over = now is None or not now.at_worker or now.assignment.name != old.assignment
                    finish = random.choice(["", "stop", "abort", "error"]) if over else ""
                    if worker in alive:
                        again = msgspec.structs.replace(old, finish=finish)
                        await worker.say(protocol.Output(epoch=0, chunks=[again]))
                case _ if running:
                    worker, request = random.choice(running)
                    sent.append((worker, await send(worker, request)))
            if random.random() < 0.5:
                await settle(3)

        for _ in range(random.randint(20, 150)):
            await act()
        closed.clear()
        rollouts.on_closed_changed()
        for worker in alive:
            worker.generating.set()
        await room.worker("last")
        for number, task in replies.items():
            reply, wanted = await task, text_of(number, 12)
            assert (reply.tokens, reply.logprobs, reply.finish) == wanted
            begun = asked[number]["adapter"].version
            assert reply.versions == sorted(reply.versions) and reply.versions[0] >= begun
            if asked[number]["in_flight"] == "finish":
                assert set(reply.versions) == {begun}
        names = [generate.assignment for worker in room.workers for generate in worker.generates]
        assert len(set(names)) == len(names), "no assignment has the name of an earlier one"
        await settle()
        assert not rollouts.waiting() and not rollouts.requests
        assert not any(
            rollouts.pool.outstanding(worker) or rollouts.pool.slots(worker).load[1] for worker in room.fleet.all()
        )
        kept = sum(len(text_of(number, 12)[0]) for number in asked)
        assert rollouts.sampled_tokens >= kept
        # only clients' requests drop tokens: when they are cancelled
        if not any(request["client"] for request in asked.values()):
            assert rollouts.sampled_tokens == kept, "every token counted once"
        await room.close()

    asyncio.run(run())


# --- the cost of a frame ----------------------------------------------------------------------------------------------


def steps_of(call: Callable[[], None]) -> int:
    """Instructions of the interpreter that the call executes."""
    steps = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal steps
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        steps += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return steps


async def frame_costs(folder: Path, count: int) -> dict[str, int]:
    """Instructions that each kind of frame takes with so many workers and as many jobs."""
    room = Room(folder, heartbeat_seconds=60.0)
    for number in range(count):
        await room.worker(f"w{number}", address=f"http://w{number}:1", kind="reserved")
    for worker in room.workers:
        worker.generating.clear()
    tasks = [room.sample(number, job=f"job{number}") for number in range(count)]
    await settle(3)
    room.weights.publish("smollm2-135m-instruct", ADAPTER)
    last = room.fleet.get(f"w{count - 1}")
    assert last is not None
    held = next(one for one in room.rollouts.requests.values() if one.at_worker and one.assignment.worker is last)
    reply = protocol.TokenChunk(
        request=held.request.id, assignment=held.assignment.name, offset=0, tokens=[5], logprobs=[-1.0], version=7,
        policy="p",
    )  # fmt: skip
    refusal = msgspec.structs.replace(reply, offset=1, tokens=[], logprobs=[], finish="abort", error="no memory")
    hashes, weights, rollouts = [ADAPTER.hash], room.weights, room.rollouts
    half = [room.fleet.get(f"w{number}") for number in range(count // 2)]
    for one in half:
        assert one is not None
        weights.on_cached(one, protocol.AdaptersCached(epoch=0, hashes=hashes))
    frames: dict[str, Callable[[], None]] = {
        "adapters cached": lambda: weights.on_cached(last, protocol.AdaptersCached(epoch=0, hashes=hashes)),
        "adapters evicted": lambda: weights.on_evicted(last, protocol.AdaptersEvicted(epoch=0, hashes=hashes)),
        "heartbeat": lambda: rollouts.on_heartbeat(last, beat()),
        "tokens": lambda: rollouts.on_output(last, protocol.Output(epoch=0, chunks=[reply])),
        "refusal": lambda: rollouts.on_output(last, protocol.Output(epoch=0, chunks=[refusal])),
        "held request": lambda: (last.active_requests.add("other-1"), rollouts.on_worker_changed(last))[1],
    }
    costs = {name: steps_of(call) for name, call in frames.items()}
    await cancel_all(*tasks)
    await room.close()
    return costs


@pytest.mark.heavy
async def test_the_cost_of_a_frame_does_not_grow_with_workers_or_jobs(tmp_path: Path) -> None:
    few, many = await frame_costs(tmp_path / "few", 10), await frame_costs(tmp_path / "many", 1000)
    assert few.keys() == many.keys()
    assert {name: (few[name], many[name]) for name in few if many[name] > 2 * few[name] + 100} == {}
