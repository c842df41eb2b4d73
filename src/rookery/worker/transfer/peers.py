"""Artifacts between workers: :class:`PeerServer` serves those of this worker, :class:`PeerClient` reads others'.

Promises of the server:

* It serves artifacts of the cache to requests that a worker with the same key signed
  (:mod:`rookery.protocol.reads`). Every other request gets 404: other artifacts, other file names, the trainer's state.
* An artifact that arrives is served as far as it is there; the response continues as more arrives. A response whose
  bytes do not arrive ends early, and the receiver continues elsewhere.
* It answers byte ranges, so that a receiver continues at the byte where another source stopped.
* It runs in its own thread and serves a bounded number of requests at a time, so neither computation nor the worker's
  connection waits for it. Above the bound it answers 503, and the receiver uses another source. A reader that reads
  nothing is left, as a worker that was stopped; so are connections without a request.
* Bytes are served as they are on disk. The receiver has their hash and verifies them.
* To a reader that has an earlier version it sends the difference, where that is below half of the size
  (:mod:`rookery.worker.transfer.delta`), once it has both whole. A reader that gets none reads the file.
* A withdrawn artifact gets no new reader. Files are never changed, only deleted, so running readers end undisturbed.

Promises of the client:

* A worker is asked only for the artifacts that the controller named it for.
* One that fails, or sends nothing for the timeout, is left at the byte where it stopped, and the controller is asked
  for others. If it was unreachable, broke the connection or sent wrong bytes, it is not asked again for a while; if it
  lacks the artifact, is busy or waits itself, it may be asked for the next one.
* One that the controller replaces is left at the next block.
* No method raises: the service has every artifact that workers do not serve.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import uvicorn
from cachetools import LRUCache
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from rookery import protocol
from rookery.errors import UserError, short
from rookery.network import http_tls, join_address, service_url
from rookery.protocol.reads import DIGEST
from rookery.worker.transfer.cache import COMPLETE, MANIFEST, is_state, private_folder
from rookery.worker.transfer.delta import WORTH_SHARE, write_delta
from rookery.worker.transfer.http import (
    ReadRefused,
    RetryTransfer,
    RunningHash,
    SlowTransfer,
    TransferFailed,
    decode_manifest,
    download,
    fetch_manifest,
    one_line,
    size_of,
)
from rookery.worker.transfer.peer_http import PeerHttp
from rookery.worker.transfer.published import ArrivingShard, PublishedArtifacts, Reads

log = logging.getLogger("rookery.worker.transfer.peers")

ROUTE_SECONDS = 2.0
"""Between two looks for the route to a service."""

FAILURES = (httpx.HTTPError, httpx.InvalidURL, TransferFailed, RetryTransfer)
"""Errors after which another source is asked."""

KEPT_SOURCES = 1024
"""Artifacts whose sources are kept, the last used ones."""

MOST_REQUESTS = 8
"""Times that other sources are asked for in one transfer; then those known are used up, and the service is left."""

STOP_SECONDS = 2.0
"""Time for open responses to complete when the worker ends."""

POLL_SECONDS = 0.005
"""Pause of a response between two looks for new bytes of an artifact that arrives: the delay that each receiver adds to
a chain."""

DELTA_SECONDS = 15.0
"""A reader waits so long for a difference, which takes the source some time to compute; then it reads the file."""

MOST_DELTAS = 2
"""Differences that are kept for further readers: those of one version with two files, or of two policies."""

BACKOFF_SECONDS = 60.0
"""A peer that failed is not asked again for this long: it may be gone, or unreachable from here."""


class SourceLeft(Exception):
    """The controller has named another source, which sends the rest."""


@dataclass(frozen=True)
class ServingRules:
    """Bounds of what a worker does for readers."""

    responses: int = 4
    """At a time: more would each be slower, and take network bandwidth from the worker's own tokens."""
    block_bytes: int = 1 << 20
    """Bytes read from disk and sent at once."""
    expect_seconds: float = 2.0
    """A request for an artifact that is not here waits so long: its order may be on the way, behind that of the
    reader."""
    read_seconds: float = 30.0
    """A reader that does not take a block within this time keeps no others from their response."""
    stall_seconds: float = 4.0
    """A response ends when no byte of an arriving artifact came for so long; less than a reader waits for a silent
    source."""


