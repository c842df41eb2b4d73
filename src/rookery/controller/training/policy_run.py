"""One policy in training: its versions, the gradient and the steps since the newest of them, the commit that makes the
next one, and its publication. The loop of a job and the calls of a client drive it alike::

    forward ──▶ optim_step ──▶ commit ──▶ publish
       ▲             │            │
       └─────────────┴────────────┘        (several of each before the next)

* Each operation runs on the newest committed version and the steps taken since.
* No step is taken on a part of a gradient: after :meth:`PolicyRun.reject` the next step is refused, and with it the
  gradient is discarded.
* A version is visible only when it is durable.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from rookery import protocol
from rookery.controller.training.dispatcher import TrainingDispatcher
from rookery.controller.training.policy_trainer import ForwardRequest, PolicyTrainer
from rookery.controller.training.policy_versions import PolicyVersions
from rookery.controller.weights.store import WeightStore
from rookery.errors import UserError
from rookery.spec.policy import InFlight
from rookery.storage.models import VersionRow


class PolicyRun:
    def __init__(
        self,
        training: TrainingDispatcher,
        references: WeightStore,
        next_lease: Callable[[str], Awaitable[int]],
        model: str,
        versions: PolicyVersions,
        trainers: int = 1,
    ) -> None:
        """``model``: the base model. A batch is divided among at most ``trainers`` workers."""
        self._references = references
        self._model = model
        self.versions = versions
        self.trainer = PolicyTrainer(training, versions.row, model, next_lease, trainers)
        self._missing = ""
        """Why the present gradient lacks an operation; empty if it does not."""

    @property
    def parent(self) -> protocol.AdapterRef:
        """The newest committed version, from which the next step is taken."""
        assert self.versions.head is not None
        return self.versions.ref(self.versions.head.version)

    # --- gradient and step --------------------------------------------------------------------------------------------

    async def forward(self, request: ForwardRequest) -> protocol.OperationDone:
        """Add to the gradient of the next step, or compute log-probabilities."""
        return await self.trainer.forward(self.parent, request)

    async def optim_step(self, adam: protocol.Adam, *, commit: bool, scale: float = 1.0) -> protocol.OperationDone:
        """Step on ``scale`` times the gradient since the last step, or on a gradient of zero. With ``commit`` the
        returned manifest is durable. Raises :class:`UserError` for a gradient that lacks an operation."""
        self.check_gradient()
        return await self.trainer.optim_step(self.parent, adam, commit=commit, scale=scale)

    async def export(self) -> protocol.Manifest:
        """Make the state after the last step durable as an artifact; a gradient begun since stays."""
        done = await self.trainer.commit(self.parent)
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
        self.trainer.drop_gradient()

    def recall(self, entry: ForwardRequest) -> None:
        """Take up an operation that an earlier process carried out after the newest commit."""
        self.trainer.recall(entry)

    @property
    def uncommitted(self) -> int:
        """Steps since the last commit."""
        return self.trainer.uncommitted

    # --- commit and publication ---------------------------------------------------------------------------------------

    async def create(
        self, write: Callable[..., Awaitable[VersionRow]], seed: int, source: protocol.AdapterRef | None
    ) -> protocol.AdapterRef:
        """Commit version 0: random weights from ``seed``, or those of ``source``."""
        return await self.commit(write, await self.trainer.init(seed, source))

    async def copy(self, write: Callable[..., Awaitable[VersionRow]], digest: str) -> protocol.AdapterRef:
        """Commit version 0: the stored artifact ``digest``, of another policy's version. Needs no worker. Raises
        :class:`ArtifactMissing`."""
        manifest = await self.versions.stored(digest)
        await self.trainer.renew()
        return await self.replace(write, manifest, uploaded=False)

    async def commit(
        self, write: Callable[..., Awaitable[VersionRow]], manifest: protocol.Manifest
    ) -> protocol.AdapterRef:
        """Make the steps taken so far durable as the next version, in the transaction that ``write`` runs
        (:meth:`PolicyVersions.commit`)."""
        step = self.uncommitted + (self.versions.head.step if self.versions.head is not None else 0)
        ref = await self.versions.commit(write, lease=self.trainer.lease, manifest=manifest, step=step)
        self.trainer.committed(ref)
        self._references.settle(ref)
        return ref

    async def replace(
        self, write: Callable[..., Awaitable[VersionRow]], manifest: protocol.Manifest, *, uploaded: bool
    ) -> protocol.AdapterRef:
        """Commit another state in the place of the present one, whose uncommitted steps and gradient are discarded.
        ``uploaded`` is False for an artifact that a checkpoint names already."""
        step = self.versions.head.step if self.versions.head is not None else 0
        ref = await self.versions.commit(
            write, lease=self.trainer.lease, manifest=manifest, step=step, uploaded=uploaded
        )
        self._references.settle(ref)
        self._missing = ""
        self.trainer.forget()
        return ref

    def publish(self, job: str, in_flight: InFlight, switch: Callable[..., None]) -> protocol.AdapterRef:
        """Make the newest version the one on which new requests of ``job`` run, and running ones unless they finish on
        theirs: ``switch`` is :meth:`rookery.controller.rollout.scheduler.RolloutScheduler.switch`."""
        self._references.publish(self._model, self.parent)
        if in_flight != "finish":
            switch(job, self.parent, recompute=in_flight == "recompute")
        return self.parent

    def forget(self) -> None:
        """Discard everything since the last commit: it does not train again here."""
        self._missing = ""
        self.trainer.forget()
