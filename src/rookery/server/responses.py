"""Responses of every API: JSON bodies, and errors in one shape.

An error is ``{"error": "<one line>"}`` with the status of its class, and ``"problems"`` where there are several lines.
An unexpected exception is status 500 with a line that points to the service's log; the traceback is never returned, and
the connection stays usable.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import cache
from math import ceil
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rookery.aio import Portions
from rookery.bounds import mistake
from rookery.errors import Conflict, RookeryError, TooManyRequests, Unavailable, UserError, nearest, short, shortage
from rookery.network import service_url
from rookery.storage.store import Writer
from rookery.turns import charged

log = logging.getLogger("rookery.server")


class ErrorResponse(BaseModel):
    """The reason why a request failed, for a person to read."""

    error: str
    problems: list[str] | None = None


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": description}
    for status, description in {
        400: "The request cannot be carried out as it stands",
        401: "No API key, or an unknown one",
        403: "The API key does not permit this",
        404: "Nothing by that name belongs to this tenant",
        409: "The state of the object does not permit this now",
        413: "The body is too large",
        422: "The request is refused; problems has one line per reason",
        429: "Beyond a limit; Retry-After has the seconds after which more is allowed, if waiting helps",
        503: "A resource is not available now; the same request can succeed later",
        507: "The disk of the service is full",
    }.items()
}
"""For ``responses=`` of a router, so that the API's documentation lists them."""


HEARTBEAT = b": heartbeat\n\n"
"""A comment in a stream of server-sent events, while nothing else is sent."""

LINE_SEPARATORS = {character.encode(): b"\\u%04x" % ord(character) for character in "\x85\u2028\u2029"}
"""Characters that JSON leaves as they are and ``str.splitlines`` ends a line at, in UTF-8, and their escapes."""

METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")
OPENAI_PATHS = re.compile("(/agents/[^/]+|/tinker/oai/api)?/(inference/)?v1/|/openai/")
"""Paths whose errors have OpenAI's shape."""


def client_scheme(request: Request) -> str:
    """The scheme by which the client reached the service, or the proxy before it. Anybody may send the header: it
    decides about the response to its sender alone."""
    forwarded = request.headers.get("X-Forwarded-Proto", "").partition(",")[0].strip().lower()
    return forwarded if forwarded in ("http", "https") else request.url.scheme


def public_address(request: Request, public_url: str) -> str:
    """The service's address for the client of a request: the setting ``public_url``, or the one that it used."""
    if public_url:
        return service_url(public_url, "setting ROOKERY_PUBLIC_URL")
    if "X-Forwarded-For" in request.headers and "X-Forwarded-Proto" not in request.headers:
        _warn_of_proxy()
    return f"{client_scheme(request)}://{request.url.netloc}"


@cache
def _warn_of_proxy() -> None:
    """Once."""
    log.warning(
        "a proxy sends X-Forwarded-For without X-Forwarded-Proto: if it serves https, addresses in responses have the"
        " wrong scheme; have it send the header, or set ROOKERY_PUBLIC_URL"
    )


