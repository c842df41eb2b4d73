"""A policy that a client drives call by call: its calls, in the order of their numbers, on the shared trainers.

* Calls are carried out one after another by number, in whatever order they arrive; a number that stays away fails those
  behind it after a while, with its name.
* Gradients add up from call to call until a step. A call that fails leaves its gradient incomplete: the next step is
  refused and drops it, so no step is ever taken on a part of what was asked for. A step that fails drops it, too.
* A step's version, what it consumed and its answer become durable together. What came after is in the calls' log: it
  is replayed, not answered again, when this process or the worker is lost.
* Between its calls the policy may lose its place in the worker; it comes back by itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from functools import partial

from rookery import protocol
from rookery.controller.context import ControllerContext
from rookery.controller.sessions import operations
from rookery.controller.sessions.checkpoints import checkpoint
from rookery.controller.sessions.futures import Future, Futures, PendingOperations
from rookery.controller.training.dispatcher import TrainingFailed
from rookery.controller.training.policy_trainer import ForwardRequest, OptimRequest, PolicyTrainer
from rookery.controller.training.policy_versions import PolicyVersions
from rookery.controller.training.slots import SlotHolder, TrainerSlots
from rookery.controller.weights.refs import adapter_ref
from rookery.errors import CorruptArtifact, RookeryError, UserError
from rookery.scheduling.reorder import ReorderBuffer
from rookery.storage.rows import CheckpointRow, ModelRow, PolicyRow, SamplerRow, VersionRow

log = logging.getLogger("rookery.controller.models")


class TrainingRun:
    def __init__(
        self, world: ControllerContext, futures: Futures, places: TrainerSlots, row: ModelRow, policy: PolicyRow
    ) -> None:
        self.row = row
        self.policy = policy
        self._world = world
        self._futures = futures
        self._places = places
        self._line: ReorderBuffer[tuple[Future, operations.AnyCall]] = ReorderBuffer(row.done_seq + 1)
        self._given_up: deque[tuple[Future, operations.InvalidOperation]] = deque()
        """Calls that waited too long for a number before theirs."""
        self._came = asyncio.Event()
        self._stuck_since: float | None = None
        self._versions = PolicyVersions(world, policy, inflight=row.inflight)
        self._corrupt = ""
        """Why no operation can build on the head."""
        self._stepped = row.done_seq
        """The last step's number."""
        self._failed = ""
        """Why the present gradient is incomplete."""
        self._trainee = PolicyTrainer(
            world.training,
            tenant=row.tenant,
            policy=policy.id,
            model=row.base_model,
            next_lease=lambda: world.store.next_lease(policy.id),
        )
        self._guest = SlotHolder(
            row.id, row.tenant, row.session, row.base_model, self._trainee.offload, lambda: self._trainee.begun
        )
        self._task: asyncio.Task[None] | None = None
        self._rests = False
        """The task waits for a call."""

    # --- life ---------------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Read the head and the log behind it; then calls are carried out."""
        world = self._world
        try:
            await self._versions.load()
        except CorruptArtifact as error:
            await self._refuse_head(error)
        await self._versions.retire()
        for row in await world.store.futures_behind(self.row.id, self.row.done_seq):
            if row.outcome is None:
                future, call = self._futures.recall(row)
                self.put(future, call)
            else:
                self._line.next = row.seq + 1
                self._replay(row.seq, operations.calls.decode(row.call), operations.outcomes.decode(row.outcome))
        self._task = asyncio.create_task(self._run(), name=f"model {self.row.id}")

    async def _refuse_head(self, error: CorruptArtifact) -> None:
        """Answer every operation that needs the head with an error that names a checkpoint to load instead."""
        head, row = self._head, self.row
        saved = await self._world.store.list_checkpoints(row.tenant, row.id)
        whole = next((found.path for found in saved if found.kind == "weights" and found.hash != head.hash), None)
        hint = f"load its newest other checkpoint, {whole}" if whole is not None else "it has no other checkpoint"
        self._corrupt = f"version {head.version} of model {row.id} is corrupt ({error}); {hint}"
        log.error(self._corrupt, extra={"tenant": row.tenant, "version": head.version})

    @property
    def _head(self) -> VersionRow:
        """The newest version, which the next operation builds on. Raises :class:`UserError` where there is none,
        :class:`CorruptArtifact` where its bytes are damaged."""
        if self._versions.head is None:
            raise UserError(f"model {self.row.id} has no weights: its creation failed, or is not over")
        if self._corrupt:
            raise CorruptArtifact(self._corrupt)
        return self._versions.head

    @property
    def _step(self) -> int:
        """Optimizer steps in the head."""
        return self._versions.head.step if self._versions.head is not None else 0

    def _parent(self) -> protocol.AdapterRef:
        """The reference to the head that workers get. Raises as :attr:`_head`."""
        return adapter_ref(self.policy, self._head)

    def _replay(self, seq: int, call: operations.AnyCall, outcome: operations.AnyOutcome) -> None:
        """What an earlier process did and answered, since the head."""
        if isinstance(outcome, operations.OperationFailed):
            self._failed_at(call, outcome)
        elif isinstance(call, operations.ForwardBackward) and not call.forward_only:
            self._trainee.recall(_forward(call))
        elif isinstance(call, operations.OptimStep):
            self._trainee.recall(OptimRequest(call.adam))
            self._stepped = seq

    @property
    def resting(self) -> bool:
        """Nothing is under way, and no call waits."""
        return self._rests and not len(self._line) and not self._given_up

    async def end(self) -> None:
        """No call will come any more: it holds nothing in any worker."""
        await self.stop()
        self._trainee.forget()  # before it would come to rest
        self._places.release(self._guest)

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def leave(self) -> None:
        """The client is away: its place is free as soon as nothing is under way."""
        if self.resting:
            self._places.release(self._guest)

    def put(self, future: Future, call: operations.AnyCall) -> None:
        """A call for its turn. Raises :class:`UserError` for a number that came before."""
        future.why = lambda: self._why(future)
        try:
            self._line.put(future.seq, (future, call))
        except ValueError as error:
            raise UserError(f"model {self.row.id}: {error}") from None
        self._came.set()

    @property
    def last(self) -> int:
        """The highest number that came."""
        return self._line.last

    def _why(self, future: Future) -> PendingOperations:
        if reason := self._places.reason(self._guest):
            return PendingOperations(paused=True, reason=reason)
        if not self._world.fleet.serving("train", self.row.base_model):
            return PendingOperations(paused=True, reason=self._world.fleet.missing("train", self.row.base_model))
        missing = self._line.missing
        if missing is not None and missing < future.seq:
            return PendingOperations(reason=f"waits for request {missing} of this model, which has not arrived")
        return PendingOperations()

    def expire(self, patience: float) -> None:
        """What has waited longer than ``patience`` for a number that does not come fails in its turn."""
        missing, now = self._line.missing, self._world.clock.monotonic()
        if missing is None:
            self._stuck_since = None
        elif self._stuck_since is None:
            self._stuck_since = now
        elif now - self._stuck_since > patience:
            self._stuck_since = None
            error = f"request {missing} of model {self.row.id} has not arrived for {patience:.0f} s"
            self._failed = error
            self._given_up.extend((future, operations.InvalidOperation(error=error)) for future, _ in self._line.skip())
            self._came.set()

    # --- one call after another ---------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._came.clear()
            while (item := self._next()) is not None:
                await self._carry_out(*item)
                if self._guest.busy and self._places.wanted(self.row.base_model) and not self._trainee.begun:
                    self._places.release(self._guest)  # a turn is over: who waits goes first
            if self._guest.busy:
                self._places.idle(self._guest)
            self._rests = True
            await self._came.wait()
            self._rests = False

    def _next(self) -> tuple[Future, operations.AnyCall] | None:
        return self._given_up.popleft() if self._given_up else self._line.take()

    async def _carry_out(self, future: Future, call: operations.AnyCall) -> None:
        outcome: operations.AnyOutcome | None
        try:
            outcome = await self._dispatch(future, call)
        except TrainingFailed as error:
            outcome = operations.OperationFailed(error=str(error), category="unknown")
        except RookeryError as error:
            outcome = operations.OperationFailed(error=str(error), category="user" if error.status < 500 else "server")
        except Exception as error:
            log.exception("call %s", future.id, extra={"tenant": self.row.tenant})
            outcome = operations.OperationFailed(
                error=f"internal error ({type(error).__name__}); the log has it", category="server"
            )
        if isinstance(outcome, operations.OperationFailed):
            self._failed_at(call, outcome)
        if outcome is not None:
            await self._futures.settle(future, outcome, trace=_adds(call) or isinstance(call, operations.OptimStep))

    async def _dispatch(self, future: Future, call: operations.AnyCall) -> operations.AnyOutcome | None:
        """None: the outcome was told already."""
        match call:
            case operations.ForwardBackward():
                return await self._compute(call)
            case operations.OptimStep():
                return await self._optim_step(future, call)
            case operations.SaveSampler():
                return await self._save_sampler(call)
            case operations.SaveState():
                await self._save(future, call)
            case operations.LoadState():
                await self._load_state(future, call)
            case operations.CreateModel():
                await self._create(future, call)
            case operations.InvalidOperation():
                raise UserError(call.error)
            case operations.Sample():
                raise UserError("a model does not sample; make a sampler of it")
        return None

    async def _create(self, future: Future, call: operations.CreateModel) -> None:
        world, row, policy = self._world, self.row, self.policy
        await world.chat(row.base_model)  # prepared, if it was not
        drawn = int.from_bytes(hashlib.sha256(row.id.encode()).digest()[:8], "big") >> 1
        manifest = await self._init(call.seed if call.seed is not None else drawn, None)
        made = operations.ModelCreated(model=row.id)
        await self._commit(manifest, (future, made), done=future.seq, step=0)
        log.info("model of policy %s made", policy.id, extra={"tenant": row.tenant})

    async def _init(self, seed: int, source: protocol.AdapterRef | None) -> protocol.Manifest:
        policy = self.policy

        def make(op: str, upload: str, readable: protocol.AdapterRef | None) -> protocol.InitAdapter:
            return protocol.InitAdapter(
                op=op, policy=policy.id, rank=policy.rank, alpha=policy.alpha, targets=list(policy.targets), seed=seed,
                commit=upload, source=readable,
            )  # fmt: skip

        return await self._trainee.init(make, source)

    async def _compute(self, call: operations.ForwardBackward) -> operations.AnyOutcome:
        parent = self._parent()
        await self._places.acquire(self._guest)
        done = await self._trainee.forward(parent, _forward(call))
        metrics = done.metrics
        if call.loss.name == "cross_entropy":  # there is no sampler to compare with
            metrics = {name: value for name, value in metrics.items() if not name.startswith(("ratio:", "logp_diff:"))}
        return operations.ForwardBackwardResult(
            metrics=metrics, logprobs=done.logprobs, shapes=call.shapes, cells=call.cells
        )

    async def _optim_step(self, future: Future, call: operations.OptimStep) -> operations.AnyOutcome | None:
        parent = self._parent()
        if self._failed:
            raise UserError(
                f"no step was taken: a forward_backward since the last one failed ({self._failed}); its gradient is"
                " dropped"
            )
        await self._places.acquire(self._guest)
        due = self._trainee.uncommitted + 1 >= self._world.settings.sessions.session_commit_every
        done = await self._trainee.optim_step(parent, call.adam, commit=due)
        stepped = operations.OptimStepResult(metrics={**done.metrics, "durable": float(due)})
        if due:
            assert done.manifest is not None
            step = self._step + self._trainee.uncommitted
            try:
                await self._commit(done.manifest, (future, stepped), done=future.seq, step=step)
            except Exception:
                self._trainee.drop_step()  # it is answered as failed
                raise
        self._stepped = future.seq
        return None if due else stepped

    async def _settled(self) -> protocol.AdapterRef:
        """The present state as a durable version."""
        parent = self._parent()
        if self._trainee.uncommitted:
            await self._places.acquire(self._guest)
            done = await self._trainee.commit(parent)
            assert done.manifest is not None
            step = self._step + self._trainee.uncommitted
            await self._commit(done.manifest, None, done=self._stepped, step=step)
        return self._parent()

    async def _save(self, future: Future, call: operations.SaveState) -> None:
        world = self._world
        ref, manifest = await self._settled(), self._head.manifest
        now = world.clock.time()
        row = CheckpointRow(
            model=self.row.id, kind=call.kind, name=call.name, tenant=self.row.tenant, policy=ref.policy,
            version=ref.version, manifest=manifest, hash=ref.hash, created=now, about=call.about,
            size=sum(shard.size for shard in manifest.shards),
            expires=None if call.ttl is None else now + call.ttl,
        )  # fmt: skip
        saved = operations.StateSaved(path=row.path, size=row.size)
        content = operations.encode(saved)

        overwrite = call.overwrite or call.kind != "weights"  # the API lets only these be protected
        await world.collector.delete_unnamed(world.store.database.save_checkpoint, row, overwrite, (future.id, content))
        self._futures.tell(future, saved, len(content))

    async def _save_sampler(self, call: operations.SaveSampler) -> operations.AnyOutcome:
        world, row = self._world, self.row
        ref = await self._settled()
        now = world.clock.time()
        if call.inflight:
            await self._versions.publish_inflight(row.id)
        sampler = SamplerRow(
            id=call.sampler, tenant=row.tenant, session=row.session, base_model=row.base_model,
            asked_model=row.asked_model, path="", model=row.id, inflight=call.inflight, policy=ref.policy,
            version=ref.version, hash="" if call.inflight else ref.hash, rank=ref.rank, alpha=ref.alpha, created=now,
            used=now, kept=True, clones=0,
        )  # fmt: skip
        await world.store.add_sampler(sampler)
        return operations.SamplerSaved(sampler=call.sampler)

    async def _load_state(self, future: Future, call: operations.LoadState) -> None:
        world = self._world
        source = await checkpoint(world, self.row.tenant, call.path)
        model, policy = await world.store.get_model(self.row.tenant, source.model)
        mine = (self.row.base_model, self.policy.rank, list(self.policy.targets))
        if (model.base_model, policy.rank, list(policy.targets)) != mine:
            raise UserError(f"{call.path} is of another base model, rank or layers than model {self.row.id}")
        found = protocol.AdapterRef(
            policy=self.policy.id, version=0, hash=source.hash, rank=policy.rank, alpha=policy.alpha
        )
        async with world.collector.reading(
            found
        ):  # its owner may delete it, or its time be over, before it is this model's
            await checkpoint(world, self.row.tenant, call.path)
            if call.optimizer:
                manifest = source.manifest
                await self._trainee.renew()
            else:
                manifest = await self._init(0, found)
            loaded = operations.StateLoaded(path=call.path, model=self.row.id)
            done, step = future.seq, self._step
            await self._commit(manifest, (future, loaded), done=done, step=step, uploaded=not call.optimizer, anew=True)

    async def _commit(
        self,
        manifest: protocol.Manifest,
        told: tuple[Future, operations.AnyOutcome] | None,
        *,
        done: int,
        step: int,
        uploaded: bool = True,
        anew: bool = False,
    ) -> None:
        """The next version, the calls up to ``done`` in it and the outcome that is ``told``, as one. ``anew``: it is
        not made of what was taken since the last one, which goes."""
        content = operations.encode(told[1]) if told is not None else b""
        world, outcome = self._world, (told[0].id, content) if told is not None else None
        ref = await self._versions.commit(
            partial(world.store.commit_model, model=self.row.id, done_seq=done, outcome=outcome),
            lease=self._trainee.lease,
            manifest=manifest,
            step=step,
            metrics=told[1].metrics if told is not None and isinstance(told[1], operations.OptimStepResult) else {},
            uploaded=uploaded,
        )
        self._corrupt = ""
        if anew:
            self._failed = ""
            self._trainee.forget()
        else:
            self._trainee.committed(ref)
        if told is not None:
            self._futures.tell(*told, len(content))
        await self._versions.retire()

    def _failed_at(self, call: operations.AnyCall, outcome: operations.OperationFailed) -> None:
        """What becomes of the gradient, now as in a replay."""
        if _adds(call):
            self._failed = outcome.error
        elif isinstance(call, operations.OptimStep):
            self._failed = ""
            self._trainee.drop_gradient()


def _forward(call: operations.ForwardBackward) -> ForwardRequest:
    return ForwardRequest(call.batch, call.loss, forward_only=call.forward_only, logprobs=True)


def _adds(call: operations.AnyCall) -> bool:
    """Whether it adds to the gradient when all goes well."""
    if isinstance(call, operations.ForwardBackward):
        return not call.forward_only
    return isinstance(call, operations.InvalidOperation) and call.gradient
