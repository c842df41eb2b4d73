"""Generation: requests go in, complete replies come out, whatever happens to the workers in between.

* Every request ends exactly once: with its reply, with an error, or by its caller's cancellation.
* Tokens that arrived are never generated again: when a worker is lost or gives a request up, it goes to another one
  with the tokens received so far, ahead of those that never ran. A cancelled request of an episode parks its tokens,
  and takes them up when it returns.
* Tenants take turns; a worker holds at most its rows and a few more, everything else waits here, where it can be seen.
  Requests that somebody waits for go ahead of the others, on a bounded share of each worker's rows.
* A chunk counts only from the worker that the request is with, under that worker's present epoch.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from rookery import wire
from rookery.controller.fleet import Fleet, Worker
from rookery.controller.ports import Clock
from rookery.controller.tickets import Tickets
from rookery.errors import RookeryError, Unavailable
from rookery.scheduling.fairness import Lanes, RoundRobin
from rookery.scheduling.routing import Candidate, route
from rookery.settings import Settings

log = logging.getLogger("rookery.controller.rollouts")


class GenerationFailed(RookeryError):
    """The engine could not generate this request; another attempt would end the same."""


@dataclass(frozen=True)
class Request:
    """One generation. ``id`` is the same after any restart, ``seed`` and position fix the noise."""

    id: str
    tenant: str
    job: str
    model: str
    adapter: wire.AdapterRef | None
    prompt: list[int]
    shared: int
    max_tokens: int
    temperature: float
    seed: int
    stop_tokens: list[int]
    stop: list[str]
    episode: str = ""
    first: bool = False
    """Somebody waits for it."""
    continues: bool = False
    """A later turn: it goes before its job's others, so that episodes which have begun end, and groups with them."""
    scores: int = 0
    """How many of the prompt's last tokens are scored too …"""
    top: int = 0
    """… each with this many of the likeliest tokens in its place."""
    in_flight: Literal["finish", "switch", "recompute"] = "finish"
    """What it does when a newer version of its policy is published. Where that is not ``finish`` its tokens may be of
    any version up to its adapter's: also of those that ran before a restart of the service."""


@dataclass
class Reply:
    """What was sampled: parallel lists, one entry per token."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: str = ""
    queued: float = 0.0
    """Seconds for which it waited for a place in a worker."""
    scores: list[wire.Score] = field(default_factory=list)
    """Of the prompt's last tokens, where asked for."""


@dataclass(eq=False)
class _Live:
    request: Request
    reply: Reply
    done: asyncio.Future[Reply]
    grown: Callable[[Reply], None] | None = None
    worker: Worker | None = None
    ahead: bool = False
    """Its worker was given it beyond the common room."""
    since: float = 0.0
    """From when on it counts how long no worker came for it."""
    queued: float = 0.0
    """When it came to wait for a place in a worker."""
    heard: float = 0.0
    """When its worker was given it, or last sent a token of it."""
    decoding: bool = False
    """Whether a token of it came since its worker was given it."""
    had: set[tuple[str, int]] = field(default_factory=set)
    """Policy and version of every adapter that its worker was given for it."""


