"""Pages of jobs, as the list of runs shows them: chosen, sorted and counted in the database."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sqlalchemy import ColumnElement, Connection, and_, func, literal, or_, select, tuple_

from rookery.errors import NotFound
from rookery.storage.columns import SafeText, fetch_all, find, rows
from rookery.storage.models import EventRow, JobRow, JobState, PolicyRow, StepRow, UsageRow

RunOrder = Literal["created", "name", "state", "step", "reward", "tenant"]


@dataclass(frozen=True)
class RunChoice:
    """Which jobs, in which order. ``tenant`` None: of all tenants, for the administrator."""

    tenant: str | None
    states: Sequence[JobState] = ()
    """Empty: any."""
    text: str = ""
    """Part of a job's name or id, in any case."""
    order: RunOrder = "created"
    descending: bool = True
    offset: int = 0
    limit: int = 100
    jobs: Sequence[str] = field(default=())
    """Ids; empty: any."""
    after: tuple[float, str] | None = None
    """By ``created``, ascending: only jobs behind this time and id."""


def chosen_jobs(connection: Connection, chosen: RunChoice) -> tuple[list[JobRow], int]:
    """The jobs of one page, and the number of all."""
    where: list[ColumnElement[bool]] = []
    if chosen.tenant is not None:
        where.append(JobRow.tenant == chosen.tenant)
    if chosen.states:
        where.append(JobRow.state.in_(chosen.states))
    if chosen.jobs:
        where.append(JobRow.id.in_(chosen.jobs))
    if chosen.text:
        lower = chosen.text.lower()
        columns = [func.lower(column, type_=SafeText()) for column in (JobRow.name, JobRow.id)]
        where.append(or_(*(column.contains(lower, autoescape=True) for column in columns)))
    first = _first_trained(connection, *where) if chosen.order == "reward" else {}
    newest = select(StepRow.reward).where(
        StepRow.job == JobRow.id, or_(JobRow.id.not_in(first), StepRow.policy.in_(["", *first.values()]))
    )
    reward = newest.order_by(StepRow.step.desc()).limit(1).scalar_subquery()
    key: Mapping[str, Any] = {
        "created": JobRow.created, "name": JobRow.name, "state": JobRow.state, "step": JobRow.step,
        "reward": func.coalesce(reward, -1e300), "tenant": JobRow.tenant,
    }  # fmt: skip
    by = key[chosen.order]
    query = select(JobRow).where(*where).order_by(by.desc() if chosen.descending else by, JobRow.id)
    total = connection.execute(select(func.count()).select_from(JobRow).where(*where)).scalar() or 0
    if chosen.after is not None:
        place = map(literal, chosen.after, (JobRow.created.type, JobRow.id.type))
        query = query.where(tuple_(JobRow.created, JobRow.id) > tuple_(*place))
    return fetch_all(connection, JobRow, query.offset(chosen.offset).limit(chosen.limit)), total


def any_job(connection: Connection, job: str) -> JobRow:
    """The job of this id, of any tenant: for the administrator. Raises :class:`NotFound`."""
    row = find(connection, JobRow, id=job)
    if row is None:
        raise NotFound(f"no job {job}")
    return row


def rewards_of(connection: Connection, jobs: Sequence[str], count: int) -> dict[str, list[float]]:
    """The rewards of the last ``count`` steps of each of these jobs, oldest first; of a job with several policies,
    those of the first one that trains."""
    first = _first_trained(connection, JobRow.id.in_(jobs))
    query = select(StepRow.job, StepRow.reward).join(JobRow, JobRow.id == StepRow.job)
    query = query.where(JobRow.id.in_([job for job in jobs if job not in first]), StepRow.step > JobRow.step - count)
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for job, reward in connection.execute(query.order_by(StepRow.job, StepRow.step)):
        if reward is not None:
            rewards[job].append(reward)
    for job, policy in first.items():
        newest = select(StepRow.reward).where(StepRow.job == job, StepRow.policy.in_(("", policy)))
        last = [*connection.scalars(newest.order_by(StepRow.step.desc()).limit(count))]
        rewards[job] = [reward for reward in reversed(last) if reward is not None]
    return {job: values for job, values in rewards.items() if values}


def _first_trained(connection: Connection, *where: ColumnElement[bool]) -> dict[str, str]:
    """By job, of the chosen jobs with several policies, the id of the first policy that trains."""
    chosen = PolicyRow.job.in_(select(JobRow.id).where(*where))
    several = select(PolicyRow.job).where(chosen).group_by(PolicyRow.job).having(func.count() > 1)
    specs = connection.execute(select(JobRow.id, JobRow.spec).where(JobRow.id.in_(several)))
    first = [
        (job, next(name for name, about in spec["policies"].items() if about.get("train", True))) for job, spec in specs
    ]
    named = tuple_(PolicyRow.job, PolicyRow.name).in_(first)
    found = connection.execute(select(PolicyRow.job, PolicyRow.id).where(named))
    return {job: policy for job, policy in found if job is not None}


def usage_of(connection: Connection, jobs: Sequence[str]) -> dict[str, Any]:
    """The counters of these jobs."""
    return {row.job: row.used for row in rows(connection, UsageRow, UsageRow.job.in_(jobs))}


def state_times(connection: Connection, tenant: str | None, jobs: Sequence[str] | None = None) -> dict[str, float]:
    """When each job came into its present state, of a tenant's jobs, or of these ``jobs``; a new job is not there."""
    where = [EventRow.kind == "state", EventRow.job.is_not(None)]
    if tenant is not None:
        where.append(EventRow.tenant == tenant)
    if jobs is not None:
        where.append(EventRow.job.in_(jobs))
    query = select(EventRow.job, func.max(EventRow.time)).where(and_(*where)).group_by(EventRow.job)
    return {str(job): time for job, time in connection.execute(query)}
