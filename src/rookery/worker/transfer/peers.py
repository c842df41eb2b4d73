"""Adapters between workers: :class:`PeerServer` serves those of this worker's cache, :class:`PeerClient` pulls others'.

Promises of the server:

* It serves only the artifacts that the controller named, to requests with the ticket that the controller named, until
  that ticket expires. Every other request gets 404: other artifacts, other file names, the trainer's state.
* It answers byte ranges, so that a receiver continues at the byte where another source stopped.
* It runs in its own thread and serves a bounded number of requests at a time, so neither computation nor the worker's
  connection waits for it. Above the bound it answers 503, and the receiver uses another source.
* Bytes are served as they are on disk. The receiver has their hash and verifies them.

Promises of the client:

* A peer is asked only for the artifacts that the controller named it for, with the ticket that it named.
* A peer that fails, or sends nothing for the timeout, is left at the byte where it stopped. If it was unreachable,
  broke the connection or sent wrong bytes, it is not asked again for a while; if it lacks the artifact or is busy, it
  may be asked for the next one.
* No method raises: the service has every artifact that peers do not serve.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import uvicorn
from cachetools import LRUCache
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from rookery import protocol
from rookery.errors import UserError
from rookery.network import join_address
from rookery.worker.transfer.cache import COMPLETE, MANIFEST, is_state
from rookery.worker.transfer.http import (
    RetryTransfer,
    TicketRefused,
    TransferFailed,
    decode_manifest,
    download,
    fetch_manifest,
    one_line,
    size_of,
)

log = logging.getLogger("rookery.worker.transfer.peers")

KEPT_TICKETS = 1024
"""Artifacts whose ticket and peers are kept, the last used ones: a ticket is valid for minutes, and a new one is
requested where it is missing."""

MAX_RESPONSES = 4
"""Responses at a time: more would each be slower, and take network bandwidth from the worker's own tokens."""

BLOCK_BYTES = 1 << 20
"""Bytes read from disk and sent at once."""

STOP_SECONDS = 2.0
"""Time for open responses to complete when the worker ends."""

BACKOFF_SECONDS = 60.0
"""A peer that failed is not asked again for this long: it may be gone, or unreachable from here."""


class PeerServer:
    """Methods belong to the I/O thread; ``root`` holds one folder per artifact."""

    def __init__(self, root: Path, listening: socket.socket) -> None:
        self._root = root
        self._expiry: dict[tuple[str, str], float] = {}
        """(hash, ticket) → monotonic time until which it is served."""
        self._responses = 0
        self._routes = Starlette(
            routes=[Route("/artifacts/{digest}", self._manifest), Route("/artifacts/{digest}/{name}", self._shard)]
        )
        config = uvicorn.Config(
            self._bounded,
            interface="asgi3",
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=round(STOP_SECONDS),
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name="peer-server", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """Waits for the thread to end; one that is stuck in a response ends with the process."""
        self._server.should_exit = True
        await asyncio.to_thread(self._thread.join, 2 * STOP_SECONDS)

    def serve(self, digest: str, ticket: str, seconds: float) -> None:
        """Serve the artifact ``digest`` to requests with ``ticket``, for ``seconds`` from now."""
        now = time.monotonic()
        valid = {served: until for served, until in self._expiry.items() if until > now}
        self._expiry = valid | {(digest, ticket): now + seconds}

    def revoke(self, digest: str) -> None:
        """Stop serving this artifact."""
        self._expiry = {served: until for served, until in self._expiry.items() if served[0] != digest}

    # --- in the server's thread -------------------------------------------------------------------------------------

    async def _bounded(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI application: 503 while the bound is reached."""
        if self._responses >= MAX_RESPONSES:
            await Response(status_code=503)(scope, receive, send)
            return
        self._responses += 1
        try:
            await self._routes(scope, receive, send)
        finally:
            self._responses -= 1

    async def _manifest(self, request: Request) -> Response:
        folder = self._authorized(request)
        return Response(status_code=404) if folder is None else _file(folder / MANIFEST)

    async def _shard(self, request: Request) -> Response:
        folder, name = self._authorized(request), request.path_params["name"]
        if folder is None or is_state(name) or name not in _shard_names(folder):
            return Response(status_code=404)
        return _file(folder / name)

    def _authorized(self, request: Request) -> Path | None:
        """The artifact's folder if the request may read it and it is complete."""
        digest = request.path_params["digest"]
        ticket = request.headers.get("x-rookery-ticket", "")
        until = self._expiry.get((digest, ticket))  # the digest is a known hash, so it cannot contain a path
        if until is None or until <= time.monotonic():
            return None
        folder = self._root / digest
        return folder if (folder / COMPLETE).exists() else None


def _file(path: Path) -> Response:
    if not path.is_file():
        return Response(status_code=404)
    response = FileResponse(path, media_type="application/octet-stream")
    response.chunk_size = BLOCK_BYTES
    return response


def _shard_names(folder: Path) -> set[str]:
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=protocol.Manifest)
    except (OSError, msgspec.MsgspecError):  # just evicted, or damaged
        return set()
    return {shard.name for shard in manifest.shards}


def listen(base: str, address: str | None, port: int | None) -> tuple[socket.socket | None, str]:
    """The socket of the peer server and the URL that other workers use; ``(None, "")`` without ``address`` and
    ``port``. The URL's host is ``address`` or else this machine's address on the route to the service ``base``.
    Raises :class:`UserError`."""
    if address is None and port is None:
        return None, ""
    parsed = urlsplit(f"//{address or ''}")
    try:
        host, public_port = parsed.hostname or "", parsed.port
    except ValueError:
        raise UserError(f"--address: given {address!r}, allowed is HOST or HOST:PORT") from None
    if (public_port is None and port is None) or (address is not None and not host):
        raise UserError(f"--address: given {address!r}, allowed is HOST:PORT, or HOST with --peer-port")
    local_port = port if port is not None else public_port or 0
    try:
        host = host or _own_address(base)
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        listening = socket.create_server(("", local_port), family=family, dualstack_ipv6=dual)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on port {local_port} for other workers ({error}); give --peer-port") from None
    return listening, join_address("http", host, public_port or listening.getsockname()[1])


def _own_address(base: str) -> str:
    """This machine's address on the route to the service."""
    service = urlsplit(base)
    found = socket.getaddrinfo(service.hostname, service.port or 80, type=socket.SOCK_DGRAM)
    family, kind, protocol_number, _, target = found[0]
    with socket.socket(family, kind, protocol_number) as probe:
        probe.connect(target)  # sends nothing
        return str(probe.getsockname()[0])


class PeerClient:
    """Belongs to the I/O thread."""

    def __init__(self, timeout_seconds: float) -> None:
        """``timeout_seconds``: how long a peer may send nothing."""
        self._http = httpx.AsyncClient(timeout=timeout_seconds, trust_env=False)  # workers reach each other directly
        self._sources: LRUCache[str, tuple[str, list[str]]] = LRUCache(KEPT_TICKETS)
        """Hash → (ticket, URLs of peers)."""
        self._backoff: dict[str, float] = {}
        """URL of a peer that failed → monotonic time until which it is not asked."""
        self.bytes_received = 0

    async def close(self) -> None:
        await self._http.aclose()

    def set_sources(self, digest: str, ticket: str, peers: Iterable[str]) -> None:
        """``peers`` serve the artifact to requests with ``ticket``."""
        self._sources[digest] = (ticket, list(peers))

    def discard(self, digest: str) -> None:
        self._sources.pop(digest, None)

    async def manifest(self, digest: str) -> bytes | None:
        """The artifact's manifest from a peer, verified; None if no peer serves it."""
        for ticket, peer in self._available(digest):
            with self._failures_of(peer, digest):
                content = await fetch_manifest(self._http, f"{peer}/artifacts/{digest}", ticket)
                decode_manifest(content, digest)
                return content
        return None

    async def download(self, digest: str, shard: protocol.Shard, part: Path) -> bool:
        """Append to the file ``part`` as many of the shard's bytes as peers serve; whether any byte arrived."""
        before = size_of(part)
        for ticket, peer in self._available(digest):
            if size_of(part) == shard.size:
                break
            with self._failures_of(peer, digest):
                url = f"{peer}/artifacts/{digest}/{shard.name}"
                await download(self._http, url, ticket, part, shard.size, self._count)
        return size_of(part) != before

    def mark_failed(self, digest: str) -> None:
        """The bytes that peers sent for the artifact were wrong; any of them may have sent them."""
        ticket, peers = self._sources.get(digest, ("", []))
        self._backoff_until(time.monotonic() + BACKOFF_SECONDS, peers)
        self._sources[digest] = (ticket, [])

    def _count(self, size: int) -> None:
        self.bytes_received += size

    def _available(self, digest: str) -> list[tuple[str, str]]:
        ticket, peers = self._sources.get(digest, ("", []))
        now = time.monotonic()
        return [(ticket, peer) for peer in peers if self._backoff.get(peer, 0.0) < now]

    @contextmanager
    def _failures_of(self, peer: str, digest: str) -> Iterator[None]:
        """Suppresses an error within; the peer is not asked for this artifact again."""
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL, TransferFailed, RetryTransfer) as error:
            log.info("stopped pulling from peer %s: %s", peer, one_line(error))
            _, peers = self._sources.get(digest, ("", []))
            if peer in peers:
                peers.remove(peer)
            if not isinstance(error, TicketRefused | RetryTransfer):
                self._backoff_until(time.monotonic() + BACKOFF_SECONDS, [peer])

    def _backoff_until(self, until: float, peers: Sequence[str]) -> None:
        now = time.monotonic()
        self._backoff = {peer: end for peer, end in self._backoff.items() if end > now} | dict.fromkeys(peers, until)
