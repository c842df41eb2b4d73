"""Big things between a worker and the service, or other workers: adapters and batches in, commits out, over HTTP with
tickets.

Promises:

* A folder under ``adapters/<hash>`` only ever shows whole shards whose SHA-256 is the one that the manifest names, and
  a manifest whose own hash is the folder's name. Shards arrive in a private ``.part`` file and are renamed.
* A broken transfer goes on from the byte where it stopped. A shard that arrives with another hash is thrown away,
  counted, fetched once more from its beginning, and then refused.
* An adapter comes from the peers that were named for it, then from the service, which is asked again and again. A peer
  that fails in any way, or gives no byte for a named time, is left at the byte where it stopped, and alone for a
  while; one whose bytes are not what their hash says costs one fetch from the service. The trainer's state comes from
  the service alone.
* Every pull that ends is told of: what arrived, and what could not be had.
* A ticket that the service no longer honours is replaced once, by asking over the control link.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx
import msgspec

from rookery import wire
from rookery.errors import RookeryError
from rookery.worker.adapter_cache import MANIFEST, TRAINER_STATE, AdapterCache, part_of, sha256, write_whole

log = logging.getLogger("rookery.worker.transfer")

ATTEMPTS = 6
"""Tries without a new byte before a transfer fails: with the pauses between them about six seconds."""

FIRST_PAUSE_SECONDS = 0.2
"""Pause after the first failed try; it doubles."""

SERVICE_TRIES = 2
"""Times that a shard whose hash is wrong is fetched from the service before it is refused."""

AVOID_SECONDS = 60.0
"""A peer that failed is not asked for this long: it may be gone, or out of reach from here."""

CHUNK_BYTES = 1 << 20
"""Read and written at once: large enough to be cheap, small enough that the heartbeat is never late."""

_REFUSED = {401, 403, 404, 410}
"""Answers to a ticket that is not, or no longer, good."""

_BUSY = {408, 425, 429, 502, 503, 504}
"""Answers that may be others in a moment."""


class TransferFailed(Exception):
    """Bytes could not be had or brought; the message is one line."""


class Unreachable(TransferFailed):
    """The service did not answer, for as long as it was asked."""


class CorruptArtifact(TransferFailed):
    """The service's bytes are not those that the hash names; asking again does not help."""


class TicketRefused(TransferFailed):
    """The service does not honour the ticket."""


Source = Literal["peers", "service"]


