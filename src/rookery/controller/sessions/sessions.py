"""Sessions of clients that drive training and sampling themselves, call by call (the Tinker API).

* Every training run and sampler belongs to a session, every session to a tenant. Another tenant's answer as unknown.
* A request is answered with its id as soon as it is durable; the client asks for the result by that id. Ids follow from
  the client's own numbers (``<run>/<seq>``), so a request that is sent again is the same request.
* A finished session accepts no more operations; of its runs only checkpoints and samplers stay.
* A session without a heartbeat for ``idle`` seconds is suspended until the next one: it releases its trainer slots, and
  its queued operations wait. They are dropped after ``abandon`` seconds; after ``expire`` seconds the session is
  finished (:mod:`rookery.controller.sessions.rules`).
* Memory follows work: the runs of suspended and of finished sessions that have no operation are unloaded, and loaded
  again by the next one; so are those of a tenant with more than ``SessionRules.runs_loaded``. Nothing done for one
  session, or at each heartbeat, looks at the runs of the others.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any
from weakref import WeakValueDictionary

from rookery.clock import SteadyTime
from rookery.controller.context import ControllerContext
from rookery.controller.indexed import IndexedDict
from rookery.controller.sessions.futures import Future, FutureExpired, Futures, QueueStatus
from rookery.controller.sessions.operations import (
    AnyOperation,
    AnyResult,
    CreateModel,
    ForwardBackwardOperation,
    InvalidOperation,
    LoadState,
    OperationFailed,
    OperationRefused,
    Sample,
    SaveSampler,
    SaveState,
)
from rookery.controller.sessions.rules import SessionRules
from rookery.controller.sessions.samplers import Samplers
from rookery.controller.sessions.training_run import TrainingRun
from rookery.controller.targets import Targets, find_checkpoint
from rookery.controller.training.slots import TrainerSlots
from rookery.errors import NotFound, RookeryError, TooManyRequests, UserError, count_of
from rookery.spec.policy import TARGETS
from rookery.storage.models import FutureRow, ModelRow, PolicyRow, SamplerRow, SessionRow
from rookery.storage.repositories import sessions
from rookery.turns import work_of

log = logging.getLogger("rookery.controller.sessions.sessions")

SEEN_SECONDS = 60.0
"""A session's last sign of life is stored this often, and kept in memory in between."""

SWEEP_SECONDS = 60.0
"""How often expired rows are looked for: their lifetimes are hours."""

LORA_ALPHA = 32.0
"""Clients' adapters are scaled by this over their rank; the API has no field for it."""

ATTENTION = ("q", "k", "v", "o")
"""The layers that ``train_attn`` selects; ``train_mlp`` selects the others."""


@dataclass(eq=False)
class KnownSession:
    """A session whose client was heard lately, or which has runs or samples in memory."""

    seen: float
    """When its client gave its last sign of life (monotonic seconds)."""
    stored: float = -math.inf
    """When that was stored last."""
    suspended: bool = False
    row: SessionRow | None = None
    """Without what its client says about it: as objects it may take twenty times its text. None while it must be read,
    as that of a finished session."""


