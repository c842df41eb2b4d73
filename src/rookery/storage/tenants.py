"""Tenants, their keys, what they uploaded, what happened to their things."""

from __future__ import annotations

from msgspec.structs import asdict
from sqlalchemy import insert, select, update
from sqlalchemy.exc import IntegrityError

from rookery.errors import Conflict, NotFound
from rookery.storage import models
from rookery.storage.db import Store
from rookery.storage.rows import EventRow, KeyRow, TenantRow, UploadKind, UploadRow


class Tenants(Store):
    """A key's text is never here, only its hash. A hash of bytes gives no right to them: an upload belongs to the
    tenants that brought it, each with a row of its own."""

    def create_tenant(self, id: str, name: str, created: float, admin: bool = False) -> TenantRow:
        """Raises :class:`Conflict` if the id is taken."""
        row = TenantRow(id=id, name=name, created=created, admin=admin)
        try:
            with self._writing() as connection:
                connection.execute(insert(models.tenants).values(asdict(row)))
        except IntegrityError:
            raise Conflict(f"tenant {id} exists already") from None
        return row

    def get_tenant(self, id: str) -> TenantRow:
        with self._reading() as connection:
            row = connection.execute(select(models.tenants).where(models.tenants.c.id == id)).one_or_none()
        if row is None:
            raise NotFound(f"no tenant {id}")
        return TenantRow(**row._mapping)

    def list_tenants(self) -> list[TenantRow]:
        """Oldest first."""
        table = models.tenants
        with self._reading() as connection:
            rows = connection.execute(select(table).order_by(table.c.created, table.c.id)).all()
        return [TenantRow(**row._mapping) for row in rows]

    def add_key(self, key_hash: str, tenant: str, label: str, created: float) -> None:
        """Raises :class:`Conflict` if the key exists, whoever has it, or the tenant does not."""
        try:
            with self._writing() as connection:
                connection.execute(
                    insert(models.keys).values(hash=key_hash, tenant=tenant, label=label, created=created, revoked=None)
                )
        except IntegrityError:
            raise Conflict(f"the key exists already, or there is no tenant {tenant}") from None

    def keys(self, tenant: str) -> list[KeyRow]:
        table = models.keys
        with self._reading() as connection:
            rows = connection.execute(select(table).where(table.c.tenant == tenant).order_by(table.c.created)).all()
        return [KeyRow(**row._mapping) for row in rows]

    def revoke_key(self, tenant: str, key_hash: str, time: float) -> None:
        """From now on nobody's. Raises :class:`NotFound` if the tenant has no such valid key."""
        table = models.keys
        owned = (table.c.hash == key_hash) & (table.c.tenant == tenant) & table.c.revoked.is_(None)
        with self._writing() as connection:
            if connection.execute(update(table).where(owned).values(revoked=time)).rowcount == 0:
                raise NotFound("no such key")

    def tenant_of_key(self, key_hash: str) -> TenantRow | None:
        """Whose key this is; None for an unknown or revoked one."""
        keys, tenants = models.keys, models.tenants
        query = select(tenants).join(keys, keys.c.tenant == tenants.c.id)
        with self._reading() as connection:
            row = connection.execute(query.where(keys.c.hash == key_hash, keys.c.revoked.is_(None))).one_or_none()
        return None if row is None else TenantRow(**row._mapping)

    def add_upload(self, tenant: str, kind: UploadKind, hash: str, size: int, created: float) -> None:
        """Says that the tenant brought these bytes; once more changes nothing."""
        key = {"hash": hash, "tenant": tenant, "kind": kind}
        with self._writing() as connection:
            known = select(models.uploads.c.hash).filter_by(**key)
            if connection.execute(known).one_or_none() is None:
                connection.execute(insert(models.uploads).values(**key, size=size, created=created))

    def get_upload(self, tenant: str, kind: UploadKind, hash: str) -> UploadRow:
        """Raises :class:`NotFound` unless this tenant brought them."""
        query = select(models.uploads).filter_by(hash=hash, tenant=tenant, kind=kind)
        with self._reading() as connection:
            row = connection.execute(query).one_or_none()
        if row is None:
            raise NotFound(f"no {kind} {hash}")
        return UploadRow(**row._mapping)

    def add_event(self, tenant: str, job: str | None, time: float, kind: str, text: str) -> None:
        with self._writing() as connection:
            connection.execute(insert(models.events).values(tenant=tenant, job=job, time=time, kind=kind, text=text))

    def events(self, tenant: str, job: str | None, limit: int) -> list[EventRow]:
        """The newest ``limit`` events of one job, or of the whole tenant, oldest first."""
        table = models.events
        query = select(table).where(table.c.tenant == tenant).order_by(table.c.id.desc()).limit(limit)
        if job is not None:
            query = query.where(table.c.job == job)
        with self._reading() as connection:
            rows = connection.execute(query).all()
        return [EventRow(**row._mapping) for row in reversed(rows)]
