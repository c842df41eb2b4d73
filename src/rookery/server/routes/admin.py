"""What only the administrator does: tenants, their keys, what they cost, the workers. A key's text leaves once, in the
answer that makes it; from then on it is named by the beginning of its hash, which gives nobody anything."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response

from rookery.errors import Conflict, NotFound
from rookery.server.auth import Administrator, AuthenticatedRoute, KeyHash, Service
from rookery.server.responses import PROBLEMS, json_response
from rookery.server.schemas import Costs, KeyAnswer, KeyRow, NewKey, NewTenant, TenantAnswer, WorkerRow
from rookery.storage.data_dir import hash_key, new_key

KEY_ID = 16
"""Letters of a key's hash that name it: no two keys will ever share them."""

routes = APIRouter(prefix="/api/v1", route_class=AuthenticatedRoute, responses=PROBLEMS, tags=["administration"])


@routes.get("/workers", response_model=list[WorkerRow])
async def workers(service: Service, owner: Administrator) -> Response:
    return json_response(service.controller.workers())


@routes.get("/tenants", response_model=list[TenantAnswer])
async def tenants(service: Service, owner: Administrator) -> Response:
    found = await asyncio.to_thread(service.database.list_tenants)
    return json_response([{"id": row.id, "name": row.name, "created": row.created} for row in found])


@routes.post("/tenants", response_model=TenantAnswer, status_code=201)
async def new_tenant(service: Service, owner: Administrator, asked: NewTenant) -> Response:
    row = await asyncio.to_thread(
        service.database.create_tenant, service.ids.new("tenant"), asked.name, service.clock.time()
    )
    return json_response({"id": row.id, "name": row.name, "created": row.created}, 201)


@routes.post("/tenants/{tenant}/keys", response_model=KeyAnswer, status_code=201)
async def new_tenant_key(service: Service, owner: Administrator, tenant: str, asked: NewKey) -> Response:
    """A new API key of a tenant. Keep it: it is never shown again."""
    row = await asyncio.to_thread(service.database.get_tenant, tenant)
    key = new_key()
    await asyncio.to_thread(service.database.add_key, hash_key(key), row.id, asked.label, service.clock.time())
    return json_response({"key": key, "tenant": row.id, "label": asked.label}, 201)


@routes.get("/tenants/{tenant}/keys", response_model=list[KeyRow])
async def keys(service: Service, owner: Administrator, tenant: str) -> Response:
    """A tenant's keys, oldest first, those that were revoked too."""
    row = await asyncio.to_thread(service.database.get_tenant, tenant)
    found = await asyncio.to_thread(service.database.keys, row.id)
    return json_response(
        [{"id": k.hash[:KEY_ID], "label": k.label, "created": k.created, "revoked": k.revoked} for k in found]
    )


@routes.delete("/tenants/{tenant}/keys/{key}", response_model=KeyRow)
async def revoke_key(service: Service, owner: Administrator, used: KeyHash, tenant: str, key: str) -> Response:
    """The key opens nothing any more; what its tenant has stays. The key that asks for this cannot be the one."""
    row = await asyncio.to_thread(service.database.get_tenant, tenant)
    found = next((k for k in await asyncio.to_thread(service.database.keys, row.id) if k.hash[:KEY_ID] == key), None)
    if found is None:
        raise NotFound(f"tenant {row.id} has no key {key}")
    if found.hash == used:
        raise Conflict("this request was made with that key; revoke it with another one of the administrator's")
    if found.revoked is not None:
        raise Conflict(f"key {key} is revoked already")
    now = service.clock.time()
    await asyncio.to_thread(service.database.revoke_key, row.id, found.hash, now)
    return json_response({"id": key, "label": found.label, "created": found.created, "revoked": now})


@routes.get("/costs", response_model=Costs)
async def costs(service: Service, owner: Administrator) -> Response:
    """What every tenant used, and what the workers cost."""
    return json_response(await service.controller.costs())