class PeerServer:
    """Methods belong to the I/O thread; ``root`` holds one folder per artifact."""

    def __init__(
        self,
        root: Path,
        listening: socket.socket,
        published: PublishedArtifacts,
        reads: Reads,
        rules: ServingRules | None = None,
    ) -> None:
        self.rules = rules or ServingRules()
        """They may be replaced at any time, and hold for requests that begin then."""
        self.bytes_sent = 0
        """Bytes of artifacts and manifests, the last block of a broken response included."""
        self._root = root
        self._published = published
        self._reads = reads
        self._responses = 0
        self._deltas: dict[tuple[str, str, str], asyncio.Task[Path | None]] = {}
        """By base, hash and file name, the last used at the end; a result is None where there is none."""
        self._private: tuple[Path, int] | None = None
        """A private folder of the cache for the differences, once there is one, and the descriptor that locks it."""
        self._routes = Starlette(
            routes=[Route("/artifacts/{digest}", self._manifest), Route("/artifacts/{digest}/{name}", self._shard)]
        )
        config = uvicorn.Config(
            self._bounded,
            interface="asgi3",
            log_config=None,
            access_log=False,
            lifespan="off",
            http=PeerHttp,
            ws="none",
            timeout_graceful_shutdown=round(STOP_SECONDS),
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([listening],), name="peer-server", daemon=True)

    def start(self) -> None:
        self._thread.start()

    async def stop(self) -> None:
        """Waits for running responses; one that is stuck ends with the process."""
        self._server.should_exit = True
        await asyncio.to_thread(self._thread.join, 2 * STOP_SECONDS)
        if self._private is not None:
            folder, lock = self._private
            await asyncio.to_thread(shutil.rmtree, folder, True)
            os.close(lock)

    # --- in the server's thread -------------------------------------------------------------------------------------

    async def _bounded(self, scope: Any, receive: Any, send: Any) -> None:
        """The ASGI application: 503 while the bound is reached."""
        if self._responses >= self.rules.responses:
            await Response(status_code=503)(scope, receive, send)
            return

        async def counted(message: Any) -> None:
            self.bytes_sent += len(message.get("body", b""))
            try:
                async with asyncio.timeout(self.rules.read_seconds):
                    await send(message)
            except TimeoutError:
                scope["state"]["connection"].abort()
                raise ClientDisconnect from None

        self._responses += 1
        try:
            await self._routes(scope, receive, counted)
        except ClientDisconnect:
            await asyncio.sleep(0)  # uvicorn learns of it
        finally:
            self._responses -= 1

    async def _manifest(self, request: Request) -> Response:
        found = await self._find(request, MANIFEST)
        return self._file(found) if isinstance(found, Path) else Response(status_code=404)

    async def _shard(self, request: Request) -> Response:
        name = request.path_params["name"]
        found = None if is_state(name) or name == MANIFEST else await self._find(request, name)
        if found is not None and (base := request.query_params.get("base")) is not None:
            found = await self._delta(request.path_params["digest"], name, base)
        if isinstance(found, ArrivingShard):
            begin = _first_byte(request.headers.get("range", ""))
            status, blocks = (206 if begin else 200), _arriving(found, begin, self.rules)
            return StreamingResponse(blocks, status, media_type="application/octet-stream")
        return self._file(found) if found is not None else Response(status_code=404)

    def _file(self, path: Path) -> Response:
        response = FileResponse(path, media_type="application/octet-stream")
        response.chunk_size = self.rules.block_bytes
        return response

    async def _delta(self, digest: str, name: str, base: str) -> Path | None:
        """A file that makes the shard of ``base`` to that of ``digest``, which may still arrive; None where there is
        none."""
        until = time.monotonic() + self.rules.stall_seconds
        while time.monotonic() < until:
            if not self._published.arriving(digest):
                break
            await asyncio.sleep(POLL_SECONDS)
        before, after = self._root / base, self._root / digest
        if not (DIGEST.fullmatch(base) and (before / COMPLETE).exists() and (after / COMPLETE).exists()):
            return None
        key = (base, digest, name)
        task = self._deltas.pop(key, None)
        if task is None or (task.done() and (found := task.result()) is not None and not found.exists()):
            task = asyncio.create_task(self._write_delta(before / name, after / name))
        self._deltas[key] = task
        while len(self._deltas) > MOST_DELTAS:
            self._deltas.pop(next(iter(self._deltas))).add_done_callback(_delete)
        return await asyncio.shield(task)

    async def _write_delta(self, base: Path, new: Path) -> Path | None:
        delta = None
        try:
            if self._private is None:
                self._private = private_folder(self._root)
            delta = self._private[0] / uuid.uuid4().hex
            return delta if await asyncio.to_thread(write_delta, base, new, delta) else None
        except OSError:  # such as a full disk, or a version that was just evicted
            if delta is not None:
                delta.unlink(missing_ok=True)
            return None

    async def _find(self, request: Request, name: str) -> Path | ArrivingShard | None:
        """The file ``name`` of an artifact that the request may read, as soon as it is there or arrives; None if that
        does not come soon."""
        digest, since, rules = request.path_params["digest"], time.monotonic(), self.rules
        if not self._reads.permits(request.headers.get(protocol.READ_HEADER, ""), digest):
            return None
        folder = self._root / digest
        while not self._published.withdrawn(digest):
            arriving = self._published.arriving(digest)
            if arriving or (folder / COMPLETE).exists():
                if name in (MANIFEST, *_shard_names(folder)) and (folder / name).is_file():
                    return folder / name
                if (shard := self._published.shard(digest, name)) is not None:
                    return shard
                if not arriving:
                    return None
            if time.monotonic() - since > (rules.stall_seconds if arriving else rules.expect_seconds):
                return None
            await asyncio.sleep(POLL_SECONDS)
        return None


