"""Sessions of clients that drive training and sampling themselves, call by call.

* Everything belongs to a session, every session to a tenant; another tenant's things are as if they were not there.
* A call is answered with its request's id as soon as it is durable; its outcome is asked for by that id. Ids follow
  from what the client numbers itself (``<model>/<seq>``), so a call that is sent again is the same one.
* A session that was finished takes no more calls; of its models only what checkpoints and samplers name stays. One
  whose client is silent gives up its places in the workers and nothing else, until it is silent for so long that it is
  finished, too.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

from rookery.controller.context import ControllerContext
from rookery.controller.sessions import operations
from rookery.controller.sessions.checkpoints import checkpoint
from rookery.controller.sessions.completion_stream import Completion, CompletionStream
from rookery.controller.sessions.futures import FutureExpired, Futures, PendingOperations
from rookery.controller.sessions.samplers import Samplers
from rookery.controller.sessions.training_run import TrainingRun
from rookery.controller.training.slots import TrainerSlots
from rookery.controller.validation import JobValidator
from rookery.errors import NotFound, RookeryError, UserError
from rookery.spec.policy import TARGETS
from rookery.storage.rows import CheckpointRow, ModelRow, NewPolicy, PolicyRow, SamplerRow, SessionRow

log = logging.getLogger("rookery.controller.sessions.sessions")

SEEN_SECONDS = 60.0
"""That a session's client is there is stored this often; in between it is remembered."""

SWEEP_SECONDS = 60.0
"""How often expired things are looked for: their lifetimes are hours."""


