"""What the routes work with: the service's parts, and whose request it is. Each is a dependency of a route, and a
coroutine: FastAPI runs a plain function in a thread of its own for every request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import HTTPConnection

from rookery.aio import Clock, IdGenerator
from rookery.controller.controller import Controller
from rookery.errors import Forbidden, Unauthorized
from rookery.settings import Settings
from rookery.storage.artifacts import Artifacts
from rookery.storage.data_dir import hash_key
from rookery.storage.database import Database
from rookery.storage.rows import TenantRow
from rookery.telemetry.prometheus import Prometheus


@dataclass(frozen=True, kw_only=True)
class ServiceContext:
    controller: Controller
    database: Database
    artifacts: Artifacts
    settings: Settings
    clock: Clock
    ids: IdGenerator
    prometheus: Prometheus
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the service begins to stop, so that streams end instead of holding it up."""


async def parts(connection: HTTPConnection) -> ServiceContext:
    found: ServiceContext = connection.app.state.parts
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


async def tenant(
    connection: HTTPConnection, known: Annotated[ServiceContext, Depends(parts)], key: Annotated[str, Depends(key_hash)]
) -> TenantRow:
    """The owner of the request's API key, found by the key's hash, once for each request. A missing and a wrong key
    answer the same: :class:`Unauthorized`."""
    owner: TenantRow | None = getattr(connection.state, "owner", None)
    if owner is None and key:
        owner = connection.state.owner = await asyncio.to_thread(known.database.tenant_of_key, key)
    if owner is None:
        raise Unauthorized("no valid API key; send 'Authorization: Bearer tml-…' or 'X-API-Key: tml-…'")
    return owner


class AuthenticatedRoute(APIRoute):
    """A route that needs a key, and looks at it before the body is read. By itself FastAPI reads and parses a JSON body
    before it asks any dependency, so that whoever has no key could make the service do that."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            key = await key_hash(await _bearer(request), await _header(request))
            await tenant(request, await parts(request), key)
            return await handle(request)

        return handler


async def administrator(owner: Annotated[TenantRow, Depends(tenant)]) -> TenantRow:
    """Raises :class:`Forbidden` for a tenant's key: that these things exist is no secret."""
    if not owner.admin:
        raise Forbidden("this needs the administrator's key (admin.key in the service's data folder)")
    return owner


Service = Annotated[ServiceContext, Depends(parts)]
Owner = Annotated[TenantRow, Depends(tenant)]
KeyHash = Annotated[str, Depends(key_hash)]
Administrator = Annotated[TenantRow, Depends(administrator)]
