"""The committed versions of one policy, of a job or of a client's training run.

* A version exists here only after its artifact is durable and the database has committed it.
* Retention keeps the versions that requests still use, and the version published in flight.
* A policy that follows this one replies with an earlier version of it, which retention keeps, too
  (:meth:`PolicyVersions.followed`).
* A job keeps the versions that its ``checkpoints`` section asks for and steps back from a corrupt head. A training run
  keeps its head only (checkpoints and samplers keep others), and never steps back: an earlier version is not the state
  that its client was promised.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rookery import protocol
from rookery.controller.services import Services
from rookery.controller.weights.gc import ArtifactCollector
from rookery.controller.weights.store import adapter_ref
from rookery.errors import ArtifactMissing, Conflict, CorruptArtifact, IncompleteArtifact, NotFound
from rookery.scheduling.job_rules import followed_version, training_rewards, versions_to_delete
from rookery.spec.job import CheckpointSpec
from rookery.storage.models import PolicyRow, VersionRow
from rookery.storage.repositories import jobs, sessions
from rookery.storage.repositories import versions as version_rows
from rookery.telemetry.spans import SpanRing, TraceSpan

log = logging.getLogger("rookery.controller.training.policy_versions")

CommitVersion = Callable[[version_rows.NextVersion], Awaitable[VersionRow]]
"""Runs the transaction that commits a version."""


@dataclass(frozen=True, kw_only=True)
class Retention:
    """The versions of a policy that are kept, besides the head and those in use."""

    checkpoints: CheckpointSpec | None = None
    """The section of a job; without it no other version is kept."""
    inflight: int | None = None
    """The version published in flight."""
    reference: int | None = None
    """The version that training compares with."""
    followers: tuple[int, ...] = ()
    """For each policy that follows this one: the number of steps after which it takes the newest version."""
    keeps_first: bool = False
    """Version 0 is kept."""


HEAD_ONLY = Retention()


class PolicyVersions:
    def __init__(
        self,
        services: Services,
        spans: SpanRing,
        collector: ArtifactCollector,
        row: PolicyRow,
        retention: Retention = HEAD_ONLY,
    ) -> None:
        """``spans`` records commits."""
        self._services = services
        self._spans = spans
        self._collector = collector
        self._retention = retention
        self._unfit: set[int] = set()
        """Versions whose bytes were found lost when a follower began: it takes later ones."""
        self.row = row
        self._versions: dict[int, VersionRow] = {}
        self._users: Counter[int] = Counter()
        """By version, the contexts of :meth:`using` that are open."""
        self.head: VersionRow | None = None

    async def load(self) -> None:
        """Read the history. Raises :class:`CorruptArtifact` if the head's bytes are there and do not match their hash,
        :class:`ArtifactMissing` if they are absent, :class:`Unavailable`; ``head`` is set all the same."""
        services, row = self._services, self.row
        versions = await services.store.read(version_rows.versions, row.tenant, row.id)
        self._versions = {version.version: version for version in versions}
        self.row = await services.store.read(jobs.get_policy, row.tenant, row.job, row.name)
        self.head = self._versions[self.row.head_version] if self.row.head_version is not None else None
        await self.verify()

    async def verify(self) -> None:
        """Read the head's bytes. Raises as :meth:`load` does."""
        services, head = self._services, self.head
        if head is not None:
            try:
                await services.store.transfer(services.artifacts.verify, head.hash)
            except (NotFound, IncompleteArtifact) as error:
                raise ArtifactMissing(f"version {head.version} of {self.row.name} is missing: {error}") from None

    async def stored(self, digest: str) -> protocol.Manifest:
        """The manifest of a stored artifact, whose bytes are read. Raises :class:`ArtifactMissing`."""
        try:
            return await self._services.store.transfer(self._services.artifacts.verify, digest)
        except (NotFound, IncompleteArtifact, CorruptArtifact) as error:
            raise ArtifactMissing(f"the weights from which {self.row.name} begins are missing: {error}") from None

    async def verify_followed(self) -> list[str]:
        """Read the bytes of the versions that the followers use. Where they are lost, later versions are taken. Returns
        a line for the user for each."""
        services, lines = self._services, list[str]()
        for every in self._retention.followers:
            while (row := self.followed(every)) is not None and row is not self.head:
                try:
                    await services.store.transfer(services.artifacts.verify, row.hash)
                    break
                except (NotFound, IncompleteArtifact, CorruptArtifact) as error:
                    self._unfit.add(row.version)
                    lines.append(f"version {row.version} of {self.row.name} is lost ({error}); a later one is followed")
        return lines

    async def load_intact(self, absent: bool = False) -> list[str]:
        """Read the history; roll back while the head is corrupt, or with ``absent`` while its bytes are absent. Returns
        a line for the user per rollback. Raises :class:`ArtifactMissing`, also when no intact version is left."""
        lines: list[str] = []
        while True:
            try:
                await self.load()
                return lines
            except CorruptArtifact as error:
                lines.append(await self.rollback("corrupt", str(error)))
            except ArtifactMissing as error:
                if not absent:
                    raise ArtifactMissing(
                        f"{error}; the job resumes when its bytes are back, or: rookery jobs rollback JOB"
                    ) from None
                lines.append(await self.rollback("missing", str(error)))

    async def rollback(self, fault: str, reason: str) -> str:
        """Mark the head, which has this ``fault``, as lost for ``reason``; the newest kept version before it becomes
        the head in the database. Returns a line for the user. Raises :class:`ArtifactMissing` when there is none."""
        services, row = self._services, self.row
        assert self.head is not None
        bad = self.head.version
        try:
            head = await services.store.write(version_rows.rollback, row.id, bad, reason, services.clock.time())
        except Conflict as none_left:
            raise ArtifactMissing(
                f"version {bad} of {row.name} is {fault} ({reason}), and {none_left}; the job resumes when a backup of"
                " it is restored to the artifacts"
            ) from None
        line = f"version {bad} of {row.name} is {fault} ({reason}); went back to version {head.version}"
        log.error(line, extra={"tenant": row.tenant, "job": row.job, "version": bad})
        return line

    def ref(self, version: int) -> protocol.AdapterRef:
        """The reference to ``version`` that workers get. Raises :class:`NotFound` if its bytes are gone."""
        row = self._versions.get(version)
        if row is None or not row.kept:
            raise NotFound(f"version {version} of policy {self.row.name} is not kept any more")
        return adapter_ref(self.row, row)

    def in_use(self) -> list[protocol.AdapterRef]:
        """References to the head, to the versions that followers use and to those that requests still use, oldest
        first."""
        named = self._used | self._followed()
        if self.head is not None:
            named.add(self.head.version)
        return [self.ref(version) for version in sorted(named) if self._versions[version].kept]

    @property
    def _used(self) -> set[int]:
        """The versions with an open context of :meth:`using`."""
        return {version for version, users in self._users.items() if users}

    def step_of(self, version: int) -> int:
        """Optimizer steps behind ``version``."""
        return self._versions[version].step

    def followed(self, every: int) -> VersionRow | None:
        """The version of a follower that takes the newest one each ``every`` optimizer steps: of the versions that are
        kept, the first since a multiple of ``every`` steps was reached. A function of what is committed: it is the same
        after any restart."""
        line = ((row.version, row.step, row.kept and row.version not in self._unfit) for row in self._ancestors())
        version = followed_version(line, every)
        return None if version is None else self._versions[version]

    def _followed(self) -> set[int]:
        rows = [self.followed(every) for every in self._retention.followers]
        return {row.version for row in rows if row is not None}

    @property
    def reference(self) -> protocol.AdapterRef | None:
        """The version that training compares with; None: the base model, or training is over."""
        version = self._retention.reference
        return self.ref(version) if version is not None else None

    def release_reference(self) -> None:
        """Training is over; policies that follow this one may continue."""
        self._retention = replace(self._retention, reference=None)

    def release(self) -> None:
        """All training is over: the checkpoints are kept, and nothing more."""
        self._retention = Retention(checkpoints=self._retention.checkpoints, inflight=self._retention.inflight)

    @property
    def _held(self) -> set[int]:
        """The versions that are kept besides the checkpoints."""
        retention = self._retention
        named = {retention.inflight, retention.reference, 0 if retention.keeps_first else None}
        return {version for version in named if version is not None} | self._followed()

    @property
    def grows(self) -> bool:
        """Whether retention keeps one version more after the next commit."""
        held = self._held
        kept = sum(row.kept for row in self._versions.values() if row.version not in held)
        checkpoints = self._retention.checkpoints
        return checkpoints is not None and kept < checkpoints.keep_last

    @property
    def history(self) -> list[VersionRow]:
        """Every version of a job, oldest first."""
        return list(self._versions.values())

    @property
    def lineage(self) -> list[VersionRow]:
        """The head and its ancestors, oldest first; versions lost in a rollback are left out."""
        return [*self._ancestors()][::-1]

    def _ancestors(self) -> Iterator[VersionRow]:
        """The head and its ancestors, newest first."""
        version = self.head
        while version is not None:
            yield version
            version = None if version.parent is None else self._versions[version.parent]

    def lost(self) -> set[int]:
        """Versions that the head does not descend from: the policy was rolled back over them."""
        return {row.version for row in self.history} - {row.version for row in self.lineage}

    def version(self, version: int) -> VersionRow | None:
        return self._versions.get(version)

    @contextmanager
    def using(self, version: int) -> Iterator[protocol.AdapterRef]:
        """Within, retention keeps ``version``."""
        self._users[version] += 1
        try:
            yield self.ref(version)
        finally:
            self._users[version] -= 1

    async def commit(
        self, write: CommitVersion, lease: int, manifest: protocol.Manifest, step: int
    ) -> protocol.AdapterRef:
        """Commit the next version in the transaction that ``write`` runs; then it is the head."""
        clock, parent = self._services.clock, self.head.version if self.head is not None else None
        row = await write(
            version_rows.NextVersion(
                policy=self.row.id, lease=lease, parent=parent, manifest=manifest, step=step, time=clock.time()
            )
        )
        self._versions[row.version] = self.head = row
        now, text = clock.time(), f"version {row.version} of {self.row.name}"
        owner = (self.row.tenant, self.row.job or "", self.row.id)
        self._spans.add(TraceSpan("commit", now, now, "", *owner, text))
        return self.ref(row.version)

    async def publish_inflight(self, run: str) -> None:
        """Make the head the version that the in-flight samplers of the training run ``run`` use."""
        assert self.head is not None
        await self._services.store.write(sessions.publish_inflight, run, self.head.version)
        self._retention = replace(self._retention, inflight=self.head.version)
        await self.retire()

    def evaluated(self, version: int, rank: float | None) -> None:
        """``rank``: the score by which the version is compared with others; None for an evaluation without one."""
        row = self._versions[version]
        self._versions[version] = replace(row, evaluation=rank)

    async def retire(self) -> None:
        """Delete the versions that retention does not keep."""
        checkpoints = self._retention.checkpoints
        kept = [row for row in self._versions.values() if row.kept]
        scores = {row.version: row.evaluation for row in kept}
        if not any(score is not None for score in scores.values()):  # the two do not compare: they are of other prompts
            scores |= training_rewards((row.parent, row.reward) for row in self._versions.values())
        in_use = self._used | self._held
        going = versions_to_delete(
            {row.version: scores[row.version] for row in kept},
            keep_last=checkpoints.keep_last if checkpoints is not None else 1,
            keep_best=checkpoints is not None and checkpoints.keep_best,
            in_use=in_use,
        )
        for version in going:
            await self._collector.delete_unnamed(version_rows.retire_version, self.row.id, version)
            self._versions[version] = replace(self._versions[version], kept=False)
        if checkpoints is None:
            self._versions = {version: row for version, row in self._versions.items() if row.kept}
