"""A policy's committed history as its job uses it: the head, what each version is called on the wire, what may go.

A version exists here only after its artifact is durable and the database has committed it. Versions that episodes, an
evaluation or a chat still run on are pinned: retention leaves them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from rookery import protocol
from rookery.controller.context import ControllerContext
from rookery.controller.weights.refs import adapter_ref
from rookery.errors import Conflict, CorruptArtifact, NotFound, UserError
from rookery.scheduling.retention import RetentionCandidate, earned, retire
from rookery.spec.job import CheckpointSpec
from rookery.storage.rows import PolicyRow, VersionRow

log = logging.getLogger("rookery.controller.jobs.policy")

EARLIER = "earlier_steps"
"""Where a version's metrics keep the rows of the steps before its last, so that a crash loses none of them."""


def steps_of(version: VersionRow) -> list[Mapping[str, Any]]:
    """The metrics of each step that led from its parent to ``version``."""
    return [*version.metrics.get(EARLIER, []), version.metrics] if version.metrics else []


class PolicyHistory:
    def __init__(self, world: ControllerContext, row: PolicyRow, checkpoints: CheckpointSpec) -> None:
        self._world = world
        self._checkpoints = checkpoints
        self.row = row
        self._versions: dict[int, VersionRow] = {}
        self._pinned: Counter[int] = Counter()
        self.head: VersionRow | None = None

    async def load(self) -> list[str]:
        """Read the history; step back from a head whose bytes are not what their hash says. Answers what was said about
        that, a line each. Raises :class:`UserError` when no version is left that could go on."""
        world, row = self._world, self.row
        lines: list[str] = []
        while True:
            versions = await world.ledger(world.database.versions, row.tenant, row.id)
            self._versions = {version.version: version for version in versions}
            policy = await world.ledger(world.database.get_policy, row.tenant, row.job, row.name)
            self.row = policy
            self.head = self._versions[policy.head_version] if policy.head_version is not None else None
            if self.head is None:
                return lines
            try:
                await world.ledger(world.artifacts.verify, self.head.hash)
                return lines
            except (CorruptArtifact, NotFound) as error:
                bad = self.head.version
                try:
                    head = await world.ledger(world.database.rollback, row.id, bad, str(error))
                except Conflict as none_left:
                    raise UserError(f"policy {row.name}: version {bad} is corrupt, {none_left}") from None
                lines.append(f"version {bad} of {row.name} is corrupt ({error}); went back to version {head.version}")
                log.error(lines[-1], extra={"tenant": row.tenant, "job": row.job, "version": bad})

    def ref(self, version: int) -> protocol.AdapterRef:
        """How workers are told of ``version``. Raises :class:`NotFound` for one whose bytes are gone."""
        row = self._versions.get(version)
        if row is None or not row.kept:
            raise NotFound(f"version {version} of policy {self.row.name} is not kept any more")
        return adapter_ref(self.row, row)

    def in_use(self) -> list[protocol.AdapterRef]:
        """The versions that may be sampled from now, oldest first: the newest, and those that are still run on."""
        named = {version for version, users in self._pinned.items() if users}
        if self.head is not None:
            named.add(self.head.version)
        return [self.ref(version) for version in sorted(named) if self._versions[version].kept]

    def step_of(self, version: int) -> int:
        """Optimizer steps behind ``version``."""
        return self._versions[version].step

    @property
    def history(self) -> list[VersionRow]:
        """Every version, oldest first."""
        return list(self._versions.values())

    @property
    def lineage(self) -> list[VersionRow]:
        """The head and what it descends from, oldest first; no version that was stepped back over."""
        found, version = [], self.head
        while version is not None:
            found.append(version)
            version = None if version.parent is None else self._versions[version.parent]
        return found[::-1]

    def version(self, version: int) -> VersionRow | None:
        return self._versions.get(version)

    @contextmanager
    def pinned(self, version: int) -> Iterator[protocol.AdapterRef]:
        """``version`` stays available within."""
        self._pinned[version] += 1
        try:
            yield self.ref(version)
        finally:
            self._pinned[version] -= 1

    async def commit(
        self,
        *,
        lease: int,
        manifest: protocol.Manifest,
        groups: Sequence[str],
        step: int,
        counters: Mapping[str, Any],
        rng: Mapping[str, Any],
        metrics: Mapping[str, Any],
    ) -> protocol.AdapterRef:
        """One transaction: the version, what it consumed, the job's step and counters. Then it is the head."""
        world = self._world
        parent = self.head.version if self.head is not None else None
        job = self.row.job
        assert job is not None
        async with world.training.with_ticket(self.row.id, manifest.hash):
            row = await world.ledger(
                world.database.commit_step,
                job=job,
                policy=self.row.id,
                lease=lease,
                parent=parent,
                manifest=manifest,
                groups=groups,
                step=step,
                counters=counters,
                rng=rng,
                metrics=metrics,
                time=world.clock.time(),
            )
        self._versions[row.version] = row
        self.head = row
        return self.ref(row.version)

    def evaluated(self, version: int, mean: float) -> None:
        row = self._versions[version]
        self._versions[version] = msgspec.structs.replace(row, evaluation=mean)

    async def retire(self) -> None:
        """Let go of the versions that retention does not keep."""
        world = self._world
        kept = [row for row in self._versions.values() if row.kept]
        scores = {row.version: row.evaluation for row in kept}
        if not any(score is not None for score in scores.values()):  # the two do not compare: they are of other prompts
            scores |= earned((row.parent, _best(row)) for row in self._versions.values())
        going = retire(
            [RetentionCandidate(row.version, scores[row.version]) for row in kept],
            keep_last=self._checkpoints.keep_last,
            keep_best=self._checkpoints.keep_best,
            in_use=[version for version, users in self._pinned.items() if users],
        )
        for version in going:
            await world.collector.delete_unnamed(world.database.retire_version, self.row.id, version)
            self._versions[version] = msgspec.structs.replace(self._versions[version], kept=False)


def _best(version: VersionRow) -> float | None:
    """The best mean reward among the steps that led to it."""
    rewards = [metrics["reward"] for metrics in steps_of(version) if "reward" in metrics]
    return max(rewards, default=None)
