"""The page: its files, and signing in to it. The page itself reads the documented API."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path as FilePath
from typing import Annotated

from fastapi import APIRouter, Header, Path, Request, Response

from rookery.errors import Forbidden, NotFound, TooManyRequests
from rookery.server.auth import AuthenticatedRoute, KeyHolder, Owner, Service, address_of
from rookery.server.responses import ERRORS, client_scheme
from rookery.server.schemas import AccountView, SignInLink
from rookery.server.signin import HEADER
from rookery.storage.repositories import tenants

FOLDER = FilePath(__file__).parents[1] / "page"

MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml",
    ".js": "text/javascript; charset=utf-8", ".mjs": "text/javascript; charset=utf-8",
}  # fmt: skip
"""Browsers run a module only as text/javascript."""

FILES = {
    path.relative_to(FOLDER).as_posix(): path.read_bytes()
    for path in sorted(FOLDER.rglob("*"))
    if path.suffix in MEDIA_TYPES
}
"""The files of the page by their path, in memory: together less than 300 kB."""

ETAGS = {name: f'"{hashlib.sha256(content).hexdigest()[:32]}"' for name, content in FILES.items()}


def page_policy(index: bytes) -> bytes:
    """The Content-Security-Policy of the page: scripts, styles and requests of this service alone, and the import map,
    which must stand in the page, by its hash."""
    maps = re.findall(rb'<script type="importmap">(.*?)</script>', index, re.DOTALL)
    hashes = b" ".join(b"'sha256-%s'" % base64.b64encode(hashlib.sha256(text).digest()) for text in maps)
    return (
        b"default-src 'none'; script-src 'self' %s; style-src 'self'; img-src 'self' data:; connect-src 'self';"
        b" form-action 'none'; frame-ancestors 'none'; base-uri 'none'" % hashes
    )


files = APIRouter(include_in_schema=False)
routes = APIRouter(prefix="/api/v1", route_class=AuthenticatedRoute, responses=ERRORS, tags=["page"])
unsigned = APIRouter(prefix="/api/v1", responses=ERRORS, tags=["page"])


@files.get("/")
async def index(if_none_match: Annotated[str, Header()] = "") -> Response:
    return _file("index.html", if_none_match)


@files.get("/page/{file:path}")
async def page_file(file: str, if_none_match: Annotated[str, Header()] = "") -> Response:
    if file not in FILES:
        raise NotFound("no such file of the page")
    return _file(file, if_none_match)


def _file(name: str, known: str) -> Response:
    headers = {"Cache-Control": "no-cache", "ETag": ETAGS[name]}
    if known == ETAGS[name]:
        return Response(status_code=304, headers=headers)
    return Response(FILES[name], headers=headers, media_type=MEDIA_TYPES[FilePath(name).suffix])


@routes.post("/sign-in", status_code=204)
async def sign_in(service: Service, owner: KeyHolder, request: Request, response: Response) -> None:
    """Sets the cookie of the page: its browser may then use the API without the key, for a week. Needs the
    key itself, not a cookie."""
    service.credentials.signins.set_cookie(response, owner.key, secure=client_scheme(request) == "https")


@routes.post("/sign-in/links", status_code=201)
async def sign_in_link(service: Service, owner: KeyHolder) -> SignInLink:
    """A link that signs one browser in with the key of this request, as ``rookery open`` uses it. Needs the key
    itself, not a cookie."""
    return SignInLink(path=f"/#/link/{service.credentials.signins.link(owner.key)}")


@unsigned.post("/sign-in/links/{link}", status_code=204)
async def use_link(
    service: Service, request: Request, response: Response, link: Annotated[str, Path(max_length=500)]
) -> None:
    """Sets the cookie of the page, once for each link. It needs no key, and counts as a wrong one where it is none."""
    if HEADER not in request.headers:
        raise Forbidden(f"links are for the page, which sends {HEADER}")
    address = address_of(request)
    link_hash = hashlib.sha256(link.encode()).hexdigest()
    try:
        service.credentials.failures.check(address, link_hash)
    except TooManyRequests:
        service.refusals["keys_limited"] += 1
        raise
    try:
        key = service.credentials.signins.redeem(link)
    except Exception:
        service.credentials.failures.failed(address)
        service.refusals["keys_failed"] += 1
        raise
    service.credentials.signins.set_cookie(response, key, secure=client_scheme(request) == "https")


@routes.post("/sign-out", status_code=204)
async def sign_out(service: Service, owner: Owner, response: Response) -> None:
    """Deletes the cookie of the page."""
    service.credentials.signins.delete_cookie(response)


@routes.get("/account")
async def account(service: Service, owner: Owner) -> AccountView:
    """The tenant of the key, its limits, and its usage."""
    context = service.context
    row = await context.store.read(tenants.get_tenant, owner.id)
    view = context.rooms.quotas.view(owner.id)
    adapters, size = await context.store.read(tenants.stored, owner.id)
    used = {
        "jobs": service.controller.jobs.runners.count(tenant=owner.id),
        "waiting_jobs": len(service.controller.jobs.waiting.of(tenant=owner.id)),
        "requests": view["requests"], "tokens_per_day": view["tokens_today"], "adapters": adapters, "bytes": size,
        "models": len(service.controller.jobs.models(owner.id)),
        "database_bytes": await context.store.read(tenants.database_bytes, owner.id),
    }  # fmt: skip
    return AccountView(
        tenant=row.id, name=row.name, role=owner.role, limits=view["limits"], tokens_today=view["tokens_today"],
        used=used, cost=context.rooms.usage.tenant_view(owner.id),
    )  # fmt: skip
