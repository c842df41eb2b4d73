"""Tenants, their API keys, uploads, events and usage.

* Only the hash of a key's text is stored.
* A hash of bytes gives no right to them: an upload belongs to each tenant that brought it.
* A tenant's usage row with an empty ``job`` (:data:`TENANT_TOTAL`) counts all that it used; its jobs' rows are parts of
  it. The counters of the fleet are one value of the table ``meta``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, func, insert, select, type_coerce, union, update

from rookery.errors import Conflict, NotFound
from rookery.storage.columns import Page, SafeText, add, add_new, find, get, page_of, rows
from rookery.storage.models import (
    CheckpointRow,
    EventRow,
    JobRow,
    KeyRole,
    KeyRow,
    MetaRow,
    ModelRow,
    OwnedRow,
    SamplerRow,
    SecretRow,
    SessionRow,
    SpanRow,
    TenantRow,
    UploadKind,
    UploadRow,
    UsageRow,
    VersionRow,
)
from rookery.storage.repositories.versions import unnamed

TENANT_TOTAL = ""
"""The job of the row that counts all that a tenant used."""

ROW_BYTES = 512
"""Counted for a row besides its texts."""

_FLEET, _TOKENS = "fleet", "tokens"
"""The names of the fleet's usage, and of a day's tokens by tenant, in the table ``meta``."""


def create_tenant(connection: Connection, id: str, name: str, created: float, admin: bool = False) -> TenantRow:
    """Raises :class:`Conflict` if the id or the name is taken."""
    _check_name(connection, name)
    row = TenantRow(id=id, name=name, created=created, admin=admin)
    if add_new(connection, row):
        raise Conflict(f"tenant {id} exists already")
    return row


def get_tenant(connection: Connection, id: str) -> TenantRow:
    """Raises :class:`NotFound`, also for a deleted one."""
    row = get(connection, TenantRow, f"tenant {id}", id=id)
    if row.deleted is not None:
        raise NotFound(f"tenant {id} is deleted")
    return row


def rename_tenant(connection: Connection, id: str, name: str) -> TenantRow:
    """Raises :class:`NotFound`, :class:`Conflict` if the name is taken."""
    if get_tenant(connection, id).name != name:
        _check_name(connection, name)
        connection.execute(update(TenantRow).where(TenantRow.id == id).values(name=name))
    return get_tenant(connection, id)


def delete_tenant(connection: Connection, id: str, time: float) -> None:
    """The tenant's keys are valid no more, its secrets are deleted, and its name is free. Its rows stay until
    they are deleted one by one. Raises :class:`NotFound`, :class:`Conflict` for the administrator's tenant."""
    if get_tenant(connection, id).admin:
        raise Conflict(f"tenant {id} is the administrator's, which cannot be deleted")
    connection.execute(update(TenantRow).where(TenantRow.id == id).values(deleted=time))
    connection.execute(update(KeyRow).where(KeyRow.tenant == id, KeyRow.revoked.is_(None)).values(revoked=time))
    for kind in (SpanRow, SecretRow):
        connection.execute(delete(kind).where(kind.tenant == id))


def half_deleted(connection: Connection) -> set[str]:
    """Deleted tenants of which jobs, uploads or checkpoints are left: a crash interrupted their deletion."""
    deleted = select(TenantRow.id).where(TenantRow.deleted.is_not(None))
    queries = [select(kind.tenant).where(kind.tenant.in_(deleted)) for kind in (JobRow, UploadRow, CheckpointRow)]
    return {tenant for query in queries for tenant in connection.execute(query.distinct()).scalars()}


def _check_name(connection: Connection, name: str) -> None:
    """Raises :class:`Conflict` where a live tenant has this name, or any this id: a name or an id names one tenant."""
    taken = ((TenantRow.name == name) & TenantRow.deleted.is_(None)) | (TenantRow.id == name)
    for id in connection.execute(select(TenantRow.id).where(taken)).scalars():
        raise Conflict(f"tenant {id} is called {name!r} already; give another name")


def limit_tenant(connection: Connection, id: str, changes: Mapping[str, float | None]) -> TenantRow:
    """Change limits of the tenant; None is the service's setting. Raises :class:`NotFound`."""
    merged = {**get_tenant(connection, id).limits, **changes}
    limits = {name: value for name, value in merged.items() if value is not None}
    connection.execute(update(TenantRow).where(TenantRow.id == id).values(limits=limits))
    return get_tenant(connection, id)


