"""How large a request's body may be.

Promise: no request holds more memory than the service allows one body, whoever sends it and whether it has a key or
not: reading ends, and 413 is answered, with the piece that is too much. What workers upload with a ticket goes to the
disk in pieces and is counted there.

Only uploads and training data may be that large. Other bodies are JSON, which is parsed on the event loop: everybody
waits meanwhile.
"""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

WIRE = "/wire/"

LARGE = frozenset({"/api/v1/datasets", "/api/v1/adapters", "/tinker/api/v1/forward_backward"})
"""Paths whose bodies may be as large as the service allows any: files, and a batch in protobuf."""

JSON_BYTES = 16 << 20
"""The largest JSON body: parsing it takes a fifth of a second. A prompt of 100,000 token ids is below 1 MB; rows of a
job can be uploaded instead."""


class BodyLimit:
    """ASGI middleware of the application that has the service's parts."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(WIRE):
            await self._app(scope, receive, send)
            return
        most, read = scope["app"].state.parts.settings.server.upload_bytes, 0
        reason = "the service's ROOKERY_UPLOAD_BYTES allows no more"
        if scope["path"] not in LARGE and most > JSON_BYTES:
            most, reason = JSON_BYTES, "JSON may have no more: upload a job's rows (POST /api/v1/datasets)"

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > most:
                raise HTTPException(413, f"the body has more than {most} bytes; {reason}")
            return message

        await self._app(scope, counted, send)
