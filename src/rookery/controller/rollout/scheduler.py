"""Generation: requests go in, complete replies come out, whatever happens to the workers in between.

* Every request ends exactly once: with its reply, with an error, or by its caller's cancellation.
* Tokens that arrived are never generated again: when a worker is lost or gives a request up, or another one can go on
  with it sooner, it moves there with the tokens received so far, ahead of those that never ran. A cancelled request of
  an episode parks its tokens, and takes them up when it returns; where it returns with another prompt, as after a new
  reset of its environment, it begins anew.
* Tenants take turns of several requests; a worker holds at most its rows and a few more, everything else waits here,
  where it can be seen. Requests that somebody waits for go ahead of the others, on a bounded share of each worker's
  rows.
* A chunk counts only from the worker that the request is with, under that worker's present epoch. A request that
  returns to a worker from which it was taken has another name there, so that nothing of before can be taken for it.
* What a frame costs does not grow with the number of workers, jobs or requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from rookery import protocol
from rookery.aio import Clock
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.fleet.worker import Worker
from rookery.controller.rollout.placement import WorkerPool
from rookery.controller.rollout.request import GenerationFailed as GenerationFailed
from rookery.controller.rollout.request import InflightRequest, newer, same_text
from rookery.controller.rollout.request import SamplingRequest as SamplingRequest
from rookery.controller.rollout.request import SamplingResult as SamplingResult
from rookery.errors import Unavailable
from rookery.scheduling.fairness import DeficitRoundRobin, PriorityQueues
from rookery.settings import Settings

REASONS = ("lost", "rejected", "offloaded", "balanced")
"""Why a request went on elsewhere: its worker was lost or drains; it gave the request up; somebody took it away with
:meth:`Rollouts.hand_off`; another worker could go on with it sooner."""

AGAIN = "~"
"""Between a request's id and the number of its return, in the name that it has where it had been before."""


@dataclass(frozen=True)
class Resumption:
    """A request that a worker brought along from a controller before this one."""

    worker: Worker
    name: str
    """What the worker calls it."""
    since: float
    """When the worker dialled in."""