def stored(connection: Connection, tenant: str) -> tuple[int, int]:
    """The number of adapters that the tenant stores (kept versions, checkpoints, uploads), and the bytes of those and
    of its datasets; equal ones count once."""
    adapters = union(
        select(VersionRow.hash, VersionRow.size).filter_by(tenant=tenant, kept=True),
        select(CheckpointRow.hash, CheckpointRow.size).filter_by(tenant=tenant),
        select(UploadRow.hash, UploadRow.size).filter_by(tenant=tenant, kind="adapter"),
    ).subquery()
    count, size = connection.execute(
        select(func.count(adapters.c.hash), func.coalesce(func.sum(adapters.c.size), 0))
    ).one()
    datasets = select(func.coalesce(func.sum(UploadRow.size), 0)).filter_by(tenant=tenant, kind="dataset")
    return int(count), int(size) + int(connection.execute(datasets).scalar_one())


def metadata_bytes(connection: Connection, tenant: str) -> int:
    """The bytes of the tenant's rows that a client describes: jobs, uploads, sessions, models, samplers,
    checkpoints."""
    texts: dict[type[OwnedRow | UploadRow], Any] = {
        JobRow: JobRow.spec,
        UploadRow: UploadRow.name,
        SessionRow: SessionRow.about,
        ModelRow: ModelRow.about,
        SamplerRow: None,
        CheckpointRow: CheckpointRow.about,
    }
    total = 0
    for kind, text in texts.items():
        length = func.coalesce(func.sum(func.length(text)), 0) if text is not None else 0
        total += connection.execute(select(func.count() * ROW_BYTES + length).where(kind.tenant == tenant)).scalar_one()
    return int(total)


def database_bytes(connection: Connection, tenant: str) -> int:
    """The bytes of the rows that the tenant's work made: groups, episodes, steps, evaluations, events, and the calls of
    its clients with their results."""
    return connection.execute(select(TenantRow.stored).filter_by(id=tenant)).scalar() or 0


def list_tenants(connection: Connection, deleted: bool = False, page: Page | None = None) -> list[TenantRow]:
    """Oldest first, with or without those that were deleted."""
    which = [] if deleted else [TenantRow.deleted.is_(None)]
    return page_of(connection, TenantRow, (TenantRow.created, TenantRow.id), page, *which)


def tenants_of(connection: Connection, ids: Sequence[str]) -> dict[str, TenantRow]:
    """These tenants by id, also those that were deleted."""
    return {row.id: row for row in rows(connection, TenantRow, TenantRow.id.in_(ids))}


def add_key(
    connection: Connection,
    key_hash: str,
    tenant: str,
    label: str,
    created: float,
    role: KeyRole = "tenant",
    expires: float | None = None,
) -> KeyRow:
    """Raises :class:`Conflict` if any tenant has the key already, or there is no such tenant."""
    row = KeyRow(hash=key_hash, tenant=tenant, label=label, created=created, role=role, expires=expires)
    if add_new(connection, row):
        raise Conflict(f"the key exists already, or there is no tenant {tenant}")
    return row


def keys(connection: Connection, tenant: str, page: Page | None = None) -> list[KeyRow]:
    """Oldest first."""
    return page_of(connection, KeyRow, (KeyRow.created, KeyRow.hash), page, tenant=tenant)


def revoke_key(connection: Connection, tenant: str, key_hash: str, time: float) -> None:
    """The key is not valid any more. Raises :class:`NotFound` if the tenant has no such valid key."""
    valid = (KeyRow.hash == key_hash) & (KeyRow.tenant == tenant) & KeyRow.revoked.is_(None)
    if connection.execute(update(KeyRow).where(valid).values(revoked=time)).rowcount == 0:
        raise NotFound("no such key")


def find_key(connection: Connection, key_hash: str) -> KeyRow | None:
    """A key, valid or not; None for an unknown one."""
    return find(connection, KeyRow, hash=key_hash)


def valid_key(connection: Connection, key_hash: str, now: float) -> KeyRow | None:
    """None for an unknown, revoked or expired key."""
    row = find(connection, KeyRow, hash=key_hash)
    return row if row is not None and row.revoked is None and (row.expires is None or now < row.expires) else None


def worker_keys(connection: Connection) -> list[str]:
    """The hashes of the keys with the role worker that are not revoked."""
    return list(connection.execute(select(KeyRow.hash).filter_by(role="worker", revoked=None)).scalars())


def add_upload(
    connection: Connection, tenant: str, kind: UploadKind, hash: str, size: int, created: float, name: str = ""
) -> None:
    """Record that the tenant brought these bytes; a second time changes at most their name."""
    same = {"hash": hash, "tenant": tenant, "kind": kind}
    if connection.execute(select(UploadRow.hash).filter_by(**same)).one_or_none() is None:
        add(connection, UploadRow(hash=hash, tenant=tenant, kind=kind, size=size, created=created, name=name))
    elif name:
        connection.execute(update(UploadRow).filter_by(**same).values(name=name))


