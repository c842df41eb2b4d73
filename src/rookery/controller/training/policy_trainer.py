"""Training of one policy: its optimizer steps, on any training worker.

* A policy trains under a lease number that only grows; an answer under an older one is ignored, and its commit refused
  by the database.
* Every operation names its parent version, the steps since, and the operations in the gradient: a worker with another
  state answers ``stale``. So a step is taken on exactly the operations logged for it.
* A large policy's batches are divided among several workers: each computes a share on the committed parent, and the
  policy's worker adds the gradients of the others to its own, in a fixed order. It computes a share whose worker is
  lost.
* The operations since the last commit are logged here until the next commit, so a lost worker costs its computation and
  nothing else: the next worker loads the parent and replays the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from rookery import protocol
from rookery.controller.fleet.worker import Worker
from rookery.controller.quotas import OPERATION_BYTES
from rookery.controller.training.dispatcher import TrainingDispatcher, TrainingFailed
from rookery.controller.training.shares import join_batches, join_metrics, split_batch
from rookery.storage.models import PolicyRow


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


class PolicyTrainer:
    """One policy in training: its lease, and the operations since its last commit."""

    def __init__(
        self,
        training: TrainingDispatcher,
        row: PolicyRow,
        model: str,
        next_lease: Callable[[str], Awaitable[int]],
        trainers: int = 1,
    ) -> None:
        """``model``: the base model of the policy in ``row``. ``next_lease(policy)`` issues a lease number. A batch is
        divided among at most ``trainers`` workers."""
        self._training = training
        self._row = row
        self._policy = row.id
        self._model = model
        self._next_lease = next_lease
        self._trainers = trainers
        self._worker: Worker | None = None
        self._log: list[ForwardRequest | OptimRequest] = []
        self._sent = 0
        """Entries of ``_log`` that the present worker has carried out …"""
        self._applied = 0
        """… the steps among them that changed its state (a step on NaN is skipped) …"""
        self._operations = 0
        """… and the operations in its gradient."""
        self.lease = 0

    async def init(self, seed: int, source: protocol.AdapterRef | None) -> protocol.Manifest:
        """Create version 0, durable as an artifact: random weights from ``seed``, or the weights of ``source``."""
        row = self._row

        async def attempt(worker: Worker) -> protocol.OperationDone:
            operation = protocol.InitAdapter(
                op=self._training.new_op(), policy=row.id, rank=row.rank, alpha=row.alpha, targets=list(row.targets),
                seed=seed, source=self._training.pin(worker, source) if source is not None else None,
            )  # fmt: skip
            return await self._training.uploading(worker, operation)

        await self.renew()  # first: a version must name the upload without another wait in between
        done = await self._training.retrying(self._policy, self._model, attempt)
        assert done.manifest is not None
        return done.manifest

    async def renew(self) -> None:
        """Take a new lease, to commit a state other than the worker's: it loads the parent again and replays."""
        self._leave()
        self.lease = await self._next_lease(self._policy)

    async def forward(self, parent: protocol.AdapterRef, forward: ForwardRequest) -> protocol.OperationDone:
        """Add to the gradient of the next step, on ``parent`` and the steps taken since."""
        if not forward.forward_only:
            return await self._append(forward, parent)

        async def attempt(worker: Worker) -> protocol.OperationDone:
            await self._catch_up(worker, parent)
            return await self._reading(self._forward(worker, parent, forward))

        return await self._training.retrying(self._policy, self._model, attempt)

    async def optim_step(
        self, parent: protocol.AdapterRef, adam: protocol.Adam, *, commit: bool, scale: float = 1.0
    ) -> protocol.OperationDone:
        """Step on ``scale`` times the gradient since the last step, or on a gradient of zero. With ``commit`` the
        returned manifest is durable."""
        return await self._append(OptimRequest(adam, scale), parent, commit=commit)

    async def commit(self, parent: protocol.AdapterRef) -> protocol.OperationDone:
        """Make the state after the last step durable; a gradient begun since stays."""

        async def attempt(worker: Worker) -> protocol.OperationDone:
            await self._catch_up(worker, parent)
            return await self._reading(
                self._training.uploading(worker, self._optim(parent, worker, OptimRequest(None)))
            )

        return await self._training.retrying(self._policy, self._model, attempt)

    def recall(self, entry: ForwardRequest) -> None:
        """Log an operation that an earlier process carried out after the commit that is the next parent: it is replayed
        before anything else."""
        self._log.append(entry)

    def drop_gradient(self) -> None:
        """Discard the gradient since the last step."""
        if self.begun:
            del self._log[self._stepped :]
            self._leave()

    def undo_step(self) -> None:
        """The last step, whose commit failed, is not taken: its gradient is begun again."""
        del self._log[-1:]
        self._leave()

    def drop_step(self) -> None:
        """Discard the last step, whose commit failed, too."""
        self.drop_gradient()
        del self._log[-1:]
        self.drop_gradient()
        self._leave()

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
        """Of the operations since the last commit, in memory for a replay."""
        data = sum(len(entry.batch) for entry in self._log if isinstance(entry, ForwardRequest))
        return OPERATION_BYTES * len(self._log) + data

    def committed(self, ref: protocol.AdapterRef) -> None:
        """``ref`` is durable in the database: the next step begins from it."""
        gone = self._stepped
        del self._log[:gone]
        self._sent = max(0, self._sent - gone)
        self._applied = 0
        if self._worker is not None:
            self._worker.authorized.add(ref.hash)
            self._worker.post(protocol.VersionCommitted(policy=self._policy, lease=self.lease, ref=ref))

    def offload(self) -> None:
        """Free the worker's slot: the next operation loads the parent again, and replays."""
        self._leave()
        self._training.evict_policy(self._policy, offload=True)

    def forget(self) -> None:
        """Discard everything since the last commit: the policy continues from another state, or not at all."""
        self._log.clear()
        self._leave()
        self._training.forget_policy(self._policy)

    @property
    def _stepped(self) -> int:
        """Number of log entries up to and including the last step."""
        return max((at + 1 for at, entry in enumerate(self._log) if isinstance(entry, OptimRequest)), default=0)

    def _leave(self) -> None:
        self._worker = None
        self._sent = self._applied = self._operations = 0

    async def _reading(self, operation: Awaitable[protocol.OperationDone]) -> protocol.OperationDone:
        """Await an operation that does not change the worker's state. If it is abandoned, that state is unknown."""
        try:
            return await operation
        except TrainingFailed:
            raise
        except BaseException:
            self._leave()
            raise

    async def _append(
        self, entry: ForwardRequest | OptimRequest, parent: protocol.AdapterRef, *, commit: bool = False
    ) -> protocol.OperationDone:
        """Add ``entry`` to the log and carry it out; its answer. Where that fails it is removed again."""
        known = len(self._log)
        if not known:
            self._training.rebalance(self._policy, self._model)
        self._log.append(entry)

        async def attempt(worker: Worker) -> list[protocol.OperationDone]:
            return await self._catch_up(worker, parent, commit=commit)

        try:
            done = await self._training.retrying(self._policy, self._model, attempt)
        except BaseException:
            del self._log[known:]
            raise
        return done[-1]

    async def _catch_up(
        self, worker: Worker, parent: protocol.AdapterRef, *, commit: bool = False
    ) -> list[protocol.OperationDone]:
        """Carry out the rest of the log at ``worker``; the answers."""
        if worker is not self._worker:
            self._leave()
            self.lease = await self._next_lease(self._policy)
            self._worker = worker
        answers = []
        try:
            while self._sent < len(self._log):
                at = self._sent
                entry = self._log[at]
                if isinstance(entry, ForwardRequest):
                    done = await self._forward(worker, parent, entry)
                elif commit and at + 1 == len(self._log):
                    done = await self._training.uploading(worker, self._optim(parent, worker, entry))
                else:
                    done = await self._training.call(worker, self._optim(parent, worker, entry))
                self._sent += 1
                if isinstance(entry, OptimRequest):
                    self._operations = 0
                    self._applied += not done.metrics.get("skipped")
                answers.append(done)
        except BaseException:
            self._leave()  # the worker's state is unknown now: load the parent and replay
            raise
        return answers

    async def _forward(
        self, worker: Worker, parent: protocol.AdapterRef, entry: ForwardRequest
    ) -> protocol.OperationDone:
        """``entry`` on ``worker``, and on others if it is divided: they have the committed parent, not the steps
        since."""
        helpers: list[Worker] = []
        if self._trainers > 1 and not (entry.forward_only or entry.targets or self._applied):
            helpers = self._training.helpers(self._policy, worker, self._model, self._trainers - 1)
        if helpers:
            batches = split_batch(protocol.decode(protocol.batches, entry.batch), 1 + len(helpers))
            if len(batches) > 1:
                shares = [replace(entry, batch=protocol.encode(batch), logprobs=False) for batch in batches]
                return await self._divided([worker, *helpers], parent, shares)
        return await self._pass(worker, parent, entry)

    async def _divided(
        self, workers: Sequence[Worker], parent: protocol.AdapterRef, shares: Sequence[ForwardRequest]
    ) -> protocol.OperationDone:
        """Each of ``shares`` on its worker. The first worker has the policy: it adds the gradients of the others, and
        computes the shares that were lost."""
        worker, first, rest = workers[0], shares[0], shares[1:]
        tasks = [
            asyncio.create_task(self._share(helper, parent, share))
            for helper, share in zip(workers[1:], rest, strict=False)
        ]
        try:
            done = await self._pass(worker, parent, first)
            answers = [await task for task in tasks]
            lost = [share.batch for share, answer in zip(rest, answers, strict=True) if answer is None]
            exported = [answer for answer in answers if answer is not None]
            refs = [
                msgspec.structs.replace(parent, hash=answer.manifest.hash) for answer in exported if answer.manifest
            ]
            others = replace(first, batch=join_batches(lost))
            last = await self._pass(worker, parent, others, gradients=refs)
            return msgspec.structs.replace(done, metrics=join_metrics([done, *exported, last]))
        finally:
            for task in tasks:
                task.cancel()
            for answer in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(answer, protocol.OperationDone) and answer.manifest is not None:
                    await self._training.discard(self._policy, answer.manifest.hash)

    async def _share(
        self, helper: Worker, parent: protocol.AdapterRef, entry: ForwardRequest
    ) -> protocol.OperationDone | None:
        """The gradient of ``entry``, computed by ``helper`` and uploaded; None where it was lost."""
        with self._training.published_batch(entry.batch) as ticket:
            message = self._message(helper, parent, entry, ticket, operations=0)
            return await self._training.export_gradient(helper, message)

    async def _pass(
        self,
        worker: Worker,
        parent: protocol.AdapterRef,
        entry: ForwardRequest,
        gradients: Sequence[protocol.AdapterRef] = (),
    ) -> protocol.OperationDone:
        with self._training.published_batch(entry.batch) as ticket:
            message = self._message(worker, parent, entry, ticket, operations=self._operations, gradients=gradients)
            done = await self._training.call(worker, message, entry.targets)
        self._operations += not entry.forward_only
        return done

    def _message(
        self,
        worker: Worker,
        parent: protocol.AdapterRef,
        entry: ForwardRequest,
        ticket: str,
        *,
        operations: int,
        gradients: Sequence[protocol.AdapterRef] = (),
    ) -> protocol.ForwardBackward:
        reference = entry.reference
        return protocol.ForwardBackward(
            batch_ticket=ticket, loss=entry.loss, temperature=entry.temperature, kl_weight=entry.kl_weight,
            reference=self._training.pin(worker, reference) if reference is not None else None,
            forward_only=entry.forward_only, logprobs=entry.targets is not None or entry.logprobs,
            gradients=[self._training.pin(worker, ref) for ref in gradients],
            **self._target(worker, parent, operations),
        )  # fmt: skip

    def _optim(self, parent: protocol.AdapterRef, worker: Worker, entry: OptimRequest) -> protocol.OptimStep:
        return protocol.OptimStep(adam=entry.adam, scale=entry.scale, **self._target(worker, parent, self._operations))

    def _target(self, worker: Worker, parent: protocol.AdapterRef, operations: int) -> dict[str, Any]:
        """The fields that every operation has: a new id, and the state on which ``worker`` must carry it out, with so
        many ``operations`` in the gradient."""
        return {
            "op": self._training.new_op(),
            "tenant": self._row.tenant,
            "weight": self._training.weights.get(self._row.tenant, 1.0),
            "policy": self._policy,
            "lease": self.lease,
            "parent": self._training.pin(worker, parent),
            "steps": self._applied,
            "operations": operations,
        }