class Rollouts:
    def __init__(self, fleet: Fleet, tickets: Tickets, settings: Settings, clock: Clock) -> None:
        self._fleet = fleet
        self._tickets = tickets
        self._settings = settings
        self._clock = clock
        self._queue: Lanes[_Live] = Lanes()
        self._live: dict[str, _Live] = {}
        self._parked: dict[str, dict[str, Reply]] = {}
        self._pending: dict[Worker, dict[str, None]] = {}
        self.sampled = 0
        """Tokens received."""
        self.moves: Counter[str] = Counter()
        """Requests that went on elsewhere, by what moved them: ``lost``, ``given_back``, ``handed_off``."""
        self.gate: Callable[[Worker], bool] = lambda worker: True
        """Whether a worker may take rollouts now. Requests that somebody waits for pass all the same. Whoever sets it
        calls :meth:`dispatch` each time that its answers change."""
        self._on_sampled: list[Callable[[Worker, Request, int], None]] = []
        self.late_chunks = 0
        """Chunks that came for requests no longer with their sender."""
        fleet.handle(wire.Output, self._output)
        fleet.on_change(self.dispatch)
        fleet.on_lost(lambda worker, reason: self._lost(worker))

    async def sample(self, request: Request, grown: Callable[[Reply], None] | None = None) -> Reply:
        """The complete reply; ``grown`` is shown it each time that tokens have come. Raises :class:`GenerationFailed`,
        or :class:`Unavailable` when no worker came in time."""
        if request.id in self._live:
            raise RuntimeError(f"request {request.id} is under way already")
        reply = self._parked.get(request.job, {}).pop(request.id, Reply())
        if reply.finish:
            return reply
        now = self._clock.monotonic()
        live = _Live(request, reply, asyncio.get_running_loop().create_future(), grown, since=now, queued=now)
        self._live[request.id] = live
        self._lane(request).put(request.tenant, request.job, live, first=request.continues)
        self.dispatch()
        try:
            return await live.done
        except asyncio.CancelledError:
            if request.episode and reply.tokens:
                self._parked.setdefault(request.job, {})[request.id] = reply
            raise
        finally:
            self._end(live)

    def on_sampled(self, callback: Callable[[Worker, Request, int], None]) -> None:
        """Called with the worker, the request and how many tokens of it came."""
        self._on_sampled.append(callback)

    def waiting(self) -> int:
        return len(self._queue)

    def position(self, tenant: str, job: str) -> int | None:
        """How many rollouts stand before the first one of ``job`` that waits for a worker; None when none waits."""
        return self._queue.common.before(tenant, job)

    @property
    def migrated(self) -> int:
        """Requests that went on elsewhere."""
        return self.moves.total()

    def outstanding(self, worker: Worker) -> int:
        """Requests that it was given and has not ended."""
        return len(self._pending.get(worker, ()))

    def executing(self, worker: Worker) -> int:
        """Those of them that decode."""
        return sum(self._live[name].decoding for name in self._pending.get(worker, ()))

    def idle(self, worker: Worker) -> bool:
        return not self._pending.get(worker)

    def forget(self, job: str) -> None:
        """The job has ended: what was parked for it will not be asked for."""
        self._parked.pop(job, None)

    async def watch(self) -> None:
        """Fail what has waited too long for a worker, or for a word of its own, for ever: every wait has its
        deadline."""
        while True:
            await self._clock.sleep(self._settings.heartbeat_seconds)
            now = self._clock.monotonic()
            for live in list(self._queue):
                if self._fleet.serving("rollout", live.request.model):
                    live.since = now
                elif now - live.since > self._settings.worker_wait_seconds and not live.done.done():
                    live.done.set_exception(Unavailable(self._fleet.missing("rollout", live.request.model)))
            for live in list(self._live.values()):
                if live.worker is not None and now - live.heard > self._settings.silence_seconds:
                    self._fleet.post(live.worker, wire.Abort(request=live.request.id))
                    seconds = self._settings.silence_seconds
                    self._fail(live, f"worker {live.worker.name} sent nothing of it for {seconds:g} s")
            self.dispatch()

    # --- what others decide ------------------------------------------------------------------------------------------

    def switch(self, job: str, ref: wire.AdapterRef, *, recompute: bool) -> None:
        """The job's requests for older versions of the policy go on with ``ref``: those that run from the next token
        on, their attention cache kept or computed anew with ``recompute``; those that wait when they are begun. What
        asked to finish on its version does."""
        for live in self._live.values():
            old = live.request.adapter
            if live.request.job != job or live.request.in_flight == "finish" or live.done.done():
                continue
            if old is None or old.policy != ref.policy or old.version >= ref.version:
                continue
            live.request = replace(live.request, adapter=ref)
            if live.worker is not None:
                live.had.add((ref.policy, ref.version))
                adapter = self._named(live.worker, ref)
                self._fleet.post(
                    live.worker, wire.Switch(request=live.request.id, adapter=adapter, recompute=recompute)
                )

    def hand_off(self, worker: Worker, limit: int | None = None) -> int:
        """Take up to ``limit`` of its rollouts from ``worker``; they go on elsewhere first, with the tokens received.
        Those that decode not yet are taken before others, then those with the fewest tokens: what costs least to begin
        again. Answers how many. Set the gate before, or they come back; what somebody waits for stays."""
        held = [self._live[name] for name in self._pending.get(worker, ())]
        able = [live for live in held if not live.request.first and not live.done.done()]
        able.sort(key=lambda live: (live.decoding, len(live.reply.tokens)))
        taken = able if limit is None else able[: max(0, limit)]
        for live in reversed(taken):
            self._fleet.post(worker, wire.Abort(request=live.request.id))
            self._again(live, "handed_off")
        self.dispatch()
        return len(taken)

    # --- dispatch -----------------------------------------------------------------------------------------------------

    def dispatch(self) -> None:
        while taken := self._queue.take(lambda live: self._choose(live, True) is not None, self._has_room):
            live, ahead = taken
            worker = self._choose(live, ahead)
            assert worker is not None
            live.worker, live.ahead, live.decoding = worker, ahead, False
            live.heard = self._clock.monotonic()
            live.reply.queued += live.heard - live.queued
            self._pending.setdefault(worker, {})[live.request.id] = None
            worker.held.discard(live.request.id)
            self._fleet.post(worker, self._generate(live, worker))

    def _lane(self, request: Request) -> RoundRobin[_Live]:
        return self._queue.express if request.first else self._queue.common

    def _has_room(self, live: _Live) -> bool:
        return self._choose(live, False) is not None

    def _choose(self, live: _Live, ahead: bool) -> Worker | None:
        """The worker for a request in the common room, or in that of those who go ahead."""
        able = {
            worker.name: worker
            for worker in self._fleet.serving("rollout", live.request.model)
            if worker.takes(live.request.adapter) and (ahead or self.gate(worker))
        }
        name = route(
            Candidate(
                name,
                pending=self._ahead(worker) if ahead else self.outstanding(worker),
                room=self._room(worker, ahead),
                holds=live.request.id in worker.held,
            )
            for name, worker in able.items()
        )
        return able[name] if name is not None else None

    def _room(self, worker: Worker, ahead: bool) -> int:
        rows = worker.hello.max_rows
        return math.ceil(rows * self._settings.chat_share) if ahead else rows + self._settings.dispatch_ahead

    def _ahead(self, worker: Worker) -> int:
        return sum(self._live[name].ahead for name in self._pending.get(worker, ()))

    def _generate(self, live: _Live, worker: Worker) -> wire.Generate:
        request = live.request
        adapter = self._named(worker, request.adapter) if request.adapter is not None else None
        live.had = {(adapter.policy, adapter.version) if adapter is not None else ("", 0)}
        return wire.Generate(
            request=request.id,
            adapter=adapter,
            prompt=request.prompt,
            shared=request.shared,
            given=live.reply.tokens,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
            stop_tokens=request.stop_tokens,
            stop=request.stop,
            episode=request.episode,
            first=live.ahead,
            keep=request.in_flight == "switch",
            scores=request.scores,
            top=request.top,
        )

    def _named(self, worker: Worker, ref: wire.AdapterRef) -> wire.AdapterRef:
        return self._fleet.refer(worker, ref)

    # --- what workers say ---------------------------------------------------------------------------------------------

    def _output(self, worker: Worker, message: wire.Output) -> None:
        worker.unsent_most = max(worker.unsent_most, sum(len(chunk.tokens) for chunk in message.chunks))
        for chunk in message.chunks:
            live = self._live.get(chunk.request)
            if live is None or live.worker is not worker or live.done.done():
                self.late_chunks += 1
                continue
            self._take(live, chunk)
        self.dispatch()

    def _take(self, live: _Live, chunk: wire.Chunk) -> None:
        reply, adapter = live.reply, live.request.adapter
        if chunk.finish == "error":
            self._fail(live, chunk.error or "the engine gave no reason")
            return
        skip = len(reply.tokens) - chunk.offset
        applied = (chunk.policy, chunk.version)
        if skip < 0 or len(chunk.tokens) != len(chunk.logprobs) or (chunk.tokens and not _may(live, applied)):
            expected = (adapter.policy, adapter.version) if adapter is not None else ("", 0)
            self._fail(live, f"the engine sent tokens of {applied} from {chunk.offset}, wanted {expected}")
            return
        live.decoding |= bool(chunk.tokens)
        fresh = chunk.tokens[skip:]
        live.heard = self._clock.monotonic()
        reply.tokens.extend(fresh)
        reply.logprobs.extend(chunk.logprobs[skip:])
        reply.versions.extend([chunk.version] * len(fresh))
        self.sampled += len(fresh)
        if fresh and live.worker is not None:
            for told in self._on_sampled:
                told(live.worker, live.request, len(fresh))
        if chunk.finish == "abort":  # not by us: a request that we abort is not live any more
            self._again(live, "given_back")
        elif chunk.finish:
            reply.finish, reply.scores = chunk.finish, chunk.scores
            live.done.set_result(reply)
            self._release(live)
        if fresh and live.grown is not None:
            live.grown(reply)

    def _fail(self, live: _Live, problem: str) -> None:
        live.done.set_exception(GenerationFailed(problem))
        self._release(live)

    def _lost(self, worker: Worker) -> None:
        for name in reversed(self._pending.pop(worker, {})):
            self._again(self._live[name], "lost")
        self.dispatch()

    def _again(self, live: _Live, reason: str) -> None:
        """The worker will not go on with it: another one must."""
        self._release(live)
        if live.done.done():
            return
        self.moves[reason] += 1
        live.since = live.queued = self._clock.monotonic()
        self._lane(live.request).put(live.request.tenant, live.request.job, live, first=True)

    def _release(self, live: _Live) -> None:
        if live.worker is not None:
            self._pending.get(live.worker, {}).pop(live.request.id, None)
            live.worker = None
            live.decoding = False

    def _end(self, live: _Live) -> None:
        """The caller has its answer, or gave up."""
        request = live.request
        self._live.pop(request.id, None)
        self._lane(request).remove(request.tenant, request.job, live)
        if live.worker is not None:
            self._fleet.post(live.worker, wire.Abort(request=request.id))
            self._release(live)
        self.dispatch()


def _may(live: _Live, applied: tuple[str, int]) -> bool:
    """Whether tokens of this policy and version may be the request's. One that changes its version may bring tokens of
    any older one: its worker may have begun it before this service did."""
    adapter = live.request.adapter
    if applied in live.had:
        return True
    if adapter is None or live.request.in_flight == "finish":
        return False
    return applied[0] == adapter.policy and applied[1] < adapter.version
