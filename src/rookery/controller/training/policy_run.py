"""One policy in training: its versions, the gradient and the steps since the newest of them, the commit that makes the
next one, and its publication. The loop of a job and the calls of a client drive it alike::

    forward ──▶ optim_step ──▶ commit ──▶ publish
       ▲             │            │
       └─────────────┴────────────┘        (several of each before the next)

* A policy trains under a lease number that only grows; an answer under an older one is ignored, and its commit refused
  by the database.
* Every operation names the newest committed version, the steps since, and the operations in the gradient: a worker with
  another state answers ``stale``. So a step is taken on exactly the operations logged for it.
* No step is taken on a part of a gradient: after :meth:`PolicyRun.reject` the next step is refused, and with it the
  gradient is discarded.
* A large policy's batches are divided among several workers: each computes a share on the committed parent, and the
  policy's worker adds the gradients of the others to its own, in a fixed order. It computes a share whose worker is
  lost.
* The operations since the last commit are logged here until the next commit, so a lost worker costs its computation and
  nothing else: the next worker loads the parent and replays the log.
* A version is visible only when it is durable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from rookery import protocol
from rookery.controller.fleet.worker import Worker
from rookery.controller.quotas import OPERATION_BYTES
from rookery.controller.training.dispatcher import TrainingDispatcher, TrainingFailed
from rookery.controller.training.policy_versions import CommitVersion, PolicyVersions
from rookery.controller.training.shares import join_batches, join_metrics, split_batch
from rookery.controller.weights.store import WeightStore
from rookery.errors import UserError
from rookery.spec.policy import InFlight


@dataclass(frozen=True)
class ForwardRequest:
    """A gradient to add, or (``forward_only``) log-probabilities to compute."""

    batch: bytes
    """An encoded :class:`rookery.protocol.TrainingBatch`."""
    loss: protocol.Loss
    temperature: float = 1.0
    kl_weight: float = 0.0
    reference: protocol.AdapterRef | None = None
    """The version that the KL penalty, or a loss of pairs, compares with; None: the base model."""
    forward_only: bool = False
    targets: int | None = None
    """Return the log-probabilities too, of so many targets."""
    logprobs: bool = False
    """Return those of the groups' tokens, if one worker computes the gradient."""


@dataclass(frozen=True)
class OptimRequest:
    """A step on ``scale`` times the gradient accumulated since the last step. Without ``adam`` it only commits."""

    adam: protocol.Adam | None
    scale: float = 1.0


@dataclass
class LogPosition:
    """How far a worker has carried out the log, on the newest committed version."""

    worker: Worker
    entries: int = 0
    """Entries of the log that it has carried out."""
    steps: int = 0
    """Steps among them that changed its state: one on NaN is skipped."""
    operations: int = 0
    """Operations in its gradient."""


