"""Samplers of clients: fixed weights, or the newest that a training run published, on the shared rollout scheduler.

* A sample that was acknowledged is answered, also by a later process: its requests keep their ids, so the tokens that a
  worker sampled meanwhile are used.
* A sampler keeps its weights while it is used. Idle samplers without a name lose them.
* A sample that meets an absent place (the artifacts, the database) waits, and is sampled when the place is back.
* While a session is suspended, its requests that no worker runs yet wait.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from rookery import protocol
from rookery.aio import TaskGroup, cancel_all, in_portions
from rookery.clock import SteadyTime
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.indexed import IndexedDict
from rookery.controller.outages import Outages, storage_outage
from rookery.controller.prompts import answer_room
from rookery.controller.quotas import Quotas
from rookery.controller.rollout.request import SamplingRequest, SamplingResult
from rookery.controller.rollout.scheduler import RolloutScheduler
from rookery.controller.services import Services
from rookery.controller.sessions.futures import CLIENT_AWAY, Future, FutureExpired, Futures, QueueStatus, failure
from rookery.controller.sessions.operations import AnyResult, OperationFailed, Sample, SampledSequence, SampleResult
from rookery.controller.targets import find_checkpoint
from rookery.controller.weights.gc import ArtifactCollector
from rookery.controller.weights.store import adapter_ref
from rookery.errors import NotFound, RookeryError, UserError, count_of
from rookery.storage.models import CheckpointRow, ModelRow, PolicyRow, SamplerRow, VersionRow
from rookery.storage.repositories import versions
from rookery.storage.repositories.sessions import (
    add_sampler,
    get_model,
    get_sampler,
    idle_samplers,
    keep_sampler,
    release_sampler,
    used_sampler,
)
from rookery.tokenization.token_ids import shared_ids
from rookery.turns import work_of

log = logging.getLogger("rookery.controller.sessions.samplers")

CANCELLED = "cancelled by its client"

USED_SECONDS = 60.0
"""A sampler's use is stored this often: far below the time after which an idle one is deleted."""


def sampler_row(
    id: str,
    session: str,
    time: float,
    run: ModelRow,
    policy: PolicyRow,
    weights: VersionRow | CheckpointRow,
    *,
    path: str = "",
    inflight: bool = False,
) -> SamplerRow:
    """A new sampler of ``weights``, or of the versions that ``run`` publishes in flight."""
    return SamplerRow(
        id=id, tenant=run.tenant, session=session, base_model=run.base_model, requested_model=run.requested_model,
        path=path, model=run.id, inflight=inflight, policy=policy.id, version=weights.version,
        hash="" if inflight else weights.hash, rank=policy.rank, alpha=policy.alpha, created=time, used=time,
    )  # fmt: skip


@dataclass(eq=False)
class _RunningSample:
    """``work`` samples; ``task`` waits for it and delivers the result."""

    row: SamplerRow
    work: asyncio.Task[SampleResult]
    task: asyncio.Task[None]
    error: str = ""
    """The result if ``work`` is cancelled."""
    outage: str = ""
    """The reason why it waits for a place to be back."""


@dataclass(frozen=True, eq=False)
class _ScheduledRequest:
    session: str
    id: str
    task: asyncio.Task[SamplingResult]


