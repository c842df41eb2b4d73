"""``/wire``: where workers and environment hosts dial in, and where big things are read and written with tickets.

* A WebSocket is a :class:`~rookery.protocol.connection.Link` and nothing more: who may speak is decided by the
  controller
  from the first frame.
* Bytes need a ticket; neither a hash nor a name opens anything. What a ticket does not open is 404, as if it were not
  there.
* Uploads go from the socket to the disk in pieces, in a thread: nothing is held whole, and no other request waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Header, Request, Response, WebSocket
from fastapi.responses import FileResponse
from starlette.requests import ClientDisconnect
from starlette.websockets import WebSocketDisconnect

from rookery import protocol
from rookery.errors import NotFound, RookeryError
from rookery.protocol.connection import ConnectionClosed
from rookery.server.auth import Service
from rookery.server.responses import json_response

HOP_BYTES = 1 << 20
"""Handed to another thread at once: a hop costs more than writing what a socket gives at a time."""

_NORMAL, _GOING_AWAY = 1000, 1001


class WebSocketLink:
    """A connected WebSocket as the controller sees it."""

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket

    async def send(self, frame: bytes) -> None:
        try:
            await self._socket.send_bytes(frame)
        except (WebSocketDisconnect, RuntimeError) as error:  # RuntimeError: a send after the close went out
            raise ConnectionClosed(str(error) or "the other end is gone") from None

    async def receive(self) -> bytes:
        try:
            message = await self._socket.receive()
        except RuntimeError as error:
            raise ConnectionClosed(str(error)) from None
        if message["type"] != "websocket.receive":
            raise ConnectionClosed(f"closed with code {message.get('code', _NORMAL)}")
        content = message.get("bytes")
        return content if content is not None else str(message.get("text", "")).encode()

    async def close(self, reason: str) -> None:
        """The reason travels in the close frame, cut to the 123 bytes that there is room for."""
        try:
            await self._socket.close(_GOING_AWAY, reason.encode()[:123].decode(errors="ignore"))
        except (WebSocketDisconnect, RuntimeError):
            return  # it was closed already, which is what was asked for


class Served(FileResponse):
    """A file, or the range of it that was asked for, in pieces large enough that the thread hops between them do not
    matter."""

    chunk_size = 1 << 20


routes = APIRouter(prefix="/wire", include_in_schema=False)

Ticket = Annotated[str, Header(alias="X-Rookery-Ticket")]


@routes.websocket("/worker")
async def worker(socket: WebSocket, service: Service) -> None:
    await socket.accept()
    await service.controller.serve_worker(WebSocketLink(socket))


@routes.websocket("/host")
async def host(socket: WebSocket, service: Service) -> None:
    await socket.accept()
    await service.controller.serve_host(WebSocketLink(socket))


@routes.get("/artifacts/{digest}")
async def manifest(service: Service, digest: str, ticket: Ticket = "") -> Response:
    if not service.controller.tickets.reads(ticket, digest):
        raise NotFound("no such artifact, or the ticket is over")
    return json_response(await asyncio.to_thread(service.artifacts.open, digest))


@routes.get("/artifacts/{digest}/{name}")
async def shard(service: Service, digest: str, name: str, ticket: Ticket = "") -> Response:
    if not service.controller.tickets.reads(ticket, digest):
        raise NotFound("no such artifact, or the ticket is over")
    path = await asyncio.to_thread(service.artifacts.path, digest, name)
    return Served(path, media_type="application/octet-stream")


@routes.get("/offers/{ticket}")
async def offer(service: Service, ticket: str) -> Response:
    content = service.controller.tickets.open_batch(ticket)
    if content is None:
        raise NotFound("no such offer, or it was withdrawn")
    return Response(content, media_type="application/octet-stream")


@routes.put("/uploads/{ticket}/{name}")
async def upload(service: Service, ticket: str, name: str, request: Request) -> Response:
    staging = service.controller.tickets.staging(ticket)
    if staging is None:
        raise NotFound("no such upload, or it is over")
    try:
        written: protocol.Shard = await asyncio.to_thread(staging.write, name, pieces(request))
    except ClientDisconnect:
        raise BrokenUpload(f"upload of {name} broke off; nothing of it is kept") from None
    return json_response(written, 201)


class BrokenUpload(RookeryError):
    """The sender went away in the middle."""

    status = 400


def pieces(request: Request) -> Iterator[bytes]:
    """The request's body for a consumer in another thread, in pieces as the socket gives them. Call it on the event
    loop; raises :class:`ClientDisconnect` there where the sender goes away."""
    loop = asyncio.get_running_loop()
    stream = request.stream()

    async def following() -> list[bytes]:
        """None are left when it is empty."""
        found: list[bytes] = []
        while sum(map(len, found)) < HOP_BYTES and (piece := await anext(stream, None)) is not None:
            if piece:
                found.append(piece)
        return found

    def consumed() -> Iterator[bytes]:
        while found := asyncio.run_coroutine_threadsafe(following(), loop).result():
            yield from found

    return consumed()
