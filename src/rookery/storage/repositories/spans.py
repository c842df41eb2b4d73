"""Stored spans: one row for an hour of a job, of a client's session, of a tenant's other work, or of the workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, case, delete, func, select, tuple_

from rookery.storage.columns import add, fetch_all
from rookery.storage.models import JobRow, SessionRow, SpanRow, TenantRow

NEWEST_ROWS = 5000
"""Of which a picture is chosen: an hour of as many jobs."""


@dataclass(frozen=True)
class SpanHour:
    """The name of a row, when its first span began, and the number of its spans."""

    tenant: str
    job: str
    hour: int
    begins: float
    count: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.tenant, self.job, self.hour


_KEY = tuple_(SpanRow.tenant, SpanRow.job, SpanRow.hour)


def span_rows(connection: Connection, keys: Sequence[tuple[str, str, int]]) -> list[SpanRow]:
    """The rows of these names ``(tenant, job, hour)`` that there are."""
    return fetch_all(connection, SpanRow, select(SpanRow).where(_KEY.in_(keys))) if keys else []


def save_spans(connection: Connection, rows: Sequence[SpanRow], most_bytes: int) -> None:
    """Store rows in place of those of the same name. Those of a job, a session or a tenant that was deleted meanwhile
    are left out; where a tenant has more than ``most_bytes``, its oldest hours are deleted."""
    alive = _alive(connection, rows)
    if not alive:
        return
    connection.execute(delete(SpanRow).where(_KEY.in_([(row.tenant, row.job, row.hour) for row in alive])))
    add(connection, *alive)
    for tenant in {row.tenant for row in alive}:
        size = func.length(SpanRow.spans)
        stored = select(func.coalesce(func.sum(size), 0)).where(SpanRow.tenant == tenant)
        if connection.execute(stored).scalar_one() <= most_bytes:
            continue
        newest = select(SpanRow.job, SpanRow.hour, size).where(SpanRow.tenant == tenant)
        total, over = 0, list[tuple[str, str, int]]()
        for job, hour, length in connection.execute(newest.order_by(SpanRow.hour.desc(), SpanRow.job)):
            total += length
            if total > most_bytes:
                over.append((tenant, job, hour))
        connection.execute(delete(SpanRow).where(_KEY.in_(over)))


def _alive(connection: Connection, rows: Sequence[SpanRow]) -> list[SpanRow]:
    tenants, jobs = {row.tenant for row in rows}, {row.job for row in rows}
    living = select(TenantRow.id).where(TenantRow.id.in_(tenants), TenantRow.deleted.is_(None))
    owners = {"", *connection.execute(living).scalars()}
    known = {""}
    for kind in (JobRow, SessionRow):
        known.update(connection.execute(select(kind.id).where(kind.id.in_(jobs))).scalars())
    return [row for row in rows if row.tenant in owners and row.job in known]


def hours_between(
    connection: Connection, start: float, end: float, first: str = "", tenant: str | None = None
) -> list[SpanHour]:
    """The newest hours with spans between two times: of the job ``first``, then of ``tenant``, then of others."""
    query = select(SpanRow.tenant, SpanRow.job, SpanRow.hour, SpanRow.begins, SpanRow.count)
    query = query.where(SpanRow.begins <= end, SpanRow.hour >= int(start // 3600))
    order = [case((SpanRow.job == first, 0), else_=1)] if first else []
    order += [case((SpanRow.tenant == tenant, 0), else_=1)] if tenant is not None else []
    query = query.order_by(*order, SpanRow.hour.desc(), SpanRow.tenant, SpanRow.job).limit(NEWEST_ROWS)
    return [SpanHour(*row) for row in connection.execute(query)]


def oldest_span(connection: Connection, tenant: str | None, jobs: Sequence[str] = ()) -> float | None:
    """When the first span that is stored began: of ``jobs``, of a tenant, or of all tenants' work."""
    query = select(func.min(SpanRow.begins))
    if jobs:
        query = query.where(SpanRow.job.in_(jobs))
    elif tenant is not None:
        query = query.where(SpanRow.tenant == tenant)
    else:
        query = query.where(SpanRow.tenant != "")
    return connection.execute(query).scalar()
