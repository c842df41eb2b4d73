"""A training run: one policy that a client trains call by call, on the shared trainers.

* Operations run one after another by sequence number, in whatever order they arrive. A number that stays away fails the
  operations behind it after a while (``SessionRules.seq_gap``); their error names it.
* Gradients add up until a step. An operation that fails leaves the gradient incomplete: the next step is refused and
  drops it, so that no step is taken on a part of a batch. A step that fails drops the gradient, too.
* A step's version, the operations in it and its result become durable together. Later operations add to the gradient
  of the next step; they are in the log: they are replayed, and not answered again, when this process or the worker is
  lost.
* An operation that meets an absent place (the artifacts, the database) waits, and is executed again when the place is
  back; if the database had stored its result meanwhile, that is its result. Later operations wait behind it.
* Between operations the policy may lose its trainer slot; it gets one again when it needs it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from math import prod

import msgspec

from rookery import protocol
from rookery.aio import cancel_all, first_of
from rookery.controller.context import ControllerContext
from rookery.controller.outages import storage_outage
from rookery.controller.sessions import operations
from rookery.controller.sessions.futures import CLIENT_AWAY, Future, Futures, QueueStatus, failure
from rookery.controller.sessions.samplers import client_seed, sampler_row
from rookery.controller.targets import find_checkpoint
from rookery.controller.training.dispatcher import TrainingFailed
from rookery.controller.training.policy_run import ForwardRequest, PolicyRun
from rookery.controller.training.policy_versions import CommitVersion, PolicyVersions, Retention
from rookery.controller.training.slots import SlotHolder, TrainerSlots
from rookery.controller.weights.store import adapter_ref
from rookery.errors import CorruptArtifact, RookeryError, StorageFull, Unavailable, UserError
from rookery.scheduling.queues import ReorderBuffer
from rookery.storage.models import CheckpointRow, FutureRow, ModelRow, PolicyRow, VersionRow
from rookery.storage.repositories import jobs, sessions
from rookery.storage.repositories.versions import NextVersion

log = logging.getLogger("rookery.controller.sessions.training_run")


class TrainingRun:
    def __init__(
        self, context: ControllerContext, futures: Futures, slots: TrainerSlots, row: ModelRow, policy: PolicyRow
    ) -> None:  # fmt: skip
        self.row = row
        self.policy = policy
        self._context = context
        self._futures = futures
        self._slots = slots
        self._queue: ReorderBuffer[tuple[Future, operations.AnyOperation]] = ReorderBuffer(row.done_seq + 1)
        self._given_up: deque[tuple[Future, operations.AnyOperation]] = deque()
        """Operations that will not be executed; their futures get an error in their turn."""
        self._arrived = asyncio.Event()
        self._gap_since: float | None = None
        self._versions = PolicyVersions(
            context, context.records.spans, context.rooms.collector, policy, Retention(inflight=row.inflight)
        )
        self._policy_run = PolicyRun(
            context.rooms.training,
            context.rooms.weights,
            lambda policy: context.store.write(jobs.next_lease, policy),
            row.base_model,
            self._versions,
        )
        self._head_fault: CorruptArtifact | Unavailable | None = None
        """Why no operation can build on the head: its bytes are damaged, or could not be read when they last were."""
        self._holder = SlotHolder(row.id, row.tenant, row.session, row.base_model, self._policy_run)
        self._task: asyncio.Task[None] | None = None
        self._present: operations.AnyOperation | None = None
        """The operation that is executed; None while the task waits for one, or for the client."""
        self._suspended = False
        self._expected = 0
        """Requests that may queue an operation."""
        self._outage = ""
        """The reason why the present operation waits for a place to be back."""
        self._abandoned = asyncio.Event()
        """Set when the client is given up: no operation waits any more."""
        self._logged = 0  # bytes of the policy's log, as the tenant's quota counts them

    # --- life ---------------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Read the versions and the log behind the head, then start to execute operations."""
        try:
            await self._read_head()
        except Unavailable as error:  # its place may be back when an operation comes
            log.error("model %s: %s", self.row.id, error, extra={"tenant": self.row.tenant})
        else:
            await self._versions.retire()
        for row in await self._replay_log():
            self.enqueue(*self._futures.reopen(row))
        self._task = asyncio.create_task(self._run(), name=f"training run {self.row.id}")

    async def _replay_log(self) -> list[FutureRow]:
        """Bring back the effect of the operations that were executed after the head; the rows of the others."""
        others = []
        for row in await self._context.store.read(sessions.futures_behind, self.row.id, self.row.done_seq):
            if row.outcome is None:
                others.append(row)
            else:
                self._queue.next = max(self._queue.next, row.seq + 1)
                self._replay(operations.decode_operation(row.call), operations.decode_result(row.outcome))
        self._count_bytes()
        return others

    async def _read_head(self) -> None:
        """Read the versions. Raises :class:`Unavailable` if they, or the head's bytes, cannot be read."""
        try:
            self._head_fault = await self._find_damage()
        except Unavailable as error:
            self._head_fault = error
            raise

    async def _find_damage(self) -> CorruptArtifact | None:
        """Read the versions. If the head's bytes are damaged, the error of every operation that needs it, which names a
        checkpoint to load instead."""
        try:
            await self._versions.load()
            return None
        except CorruptArtifact as error:
            damage = error
        head, row = self._versions.head, self.row
        assert head is not None
        store, now = self._context.store, self._context.clock.time()
        saved = await store.read(sessions.list_checkpoints, row.tenant, row.id, None, now)
        intact = next((found.path for found in saved if found.kind == "weights" and found.hash != head.hash), None)
        hint = f"load its newest other checkpoint, {intact}" if intact is not None else "it has no other checkpoint"
        reason = f"version {head.version} of model {row.id} is corrupt ({damage}); {hint}"
        log.error(reason, extra={"tenant": row.tenant, "version": head.version})
        return CorruptArtifact(reason)

    def _replay(self, operation: operations.AnyOperation, result: operations.AnyResult) -> None:
        """Bring back the effect of an operation that an earlier process executed after the head. No step is among them:
        the head has the answered ones."""
        if isinstance(result, operations.OperationFailed):
            self._on_failure(operation, result)
        elif isinstance(operation, operations.ForwardBackwardOperation) and not operation.forward_only:
            self._policy_run.restore_logged(_forward_request(operation))

    @property
    def queued(self) -> bool:
        """Whether operations wait in the queue."""
        return bool(len(self._queue))

    @property
    def resting(self) -> bool:
        """No operation runs or waits."""
        return self._present is None and not len(self._queue) and not self._given_up

    @property
    def unused(self) -> bool:
        """No operation runs, waits, or is about to."""
        return self.resting and not self._expected

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """An operation may be queued within."""
        self._expected += 1
        try:
            yield
        finally:
            self._expected -= 1

    async def close(self) -> None:
        """The run gets no more operations: release all that it holds in workers."""
        await self.stop()
        self._policy_run.forget()  # before the slot is released, which would offload the state
        self._count_bytes()
        self._slots.release(self._holder)

    async def stop(self) -> None:
        if self._task is not None:
            await cancel_all(self._task)

    def release_slot(self) -> None:
        """Release the trainer slot if no operation runs or is about to."""
        if self.resting or (self._present is None and self._suspended):
            self._slots.release(self._holder)

    def suspend(self) -> None:
        """The client is away: start no operation until :meth:`resume`."""
        self._suspended = True
        self.release_slot()

    def resume(self) -> None:
        self._suspended = False
        self._arrived.set()

    def drop(self, error: str) -> int:
        """Give up the queued operations, and the present one if it waits for a place: ``error`` is their result.
        Returns how many."""
        if self._outage:
            self._outage = error
            self._abandoned.set()
        return self._give_up(error) if len(self._queue) else 0

    # --- the queue ----------------------------------------------------------------------------------------------------

    @property
    def last_seq(self) -> int:
        """The highest sequence number that arrived."""
        return self._queue.last

    def enqueue(self, future: Future, operation: operations.AnyOperation) -> str:
        """Execute ``operation`` in its turn; the reason if its sequence number was used before."""
        try:
            self._queue.put(future.seq, (future, operation))
        except ValueError as error:
            return f"model {self.row.id}: {error}"
        self._context.rooms.quotas.count_queued(self.row.tenant, self.row.id, operation.size)
        self._arrived.set()
        return ""

    def _count_bytes(self, queued: int = 0) -> None:
        """The queue has so many bytes more; the policy's log may have changed."""
        known, self._logged = self._logged, self._policy_run.logged_bytes
        self._context.rooms.quotas.count_queued(self.row.tenant, self.row.id, queued + self._logged - known)

    @property
    def frees_room(self) -> bool:
        """Whether one of the operations that are executed next frees memory when it ends, as all do but those that add
        to the gradient."""
        ready = [] if self._queue.missing is not None else [operation for _, operation in self._queue]
        return any(found is not None and not found.adds_gradient for found in (self._present, *ready))

    def status(self, future: Future) -> QueueStatus:
        """Why an operation of this run has no result yet."""
        fleet, model, missing = self._context.rooms.fleet, self.row.base_model, self._queue.missing
        if self._outage:
            return QueueStatus(paused=True, reason=self._outage)
        if self._suspended:
            return CLIENT_AWAY
        if reason := self._slots.reason(self._holder):
            return QueueStatus(paused=True, reason=reason)
        if not fleet.serving("train", model):
            return QueueStatus(paused=True, reason=fleet.missing("train", model))
        if missing is not None and missing < future.seq:
            return QueueStatus(reason=f"waits for request {missing} of this model, which has not arrived")
        return QueueStatus()

    def reset_gap(self) -> None:
        """An operation arrived and was refused for now: those behind it wait for as long again."""
        self._gap_since = None

    def expire_gap(self, seconds: float) -> None:
        """Give up the operations that have waited longer than ``seconds`` for a missing sequence number."""
        missing, now = self._queue.missing, self._context.clock.monotonic()
        if missing is None:
            self._gap_since = None
        elif self._gap_since is None:
            self._gap_since = now
        elif now - self._gap_since > seconds:
            self._gap_since = None
            self._give_up(f"request {missing} of model {self.row.id} has not arrived for {seconds:.0f} s")

    def _give_up(self, error: str) -> int:
        flushed = self._queue.flush()
        given_up = [(future, operations.InvalidOperation.instead_of(operation, error)) for future, operation in flushed]
        self._policy_run.reject(error)
        self._given_up.extend(given_up)
        freed = sum(operation.size for _, operation in flushed) - sum(instead.size for _, instead in given_up)
        self._count_bytes(-freed)
        self._arrived.set()
        return len(given_up)

    async def _run(self) -> None:
        while True:
            self._arrived.clear()
            while (item := self._next()) is not None:
                await self._execute(*item)
                if self._holder.busy and self._slots.wanted(self.row.base_model) and not self._policy_run.begun:
                    self._slots.release(self._holder)  # after a step, other runs that wait go first
            if self._holder.busy:
                self._slots.idle(self._holder)
            if self._suspended:
                self.release_slot()
            await self._arrived.wait()

    def _next(self) -> tuple[Future, operations.AnyOperation] | None:
        if self._given_up:
            return self._given_up.popleft()
        return None if self._suspended else self._queue.pop()

    async def _execute(self, future: Future, operation: operations.AnyOperation) -> None:
        result: operations.AnyResult | None
        self._present = operation
        try:
            result = await self._dispatch_until_stored(future, operation)
        except TrainingFailed as error:
            result = operations.OperationFailed(error=str(error), category="unknown")
        except Exception as error:
            result = failure(future, error)
        if isinstance(result, operations.OperationFailed):
            self._on_failure(operation, result)
        self._count_bytes(-operation.size)
        if result is not None:
            trace = operation.adds_gradient or operation.is_step
            await self._futures.finish(future, result, trace=trace)
        self._present = None

    async def _dispatch_until_stored(
        self, future: Future, operation: operations.AnyOperation
    ) -> operations.AnyResult | None:
        """Execute ``operation``, again after each outage that it meets, unless its client is given up meanwhile."""
        attempt, recovered, head = 0, True, self._versions.head
        while True:
            try:
                if not recovered:
                    if await self._recover(future, head):
                        return None
                    recovered = True
                return await self._dispatch(future, operation)
            except RookeryError as error:
                if not storage_outage(error):
                    raise
                outage = error
            if recovered:  # else the recovery met the outage, and is repeated whole
                recovered, head = False, self._versions.head
            await self._wait_for(outage, future, attempt)
            attempt += 1

    async def _wait_for(self, outage: RookeryError, future: Future, attempt: int) -> None:
        """Return when ``outage`` is over; raise it if the client is given up before."""
        log.warning(
            "operation %s waits: %s (%s)", future.id, outage, getattr(outage, "detail", ""),
            extra={"tenant": self.row.tenant},
        )  # fmt: skip
        self._outage = str(outage)
        async with first_of(self._context.outages.over(outage, attempt), self._abandoned.wait()):
            pass
        reason, self._outage = self._outage, ""
        if self._abandoned.is_set():
            self._abandoned.clear()
            raise Unavailable(reason)

    async def _recover(self, future: Future, head: VersionRow | None) -> bool:
        """After an outage: take over what the database stored without an answer. ``head`` was the newest version when
        the operation met the outage. Whether the database has the result of ``future``, which is delivered then."""
        store = self._context.store
        self.row, _ = await store.read(sessions.get_model, self.row.tenant, self.row.id)
        await self._read_head()
        new = self._versions.head
        if new is not None and (head is None or new.version != head.version):  # the commit succeeded
            self._policy_run.forget()
            await self._replay_log()
        stored = await store.read(sessions.get_future, self.row.tenant, future.id)
        if stored.outcome is None:
            return False
        self._futures.deliver(future, operations.decode_result(stored.outcome), len(stored.outcome))
        return True

    async def _dispatch(self, future: Future, operation: operations.AnyOperation) -> operations.AnyResult | None:
        if isinstance(self._head_fault, Unavailable) and not isinstance(operation, operations.LoadState):
            await self._read_head()
        match operation:
            case operations.ForwardBackwardOperation():
                return await self._forward_backward(operation)
            case operations.OptimStepOperation():
                await self._optim_step(future, operation)
            case operations.SaveSampler():
                return await self._save_sampler(operation)
            case operations.SaveState():
                await self._save_state(future, operation)
            case operations.LoadState():
                await self._load_state(future, operation)
            case operations.CreateModel():
                await self._create(future, operation)
            case operations.InvalidOperation():
                raise UserError(operation.error)
            case operations.Sample():
                raise UserError("a model does not sample; make a sampler of it")
        return None  # delivered already

    def _on_failure(self, operation: operations.AnyOperation, result: operations.OperationFailed) -> None:
        """Update the gradient's state, now or in a replay."""
        if operation.adds_gradient:
            self._policy_run.reject(result.error)
        elif operation.is_step:
            self._policy_run.drop_gradient()

    async def _create(self, future: Future, operation: operations.CreateModel) -> None:
        await self._context.chat(self.row.base_model)  # prepares the model if it was not
        seed = operation.seed if operation.seed is not None else client_seed(self.row.id)
        created = operations.ModelCreated(model_id=self.row.id)
        await self._commit(future, created, lambda write: self._policy_run.create(write, seed, None))
        log.info("training run %s created", self.row.id, extra={"tenant": self.row.tenant})

    async def _forward_backward(
        self, operation: operations.ForwardBackwardOperation
    ) -> operations.ForwardBackwardResult:
        self._check_head()
        await self._slots.acquire(self._holder)
        done = await self._policy_run.forward(_forward_request(operation))
        metrics = done.metrics
        if operation.loss.name == "cross_entropy":  # there is no sampler to compare with
            metrics = {name: value for name, value in metrics.items() if not name.startswith(("ratio:", "logp_diff:"))}
        return operations.ForwardBackwardResult(
            metrics=metrics, logprobs=done.logprobs, shapes=operation.shapes, cells=operation.cells
        )

    async def _optim_step(self, future: Future, operation: operations.OptimStepOperation) -> None:
        self._check_head()
        self._policy_run.check_gradient()
        await self._slots.acquire(self._holder)
        done = await self._policy_run.optim_step(operation.adam, commit=True)
        manifest = done.manifest
        assert manifest is not None
        result = operations.OptimStepResult(metrics={**done.metrics, "durable": 1.0})
        try:
            await self._commit(future, result, lambda write: self._policy_run.commit(write, manifest))
        except Exception as error:
            if storage_outage(error):  # it is carried out again
                self._policy_run.undo_step()
            else:  # its result is the error
                self._policy_run.drop_step()
            raise

    async def _save_state(self, future: Future, operation: operations.SaveState) -> None:
        context, head, now = self._context, self._check_head(), self._context.clock.time()
        row = CheckpointRow(
            model=self.row.id, kind=operation.kind, name=operation.name, tenant=self.row.tenant, policy=self.policy.id,
            version=head.version, manifest=head.manifest, hash=head.hash, created=now, about=operation.about,
            size=head.manifest.size,
            expires=None if operation.ttl is None else now + operation.ttl,
        )  # fmt: skip
        saved = operations.StateSaved(path=row.path, size_bytes=row.size)
        content = operations.encode(saved)
        overwrite = operation.overwrite or operation.kind != "weights"  # the API protects only these
        outcome = (future.id, content)
        async with context.rooms.quotas.storing(row.tenant):
            await context.rooms.collector.delete_unnamed(sessions.save_checkpoint, row, overwrite, outcome)
        self._futures.deliver(future, saved, len(content))

    async def _save_sampler(self, operation: operations.SaveSampler) -> operations.SamplerSaved:
        head, run = self._check_head(), self.row
        if operation.inflight:
            await self._versions.publish_inflight(run.id)
        now, inflight = self._context.clock.time(), operation.inflight
        row = sampler_row(operation.sampler, run.session, now, run, self.policy, head, inflight=inflight)
        await self._context.store.write(sessions.add_sampler, row)
        return operations.SamplerSaved(sampling_session_id=operation.sampler)

    async def _load_state(self, future: Future, operation: operations.LoadState) -> None:
        context, tenant = self._context, self.row.tenant
        source, run, policy = await find_checkpoint(context, tenant, operation.path)
        shape = (self.row.base_model, self.policy.rank, list(self.policy.targets))
        if (run.base_model, policy.rank, list(policy.targets)) != shape:
            raise UserError(f"{operation.path} is of another base model, rank or layers than model {self.row.id}")
        ref = msgspec.structs.replace(adapter_ref(policy, source), policy=self.policy.id, version=0)
        async with context.rooms.collector.referenced(ref):  # the checkpoint may expire or be deleted meanwhile
            await find_checkpoint(context, tenant, operation.path)
            manifest = source.manifest if operation.optimizer else None
            loaded = operations.StateLoaded(path=operation.path, model_id=self.row.id)
            await self._commit(future, loaded, lambda write: self._policy_run.load(write, ref, manifest))

    def _storing_first(self) -> AbstractAsyncContextManager[None]:
        """The model's first version is stored within; a later one takes the room of the one before it. Raises
        :class:`~rookery.errors.TooManyRequests` at a limit of the tenant."""
        first = self._versions.head is None
        return self._context.rooms.quotas.storing(self.row.tenant) if first else nullcontext()

    def _check_head(self) -> VersionRow:
        """The newest version, which the next operation builds on. Raises :class:`UserError` if there is none,
        :class:`CorruptArtifact` if its bytes are damaged."""
        if self._versions.head is None:
            raise UserError(f"model {self.row.id} has no weights: its creation failed, or is not over")
        if isinstance(self._head_fault, CorruptArtifact):
            raise CorruptArtifact(str(self._head_fault))
        return self._versions.head

    async def _commit(
        self, future: Future, result: operations.AnyResult, commit: Callable[[CommitVersion], Awaitable[object]]
    ) -> None:
        """Commit the next version, by ``commit(write)``, together with the operations in it and the ``result`` of
        ``future``."""
        store, content = self._context.store, operations.encode(result)

        async def write(version: NextVersion) -> VersionRow:
            async with self._storing_first():
                return await store.write(sessions.commit_model, version, self.row.id, future.seq, (future.id, content))

        await commit(write)
        self._head_fault = None
        self._count_bytes()
        self._futures.deliver(future, result, len(content))
        try:
            await self._versions.retire()
        except (StorageFull, Unavailable) as error:  # the next commit tries again
            log.warning("versions of model %s stay: %s", self.row.id, error, extra={"tenant": self.row.tenant})


def _forward_request(operation: operations.ForwardBackwardOperation) -> ForwardRequest:
    cells = {number: protocol.integers(listed) for number, listed in operation.cells.items()}
    targets = sum(len(cells[n]) if n in cells else prod(shape) for n, shape in enumerate(operation.shapes))
    return ForwardRequest(operation.batch, operation.loss, forward_only=operation.forward_only, targets=targets)
