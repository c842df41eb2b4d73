"""Routes other than operations: configuration, session and heartbeat, capabilities; listings of the tenant's sessions,
training runs and checkpoints, and what can be done with a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Depends, Header, Query, Request, Response

from rookery.controller.activity import Reader
from rookery.controller.targets import SCHEME, find_checkpoint
from rookery.controller.weights.tickets import TICKET_SECONDS
from rookery.errors import NotFound, UserError, short
from rookery.server.auth import (
    Owner,
    Service,
    admit_ticket,
    make_room,
    misused_parameters,
    query_parameters,
    room_for,
)
from rookery.server.paging import Limit
from rookery.server.peft_archive import ADAPTER_FILES, pack, stream
from rookery.server.responses import METHODS, Stream, error_response, json_response, public_address
from rookery.server.tinker import schemas
from rookery.server.tinker.protobuf import OLDEST, SUPPORTED, older_than_supported, supported
from rookery.storage.columns import Page
from rookery.storage.models import CheckpointKind, CheckpointRow, ModelRow
from rookery.storage.repositories.sessions import (
    checkpoint_cursor,
    count_checkpoints,
    count_models,
    expire_checkpoint,
    get_model,
    get_session,
    ids_of_session,
    list_checkpoints,
    list_models,
    list_sessions,
    newest_checkpoints,
    policies_of_session,
)
from rookery.storage.store import pages
from rookery.tokenization.registry import inspect, status

routes = APIRouter()

FLAGS = {"proto_write_fwdbwd": True, "fwd_via_fwdbwd": True}
"""Features that older SDKs use only if the server announces them, and newer ones always. Every other flag keeps its
default, which leaves its feature off."""

Key = Annotated[str | None, Header(alias="X-Idempotency-Key", max_length=200)]
Offset = Annotated[int, Query(ge=0, lt=2**63)]

ARCHIVE = "adapter.tar"

SdkVersion = Annotated[str | None, Header(alias="X-Stainless-Package-Version", max_length=40)]
"""The version of the client's SDK, which it sends with every request."""

PROJECTS = "projects are not supported: every key sees all of its tenant's runs"

AccessScope = Literal["owned", "accessible"]
"""Whose sessions and runs are shown: both are the tenant's, since no other tenant's are accessible."""

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}


@routes.post("/client/config")
async def client_config(owner: Owner, request: Request) -> Response:
    await schemas.ClientConfig.read(request)
    return json_response(FLAGS)


@routes.post("/client/dynamic_config")
async def dynamic_config(owner: Owner, request: Request) -> Response:
    await schemas.ClientConfig.read(request)
    return json_response({"sample_cancel_enabled": True})


@routes.post("/create_session")
async def create_session(service: Service, owner: Owner, request: Request, key: Key = None) -> Response:
    body = await schemas.CreateSession.read(request)
    about = {"tags": body.tags, "user_metadata": body.user_metadata or {}, "project_id": body.project_id}
    row = await service.controller.sessions.create(
        owner.id, key, sdk_version=body.sdk_version, name=body.display_name or "", about=about
    )
    warnings = []
    if not supported(body.sdk_version):
        yours = body.sdk_version or "unknown"
        warnings.append(f"this server is tested with SDK {OLDEST} to {SUPPORTED}; yours is {yours}")
    if body.project_id:
        warnings.append(f"project_id has no effect: {PROJECTS}")
    warning = "; ".join(warnings) or None
    return json_response({"type": "create_session", "session_id": row.id, "warning_message": warning})


@routes.post("/session_heartbeat")
async def heartbeat(service: Service, owner: Owner, request: Request) -> Response:
    body = await schemas.SessionHeartbeat.read(request)
    await service.controller.sessions.heartbeat(owner.id, body.session_id)
    return json_response({"type": "session_heartbeat"})


@routes.post("/sessions/{session}/finish", status_code=204)
async def finish(service: Service, owner: Owner, session: str, request: Request) -> Response:
    body = await schemas.FinishSession.read(request)
    await service.controller.sessions.finish(owner.id, session, str(body.reason.get("type", "success")))
    return Response(status_code=204)


@routes.get("/healthz")
async def healthz() -> Response:
    return json_response({"status": "ok"})


