"""Secrets of tenants: written once, used by the tenant's jobs, never shown."""

from __future__ import annotations

from sqlalchemy import Connection, delete, func, select

from rookery.errors import Conflict, NotFound
from rookery.storage.columns import Page, add, find, page_of
from rookery.storage.models import SecretRow

SECRETS_OF_TENANT = 100
"""Most secrets of a tenant."""


def set_secret(connection: Connection, tenant: str, name: str, value: str, created: float) -> None:
    """Replaces a secret of this name. Raises :class:`Conflict` where the tenant has as many as it may have."""
    connection.execute(delete(SecretRow).filter_by(tenant=tenant, name=name))
    count = select(func.count()).select_from(SecretRow).filter_by(tenant=tenant)
    if connection.execute(count).scalar_one() >= SECRETS_OF_TENANT:
        raise Conflict(f"there are {SECRETS_OF_TENANT} secrets, the most of a tenant: delete one")
    add(connection, SecretRow(tenant=tenant, name=name, value=value, created=created))


def secrets(connection: Connection, tenant: str, page: Page | None = None) -> list[SecretRow]:
    """The secrets of a tenant by name."""
    return page_of(connection, SecretRow, (SecretRow.name,), page, tenant=tenant)


def secret(connection: Connection, tenant: str, name: str) -> str:
    """The text. Raises :class:`NotFound`."""
    row = find(connection, SecretRow, tenant=tenant, name=name)
    if row is None:
        raise NotFound(f"no secret {name!r}; give it with rookery secrets set {name}")
    return row.value


def delete_secret(connection: Connection, tenant: str, name: str) -> None:
    """Raises :class:`NotFound`."""
    if connection.execute(delete(SecretRow).filter_by(tenant=tenant, name=name)).rowcount == 0:
        raise NotFound(f"no secret {name!r}; rookery secrets list shows yours")
