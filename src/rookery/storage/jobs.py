"""Jobs and their policies.

* A job and its policies are created in one transaction, once per (tenant, idempotency key).
* ``finished`` is set exactly when the state is final. A finished job changes its state no more, and has no open and no
  ready group.
* A policy's lease only grows. The holder of an older one can commit nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, func, insert, select, update

from rookery.errors import Conflict, NotFound
from rookery.storage.columns import add, add_new, add_or_find, fetch_all, fetch_one, get
from rookery.storage.groups import drop_alive
from rookery.storage.models import FINAL_JOB_STATES, EventRow, GroupRow, JobRow, JobState, PolicyRow

_POLICIES = (
    select(PolicyRow)
    .where(PolicyRow.job == bindparam("job"), PolicyRow.tenant == bindparam("tenant"))
    .order_by(PolicyRow.name)
)


def submit_job(connection: Connection, row: JobRow, policies: Sequence[PolicyRow]) -> tuple[JobRow, bool]:
    """Store a new job and its policies; returns it and True. If the tenant used this idempotency key before, returns
    that job as it is now and False (the caller compares the specs)."""
    stored, created = add_or_find(connection, row, tenant=row.tenant, idempotency_key=row.idempotency_key)
    if created and policies:
        add(connection, *policies)
    return stored, created


def get_job(connection: Connection, tenant: str, job: str) -> JobRow:
    """Raises :class:`NotFound` if this tenant has no such job."""
    return get(connection, JobRow, f"job {job}", id=job, tenant=tenant)


def list_jobs(connection: Connection, tenant: str) -> list[JobRow]:
    """Newest first."""
    query = select(JobRow).filter_by(tenant=tenant).order_by(JobRow.created.desc(), JobRow.id)
    return fetch_all(connection, JobRow, query)


def all_unfinished_jobs(connection: Connection) -> list[JobRow]:
    """Of every tenant, oldest first: the jobs that a starting controller takes up."""
    query = select(JobRow).where(JobRow.finished.is_(None)).order_by(JobRow.created, JobRow.id)
    return fetch_all(connection, JobRow, query)


def unfinished_job_ids(connection: Connection) -> set[str]:
    """Of every tenant: the jobs whose episodes an environment host may still hold."""
    return set(connection.execute(select(JobRow.id).where(JobRow.finished.is_(None))).scalars())


def set_job_state(
    connection: Connection,
    job: str,
    state: JobState,
    reason: str,
    time: float,
    error: str = "",
    resumes: bool = False,
) -> JobRow:
    """Returns the job afterwards, and logs the change as an event. ``started`` is set the first time it runs. Raises
    :class:`Conflict` if it is finished, :class:`NotFound`."""
    values: dict[str, Any] = {"state": state, "reason": reason, "error": error, "resumes": resumes}
    if state != "running":
        values["starts"] = 0
    if state in FINAL_JOB_STATES:
        values["finished"] = time
    if state == "running":
        values["started"] = func.coalesce(JobRow.started, time)
    changed = connection.execute(update(JobRow).where(JobRow.id == job, JobRow.finished.is_(None)).values(values))
    row = get(connection, JobRow, f"job {job}", id=job)
    if changed.rowcount == 0:
        raise Conflict(f"job {job} is {row.state} already")
    text = f"{state}: {reason}".rstrip(": ")
    event = {"tenant": row.tenant, "job": job, "time": time, "kind": "state", "text": text}
    connection.execute(insert(EventRow), event)
    if state in FINAL_JOB_STATES:
        drop_alive(connection, GroupRow.job == job, time, f"its job is {state}")
    return row


def count_start(connection: Connection, job: str) -> None:
    """The job starts now."""
    connection.execute(update(JobRow).where(JobRow.id == job).values(starts=JobRow.starts + 1))


def clear_starts(connection: Connection, jobs: Sequence[str]) -> None:
    """These jobs are not starting any more."""
    connection.execute(update(JobRow).where(JobRow.id.in_(jobs)).values(starts=0))


def save_counters(connection: Connection, job: str, counters: Mapping[str, Any], rng: Mapping[str, Any]) -> None:
    """Store counters and running time between commits; a commit stores its own. Raises :class:`NotFound`."""
    values = {"counters": dict(counters), "rng": dict(rng)}
    if connection.execute(update(JobRow).where(JobRow.id == job).values(values)).rowcount == 0:
        raise NotFound(f"no job {job}")


def add_policy(connection: Connection, policy: PolicyRow) -> PolicyRow:
    """Add a policy to a job. Raises :class:`NotFound` for a job that is not the policy's tenant's, :class:`Conflict`
    for a name that the job has already."""
    owned = select(JobRow.id).filter_by(id=policy.job, tenant=policy.tenant)
    if connection.execute(owned).one_or_none() is None:
        raise NotFound(f"no job {policy.job}")
    if add_new(connection, policy):
        raise Conflict(f"job {policy.job} has a policy {policy.name} already")
    return policy


def policies(connection: Connection, tenant: str, job: str) -> list[PolicyRow]:
    """By name; empty for a job that is not this tenant's."""
    return fetch_all(connection, PolicyRow, _POLICIES, {"job": job, "tenant": tenant})


def all_policies(connection: Connection, tenant: str) -> dict[str, list[PolicyRow]]:
    """Of all jobs of this tenant, by job, each job's by name."""
    query = select(PolicyRow).where(PolicyRow.tenant == tenant, PolicyRow.job.is_not(None)).order_by(PolicyRow.name)
    found: dict[str, list[PolicyRow]] = {}
    for row in fetch_all(connection, PolicyRow, query):
        found.setdefault(str(row.job), []).append(row)
    return found


def get_policy(connection: Connection, tenant: str, job: str | None, name: str) -> PolicyRow:
    """Raises :class:`NotFound` if this tenant has no such job, or the job no such policy. ``job`` None: a client's."""
    row = fetch_one(connection, PolicyRow, select(PolicyRow).filter_by(job=job, tenant=tenant, name=name))
    if row is None:
        raise NotFound(f"no policy {name} of job {job}")
    return row


def next_lease(connection: Connection, policy: str) -> int:
    """A lease greater than all before; from now on only its holder can commit. Raises :class:`NotFound`."""
    connection.execute(update(PolicyRow).where(PolicyRow.id == policy).values(lease=PolicyRow.lease + 1))
    lease = connection.execute(select(PolicyRow.lease).where(PolicyRow.id == policy)).scalar()
    if lease is None:
        raise NotFound(f"no policy {policy}")
    return lease


def fence(connection: Connection) -> None:
    """Raise every lease, so that a commit of an earlier process is refused, even where the database server gets to it
    only after that process died. A starting controller does this before it reads anything."""
    connection.execute(update(PolicyRow).values(lease=PolicyRow.lease + 1))
