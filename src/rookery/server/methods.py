"""Request methods, for the application as a whole.

* A slash at the end of a path makes no difference: a redirect would lose a client's key or body, and behind a proxy
  name the wrong scheme.
* A path of Azure below ``/openai`` is the path of OpenAI below ``/v1``, except for those whose deployment names the
  model (:mod:`rookery.server.routes.azure`).
* HEAD is answered as GET without its body (RFC 9110, section 9.3.2), also on paths whose GET would stream without end.
* A method that a path does not have is status 405 with the methods that it has, where another route, such as
  ``/v1/{path}`` or ``/jobs/{job}``, would take the request and find nothing; also below mounts.
* A plain request for the path of a WebSocket is status 426: a proxy before the service has removed the headers.
* A path that no object has for its length is status 414.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Iterable

from starlette.routing import BaseRoute, Route, WebSocketRoute, compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rookery.aio import unless
from rookery.server.responses import METHODS, error_response, path_error

UPGRADE = (
    "{path} takes WebSockets; a proxy before the service must pass on the headers Connection and Upgrade"
    " (nginx: proxy_http_version 1.1; proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection upgrade)"
)


AZURE = re.compile("/openai/(v1/|deployments/[^/]+/)?(?=.)")
"""The part of a path of Azure that stands for ``/v1/``."""

LONGEST_PATH = 2048
"""Characters of a path: names and ids have hundreds at most, and errors repeat them."""


class RequestMethods:
    """ASGI middleware over the application's routes, each with the path under which it is mounted."""

    def __init__(self, app: ASGIApp, routes: Iterable[tuple[str, BaseRoute]]) -> None:
        self._app = app
        self._methods: defaultdict[str, set[str]] = defaultdict(set)
        """By path, of routes without parameters."""
        self._patterns: list[tuple[str, re.Pattern[str], set[str]]] = []
        """Of routes with parameters: what the path begins with, what it matches, the methods."""
        self._sockets: set[str] = set()
        for mount, route in routes:
            if isinstance(route, WebSocketRoute):
                self._sockets.add(mount + route.path)
                continue
            if not isinstance(route, Route):
                continue
            path, methods = mount + route.path, (route.methods or set()) & {*METHODS}
            if "{" in path and methods == {*METHODS}:  # it says that there is nothing
                continue
            if "{" in path:
                self._patterns.append((path.partition("{")[0], compile_path(path)[0], methods))
            else:
                self._methods[path] |= methods

    def _methods_of(self, path: str) -> set[str]:
        """Empty where no route has the path."""
        if path in self._methods:
            return self._methods[path]
        found = (methods for start, rest, methods in self._patterns if path.startswith(start) and rest.match(path))
        return set().union(*found)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"].endswith("/") and not scope["path"].endswith("//"):
            scope = {**scope, "path": scope["path"].removesuffix("/") or "/"}
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (azure := AZURE.match(scope["path"])) and not self._methods_of(scope["path"]):
            scope = {**scope, "path": "/v1/" + scope["path"][azure.end() :]}
        path, method = scope["path"], "GET" if scope["method"] == "HEAD" else scope["method"]
        if len(path) > LONGEST_PATH:
            line = f"the path has {len(path)} characters, allowed: at most {LONGEST_PATH}"
            await path_error(path, 414, line)(scope, receive, send)
            return
        if path in self._sockets:
            response = error_response(426, UPGRADE.format(path=path), headers={"Upgrade": "websocket"})
            await response(scope, receive, send)
            return
        methods = self._methods_of(path)
        if methods and method not in methods:
            allowed = ", ".join(sorted(methods))
            response = path_error(path, 405, f"{method} {path}: this path has only {allowed}", {"Allow": allowed})
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
