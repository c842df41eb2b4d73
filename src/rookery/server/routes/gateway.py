"""``/wire``: connections of workers and environment hosts, and transfers of artifacts and training data.

* A WebSocket is accepted for a key of the right role, and is then only a
  :class:`~rookery.protocol.connection.Connection` of the controller.
* A worker signs its reads of artifacts (:mod:`rookery.protocol.reads`), batches and uploads have a ticket; a hash is a
  name, not a permission. Without a valid signature or ticket the response is 404, as if the artifact did not exist.
* An upload is written from the socket to the disk in chunks, in a thread: it is never held whole, and no other request
  waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Annotated

from fastapi import APIRouter, Header, Request, Response, WebSocket
from starlette.requests import ClientDisconnect
from starlette.websockets import WebSocketDisconnect

from rookery import protocol
from rookery.controller.fleet.env_hosts import SERVICE
from rookery.errors import NotFound, RookeryError
from rookery.protocol.connection import ConnectionClosed
from rookery.server.auth import Service, ServiceContext, authenticate
from rookery.server.peft_archive import stream
from rookery.server.responses import json_response, refusal
from rookery.storage.store import read_within
from rookery.turns import work_of

HOP_BYTES = 1 << 20
"""Bytes passed to another thread at once: a thread switch costs more than writing one read of a socket."""

CLOSE_SECONDS = 5.0
"""Longest wait for a peer to read what was sent before the close frame."""

_NORMAL, _GOING_AWAY = 1000, 1001


class WebSocketConnection:
    """A connected WebSocket as a :class:`~rookery.protocol.connection.Connection`."""

    def __init__(self, socket: WebSocket, most: int, close_seconds: float = CLOSE_SECONDS) -> None:
        """``most``: bytes of a message after the hello."""
        self._close_seconds = close_seconds
        self._socket = socket
        self._most = most
        self._welcomed = False

    async def send(self, frame: bytes) -> None:
        try:
            await self._socket.send_bytes(frame)
            if not self._welcomed:  # the service's first frame answers the hello; a refusal ends the connection
                self._welcomed = True
                self._socket.state.connection.welcomed(self._most)
        except (WebSocketDisconnect, RuntimeError) as error:  # RuntimeError: a send after the close
            raise ConnectionClosed(str(error) or "the peer has disconnected") from None

    async def receive(self) -> bytes:
        await asyncio.sleep(0)  # a peer that sends without end leaves every other task its turn
        try:
            message = await self._socket.receive()
        except RuntimeError as error:
            raise ConnectionClosed(str(error)) from None
        if message["type"] != "websocket.receive":
            raise ConnectionClosed(f"closed with code {message.get('code', _NORMAL)}")
        content = message.get("bytes")
        return content if content is not None else str(message.get("text", "")).encode()

    async def close(self, reason: str) -> None:
        """The reason is sent in the close frame, cut to 123 bytes, which is its limit. A peer that reads nothing, as a
        process that was stopped, gets none: its connection ends after :data:`CLOSE_SECONDS`."""
        try:
            async with asyncio.timeout(self._close_seconds):
                await self._socket.close(_GOING_AWAY, reason.encode()[:123].decode(errors="ignore"))
        except TimeoutError:
            self._socket.state.connection.abort()
        except (WebSocketDisconnect, RuntimeError):
            return  # it is already closed


routes = APIRouter(prefix="/wire", include_in_schema=False)

Signature = Annotated[str, Header(alias=protocol.READ_HEADER)]


@routes.websocket("/worker")
async def worker(socket: WebSocket, service: Service) -> None:
    try:
        caller = await authenticate(socket, ("worker",))
    except RookeryError as error:
        await socket.send_denial_response(refusal(error))
        return
    await socket.accept()
    with work_of(""):  # it computes for all tenants
        await service.controller.serve_worker(WebSocketConnection(socket, protocol.MAX_FRAME), caller.key)


@routes.websocket("/host")
async def host(socket: WebSocket, service: Service) -> None:
    """Keys of workers belong to the service's own hosts, which have no limits."""
    with ExitStack() as hosting:
        try:
            caller = await authenticate(socket, ("worker", "host", "tenant", "admin"))
            owner, most = SERVICE, protocol.MAX_FRAME
            if caller.role != "worker":
                owner, most = caller.id, service.context.settings.edge.host_bytes
                hosting.enter_context(service.context.rooms.quotas.hosting(owner))
        except RookeryError as error:
            await socket.send_denial_response(refusal(error))
            return
        await socket.accept()
        hosting.enter_context(work_of(owner))
        await service.controller.serve_host(WebSocketConnection(socket, most), owner)


async def authorize(request: Request, service: ServiceContext, signature: str, digest: str) -> None:
    """Raises :class:`NotFound` unless a worker whose key is valid signed to read the artifact ``digest`` now."""
    key = service.controller.reads.reader(signature, digest)
    async with read_within():
        valid = key is not None and await service.credentials.keys.find(key) is not None
    if not valid:
        raise NotFound("no such artifact, or the signature is not valid now")
    request.state.signed = True


@routes.get("/artifacts/{digest}")
async def manifest(request: Request, service: Service, digest: str, signature: Signature = "") -> Response:
    await authorize(request, service, signature, digest)
    return json_response(await service.openers(service.context.artifacts.open, digest))


@routes.get("/artifacts/{digest}/{name}")
async def shard(
    request: Request, service: Service, digest: str, name: str, signature: Signature = "",
    range: Annotated[str | None, Header()] = None,
) -> Response:  # fmt: skip
    await authorize(request, service, signature, digest)
    return await service.openers(stream, service.context.artifacts, digest, name, range)


@routes.get("/batches/{ticket}")
async def batch(request: Request, service: Service, ticket: str) -> Response:
    content = service.controller.tickets.open_batch(ticket)
    if content is None:
        raise NotFound("no such batch, or it was retracted")
    request.state.signed = True
    return Response(content, media_type="application/octet-stream")


@routes.put("/uploads/{ticket}/{name}")
async def upload(service: Service, ticket: str, name: str, request: Request) -> Response:
    staging = service.controller.tickets.staging(ticket)
    if staging is None:
        raise NotFound("no such upload, or it has ended")
    request.state.signed = True
    try:
        writing = asyncio.get_running_loop().run_in_executor(service.uploading, staging.write, name, chunks(request))
        written: protocol.Shard = await writing
    except ClientDisconnect:
        raise UploadInterrupted(f"the upload of {name} was interrupted; nothing of it is stored") from None
    return json_response(written, 201)


class UploadInterrupted(RookeryError):
    """The sender disconnected during an upload."""

    status = 400


def chunks(request: Request) -> Iterator[bytes]:
    """The request's body for a consumer in another thread. Call it on the event loop; the iterator raises
    :class:`ClientDisconnect` when the sender disconnects."""
    loop = asyncio.get_running_loop()
    stream = request.stream()

    async def next_chunks() -> list[bytes]:
        """Empty at the end of the body."""
        found: list[bytes] = []
        while sum(map(len, found)) < HOP_BYTES and (chunk := await anext(stream, None)) is not None:
            if chunk:
                found.append(chunk)
        return found

    def consumed() -> Iterator[bytes]:
        while found := asyncio.run_coroutine_threadsafe(next_chunks(), loop).result():
            yield from found

    return consumed()