def _delete(task: asyncio.Task[Path | None]) -> None:
    """A difference that is not kept: who reads it has opened it."""
    if not task.cancelled() and (path := task.result()) is not None:
        path.unlink(missing_ok=True)


def _first_byte(range: str) -> int:
    """The first byte of a request's ``Range`` header, which a worker sends as ``bytes=N-``; 0 without one."""
    found = re.fullmatch(r"bytes=(\d{1,15})-", range, re.ASCII)
    return int(found[1]) if found else 0


async def _arriving(shard: ArrivingShard, at: int, rules: ServingRules) -> AsyncIterator[bytes]:
    """The bytes of ``shard`` from ``at`` on, as they arrive. Ends early where no more come."""
    file, moved = None, time.monotonic()
    try:
        while at < shard.size:
            ended = shard.ended  # before the read: what is there then is all
            if file is None and shard.path.exists():
                with suppress(FileNotFoundError):
                    file = shard.path.open("rb", buffering=0)
            block = os.pread(file.fileno(), rules.block_bytes, at) if file is not None else b""
            if block:
                at, moved = at + len(block), time.monotonic()
                yield block
            elif ended or time.monotonic() - moved > rules.stall_seconds:
                return
            else:
                await asyncio.sleep(POLL_SECONDS)
    finally:
        if file is not None:
            file.close()


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
    host, public_port = _public(address) if address is not None else ("", None)
    if public_port is None and port is None:
        raise UserError(f"--address: given {address!r}, allowed is HOST:PORT, or HOST with --peer-port")
    local_port = port if port is not None else public_port or 0
    try:
        dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if dual else socket.AF_INET
        listening = socket.create_server(("", local_port), family=family, dualstack_ipv6=dual)
    except (OSError, OverflowError) as error:
        raise UserError(f"cannot listen on port {local_port} for other workers ({error}); give --peer-port") from None
    return listening, join_address("http", host or _own_address(base), public_port or listening.getsockname()[1])


def _public(address: str) -> tuple[str, int | None]:
    """Host and port of an address, which may be one of IPv6 without brackets. Raises :class:`UserError`."""
    with suppress(ValueError):
        return str(ipaddress.IPv6Address(address)), None
    try:
        parts = urlsplit(service_url(f"http://{address}", "--address"))
        if parts.path or not parts.hostname:
            raise UserError("a path")
    except UserError:
        allowed = "HOST or HOST:PORT, an address of IPv6 with a port in brackets"
        raise UserError(f"--address: given {short(repr(address))}, allowed is {allowed}") from None
    return parts.hostname, parts.port


def _own_address(base: str) -> str:
    """This machine's address on the route to the service, once there is one: a boot brings names and routes late."""
    service, warned = urlsplit(base), False
    while True:
        try:
            found = socket.getaddrinfo(service.hostname, service.port or 80, type=socket.SOCK_DGRAM)
            family, kind, protocol_number, _, target = found[0]
            with socket.socket(family, kind, protocol_number) as probe:
                probe.connect(target)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            if not warned:
                log.warning("no route to %s yet (%s), so no address for other workers", service.hostname, error)
            warned = True
            time.sleep(ROUTE_SECONDS)


class PeerClient:
    """Belongs to the I/O thread."""

    def __init__(self, timeout_seconds: float, reads: Reads, ask: Callable[[str, str], Awaitable[list[str]]]) -> None:
        """``timeout_seconds``: how long a worker may send nothing. ``ask(hash, failed)`` asks for other sources than
        the address ``failed``, and may raise :class:`TransferFailed`."""
        tls = http_tls("http://")  # workers reach each other directly
        self._http = httpx.AsyncClient(timeout=timeout_seconds, verify=tls, trust_env=False)
        self._slow = httpx.AsyncClient(timeout=DELTA_SECONDS, verify=tls, trust_env=False)
        self._reads = reads
        self._ask = ask
        self._sources: LRUCache[str, list[str]] = LRUCache(KEPT_SOURCES)
        """By hash, the addresses of workers in the order in which to ask them."""
        self._asked: LRUCache[str, int] = LRUCache(KEPT_SOURCES)
        """By hash, the times that other sources were asked for."""
        self._backoff: dict[str, float] = {}
        """Address of a worker that failed → monotonic time until which it is not asked."""
        self._left: set[str] = set()
        """Artifacts whose source is left at the next block."""
        self.bytes_received = 0

    async def close(self) -> None:
        await self._http.aclose()
        await self._slow.aclose()

    def set_sources(self, digest: str, sources: Iterable[str]) -> None:
        """These workers serve the artifact."""
        self._sources[digest] = list(sources)
        self._asked.pop(digest, None)

    def replace_sources(self, digest: str, sources: Iterable[str]) -> None:
        """Leave the source from which the artifact is read: these, or the service, send it sooner."""
        before = self._next(digest)
        self.set_sources(digest, sources)
        if self._next(digest) != before:
            self._left.add(digest)

    def discard(self, digest: str) -> None:
        self._sources.pop(digest, None)
        self._left.discard(digest)

    async def manifest(self, digest: str) -> bytes | None:
        """The artifact's manifest from another worker, verified; None if none serves it."""
        while (source := self._next(digest)) is not None:
            try:
                content = await fetch_manifest(self._http, f"{source}/artifacts/{digest}", self._reads.sign(digest))
                decode_manifest(content, digest)
                return content
            except FAILURES as error:
                await self._replace(digest, source, error)
        return None

    async def download(self, digest: str, shard: protocol.Shard, part: Path, running: RunningHash) -> bool:
        """Append to the file ``part`` as many of the shard's bytes as other workers serve; whether any byte arrived."""
        before = size_of(part)

        def count(size: int) -> None:
            self._count(size)
            if digest in self._left:
                raise SourceLeft

        while size_of(part) != shard.size and (source := self._next(digest)) is not None:
            self._left.discard(digest)
            try:
                url = f"{source}/artifacts/{digest}/{shard.name}"
                await download(self._http, url, self._reads.sign(digest), part, shard.size, count, running)
                if size_of(part) != shard.size:
                    raise RetryTransfer("the source has no more")
            except SourceLeft:
                continue
            except FAILURES as error:
                await self._replace(digest, source, error)
        return size_of(part) != before

    async def delta(self, digest: str, shard: protocol.Shard, base: str, target: Path) -> bool:
        """Write to ``target`` the difference from the shard of ``base``, if the first source has one."""
        if (source := self._next(digest)) is None:
            return False
        url = f"{source}/artifacts/{digest}/{shard.name}?base={base}"
        try:
            async with asyncio.timeout(DELTA_SECONDS):
                size, signature = int(shard.size * WORTH_SHARE), self._reads.sign(digest)
                await download(self._slow, url, signature, target, size, self._count)
        except (*FAILURES, TimeoutError):  # whoever reads the whole file finds out what is wrong with the source
            return False
        return True

    def mark_failed(self, digest: str) -> None:
        """The bytes that workers sent for the artifact were wrong; any of them may have sent them."""
        self._backoff_until(time.monotonic() + BACKOFF_SECONDS, self._sources.get(digest, []))
        self._sources[digest] = []

    def _count(self, size: int) -> None:
        self.bytes_received += size

    def _next(self, digest: str) -> str | None:
        """The source to ask now; None if only the service is left."""
        now = time.monotonic()
        return next((one for one in self._sources.get(digest, []) if self._backoff.get(one, 0.0) < now), None)

    async def _replace(self, digest: str, source: str, error: Exception) -> None:
        """``source`` is not asked for this artifact again: ask for others."""
        log.info("stopped reading %s from worker %s: %s", digest[:12], source, one_line(error))
        if isinstance(error, SlowTransfer) or not isinstance(error, ReadRefused | RetryTransfer):
            self._backoff_until(time.monotonic() + BACKOFF_SECONDS, [source])
        self._sources[digest] = [one for one in self._sources.get(digest, []) if one != source]
        asked = self._asked[digest] = self._asked.get(digest, 0) + 1
        if asked > MOST_REQUESTS:
            return
        try:
            others = await self._ask(digest, source)
        except TransferFailed as reason:
            log.info("%s", one_line(reason))
        else:
            self._sources[digest] = [one for one in others if one != source]

    def _backoff_until(self, until: float, sources: Iterable[str]) -> None:
        now = time.monotonic()
        self._backoff = {one: end for one, end in self._backoff.items() if end > now} | dict.fromkeys(sources, until)
