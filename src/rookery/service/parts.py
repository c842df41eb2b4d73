"""What the routes work with: the service's parts, and whose request it is. Each is a dependency of a route, and a
coroutine: FastAPI runs a plain function in a thread of its own for every request."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated

from fastapi import Depends
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import HTTPConnection

from rookery.controller.controller import Controller
from rookery.controller.ports import Clock, Ids
from rookery.errors import Forbidden, Unauthorized
from rookery.settings import Settings
from rookery.storage.artifacts import Artifacts
from rookery.storage.database import Database
from rookery.storage.keys import hash_key
from rookery.storage.rows import TenantRow
from rookery.telemetry.prometheus import Prometheus


@dataclass(frozen=True, kw_only=True)
class Parts:
    controller: Controller
    database: Database
    artifacts: Artifacts
    settings: Settings
    clock: Clock
    ids: Ids
    prometheus: Prometheus
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the service begins to stop, so that streams end instead of holding it up."""


async def parts(connection: HTTPConnection) -> Parts:
    found: Parts = connection.app.state.parts
    return found


_bearer = HTTPBearer(auto_error=False, description="An API key, tml-…")
_header = APIKeyHeader(name="X-API-Key", auto_error=False, description="An API key, tml-…")


async def key_hash(
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    header: Annotated[str | None, Depends(_header)],
) -> str:
    """The hash of the request's API key; empty where it has none."""
    key = bearer.credentials if bearer is not None else header
    return hash_key(key) if key else ""


async def tenant(known: Annotated[Parts, Depends(parts)], key: Annotated[str, Depends(key_hash)]) -> TenantRow:
    """The owner of the request's API key, found by the key's hash. A missing and a wrong key answer the same:
    :class:`Unauthorized`."""
    owner = None if not key else await asyncio.to_thread(known.database.tenant_of_key, key)
    if owner is None:
        raise Unauthorized("no valid API key; send 'Authorization: Bearer tml-…' or 'X-API-Key: tml-…'")
    return owner


async def administrator(owner: Annotated[TenantRow, Depends(tenant)]) -> TenantRow:
    """Raises :class:`Forbidden` for a tenant's key: that these things exist is no secret."""
    if not owner.admin:
        raise Forbidden("this needs the administrator's key (admin.key in the service's data folder)")
    return owner


Service = Annotated[Parts, Depends(parts)]
Owner = Annotated[TenantRow, Depends(tenant)]
KeyHash = Annotated[str, Depends(key_hash)]
Administrator = Annotated[TenantRow, Depends(administrator)]