class RolloutScheduler:
    def __init__(self, fleet: Fleet, settings: Settings, clock: Clock) -> None:
        self._fleet = fleet
        self._settings = settings
        self._clock = clock
        self._desks = WorkerPool(settings, clock)
        self._queues: defaultdict[str, PriorityQueues[InflightRequest]] = defaultdict(PriorityQueues)
        """By base model."""
        self._live: dict[str, InflightRequest] = {}
        self._named: dict[str, InflightRequest] = {}
        """Those that a worker has, by what it calls them."""
        self._jobs: defaultdict[str, dict[InflightRequest, None]] = defaultdict(dict)
        self._parked: dict[str, dict[str, InflightRequest]] = {}
        self._claims: dict[str, Resumption] = {}
        """By request, until that is asked for."""
        self._returning = 0.0
        """Until then workers that had requests before this controller came are dialling in."""
        self._on_sampled: list[Callable[[Worker, SamplingRequest, int], None]] = []
        self.gate: Callable[[Worker], bool] = lambda worker: True
        """Whether a worker may take rollouts now. Requests that somebody waits for pass all the same. Whoever sets it
        calls :meth:`dispatch` each time that its answers change."""
        self.sampled = 0
        """Tokens received."""
        self.moves: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        """Requests that went on elsewhere, by reason."""
        self.late_chunks = 0
        """Chunks that came for requests no longer with their sender."""
        fleet.handle(protocol.Output, self._output)
        fleet.on_state(self._seen)
        fleet.on_beat(self._beat)
        fleet.on_lost(lambda worker, reason: self._lost(worker))

    async def sample(
        self, request: SamplingRequest, grown: Callable[[SamplingResult], None] | None = None
    ) -> SamplingResult:
        """The complete reply; ``grown`` is shown it each time that tokens have come. Raises :class:`GenerationFailed`,
        or :class:`Unavailable` when no worker came in time."""
        if request.id in self._live:
            raise RuntimeError(f"request {request.id} is under way already")
        before = self._parked.get(request.job, {}).pop(request.id, None)
        kept = before if before is not None and same_text(before.request, request) else None
        if kept is not None and kept.reply.finish:
            return kept.reply
        now = self._clock.monotonic()
        live = InflightRequest(
            request, SamplingResult(), asyncio.get_running_loop().create_future(), grown, since=now, queued=now
        )
        if before is not None:
            live.requeue_reason, live.returns = (
                before.requeue_reason,
                before.returns,
            )  # its chunks may still be on their way
        if kept is not None:
            live.reply = kept.reply
            if newer(kept.request.adapter, request):
                live.request = request = replace(request, adapter=kept.request.adapter)
        self._live[request.id] = live
        self._jobs[request.job][live] = None
        claim = self._claims.get(request.id)
        if claim is not None and self._binds(claim):
            self._assign(live, claim.worker, request.interactive)
        else:
            self._lane(request).put(request.tenant, request.job, live, first=request.continues)
            self._dispatch(request.model)
        try:
            return await live.done
        except asyncio.CancelledError:
            if request.episode and (live.reply.tokens or live.requeue_reason or live.worker is not None):
                self._parked.setdefault(request.job, {})[request.id] = live
            raise
        finally:
            self._end(live)

    def on_sampled(self, callback: Callable[[Worker, SamplingRequest, int], None]) -> None:
        """Called with the worker, the request and how many tokens of it came."""
        self._on_sampled.append(callback)

    # --- looked at ----------------------------------------------------------------------------------------------------

    @property
    def migrated(self) -> int:
        """Requests that went on elsewhere."""
        return self.moves.total()

    def waiting(self) -> int:
        return sum(map(len, self._queues.values()))

    def position(self, tenant: str, job: str) -> int | None:
        """How many rollouts stand before the first one of ``job`` that waits for a worker; None when none waits."""
        places = (queue.common.before(tenant, job) for queue in self._queues.values())
        return min((place for place in places if place is not None), default=None)

    def outstanding(self, worker: Worker) -> int:
        """Requests that it was given and has not ended."""
        return self._desks.outstanding(worker)

    def executing(self, worker: Worker) -> int:
        """Those of them that it decodes, as far as that is known (:func:`rookery.scheduling.balancing.load`)."""
        return self._desks.executing(worker)

    def idle(self, worker: Worker) -> bool:
        return not self._desks.outstanding(worker)

    def busy(self, worker: Worker) -> float:
        """Seconds for which it has had requests, on this connection."""
        return self._desks.busy(worker)

    # --- what others decide -------------------------------------------------------------------------------------------

    def forget(self, job: str) -> None:
        """The job has ended: what was parked for it, or brought along, will not be asked for."""
        self._parked.pop(job, None)
        for request in [name for name in self._claims if name.startswith(f"{job}-")]:  # as its episodes' names do
            del self._claims[request]

    def dispatch(self, *workers: Worker) -> None:
        """The gate has changed, for these workers or for all."""
        changed = workers or self._desks.workers()
        for worker in changed:
            self._desks.add(worker, self.gate(worker))
        for model in sorted({worker.hello.model for worker in changed}):
            self._dispatch(model)

    def switch(self, job: str, ref: protocol.AdapterRef, *, recompute: bool) -> None:
        """The job's requests for older versions of the policy go on with ``ref``: those that run from the next token
        on, their attention cache kept or computed anew with ``recompute``; those that wait or are parked when they
        are begun. What asked to finish on its version does."""
        for live in (*self._jobs.get(job, ()), *self._parked.get(job, {}).values()):
            if not newer(ref, live.request):
                continue
            live.request = replace(live.request, adapter=ref)
            if live.worker is not None and not live.done.done():
                live.previous_workers.add(ref.version)
                adapter = self._fleet.adapter_ref(live.worker, ref)
                live.worker.post(protocol.SwitchAdapter(request=live.name, adapter=adapter, recompute=recompute))

    def migrate(self, worker: Worker, limit: int | None = None) -> int:
        """Take up to ``limit`` of its rollouts from ``worker``; they go on elsewhere first, with the tokens received.
        Those that decode not yet are taken before others, then those with the fewest tokens: what costs least to begin
        again. Answers how many. Set the gate before, or they come back; what somebody waits for stays."""
        able = [live for live in self._desks.held(worker) if not live.request.interactive and not live.done.done()]
        able.sort(key=lambda live: (live.decoding, len(live.reply.tokens)))
        taken = able if limit is None else able[: max(0, limit)]
        for live in reversed(taken):
            self._withdraw(live)
            self._requeue(live, "offloaded")
        self._dispatch(worker.hello.model)
        return len(taken)

    def expect_resumptions(self) -> None:
        """There was a controller before this one: workers that computed for it dial in again. For a while rollouts wait
        for the worker that has them, so that what it sampled is not sampled anew elsewhere."""
        self._returning = self._clock.monotonic() + self._settings.worker.reconnect_seconds

    async def watch(self) -> None:
        """Fail what has waited too long for a worker, or for a word of its own, for ever: every wait has its
        deadline."""
        while True:
            await self._clock.sleep(self._settings.worker.heartbeat_seconds)
            now = self._clock.monotonic()
            if self._returning and now >= self._returning:
                self._returning = 0.0
                for model in list(self._queues):
                    self._dispatch(model)
            for model, queue in self._queues.items():
                served = bool(self._fleet.serving("rollout", model))
                for live in queue:
                    if served:
                        live.since = now
                    elif now - live.since > self._settings.server.worker_wait_seconds and not live.done.done():
                        live.done.set_exception(Unavailable(self._fleet.missing("rollout", model)))
            for live in list(self._live.values()):
                if live.worker is not None and now - live.last_token_at > self._settings.worker.request_timeout_seconds:
                    name, seconds = live.worker.name, self._settings.worker.request_timeout_seconds
                    self._withdraw(live)
                    live.done.set_exception(GenerationFailed(f"worker {name} sent nothing of it for {seconds:g} s"))
                    self._dispatch(live.request.model)

    # --- dispatch -----------------------------------------------------------------------------------------------------

    def _dispatch(self, model: str) -> None:
        """Give out what waits, where there is room; then move what could go on sooner elsewhere."""
        queue, desks = self._queues[model], self._desks
        returned = self._clock.monotonic() >= self._returning
        while queue and (
            taken := queue.take(
                (lambda live: desks.choose(live, True) is not None) if desks.has_capacity(model, True) else None,
                (lambda live: desks.choose(live, False) is not None)
                if returned and desks.has_capacity(model, False)
                else None,
            )
        ):
            live, ahead = taken
            worker = desks.choose(live, ahead)
            assert worker is not None
            self._assign(live, worker, ahead)
        while moving := desks.find_migration(model):
            for live in moving.requests:
                self._withdraw(live)
                self._moves(live, "balanced")
                self._assign(live, moving.target, False)

    def _lane(self, request: SamplingRequest) -> DeficitRoundRobin[InflightRequest]:
        queue = self._queues[request.model]
        return queue.express if request.interactive else queue.common

    def _assign(self, live: InflightRequest, worker: Worker, ahead: bool) -> None:
        request = live.request
        adapter = self._fleet.adapter_ref(worker, request.adapter) if request.adapter is not None else None
        live.last_token_at = self._clock.monotonic()
        live.reply.queued += live.last_token_at - live.queued
        live.previous_workers = {live.applied[1]}
        claim = self._claims.pop(request.id, None)
        live.claimed = claim is not None and claim.worker is worker
        live.name = claim.name if claim is not None and live.claimed else request.id
        if not live.claimed and worker.epoch in live.requeue_reason:
            live.returns += 1
            live.name = f"{request.id}{AGAIN}{live.returns}"
        self._named[live.name] = live
        self._desks.assign(live, worker, ahead)
        generate = protocol.Generate(
            request=live.name,
            adapter=adapter,
            prompt=request.prompt,
            shared_prefix=request.shared_prefix,
            prefix_tokens=live.reply.tokens,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
            stop_tokens=request.stop_tokens,
            stop=request.stop,
            episode=request.episode,
            interactive=ahead,
            in_flight=request.in_flight,
            prompt_logprobs=request.prompt_logprobs,
            top_logprobs=request.top_logprobs,
        )
        worker.post(generate)

    # --- what workers say ---------------------------------------------------------------------------------------------

    def _seen(self, worker: Worker) -> None:
        """Its state, or what it takes, has changed."""
        self._desks.add(worker, self.gate(worker))
        if not worker.has_role("rollout", worker.hello.model):
            return
        for name in sorted(
            worker.active_requests
        ):  # claims need no room, and no gate: the worker computes them already
            request = name.partition(AGAIN)[0]
            live = self._live.get(request)
            before = self._claims.get(request)
            claim = Resumption(worker, name, self._clock.monotonic())
            if live is None:
                if before is None or not self._binds(before):
                    self._claims[request] = claim
            elif live.worker is None and not live.done.done():
                self._claims[request] = claim
                self._lane(live.request).remove(live.request.tenant, live.request.job, live)
                self._assign(live, worker, live.request.interactive)
        worker.active_requests.clear()
        rows = min(one.hello.max_rows for one in self._fleet.serving("rollout", worker.hello.model))
        self._queues[worker.hello.model].common.turn = max(1, int(rows * self._settings.engine.tenant_turn_share))
        self._dispatch(worker.hello.model)

    def _binds(self, claim: Resumption) -> bool:
        """Whether its worker surely has the request still: what is asked for later goes where there is room."""
        return self._clock.monotonic() - claim.since <= self._settings.worker.resume_seconds

    def _beat(self, worker: Worker, beat: protocol.Heartbeat) -> None:
        self._desks.on_heartbeat(worker, beat)
        self._dispatch(worker.hello.model)

    def _output(self, worker: Worker, message: protocol.Output) -> None:
        worker.max_flush_tokens = max(worker.max_flush_tokens, sum(len(chunk.tokens) for chunk in message.chunks))
        for chunk in message.chunks:
            live = self._named.get(chunk.request)
            if live is None or live.worker is not worker or live.done.done():
                self.late_chunks += 1
                continue
            self._on_chunk(live, worker, chunk)
        self._dispatch(worker.hello.model)

    def _on_chunk(self, live: InflightRequest, worker: Worker, chunk: protocol.TokenChunk) -> None:
        reply = live.reply
        if chunk.finish == "error":
            self._fail(live, chunk.error or "the engine gave no reason")
            return
        skip = len(reply.tokens) - chunk.offset
        fits = skip >= 0 and len(chunk.tokens) == len(chunk.logprobs)
        if not fits or (chunk.tokens and not live.may(chunk.policy, chunk.version)):
            sent = (chunk.policy, chunk.version)
            self._fail(live, f"the engine sent tokens of {sent} from {chunk.offset}, wanted {live.applied}")
            return
        fresh = chunk.tokens[skip:]
        live.last_token_at = self._clock.monotonic()
        reply.tokens.extend(fresh)
        reply.logprobs.extend(chunk.logprobs[skip:])
        reply.versions.extend([chunk.version] * len(fresh))
        self.sampled += len(fresh)
        if fresh:
            self._desks.decodes(live)
            for told in self._on_sampled:
                told(worker, live.request, len(fresh))
        if chunk.finish == "abort":  # not by us: a request that we abort is not live any more
            self._requeue(live, "rejected")
        elif chunk.finish:
            reply.finish, reply.prompt_logprobs = chunk.finish, chunk.prompt_logprobs
            live.done.set_result(reply)
            self._release(live)
        if fresh and live.new_tokens is not None:
            live.new_tokens(reply)

    def _fail(self, live: InflightRequest, problem: str) -> None:
        live.done.set_exception(GenerationFailed(problem))
        self._release(live)

    def _lost(self, worker: Worker) -> None:
        for request in [request for request, claim in self._claims.items() if claim.worker is worker]:
            del self._claims[request]
        for live in reversed(self._desks.remove(worker)):
            self._requeue(live, "lost")
        self._dispatch(worker.hello.model)

    def _requeue(self, live: InflightRequest, reason: str) -> None:
        """The worker will not go on with it: another one must."""
        self._release(live)
        if not live.done.done():
            self._moves(live, reason)
            self._lane(live.request).put(live.request.tenant, live.request.job, live, first=True)

    def _moves(self, live: InflightRequest, reason: str) -> None:
        self.moves[reason] += 1
        live.since = live.queued = self._clock.monotonic()

    def _withdraw(self, live: InflightRequest) -> None:
        """Its worker shall not go on with it."""
        assert live.worker is not None
        live.worker.post(protocol.Abort(request=live.name))
        live.requeue_reason.add(live.worker.epoch)
        self._release(live)

    def _release(self, live: InflightRequest) -> None:
        """Its worker has it no more."""
        if live.worker is not None:
            del self._named[live.name]
            self._desks.release(live)

    def _end(self, live: InflightRequest) -> None:
        """The caller has its answer, or gave up."""
        request = live.request
        self._live.pop(request.id, None)
        del self._jobs[request.job][live]
        if not self._jobs[request.job]:
            del self._jobs[request.job]
        if live.worker is None:
            self._lane(request).remove(request.tenant, request.job, live)
        else:
            self._withdraw(live)
            self._dispatch(request.model)