@routes.get("/get_server_capabilities")
async def capabilities(service: Service, owner: Owner) -> Response:
    """Base models that can be used at once."""
    rows = await service.controller.queries.models(owner.id)
    models = [row.name for row in rows if row.state in ("loaded", "prepared")]
    found = [await service.threads(_capabilities, service, name) for name in models]
    return json_response({"supported_models": [row for row in found if row is not None]})


def _capabilities(service: Service, model: str) -> dict[str, object] | None:
    prepared = status(service.context.settings.cache, model)
    if prepared.folder is None or prepared.state != "prepared":
        return None
    context = inspect(prepared.folder).context
    return {"model_name": model, "max_context_length": context, "trainable": True, "sampleable": True}


@routes.post("/telemetry")
async def telemetry(owner: Owner) -> Response:
    """Accepted and dropped."""
    return json_response({"status": "accepted"})


# --- listings ---------------------------------------------------------------------------------------------------------


async def known_parameters(request: Request) -> None:
    """Raises :class:`UserError` for a parameter of the address that the route does not have, unless it is empty, and
    for one that is given twice."""
    unknown, twice = misused_parameters(request, query_parameters(request.scope["route"].dependant))
    for name in unknown:
        if any(request.query_params.getlist(name)):
            raise UserError(f"{short(name)}: {PROJECTS if name == 'project_id' else 'is not supported by this server'}")
    for name in twice:
        raise UserError(f"{name}: given twice; keep one of them")


LISTING = Depends(known_parameters)


@routes.get("/sessions", dependencies=[LISTING])
async def sessions(
    service: Service, owner: Owner, limit: Limit = 20, offset: Offset = 0, access_scope: AccessScope = "owned"
) -> Response:
    rows = await service.context.store.read(list_sessions, owner.id, Page(limit, offset=offset))
    return json_response({"sessions": [row.id for row in rows]})


@routes.api_route("/sessions/search", methods=[*METHODS], include_in_schema=False)
async def search_sessions(owner: Owner) -> Response:
    return error_response(404, "searching sessions is not supported: list them")


@routes.get("/sessions/{session}", dependencies=[LISTING])
async def session(service: Service, owner: Owner, session: str, access_scope: AccessScope = "owned") -> Response:
    await service.controller.sessions.get(owner.id, session)
    row = await service.context.store.read(get_session, owner.id, session)
    models, samplers = await service.context.store.read(ids_of_session, owner.id, session)
    return json_response({
        "training_run_ids": models,
        "sampler_ids": samplers,
        "user_metadata": _texts(row.about.get("user_metadata") or {}),
        "display_name": row.name or None,
    })  # fmt: skip


@routes.get("/sessions/{session}/trace_export")
async def trace_export(service: Service, owner: Owner, session: str, request: Request) -> Response:
    """The address of a trace of the session's calls in Chrome's JSON format, valid for ``ticket_seconds`` without a
    key. It is made when it is read, so it is ready at once."""
    await service.controller.sessions.get(owner.id, session)
    ticket = service.controller.tickets.grant(owner.id, _trace_of(session))
    url = f"{_base(service, request)}/traces/{ticket}/{session}"
    return json_response({"status": "ready", "url": url})


@routes.get("/traces/{ticket}/{session}")
async def trace(service: Service, request: Request, ticket: str, session: str) -> Response:
    tenant = (await admit_ticket(service, request, ticket, _trace_of(session))).id
    await make_room(service, request)
    policies = await service.context.store.read(policies_of_session, tenant, session)
    now, reader = service.context.clock.time(), Reader(tenant, (session,), policies)
    return Response(await service.controller.queries.activity.trace(reader, 0.0, now), media_type="application/json")


def _trace_of(session: str) -> str:
    """The subject of a ticket for a session's trace: never the hash of an artifact."""
    return f"trace of {session}"


