"""Routes that a client calls before it trains: configuration, session, heartbeat; and the server's capabilities."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Header, Request, Response

from rookery.server.auth import Owner, Service
from rookery.server.responses import json_response
from rookery.server.tinker import schemas
from rookery.server.tinker.protobuf import OLDEST, SUPPORTED, supported
from rookery.tokenization.registry import inspect, status

routes = APIRouter()

FLAGS = {"proto_write_fwdbwd": True, "fwd_via_fwdbwd": True}
"""Features that older SDKs use only if the server announces them, and newer ones always. Every other flag keeps its
default, which leaves its feature off."""

Key = Annotated[str | None, Header(alias="X-Idempotency-Key")]


@routes.post("/client/config")
async def client_config(owner: Owner, request: Request) -> Response:
    await schemas.read(schemas.ClientConfig, request)
    return json_response(FLAGS)


@routes.post("/client/dynamic_config")
async def dynamic_config(owner: Owner, request: Request) -> Response:
    await schemas.read(schemas.ClientConfig, request)
    return json_response({"sample_cancel_enabled": True})


@routes.post("/create_session")
async def create_session(service: Service, owner: Owner, request: Request, key: Key = None) -> Response:
    body = await schemas.read(schemas.CreateSession, request)
    about = {"tags": body.tags, "user_metadata": body.user_metadata or {}, "project_id": body.project_id}
    row = await service.controller.sessions.create(
        owner.id, key, sdk_version=body.sdk_version, name=body.display_name or "", about=about
    )
    warning = None
    if not supported(body.sdk_version):
        warning = f"this server is tested with SDK {OLDEST} to {SUPPORTED}; yours is {body.sdk_version or 'unknown'}"
    return json_response({"type": "create_session", "session_id": row.id, "warning_message": warning})


@routes.post("/session_heartbeat")
async def heartbeat(service: Service, owner: Owner, request: Request) -> Response:
    body = await schemas.read(schemas.SessionHeartbeat, request)
    await service.controller.sessions.heartbeat(owner.id, body.session_id)
    return json_response({"type": "session_heartbeat"})


@routes.post("/sessions/{session}/finish", status_code=204)
async def finish(service: Service, owner: Owner, session: str, request: Request) -> Response:
    body = await schemas.read(schemas.FinishSession, request)
    await service.controller.sessions.finish(owner.id, session, str(body.reason.get("type", "success")))
    return Response(status_code=204)


@routes.get("/healthz")
async def healthz() -> Response:
    return json_response({"status": "ok"})


@routes.get("/get_server_capabilities")
async def capabilities(service: Service, owner: Owner) -> Response:
    """Base models that can be used at once."""
    models = [row["name"] for row in service.controller.queries.models() if row["state"] in ("loaded", "prepared")]
    found = [await asyncio.to_thread(_capabilities, service, name) for name in models]
    return json_response({"supported_models": [row for row in found if row is not None]})


def _capabilities(service: Service, model: str) -> dict[str, object] | None:
    prepared = status(service.settings.cache, model)
    if prepared.folder is None or prepared.state != "prepared":
        return None
    context = inspect(prepared.folder).context
    return {"model_name": model, "max_context_length": context, "trainable": True, "sampleable": True}


@routes.post("/telemetry")
async def telemetry(owner: Owner) -> Response:
    """Accepted and dropped."""
    return json_response({"status": "accepted"})
