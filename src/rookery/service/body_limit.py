"""How large a request's body may be.

Promise: no request holds more memory than the service allows one body, whoever sends it and whether it has a key or
not: reading ends, and 413 is answered, with the piece that is too much. What workers upload with a ticket goes to the
disk in pieces and is counted there.
"""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

WIRE = "/wire/"


class BodyLimit:
    """ASGI middleware of the application that has the service's parts."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(WIRE):
            await self._app(scope, receive, send)
            return
        most, read = scope["app"].state.parts.settings.upload_bytes, 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > most:
                raise HTTPException(
                    413, f"the body has more than {most} bytes; the service's ROOKERY_UPLOAD_BYTES allows no more"
                )
            return message

        await self._app(scope, counted, send)