def json_response(content: Any, status: int = 200) -> Response:
    """``content`` (JSON-like data, also structs) as a JSON response; numbers that are not finite become null."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def view_response(threads: Writer, view: BaseModel) -> Response:
    """A view that may have megabytes, encoded in one of the ``threads``."""
    return Response(await threads(encoded_view, view), media_type="application/json")


def encoded_view(view: BaseModel, *, exclude_unset: bool = False) -> bytes:
    """The JSON of a view; numbers that are not finite become null."""
    return view.model_dump_json(exclude_unset=exclude_unset, by_alias=True).encode()


class Stream(StreamingResponse):
    """A response in parts, whose tenant is charged for the service's time, and waits for the next part while it is
    beyond its share. Starlette runs it in a separate task."""

    _pause: Callable[[], Awaitable[None]] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._pause = scope.get("state", {}).get("pause")
        await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        portions = Portions()

        async def paused(message: Message) -> None:
            await send(message)
            if message.get("more_body"):
                await portions.pause()
                if self._pause is not None:
                    await self._pause()

        await charged(super().stream_response(paused))


class EventStream(Stream):
    """A response of server-sent events. A proxy passes each on as it comes: nginx and those that read its header keep
    none back, and none compresses them, which would need several. Nothing stores them."""

    media_type = "text/event-stream"

    def init_headers(self, headers: Mapping[str, str] | None = None) -> None:
        unchanged = {"Cache-Control": "no-store, no-transform", "X-Accel-Buffering": "no"}
        super().init_headers({**(headers or {}), **unchanged})


def event_data(data: bytes) -> bytes:
    """The last line of a server-sent event, whose ``data`` is JSON, and its end. Characters at which clients such as
    httpx end a line are escaped; in JSON they stand in strings only."""
    for separator, escaped in LINE_SEPARATORS.items():
        data = data.replace(separator, escaped)
    return b"data: " + data + b"\n\n"


def error_response(
    status: int, error: str, problems: list[str] | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    body = ErrorResponse(error=" ".join(error.split()), problems=problems).model_dump_json(exclude_none=True)
    if status == 401:
        headers = {**(headers or {}), "WWW-Authenticate": "Bearer"}
    return Response(body, status, headers, media_type="application/json")


def path_error(path: str, status: int, line: str, headers: Mapping[str, str] | None = None) -> Response:
    """The response to a request that reached no route, in the shape of the API that has the path."""
    if not OPENAI_PATHS.match(path):
        return error_response(status, line, headers=headers)
    error = {"message": line, "type": "invalid_request_error", "param": None, "code": None}
    response = json_response({"error": error}, status)
    response.headers.update(headers or {})
    return response


def retry_headers(error: Exception) -> dict[str, str]:
    """The headers of a response to ``error`` that tell a client when to repeat its request, or not to: of their own,
    the SDKs of OpenAI and Tinker repeat each one that gets status 409 or 429."""
    if isinstance(error, Conflict) or (isinstance(error, TooManyRequests) and error.lasting):
        return {"x-should-retry": "false"}
    if isinstance(error, TooManyRequests | Unavailable):
        return {"Retry-After": str(ceil(error.retry_after))}
    return {}


def refusal(error: RookeryError) -> Response:
    """The response to an error of the service's own."""
    return error_response(error.status, str(error), getattr(error, "problems", None), retry_headers(error))


class UnexpectedErrors:
    """ASGI middleware that logs an exception which has no handler and answers it with status 500.

    The server closes the connection of an exception that reaches it, even after a whole response, and the client's next
    request on that connection would be lost. Only a response that has begun and is not complete ends its connection:
    nothing else shows the client that the rest is missing."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = complete = False

        async def watched(message: Message) -> None:
            nonlocal started, complete
            started = True
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:
            if started and not complete:
                raise
            log.error("%s %s failed", scope["method"], scope["path"], exc_info=error)
            if not started:
                await _unexpected(error)(scope, receive, send)


def _unexpected(error: Exception) -> Response:
    if (known_error := shortage(error)) is not None:
        return refusal(known_error)
    return error_response(500, f"internal error ({type(error).__name__}); the service's log has the traceback")


def add_exception_handlers(app: FastAPI) -> None:
    """Makes ``app`` return every error in this shape."""

    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, RookeryError)
        if error.status >= 500:
            log.warning("%s %s: %s", request.method, request.url.path, error)
        return refusal(error)

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problems = [": ".join(filter(None, problem(detail, request, error.body))) for detail in error.errors()]
        return error_response(422, "the request is refused: " + "; ".join(problems), problems)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            path = request.url.path  # below /v1 with a line break, which no route there takes
            return path_error(path, 404, f"nothing at {path}; /docs lists the routes")
        headers = error.headers
        if error.status_code == 405:  # Starlette names the methods of the first matching route only
            headers = {"Allow": ", ".join(method for method in METHODS if _is_allowed(request, method))}
        line = f"{request.method} {request.url.path}: {error.detail}"
        return error_response(error.status_code, line, headers=headers)

    async def disconnected(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # no client reads it

    async def scarce(request: Request, error: Exception) -> Response:
        known_error = shortage(error)
        if known_error is None:
            raise error
        return await known(request, known_error)

    app.add_exception_handler(RookeryError, known)
    app.add_exception_handler(ClientDisconnect, disconnected)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    for kind in (OSError, MemoryError, RuntimeError):  # the last: no memory for the stack of a thread
        app.add_exception_handler(kind, scarce)
    app.add_middleware(UnexpectedErrors)


def _is_allowed(request: Request, method: str) -> bool:
    scope = {**request.scope, "method": method}
    return any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)


def first_problem(details: Sequence[Any], given: Any) -> Any:
    """The first of pydantic's errors about ``given``. Of a field that may be of several types each has its errors: the
    one that looks deepest into the field's value is of the type that was meant."""
    first, *_ = details
    field = named_steps(first["loc"], given, first["type"])
    inside = [(detail, named_steps(detail["loc"], given, detail["type"])) for detail in details]
    return max((one for one in inside if one[1][: len(field)] == field), key=lambda one: len(one[1]))[0]