@routes.get("/training_runs", dependencies=[LISTING, room_for()])
async def training_runs(
    service: Service, owner: Owner, limit: Limit = 20, offset: Offset = 0, access_scope: AccessScope = "owned"
) -> Response:
    store, now = service.context.store, service.context.clock.time()
    rows = await store.read(list_models, owner.id, Page(limit, offset=offset))
    newest = await store.read(newest_checkpoints, owner.id, [row.id for row in rows], now)
    total = await store.read(count_models, owner.id)

    def response() -> Response:
        shown = [_run(owner, row, newest) for row in rows]
        return json_response({"training_runs": shown, "cursor": _cursor(offset, limit, total)})

    return await service.encoders(response)


@routes.get("/training_runs/{run}", dependencies=[LISTING])
async def training_run(service: Service, owner: Owner, run: str, access_scope: AccessScope = "owned") -> Response:
    row, _ = await service.context.store.read(get_model, owner.id, run)
    now = service.context.clock.time()
    newest = await service.context.store.read(newest_checkpoints, owner.id, [row.id], now)
    return json_response(_run(owner, row, newest))


@routes.get("/training_runs/{run}/checkpoints", dependencies=[LISTING, room_for()])
async def checkpoints_of(
    service: Service, owner: Owner, run: str, request: Request, sdk: SdkVersion = None
) -> Response:
    """All of them, since the request has no page; they are read and encoded by the page."""
    store, now = service.context.store, service.context.clock.time()
    await store.read(get_model, owner.id, run)  # an unknown run is not an empty one
    parts = list[bytes]()
    async for rows in pages(lambda page: store.read(list_checkpoints, owner.id, run, page, now), checkpoint_cursor):
        parts += await service.encoders(_encoded_checkpoints, rows, sdk)
        await request.state.pause()
    return Response(b'{"checkpoints":[%b]}' % b",".join(parts), media_type="application/json")


def _encoded_checkpoints(rows: Sequence[CheckpointRow], sdk: str | None) -> list[bytes]:
    return [msgspec.json.encode(_checkpoint(row, sdk)) for row in rows]


@routes.get("/checkpoints", dependencies=[LISTING, room_for()])
async def checkpoints(
    service: Service, owner: Owner, limit: Limit = 100, offset: Offset = 0, sdk: SdkVersion = None
) -> Response:
    store, now = service.context.store, service.context.clock.time()
    rows = await store.read(list_checkpoints, owner.id, None, Page(limit, offset=offset), now)
    total = await store.read(count_checkpoints, owner.id, now)

    def response() -> Response:
        shown = [_checkpoint(row, sdk) for row in rows]
        return json_response({"checkpoints": shown, "cursor": _cursor(offset, limit, total)})

    return await service.encoders(response)


@routes.delete("/training_runs/{run}/checkpoints/{kind}/{name}", status_code=204)
async def delete_checkpoint(service: Service, owner: Owner, run: str, kind: str, name: str) -> Response:
    await find_checkpoint(service.context, owner.id, f"{SCHEME}{run}/{kind}/{name}")
    await service.controller.sessions.delete_checkpoint(owner.id, run, kind, name)
    return Response(status_code=204)


@routes.put("/training_runs/{run}/checkpoints/{kind}/{name}/ttl", status_code=204)
async def set_ttl(service: Service, owner: Owner, run: str, kind: str, name: str, request: Request) -> Response:
    ttl = schemas.check_ttl((await schemas.CheckpointTtl.read(request)).ttl_seconds)
    now = service.context.clock.time()
    expires = None if ttl is None else now + ttl
    await service.context.store.write(expire_checkpoint, owner.id, run, kind, name, expires, now)
    return Response(status_code=204)


@routes.post("/weights_info")
async def weights_info(service: Service, owner: Owner, request: Request) -> Response:
    body = await schemas.WeightsInfo.read(request)
    _, run, policy = await find_checkpoint(service.context, owner.id, body.tinker_path)
    trained = {name: run.lora.get(name) for name in ("train_unembed", "train_mlp", "train_attn")}
    return json_response({"base_model": run.requested_model, "is_lora": True, "lora_rank": policy.rank, **trained})