class Transfers:
    """One worker's transfers. Belongs to the I/O thread; hashing and large writes run in helper threads."""

    def __init__(
        self,
        base: str,
        root: Path,
        cap_bytes: int,
        renew: Callable[[str], Awaitable[str]],
        *,
        timeout_seconds: float,
        peer_seconds: float,
        arrived: Callable[[str], object],
        failed: Callable[[str, str], object],
    ) -> None:
        """``base`` is the service's HTTP address, ``root`` holds one folder per artifact, ``renew`` asks for a new
        ticket for a hash and may raise :class:`TransferFailed`. ``arrived(hash)`` is told of each adapter that lies
        whole in the cache, ``failed(hash, reason)`` of each that could not be had; the service may be silent for
        ``timeout_seconds``, a peer for ``peer_seconds``."""
        self._http = httpx.AsyncClient(base_url=base, timeout=timeout_seconds, trust_env=not is_loopback(base))
        self._peer_http = httpx.AsyncClient(timeout=peer_seconds, trust_env=False)
        self._arrived = arrived
        self._failed = failed
        self._peers: dict[str, list[str]] = {}
        self._avoided: dict[str, float] = {}
        """Peers that failed, and until when they are left alone."""
        self._cache = AdapterCache(root, cap_bytes)
        self._renew = renew
        self._pulls: dict[tuple[str, bool], asyncio.Task[Path]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._tickets: dict[str, str] = {}
        self.pulled_bytes: Counter[Source] = Counter()
        """Of artifacts, by who gave them."""
        self.corrupt = 0
        """Shards that arrived, or lay on disk, with another hash than their name."""

    async def close(self) -> None:
        for task in self._pulls.values():
            task.cancel()
        await self._http.aclose()
        await self._peer_http.aclose()

    # --- in ---------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def pulled(self, ref: wire.AdapterRef, *, state: bool = False) -> AsyncIterator[Path]:
        """The folder of an artifact, pulled if need be and pinned while the caller uses it; ``state`` asks for the
        trainer's state as well. Raises :class:`TransferFailed`."""
        if ref.ticket:
            self.granted(ref.hash, ref.ticket, ref.peers)
        key = (ref.hash, state)
        if key not in self._pulls:
            task = asyncio.create_task(self._pull(*key))
            task.add_done_callback(lambda done: self._pulled(key, done))
            self._pulls[key] = task
        with self._cache.pinned(ref.hash):
            yield await asyncio.shield(self._pulls[key])

    def granted(self, digest: str, ticket: str, peers: Sequence[str]) -> None:
        """``ticket`` reads the artifact from now on, at the service and at ``peers``."""
        self._tickets[digest] = ticket
        self._peers[digest] = list(peers)

    def _pulled(self, key: tuple[str, bool], task: asyncio.Task[Path]) -> None:
        self._pulls.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("artifact %s could not be pulled: %s", key[0][:12], error)
            self._failed(key[0], one_line(error))

    def here(self) -> list[str]:
        """Hashes of the artifacts whose adapter lies in the cache."""
        return self._cache.here()

    def forget(self, digest: str) -> None:
        """Nothing will name this artifact again."""
        self._tickets.pop(digest, None)
        self._peers.pop(digest, None)
        self._cache.forget(digest)

    async def offer(self, ticket: str) -> bytes:
        """The bytes that the controller offers under ``ticket``."""
        response = await self._request("GET", f"/wire/offers/{ticket}")
        return response.content

    async def _pull(self, digest: str, state: bool) -> Path:
        folder = self._cache.folder(digest)
        async with self._locks.setdefault(digest, asyncio.Lock()):
            now = time.monotonic()
            peers = [peer for peer in self._peers.get(digest, ()) if self._avoided.get(peer, 0.0) < now]
            manifest = await self._manifest(digest, folder, peers)
            needed = [shard for shard in manifest.shards if state or shard.name != TRAINER_STATE]
            fetched = [shard.name for shard in needed if await self._shard(digest, folder, shard, peers)]
            self._cache.complete(folder)
        self._arrived(digest)
        if fetched:
            log.info("pulled %s of artifact %s", ", ".join(fetched), digest[:12])
            await self._cache.evict()
        return folder

    async def _manifest(self, digest: str, folder: Path, peers: list[str]) -> wire.Manifest:
        path = folder / MANIFEST
        if path.is_file():
            try:
                return _checked(path.read_bytes(), digest)
            except TransferFailed:
                self.corrupt += 1
                log.warning("%s is damaged on disk and is fetched again", path)
        for peer in list(peers):
            with self._trying(peer, peers):
                response = await self._peer_http.get(
                    f"{peer}/artifacts/{digest}", headers={"X-Rookery-Ticket": self._tickets.get(digest, "")}
                )
                _judge("GET", str(response.url), response.status_code)
                manifest = _checked(response.content, digest)
                write_whole(path, response.content)
                return manifest
        url = f"/wire/artifacts/{digest}"
        response = await self._with_ticket(digest, lambda ticket: self._request("GET", url, ticket))
        manifest = _checked(response.content, digest)
        write_whole(path, response.content)
        return manifest

    async def _shard(self, digest: str, folder: Path, shard: wire.Shard, peers: list[str]) -> bool:
        """Whether it had to be fetched. A peer that fails is taken out of ``peers``."""
        path = folder / shard.name
        if path.is_file():
            if await self._cache.intact(path, shard.sha256):
                return False
            self.corrupt += 1
            log.warning("%s is damaged on disk and is fetched again", path)
            path.unlink()
        part, tries = part_of(path), SERVICE_TRIES
        while tries:
            lent = shard.name != TRAINER_STATE and await self._borrow(digest, shard, part, peers)
            if _size(part) != shard.size:
                url = f"/wire/artifacts/{digest}/{shard.name}"
                await self._with_ticket(digest, partial(self._download, url, part, shard.size))
            if await asyncio.to_thread(sha256, part) == shard.sha256:
                self._cache.take(part, path)
                return True
            part.unlink()
            self.corrupt += 1
            log.warning("artifact %s: %s arrived with another hash", digest[:12], shard.name)
            if lent:
                self._avoid(peers)
                peers.clear()  # it may have been any of them, and the service's bytes are not judged yet
            else:
                tries -= 1
        raise CorruptArtifact(f"artifact {digest[:12]} is corrupt: {shard.name} does not have the hash that names it")

    async def _borrow(self, digest: str, shard: wire.Shard, part: Path, peers: list[str]) -> bool:
        """Fill ``part`` from ``peers``, as far as they give it; whether any of them gave a byte."""
        before = self.pulled_bytes["peers"]
        for peer in list(peers):
            if _size(part) == shard.size:
                break
            with self._trying(peer, peers):
                url = f"{peer}/artifacts/{digest}/{shard.name}"
                await self._download_once("peers", url, self._tickets.get(digest, ""), part, shard.size)
        return self.pulled_bytes["peers"] > before

    @contextmanager
    def _trying(self, peer: str, peers: list[str]) -> Iterator[None]:
        """A peer that fails within is left alone for a while; somebody else has the rest."""
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL, TransferFailed, _Again) as error:
            log.info("peer %s gives no more: %s", peer, one_line(error))
            peers.remove(peer)
            if not isinstance(error, TicketRefused | _Again):  # who has not this one, or is busy, may give the next
                self._avoid([peer])

    def _avoid(self, peers: Sequence[str]) -> None:
        now = time.monotonic()
        self._avoided = {peer: until for peer, until in self._avoided.items() if until > now}
        self._avoided.update(dict.fromkeys(peers, now + AVOID_SECONDS))

    async def _download(self, url: str, part: Path, size: int, ticket: str) -> None:
        """Fill ``part`` up to ``size`` bytes from the service, going on from what it holds."""
        failures = 0
        while (have := _size(part)) != size:
            reason = "the connection ended early"
            try:
                await self._download_once("service", url, ticket, part, size)
            except (httpx.TransportError, _Again) as error:
                reason = one_line(error)
            if _size(part) == size:
                return
            failures = 0 if _size(part) > have else failures + 1
            if failures == ATTEMPTS:
                raise Unreachable(f"GET {url}: {reason}")
            await asyncio.sleep(FIRST_PAUSE_SECONDS * 2**failures)

    async def _download_once(self, source: Source, url: str, ticket: str, part: Path, size: int) -> None:
        have = _size(part) if _size(part) < size else 0
        headers = {"X-Rookery-Ticket": ticket} | ({"Range": f"bytes={have}-"} if have > 0 else {})
        http = self._peer_http if source == "peers" else self._http
        async with http.stream("GET", url, headers=headers) as response:
            _judge("GET", url, response.status_code)
            with part.open("ab" if response.status_code == 206 else "wb") as file:
                async for chunk in response.aiter_raw():
                    if file.tell() + len(chunk) > size:
                        raise CorruptArtifact(f"GET {url}: longer than the {size} bytes that its manifest says")
                    file.write(chunk)
                    self.pulled_bytes[source] += len(chunk)

    # --- out --------------------------------------------------------------------------------------------------------

    async def upload(self, ticket: str, write: Callable[[Path], object]) -> wire.Manifest:
        """Bring what ``write(folder)`` puts into an empty folder under an upload ticket. What generating needs of it is
        kept in the cache as well, so that this worker need not pull its own commit. Raises :class:`TransferFailed`."""
        aside = self._cache.aside()
        try:
            manifest = await asyncio.to_thread(_write_aside, write, aside)
            for shard in manifest.shards:
                url = f"/wire/uploads/{ticket}/{shard.name}"
                await self._request("PUT", url, content=(aside / shard.name, shard.size))
            self._cache.keep(manifest, aside)
            self._arrived(manifest.hash)
        finally:
            await asyncio.to_thread(shutil.rmtree, aside, True)
        await self._cache.evict()
        return manifest

    # --- HTTP -------------------------------------------------------------------------------------------------------

    async def _with_ticket(self, digest: str, call: Callable[[str], Coroutine[Any, Any, Any]]) -> Any:
        """``call`` with the artifact's ticket, once more with a new one if that is refused."""
        try:
            return await call(self._tickets.get(digest, ""))
        except TicketRefused:
            self._tickets[digest] = await self._renew(digest)
            return await call(self._tickets[digest])

    async def _request(
        self, method: str, url: str, ticket: str = "", content: tuple[Path, int] | None = None
    ) -> httpx.Response:
        """An answer of 2xx, after as many tries as it takes; ``content`` is a file and its size."""
        headers = {"X-Rookery-Ticket": ticket} if ticket else {}
        if content is not None:
            headers["Content-Length"] = str(content[1])
        for attempt in range(ATTEMPTS):
            try:
                body = None if content is None else _read(content[0])
                response = await self._http.request(method, url, content=body, headers=headers)
                _judge(method, url, response.status_code)
                return response
            except (httpx.TransportError, _Again) as error:
                reason = one_line(error)
            await asyncio.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
        raise Unreachable(f"{method} {url}: {reason}")