def get_upload(connection: Connection, tenant: str, kind: UploadKind, hash: str) -> UploadRow:
    """Raises :class:`NotFound` unless this tenant brought the bytes."""
    return get(connection, UploadRow, f"{kind} {hash}", hash=hash, tenant=tenant, kind=kind)


UPLOAD_ORDER = (UploadRow.created, UploadRow.hash, UploadRow.kind)


def uploads(connection: Connection, tenant: str, page: Page | None = None) -> list[UploadRow]:
    """Oldest first."""
    return page_of(connection, UploadRow, UPLOAD_ORDER, page, tenant=tenant)


def datasets(connection: Connection, tenant: str, page: Page, *, descending: bool) -> list[UploadRow]:
    """Oldest first, or newest first."""
    return page_of(connection, UploadRow, UPLOAD_ORDER, page, descending=descending, tenant=tenant, kind="dataset")


def delete_upload(connection: Connection, tenant: str, hash: str) -> str | None:
    """The tenant does not have these bytes any more. Returns the hash if nothing names it now, so that the artifact can
    be deleted. Raises :class:`Conflict` where a job that has not ended names it, :class:`NotFound`."""
    if not rows(connection, UploadRow, tenant=tenant, hash=hash):
        raise NotFound(f"no upload {hash}; rookery uploads list shows yours")
    spec = type_coerce(JobRow.spec, SafeText())  # the database looks through the texts: they may be many megabytes
    using = select(JobRow.id).where(JobRow.tenant == tenant, JobRow.finished.is_(None), spec.contains(hash))
    if (user := connection.execute(using.limit(1)).scalar()) is not None:
        raise Conflict(f"upload {hash} is used by job {user}: cancel that first (rookery jobs cancel {user})")
    connection.execute(delete(UploadRow).filter_by(tenant=tenant, hash=hash))
    return unnamed(connection, hash)


def add_event(connection: Connection, tenant: str, job: str | None, time: float, kind: str, text: str) -> None:
    """Append a line to the log of a job, or of the tenant."""
    connection.execute(insert(EventRow), {"tenant": tenant, "job": job, "time": time, "kind": kind, "text": text})


def events(
    connection: Connection, tenant: str, job: str | None, limit: int, before: int | None = None
) -> list[EventRow]:
    """The newest ``limit`` events of one job, or of the whole tenant, older than the event ``before``; oldest first."""
    key = {"tenant": tenant} | ({} if job is None else {"job": job})
    page = Page(limit, () if before is None else (before,))
    return page_of(connection, EventRow, (EventRow.id,), page, descending=True, **key)[::-1]


def latest_events(connection: Connection, tenant: str, job: str, page: Page) -> list[EventRow]:
    """A page of the events of a job in the order of their times and numbers, the latest first."""
    order = (EventRow.time, EventRow.id)
    return page_of(connection, EventRow, order, page, descending=True, tenant=tenant, job=job)


def save_usage(
    connection: Connection, usage: Mapping[tuple[str, str], Any], fleet: Any, tokens: tuple[int, Mapping[str, int]]
) -> None:
    """Replace the counters of each (tenant, job), the fleet's, and the day's tokens by tenant. Those of a job that was
    deleted are not stored."""
    for (tenant, job), used in usage.items():
        connection.execute(delete(UsageRow).filter_by(tenant=tenant, job=job))
        if job == TENANT_TOTAL or find(connection, JobRow, id=job) is not None:
            add(connection, UsageRow(tenant=tenant, job=job, used=used))
    connection.execute(delete(MetaRow).where(MetaRow.name.in_([_FLEET, _TOKENS])))
    add(connection, MetaRow(name=_FLEET, value=json.dumps(fleet)), MetaRow(name=_TOKENS, value=json.dumps(tokens)))


def job_usage(connection: Connection, tenant: str, job: str) -> Any:
    """Empty where nothing was counted yet."""
    row = find(connection, UsageRow, tenant=tenant, job=job)
    return {} if row is None else row.used


def usage_totals(connection: Connection) -> dict[str, Any]:
    """The total of every tenant."""
    return {row.tenant: row.used for row in rows(connection, UsageRow, job=TENANT_TOTAL)}


def fleet_usage(connection: Connection) -> Any:
    """Empty where nothing was counted yet."""
    row = find(connection, MetaRow, name=_FLEET)
    return {} if row is None else json.loads(row.value)


def tokens_of_day(connection: Connection) -> tuple[int, dict[str, int]]:
    """The last day of which tokens were stored, in days since the epoch, and its tokens by tenant."""
    row = find(connection, MetaRow, name=_TOKENS)
    day, tokens = (0, {}) if row is None else json.loads(row.value)
    return day, tokens
