"""The service's side of the wire, in the test's own process: a WebSocket that workers dial in to, and transfers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import uvicorn
from fastapi import FastAPI, Header, Request, Response, WebSocket
from fastapi.responses import FileResponse, JSONResponse
from starlette.websockets import WebSocketDisconnect

from rookery import protocol
from rookery.clock import SystemClock
from rookery.controller.weights.tickets import Tickets
from rookery.storage.artifacts import Artifacts

PATIENCE_SECONDS = 120.0
"""A test that waits longer for something fails: far more than a loaded machine needs to load a small model."""

READ_KEY = protocol.read_key("the token's hash")

M = TypeVar("M")


class Connection:
    """One worker's connection: what it said, in order."""

    def __init__(self, service: Dialled, socket: WebSocket, hello: protocol.Hello, epoch: int) -> None:
        self.service = service
        self.hello = hello
        self.epoch = epoch
        self.frames: list[Any] = []
        self.closed = False
        self._socket = socket

    def send(self, *messages: protocol.Message) -> None:
        """Sends them without a pause, so that the worker answers none before it has all."""

        async def send() -> None:
            for message in messages:
                await self._socket.send_bytes(protocol.encode(message))

        self.service.run(send())

    def drop(self) -> None:
        """End the connection from this side."""
        self.service.run(self._socket.close())

    # --- what has been said ---

    def of(self, kind: type[M]) -> list[M]:
        return [frame for frame in self.frames if isinstance(frame, kind)]

    def done(self, op: str) -> protocol.OperationDone:
        """Waits for the answer to an operation."""
        return self.service.until(
            lambda: next((done for done in self.of(protocol.OperationDone) if done.op == op), None)
        )

    def stream(self, request: str) -> Stream:
        return Stream([chunk for out in self.of(protocol.Output) for chunk in out.chunks if chunk.request == request])

    def finished(self, request: str) -> Stream:
        """Waits for the end of a request."""
        return self.service.until(lambda: (s := self.stream(request)).finish and s)

    def some(self, request: str, count: int) -> Stream:
        """Waits for at least ``count`` tokens of a request."""
        return self.service.until(lambda: len((s := self.stream(request)).tokens) >= count and s)


class Stream:
    """A request's chunks put together; they must join without gap or overlap."""

    def __init__(self, chunks: list[protocol.TokenChunk]) -> None:
        self.chunks = chunks
        self.tokens = [token for chunk in chunks for token in chunk.tokens]
        self.logprobs = [value for chunk in chunks for value in chunk.logprobs]
        self.first = chunks[0].offset if chunks else 0
        self.finish = chunks[-1].finish if chunks else ""
        self.error = chunks[-1].error if chunks else ""
        at = self.first
        for chunk in chunks:
            assert chunk.offset == at
            at += len(chunk.tokens)
            assert chunk.finish == "" or chunk is chunks[-1]


