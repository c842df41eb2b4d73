"""Versions of policies and the commit that makes them.

* :meth:`Versions.commit_step` is one transaction: version, hashes, consumed groups, step, counters and random state
  become visible together or not at all. It is refused unless the committer holds the policy's lease, started from its
  head, and every group it trained on is ready: so a policy's versions are a chain, and no group is in two of them.
* Numbers of versions have no gaps and are never used again, also when a head's bytes turn out to be corrupt.
* A row is never removed or rewritten; ``kept`` says whether the bytes must still be there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import asdict
from sqlalchemy import Connection, Row, delete, func, insert, select, update

from rookery.errors import Conflict, NotFound
from rookery.protocol import Manifest
from rookery.storage import models
from rookery.storage.db import Store
from rookery.storage.rows import EvaluationRow, PolicyRow, VersionRow

_versions, _policies, _jobs, _groups = models.versions, models.policies, models.jobs, models.groups


class Versions(Store):
    def commit_step(
        self,
        *,
        job: str,
        policy: str,
        lease: int,
        parent: int | None,
        manifest: Manifest,
        groups: Sequence[str],
        step: int,
        counters: Mapping[str, Any],
        rng: Mapping[str, Any],
        metrics: Mapping[str, Any],
        time: float,
    ) -> VersionRow:
        """The next version of the policy, committed. ``parent`` None makes version 0.

        ``groups``: ids of what it was trained on; ``step``: optimizer steps of the job with it. The artifact must be
        durable before. Raises :class:`Conflict`, and changes nothing, if the job is finished or not the policy's, the
        lease is not the newest, the head is not ``parent``, or a group is not ready.
        """
        with self._writing() as connection:
            alive = (_jobs.c.id == job) & _jobs.c.finished.is_(None)
            state = {"step": step, "counters": dict(counters), "rng": dict(rng)}
            if connection.execute(update(_jobs).where(alive).values(state)).rowcount == 0:
                raise Conflict(f"job {job} is finished or does not exist")
            row = add_version(
                connection, job=job, policy=policy, lease=lease, parent=parent, manifest=manifest, step=step,
                metrics=metrics, time=time,
            )  # fmt: skip
            _consume(connection, job, groups, row.version)
        return row

    def versions(self, tenant: str, policy: str) -> list[VersionRow]:
        """Oldest first; empty for a policy that is not this tenant's."""
        query = select(_versions).filter_by(policy=policy, tenant=tenant).order_by(_versions.c.version)
        with self._reading() as connection:
            return [VersionRow(**row._mapping) for row in connection.execute(query)]

    def version(self, tenant: str, policy: str, version: int) -> VersionRow:
        """Raises :class:`NotFound` if this tenant has no such policy, or the policy no such version."""
        query = select(_versions).filter_by(policy=policy, tenant=tenant, version=version)
        with self._reading() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            raise NotFound(f"no version {version} of policy {policy}")
        return VersionRow(**row._mapping)

    def retire_version(self, policy: str, version: int) -> str | None:
        """Its bytes need not be kept any more. Answers its hash if now nothing names it, so that the artifact can be
        deleted. Raises :class:`Conflict` for a head, :class:`NotFound` for what is not there."""
        with self._writing() as connection:
            row = _version_row(connection, policy, version)
            head = connection.execute(select(_policies.c.head_version).where(_policies.c.id == policy)).scalar()
            if head == version:
                raise Conflict(f"version {version} of policy {policy} is its head")
            connection.execute(update(_versions).filter_by(policy=policy, version=version).values(kept=False))
            return None if is_live(connection, row.hash) else str(row.hash)

    def unnamed(self, digest: str) -> str | None:
        """The hash itself if nothing names it."""
        with self._reading() as connection:
            return None if is_live(connection, digest) else digest

    def rollback(self, policy: str, version: int, why: str) -> VersionRow:
        """The head's bytes are corrupt: the newest kept version before it becomes the head again, and the job's step
        goes back with it. What the lost version consumed stays consumed. Answers the new head. Raises
        :class:`Conflict` if ``version`` is not the head, or nothing before it is kept."""
        with self._writing() as connection:
            lost = _version_row(connection, policy, version)
            owner = connection.execute(select(_policies).where(_policies.c.id == policy).with_for_update()).one()
            if owner.head_version != version:
                raise Conflict(f"version {version} of policy {policy} is not its head")
            ancestor = lost
            while not ancestor.kept or ancestor.version == version:
                if ancestor.parent is None:
                    raise Conflict(f"policy {policy} has no version before {version} that is kept")
                ancestor = _version_row(connection, policy, ancestor.parent)
            dead = {"kept": False, "lost": why}
            connection.execute(update(_versions).filter_by(policy=policy, version=version).values(dead))
            connection.execute(update(_policies).filter_by(id=policy).values(head_version=ancestor.version))
            connection.execute(update(_jobs).filter_by(id=owner.job).values(step=ancestor.step))
        return VersionRow(**ancestor._mapping)

    def names(self, policy: str, digest: str) -> bool:
        """Whether anything names the artifact. A commit to ``policy`` of which nobody heard the outcome is over by
        then: it holds the policy's row, which this waits for."""
        with self._writing() as connection:
            connection.execute(select(_policies.c.id).where(_policies.c.id == policy).with_for_update())
            return is_live(connection, digest)

    def live_hashes(self) -> set[str]:
        """Hashes of every artifact that must be kept: of versions, named checkpoints, samplers and uploads. All others
        are leftovers of a crash between writing an artifact and committing it."""
        with self._reading() as connection:
            return _live_hashes(connection)

    def add_evaluation(
        self,
        *,
        policy: str,
        version: int,
        prompts: int,
        mean: float,
        stderr: float,
        results: Mapping[str, Any],
        created: float,
    ) -> EvaluationRow:
        """Stores a version's held-out figures (those of a repeated evaluation replace them), also as the version's
        ``evaluation``. Raises :class:`NotFound`."""
        table = models.evaluations
        with self._writing() as connection:
            _version_row(connection, policy, version)
            owner = connection.execute(select(_policies).where(_policies.c.id == policy)).one()
            row = EvaluationRow(
                policy=policy,
                version=version,
                tenant=owner.tenant,
                job=owner.job,
                prompts=prompts,
                mean=mean,
                stderr=stderr,
                results=dict(results),
                created=created,
            )
            connection.execute(delete(table).filter_by(policy=policy, version=version))
            connection.execute(insert(table).values(asdict(row)))
            connection.execute(update(_versions).filter_by(policy=policy, version=version).values(evaluation=mean))
        return row

    def evaluations(self, tenant: str, job: str) -> list[EvaluationRow]:
        """By policy and version; empty for a job that is not this tenant's."""
        table = models.evaluations
        query = select(table).filter_by(tenant=tenant, job=job).order_by(table.c.policy, table.c.version)
        with self._reading() as connection:
            return [EvaluationRow(**row._mapping) for row in connection.execute(query)]