class Samplers:
    def __init__(
        self,
        services: Services,
        fleet: Fleet,
        rollouts: RolloutScheduler,
        quotas: Quotas,
        collector: ArtifactCollector,
        futures: Futures,
        outages: Outages,
        steady: SteadyTime,
    ) -> None:
        self._services = services
        self._fleet = fleet
        self._rollouts = rollouts
        self._quotas = quotas
        self._collector = collector
        self._futures = futures
        self._outages = outages
        self._used: dict[str, float] = {}
        """Monotonic time at which each sampler's use was last stored."""
        self._steady = steady
        self._running: IndexedDict[str, _RunningSample] = IndexedDict(session=lambda sample: sample.row.session)
        self._requests: IndexedDict[str, _ScheduledRequest] = IndexedDict(session=lambda one: one.session)
        """The requests that the rollout scheduler has, by their ids."""
        self._suspended: dict[str, asyncio.Event] = {}
        """By suspended session: set when it resumes."""

    async def stop(self) -> None:
        await cancel_all(*(task for sample in self._running.values() for task in (sample.task, sample.work)))

    async def create(
        self,
        tenant: str,
        session: str,
        id: str,
        *,
        base_model: str | None,
        requested_model: str | None,
        path: str | None,
    ) -> SamplerRow:
        """A sampler of the checkpoint ``path``, or of the base model. A repetition gets the sampler that there is, also
        where a limit is reached since, or the checkpoint is deleted."""
        services, now = self._services, self._services.clock.time()
        with suppress(NotFound):
            known = await services.store.read(get_sampler, tenant, id)
            of_path = path is not None and known.path == path and base_model in (None, known.base_model)
            if of_path or (path is None and not known.path and known.model is None and known.base_model == base_model):
                return known
        if path is not None:
            checkpoint, run, policy = await find_checkpoint(services, tenant, path)
            if base_model is not None and base_model != run.base_model:
                raise UserError(f"{path} is of {run.requested_model}, not of {requested_model}")
            row = sampler_row(id, session, now, run, policy, checkpoint, path=path)
        elif base_model is None or requested_model is None:
            raise UserError("give base_model or model_path")
        else:
            row = SamplerRow(
                id=id,
                tenant=tenant,
                session=session,
                base_model=base_model,
                requested_model=requested_model,
                created=now,
                used=now,
            )
        async with self._quotas.describing(tenant):
            return await services.store.write(add_sampler, row)

    def start(self, future: Future, operation: Sample, row: SamplerRow, reserved: ExitStack | None = None) -> None:
        """Sample; the result goes to ``future``. ``reserved`` is the part of the tenant's limits that the sample has;
        without it, as after a restart, the sample waits for one."""
        stack = ExitStack() if reserved is None else reserved
        sampling = self._sample_until_stored(future, operation, row, stack if reserved is None else None)
        work = asyncio.create_task(sampling, name=f"sample {future.id}")
        task = asyncio.create_task(self._deliver(future), name=f"result of {future.id}")
        work.add_done_callback(lambda done: stack.close())
        self._running[future.id] = _RunningSample(row, work, task)
        task.add_done_callback(lambda done: self._running.pop(future.id))

    async def cancel(self, tenant: str, request: str) -> None:
        """Give up a sample; others continue."""
        sample = self._running.get(request)
        if sample is not None and self._futures.find(tenant, request) is not None:
            self._cancel(sample, CANCELLED)
            await asyncio.gather(sample.task, return_exceptions=True)

    async def end(self, session: str) -> None:
        """The session is finished: cancel its samples."""
        tasks = [sample.task for sample in self._running.of(session=session)]
        self.drop(session, CANCELLED)
        await asyncio.gather(*tasks, return_exceptions=True)

    def drop(self, session: str, error: str) -> int:
        """Give up the session's samples: ``error`` is their result. Returns how many."""
        return sum(self._cancel(sample, error) for sample in self._running.of(session=session))

    @staticmethod
    def _cancel(sample: _RunningSample, error: str) -> bool:
        if sample.error:
            return False
        sample.error = error
        return sample.work.cancel()

    def has(self, session: str) -> bool:
        """Whether samples of the session run or wait."""
        return self._running.has(session=session)

    def suspend(self, session: str) -> None:
        """Take the session's requests that no worker runs yet out of the scheduler, until :meth:`resume`."""
        self._suspended.setdefault(session, asyncio.Event())
        for request in self._requests.of(session=session):
            if self._rollouts.unstarted(session, request.id):
                request.task.cancel()

    def resume(self, session: str) -> None:
        if (resumed := self._suspended.pop(session, None)) is not None:
            resumed.set()

    async def retire(self, idle_seconds: float) -> None:
        """Delete the weights of samplers without a name that were idle for so many seconds in which a client could use
        them: not those in which the service did not run, or the machine slept."""
        services, sampling = self._services, {sample.row.id for sample in self._running.values()}
        if self._steady.seconds < idle_seconds:
            return
        for row in await services.store.read(idle_samplers, services.clock.time() - idle_seconds):
            if row.id not in sampling:
                self._used.pop(row.id, None)
                with work_of(row.tenant):
                    await self._collector.delete_unnamed(release_sampler, row.id)

    def status(self, future: Future) -> QueueStatus | None:
        """Why a sample has no result yet; None for a future that is no running sample."""
        fleet, sample = self._fleet, self._running.get(future.id)
        if sample is None:
            return None
        row = sample.row
        if sample.outage:
            return QueueStatus(paused=True, reason=sample.outage)
        if row.session in self._suspended:
            return CLIENT_AWAY
        if not fleet.serving("rollout", row.base_model):
            return QueueStatus(paused=True, reason=fleet.missing("rollout", row.base_model))
        before = self._rollouts.position(row.tenant, row.session)
        return QueueStatus(
            reason=""
            if before is None
            else f"{count_of(before, 'request waits', 'requests wait')} for a worker before this one"
        )

    async def _deliver(self, future: Future) -> None:
        sample = self._running[future.id]
        result: AnyResult
        try:
            result = await sample.work
        except asyncio.CancelledError:
            if not sample.error:
                raise
            result = OperationFailed(error=sample.error, category="user")
        except Exception as error:
            result = failure(future, error)
        await self._futures.finish(future, result)

    async def _sample_until_stored(
        self, future: Future, operation: Sample, row: SamplerRow, waits: ExitStack | None
    ) -> SampleResult:
        """Sample, again after each outage that the sample meets; first it ``waits`` for its part of the limits."""
        quotas, attempt = self._quotas, 0
        if waits is not None:
            await quotas.generate_in_turn(waits, row.tenant, row.base_model, operation.tokens, operation.count)
        while True:
            try:
                return await self._sample(future, operation, row)
            except RookeryError as error:
                if not storage_outage(error):
                    raise
                outage = error
            sample = self._running[future.id]
            sample.outage = str(outage)
            await self._outages.over(outage, attempt)
            sample.outage, attempt = "", attempt + 1

    async def _sample(self, future: Future, operation: Sample, row: SamplerRow) -> SampleResult:
        adapter = await self._adapter(row)
        async with self._collector.referenced(adapter):
            return await self._generate_all(future, operation, row, adapter)

    async def _generate_all(
        self, future: Future, operation: Sample, row: SamplerRow, adapter: protocol.AdapterRef | None
    ) -> SampleResult:
        scored, length = 0, len(operation.prompt)
        chat = await self._services.chat(row.base_model)
        room = chat.context - length
        if room < 1:
            raise UserError(f"the prompt has {count_of(length, 'token')}, the model's context is {chat.context}")
        prompt = operation.prompt = shared_ids(operation.prompt)
        if operation.prompt_logprobs or operation.topk:
            scored = len(prompt) - 1 if operation.last is None else operation.last
        base_seed = future.id if operation.seed is None else str(operation.seed)
        stop_tokens = chat.ends(operation.stop, operation.stop_tokens)
        most = operation.max_tokens
        if most is None:
            most = answer_room(self._fleet, row.base_model, chat.context, len(prompt))
        requests = (
            protocol.Generate(
                request=f"{future.id}:{number}",
                adapter=adapter,
                prompt=prompt,
                shared_prefix=0 if scored and number == 0 else len(prompt),
                max_tokens=min(most, room),
                temperature=operation.temperature,
                seed=client_seed(f"{base_seed}:{number}"),
                stop_tokens=stop_tokens,
                stop=operation.stop,
                group=future.id if operation.count > 1 else "",
                prompt_logprobs=scored if number == 0 else 0,
                top_logprobs=operation.topk,
            )
            for number in range(operation.count)
        )
        tasks = []
        async with TaskGroup() as group:
            async for request in in_portions(requests):
                sampling = SamplingRequest(row.tenant, row.session, row.base_model, request)
                tasks.append(group.create_task(self._generate(sampling)))
        replies = [task.result() for task in tasks]
        scores = replies[0].prompt_logprobs
        scores = scores.after(len(prompt) - len(scores), operation.topk)
        return SampleResult(
            texts=[SampledSequence(r.tokens, r.logprobs, r.versions, finish=r.finish) for r in replies],
            prompt_logprobs=scores.logprobs if operation.prompt_logprobs else None,
            topk=scores if operation.topk else None,
        )

    async def _generate(self, request: SamplingRequest) -> SamplingResult:
        while True:
            if (resumed := self._suspended.get(request.job)) is not None:
                await resumed.wait()
            task = asyncio.create_task(self._rollouts.sample(request))
            self._requests[request.id] = _ScheduledRequest(request.job, request.id, task)
            try:
                return await task
            except asyncio.CancelledError:
                current = asyncio.current_task()
                if current is None or current.cancelling():  # else suspend() cancelled the request alone
                    raise
            finally:
                del self._requests[request.id]

    async def _adapter(self, row: SamplerRow) -> protocol.AdapterRef | None:
        """The weights to sample with now. Raises :class:`FutureExpired` if they were deleted."""
        store = self._services.store
        if row.inflight:
            assert row.model is not None
            run, policy = await store.read(get_model, row.tenant, row.model)
            assert run.inflight is not None
            return adapter_ref(policy, await store.read(versions.version, row.tenant, row.policy, run.inflight))
        if not row.hash:
            return None
        await self._touch(row)
        return protocol.AdapterRef(
            policy=row.policy, version=row.version, hash=row.hash, rank=row.rank, alpha=row.alpha
        )

    async def _touch(self, row: SamplerRow) -> None:
        """Record that the sampler's weights are used. Raises :class:`FutureExpired` if they were deleted."""
        store, now = self._services.store, self._services.clock.monotonic()
        if row.id in self._used and now - self._used[row.id] < USED_SECONDS:
            return
        if not (await store.read(get_sampler, row.tenant, row.id)).kept:
            if not row.path or (await find_checkpoint(self._services, row.tenant, row.path))[0].hash != row.hash:
                raise FutureExpired(
                    f"the weights of sampler {row.id} were deleted after it was idle; save them under a name"
                )
            await store.write(keep_sampler, row.id)
        self._used[row.id] = now
        await store.write(used_sampler, row.id, self._services.clock.time())


def client_seed(text: str) -> int:
    """A seed of 63 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