def named_steps(loc: Sequence[int | str], given: Any, kind: str) -> list[str]:
    """The fields and items by which an error of pydantic of this ``kind`` goes into ``given``: its place without the
    types that were tried."""
    steps = []
    for number, step in enumerate(loc):
        listed = isinstance(given, list) and isinstance(step, int) and step < len(given)
        if listed or (isinstance(given, Mapping) and step in given):
            given = given[step]
        elif not (kind == "missing" and number == len(loc) - 1):
            continue
        steps.append(str(step))
    return steps


_JSON = re.compile(r"application/(json|[^;]*\+json)\s*(;|$)")
"""Beginning of a ``Content-Type`` with which a body is read as JSON."""


def compression_of(request: Request) -> str:
    """Why a compressed body is refused; empty for one that is not compressed."""
    coding = request.headers.get("content-encoding", "").strip()
    if coding.lower() in ("", "identity"):
        return ""
    return f"the body has Content-Encoding {short(coding)}, which is not read; send it uncompressed"


def uploaded(request: Request) -> AsyncIterator[bytes]:
    """The pieces of a body that is stored as it is. Raises :class:`~rookery.errors.UserError` for a compressed one."""
    if compressed := compression_of(request):
        raise UserError(compressed)
    return aiter(request.stream())


def problem(detail: Any, request: Request, body: Any) -> tuple[str, str]:
    """The field that an error of pydantic concerns, empty for the ``body`` as a whole, and what is wrong with it."""
    first, *inner = detail["loc"]
    where = named_steps(inner, body, detail["type"]) if first == "body" else [str(part) for part in inner]
    if detail["type"] == "json_invalid":
        if compressed := compression_of(request):
            return "", compressed
        return "", f"the body is not JSON in UTF-8 ({detail.get('ctx', {}).get('error') or detail['msg']})"
    if not where:
        if detail["type"] == "missing":
            return "", "the body is empty; send a JSON object"
        kind = request.headers.get("content-type", "")
        if _JSON.match(kind.strip().lower()) is None:
            given = f"it has Content-Type {short(kind)}" if kind else "it has no Content-Type"
            return "", f"the body is not read as JSON: {given}; send it with Content-Type: application/json"
        return "", f"the body must be a JSON object ({detail['msg']})"
    if first == "query" and detail["type"] == "extra_forbidden":
        known = request.scope["route"].parameters()
        allowed = f"allowed: {', '.join(known)}" if known else "this route has none"
        return short(where[0]), "unknown parameter; " + (nearest(where[0], known) or allowed)
    if detail["type"] == "extra_forbidden" and (known := _body_fields(request)) and len(where) == 1:
        return where[0], "unknown field; " + (nearest(where[0], known) or f"allowed: {', '.join(known)}")
    return ".".join(where), mistake(detail)


def _body_fields(request: Request) -> list[str]:
    """The fields of the body that the route of a request takes; none where that is no object."""
    body = getattr(request.scope.get("route"), "body_field", None)
    model = getattr(getattr(body, "field_info", None), "annotation", None)
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []
