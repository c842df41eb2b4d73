"""The rollout scheduler: requests go in, complete results come out, whatever happens to the workers in between.

* Every request ends exactly once: with its result, with an error, or by its caller's cancellation.
* Received tokens are never generated again. When a worker is lost, rejects a request, or another worker could begin it
  sooner or continue it faster, the request moves there with the tokens received so far, ahead of requests that never
  ran. A cancelled request of an episode keeps its tokens and resumes from them when it is submitted again; submitted
  with another prompt, as after a new reset of its environment, it starts over.
* Tenants share each base model's workers by the tokens that they are served
  (:mod:`rookery.scheduling.queues`). A worker holds at most its rows and a few more; everything else waits here,
  where it is visible. Interactive requests go first; rollouts go where their objectives leave room.
* A chunk counts only if it comes from the request's current worker under that worker's current epoch. A request that
  returns to a worker from which it was withdrawn has another name there, so that late chunks cannot be mistaken for it.
* The cost of a frame does not grow with the number of workers, jobs or requests.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import ClassVar

import msgspec

from rookery import protocol
from rookery.clock import Clock
from rookery.controller.fleet.events import WorkerEvent
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.fleet.worker import Worker
from rookery.controller.rollout.placement import Migration, WorkerPool
from rookery.controller.rollout.request import (
    REASONS,
    REASSIGNED,
    GenerationFailed,
    InflightRequest,
    Resumption,
    SamplingRequest,
    SamplingResult,
)
from rookery.controller.rollout.request_queues import RequestQueues
from rookery.controller.weights.distribution import AdapterResidency
from rookery.errors import Unavailable
from rookery.settings import Settings

STARVATION_SECONDS = 30.0
"""A tenant from whose waiting requests no worker took one for this long is next, whatever it was served before."""


class TokensReceived(WorkerEvent, frozen=True):
    """New tokens of a rollout request arrived."""

    kind: ClassVar[str] = "tokens"
    shown: ClassVar[bool] = False
    request: SamplingRequest
    tokens: int


class RolloutScheduler:
    def __init__(
        self,
        fleet: Fleet,
        residency: AdapterResidency,
        settings: Settings,
        clock: Clock,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        """``weights``: shares of tenants that have another one than 1."""
        self._fleet = fleet
        self._residency = residency
        self._settings = settings
        self._clock = clock
        self.pool = WorkerPool(settings, clock, weights or {})
        engine = settings.engine
        self.queues = RequestQueues(clock, STARVATION_SECONDS, weights or {}, context_order=engine.context_order)
        self.inflight: dict[str, InflightRequest] = {}
        """By the request's id."""
        self._assigned: dict[str, InflightRequest] = {}
        """Requests that a worker has, by their names there."""
        self.by_job: defaultdict[str, dict[InflightRequest, None]] = defaultdict(dict)
        self._retained: dict[str, dict[str, InflightRequest]] = {}
        """By job and id: cancelled requests whose tokens are kept."""
        self.resumptions: dict[str, Resumption] = {}
        """By the request's id, until it is submitted."""
        self._resume_until = 0.0
        """Until then, workers that hold requests of an earlier controller are reconnecting."""
        self.closed: set[Worker] = set()
        """Workers that get no rollouts now; interactive requests pass all the same. Call :meth:`dispatch` after a
        change."""
        self.sampled_tokens = 0
        """Tokens received."""
        self.requeues: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        """Requests that moved to another worker, by reason."""
        self.late_chunks = 0
        """Chunks for requests that are no longer with their sender."""

    async def sample(
        self, request: SamplingRequest, on_tokens: Callable[[SamplingResult], None] | None = None
    ) -> SamplingResult:
        """The complete result; ``on_tokens`` is called with it each time that tokens have arrived. Raises
        :class:`GenerationFailed`, or :class:`Unavailable` when no worker came in time."""
        if request.id in self.inflight:
            raise RuntimeError(f"request {request.id} is in flight already")
        earlier = self._retained.get(request.job, {}).pop(request.id, None)
        kept = earlier if earlier is not None and request.continues_text_of(earlier.request) else None
        if kept is not None and kept.result.finish:
            return kept.result
        now = self._clock.monotonic()
        done: asyncio.Future[SamplingResult] = asyncio.get_running_loop().create_future()
        inflight = InflightRequest(request, SamplingResult(), done, on_tokens, waiting_since=now, queued_at=now)
        if earlier is not None:  # its chunks may still arrive
            inflight.revoked_epochs, inflight.reassignments = earlier.revoked_epochs, earlier.reassignments
        if kept is not None:
            inflight.result, inflight.charged = kept.result, kept.charged
            if request.superseded_by(kept.request.adapter):
                inflight.request = request = request.with_adapter(kept.request.adapter)
        self.inflight[request.id] = inflight
        self.by_job[request.job][inflight] = None
        resumption = self.resumptions.get(request.id)
        if resumption is not None and self._still_held(resumption):
            self._assign(inflight, resumption.worker, request.generate.interactive)
        else:
            self.queues.put(inflight, first=request.continues)
            self._dispatch(request.model)
        try:
            return await done
        except asyncio.CancelledError:
            begun = inflight.result.tokens or inflight.revoked_epochs or inflight.worker is not None
            if request.generate.episode and begun:
                self._retained.setdefault(request.job, {})[request.id] = inflight
            raise
        finally:
            self._finish(inflight)

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def migrated(self) -> int:
        """Requests that moved to another worker."""
        return self.requeues.total()

    def waiting(self) -> int:
        """Requests that wait for a worker."""
        return len(self.queues)

    def position(self, tenant: str, job: str) -> int | None:
        """How many rollouts precede the first one of ``job`` that waits for a worker; None when none waits."""
        return self.queues.position(tenant, job)

    def unstarted(self, request: str) -> bool:
        """Whether the request waits for a worker and has no tokens yet."""
        inflight = self.inflight.get(request)
        return inflight is not None and inflight.worker is None and not inflight.result.tokens

    # --- decisions of other rooms -------------------------------------------------------------------------------------

    def close_job(self, job: str) -> None:
        """The job has ended: drop the tokens kept for it and the requests that workers still hold for it."""
        self._retained.pop(job, None)
        self.queues.close_job(job)
        for request in [name for name in self.resumptions if name.startswith(f"{job}-")]:  # as its episodes' names do
            del self.resumptions[request]

    def dispatch(self, *workers: Worker) -> None:
        """``closed`` has changed, for these workers or for all."""
        changed = workers or self.pool.workers()
        for worker in changed:
            self.pool.update(worker, worker not in self.closed)
        for model in sorted({worker.hello.model for worker in changed}):
            self._dispatch(model)

    def switch(self, job: str, ref: protocol.AdapterRef, *, recompute: bool) -> None:
        """Move the job's requests for older versions of the policy to ``ref``: running ones from their next token on,
        with their attention cache kept, or computed again with ``recompute``; waiting and retained ones when they
        begin. Requests that finish on their version are left alone."""
        for inflight in (*self.by_job.get(job, ()), *self._retained.get(job, {}).values()):
            if not inflight.request.superseded_by(ref):
                continue
            inflight.request = inflight.request.with_adapter(ref)
            if inflight.worker is not None and not inflight.done.done():
                inflight.allowed_versions.add(ref.version)
                adapter = self._residency.adapter_ref(inflight.worker, ref)
                message = protocol.SwitchAdapter(request=inflight.wire_name, adapter=adapter, recompute=recompute)
                inflight.worker.post(message)

    def migrate(self, worker: Worker, limit: int | None = None) -> int:
        """Take up to ``limit`` rollouts from ``worker``; they resume elsewhere, ahead of others, with the tokens
        received. Requests that do not decode yet are taken first, then those with the fewest tokens. Returns how many
        were taken. Close the worker before, or they come back; interactive requests stay."""
        able = [
            inflight
            for inflight in self.pool.slots(worker).requests
            if not inflight.request.generate.interactive and not inflight.done.done()
        ]
        able.sort(key=lambda inflight: (inflight.decoding, len(inflight.result.tokens)))
        taken = able if limit is None else able[: max(0, limit)]
        for inflight in reversed(taken):
            self._withdraw(inflight)
            self._requeue(inflight, "offloaded")
        self._dispatch(worker.hello.model)
        return len(taken)

    def expect_resumptions(self) -> None:
        """An earlier controller existed: its workers reconnect. For a while rollouts wait for the worker that holds
        them, so that their tokens are not sampled twice."""
        self._resume_until = self._clock.monotonic() + self._settings.worker.reconnect_seconds

    async def watch(self) -> None:
        """Fail requests that waited too long for a worker or for their worker's next tokens. Runs until cancelled."""
        while True:
            await self._clock.sleep(self._settings.worker.heartbeat_seconds)
            now = self._clock.monotonic()
            if self._resume_until and now >= self._resume_until:
                self._resume_until = 0.0
                for model in list(self.queues.models):
                    self._dispatch(model)
            wait = self._settings.server.worker_wait_seconds
            for model, queue in self.queues.models.items():
                served = bool(self._fleet.serving("rollout", model))
                for inflight in queue:
                    if served:
                        inflight.waiting_since = now
                    elif now - inflight.waiting_since > wait and not inflight.done.done():
                        inflight.done.set_exception(Unavailable(self._fleet.missing("rollout", model)))
            limit = self._settings.worker.request_timeout_seconds
            for inflight in list(self.inflight.values()):
                if inflight.worker is not None and now - inflight.last_activity > limit:
                    error = GenerationFailed(f"worker {inflight.worker.name} sent no tokens for {limit:g} s")
                    self._withdraw(inflight)
                    inflight.done.set_exception(error)
                    self._dispatch(inflight.request.model)

    # --- dispatch -----------------------------------------------------------------------------------------------------

    def _dispatch(self, model: str) -> None:
        """Assign waiting requests to workers with room; then move requests that could begin sooner elsewhere."""
        queue, pool = self.queues.models[model], self.pool

        def fits(express: bool) -> Callable[[InflightRequest], bool] | None:
            if not pool.has_capacity(model, express):
                return None
            return lambda inflight: pool.choose(inflight, express) is not None

        now = self._clock.monotonic()
        resumed = now >= self._resume_until
        while queue and (taken := queue.take(fits(True), fits(False) if resumed else None, now)):
            inflight, express = taken
            worker = pool.choose(inflight, express)
            assert worker is not None
            self._assign(inflight, worker, express)
        while migration := pool.find_migration(model):
            self._move(migration)

    def _move(self, migration: Migration) -> None:
        for inflight in migration.requests:
            self._withdraw(inflight)
            self._count_requeue(inflight, migration.reason)
            self._assign(inflight, migration.target, False)

    def _assign(self, inflight: InflightRequest, worker: Worker, express: bool) -> None:
        request = inflight.request
        adapter = self._residency.adapter_ref(worker, request.adapter) if request.adapter is not None else None
        inflight.last_activity = self._clock.monotonic()
        inflight.result.queue_seconds += inflight.last_activity - inflight.queued_at
        inflight.allowed_versions = {inflight.policy_version[1]}
        resumption = self.resumptions.pop(request.id, None)
        inflight.resumed = resumption is not None and resumption.worker is worker
        inflight.wire_name = resumption.wire_name if resumption is not None and inflight.resumed else request.id
        if not inflight.resumed and worker.epoch in inflight.revoked_epochs:
            inflight.reassignments += 1
            inflight.wire_name = f"{request.id}{REASSIGNED}{inflight.reassignments}"
        self.queues.on_assigned(inflight)
        self._assigned[inflight.wire_name] = inflight
        self.pool.assign(inflight, worker, express)
        generate = msgspec.structs.replace(
            request.generate,
            request=inflight.wire_name,
            adapter=adapter,
            prefix_tokens=inflight.result.tokens,
            interactive=express,
            tenant=request.tenant,
            order=inflight.order,
            ttft_ms=inflight.ttft_ms,
        )
        worker.post(generate)

    # --- events of workers --------------------------------------------------------------------------------------------

    def on_worker_changed(self, worker: Worker) -> None:
        """Its state, or the set of requests that it accepts, has changed."""
        self.pool.update(worker, worker not in self.closed)
        if not worker.has_role("rollout", worker.hello.model):
            return
        for wire_name in sorted(worker.active_requests):  # resumptions need no room: they run already
            request = wire_name.partition(REASSIGNED)[0]
            inflight = self.inflight.get(request)
            other = self.resumptions.get(request)
            resumption = Resumption(worker, wire_name, self._clock.monotonic())
            if inflight is None:
                if other is None or not self._still_held(other):
                    self.resumptions[request] = resumption
            elif inflight.worker is None and not inflight.done.done():
                self.resumptions[request] = resumption
                self.queues.remove(inflight)
                self._assign(inflight, worker, inflight.request.generate.interactive)
        worker.active_requests.clear()
        rows = min(one.hello.max_rows for one in self._fleet.serving("rollout", worker.hello.model))
        self.queues.models[worker.hello.model].common.turn = max(1, int(rows * self._settings.engine.tenant_turn_share))
        self._dispatch(worker.hello.model)

    def _still_held(self, resumption: Resumption) -> bool:
        """Whether the worker is sure to hold the request still: one submitted later goes where there is room."""
        return self._clock.monotonic() - resumption.since <= self._settings.worker.resume_seconds

    def on_heartbeat(self, worker: Worker, beat: protocol.Heartbeat) -> None:
        self.pool.on_heartbeat(worker, beat)
        self._dispatch(worker.hello.model)
        if (migration := self.pool.find_merge(worker, self.queues)) is not None:
            self._move(migration)

    def on_output(self, worker: Worker, message: protocol.Output) -> None:
        worker.max_flush_tokens = max(worker.max_flush_tokens, sum(len(chunk.tokens) for chunk in message.chunks))
        for chunk in message.chunks:
            inflight = self._assigned.get(chunk.request)
            if inflight is None or inflight.worker is not worker or inflight.done.done():
                self.late_chunks += 1
                continue
            self._on_chunk(inflight, worker, chunk)
        self._dispatch(worker.hello.model)
        for chunk in message.chunks:
            inflight = self._assigned.get(chunk.request)
            if inflight is not None and inflight.worker is worker and self.pool.begin_move(inflight, self.queues):
                worker.post(protocol.Abort(request=inflight.wire_name, resume=True))

    def _on_chunk(self, inflight: InflightRequest, worker: Worker, chunk: protocol.TokenChunk) -> None:
        result = inflight.result
        if chunk.finish == "error":
            self._fail(inflight, chunk.error or "the engine gave no reason")
            return
        if problem := inflight.problem(chunk):
            if inflight.retries(chunk):
                raise protocol.BadFrame(f"request {inflight.wire_name}: {problem}")
            self._fail(inflight, problem)
            return
        skip = len(result.tokens) - chunk.offset
        tokens = chunk.tokens[skip:]
        inflight.last_activity = self._clock.monotonic()
        if tokens and (not result.workers or result.workers[-1][1] != worker.name):
            result.workers.append((len(result.tokens), worker.name))
        result.tokens.extend(tokens)
        result.logprobs.extend(chunk.logprobs[skip:])
        result.versions.extend([chunk.version] * len(tokens))
        self.sampled_tokens += len(tokens)
        if tokens:
            self.pool.mark_decoding(inflight)
            self.queues.on_tokens(inflight)
            self._fleet.emit(TokensReceived(self._clock.time(), worker, inflight.request, len(tokens)))
        if chunk.finish == "abort":  # the worker's decision: a request that this side aborts is not in flight any more
            self._requeue(inflight, "rejected" if inflight.target is None else "divided")
        elif chunk.finish:
            result.finish, result.prompt_logprobs = chunk.finish, chunk.prompt_logprobs
            inflight.done.set_result(result)
            self._release(inflight)
        if tokens and inflight.on_tokens is not None:
            inflight.on_tokens(result)

    def _fail(self, inflight: InflightRequest, problem: str) -> None:
        inflight.done.set_exception(GenerationFailed(problem))
        self._release(inflight)

    def on_worker_lost(self, worker: Worker) -> None:
        for request in [request for request, held in self.resumptions.items() if held.worker is worker]:
            del self.resumptions[request]
        for inflight in reversed(self.pool.remove(worker)):
            self._requeue(inflight, "lost")
        self._dispatch(worker.hello.model)

    def _requeue(self, inflight: InflightRequest, reason: str) -> None:
        """Its worker does not continue the request: another one must."""
        self._release(inflight)
        if not inflight.done.done():
            self._count_requeue(inflight, reason)
            self.queues.put(inflight, first=True)

    def _count_requeue(self, inflight: InflightRequest, reason: str) -> None:
        self.requeues[reason] += 1
        inflight.waiting_since = inflight.queued_at = self._clock.monotonic()

    def _withdraw(self, inflight: InflightRequest) -> None:
        """Abort the request at its worker."""
        assert inflight.worker is not None
        inflight.worker.post(protocol.Abort(request=inflight.wire_name))
        inflight.revoked_epochs.add(inflight.worker.epoch)
        self._release(inflight)

    def _release(self, inflight: InflightRequest) -> None:
        """Its worker has the request no more."""
        if inflight.worker is not None:
            del self._assigned[inflight.wire_name]
            self.pool.release(inflight)

    def _finish(self, inflight: InflightRequest) -> None:
        """The caller has the result, or gave up."""
        request, worker = inflight.request, inflight.worker
        self.inflight.pop(request.id, None)
        del self.by_job[request.job][inflight]
        if not self.by_job[request.job]:
            del self.by_job[request.job]
        if worker is None:
            self.queues.remove(inflight)
        else:
            self._withdraw(inflight)
        self.queues.on_finished(inflight)
        if worker is not None:
            self._dispatch(request.model)