def add_version(
    connection: Connection,
    *,
    job: str | None,
    policy: str,
    lease: int,
    parent: int | None,
    manifest: Manifest,
    step: int,
    metrics: Mapping[str, Any],
    time: float,
) -> VersionRow:
    """The next version of ``policy``, now its head. Raises :class:`Conflict` unless lease and parent are the newest."""
    owner = _check_head(connection, job, policy, lease, parent)
    version = _next_number(connection, policy)
    connection.execute(update(_policies).where(_policies.c.id == policy).values(head_version=version))
    row = VersionRow(
        policy=policy,
        version=version,
        tenant=owner.tenant,
        parent=parent,
        manifest=manifest,
        hash=manifest.hash,
        step=step,
        created=time,
        metrics=dict(metrics),
        kept=True,
        lost="",
        evaluation=None,
    )
    connection.execute(insert(_versions).values(asdict(row)))
    return row


def _check_head(connection: Connection, job: str | None, policy: str, lease: int, parent: int | None) -> PolicyRow:
    found = connection.execute(select(_policies).filter_by(id=policy, job=job).with_for_update()).one_or_none()
    if found is None:
        raise Conflict(f"job {job} has no policy {policy}")
    owner = PolicyRow(**found._mapping)
    if owner.lease != lease:
        raise Conflict(f"policy {policy} is leased as {owner.lease}, not {lease}: another trainer took over")
    if owner.head_version != parent:
        raise Conflict(f"policy {policy} is at version {owner.head_version}, not {parent}: the step is stale")
    return owner


def _next_number(connection: Connection, policy: str) -> int:
    last = connection.execute(select(func.max(_versions.c.version)).where(_versions.c.policy == policy)).scalar()
    return 0 if last is None else int(last) + 1


def _consume(connection: Connection, job: str, groups: Sequence[str], version: int) -> None:
    ready = _groups.c.id.in_(groups) & (_groups.c.job == job) & (_groups.c.state == "ready")
    values = {"state": "consumed", "consumed_by": version}
    consumed = connection.execute(update(_groups).where(ready).values(values)).rowcount
    if consumed != len(groups):
        raise Conflict(f"{len(groups) - consumed} of {len(groups)} groups are not ready, or named twice")


def _version_row(connection: Connection, policy: str, version: int) -> Row[Any]:
    row = connection.execute(select(_versions).filter_by(policy=policy, version=version)).one_or_none()
    if row is None:
        raise NotFound(f"no version {version} of policy {policy}")
    return row


_NAMING = (
    select(_versions.c.hash).where(_versions.c.kept.is_(True)),
    select(models.uploads.c.hash),
    select(models.checkpoints.c.hash),
    select(models.samplers.c.hash).where(models.samplers.c.kept.is_(True)),
)
"""What names an artifact that must be kept."""


def is_live(connection: Connection, digest: str) -> bool:
    """Whether anything names the artifact."""
    return any(
        connection.execute(query.where(query.selected_columns.hash == digest).limit(1)).one_or_none() is not None
        for query in _NAMING
    )


def _live_hashes(connection: Connection) -> set[str]:
    return {digest for query in _NAMING for digest in connection.execute(query).scalars()}
