"""The HTTP application: all faces on one FastAPI, each a router over the same parts."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from fastapi import FastAPI, Response
from fastapi.routing import APIRoute

from rookery.server import responses
from rookery.server.auth import Service, ServiceContext
from rookery.server.body_limit import BodyLimit
from rookery.server.routes import admin, gateway, jobs, openai
from rookery.spec.job import JobSpec
from rookery.telemetry.prometheus import CONTENT_TYPE, Figures

log = logging.getLogger("rookery.server")

VERSION = "0.1.0"


def build(parts: ServiceContext) -> FastAPI:
    """The application over ``parts``, which stay the caller's to start and stop."""
    app = FastAPI(
        title="Rookery",
        version=VERSION,
        summary="Many LoRA policies learn by reinforcement at once, on one resident base model.",
        generate_unique_id_function=_operation,
    )
    app.state.parts = parts
    responses.add_exception_handlers(app)
    app.add_middleware(BodyLimit)
    app.include_router(jobs.routes)
    app.include_router(admin.routes)
    app.include_router(openai.routes)
    app.include_router(gateway.routes)
    app.add_api_route("/healthz", healthz, tags=["service"], response_model=dict[str, str])
    app.add_api_route("/metrics", prometheus, tags=["service"], response_class=Response, include_in_schema=False)
    _document_jobs(app)
    _mount_tinker(app, parts)
    return app


def _mount_tinker(app: FastAPI, parts: ServiceContext) -> None:
    """The Tinker-compatible API, where the package that publishes its schema is installed."""
    try:
        from rookery.server.tinker.app import build as build_tinker

        app.mount("/tinker", build_tinker(parts))
    except ImportError as error:
        log.info("the Tinker-compatible API is off: %s", error)


async def healthz() -> Response:
    """Whether this is a Rookery service that answers; needs no key and tells nothing else."""
    return responses.json_response({"status": "ok", "service": "rookery", "version": VERSION})


async def prometheus(service: Service) -> Response:
    """Figures for Prometheus: no tenant, job or text is in them, so no key is asked for."""
    return Response(service.prometheus.render(_figures(service)), media_type=CONTENT_TYPE)


def _operation(route: APIRoute) -> str:
    return route.name


def _document_jobs(app: FastAPI) -> None:
    """Puts JobSpec's schema where the documentation of the two routes that take a job shows it. They read the body as
    it is, so that a wrong job is refused by ``spec`` alone, with its own words."""
    made = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = made()
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


def _figures(service: ServiceContext) -> Figures:
    health = service.controller.health()
    return Figures(
        jobs=health["jobs"],
        workers=Counter(str(worker["state"]) for worker in service.controller.workers()),
        totals=health["totals"],
        gauges=health["gauges"],
    )
