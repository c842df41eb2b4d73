"""What every face answers with: JSON of typed data, and errors in one shape.

An error is ``{"error": "<one line>"}`` with the status of its class, and ``"problems"`` where there are several lines.
What was not foreseen is 500 with a line that says where the traceback is; it never shows one.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from rookery.errors import RookeryError

log = logging.getLogger("rookery.server")


class Problem(BaseModel):
    """Why a request was refused, for a person to read."""

    error: str
    problems: list[str] | None = None


PROBLEMS: dict[int | str, dict[str, Any]] = {
    401: {"model": Problem, "description": "No key, or one that is not known"},
    404: {"model": Problem, "description": "Nothing by that name belongs to this tenant"},
    422: {"model": Problem, "description": "The request is refused; problems says every reason"},
    503: {"model": Problem, "description": "What it needs is not there now; trying again later can help"},
}
"""For ``responses=`` of a route, so that the API's documentation shows them."""


def json_response(content: Any, status: int = 200) -> Response:
    """``content`` (JSON-like data, structs included) as JSON; numbers that are not finite become null."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def error_response(status: int, error: str, problems: list[str] | None = None) -> Response:
    body: dict[str, Any] = {"error": " ".join(error.split())}
    if problems is not None:
        body["problems"] = problems
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def add_exception_handlers(app: FastAPI) -> None:
    """Makes every error of ``app`` answer in this shape."""

    async def known(request: Request, error: Exception) -> Response:
        assert isinstance(error, RookeryError)
        if error.status >= 500:
            log.warning("%s %s: %s", request.method, request.url.path, error)
        return error_response(error.status, str(error), getattr(error, "problems", None))

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problems = [_line(detail) for detail in error.errors()]
        return error_response(422, "the request is refused: " + "; ".join(problems), problems)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 404:
            return error_response(404, f"nothing at {request.url.path}; /docs lists what there is")
        return error_response(error.status_code, f"{request.method} {request.url.path}: {error.detail}")

    async def unforeseen(request: Request, error: Exception) -> Response:
        return error_response(500, f"internal error ({type(error).__name__}); the service's log has the traceback")

    app.add_exception_handler(RookeryError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, unforeseen)


def _line(detail: Any) -> str:
    where = ".".join(str(part) for part in detail["loc"] if part not in ("body", "query", "path")) or "body"
    return f"{where}: {detail['msg']}"
