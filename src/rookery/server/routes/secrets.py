"""``/api/v1/secrets``: texts that a tenant's jobs use by name, such as the keys of sinks. No route returns one."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from fastapi import APIRouter, Path

from rookery.bounds import GIVEN_NAME
from rookery.server.auth import AuthenticatedRoute, Owner, Service
from rookery.server.paging import Paged
from rookery.server.responses import ERRORS
from rookery.server.schemas import SecretText, SecretView
from rookery.storage.repositories import secrets

routes = APIRouter(prefix="/api/v1", route_class=AuthenticatedRoute, responses=ERRORS, tags=["secrets"])

SecretName = Annotated[str, Path(pattern=GIVEN_NAME, max_length=100)]


@routes.put("/secrets/{secret}")
async def set_secret(service: Service, owner: Owner, secret: SecretName, request: SecretText) -> SecretView:
    """Store a secret, or replace it. It is never shown again."""
    now = service.context.clock.time()
    await service.context.store.write(secrets.set_secret, owner.id, secret, request.value, now)
    return SecretView(name=secret, created=now)


@routes.get("/secrets")
async def list_secrets(service: Service, owner: Owner, page: Paged) -> list[SecretView]:
    """A page of the names of this tenant's secrets."""
    fetch = partial(service.context.store.read, secrets.secrets, owner.id)
    found = await page.read(fetch, lambda row: (row.name,), str)
    return [SecretView(name=row.name, created=row.created) for row in found]


@routes.delete("/secrets/{secret}", status_code=204)
async def delete_secret(service: Service, owner: Owner, secret: SecretName) -> None:
    """Delete a secret. Sinks that use it fail from then on."""
    await service.context.store.write(secrets.delete_secret, owner.id, secret)
