"""Authentication, and the context that routes work with, as FastAPI dependencies.

Every dependency is a coroutine: FastAPI would run a plain function in a thread for every request.
"""

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
from rookery.storage.db import Database
from rookery.storage.models import TenantRow
from rookery.telemetry.prometheus import Prometheus


@dataclass(frozen=True, kw_only=True)
class ServiceContext:
    """The parts of a running service that routes use."""

    controller: Controller
    database: Database
    artifacts: Artifacts
    settings: Settings
    clock: Clock
    ids: IdGenerator
    prometheus: Prometheus
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the service begins to stop, so that streams end and do not delay it."""


async def service_context(connection: HTTPConnection) -> ServiceContext:
    context: ServiceContext = connection.app.state.context
    return context


_bearer = HTTPBearer(auto_error=False, description="An API key, tml-…")
_header = APIKeyHeader(name="X-API-Key", auto_error=False, description="An API key, tml-…")


async def key_hash(
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
    header: Annotated[str | None, Depends(_header)],
) -> str:
    """The hash of the request's API key; empty without one."""
    key = bearer.credentials if bearer is not None else header
    return hash_key(key) if key else ""


async def tenant(
    connection: HTTPConnection,
    context: Annotated[ServiceContext, Depends(service_context)],
    key: Annotated[str, Depends(key_hash)],
) -> TenantRow:
    """The owner of the request's API key, looked up by the key's hash once per request. Raises :class:`Unauthorized`
    for a missing and for a wrong key, with the same message."""
    owner: TenantRow | None = getattr(connection.state, "owner", None)
    if owner is None and key:
        owner = connection.state.owner = await asyncio.to_thread(context.database.tenant_of_key, key)
    if owner is None:
        raise Unauthorized("no valid API key; send 'Authorization: Bearer tml-…' or 'X-API-Key: tml-…'")
    return owner


class AuthenticatedRoute(APIRoute):
    """A route that needs an API key and checks it before it reads the body. FastAPI alone would read and parse a JSON
    body before any dependency, so a client without a key could make the service do that work."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            key = await key_hash(await _bearer(request), await _header(request))
            await tenant(request, await service_context(request), key)
            return await handle(request)

        return handler


async def administrator(owner: Annotated[TenantRow, Depends(tenant)]) -> TenantRow:
    """Raises :class:`Forbidden` for a tenant's key: the existence of these routes is not secret."""
    if not owner.admin:
        raise Forbidden("this needs the administrator's key (admin.key in the service's data folder)")
    return owner


Service = Annotated[ServiceContext, Depends(service_context)]
Owner = Annotated[TenantRow, Depends(tenant)]
KeyHash = Annotated[str, Depends(key_hash)]
Administrator = Annotated[TenantRow, Depends(administrator)]