class Sessions:
    def __init__(self, world: ControllerContext, intake: JobValidator, provide: Callable[[str], None]) -> None:
        """``provide(model)`` asks for a local worker with that base model if none is meant to be there."""
        self._world = world
        self._intake = intake
        self._provide = provide
        self._futures = Futures(world.store, world.clock, world.settings.worker.heartbeat_seconds)
        self._feeds = CompletionStream(self._futures, world.store, world.clock)
        self._places = TrainerSlots(world.fleet, world.settings, world.clock)
        self._models: dict[str, TrainingRun] = {}
        self._loading: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Each as long as somebody holds it or waits for it."""
        self._known: dict[str, SessionRow] = {}
        self._seen: dict[str, float] = {}
        self._stored: dict[str, float] = {}
        """When each session's last sign of life was stored."""
        self.samplers = Samplers(world, self._futures)

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take up what an earlier process acknowledged and did not answer."""
        world = self._world
        for row in await world.store.open_futures():
            if row.model is not None:
                model = await self._model(row.tenant, row.model)
                self._provide(model.row.base_model)
            else:
                future, call = self._futures.recall(row)
                assert isinstance(call, operations.Sample)
                sampler = await world.store.get_sampler(row.tenant, call.sampler)
                self._provide(sampler.base_model)
                world.rollouts.expect_resumptions()
                self.samplers.begin(future, call, sampler)

    async def stop(self) -> None:
        for model in self._models.values():
            await model.stop()
        await self.samplers.stop()

    async def watch(self) -> None:
        """Look after waits and lifetimes, for ever: what a sweep could not do is tried again at the next beat."""
        world, swept = self._world, self._world.clock.monotonic()
        while True:
            await world.clock.sleep(world.settings.worker.heartbeat_seconds)
            self._places.review()
            now = world.clock.monotonic()
            for model in list(self._models.values()):
                model.expire(world.settings.sessions.session_seq_gap_seconds)
                seen = self._seen.setdefault(model.row.session, now)
                if now - seen > world.settings.sessions.session_idle_seconds:
                    model.leave()
            if now - swept > SWEEP_SECONDS:
                try:
                    await self.sweep()
                    swept = now
                except Exception as error:
                    unforeseen = None if isinstance(error, RookeryError) else error
                    log.error("not all that has expired is let go of yet: %s", error, exc_info=unforeseen)

    async def sweep(self) -> None:
        """Let go of what has expired: results, checkpoints, idle samplers, lost and finished sessions."""
        world, now = self._world, self._world.clock.time()
        self._feeds.sweep(world.settings.sessions.session_idle_seconds)
        await world.store.drop_futures(now - world.settings.sessions.session_result_seconds)
        for row in await world.store.expired_checkpoints(now):
            await self.delete_checkpoint(row.tenant, row.model, row.kind, row.name)
        await self.samplers.retire()
        silent = world.settings.sessions.session_expire_seconds
        for session in await world.store.silent_sessions(now - silent):
            if world.clock.monotonic() - self._seen.get(session.id, -math.inf) > silent:
                said = {"tenant": session.tenant}
                log.info("session %s is finished: silent for %.0f s", session.id, silent, extra=said)
                await self.finish(session.tenant, session.id, "lost")
        await self._clear()
        for model in await world.store.over_models(now - world.settings.sessions.session_result_seconds):
            if model not in self._models:
                for digest in await world.store.end_model(model):
                    await world.collector.delete_unnamed(world.store.database.unnamed, digest)

    async def _clear(self) -> None:
        """Remember no model of a finished session that has nothing to do, and no session of which nobody is heard."""
        for id, model in list(self._models.items()):
            row = await self._row(model.row.tenant, model.row.session)
            # Calls look at their session last: from then on they are among the futures, until they are in the line.
            if row.finished is not None and model.resting and not self._futures.waits(id):
                del self._models[id]
                await model.end()
        away = self._world.clock.monotonic() - self._world.settings.sessions.session_idle_seconds
        used = {model.row.session for model in self._models.values()}
        for session in [id for id, seen in self._seen.items() if seen < away and id not in used]:
            del self._seen[session]
            self._stored.pop(session, None)
            self._known.pop(session, None)

    # --- sessions -----------------------------------------------------------------------------------------------------

    async def create(
        self, tenant: str, key: str | None, *, sdk_version: str, name: str, about: dict[str, Any]
    ) -> SessionRow:
        """A session; the same one for the same ``key``."""
        world = self._world
        now = world.clock.time()
        row = SessionRow(
            id=world.ids.new("session"), tenant=tenant, idempotency_key=key, created=now, seen=now, finished=None,
            status="", sdk_version=sdk_version, name=name, about=about,
        )  # fmt: skip
        row = await world.store.add_session(row)
        log.info("session with SDK %s", sdk_version, extra={"tenant": tenant})
        return row

    async def session(self, tenant: str, id: str) -> SessionRow:
        """Its client is there. Raises :class:`NotFound`."""
        row, now = await self._row(tenant, id), self._world.clock.monotonic()
        if row.finished is None and now - self._stored.get(id, -math.inf) > SEEN_SECONDS:
            await self._world.store.seen_session(id, self._world.clock.time())
            self._stored[id] = now
            row = await self._row(tenant, id)  # it may have been finished meanwhile
        self._seen[id] = now
        return row

    async def _row(self, tenant: str, id: str) -> SessionRow:
        row = self._known.get(id)
        if row is None:
            row = await self._world.store.get_session(tenant, id)
            if row.finished is None:
                self._known[id] = row
        if row.tenant != tenant:
            raise NotFound(f"no session {id}")
        return row

    async def all(self, tenant: str) -> Sequence[SessionRow]:
        """Newest first."""
        return await self._world.store.list_sessions(tenant)

    async def parts(self, tenant: str, id: str) -> tuple[Sequence[ModelRow], Sequence[SamplerRow]]:
        """What belongs to a session."""
        world = self._world
        models = await world.store.list_models(tenant, id)
        return models, await world.store.list_samplers(tenant, id)

    async def heartbeat(self, tenant: str, id: str) -> None:
        """Raises :class:`Gone` for a finished session."""
        if (await self.session(tenant, id)).finished is not None:
            raise FutureExpired(f"session {id} is finished")

    async def finish(self, tenant: str, id: str, status: str) -> None:
        """Its client is done: places and samplers are free."""
        world = self._world
        await self._row(tenant, id)
        try:
            await world.store.finish_session(id, status, world.clock.time())
        finally:
            self._known.pop(id, None)  # also where it is stored and nobody heard
        await self.samplers.end(id)
        for model in list(self._models.values()):
            if model.row.session == id:
                model.leave()

    async def _open_session(self, tenant: str, id: str) -> SessionRow:
        row = await self.session(tenant, id)
        if row.finished is not None:
            raise UserError(f"session {id} is finished; create a new client")
        return row

    # --- models -------------------------------------------------------------------------------------------------------

    async def create_model(
        self,
        tenant: str,
        session: str,
        number: int,
        *,
        base_model: str,
        rank: int,
        targets: list[str],
        seed: int | None,
        lora: dict[str, Any],
        about: dict[str, Any],
    ) -> str:
        """Makes a model; answers the request's id."""
        world = self._world
        await self._open_session(tenant, session)
        if not 1 <= rank <= world.settings.engine.max_rank:
            raise UserError(f"rank {rank} is not served; allowed: 1 to {world.settings.engine.max_rank}")
        name = await self._intake.model(tenant, base_model)
        id = f"{session}:train:{number}"
        await self._add(tenant, session, id, name, base_model, rank, targets, lora, about)
        return await self.call(tenant, id, 0, operations.CreateModel(seed=seed))

    async def create_from(
        self,
        tenant: str,
        session: str,
        number: int,
        call: operations.LoadState,
        *,
        base_model: str | None,
        about: dict[str, Any],
    ) -> str:
        """Makes a model that goes on from a checkpoint; answers the request's id."""
        world = self._world
        await self._open_session(tenant, session)
        found = await checkpoint(world, tenant, call.path)
        source, policy = await world.store.get_model(tenant, found.model)
        if base_model is not None and await self._intake.model(tenant, base_model) != source.base_model:
            raise UserError(f"{call.path} is of {source.asked_model}, not of {base_model}")
        id = f"{session}:train:{number}"
        await self._add(
            tenant, session, id, source.base_model, source.asked_model, policy.rank, list(policy.targets), source.lora,
            about,
        )  # fmt: skip
        return await self.call(tenant, id, 0, call)

    async def _add(
        self,
        tenant: str,
        session: str,
        id: str,
        base_model: str,
        asked_model: str,
        rank: int,
        targets: list[str],
        lora: dict[str, Any],
        about: dict[str, Any],
    ) -> None:
        """Stores a model without weights, unless there is one."""
        world = self._world
        now = world.clock.time()
        row = ModelRow(
            id=id, tenant=tenant, session=session, base_model=base_model, asked_model=asked_model,
            policy=world.ids.new("policy"), lora=lora, about=about, created=now, used=now, done_seq=-1, inflight=None,
        )  # fmt: skip
        policy = NewPolicy(
            id=row.policy, name=id, rank=rank, alpha=world.settings.sessions.session_lora_alpha,
            targets=[target for target in TARGETS if target in targets],
        )  # fmt: skip
        try:
            await world.store.get_model(tenant, id)
        except NotFound:
            await world.store.add_model(row, policy)
        self._provide(base_model)

    async def _model(self, tenant: str, id: str) -> TrainingRun:
        """The model, taken up if it was not. Raises :class:`NotFound`."""
        model = self._models.get(id)
        if model is None:
            async with self._loading.setdefault(id, asyncio.Lock()):
                model = self._models.get(id)
                if model is None:
                    row, policy = await self._world.store.get_model(tenant, id)
                    model = TrainingRun(self._world, self._futures, self._places, row, policy)
                    await model.load()
                    self._models[id] = model
        if model.row.tenant != tenant:
            raise NotFound(f"no model {id}")
        return model

    async def call(self, tenant: str, id: str, seq: int | None, call: operations.AnyCall) -> str:
        """A call on a model, in the order of ``seq`` (None: behind all that came); answers the request's id."""
        model = await self._model(tenant, id)
        if isinstance(call, operations.ForwardBackward):
            await self._check(model, call)
        await self._open_session(tenant, model.row.session)
        number = model.last + 1 if seq is None else seq
        future, created = await self._futures.open(tenant, f"{id}/{number}", call, id, number)
        if created:
            try:
                model.put(future, call)
            except UserError as error:
                await self._futures.settle(future, operations.OperationFailed(error=str(error), category="user"))
        return future.id

    async def _check(self, model: TrainingRun, call: operations.ForwardBackward) -> None:
        """Raises :class:`UserError` for data that no worker can read."""
        chat = await self._world.chat(model.row.base_model)
        longest = max((shape[0] for shape in call.shapes), default=0)
        if longest > chat.context:
            raise UserError(f"a datum has {longest} tokens; the model's context is {chat.context}")

    async def models(self, tenant: str) -> Sequence[ModelRow]:
        """Newest first."""
        return await self._world.store.list_models(tenant)

    async def info(self, tenant: str, id: str) -> tuple[ModelRow, PolicyRow]:
        return await self._world.store.get_model(tenant, id)

    # --- sampling -----------------------------------------------------------------------------------------------------

    async def create_sampler(
        self, tenant: str, session: str, number: int, *, base_model: str | None, path: str | None
    ) -> SamplerRow:
        await self._open_session(tenant, session)
        if base_model is None and path is None:
            raise UserError("give base_model or model_path")
        name = await self._intake.model(tenant, base_model) if base_model is not None else None
        id = f"{session}:sample:{number}"
        row = await self.samplers.create(tenant, session, id, base_model=name, asked_model=base_model, path=path)
        self._provide(row.base_model)
        return row

    async def sampler(self, tenant: str, id: str) -> SamplerRow:
        return await self._world.store.get_sampler(tenant, id)

    async def join(self, tenant: str, id: str) -> int:
        return await self._world.store.join_sampler(tenant, id)

    async def sample(self, tenant: str, number: int, call: operations.Sample) -> str:
        """Samples ``call.count`` texts; answers the request's id."""
        row = await self.sampler(tenant, call.sampler)
        await self._open_session(tenant, row.session)
        future, created = await self._futures.open(tenant, f"{row.id}/{number}", call, seq=number)
        if created:
            self.samplers.begin(future, call, row)
        return future.id

    # --- results ------------------------------------------------------------------------------------------------------

    async def wait(self, tenant: str, request: str) -> operations.AnyOutcome | PendingOperations:
        """The outcome the moment it is there, or after a while why it is not."""
        return await self._futures.wait(tenant, request, self._world.settings.sessions.session_poll_seconds)

    async def ended(
        self, tenant: str, sampler: str, clone: int, cursor: int, seconds: float | None, fetched: Sequence[str]
    ) -> tuple[Sequence[Completion], int]:
        """Requests of a sampler (of the client's ``clone``-th copy) that ended after ``cursor``, the moment there are
        any or after a while, and the next cursor. The client has the results of ``fetched``."""
        await self.sampler(tenant, sampler)
        self._futures.fetched(tenant, fetched)
        longest = self._world.settings.sessions.session_poll_seconds
        return await self._feeds.poll(
            tenant, sampler, clone, cursor, longest if seconds is None else min(seconds, longest)
        )

    async def cancel(self, tenant: str, request: str) -> None:
        """Give up a sample; others go on."""
        future = await self._futures.find(tenant, request)
        if future is not None:
            await self.samplers.cancel(future)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    async def checkpoints(self, tenant: str, model: str | None = None) -> Sequence[CheckpointRow]:
        """Newest first."""
        world = self._world
        if model is not None:
            await world.store.get_model(tenant, model)
        return await world.store.list_checkpoints(tenant, model)

    async def expire(self, tenant: str, model: str, kind: str, name: str, ttl: float | None) -> None:
        world = self._world
        until = None if ttl is None else world.clock.time() + ttl
        await world.store.expire_checkpoint(tenant, model, kind, name, until)

    async def delete_checkpoint(self, tenant: str, model: str, kind: str, name: str) -> None:
        world = self._world
        await world.collector.delete_unnamed(world.store.database.delete_checkpoint, tenant, model, kind, name)

    async def weights(self, tenant: str, path: str) -> tuple[CheckpointRow, ModelRow, PolicyRow]:
        """What a path names, and the model it is of."""
        found = await checkpoint(self._world, tenant, path)
        model, policy = await self.info(tenant, found.model)
        return found, model, policy
