"""The rollout scheduler: requests go in, complete results come out, whatever happens to the workers in between.

* Every request ends exactly once: with its result, with an error, or by its caller's cancellation.
* Received tokens are never generated again. When a worker is lost, rejects a request, or another worker could begin it
  sooner or continue it faster, the request moves there with the tokens received so far, ahead of requests that never
  ran. A worker that cannot generate it does not get it again; it fails when all workers have refused it.
* A cancelled request of an episode keeps its tokens and resumes from them when it is submitted again; submitted with
  another prompt, as after a new reset of its environment, it starts over.
* Tenants share each base model's workers by the tokens that they are served
  (:mod:`rookery.scheduling.queues`). A worker holds at most its rows and a few more; everything else waits here,
  where it is visible. Interactive requests go first; rollouts go where their objectives leave room.
* A chunk counts only if it names the request's present :class:`~rookery.controller.rollout.request.Assignment` and
  comes from its worker under that worker's present epoch. Each stay at a worker is another assignment.
* A request changes its state by :meth:`RolloutScheduler.apply` alone, as the table of
  :mod:`rookery.controller.rollout.request` says.
* The cost of a frame does not grow with the number of workers, jobs or requests: whatever a frame asks about them is
  kept in an index that their changes maintain.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import msgspec

from rookery import protocol
from rookery.clock import Clock
from rookery.controller.fleet.events import WorkerEvent
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.fleet.worker import Worker
from rookery.controller.indexed import IndexedDict
from rookery.controller.rollout.placement import Migration, WorkerPool
from rookery.controller.rollout.request import (
    REASONS,
    Action,
    Event,
    GenerationFailed,
    InflightRequest,
    SamplingRequest,
    SamplingResult,
)
from rookery.controller.rollout.request_queues import RequestQueues
from rookery.controller.rollout.rules import ROLLOUT_RULES, RolloutRules
from rookery.controller.weights.store import WeightStore
from rookery.errors import RookeryError, Unavailable, without_paths
from rookery.settings import Settings
from rookery.telemetry.spans import TraceSpan
from rookery.turns import loop_time_of

STARVATION_SECONDS = 30.0
"""A tenant from whose waiting requests no worker took one for this long is next, whatever it was served before."""


class TokensReceived(WorkerEvent, frozen=True):
    """New tokens of a rollout request arrived."""

    kind: ClassVar[str] = "tokens"
    shown: ClassVar[bool] = False
    request: SamplingRequest
    tokens: int


class AssignmentEnded(WorkerEvent, frozen=True):
    """A request left the worker: it has its result, or moves."""

    kind: ClassVar[str] = "assignment ended"
    shown: ClassVar[bool] = False
    parts: tuple[TraceSpan, ...]
    """Its wait before the assignment, and the parts of its stay at the worker."""

    @property
    def spans(self) -> tuple[TraceSpan, ...]:
        return self.parts


class RequestMoved(WorkerEvent, frozen=True):
    """A request of the worker continues elsewhere, for one of the :data:`REASONS`."""

    kind: ClassVar[str] = "request moved"
    shown: ClassVar[bool] = False
    request: SamplingRequest
    reason: str

    @property
    def spans(self) -> tuple[TraceSpan, ...]:
        one, text = self.request, f"{self.request.id}: {self.reason}"
        return (TraceSpan("migration", self.time, self.time, self.worker.name, one.tenant, one.job, text=text),)


class VersionSwitched(WorkerEvent, frozen=True):
    """A running request continues with a newer version."""

    kind: ClassVar[str] = "switched"
    shown: ClassVar[bool] = False
    request: SamplingRequest

    @property
    def spans(self) -> tuple[TraceSpan, ...]:
        one, ref = self.request, self.request.adapter
        assert ref is not None
        text = f"{one.id}: version {ref.version}"
        return (TraceSpan("switch", self.time, self.time, self.worker.name, one.tenant, one.job, ref.policy, text),)


@dataclass(frozen=True)
class Resumption:
    """A request that a worker still holds from an earlier connection."""

    worker: Worker
    since: float
    """When the worker connected."""


class Details(NamedTuple):
    """The data of an event, for the actions that need them."""

    worker: Worker | None = None
    """The worker that gets the request, or will get it."""
    reserved: bool = False
    """Whether the request gets a reserved row of the worker."""
    recompute: bool = False
    """Whether a newer version computes the attention cache again."""


NO_DETAILS = Details()


class RolloutScheduler:
    def __init__(
        self,
        fleet: Fleet,
        weight_store: WeightStore,
        settings: Settings,
        clock: Clock,
        tenant_shares: Mapping[str, float] | None = None,
        rules: RolloutRules = ROLLOUT_RULES,
    ) -> None:
        """``tenant_shares``: those of tenants that have another one than 1."""
        self._fleet = fleet
        self._weight_store = weight_store
        self._settings = settings
        self.rules = rules
        self._clock = clock
        self._tenant_shares = tenant_shares if tenant_shares is not None else {}
        self.pool = WorkerPool(rules, clock, self._tenant_shares)
        self.queues = RequestQueues(clock, STARVATION_SECONDS, self._tenant_shares, context_order=rules.context_order)
        self.requests: IndexedDict[tuple[str, str], InflightRequest] = IndexedDict(
            job=lambda one: one.request.job,
            id=lambda one: one.request.id,
            episode=lambda one: (one.request.job, one.request.id.rpartition(".")[0]),
        )
        """By job and the request's id: those in flight, and those whose tokens are retained."""
        self.resumptions: dict[str, Resumption] = {}
        """By the request's id, until it is submitted."""
        self._resume_until = 0.0
        """Until then, workers that hold requests of an earlier controller are reconnecting."""
        self.closed: set[Worker] = set()
        """Workers that get no rollouts now; clients' requests pass all the same. Call :meth:`on_closed_changed` after
        a change."""
        self.sampled_tokens = 0
        """Tokens received."""
        self.requeues: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        """Requests that moved to another worker, by reason."""
        self.migrated_tokens = 0
        """Tokens that requests had when they moved: the worker that continues does not sample them again."""
        self.late_chunks = 0
        """Chunks of assignments that have ended."""
        self._actions: dict[Action, Callable[[InflightRequest, Details], None]] = {
            "enqueue": lambda inflight, details: self.queues.put(inflight, first=inflight.request.continues),
            "requeue": lambda inflight, details: self.queues.put(inflight, first=True),
            "dequeue": lambda inflight, details: self.queues.remove(inflight),
            "give": self._give,
            "begin": lambda inflight, details: self.pool.begin(inflight),
            "expect": self._expect,
            "recall": lambda inflight, details: self._abort(inflight, resume=True),
            "abort": lambda inflight, details: self._abort(inflight),
            "drop": lambda inflight, details: self._drop(inflight),
            "retarget": self._retarget,
            "settle": lambda inflight, details: self.queues.on_finished(inflight),
            "forget": self._forget,
        }

    async def sample(
        self, request: SamplingRequest, on_tokens: Callable[[SamplingResult], None] | None = None
    ) -> SamplingResult:
        """The complete result; ``on_tokens`` is called with it each time that tokens have arrived. Raises
        :class:`GenerationFailed`, or :class:`Unavailable` when no worker came in time."""
        inflight = self._open(request, on_tokens)
        if inflight.result.finish:
            self.apply(inflight, "leave")
            return inflight.result
        self.apply(inflight, "submit")
        request = inflight.request
        resumption = self.resumptions.get(request.id)
        if resumption is not None and self._still_held(resumption):
            self.apply(inflight, "claim", Details(resumption.worker, request.generate.client))
        else:
            self._dispatch(request.model)
        returns = False
        try:
            return await inflight.done
        except asyncio.CancelledError:
            returns = bool(request.generate.episode and inflight.result.tokens)
            raise
        finally:
            at_worker = inflight.at_worker
            self.apply(inflight, "retain" if returns else "leave")
            if at_worker:
                self._dispatch(request.model)

    def _open(self, request: SamplingRequest, on_tokens: Callable[[SamplingResult], None] | None) -> InflightRequest:
        """The retained request of this id, if this one continues its text; else a new one."""
        now = self._clock.monotonic()
        done: asyncio.Future[SamplingResult] = asyncio.get_running_loop().create_future()
        inflight = self.requests.get((request.job, request.id))
        if inflight is not None and inflight.state != "retained":
            raise RuntimeError(f"request {request.id} is in flight already")
        if inflight is not None and request.continues_text_of(inflight.request):
            newest = inflight.request.adapter
            inflight.request = request.with_adapter(newest) if request.superseded_by(newest) else request
            inflight.done, inflight.on_tokens = done, on_tokens
            inflight.waiting_since = inflight.queued_at = now
            return inflight
        if inflight is not None:
            self.apply(inflight, "leave")
        inflight = InflightRequest(request, SamplingResult(), done, on_tokens, waiting_since=now, queued_at=now)
        self.requests[request.job, request.id] = inflight
        return inflight

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def migrated(self) -> int:
        """Requests that moved to another worker."""
        return self.requeues.total()

    def waiting(self) -> int:
        """Requests that wait for a worker."""
        return len(self.queues)

    def models(self) -> set[str]:
        """The base models of its requests, except retained ones: nobody waits for these."""
        return {one.request.model for one in self.requests.values() if one.state != "retained"}

    def position(self, tenant: str, job: str) -> int | None:
        """How many rollouts precede the first one of ``job`` that waits for a worker; None when none waits."""
        return self.queues.position(tenant, job)

    def open_spans(self) -> Iterator[TraceSpan]:
        """The waits and the stays at workers that have not ended."""
        time, now = self._clock.time(), self._clock.monotonic()
        for inflight in self.requests.values():
            yield from inflight.spans(time, now)

    def unstarted(self, job: str, request: str) -> bool:
        """Whether the request of ``job`` waits for a worker and has no tokens yet."""
        inflight = self.requests.get((job, request))
        return inflight is not None and inflight.state == "waiting" and not inflight.result.tokens

    def _find(self, request: str) -> InflightRequest | None:
        return next(iter(self.requests.of(id=request)), None)

    # --- decisions of other rooms -------------------------------------------------------------------------------------

    def close_episode(self, job: str, episode: str) -> None:
        """The episode has ended: drop the tokens kept for its requests, which nobody submits again."""
        for inflight in self.requests.of(episode=(job, episode)):
            if inflight.state == "retained":
                self.apply(inflight, "leave")

    def close_job(self, job: str) -> None:
        """The job has ended: drop the tokens kept for it and the requests that workers still hold for it."""
        for inflight in self.requests.of(job=job):
            if inflight.state == "retained":
                self.apply(inflight, "leave")
        self.queues.close_job(job)
        for request in [name for name in self.resumptions if name.startswith(f"{job}-")]:  # as its episodes' names do
            del self.resumptions[request]

    def on_closed_changed(self, *workers: Worker) -> None:
        """:attr:`closed` has changed, for these workers, or for all where none is given: those that are open now get
        waiting rollouts."""
        changed = workers or self.pool.workers()
        for worker in changed:
            self.pool.update(worker, worker not in self.closed)
        for model in sorted({worker.hello.model for worker in changed}):
            self._dispatch(model)

    def switch(self, job: str, ref: protocol.AdapterRef, *, recompute: bool) -> None:
        """Move the job's requests for older versions of the policy to ``ref``: running ones from their next token on,
        with their attention cache kept, or computed again with ``recompute``; waiting and retained ones when they
        begin. Requests that finish on their version are left alone."""
        for inflight in self.requests.of(job=job):
            if inflight.request.superseded_by(ref):
                inflight.request = inflight.request.with_adapter(ref)
                self.apply(inflight, "switch", Details(recompute=recompute))

    def migrate(self, worker: Worker, limit: int | None = None) -> int:
        """Take up to ``limit`` rollouts from ``worker``; they resume elsewhere, ahead of others, with the tokens
        received. Requests that do not decode yet are taken first, then those with the fewest tokens. Returns how many
        were taken. Close the worker before, or they come back; clients' requests stay."""
        able = [one for one in self.pool.slots(worker).requests.values() if not one.request.generate.client]
        able.sort(key=lambda inflight: (inflight.state != "assigned", len(inflight.result.tokens)))
        taken = able if limit is None else able[: max(0, limit)]
        for inflight in reversed(taken):
            self._requeue(inflight, "withdraw", "offloaded")
        self._dispatch(worker.hello.model)
        return len(taken)

    def expect_resumptions(self) -> None:
        """An earlier controller existed: its workers reconnect. For a while rollouts wait for the worker that holds
        them, so that their tokens are not sampled twice."""
        self._resume_until = self._clock.monotonic() + self.rules.reconnect_seconds

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
                for inflight in list(queue):
                    if served and inflight.refused and not self.pool.has_able(inflight):
                        self._fail(inflight, "expire", GenerationFailed([*inflight.refused.values()][-1]))
                    elif served:
                        inflight.waiting_since = now
                    elif now - inflight.waiting_since > wait:
                        self._fail(inflight, "expire", Unavailable(self._fleet.missing("rollout", model)))
            limit = self._settings.worker.request_timeout_seconds
            for inflight in list(self.requests.values()):
                if inflight.at_worker and now - self.pool.last_activity(inflight) > limit:
                    reason = f"worker {inflight.assignment.worker.name} sent no tokens for {limit:g} s"
                    self._refuse(inflight, reason, "withdraw", "expire")
                    self._dispatch(inflight.request.model)

    # --- states -------------------------------------------------------------------------------------------------------

    def apply(self, inflight: InflightRequest, event: Event, details: Details = NO_DETAILS) -> None:
        """The request enters the state that follows the event, and its actions are taken. Raises
        :class:`~rookery.controller.rollout.request.InvalidEvent`."""
        for action in inflight.advance(event):
            self._actions[action](inflight, details)

    # --- dispatch -----------------------------------------------------------------------------------------------------

    def _dispatch(self, model: str) -> None:
        """Assign waiting requests to workers with room, and those of tenants with less than their share of rows beyond
        it; then move requests that could begin sooner elsewhere."""
        queue, pool = self.queues.models[model], self.pool
        waiting = queue.common.tenants

        def chooser(reserved: bool) -> Callable[[InflightRequest], Worker | None] | None:
            if not pool.has_capacity(model, reserved):
                return None
            return lambda inflight: pool.choose(inflight, reserved, waiting)

        now = self._clock.monotonic()
        resumed = now >= self._resume_until
        short = pool.short(model, waiting)
        while queue and (taken := queue.take(chooser(True), chooser(False) if resumed else None, now, short)):
            inflight, worker, reserved = taken
            self.apply(inflight, "assign", Details(worker, reserved))
            short = pool.short(model, waiting)
        while resumed and (able := pool.beyond(model, short, waiting)):
            beyond = queue.common.take(lambda inflight: pool.choose_beyond(inflight, waiting), now, among=able)
            if beyond is None:
                break
            inflight, worker = beyond
            self.apply(inflight, "assign", Details(worker))
            short = pool.short(model, waiting)
        while migration := pool.find_migration(model):
            self._migrate(migration)

    def _migrate(self, migration: Migration) -> None:
        for inflight in migration.requests:
            self._count_requeue(inflight, migration.reason)
            self.apply(inflight, "move", Details(migration.target))

    def _requeue(self, inflight: InflightRequest, event: Event, reason: str) -> None:
        """Its worker does not continue the request: another one must."""
        self._count_requeue(inflight, reason)
        self.apply(inflight, event)

    def _refuse(self, inflight: InflightRequest, reason: str, leave: Event, end: Event) -> None:
        """Its worker cannot generate the request, which leaves for another worker; or ends, if all have refused it."""
        inflight.refused[inflight.assignment.worker.name] = reason
        if self.pool.has_able(inflight):
            self._requeue(inflight, leave, "rejected")
        else:
            self._fail(inflight, end, GenerationFailed(reason))

    def _count_requeue(self, inflight: InflightRequest, reason: str) -> None:
        self.requeues[reason] += 1
        self.migrated_tokens += len(inflight.result.tokens)
        self._fleet.emit(RequestMoved(self._clock.time(), inflight.assignment.worker, inflight.request, reason))
        inflight.waiting_since = inflight.queued_at = self._clock.monotonic()

    def _fail(self, inflight: InflightRequest, event: Event, error: RookeryError) -> None:
        self.apply(inflight, event)
        if not inflight.done.done():  # its caller was cancelled in this moment
            inflight.done.set_exception(error)

    # --- actions ------------------------------------------------------------------------------------------------------

    def _give(self, inflight: InflightRequest, details: Details) -> None:
        request, worker = inflight.request, details.worker
        assert worker is not None
        inflight.result.queue_seconds += self._clock.monotonic() - inflight.queued_at
        inflight.versions.add(inflight.policy_version[1])
        resumption = self.resumptions.pop(request.id, None)
        resumed = resumption is not None and resumption.worker is worker
        self.queues.on_assigned(inflight)
        assignment = self.pool.assign(inflight, worker, reserved=details.reserved, resumed=resumed)
        generate = msgspec.structs.replace(
            request.generate,
            assignment=assignment.name,
            adapter=self._weight_store.adapter_ref(worker, request.adapter) if request.adapter is not None else None,
            prefix_tokens=inflight.result.tokens,
            reserved=assignment.reserved,
            tenant=request.tenant,
            weight=self._tenant_shares.get(request.tenant, 1.0),
            order=assignment.order,
            ttft_ms=inflight.ttft_ms,
        )
        worker.post(generate)

    def _drop(self, inflight: InflightRequest) -> None:
        worker, time = inflight.assignment.worker, self._clock.time()
        parts = inflight.spans(time, self._clock.monotonic())
        self.pool.release(inflight)
        self._fleet.emit(AssignmentEnded(time, worker, parts))

    def _expect(self, inflight: InflightRequest, details: Details) -> None:
        assert details.worker is not None
        self.pool.expect(inflight, details.worker)

    def _abort(self, inflight: InflightRequest, *, resume: bool = False) -> None:
        assignment = inflight.assignment
        abort = protocol.Abort(request=inflight.request.id, assignment=assignment.name, resume=resume)
        assignment.worker.post(abort)

    def _retarget(self, inflight: InflightRequest, details: Details) -> None:
        assignment, ref = inflight.assignment, inflight.request.adapter
        assert ref is not None
        inflight.versions.add(ref.version)
        switch = protocol.SwitchAdapter(
            request=inflight.request.id,
            assignment=assignment.name,
            adapter=self._weight_store.adapter_ref(assignment.worker, ref),
            recompute=details.recompute,
        )
        assignment.worker.post(switch)
        self._fleet.emit(VersionSwitched(self._clock.time(), assignment.worker, inflight.request))

    def _forget(self, inflight: InflightRequest, details: Details) -> None:
        request = inflight.request
        del self.requests[request.job, request.id]

    # --- events of workers --------------------------------------------------------------------------------------------

    def on_worker_changed(self, worker: Worker) -> None:
        """Its state, or the set of requests that it accepts, has changed."""
        self.pool.update(worker, worker not in self.closed)
        if not worker.has_role("rollout", worker.hello.model):
            return
        for request in sorted(worker.active_requests):  # resumptions need no room: they run already
            inflight, other = self._find(request), self.resumptions.get(request)
            if inflight is None or inflight.state == "retained":
                if other is None or not self._still_held(other):
                    self.resumptions[request] = Resumption(worker, self._clock.monotonic())
            elif inflight.state == "waiting":
                self.resumptions[request] = Resumption(worker, self._clock.monotonic())
                self.apply(inflight, "claim", Details(worker, inflight.request.generate.client))
        worker.active_requests.clear()
        rows = self._fleet.fewest_rows(worker.hello.model)
        self.queues.models[worker.hello.model].common.turn = max(1, int(rows * self.rules.tenant_turn_share))
        self._dispatch(worker.hello.model)

    def _still_held(self, resumption: Resumption) -> bool:
        """Whether the worker is sure to hold the request still: one submitted later goes where there is room."""
        return self._clock.monotonic() - resumption.since <= self._settings.worker.resume_seconds

    def on_heartbeat(self, worker: Worker, beat: protocol.Heartbeat) -> None:
        self.pool.on_heartbeat(worker, beat)
        self._dispatch(worker.hello.model)
        if (migration := self.pool.find_merge(worker, self.queues)) is not None:
            self._migrate(migration)

    def on_output(self, worker: Worker, message: protocol.Output) -> None:
        worker.max_flush_tokens = max(worker.max_flush_tokens, sum(len(chunk.tokens) for chunk in message.chunks))
        received = []
        entries = [_entries(chunk) for chunk in message.chunks]
        share = worker.decoding / max(1, sum(entries))
        for chunk, count in zip(message.chunks, entries, strict=True):
            inflight = self.pool.find(worker, chunk.assignment)
            if inflight is None or inflight.done.done():  # done here: its caller was cancelled in this moment
                self.late_chunks += 1
            else:
                with loop_time_of(inflight.request.tenant, share * count):
                    self._on_chunk(inflight, worker, chunk)
                received.append(inflight)
        self._dispatch(worker.hello.model)
        for inflight in received:
            if inflight.state == "decoding" and (target := self.pool.find_division(inflight, self.queues)) is not None:
                self.apply(inflight, "divide", Details(target))

    def _on_chunk(self, inflight: InflightRequest, worker: Worker, chunk: protocol.TokenChunk) -> None:
        result, assignment = inflight.result, inflight.assignment
        reason = without_paths(chunk.error, keep=worker.hello.model) if chunk.error else ""
        if chunk.finish == "error":
            self._fail(inflight, "error", GenerationFailed(reason or "the engine gave no reason"))
            return
        if problem := inflight.problem(chunk):
            if inflight.count_fault(chunk):
                raise protocol.BadFrame(f"request {chunk.request}: {problem}")
            self._fail(inflight, "error", GenerationFailed(problem))
            return
        tokens = result.receive(chunk)
        result.top_logprobs += chunk.top_logprobs[len(chunk.top_logprobs) - tokens :] if chunk.top_logprobs else []
        if chunk.prompt_logprobs is not None:
            result.prompt_logprobs.receive(chunk.prompt_logprobs)
        assignment.last_activity = self._clock.monotonic()
        if tokens and (not result.workers or result.workers[-1][1] != worker.name):
            result.workers.append((len(result.tokens) - tokens, worker.name))
        if tokens:
            assignment.tokens += tokens
            self.sampled_tokens += tokens
            self.apply(inflight, "tokens")
            self.queues.on_tokens(inflight)
            self._fleet.emit(TokensReceived(self._clock.time(), worker, inflight.request, tokens))
        # An abort is the worker's decision: a request that this side aborts has no assignment any more.
        if chunk.finish == "abort" and chunk.error:
            self._refuse(inflight, reason, "return", "error")
        elif chunk.finish == "abort":
            self._requeue(inflight, "return", "divided" if inflight.state == "returning" else "rejected")
        elif chunk.finish:
            result.finish = chunk.finish
            self.apply(inflight, "finish")
            inflight.done.set_result(result)
        if tokens and inflight.on_tokens is not None:
            inflight.on_tokens(result)

    def on_worker_lost(self, worker: Worker) -> None:
        for request in [request for request, held in self.resumptions.items() if held.worker is worker]:
            del self.resumptions[request]
        for inflight in reversed(self.pool.remove(worker)):
            self._requeue(inflight, "lost", "lost")
        self._dispatch(worker.hello.model)


def _entries(chunk: protocol.TokenChunk) -> int:
    """About how much of its frame's decoding a chunk takes, relative to others."""
    return 1 + len(chunk.tokens) + sum(map(len, chunk.top_logprobs))
