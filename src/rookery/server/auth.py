"""Authentication, and the context that routes work with, as FastAPI dependencies.

Every dependency is a coroutine: FastAPI would run a plain function in a thread for every request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any

from cachetools import TTLCache
from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import HTTPConnection

from rookery.aio import Clock, IdGenerator
from rookery.controller.controller import Controller
from rookery.errors import Forbidden, TooManyRequests, Unauthorized
from rookery.server.bodies import BoundedRequest
from rookery.server.connections import Connections
from rookery.settings import Settings
from rookery.storage.artifacts import Artifacts
from rookery.storage.data_dir import hash_key
from rookery.storage.db import Database
from rookery.storage.models import TenantRow
from rookery.telemetry.metrics import Prometheus

REFUSALS = ("bodies_refused", "connections_refused", "connections_evicted", "keys_failed", "keys_limited")
"""Counters of the metrics page: bodies above a limit, connections closed at once or for another one, requests with a
wrong key, and requests that were refused because their address had sent too many of those."""

MINUTE = 60.0


class FailedKeys:
    """Wrong keys by address in the last minute. An address above the limit may use the keys that were valid here
    before, so a client behind the same proxy as an attacker goes on."""

    def __init__(self, per_minute: int) -> None:
        self._limit = per_minute
        self._failed: TTLCache[str, int] = TTLCache(10_000, MINUTE)
        self._valid: TTLCache[str, None] = TTLCache(10_000, 86400.0)

    def check(self, address: str, key: str) -> None:
        """Raises :class:`TooManyRequests`."""
        if self._failed.get(address, 0) >= self._limit and key not in self._valid:
            raise TooManyRequests(f"{self._limit} requests with a wrong key in a minute; try again later", MINUTE)

    def record(self, address: str, key: str, *, valid: bool) -> None:
        if valid:
            self._valid[key] = None
        else:
            self._failed[address] = self._failed.get(address, 0) + 1


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
    connections: Connections
    failed_keys: FailedKeys
    refusals: Counter[str]
    """Requests and connections refused at the edge, by the name of the metric."""
    parsing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(2))
    """Turns of large bodies that are parsed: each holds Python's lock for most of its time."""
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
    for a missing and for a wrong key, with the same message, and :class:`TooManyRequests`."""
    owner: TenantRow | None = getattr(connection.state, "owner", None)
    if owner is None and key:
        address = connection.client.host if connection.client is not None else ""
        try:
            context.failed_keys.check(address, key)
        except TooManyRequests:
            context.refusals["keys_limited"] += 1
            raise
        owner = connection.state.owner = await asyncio.to_thread(context.database.tenant_of_key, key)
        context.failed_keys.record(address, key, valid=owner is not None)
        context.refusals["keys_failed"] += owner is None
        if owner is not None:
            context.controller.context.quotas.count_request(owner.id)
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
            return await handle(BoundedRequest(request.scope, request.receive))

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