class Dialled:
    """Listens in a thread of its own. ``welcome`` makes the answer to a Hello."""

    def __init__(self, folder: Path, token: str = "token") -> None:
        self.artifacts = Artifacts(folder)
        self.tickets = Tickets(self.artifacts, SystemClock(), seconds=600)
        self.connections: list[Connection] = []
        self.requests: list[tuple[str, str]] = []
        """(path, Range header) of every artifact read."""
        self.refused: set[str] = set()
        """Artifacts that nobody may read."""
        self.cut: int | None = None
        """Artifact answers break off after this many bytes."""
        self.answers_held: threading.Event | None = None
        """Artifact answers that would break off wait for this instead, and go on."""
        self.uploads = threading.Event()
        """Set once an upload has begun."""
        self.uploads_held: threading.Event | None = None
        """Uploads do not end before this is set."""
        self.heartbeat_seconds, self.flush_seconds, self.resume_seconds = 0.2, 0.05, 15.0
        self._token = token
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        config = uvicorn.Config(self._app(), host="127.0.0.1", port=0, log_level="warning", ws="websockets-sansio")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._server.serve()), daemon=True)

    def __enter__(self) -> Dialled:
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.01)
        port = self._server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()
        self._loop.close()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_SECONDS)

    def until(self, condition: Callable[[], M | bool | None]) -> M:
        """Waits until something that workers say makes ``condition`` true, and answers with its value."""
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE_SECONDS), "it did not come to that"
            return condition()  # type: ignore[return-value]

    def connection(self, number: int) -> Connection:
        """Waits for the ``number``-th connection, from 0."""
        return self.until(lambda: self.connections[number] if len(self.connections) > number else None)

    def ref(
        self, manifest: protocol.Manifest, version: int, policy: str = "policy", sources: Sequence[str] = ()
    ) -> protocol.AdapterRef:
        return protocol.AdapterRef(
            policy=policy, version=version, hash=manifest.hash, rank=4, alpha=8.0, sources=list(sources)
        )

    def welcome(self, name: str, epoch: int) -> protocol.Welcome:
        """The answer to a Hello."""
        return protocol.Welcome(
            name=name, epoch=epoch, heartbeat_seconds=self.heartbeat_seconds, flush_seconds=self.flush_seconds,
            reads=READ_KEY, time=time.time(), resume_seconds=self.resume_seconds,
        )  # fmt: skip

    def permits(self, header: str, digest: str) -> bool:
        """Whether a worker of this service signed the header, and the artifact is not refused."""
        secret = READ_KEY.secret
        return digest not in self.refused and protocol.may_read(header, digest, time.time(), lambda id: secret)

    def store(self, files: dict[str, bytes]) -> protocol.Manifest:
        staging = self.artifacts.begin()
        for name, content in files.items():
            staging.write(name, [content])
        return staging.commit()

    def collect(self, ticket: str) -> protocol.Manifest:
        """Commits what was uploaded."""
        staging = self.tickets.collect(ticket)
        assert staging is not None
        return staging.commit()

    def _app(self) -> FastAPI:
        app = FastAPI()

        @app.websocket("/wire/worker")
        async def worker(socket: WebSocket) -> None:
            if socket.headers["authorization"] != f"Bearer {self._token}":
                await socket.send_denial_response(JSONResponse({"error": "the token is wrong"}, 401))
                return
            await socket.accept()
            hello = protocol.decode(protocol.from_worker, await socket.receive_bytes())
            assert isinstance(hello, protocol.Hello)
            connection = Connection(self, socket, hello, 100 + len(self.connections))
            welcome = self.welcome(hello.name, connection.epoch)
            await socket.send_bytes(protocol.encode(welcome))
            with self._changed:
                self.connections.append(connection)
                self._changed.notify_all()
            try:
                while True:
                    frame = protocol.decode(protocol.from_worker, await socket.receive_bytes())
                    with self._changed:
                        assert frame.epoch == connection.epoch
                        connection.frames.append(frame)
                        self._changed.notify_all()
            except (WebSocketDisconnect, RuntimeError):
                with self._changed:
                    connection.closed = True
                    self._changed.notify_all()

        @app.get("/wire/artifacts/{digest}")
        async def manifest(digest: str, x_rookery_read: str = Header("")) -> Response:
            if not self.permits(x_rookery_read, digest):
                return Response(status_code=404)
            return Response(msgspec.json.encode(self.artifacts.open(digest)))

        @app.get("/wire/artifacts/{digest}/{name}")
        async def shard(digest: str, name: str, request: Request, x_rookery_read: str = Header("")) -> Response:
            if not self.permits(x_rookery_read, digest):
                return Response(status_code=404)
            self.requests.append((f"{digest}/{name}", request.headers.get("range", "")))
            path = self.artifacts.root / digest / name
            if self.cut is None:
                return FileResponse(path)
            return _Broken(path, self.cut, self.answers_held)

        @app.get("/wire/batches/{ticket}")
        async def offer(ticket: str) -> Response:
            content = self.tickets.open_batch(ticket)
            return Response(status_code=404) if content is None else Response(content)

        @app.put("/wire/uploads/{ticket}/{name}")
        async def upload(ticket: str, name: str, request: Request) -> Response:
            staging = self.tickets.staging(ticket)
            if staging is None:
                return Response(status_code=404)
            content = await request.body()
            self.uploads.set()
            if self.uploads_held is not None:
                await asyncio.to_thread(self.uploads_held.wait, PATIENCE_SECONDS)
            await asyncio.to_thread(staging.write, name, [content])
            return Response(status_code=201)

        return app


class _Broken(FileResponse):
    """A file, or a range of it, whose connection breaks, or waits, after some bytes."""

    def __init__(self, path: Path, cut: int, held: threading.Event | None) -> None:
        super().__init__(path)
        self.chunk_size = 1024
        self._cut = cut
        self._held = held

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        sent = 0

        async def limited(message: Any) -> None:
            nonlocal sent
            if message["type"] == "http.response.body":
                sent += len(message["body"])
                if sent > self._cut and self._held is not None:
                    await asyncio.to_thread(self._held.wait, PATIENCE_SECONDS)
                elif sent > self._cut:
                    raise ConnectionAbortedError("the test breaks this answer")
            await send(message)

        await super().__call__(scope, receive, limited)
