"""The newest version of a client's model: what its next call builds on.

* A version exists once its artifact is durable and the database has committed it, with the calls in it and the answer.
* Earlier versions go at once, but for those that a name or a sampler holds and the one that is published in flight.
* A head whose bytes are damaged is not gone on from, and not stepped back from: an earlier version would not be what
  the client was told that it has. It must choose what to load.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import nullcontext

from rookery import protocol
from rookery.controller.context import ControllerContext
from rookery.controller.weights.refs import adapter_ref
from rookery.errors import CorruptArtifact, NotFound, UserError
from rookery.storage.rows import ModelRow, PolicyRow, VersionRow

log = logging.getLogger("rookery.controller.models")


class PolicyVersions:
    def __init__(self, world: ControllerContext, model: ModelRow, policy: PolicyRow) -> None:
        self._world = world
        self._model = model
        self._policy = policy
        self._row: VersionRow | None = None
        self._corrupt = ""
        """Why nothing can go on from it."""
        self._inflight: int | None = model.inflight

    async def load(self) -> None:
        """Find it, check its bytes, let go of what an earlier process left."""
        world, policy = self._world, self._policy
        for version in await world.ledger(world.database.versions, self._model.tenant, policy.id):
            if version.version == policy.head_version:
                self._row = version
            elif version.kept and version.version != self._inflight:
                await self._let_go(version.version)
        await self._check()

    async def _check(self) -> None:
        world, row = self._world, self._row
        if row is None:
            return
        try:
            await world.ledger(world.artifacts.verify, row.hash)
        except (CorruptArtifact, NotFound) as error:
            saved = await world.ledger(world.database.list_checkpoints, self._model.tenant, self._model.id)
            whole = next((found.path for found in saved if found.kind == "weights" and found.hash != row.hash), None)
            hint = f"load its newest other checkpoint, {whole}" if whole is not None else "it has no other checkpoint"
            self._corrupt = f"version {row.version} of model {self._model.id} is corrupt ({error}); {hint}"
            log.error(self._corrupt, extra={"tenant": self._model.tenant, "version": row.version})

    @property
    def step(self) -> int:
        """Optimizer steps in it; 0 where there is none."""
        return self._row.step if self._row is not None else 0

    def ref(self) -> protocol.AdapterRef:
        """As workers are told of it. Raises :class:`UserError` where there is none, :class:`CorruptArtifact` where it
        is damaged."""
        return adapter_ref(self._policy, self.row)

    @property
    def row(self) -> VersionRow:
        """As it is stored. Raises as :meth:`ref`."""
        if self._row is None:
            raise UserError(f"model {self._model.id} has no weights: its creation failed, or is not over")
        if self._corrupt:
            raise CorruptArtifact(self._corrupt)
        return self._row

    async def publish_inflight(self) -> None:
        """In-flight samplers go on with it."""
        world, version = self._world, self.row.version
        before, self._inflight = self._inflight, version
        await world.ledger(world.database.publish_inflight, self._model.id, version)
        if before is not None and before != version:
            await self._let_go(before)

    async def commit(
        self,
        manifest: protocol.Manifest,
        *,
        lease: int,
        step: int,
        done: int,
        metrics: Mapping[str, float],
        outcome: tuple[str, bytes] | None,
        uploaded: bool,
    ) -> int | None:
        """The next version, the calls up to ``done`` in it and the ``outcome`` (a request's id and its answer), as one.
        ``uploaded``: the artifact is new, and is named from now on. Answers the version before, which
        :meth:`leave` may let go."""
        world = self._world
        before = self._row.version if self._row is not None else None
        async with world.training.with_ticket(self._policy.id, manifest.hash) if uploaded else nullcontext():
            self._row = await world.ledger(
                world.database.commit_model,
                model=self._model.id,
                policy=self._policy.id,
                lease=lease,
                parent=before,
                manifest=manifest,
                step=step,
                metrics=metrics,
                time=world.clock.time(),
                done_seq=done,
                outcome=outcome,
            )
        self._corrupt = ""
        return before

    async def leave(self, version: int | None) -> None:
        """``version`` was the head before."""
        if version is not None and version != self._inflight:
            await self._let_go(version)

    async def _let_go(self, version: int) -> None:
        await self._world.collector.delete_unnamed(self._world.database.retire_version, self._policy.id, version)
