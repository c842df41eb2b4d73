"""Jobs and their policies.

* A job and its policies come into being in one transaction, once per (tenant, idempotency key).
* ``finished`` is set exactly when the state is final; a finished job changes its state no more, and has no open and no
  ready group: who sees that it has ended sees all of it as it stays.
* A policy's lease only grows. Whoever holds an older one can commit nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import asdict
from sqlalchemy import Connection, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from rookery.errors import Conflict, NotFound
from rookery.storage import models
from rookery.storage.db import Store
from rookery.storage.groups import drop_alive
from rookery.storage.rows import FINAL_JOB_STATES, JobRow, JobState, NewPolicy, PolicyRow


class Jobs(Store):
    def submit_job(
        self,
        *,
        id: str,
        tenant: str,
        name: str,
        spec: Mapping[str, Any],
        created: float,
        policies: Sequence[NewPolicy],
        idempotency_key: str | None = None,
        rng: Mapping[str, Any] | None = None,
    ) -> tuple[JobRow, bool]:
        """The job, in state ``queued``, and True; or, if the tenant used this idempotency key before, that job as it is
        now and False (whether it is the same job is for the caller to see: ``spec`` is in the row)."""
        row = JobRow(
            id=id,
            tenant=tenant,
            name=name,
            spec=dict(spec),
            idempotency_key=idempotency_key,
            state="queued",
            reason="",
            error="",
            created=created,
            started=None,
            finished=None,
            step=0,
            cursor=0,
            counters={},
            rng=dict(rng or {}),
        )
        table = models.jobs
        try:
            with self._writing() as connection:
                connection.execute(insert(table).values(asdict(row)))
                for policy in policies:
                    _insert_policy(connection, tenant, id, policy)
        except IntegrityError:
            if idempotency_key is None:
                raise
            with self._reading() as connection:
                earlier = connection.execute(
                    select(table).where(table.c.tenant == tenant, table.c.idempotency_key == idempotency_key)
                ).one_or_none()
            if earlier is None:
                raise
            return JobRow(**earlier._mapping), False
        return row, True

    def get_job(self, tenant: str, job: str) -> JobRow:
        """Raises :class:`NotFound` if this tenant has no such job."""
        with self._reading() as connection:
            row = connection.execute(select(models.jobs).filter_by(id=job, tenant=tenant)).one_or_none()
        if row is None:
            raise NotFound(f"no job {job}")
        return JobRow(**row._mapping)

    def list_jobs(self, tenant: str) -> list[JobRow]:
        """Newest first."""
        table = models.jobs
        with self._reading() as connection:
            rows = connection.execute(
                select(table).where(table.c.tenant == tenant).order_by(table.c.created.desc(), table.c.id)
            ).all()
        return [JobRow(**row._mapping) for row in rows]

    def all_unfinished_jobs(self) -> list[JobRow]:
        """Of every tenant, oldest first: what a starting controller takes up."""
        table = models.jobs
        with self._reading() as connection:
            rows = connection.execute(
                select(table).where(table.c.finished.is_(None)).order_by(table.c.created, table.c.id)
            ).all()
        return [JobRow(**row._mapping) for row in rows]

    def unfinished_job_ids(self) -> set[str]:
        """Of every tenant: whose episodes an environment host may still be asked for."""
        table = models.jobs
        with self._reading() as connection:
            return set(connection.execute(select(table.c.id).where(table.c.finished.is_(None))).scalars())

    def set_job_state(self, job: str, state: JobState, reason: str, time: float, error: str = "") -> JobRow:
        """The job afterwards; an event says so, too. ``started`` is set the first time it runs. Raises
        :class:`Conflict` if it is finished."""
        table = models.jobs
        values: dict[str, Any] = {"state": state, "reason": reason, "error": error}
        if state in FINAL_JOB_STATES:
            values["finished"] = time
        if state == "running":
            values["started"] = func.coalesce(table.c.started, time)
        with self._writing() as connection:
            changed = connection.execute(
                update(table).where(table.c.id == job, table.c.finished.is_(None)).values(values)
            )
            row = connection.execute(select(table).where(table.c.id == job)).one_or_none()
            if row is None:
                raise NotFound(f"no job {job}")
            if changed.rowcount == 0:
                raise Conflict(f"job {job} is {row.state} already")
            text = f"{state}: {reason}".rstrip(": ")
            event = {"tenant": row.tenant, "job": job, "time": time, "kind": "state", "text": text}
            connection.execute(insert(models.events).values(event))
            if state in FINAL_JOB_STATES:
                drop_alive(connection, models.groups.c.job == job, time, f"its job is {state}")
        return JobRow(**row._mapping)

    def save_counters(self, job: str, counters: Mapping[str, Any], rng: Mapping[str, Any]) -> None:
        """Between commits, for what is only shown, and for how long it has run; a commit writes its own."""
        table = models.jobs
        values = {"counters": dict(counters), "rng": dict(rng)}
        with self._writing() as connection:
            if connection.execute(update(table).where(table.c.id == job).values(values)).rowcount == 0:
                raise NotFound(f"no job {job}")

    def add_policy(self, tenant: str, job: str, policy: NewPolicy) -> PolicyRow:
        """Raises :class:`NotFound` for a job that is not this tenant's, :class:`Conflict` for a name it has already."""
        with self._writing() as connection:
            if connection.execute(select(models.jobs.c.id).filter_by(id=job, tenant=tenant)).one_or_none() is None:
                raise NotFound(f"no job {job}")
            try:
                return _insert_policy(connection, tenant, job, policy)
            except IntegrityError:
                raise Conflict(f"job {job} has a policy {policy.name} already") from None

    def policies(self, tenant: str, job: str) -> list[PolicyRow]:
        """By name; empty for a job that is not this tenant's."""
        table = models.policies
        with self._reading() as connection:
            rows = connection.execute(select(table).filter_by(job=job, tenant=tenant).order_by(table.c.name)).all()
        return [PolicyRow(**row._mapping) for row in rows]

    def all_policies(self, tenant: str) -> dict[str, list[PolicyRow]]:
        """Of all jobs of this tenant, by job, each job's by name."""
        table = models.policies
        query = select(table).where(table.c.tenant == tenant, table.c.job.is_not(None)).order_by(table.c.name)
        found: dict[str, list[PolicyRow]] = {}
        with self._reading() as connection:
            for row in connection.execute(query):
                found.setdefault(row.job, []).append(PolicyRow(**row._mapping))
        return found

    def get_policy(self, tenant: str, job: str | None, name: str) -> PolicyRow:
        """Raises :class:`NotFound` if this tenant has no such job, or the job no such policy."""
        with self._reading() as connection:
            row = connection.execute(select(models.policies).filter_by(job=job, tenant=tenant, name=name)).one_or_none()
        if row is None:
            raise NotFound(f"no policy {name} of job {job}")
        return PolicyRow(**row._mapping)

    def next_lease(self, policy: str) -> int:
        """A lease greater than all before; from now on only its holder can commit. Raises :class:`NotFound`."""
        table = models.policies
        with self._writing() as connection:
            connection.execute(update(table).where(table.c.id == policy).values(lease=table.c.lease + 1))
            lease = connection.execute(select(table.c.lease).where(table.c.id == policy)).scalar()
        if lease is None:
            raise NotFound(f"no policy {policy}")
        return int(lease)

    def fence(self) -> None:
        """Take every lease from whoever holds it: what an earlier process was still committing when it died is refused
        from now on, also where the server gets to it only later. A starting controller's first act: what it looks at
        after it does not change behind its back."""
        with self._writing() as connection:
            connection.execute(update(models.policies).values(lease=models.policies.c.lease + 1))


def _insert_policy(connection: Connection, tenant: str, job: str, policy: NewPolicy) -> PolicyRow:
    row = PolicyRow(
        id=policy.id,
        tenant=tenant,
        job=job,
        name=policy.name,
        rank=policy.rank,
        alpha=policy.alpha,
        targets=list(policy.targets),
        head_version=None,
        lease=0,
    )
    connection.execute(insert(models.policies).values(asdict(row)))
    return row
