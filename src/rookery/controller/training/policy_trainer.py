"""A policy in training: its optimizer steps on whichever training worker holds its lease.

* A policy trains under a lease number that only grows; an answer under an older one is ignored, and its commit refused
  by the database.
* Every operation names its parent version and the steps since: a worker that holds something else says so and reloads.
* What was taken since the last commit is kept here until the commit, so that a lost worker costs its computation and
  nothing else: the next worker loads the parent and replays it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from rookery import protocol
from rookery.controller.fleet.fleet import Worker
from rookery.controller.training.dispatcher import TrainingDispatcher, TrainingFailed


@dataclass(frozen=True)
class ForwardRequest:
    """A gradient to add, or (``forward_only``) log-probabilities to tell."""

    batch: bytes
    """An encoded :class:`rookery.protocol.Batch`."""
    loss: protocol.Loss
    temperature: float = 1.0
    kl_weight: float = 0.0
    forward_only: bool = False
    logprobs: bool = False
    """Answer with the log-probabilities too."""


@dataclass(frozen=True)
class OptimRequest:
    """A step on ``scale`` times the gradient added since the last one."""

    adam: protocol.Adam
    scale: float = 1.0


NOTHING = ForwardRequest(protocol.encode(protocol.TrainingBatch()), protocol.Loss(name="cross_entropy"))
"""Adds a gradient of zero: what a step without one before it is taken on."""


class PolicyTrainer:
    """One policy in training: its lease and what was taken since its last commit."""

    def __init__(
        self,
        training: TrainingDispatcher,
        *,
        tenant: str,
        policy: str,
        model: str,
        next_lease: Callable[[], Awaitable[int]],
    ) -> None:
        self._training = training
        self._tenant = tenant
        self._policy = policy
        self._model = model
        self._next_lease = next_lease
        self._worker: Worker | None = None
        self._log: list[ForwardRequest | OptimRequest] = []
        self._taken = 0
        """How much of ``_log`` the present worker has taken …"""
        self._applied = 0
        """… and how many of the steps therein changed its state: one that is not a number is skipped."""
        self.lease = 0

    async def init(
        self,
        make: Callable[[str, str, protocol.AdapterRef | None], protocol.InitAdapter],
        source: protocol.AdapterRef | None,
    ) -> protocol.Manifest:
        """Version 0, durable as an artifact. ``make`` gets the operation's id, the upload ticket and the ``source`` to
        start from with a ticket to read it."""

        async def attempt(worker: Worker) -> protocol.OperationDone:
            readable = self._training.pin(worker, source) if source is not None else None
            return await self._training.uploading(
                worker, lambda upload: make(self._training.new_op(), upload, readable)
            )

        await self.renew()  # before: what is brought is named without waiting for anything else
        done = await self._training.retrying(self._policy, self._model, attempt)
        assert done.manifest is not None
        return done.manifest

    async def renew(self) -> None:
        """A lease to commit something else under than what the worker holds: that one loads the parent again, and
        replays, where it comes to nothing."""
        self._leave()
        self.lease = await self._next_lease()

    async def forward(self, parent: protocol.AdapterRef, forward: ForwardRequest) -> protocol.OperationDone:
        """Add to the gradient of the next step from ``parent`` and what was taken since."""
        if not forward.forward_only:
            return (await self._take([forward], parent))[-1]

        async def attempt(worker: Worker) -> protocol.OperationDone:
            await self._catch_up(worker, parent)
            return await self._held(self._forward(worker, parent, forward, fresh=False))

        return await self._training.retrying(self._policy, self._model, attempt)

    async def optim_step(
        self, parent: protocol.AdapterRef, adam: protocol.Adam, *, commit: bool, scale: float = 1.0
    ) -> protocol.OperationDone:
        """Step on ``scale`` times the gradient since the last step; without any, on zero. With ``commit`` the answer's
        manifest is durable."""
        entries: list[ForwardRequest | OptimRequest] = [] if self.begun else [NOTHING]
        return (await self._take([*entries, OptimRequest(adam, scale)], parent, commit=commit))[-1]

    async def commit(self, parent: protocol.AdapterRef) -> protocol.OperationDone:
        """Make the state after the steps taken so far durable; a gradient begun since stays."""

        async def attempt(worker: Worker) -> protocol.OperationDone:
            await self._catch_up(worker, parent)
            return await self._held(self._training.uploading(worker, partial(self._optim, parent, worker, None)))

        return await self._training.retrying(self._policy, self._model, attempt)

    def recall(self, entry: ForwardRequest | OptimRequest) -> None:
        """What an earlier process took since the commit that is to be the parent: it is replayed before anything
        else."""
        if isinstance(entry, OptimRequest) and not self.begun:
            self._log.append(NOTHING)
        self._log.append(entry)

    def drop_gradient(self) -> None:
        """What was added since the last step is as if it had never been."""
        if self.begun:
            del self._log[self._stepped :]
            self._leave()

    def drop_step(self) -> None:
        """Neither was the last step, whose commit did not succeed."""
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
        """Whether there is a gradient that no step was taken on yet."""
        return self._stepped < len(self._log)

    def committed(self, ref: protocol.AdapterRef) -> None:
        """``ref`` is durable in the database: the next step begins from it."""
        gone = self._stepped
        del self._log[:gone]
        self._taken = max(0, self._taken - gone)
        self._applied = 0
        if self._worker is not None:
            self._worker.named.add(ref.hash)
            message = protocol.VersionCommitted(policy=self._policy, lease=self.lease, ref=ref)
            self._training.committed(self._worker, message)

    def offload(self) -> None:
        """Let the worker's place go to somebody else: the next operation loads the parent again, and replays."""
        self._leave()
        self._training.forget_policy(self._policy, aside=True)

    def forget(self) -> None:
        """The policy goes on from another state, or not at all."""
        self._log.clear()
        self._leave()
        self._training.forget_policy(self._policy)

    @property
    def _stepped(self) -> int:
        """Entries of the log up to its last step."""
        return max((at + 1 for at, entry in enumerate(self._log) if isinstance(entry, OptimRequest)), default=0)

    def _leave(self) -> None:
        self._worker = None
        self._taken = self._applied = 0

    async def _held(self, operation: Awaitable[protocol.OperationDone]) -> protocol.OperationDone:
        """``operation``, which changes nothing in the worker; whether that holds what it did is not known where it is
        given up."""
        try:
            return await operation
        except TrainingFailed:
            raise
        except BaseException:
            self._leave()
            raise

    async def _take(
        self, entries: Sequence[ForwardRequest | OptimRequest], parent: protocol.AdapterRef, *, commit: bool = False
    ) -> list[protocol.OperationDone]:
        """Add ``entries`` to the log and have the worker take them; their answers. What fails is not in the log."""
        known = len(self._log)
        if not known:
            self._training.rebalance(self._policy, self._model)
        self._log.extend(entries)

        async def attempt(worker: Worker) -> list[protocol.OperationDone]:
            return await self._catch_up(worker, parent, commit=commit)

        try:
            done = await self._training.retrying(self._policy, self._model, attempt)
        except BaseException:
            del self._log[known:]
            raise
        return done[-len(entries) :]

    async def _catch_up(
        self, worker: Worker, parent: protocol.AdapterRef, *, commit: bool = False
    ) -> list[protocol.OperationDone]:
        """Have ``worker`` take what it lacks of the log; the answers so far of this worker to the newest entries."""
        if worker is not self._worker:
            self._leave()
            self.lease = await self._next_lease()
            self._worker = worker
        answers = []
        try:
            while self._taken < len(self._log):
                at = self._taken
                entry = self._log[at]
                if isinstance(entry, ForwardRequest):
                    fresh = at == 0 or isinstance(self._log[at - 1], OptimRequest)
                    done = await self._forward(worker, parent, entry, fresh=fresh)
                elif commit and at + 1 == len(self._log):
                    done = await self._training.uploading(worker, partial(self._optim, parent, worker, entry))
                else:
                    done = await self._training.call(worker, self._optim(parent, worker, entry, ""))
                self._taken += 1
                if isinstance(entry, OptimRequest):
                    self._applied += not done.metrics.get("skipped")
                answers.append(done)
        except BaseException:
            self._leave()  # what the worker holds now is not known: load the parent and replay
            raise
        return answers

    async def _forward(
        self, worker: Worker, parent: protocol.AdapterRef, entry: ForwardRequest, *, fresh: bool
    ) -> protocol.OperationDone:
        ticket = self._training.publish_batch(entry.batch)
        try:
            return await self._training.call(
                worker,
                protocol.ForwardBackward(
                    op=self._training.new_op(),
                    tenant=self._tenant,
                    policy=self._policy,
                    lease=self.lease,
                    parent=self._training.pin(worker, parent),
                    steps=self._applied,
                    batch_ticket=ticket,
                    loss=entry.loss,
                    temperature=entry.temperature,
                    kl_weight=entry.kl_weight,
                    forward_only=entry.forward_only,
                    zero_grad=fresh,
                    logprobs=entry.logprobs,
                ),
            )
        finally:
            self._training.retract_batch(ticket)

    def _optim(
        self, parent: protocol.AdapterRef, worker: Worker, entry: OptimRequest | None, upload: str
    ) -> protocol.OptimStep:
        return protocol.OptimStep(
            op=self._training.new_op(),
            tenant=self._tenant,
            policy=self._policy,
            lease=self.lease,
            parent=self._training.pin(worker, parent),
            steps=self._applied,
            adam=entry.adam if entry is not None else None,
            scale=entry.scale if entry is not None else 1.0,
            commit=upload,
        )