@routes.get("/training_runs/{run}/checkpoints/{kind}/{name}/external_weights_urls")
async def external_urls(service: Service, owner: Owner, run: str, kind: str, name: str, request: Request) -> Response:
    """Addresses of a PEFT folder's files, valid for :data:`TICKET_SECONDS` without a key."""
    if kind != "external_weights":
        raise UserError(f"{kind}/{name} was not saved for downloading; save_weights_external does")
    base, expires = await _grant(service, owner, f"{SCHEME}{run}/{kind}/{name}", request)
    return json_response({"urls": {file: f"{base}/{file}" for file in ADAPTER_FILES}, "expires": expires})


@routes.get("/training_runs/{run}/checkpoints/{kind}/{name}/archive")
async def archive_url(service: Service, owner: Owner, run: str, kind: str, name: str, request: Request) -> Response:
    """Address of any checkpoint's PEFT folder as one tar, for SDKs older than ``external_weights_urls``."""
    base, expires = await _grant(service, owner, f"{SCHEME}{run}/{kind}/{name}", request)
    return json_response({"url": f"{base}/{ARCHIVE}", "expires": expires})


async def _grant(service: Service, owner: Owner, path: str, request: Request) -> tuple[str, str]:
    """The base address of a checkpoint's files, and when it expires."""
    row, _, _ = await find_checkpoint(service.context, owner.id, path)
    ticket = service.controller.tickets.grant(owner.id, row.hash)
    base = f"{_base(service, request)}/external/{ticket}/{row.hash}"
    return base, _time(service.context.clock.time() + TICKET_SECONDS)


def _base(service: Service, request: Request) -> str:
    """The address of these routes, as the client of the request reaches them."""
    path = request.url.path.partition("/sessions/")[0].partition("/training_runs/")[0]
    return public_address(request, service.context.settings.server.public_url) + path


@routes.get("/external/{ticket}/{digest}/{file}")
async def external(
    service: Service, request: Request, ticket: str, digest: str, file: str,
    range: Annotated[str | None, Header()] = None,
) -> Response:  # fmt: skip
    await admit_ticket(service, request, ticket, digest)
    if file not in (*ADAPTER_FILES, ARCHIVE):
        raise NotFound(f"no such file; there are {', '.join(ADAPTER_FILES)} and {ARCHIVE}")
    if file != ARCHIVE:
        return await service.openers(stream, service.context.artifacts, digest, file, range)
    manifest = await service.openers(service.context.artifacts.open, digest)
    size, pieces = await service.openers(pack, service.context.artifacts, manifest, service.context.clock.time())
    return Stream(pieces, media_type="application/x-tar", headers={"Content-Length": str(size)})


def _checkpoint(row: CheckpointRow, sdk: str | None = None) -> dict[str, Any]:
    """A checkpoint for a client with this version of the SDK. Older ones than the tested one know two types, and take
    everything but training weights for a sampler's."""
    older = sdk is not None and older_than_supported(sdk)
    return {
        "checkpoint_id": f"{row.kind}/{row.name}",
        "checkpoint_type": "sampler" if older and row.kind != "weights" else KINDS[row.kind],
        "time": _time(row.created),
        "tinker_path": row.path,
        "size_bytes": row.size,
        "public": False,
        "user_metadata": _texts(row.about) or None,
        "expires_at": None if row.expires is None else _time(row.expires),
    }


def _run(
    owner: Owner, row: ModelRow, checkpoints: Mapping[tuple[str, CheckpointKind], CheckpointRow]
) -> dict[str, Any]:
    """A training run, with its newest of these ``checkpoints``."""

    def newest(kind: CheckpointKind) -> dict[str, Any] | None:
        found = checkpoints.get((row.id, kind))
        return None if found is None else _checkpoint(found)

    return {
        "training_run_id": row.id,
        "base_model": row.requested_model,
        "model_owner": owner.id,
        "is_lora": True,
        "corrupted": False,
        "lora_rank": row.lora.get("rank"),
        "last_request_time": _time(row.used),
        "last_checkpoint": newest("weights"),
        "last_sampler_checkpoint": newest("sampler_weights"),
        "user_metadata": _texts(row.about) or None,
    }


def _texts(about: Mapping[str, Any]) -> dict[str, str]:
    """A client's own metadata as its SDK reads it, which takes any value and returns texts: another value is written
    as JSON. One that it does not read would hide the whole list."""
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in about.items()}


def _cursor(offset: int, limit: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
