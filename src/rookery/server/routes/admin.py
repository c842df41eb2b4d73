"""Administration: tenants, their keys, costs and workers. Needs the administrator's key.

The text of a key is returned once, by the request that creates it. After that a key is identified by the beginning of
its hash, which authorizes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query

from rookery.controller.views import Costs, PoolView, WorkerEventView, WorkerView
from rookery.errors import Conflict, NotFound, UserError
from rookery.server.auth import Administrator, AuthenticatedRoute, Service, ServiceContext
from rookery.server.paging import Paged
from rookery.server.responses import ERRORS
from rookery.server.schemas import CreatedKey, KeyView, NewKey, NewTenant, TenantLimits, TenantView
from rookery.storage.data_dir import hash_key, new_key
from rookery.storage.models import KeyRow, TenantRow
from rookery.storage.repositories import tenants as tenant_rows

KEY_ID = 16
"""Hex digits of a key's hash in its id: enough that no two keys share them."""

MOST_EVENTS = 1000
"""Of one response: some hundred kilobytes."""

MOST_NUMBER = 2**53
"""The largest integer that every client of JSON reads exactly."""

routes = APIRouter(prefix="/api/v1", route_class=AuthenticatedRoute, responses=ERRORS, tags=["administration"])


def _tenant_view(service: ServiceContext, row: TenantRow) -> TenantView:
    quotas = service.context.rooms.quotas
    return TenantView(id=row.id, name=row.name, created=row.created, **quotas.view(row.id))


def _key_view(row: KeyRow, revoked: float | None) -> KeyView:
    return KeyView(
        id=row.hash[:KEY_ID], label=row.label, created=row.created, revoked=revoked, role=row.role, expires=row.expires
    )


@routes.get("/workers")
async def workers(service: Service, owner: Administrator) -> Sequence[WorkerView]:
    return service.controller.queries.workers()


@routes.get("/workers/pools")
async def pools(service: Service, owner: Administrator) -> Sequence[PoolView]:
    """The number of rollout workers of each base model, and the number that suits the load of its asynchronous jobs."""
    return service.controller.queries.pools()


@routes.get("/workers/events")
async def worker_events(
    service: Service,
    owner: Administrator,
    after: Annotated[
        int | None, Query(ge=0, le=MOST_NUMBER, description="The number of the last event that is known")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=MOST_EVENTS, description="At most so many events")] = MOST_EVENTS,
    event: Annotated[list[str], Query(max_length=20, description="Only events of these kinds")] = [],  # noqa: B006
) -> list[WorkerEventView]:
    """The events of workers, oldest first: joins, losses with their reason, adapters, training operations:
    without ``after`` the newest ``limit``, else the first later ones. The newest of each kind are kept, since the
    service started."""
    timeline = service.controller.timeline
    return timeline.newest(limit, event) if after is None else timeline.after(after, limit, event)


@routes.get("/tenants")
async def tenants(service: Service, owner: Administrator, page: Paged) -> list[TenantView]:
    """A page of the tenants, oldest first."""
    fetch = partial(service.context.store.read, tenant_rows.list_tenants, False)
    found = await page.read(fetch, lambda row: (row.created, row.id), float, str)
    return [_tenant_view(service, row) for row in found]


@routes.post("/tenants", status_code=201)
async def new_tenant(service: Service, owner: Administrator, request: NewTenant) -> TenantView:
    id, now = service.context.ids.new("tenant"), service.context.clock.time()
    return _tenant_view(service, await service.context.store.write(tenant_rows.create_tenant, id, request.name, now))


@routes.patch("/tenants/{tenant}")
async def rename_tenant(service: Service, owner: Administrator, tenant: str, request: NewTenant) -> TenantView:
    """Give a tenant another name. Two tenants never have the same one."""
    return _tenant_view(service, await service.context.store.write(tenant_rows.rename_tenant, tenant, request.name))


@routes.delete("/tenants/{tenant}", status_code=204)
async def delete_tenant(service: Service, owner: Administrator, tenant: str, force: bool = False) -> None:
    """Delete a tenant: its keys, jobs, versions, uploads and checkpoints. What it cost stays in the costs. With
    ``force`` also one whose jobs have not ended: they are cancelled."""
    keys = await service.context.store.read(tenant_rows.keys, tenant)
    try:
        await service.controller.delete_tenant(tenant, force)
    finally:
        for key in keys:
            service.credentials.keys.forget(key.hash)
    for key in keys:
        service.connections.cut(key.hash)


@routes.put("/tenants/{tenant}/limits")
async def limit_tenant(service: Service, owner: Administrator, tenant: str, request: TenantLimits) -> TenantView:
    """Change limits of a tenant. Jobs beyond them wait; running ones continue."""
    return _tenant_view(service, await service.controller.limit_tenant(tenant, request.model_dump(exclude_unset=True)))


@routes.post("/tenants/{tenant}/keys", status_code=201)
async def new_tenant_key(service: Service, owner: Administrator, tenant: str, request: NewKey) -> CreatedKey:
    """Create an API key of a tenant. Keep it: it is never shown again. Only the administrator's tenant has keys of the
    roles ``admin`` and ``worker``."""
    row = await service.context.store.read(tenant_rows.get_tenant, tenant)
    role = request.role or ("admin" if row.admin else "tenant")
    if role in ("admin", "worker") and not row.admin:
        raise UserError(f"role: a key of the role {role} can only belong to the administrator's tenant")
    key, now = new_key(), service.context.clock.time()
    expires = None if request.lifetime_seconds is None else now + request.lifetime_seconds
    await service.context.store.write(tenant_rows.add_key, hash_key(key), row.id, request.label, now, role, expires)
    return CreatedKey(key=key, tenant=row.id, label=request.label, role=role, expires=expires)


@routes.get("/tenants/{tenant}/keys")
async def keys(service: Service, owner: Administrator, tenant: str, page: Paged) -> list[KeyView]:
    """A page of a tenant's keys, oldest first, revoked ones included."""
    row = await service.context.store.read(tenant_rows.get_tenant, tenant)
    fetch = partial(service.context.store.read, tenant_rows.keys, row.id)
    found = await page.read(fetch, lambda key: (key.created, key.hash), float, str)
    return [_key_view(key, key.revoked) for key in found]


@routes.delete("/tenants/{tenant}/keys/{key}")
async def revoke_key(service: Service, owner: Administrator, tenant: str, key: str) -> KeyView:
    """Revoke a key; its tenant's data stays. The key of this request cannot revoke itself."""
    row = await service.context.store.read(tenant_rows.get_tenant, tenant)
    found = next(
        (k for k in await service.context.store.read(tenant_rows.keys, row.id) if k.hash[:KEY_ID] == key), None
    )
    if found is None:
        raise NotFound(f"tenant {row.id} has no key {key}")
    if found.hash == owner.key:
        raise Conflict("this request was made with that key; revoke it with another key of the administrator")
    if found.revoked is not None:
        raise Conflict(f"key {key} is already revoked")
    now = service.context.clock.time()
    await service.context.store.write(tenant_rows.revoke_key, row.id, found.hash, now)
    service.revoked(found.hash)
    return _key_view(found, now)


@routes.get("/costs")
async def costs(service: Service, owner: Administrator) -> Costs:
    """The costs of every tenant, and of the workers."""
    return await service.controller.queries.costs()
