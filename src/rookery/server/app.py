"""The HTTP application: one FastAPI with a router per API, the service's health and its metrics."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

from fastapi import FastAPI, Response, WebSocket
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, WebSocketRoute

from rookery.errors import Unavailable, installs
from rookery.protocol.gauges import GAUGES
from rookery.server import responses
from rookery.server.auth import Service, ServiceContext
from rookery.server.bodies import BodyLimit, SecurityHeaders, TimeKeeper
from rookery.server.connections import Connections
from rookery.server.methods import RequestMethods
from rookery.server.routes import (
    admin,
    agents,
    azure,
    episodes,
    fine_tuning,
    gateway,
    jobs,
    openai,
    page,
    secrets,
    timeline,
    usage,
)
from rookery.spec.job import JobSpec
from rookery.telemetry.log import dropped_lines
from rookery.telemetry.metrics import CONTENT_TYPE, ServiceMetrics
from rookery.turns import in_thread, service_task

log = logging.getLogger("rookery.server")

VERSION = "0.1.0"

SOCKETS = frozenset(route.path for route in gateway.routes.routes if isinstance(route, WebSocketRoute))
"""The paths that take WebSockets."""


def build(context: ServiceContext) -> FastAPI:
    """The application over ``context``, whose parts the caller starts and stops."""
    app = FastAPI(
        title="Rookery",
        version=VERSION,
        redoc_url=None,
        redirect_slashes=False,
        summary="Many LoRA policies learn by reinforcement at once, on one resident base model.",
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.context, app.state.sockets = context, SOCKETS
    responses.add_exception_handlers(app)
    app.add_middleware(BodyLimit)
    app.add_middleware(TimeKeeper)
    routers = [
        agents.routes,  # before the actions of jobs
        jobs.routes,
        episodes.routes,
        admin.routes,
        fine_tuning.routes,
        openai.routes,
        openai.token_routes,
        openai.unknown_paths("/v1", "/v1/files", "/v1/fine_tuning/jobs"),
        azure.routes,
        agents.agent_routes,
        gateway.routes,
        usage.routes,
        secrets.routes,
        timeline.routes,
        page.routes,
        page.unsigned,
        page.files,
    ]
    for router in routers:
        app.include_router(router)
    app.add_api_route("/healthz", healthz, tags=["service"])
    app.add_api_route("/readyz", readyz, tags=["service"])
    app.add_api_route("/metrics", prometheus, tags=["service"], response_class=Response, include_in_schema=False)
    _document_jobs(app)
    mounted = [("", route) for route in [*app.routes, *(route for router in routers for route in router.routes)]]
    mounted += _mount_tinker(app, context)
    app.add_middleware(RequestMethods, routes=mounted)
    app.add_middleware(SecurityHeaders, page=page.page_policy(page.FILES["index.html"]))  # the outermost: of each one
    return app


def standby(connections: Connections) -> FastAPI:
    """The application of a service that waits for its database: its health, and 503 for everything else."""
    app = FastAPI(title="Rookery", version=VERSION, openapi_url=None)
    app.state.context, app.state.sockets = SimpleNamespace(connections=connections), SOCKETS
    responses.add_exception_handlers(app)
    refused = Unavailable("this service is a standby: another one has the database")

    async def health() -> dict[str, str]:
        return {"status": "standby", "service": "rookery", "version": VERSION}

    async def refuse(path: str) -> None:
        raise refused

    async def refuse_socket(socket: WebSocket, path: str) -> None:
        await socket.send_denial_response(responses.refusal(refused))

    app.add_api_route("/healthz", health)
    app.add_api_route("/{path:path}", refuse, methods=list(responses.METHODS))
    app.add_api_websocket_route("/{path:path}", refuse_socket)
    return app


def _mount_tinker(app: FastAPI, context: ServiceContext) -> list[tuple[str, BaseRoute]]:
    """Mounts the Tinker-compatible API if the package that publishes its schema is installed; returns its routes."""
    try:
        from rookery.server import tinker

        app.mount("/tinker", tinker.build(context))
        return [("/tinker" + prefix, route) for prefix, router in tinker.ROUTERS for route in router.routes]
    except ModuleNotFoundError:  # a package that it imports, whose name says nothing
        log.info("the Tinker-compatible API is off; this installs what it needs: %s", installs("tinker"))
    except ImportError as error:
        log.info("the Tinker-compatible API is off: %s", error)
    return []


async def healthz() -> dict[str, str]:
    """Identifies a running Rookery service, ready or not; needs no key."""
    return {"status": "ok", "service": "rookery", "version": VERSION}


async def readyz(service: Service) -> dict[str, str]:
    """Whether the service takes requests: 503 while it waits for its database, stands by or stops. Needs no key."""
    if problem := "the service is stopping" if service.closing.is_set() else await service.readiness.problem():
        raise Unavailable(f"not ready: {problem}")
    return {"status": "ready", "service": "rookery", "version": VERSION}


async def prometheus(service: Service) -> Response:
    """Metrics for Prometheus. They contain no tenant, job or text, so they need no key."""
    health = service.controller.queries.health()
    metrics = ServiceMetrics(
        jobs=health.jobs,
        workers=Counter(worker.state for worker in service.context.rooms.fleet.all()),
        totals={**health.totals, **service.refusals},
        gauges={**health.gauges, "connections": len(service.connections), "log_lines_dropped": dropped_lines()},
        help={name: gauge.help for name, gauge in GAUGES.items()},
    )
    return Response(metrics.render(), media_type=CONTENT_TYPE)


def _document_jobs(app: FastAPI) -> None:
    """Puts the schema of JobSpec into the documentation of the two routes that take a job. They read the body as a
    mapping, so that ``spec`` alone refuses a wrong job, with its own messages."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = generate()
            schema = JobSpec.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas = document["components"]["schemas"]
            schemas.update(schema.pop("$defs", {}))
            schemas["JobSpec"] = schema
            for path in ("/api/v1/jobs", "/api/v1/jobs/dry-run"):
                content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
                content["schema"] = {"$ref": "#/components/schemas/JobSpec"}
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
    made: asyncio.Future[Any] | None = None

    async def document() -> Response:
        """The documentation as FastAPI's route returns it, made once: that takes some 700 ms."""
        nonlocal made
        if made is None or (made.done() and made.exception() is not None):
            made = service_task(in_thread(lambda: JSONResponse(openapi()).body))
        return Response(await asyncio.shield(made), media_type="application/json")

    app.router.routes[:] = [route for route in app.routes if getattr(route, "path", "") != app.openapi_url]
    app.add_api_route(str(app.openapi_url), document, include_in_schema=False)
