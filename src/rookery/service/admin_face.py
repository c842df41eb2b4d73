"""What only the administrator does: tenants, their keys, the workers. A key's text leaves once, in the answer that
makes it."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Response

from rookery.service.answers import PROBLEMS, answer
from rookery.service.parts import Administrator, Service
from rookery.service.schemas import KeyAnswer, NewKey, NewTenant, TenantAnswer, WorkerRow
from rookery.storage.keys import hash_key, new_key

routes = APIRouter(prefix="/api/v1", responses=PROBLEMS, tags=["administration"])


@routes.get("/workers", response_model=list[WorkerRow])
async def workers(service: Service, owner: Administrator) -> Response:
    return answer(service.controller.workers())


@routes.get("/tenants", response_model=list[TenantAnswer])
async def tenants(service: Service, owner: Administrator) -> Response:
    found = await asyncio.to_thread(service.database.list_tenants)
    return answer([{"id": row.id, "name": row.name, "created": row.created} for row in found])


@routes.post("/tenants", response_model=TenantAnswer, status_code=201)
async def new_tenant(service: Service, owner: Administrator, asked: NewTenant) -> Response:
    row = await asyncio.to_thread(
        service.database.create_tenant, service.ids.new("tenant"), asked.name, service.clock.time()
    )
    return answer({"id": row.id, "name": row.name, "created": row.created}, 201)


@routes.post("/tenants/{tenant}/keys", response_model=KeyAnswer, status_code=201)
async def new_tenant_key(service: Service, owner: Administrator, tenant: str, asked: NewKey) -> Response:
    """A new API key of a tenant. Keep it: it is never shown again."""
    row = await asyncio.to_thread(service.database.get_tenant, tenant)
    key = new_key()
    await asyncio.to_thread(service.database.add_key, hash_key(key), row.id, asked.label, service.clock.time())
    return answer({"key": key, "tenant": row.id, "label": asked.label}, 201)