class PolicyRun:
    def __init__(
        self,
        training: TrainingDispatcher,
        weights: WeightStore,
        next_lease: Callable[[str], Awaitable[int]],
        model: str,
        versions: PolicyVersions,
        trainers: int = 1,
    ) -> None:
        """``model``: the base model. ``next_lease(policy)`` issues a lease number. A batch is divided among at most
        ``trainers`` workers."""
        self._training = training
        self._weights = weights
        self._next_lease = next_lease
        self._model = model
        self.versions = versions
        self._row = versions.row
        self._policy = versions.row.id
        self._trainers = trainers
        self._lease = 0
        self._position: LogPosition | None = None
        """The position that the state of its training worker has; None where no worker's state is known."""
        self._log: list[ForwardRequest | OptimRequest] = []
        """The operations since the last commit."""
        self._missing = ""
        """Why the present gradient lacks an operation; empty if it does not."""

    @property
    def parent(self) -> protocol.AdapterRef:
        """The newest committed version, from which the next step is taken."""
        assert self.versions.head is not None
        return self.versions.ref(self.versions.head.version)

    @property
    def uncommitted(self) -> int:
        """Steps since the last commit."""
        return sum(isinstance(entry, OptimRequest) for entry in self._log)

    @property
    def begun(self) -> bool:
        """Whether a gradient was begun since the last step."""
        return self._stepped < len(self._log)

    @property
    def logged_bytes(self) -> int:
        """Bytes of the operations since the last commit, which are in memory for a replay."""
        data = sum(len(entry.batch) for entry in self._log if isinstance(entry, ForwardRequest))
        return OPERATION_BYTES * len(self._log) + data

    # --- gradient and step --------------------------------------------------------------------------------------------

    async def forward(self, request: ForwardRequest) -> protocol.OperationDone:
        """Add to the gradient of the next step, or compute log-probabilities."""
        if not request.forward_only:
            return await self._append(request)

        async def attempt(worker: Worker) -> protocol.OperationDone:
            position, _ = await self._catch_up(worker)
            return await self._reading(self._forward(position, request))

        return await self._training.retrying(self._policy, self._model, attempt)

    async def optim_step(self, adam: protocol.Adam, *, commit: bool, scale: float = 1.0) -> protocol.OperationDone:
        """Step on ``scale`` times the gradient since the last step, or on a gradient of zero. With ``commit`` the
        returned manifest is durable. Raises :class:`UserError` for a gradient that lacks an operation."""
        self.check_gradient()
        return await self._append(OptimRequest(adam, scale), commit=commit)

    async def export(self) -> protocol.Manifest:
        """Make the state after the last step durable as an artifact; a gradient begun since stays."""

        async def attempt(worker: Worker) -> protocol.OperationDone:
            position, _ = await self._catch_up(worker)
            return await self._reading(self._training.uploading(worker, self._optim(position, OptimRequest(None))))

        done = await self._training.retrying(self._policy, self._model, attempt)
        assert done.manifest is not None
        return done.manifest

    def check_gradient(self) -> None:
        """Raises :class:`UserError` if the present gradient lacks an operation."""
        if self._missing:
            raise UserError(
                f"no step was taken: a forward_backward since the last one failed ({self._missing}); its"
                " gradient is dropped"
            )

    def reject(self, error: str) -> None:
        """An operation of the present gradient failed."""
        self._missing = error

    def drop_gradient(self) -> None:
        """Discard the gradient since the last step."""
        self._missing = ""
        self._clear_gradient()

    def restore_logged(self, entry: ForwardRequest) -> None:
        """Log an operation that an earlier process carried out after the newest commit: it is replayed before anything
        else."""
        self._log.append(entry)

    # --- commit and publication ---------------------------------------------------------------------------------------

    async def create(self, write: CommitVersion, seed: int, source: protocol.AdapterRef | None) -> protocol.AdapterRef:
        """Commit version 0: random weights from ``seed``, or those of ``source``."""
        return await self.commit(write, await self._init(seed, source))

    async def copy(self, write: CommitVersion, digest: str) -> protocol.AdapterRef:
        """Commit version 0: the stored artifact ``digest``, of another policy's version. Needs no worker. Raises
        :class:`ArtifactMissing`."""
        manifest = await self.versions.stored(digest)
        await self._renew()
        return await self._replace(write, manifest, uploaded=False)

    async def load(
        self, write: CommitVersion, source: protocol.AdapterRef, manifest: protocol.Manifest | None
    ) -> protocol.AdapterRef:
        """Commit the version ``source``, which a checkpoint names, in the place of the present state, whose uncommitted
        steps and gradient are discarded: its artifact ``manifest``, with the optimizer's state, or without one its
        weights alone."""
        if manifest is None:
            return await self._replace(write, await self._init(0, source), uploaded=True)
        await self._renew()
        return await self._replace(write, manifest, uploaded=False)

    async def commit(self, write: CommitVersion, manifest: protocol.Manifest) -> protocol.AdapterRef:
        """Make the steps taken so far durable as the next version, in the transaction that ``write`` runs."""
        step = self.uncommitted + (self.versions.head.step if self.versions.head is not None else 0)
        ref = await self._add_version(write, manifest, step, uploaded=True)
        self._continue_from(ref)
        self._weights.settle(ref)
        return ref

    def undo_step(self) -> None:
        """The commit of the last step failed: it is not taken, and its gradient waits for another step."""
        del self._log[-1:]
        self._position = None

    def drop_step(self) -> None:
        """As :meth:`undo_step`, and discard its gradient, with what was added since."""
        self._clear_gradient()
        self.undo_step()
        self._clear_gradient()

    def publish(self, job: str, in_flight: InFlight, switch: Callable[..., None]) -> protocol.AdapterRef:
        """Make the newest version the one on which new requests of ``job`` run, and running ones unless they finish on
        theirs: ``switch`` is :meth:`rookery.controller.rollout.scheduler.RolloutScheduler.switch`."""
        self._weights.publish(self._model, self.parent)
        if in_flight != "finish":
            switch(job, self.parent, recompute=in_flight == "recompute")
        return self.parent

    def offload(self) -> None:
        """Free the worker's slot: the next operation loads the parent again, and replays."""
        self._position = None
        self._training.evict_policy(self._policy, offload=True)

    def forget(self) -> None:
        """Discard everything since the last commit: the policy continues from another state, or does not train again
        here."""
        self._missing = ""
        self._log.clear()
        self._position = None
        self._training.forget_policy(self._policy)

    async def _init(self, seed: int, source: protocol.AdapterRef | None) -> protocol.Manifest:
        """Create a first version, durable as an artifact: random weights from ``seed``, or the weights of
        ``source``."""
        row = self._row

        async def attempt(worker: Worker) -> protocol.OperationDone:
            operation = protocol.InitAdapter(
                op=self._training.new_op(), policy=row.id, rank=row.rank, alpha=row.alpha, targets=list(row.targets),
                seed=seed, source=self._weights.adapter_ref(worker, source) if source is not None else None,
            )  # fmt: skip
            return await self._training.uploading(worker, operation)

        await self._renew()  # first: a version must name the upload without another wait in between
        done = await self._training.retrying(self._policy, self._model, attempt)
        assert done.manifest is not None
        return done.manifest

    async def _renew(self) -> None:
        """Take a new lease, to commit a state other than the worker's: it loads the parent again and replays."""
        self._position = None
        self._lease = await self._next_lease(self._policy)

    async def _replace(
        self, write: CommitVersion, manifest: protocol.Manifest, *, uploaded: bool
    ) -> protocol.AdapterRef:
        """Commit another state in the place of the present one, whose uncommitted steps and gradient are discarded.
        ``uploaded`` is False for an artifact that a checkpoint names already."""
        step = self.versions.head.step if self.versions.head is not None else 0
        ref = await self._add_version(write, manifest, step, uploaded=uploaded)
        self._weights.settle(ref)
        self.forget()
        return ref

    async def _add_version(
        self, write: CommitVersion, manifest: protocol.Manifest, step: int, *, uploaded: bool
    ) -> protocol.AdapterRef:
        """``uploaded`` is False for an artifact that a version or a checkpoint names already."""
        async with self._training.with_ticket(self._policy, manifest.hash) if uploaded else nullcontext():
            return await self.versions.commit(write, self._lease, manifest, step)

    def _continue_from(self, ref: protocol.AdapterRef) -> None:
        """``ref`` is durable in the database: the next step begins from it."""
        gone, position = self._stepped, self._position
        del self._log[:gone]
        if position is not None:
            position.entries, position.steps = max(0, position.entries - gone), 0
            position.worker.named_hashes.add(ref.hash)
            position.worker.post(protocol.VersionCommitted(policy=self._policy, lease=self._lease, ref=ref))

    # --- the log ------------------------------------------------------------------------------------------------------

    @property
    def _stepped(self) -> int:
        """Number of log entries up to and including the last step."""
        return max((at + 1 for at, entry in enumerate(self._log) if isinstance(entry, OptimRequest)), default=0)

    def _clear_gradient(self) -> None:
        if self.begun:
            del self._log[self._stepped :]
            self._position = None

    async def _reading(self, operation: Awaitable[protocol.OperationDone]) -> protocol.OperationDone:
        """Await an operation that does not change the worker's state. If it is abandoned, that state is unknown."""
        try:
            return await operation
        except TrainingFailed:
            raise
        except BaseException:
            self._position = None
            raise

    async def _append(self, entry: ForwardRequest | OptimRequest, *, commit: bool = False) -> protocol.OperationDone:
        """Add ``entry`` to the log and carry it out; its answer. Where that fails it is removed again."""
        known = len(self._log)
        if not known:
            self._training.rebalance(self._policy, self._model)
        self._log.append(entry)

        async def attempt(worker: Worker) -> list[protocol.OperationDone]:
            return (await self._catch_up(worker, commit=commit))[1]

        try:
            done = await self._training.retrying(self._policy, self._model, attempt)
        except BaseException:
            del self._log[known:]
            raise
        return done[-1]

    async def _catch_up(
        self, worker: Worker, *, commit: bool = False
    ) -> tuple[LogPosition, list[protocol.OperationDone]]:
        """Carry out the rest of the log at ``worker``; its position then, and the answers."""
        position = self._position
        if position is None or position.worker is not worker:
            self._position = None
            self._lease = await self._next_lease(self._policy)
            position = self._position = LogPosition(worker)
        answers = []
        try:
            while position.entries < len(self._log):
                at = position.entries
                entry = self._log[at]
                if isinstance(entry, ForwardRequest):
                    done = await self._forward(position, entry)
                elif commit and at + 1 == len(self._log):
                    done = await self._training.uploading(worker, self._optim(position, entry))
                else:
                    done = await self._training.call(worker, self._optim(position, entry))
                position.entries += 1
                if isinstance(entry, OptimRequest):
                    position.operations = 0
                    position.steps += not done.metrics.get("skipped")
                answers.append(done)
        except BaseException:
            self._position = None  # the worker's state is unknown now: load the parent and replay
            raise
        return position, answers

    # --- operations ---------------------------------------------------------------------------------------------------

    async def _forward(self, position: LogPosition, entry: ForwardRequest) -> protocol.OperationDone:
        """``entry`` on the policy's worker, and on others if it is divided: they have the committed parent, not the
        steps since."""
        helpers: list[Worker] = []
        if self._trainers > 1 and not (entry.forward_only or entry.targets or position.steps):
            helpers = self._training.helpers(self._policy, position.worker, self._model, self._trainers - 1)
        if helpers:
            batches = split_batch(protocol.decode(protocol.batches, entry.batch), 1 + len(helpers))
            if len(batches) > 1:
                shares = [replace(entry, batch=protocol.encode(batch), logprobs=False) for batch in batches]
                return await self._divided(position, helpers, shares)
        return await self._pass(position, entry)

    async def _divided(
        self, position: LogPosition, helpers: Sequence[Worker], shares: Sequence[ForwardRequest]
    ) -> protocol.OperationDone:
        """The first of ``shares`` on the policy's worker, the others on ``helpers``. The policy's worker adds the
        gradients of the others, and computes the shares that were lost."""
        first, rest, parent = shares[0], shares[1:], self.parent
        tasks = [asyncio.create_task(self._share(helper, share)) for helper, share in zip(helpers, rest, strict=False)]
        try:
            done = await self._pass(position, first)
            answers = [await task for task in tasks]
            lost = [share.batch for share, answer in zip(rest, answers, strict=True) if answer is None]
            exported = [answer for answer in answers if answer is not None]
            refs = [
                msgspec.structs.replace(parent, hash=answer.manifest.hash) for answer in exported if answer.manifest
            ]
            others = replace(first, batch=join_batches(lost))
            last = await self._pass(position, others, gradients=refs)
            return msgspec.structs.replace(done, metrics=join_metrics([done, *exported, last]))
        finally:
            for task in tasks:
                task.cancel()
            for answer in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(answer, protocol.OperationDone) and answer.manifest is not None:
                    await self._training.discard(self._policy, answer.manifest.hash)

    async def _share(self, helper: Worker, entry: ForwardRequest) -> protocol.OperationDone | None:
        """The gradient of ``entry`` on the parent, computed by ``helper`` and uploaded; None where it was lost."""
        with self._training.published_batch(entry.batch) as ticket:
            return await self._training.export_gradient(helper, self._message(LogPosition(helper), entry, ticket))

    async def _pass(
        self, position: LogPosition, entry: ForwardRequest, gradients: Sequence[protocol.AdapterRef] = ()
    ) -> protocol.OperationDone:
        with self._training.published_batch(entry.batch) as ticket:
            message = self._message(position, entry, ticket, gradients)
            done = await self._training.call(position.worker, message, entry.targets)
        position.operations += not entry.forward_only
        return done

    def _message(
        self, position: LogPosition, entry: ForwardRequest, ticket: str, gradients: Sequence[protocol.AdapterRef] = ()
    ) -> protocol.ForwardBackward:
        reference = entry.reference
        return protocol.ForwardBackward(
            batch_ticket=ticket, loss=entry.loss, temperature=entry.temperature, kl_weight=entry.kl_weight,
            reference=self._weights.adapter_ref(position.worker, reference) if reference is not None else None,
            forward_only=entry.forward_only, logprobs=entry.targets is not None or entry.logprobs,
            gradients=[self._weights.adapter_ref(position.worker, ref) for ref in gradients],
            **self._target(position),
        )  # fmt: skip

    def _optim(self, position: LogPosition, entry: OptimRequest) -> protocol.OptimStep:
        return protocol.OptimStep(adam=entry.adam, scale=entry.scale, **self._target(position))

    def _target(self, position: LogPosition) -> dict[str, Any]:
        """The fields that every operation has: a new id, and the state on which the worker must carry it out."""
        return {
            "op": self._training.new_op(),
            "tenant": self._row.tenant,
            "weight": self._training.tenant_shares.get(self._row.tenant, 1.0),
            "policy": self._policy,
            "lease": self._lease,
            "parent": self._weights.adapter_ref(position.worker, self.parent),
            "steps": position.steps,
            "operations": position.operations,
        }
