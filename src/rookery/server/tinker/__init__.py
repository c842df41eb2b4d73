"""The Tinker-compatible face: existing training code of the ``tinker`` SDK runs unmodified against a Rookery service.

It speaks the protocol of SDK 0.38 and needs that package for its protobuf schema (the extra ``tinker``).

Here is its HTTP application, mounted under ``/tinker``; ``TINKER_BASE_URL`` is the service's address with that.

Statuses are chosen for the client's reaction: 400 and 404 fail at once, 410 makes it send a sample again or end its
heartbeat, 5xx makes it try again. It repeats 409 and 429 for minutes: 409 is never used, and 429 only where waiting
helps. An error in an operation on a model is reported by the operation's result, because the model's later operations
wait for its sequence number.
"""

from __future__ import annotations

from fastapi import FastAPI, Request, Response

from rookery.errors import Conflict, TooManyRequests, UserError
from rookery.server.auth import ServiceContext
from rookery.server.responses import add_exception_handlers, error_response, refusal
from rookery.server.routes import openai
from rookery.server.tinker import calls, sessions
from rookery.server.tinker.protobuf import OLDEST, SUPPORTED, schema

UNSUPPORTED = {
    "publish": "publishing checkpoints is not supported: there is no public catalogue here",
    "copy_weights": "copying weights is not supported: create a training client from the state instead",
    "project": sessions.PROJECTS,
    "audit": "there is no audit log in this API: see the service's own log",
    "billing": "there is no billing here",
    "create_custom_loss": "losses that run on the server are not supported: forward_backward_custom runs them here",
    "auth": "API keys are used as they are: there are no tokens to exchange",
    "join_sampling_session": "copies of a sampling client number their requests themselves",
    "retrieve_futures": "results are retrieved one at a time, by retrieve_future",
    "unload_model": "a model's slot is free when its session ends or rests: there is nothing to unload",
}
"""By part of a path that a client may request: why it is not served, and what to do instead."""

ROUTERS = (("/api/v1", sessions.routes), ("/api/v1", calls.routes), ("/oai/api", openai.routes))
"""The routes, each with the path before them."""


def build(context: ServiceContext) -> FastAPI:
    """Raises :class:`ImportError` where the ``tinker`` package is not installed."""
    schema()
    app = FastAPI(title="Rookery: Tinker-compatible API", version=SUPPORTED, docs_url=None, redoc_url=None)
    app.state.context = context
    for prefix, router in ROUTERS:
        app.include_router(router, prefix=prefix)
    app.include_router(openai.unknown_paths("/v1"), prefix="/oai/api")
    app.add_api_route("/{path:path}", unknown, methods=["GET", "POST", "PUT", "DELETE", "PATCH"])
    add_exception_handlers(app)
    for kind in (Conflict, TooManyRequests):
        app.add_exception_handler(kind, unrepeatable)
    return app


async def unknown(path: str) -> Response:
    for part, reason in UNSUPPORTED.items():
        if part in path:
            return error_response(404, reason)
    return error_response(404, f"nothing at {path}; this server is tested with SDK {OLDEST} to {SUPPORTED}")


async def unrepeatable(request: Request, error: Exception) -> Response:
    if isinstance(error, TooManyRequests) and not error.lasting:
        return refusal(error)
    return error_response(UserError.status, str(error))
