"""Request methods, for the application as a whole.

* A slash at the end of a path makes no difference: a redirect would lose a client's key or body, and behind a proxy
  name the wrong scheme.
* HEAD is answered as GET without its body (RFC 9110, section 9.3.2), also on paths whose GET would stream without end.
* A method that a path does not have is status 405 with the methods that it has, where another route, such as
  ``/v1/{path}`` or ``/jobs/{job}``, would take the request and find nothing.
* A plain request for the path of a WebSocket is status 426: a proxy before the service has removed the headers.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable

from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rookery.aio import unless
from rookery.server.responses import METHODS, error_response, json_response

UPGRADE = (
    "{path} takes WebSockets; a proxy before the service must pass on the headers Connection and Upgrade"
    " (nginx: proxy_http_version 1.1; proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection upgrade)"
)


class RequestMethods:
    """ASGI middleware over the application's routes."""

    def __init__(self, app: ASGIApp, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._methods: defaultdict[str, set[str]] = defaultdict(set)
        """By path, of routes without parameters."""
        self._sockets: set[str] = set()
        for route in routes:
            if isinstance(route, WebSocketRoute):
                self._sockets.add(route.path)
            elif isinstance(route, Route) and "{" not in route.path:
                self._methods[route.path] |= (route.methods or set()) & {*METHODS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"].endswith("/") and not scope["path"].endswith("//"):
            scope = {**scope, "path": scope["path"].removesuffix("/") or "/"}
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, method = scope["path"], "GET" if scope["method"] == "HEAD" else scope["method"]
        if path in self._sockets:
            response = error_response(426, UPGRADE.format(path=path), headers={"Upgrade": "websocket"})
            await response(scope, receive, send)
            return
        methods = self._methods.get(path)
        if methods and method not in methods:
            allowed = ", ".join(sorted(methods))
            line, headers = f"{method} {path}: this path has only {allowed}", {"Allow": allowed}
            if path.startswith(("/v1/", "/inference/v1/")):
                error = {"message": line, "type": "invalid_request_error", "param": None, "code": None}
                response = json_response({"error": error}, 405)
                response.headers.update(headers)
            else:
                response = error_response(405, line, headers=headers)
            await response(scope, receive, send)
            return
        if scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        started = asyncio.Event()

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                started.set()

        # What follows the head would be the body, of a stream without an end.
        await unless(started.wait(), self._app({**scope, "method": "GET"}, receive, without_body))
