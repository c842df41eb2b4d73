"""A small HTTP server in a worker: hands adapters of its cache to other workers.

Promises:

* Nothing is handed out but what the controller said to lend, to whoever brings the ticket that it named, until that is
  over. Everything else is 404, as if it were not there: other artifacts, other names, the trainer's state.
* Ranges are answered, so that a receiver goes on from the byte where another source stopped.
* It runs in a thread of its own, and a bounded number of answers at a time: neither computing nor the worker's link
  waits for it. Past the bound it answers 503, and the receiver asks elsewhere.
* Bytes go out as they lie on the disk. The receiver has their hash and checks them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from rookery import protocol
from rookery.errors import UserError
from rookery.worker.transfer.cache import MANIFEST, MARK, TRAINER_STATE

log = logging.getLogger("rookery.worker.transfer.peer_server")

AT_ONCE = 4
"""Answers at a time: more would only be slower each, and take the machine's network from the worker's own tokens."""

STOP_SECONDS = 2.0
"""What open answers get to end when the worker does."""


class PeerServer:
    """Made and told on the I/O thread; ``root`` holds one folder per artifact."""

    def __init__(self, root: Path, listening: socket.socket) -> None:
        self._root = root
        self._lent: dict[tuple[str, str], float] = {}
        """(hash, ticket) → until when; monotonic."""
        self._busy = 0
        routes = [Route("/artifacts/{digest}", self._manifest), Route("/artifacts/{digest}/{name}", self._shard)]
        config = uvicorn.Config(
            Starlette(routes=routes),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=round(STOP_SECONDS),
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name="lender", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """The thread has ended, or hangs in an answer that nobody reads: then it ends with the process."""
        self._server.should_exit = True
        await asyncio.to_thread(self._thread.join, 2 * STOP_SECONDS)

    def serve(self, digest: str, ticket: str, seconds: float) -> None:
        """Hand out the artifact ``digest`` to whoever brings ``ticket``, for ``seconds`` from now."""
        now = time.monotonic()
        good = {loan: until for loan, until in self._lent.items() if until > now}
        self._lent = good | {(digest, ticket): now + seconds}

    def revoke(self, digest: str) -> None:
        """Nobody shall have this artifact any more."""
        self._lent = {loan: until for loan, until in self._lent.items() if loan[0] != digest}

    # --- in its own thread --------------------------------------------------------------------------------------------

    def _opens(self, request: Request) -> Path | None:
        """The artifact's folder, where the request may read it and it lies whole."""
        digest = request.path_params["digest"]
        ticket = request.headers.get("x-rookery-ticket", "")
        until = self._lent.get((digest, ticket))  # a hash that was lent is one: no path can hide in it
        if until is None or until <= time.monotonic():
            return None
        folder = self._root / digest
        return folder if (folder / MARK).exists() else None

    async def _manifest(self, request: Request) -> Response:
        folder = self._opens(request)
        return Response(status_code=404) if folder is None else self._answer(folder / MANIFEST)

    async def _shard(self, request: Request) -> Response:
        folder, name = self._opens(request), request.path_params["name"]
        if folder is None or name == TRAINER_STATE or name not in _names(folder):
            return Response(status_code=404)
        return self._answer(folder / name)

    def _answer(self, path: Path) -> Response:
        if not path.is_file():
            return Response(status_code=404)
        if self._busy >= AT_ONCE:
            return Response(status_code=503)
        return _Lent(self, path)


class _Lent(FileResponse):
    """A file, or the asked range of it, that counts as one answer until it is over."""

    chunk_size = 1 << 20

    def __init__(self, lender: PeerServer, path: Path) -> None:
        super().__init__(path, media_type="application/octet-stream")
        self._lender = lender

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self._lender._busy += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._lender._busy -= 1


def _names(folder: Path) -> set[str]:
    """Names of the artifact's shards."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=protocol.Manifest)
    except (OSError, msgspec.MsgspecError):  # evicted just now, or damaged: it is not there
        return set()
    return {shard.name for shard in manifest.shards}


def listen(base: str, address: str | None, port: int | None) -> tuple[socket.socket | None, str]:
    """Where to lend adapters, and the address that others are told: none unless an address was given or a port for it.
    The address is the one that this machine has towards the service ``base``, unless given. Raises
    :class:`UserError`."""
    if address is None and port is None:
        return None, ""
    given = urlsplit(f"//{address or ''}")
    try:
        host, told = given.hostname or "", given.port
    except ValueError:
        raise UserError(f"--address: given {address!r}, allowed is HOST or HOST:PORT") from None
    if (told is None and port is None) or (address is not None and not host):
        raise UserError(f"--address: given {address!r}, allowed is HOST:PORT, or HOST beside --peer-port")
    own = port if port is not None else told or 0
    try:
        host = host or _towards(base)
        wide = socket.has_dualstack_ipv6()
        listening = socket.create_server(
            ("", own), family=socket.AF_INET6 if wide else socket.AF_INET, dualstack_ipv6=wide
        )
    except (OSError, OverflowError) as error:
        raise UserError(f"port {own} cannot be listened on for other workers ({error}); give --peer-port") from None
    shown = f"[{host}]" if ":" in host else host
    return listening, f"http://{shown}:{told or listening.getsockname()[1]}"


def _towards(base: str) -> str:
    """This machine's address on the way to the service."""
    service = urlsplit(base)
    found = socket.getaddrinfo(service.hostname, service.port or 80, type=socket.SOCK_DGRAM)
    family, kind, protocol, _, to = found[0]
    with socket.socket(family, kind, protocol) as way:
        way.connect(to)  # sends nothing
        return str(way.getsockname()[0])
