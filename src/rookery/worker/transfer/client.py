"""Big things between a worker and the service, or other workers: adapters and batches in, commits out, over HTTP with
tickets.

Promises:

* A folder under ``adapters/<hash>`` only ever shows whole shards whose SHA-256 is the one that the manifest names, and
  a manifest whose own hash is the folder's name. Shards arrive in a private ``.part`` file and are renamed.
* A broken transfer goes on from the byte where it stopped. A shard that arrives with another hash is thrown away,
  counted, fetched once more from its beginning, and then refused.
* An adapter comes from the peers that were named for it (:mod:`rookery.worker.transfer.peers`), then from the service,
  which is
  asked again and again. Peers' bytes that are not what their hash says cost one fetch from the service. The trainer's
  state comes from the service alone.
* Every pull that ends is told of: what arrived, and what could not be had.
* Where this disk is full, what the cache holds for nobody goes, and what found no room is tried once more.
* A ticket that the service no longer honours is replaced once, by asking over the control link.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx

from rookery import protocol
from rookery.errors import NO_ROOM
from rookery.worker.transfer.cache import MANIFEST, TRAINER_STATE, AdapterCache, part_of, sha256, write_whole
from rookery.worker.transfer.http import (
    CorruptArtifact,
    RetryTransfer,
    TicketRefused,
    TransferFailed,
    Unreachable,
    fill,
    is_loopback,
    manifest_in,
    one_line,
    raise_for_status,
    size_of,
    system_error,
)
from rookery.worker.transfer.peers import PeerClient

log = logging.getLogger("rookery.worker.transfer.client")

T = TypeVar("T")

ATTEMPTS = 6
"""Tries without a new byte before a transfer fails: with the pauses between them about six seconds."""

FIRST_PAUSE_SECONDS = 0.2
"""Pause after the first failed try; it doubles."""

SERVICE_TRIES = 2
"""Times that a shard whose hash is wrong is fetched from the service before it is refused."""

CHUNK_BYTES = 1 << 20
"""Read and written at once: large enough to be cheap, small enough that the heartbeat is never late."""


class TransferClient:
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
        self._peers = PeerClient(peer_seconds)
        self._arrived = arrived
        self._failed = failed
        self._cache = AdapterCache(root, cap_bytes)
        self._renew = renew
        self._pulls: dict[tuple[str, bool], asyncio.Task[Path]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        self._tickets: dict[str, str] = {}
        self.bytes_from_service = 0
        """Bytes of artifacts that the service gave."""
        self.corrupt = 0
        """Shards that arrived, or lay on disk, with another hash than their name."""

    async def close(self) -> None:
        for task in self._pulls.values():
            task.cancel()
        await self._http.aclose()
        await self._peers.close()

    # --- in ---------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def pulled(self, ref: protocol.AdapterRef, *, state: bool = False) -> AsyncIterator[Path]:
        """The folder of an artifact, pulled if need be and pinned while the caller uses it; ``state`` asks for the
        trainer's state as well. Raises :class:`TransferFailed`."""
        if ref.ticket:
            self.set_ticket(ref.hash, ref.ticket, ref.peers)
        key = (ref.hash, state)
        if key not in self._pulls:
            task = asyncio.create_task(self._pull(*key))
            task.add_done_callback(lambda done: self._pulled(key, done))
            self._pulls[key] = task
        with self._cache.pinned(ref.hash):
            yield await asyncio.shield(self._pulls[key])

    def set_ticket(self, digest: str, ticket: str, peers: Sequence[str]) -> None:
        """``ticket`` reads the artifact from now on, at the service and at ``peers``."""
        self._tickets[digest] = ticket
        self._peers.name(digest, ticket, peers)

    def _pulled(self, key: tuple[str, bool], task: asyncio.Task[Path]) -> None:
        self._pulls.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("artifact %s could not be pulled: %s", key[0][:12], error)
            self._failed(key[0], one_line(error))

    def cached(self) -> list[str]:
        """Hashes of the artifacts whose adapter lies in the cache."""
        return self._cache.here()

    def evict(self, digest: str) -> None:
        """Nothing will name this artifact again."""
        self._tickets.pop(digest, None)
        if digest in self._locks and not self._locks[digest].locked():
            del self._locks[digest]
        self._peers.forget(digest)
        self._cache.forget(digest)

    async def fetch_batch(self, ticket: str) -> bytes:
        """The bytes that the controller offers under ``ticket``."""
        response = await self._request("GET", f"/wire/offers/{ticket}")
        return response.content

    async def _pull(self, digest: str, state: bool) -> Path:
        folder = self._cache.folder(digest)
        async with self._locks.setdefault(digest, asyncio.Lock()):
            self._cache.wanted(folder)
            fetched = await self._with_room(lambda: self._fetch(digest, folder, state))
        self._arrived(digest)
        if fetched:
            log.info("pulled %s of artifact %s", ", ".join(fetched), digest[:12])
            await self._cache.evict()
        return folder

    async def _fetch(self, digest: str, folder: Path, state: bool) -> list[str]:
        """The shards that had to be fetched."""
        manifest = await self._manifest(digest, folder)
        needed = [shard for shard in manifest.shards if state or shard.name != TRAINER_STATE]
        fetched = [shard.name for shard in needed if await self._shard(digest, folder, shard)]
        self._cache.complete(folder)
        return fetched

    async def _with_room(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """``work``, once more where the disk was full and the cache held what nobody uses."""
        try:
            return await work()
        except Exception as error:
            if system_error(error) not in NO_ROOM:
                raise
            log.warning("the disk is full: what nobody uses leaves the cache")
        await self._cache.evict(full=True)
        return await work()

    async def _manifest(self, digest: str, folder: Path) -> protocol.Manifest:
        path = folder / MANIFEST
        if path.is_file():
            try:
                return manifest_in(path.read_bytes(), digest)
            except TransferFailed:
                self.corrupt += 1
                log.warning("%s is damaged on disk and is fetched again", path)
        content = await self._peers.manifest(digest)
        if content is None:
            url = f"/wire/artifacts/{digest}"
            content = (await self._with_ticket(digest, lambda ticket: self._request("GET", url, ticket))).content
        manifest = manifest_in(content, digest)
        write_whole(path, content)
        return manifest

    async def _shard(self, digest: str, folder: Path, shard: protocol.Shard) -> bool:
        """Whether it had to be fetched."""
        path = folder / shard.name
        if path.is_file():
            if await self._cache.intact(path, shard.sha256):
                return False
            self.corrupt += 1
            log.warning("%s is damaged on disk and is fetched again", path)
            path.unlink()
        part, tries = part_of(path), SERVICE_TRIES
        while tries:
            lent = shard.name != TRAINER_STATE and await self._peers.fill(digest, shard, part)
            if size_of(part) != shard.size:
                url = f"/wire/artifacts/{digest}/{shard.name}"
                await self._with_ticket(digest, partial(self._download, url, part, shard.size))
            if await asyncio.to_thread(sha256, part) == shard.sha256:
                self._cache.take(part, path)
                return True
            part.unlink()
            self.corrupt += 1
            log.warning("artifact %s: %s arrived with another hash", digest[:12], shard.name)
            if lent:
                self._peers.mark_failed(digest)  # the service's bytes are not judged yet
            else:
                tries -= 1
        raise CorruptArtifact(f"artifact {digest[:12]} is corrupt: {shard.name} does not have the hash that names it")

    async def _download(self, url: str, part: Path, size: int, ticket: str) -> None:
        """Fill ``part`` up to ``size`` bytes from the service, going on from what it holds."""
        failures = 0
        while (have := size_of(part)) != size:
            reason = "the connection ended early"
            try:
                await fill(self._http, url, ticket, part, size, self._count)
            except (httpx.TransportError, RetryTransfer) as error:
                reason = one_line(error)
            if size_of(part) == size:
                return
            failures = 0 if size_of(part) > have else failures + 1
            if failures == ATTEMPTS:
                raise Unreachable(f"GET {url}: {reason}")
            await asyncio.sleep(FIRST_PAUSE_SECONDS * 2**failures)

    def _count(self, size: int) -> None:
        self.bytes_from_service += size

    # --- out --------------------------------------------------------------------------------------------------------

    async def upload(self, ticket: str, write: Callable[[Path], object]) -> protocol.Manifest:
        """Bring what ``write(folder)`` puts into an empty folder under an upload ticket. What generating needs of it is
        kept in the cache as well, so that this worker need not pull its own commit. Raises :class:`TransferFailed`."""
        aside, manifest = await self._with_room(lambda: self._written(write))
        try:
            for shard in manifest.shards:
                url = f"/wire/uploads/{ticket}/{shard.name}"
                await self._request("PUT", url, content=(aside / shard.name, shard.size))
            self._cache.keep(manifest, aside)
            self._arrived(manifest.hash)
        finally:
            await asyncio.to_thread(shutil.rmtree, aside, True)
        await self._cache.evict()
        return manifest

    async def _written(self, write: Callable[[Path], object]) -> tuple[Path, protocol.Manifest]:
        """A folder of this process's own with what ``write`` puts into it; none is left where that fails."""
        aside = self._cache.aside()
        try:
            return aside, await asyncio.to_thread(_write_aside, write, aside)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, aside, True)
            raise

    @property
    def bytes_from_peers(self) -> int:
        """Bytes of artifacts that peers gave."""
        return self._peers.bytes_received

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
                raise_for_status(method, url, response.status_code)
                return response
            except (httpx.TransportError, RetryTransfer) as error:
                reason = one_line(error)
            await asyncio.sleep(FIRST_PAUSE_SECONDS * 2**attempt)
        raise Unreachable(f"{method} {url}: {reason}")


async def _read(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def _write_aside(write: Callable[[Path], object], folder: Path) -> protocol.Manifest:
    write(folder)
    return protocol.manifest_of(
        protocol.Shard(name=path.name, size=path.stat().st_size, sha256=sha256(path)) for path in folder.iterdir()
    )