class _Again(Exception):
    """The service answered that it cannot now."""


def _judge(method: str, url: str, status: int) -> None:
    if status in _REFUSED:
        raise TicketRefused(f"{method} {url}: the ticket is not good (HTTP {status})")
    if status == 507:
        raise TransferFailed(f"{method} {url}: the service's disk is full")
    if status in _BUSY:
        raise _Again(f"HTTP {status}")
    if status >= 300:
        raise TransferFailed(f"{method} {url}: HTTP {status}")


def is_loopback(address: str) -> bool:
    """Whether an address is this machine's own, to which no proxy leads."""
    return urlsplit(address).hostname in ("localhost", "127.0.0.1", "::1")


def one_line(error: BaseException) -> str:
    """What went wrong, for the other end; an error that nobody wrote for people to read is named."""
    text = " ".join(str(error).split())
    return text if is_plain(error) else f"{type(error).__name__}: {text}"


def is_plain(error: BaseException) -> bool:
    """Whether the message says it all, without a traceback."""
    return isinstance(error, TransferFailed | RookeryError | ValueError)


def _checked(content: bytes, digest: str) -> wire.Manifest:
    """The manifest in ``content``, which must be the one that ``digest`` names."""
    try:
        manifest = msgspec.json.decode(content, type=wire.Manifest)
    except msgspec.MsgspecError as error:
        raise CorruptArtifact(f"artifact {digest[:12]} is corrupt: no manifest ({error})") from None
    if wire.manifest_of(manifest.shards).hash != digest or manifest.hash != digest:
        raise CorruptArtifact(f"artifact {digest[:12]} is corrupt: its manifest does not have the hash that names it")
    if any(Path(shard.name).name != shard.name for shard in manifest.shards):
        raise CorruptArtifact(f"artifact {digest[:12]} names a shard outside its folder")
    return manifest


def _write_aside(write: Callable[[Path], object], folder: Path) -> wire.Manifest:
    write(folder)
    return wire.manifest_of(
        wire.Shard(name=path.name, size=path.stat().st_size, sha256=sha256(path)) for path in folder.iterdir()
    )


async def _read(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _size(path: Path) -> int:
    """Bytes of a file; -1 if there is none."""
    return path.stat().st_size if path.exists() else -1