class Sessions:
    """Clients' sessions, with their training runs, ``samplers`` and ``futures``."""

    def __init__(self, context: ControllerContext, targets: Targets, slots: TrainerSlots, rules: SessionRules) -> None:
        self._context = context
        self._targets = targets
        self.rules = rules
        self.futures = Futures(context, rules.poll)
        self._steady = SteadyTime(context.clock)
        rooms = context.rooms
        self.samplers = Samplers(
            context, rooms.fleet, rooms.rollouts, rooms.quotas, rooms.collector, self.futures, context.outages,
            self._steady,
        )  # fmt: skip
        self._slots = slots
        self.runs: IndexedDict[str, TrainingRun] = IndexedDict(
            session=lambda run: run.row.session,
            tenant=lambda run: run.row.tenant,
            model=lambda run: run.row.base_model,
        )
        """Training runs in memory, by their ids; of each tenant the one that was used the longest ago first."""
        self._queued: dict[str, TrainingRun] = {}
        """Among them, all that have queued operations."""
        self.loading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """A lock lives as long as a task holds it or waits for it."""
        self.known: dict[str, KnownSession] = {}
        """By id, the one that was seen the longest ago first."""

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Resume the operations that an earlier process acknowledged and did not finish."""
        store = self._context.store
        for row in await store.read(sessions.open_futures):
            with work_of(row.tenant):
                await self._resume_operation(row)

    async def _resume_operation(self, row: FutureRow) -> None:
        rooms, store = self._context.rooms, self._context.store
        if row.model is not None:
            run = await self.run(row.tenant, row.model)
            rooms.models.provide(run.row.base_model)
            return
        future, operation = self.futures.reopen(row)
        assert isinstance(operation, Sample)
        sampler = await store.read(sessions.get_sampler, row.tenant, operation.sampler)
        await self._row(row.tenant, sampler.session)
        self._know(sampler.session)
        rooms.models.provide(sampler.base_model)
        rooms.rollouts.expect_resumptions()
        self.samplers.start(future, operation, sampler)

    async def stop(self) -> None:
        for run in self.runs.values():
            await run.stop()
        await self.samplers.stop()

    async def watch(self) -> None:
        """Enforce waits, until cancelled."""
        while True:
            await self._context.clock.sleep(self._context.settings.worker.heartbeat_seconds)
            self._slots.review()
            for id, run in list(self._queued.items()):
                run.expire_gap(self.rules.seq_gap)
                if not run.queued:
                    del self._queued[id]
            self._suspend_silent()

    async def watch_lifetimes(self) -> None:
        """Delete what has expired, until cancelled. It may be much of one tenant's: no wait depends on it. A sweep that
        failed is tried again at the next heartbeat."""
        clock, settings, seconds = self._context.clock, self._context.settings, SWEEP_SECONDS
        while True:
            await clock.sleep(seconds)
            seconds = SWEEP_SECONDS
            try:
                await self.sweep()
            except Exception as error:
                unforeseen = None if isinstance(error, RookeryError) else error
                log.error("the sweep of expired sessions and results failed: %s", error, exc_info=unforeseen)
                seconds = settings.worker.heartbeat_seconds

    def _suspend_silent(self) -> None:
        """Suspend the sessions without a heartbeat, and drop the operations of those that are silent for too long. A
        session that its client finished runs its last operations."""
        rules, now = self.rules, self._context.clock.monotonic()
        for session, known in list(takewhile(lambda item: now - item[1].seen > rules.idle, self.known.items())):
            runs = self.runs.of(session=session)
            if not runs and not self.samplers.has(session):
                self._forget(session)
                continue
            if known.row is None:
                for run in runs:
                    run.release_slot()
                continue
            if not known.suspended:
                known.suspended = True
                for run in runs:
                    run.suspend()
            self.samplers.suspend(session)  # also requests that came back from a lost worker
            if now - known.seen > rules.abandon:
                error = f"dropped: session {session} had no heartbeat for {rules.abandon:.0f} s"
                count = sum(run.drop(error) for run in runs) + self.samplers.drop(session, error)
                if count:
                    log.warning("%d operations %s", count, error, extra={"tenant": known.row.tenant})

    def _forget(self, session: str) -> None:
        """The session's client is away, and nothing of it is in memory."""
        self._resume(session)
        del self.known[session]

    async def sweep(self) -> None:
        """Delete what has expired: results, checkpoints, weights of idle samplers, lost and finished sessions."""
        context, store, rules, steady = self._context, self._context.store, self.rules, self._steady
        await self.futures.drop(steady.before(rules.result), rules.fetched)
        for row in await store.read(sessions.expired_checkpoints, self._time()):
            if row.expires is not None and steady.may_expire(row.expires - row.created):
                with work_of(row.tenant):
                    await self.delete_checkpoint(row.tenant, row.model, row.kind, row.name)
        await self.samplers.retire(rules.sampler_idle)
        limit = rules.expire
        for session in await store.read(sessions.silent_sessions, steady.before(limit)):
            known = self.known.get(session.id)
            if known is None or context.clock.monotonic() - known.seen > limit:
                extra = {"tenant": session.tenant}
                log.info("session %s is finished: no heartbeat for %.0f s", session.id, limit, extra=extra)
                with work_of(session.tenant):
                    await self.finish(session.tenant, session.id, "lost")
        await self._unload_idle()
        for id in await store.read(sessions.over_models, steady.before(rules.result)):
            if id not in self.runs:
                await context.rooms.collector.delete_unnamed(sessions.end_model, id)

    async def _unload_idle(self) -> None:
        """Remove from memory the runs without an operation whose sessions are suspended or finished. Another one loads
        them again, as a start of the service does."""
        for id, run in list(self.runs.items()):
            if not run.unused:
                continue
            row = await self._row(run.row.tenant, run.row.session)
            if row.finished is not None or self._is_suspended(row.id):
                await self._unload(id, run)

    async def _unload(self, id: str, run: TrainingRun) -> None:
        """Remove from memory a run that got no operation meanwhile."""
        async with self.loading.setdefault(id, asyncio.Lock()):
            if run.unused and self.runs.get(id) is run:
                del self.runs[id]
                await run.close()

    async def _unload_for_another(self, tenant: str) -> None:
        """A run of the tenant is about to be loaded."""
        if self.runs.count(tenant=tenant) >= self.rules.runs_loaded:
            unused = next((run for run in self.runs.of(tenant=tenant) if run.unused), None)
            if unused is not None:
                await self._unload(unused.row.id, unused)

    def _time(self) -> float:
        return self._context.clock.time()

    # --- sessions -----------------------------------------------------------------------------------------------------

    async def create(
        self, tenant: str, key: str | None, *, sdk_version: str, name: str, about: dict[str, Any]
    ) -> SessionRow:
        """A new session; the existing one if ``key`` was used before."""
        now = self._time()
        row = SessionRow(
            id=self._context.ids.new("session"), tenant=tenant, idempotency_key=key, created=now, seen=now,
            sdk_version=sdk_version, name=name, about=about,
        )  # fmt: skip
        async with AsyncExitStack() as reserved:
            if key is None or not await self._context.store.read(sessions.has_session, tenant, key):
                await reserved.enter_async_context(self._context.rooms.quotas.describing(tenant, about))
            log.info("session with SDK %s", sdk_version, extra={"tenant": tenant})
            return await self._context.store.write(sessions.add_session, row)

    async def get(self, tenant: str, id: str) -> SessionRow:
        """The session, whose client is alive, without what that says about it. Raises :class:`NotFound`."""
        row, now = await self._row(tenant, id), self._context.clock.monotonic()
        if row.finished is None and now - self._know(id).stored > SEEN_SECONDS:
            await self._context.store.write(sessions.seen_session, id, self._time())
            self._know(id).stored = now
            row = await self._row(tenant, id)  # it may have been finished meanwhile
        known = self._know(id)
        known.seen = self._context.clock.monotonic()
        self.known[id] = self.known.pop(id)  # it is the last one now
        self._resume(id)
        return row

    def _know(self, session: str) -> KnownSession:
        """The session's record; one that was not known counts as seen now."""
        known = self.known.get(session)
        if known is None:
            known = self.known[session] = KnownSession(self._context.clock.monotonic())
        return known

    def _is_suspended(self, session: str) -> bool:
        known = self.known.get(session)
        return known is not None and known.suspended

    def _resume(self, session: str) -> None:
        if self._is_suspended(session):
            self.known[session].suspended = False
            self.samplers.resume(session)
            for run in self.runs.of(session=session):
                run.resume()

    async def heartbeat(self, tenant: str, id: str) -> None:
        """Raises :class:`FutureExpired` for a finished session."""
        if (await self.get(tenant, id)).finished is not None:
            raise FutureExpired(f"session {id} is finished")

    async def finish(self, tenant: str, id: str, status: str) -> None:
        """End the session: its trainer slots and samplers are free."""
        await self._row(tenant, id)
        try:
            await self._context.store.write(sessions.finish_session, id, status, self._time())
        finally:
            self._know(id).row = None  # the database may have stored it and failed to answer
        self._resume(id)
        await self.samplers.end(id)
        for run in self.runs.of(session=id):
            run.release_slot()

    async def _row(self, tenant: str, id: str) -> SessionRow:
        known = self.known.get(id)
        row = known.row if known is not None else None
        if row is None:
            row = replace(await self._context.store.read(sessions.get_session, tenant, id), about={})
            if row.finished is None:
                self._know(id).row = row
        if row.tenant != tenant:
            raise NotFound(f"no session {id}")
        return row

    async def _require_open(self, tenant: str, id: str) -> None:
        if (await self.get(tenant, id)).finished is not None:
            raise UserError(f"session {id} is finished; create a new client")

    # --- training runs ------------------------------------------------------------------------------------------------

    async def create_run(
        self,
        tenant: str,
        session: str,
        number: int,
        operation: CreateModel | LoadState,
        *,
        base_model: str | None,
        lora: dict[str, Any],
        about: dict[str, Any],
    ) -> str:
        """Create a training run whose first operation is ``operation``; returns the request's id. ``lora``: ``rank``,
        ``train_attn`` and ``train_mlp``; a run that loads a checkpoint has that one's base model and adapter shape."""
        context, settings, now = self._context, self._context.settings, self._time()
        await self._require_open(tenant, session)
        name = await self._targets.model(tenant, base_model) if base_model is not None else ""
        if isinstance(operation, LoadState):
            _, source, _ = await find_checkpoint(context, tenant, operation.path)
            if name not in ("", source.base_model):
                raise UserError(f"{operation.path} is of {source.requested_model}, not of {base_model}")
            name, base_model, lora = source.base_model, source.requested_model, source.lora
        rank, limit = lora["rank"], settings.engine.max_rank
        if not 1 <= rank <= limit:
            raise UserError(f"rank {rank} is not served; allowed: 1 to {limit}")
        id, policy, alpha = f"{session}:train:{number}", context.ids.new("policy"), LORA_ALPHA
        targets = [target for target in TARGETS if lora["train_attn" if target in ATTENTION else "train_mlp"]]
        row = ModelRow(
            id=id, tenant=tenant, session=session, base_model=name, requested_model=base_model or "", policy=policy,
            lora=lora, about=about, created=now, used=now,
        )  # fmt: skip
        quotas = context.rooms.quotas
        with ExitStack() as reserved:  # the model is in use by it, until the run is loaded
            try:
                known, shape = await context.store.read(sessions.get_model, tenant, id)
                if (known.base_model, shape.rank, [*shape.targets]) != (name, rank, targets):
                    raise UserError(f"model {id} was created before, of another base model, rank or layers")
            except NotFound:
                reserved.enter_context(quotas.using_model(tenant, name))
                await quotas.check_stored(tenant)
                new = PolicyRow(id=policy, tenant=tenant, name=id, rank=rank, alpha=alpha, targets=targets)
                async with quotas.describing(tenant, about):
                    await context.store.write(sessions.add_model, row, new)
            context.rooms.models.provide(name)
            return await self.submit(tenant, id, 0, operation)

    def models_in_use(self, tenant: str | None = None) -> set[str]:
        """The base models of the runs whose clients are not idle, of one tenant or of all."""

        def used(runs: Iterable[TrainingRun]) -> Iterator[str]:
            return (run.row.base_model for run in runs if not self._is_suspended(run.row.session))

        if tenant is not None:
            return set(used(self.runs.of(tenant=tenant)))
        return {model for model in self.runs.groups("model") if any(used(self.runs.of(model=model)))}

    async def run(self, tenant: str, id: str) -> TrainingRun:
        """The training run, loaded if it was not in memory. Raises :class:`NotFound`."""
        run = self.runs.pop(id, None)
        if run is not None:
            self.runs[id] = run  # it is the last one now
        else:
            async with self.loading.setdefault(id, asyncio.Lock()):
                run = self.runs.get(id)
                if run is None:
                    row, policy = await self._context.store.read(sessions.get_model, tenant, id)
                    await self._row(tenant, row.session)
                    await self._unload_for_another(tenant)
                    run = TrainingRun(self._context, self.futures, self._slots, replace(row, about={}), policy)
                    await run.load()
                    if self._know(row.session).suspended:
                        run.suspend()
                    self.runs[id] = self._queued[id] = run
        if run.row.tenant != tenant:
            raise NotFound(f"no model {id}")
        return run

    async def submit(self, tenant: str, id: str, seq: int | None, operation: AnyOperation) -> str:
        """Queue an operation of a training run at ``seq`` (None: after all that arrived); returns the request's id.
        Raises :class:`OperationRefused`, and :class:`TooManyRequests` beyond a limit."""
        run = await self.run(tenant, id)
        with run.expecting():
            return await self._submit(run, seq, operation)

    async def _submit(self, run: TrainingRun, seq: int | None, operation: AnyOperation) -> str:
        tenant, id, quotas = run.row.tenant, run.row.id, self._context.rooms.quotas
        await self._check(run, operation)
        await self._require_open(tenant, run.row.session)
        self._context.rooms.models.provide(run.row.base_model)
        await self._check_limits(run, seq, operation)
        number, size = run.last_seq + 1 if seq is None else seq, operation.size
        quotas.count_queued(tenant, id, size)  # until it is in the queue, which counts it
        try:
            future, created = await self._open_future(run, number, operation)
            problem = run.enqueue(future, operation) if created else ""
            self._queued[id] = run
        finally:
            quotas.count_queued(tenant, id, -size)
        if problem:
            await self.futures.finish(future, OperationFailed(error=problem, category="user"))
        return future.id

    async def _open_future(self, run: TrainingRun, number: int, operation: AnyOperation) -> tuple[Future, bool]:
        """As :meth:`Futures.open`. An operation that stores a row counts as one from now on."""
        tenant, id = run.row.tenant, run.row.id
        async with AsyncExitStack() as reserved:
            stores = isinstance(operation, SaveState | SaveSampler)
            if stores and not await self.futures.known(tenant, f"{id}/{number}"):
                describing = self._context.rooms.quotas.describing(tenant, getattr(operation, "about", ""))
                await reserved.enter_async_context(describing)
            return await self.futures.open(tenant, f"{id}/{number}", operation, id, number)

    async def _check(self, run: TrainingRun, operation: AnyOperation) -> None:
        """Raises :class:`OperationRefused`."""
        if isinstance(operation, ForwardBackwardOperation):
            chat = await self._context.chat(run.row.base_model)
            longest = max((shape[0] for shape in operation.shapes), default=0)
            if longest > chat.context:
                raise OperationRefused(
                    f"a datum has {count_of(longest, 'token')}; the model's context is {chat.context}"
                )

    async def _check_limits(self, run: TrainingRun, seq: int | None, operation: AnyOperation) -> None:
        """Raises :class:`TooManyRequests`, not for a repetition: it is nothing new to a limit."""
        tenant, quotas, name = run.row.tenant, self._context.rooms.quotas, f"{run.row.id}/{seq}"
        if self.futures.find(tenant, name) is not None:
            return
        data = isinstance(operation, ForwardBackwardOperation)
        try:
            if data:
                quotas.check_tokens(tenant)
                await quotas.check_database(tenant)
            elif isinstance(operation, SaveState | SaveSampler):
                await quotas.check_stored(tenant)
            quotas.check_queued(tenant, run.row.id, operation.size, data=data, frees=run.frees_room)
        except TooManyRequests:
            if not await self.futures.known(tenant, name):
                run.reset_gap()  # it arrived
                raise

    async def submit_in_turn(self, tenant: str, id: str, seq: int | None, operation: AnyOperation) -> str:
        """As :meth:`submit`. An operation that is refused for longer than clients repeat it takes its turn with the
        error as its result: the model's later operations wait for its number."""
        try:
            return await self.submit(tenant, id, seq, operation)
        except (OperationRefused, TooManyRequests) as error:
            if isinstance(error, TooManyRequests) and error.retry_after <= self.rules.seq_gap:
                raise
            reason = str(error)
        digest = await self.futures.digest(operation)
        refused = InvalidOperation.instead_of(operation, reason, digest)
        return await self.submit(tenant, id, seq, refused)

    # --- results ------------------------------------------------------------------------------------------------------

    async def wait(self, tenant: str, request: str) -> AnyResult | QueueStatus:
        """The result of a request as soon as it is there, or after a while the reason why it is not. Raises
        :class:`~rookery.controller.sessions.futures.FutureExpired`."""
        found = await self.futures.wait(tenant, request)
        return self._status(found) if isinstance(found, Future) else found

    def _status(self, future: Future) -> QueueStatus:
        if future.unstored:
            return QueueStatus(reason=future.unstored)
        if (sampling := self.samplers.status(future)) is not None:
            return sampling
        run = self.runs.get(future.id.rpartition("/")[0])
        return run.status(future) if run is not None else QueueStatus()

    # --- samplers and checkpoints -------------------------------------------------------------------------------------

    async def create_sampler(
        self, tenant: str, session: str, number: int, *, base_model: str | None, path: str | None
    ) -> SamplerRow:
        """A sampler of a checkpoint, or of the base model."""
        await self._require_open(tenant, session)
        name = await self._targets.model(tenant, base_model) if base_model is not None else None
        id = f"{session}:sample:{number}"
        row = await self.samplers.create(tenant, session, id, base_model=name, requested_model=base_model, path=path)
        self._context.rooms.models.provide(row.base_model)
        return row

    async def sample(self, tenant: str, number: int, operation: Sample) -> str:
        """Sample ``operation.count`` texts; returns the request's id."""
        row = await self._context.store.read(sessions.get_sampler, tenant, operation.sampler)
        await self._require_open(tenant, row.session)
        name, quotas = f"{row.id}/{number}", self._context.rooms.quotas
        with ExitStack() as reserved:
            try:
                if self.futures.find(tenant, name) is None:
                    await quotas.check_database(tenant)
                new = self.futures.find(tenant, name) is None
                if new:
                    reserved.enter_context(quotas.generating(tenant, row.base_model, operation.tokens, operation.count))
            except TooManyRequests:
                if not await self.futures.known(tenant, name):
                    raise
                new = False
            self._context.rooms.models.provide(row.base_model)
            future, created = await self.futures.open(tenant, name, operation, seq=number)
            if created:  # a repetition that is to start it waits for its part of the limits
                self.samplers.start(future, operation, row, reserved.pop_all() if new else None)
        return future.id

    async def delete_checkpoint(self, tenant: str, run: str, kind: str, name: str) -> None:
        collector = self._context.rooms.collector
        await collector.delete_unnamed(sessions.delete_checkpoint, tenant, run, kind, name)
