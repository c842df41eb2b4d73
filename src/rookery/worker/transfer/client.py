"""Artifacts and training batches between a worker and the service, or other workers, over HTTP.

Promises:

* A folder under ``adapters/<hash>`` only ever contains whole shards whose SHA-256 is the one in the manifest, and a
  manifest whose own hash is the folder's name. Shards arrive in a private ``.part`` file and are renamed.
* A broken transfer resumes at the byte where it stopped. A shard that arrives with another hash is deleted, counted,
  fetched once more from its beginning, and then refused.
* An artifact comes from the workers that were named for it (:mod:`rookery.worker.transfer.peers`), then from the
  service, with retries. Wrong bytes from workers cost one fetch from the service. The trainer's state comes from the
  service only.
* Of a full-parameter version whose predecessor is here, the difference is read where a worker has it, once, and the
  file is rebuilt; its hash decides as ever (:mod:`rookery.worker.transfer.delta`).
* An artifact that arrives is served to other workers at once. One that is withdrawn meanwhile is deleted when it is
  complete and no work uses it.
* A version of this worker's trainer, or of another one of the machine, is here before it is committed, and an artifact
  of the cache after that (:mod:`rookery.worker.transfer.handed`).
* The result of every pull is reported in ``events``.
* On a full disk, unused artifacts are evicted from the cache, and the transfer is tried once more. A cache that is
  deleted is made again; one that cannot be used fails the transfer with the system's reason, without its path.
* Every read is signed when it is sent.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

import httpx
import msgspec
from cachetools import LRUCache

from rookery import protocol
from rookery.aio import BackgroundTasks
from rookery.errors import NO_ROOM
from rookery.pace import SLOWEST
from rookery.worker.transfer.cache import (
    MANIFEST,
    AdapterCache,
    CacheEvents,
    is_state,
    link_shard,
    locked,
    sha256,
    write_atomically,
)
from rookery.worker.transfer.delta import BadDelta, apply_delta
from rookery.worker.transfer.handed import HandedFolders
from rookery.worker.transfer.http import (
    CorruptDownload,
    RetryTransfer,
    RunningHash,
    SlowTransfer,
    TransferFailed,
    Unreachable,
    decode_manifest,
    download,
    errno_of,
    fetch,
    fetch_manifest,
    one_line,
    raise_for_status,
    size_of,
)
from rookery.worker.transfer.peers import KEPT_SOURCES, PeerClient
from rookery.worker.transfer.published import PublishedArtifacts, Reads

log = logging.getLogger("rookery.worker.transfer.client")

T = TypeVar("T")

ATTEMPTS = 6
"""Attempts without a new byte before a transfer fails: about six seconds with the pauses between them."""

FIRST_PAUSE_SECONDS = 0.2
"""Pause after the first failed attempt; it doubles."""

SERVICE_FETCHES = 2
"""Times that a shard with a wrong hash is fetched from the service before it is refused."""

TIDY_SECONDS = 60.0
"""Between two looks for files of killed processes, which may be gigabytes and are rare."""

BLOCK_BYTES = 1 << 20
"""Bytes read and sent at once: large enough to be cheap, small enough that the heartbeat is never late."""


class TransferClient:
    """One worker's transfers. Belongs to the I/O thread; hashing and large writes run in helper threads."""

    def __init__(
        self,
        service: httpx.AsyncClient,
        peers: PeerClient,
        cache: AdapterCache,
        events: CacheEvents,
        published: PublishedArtifacts,
        reads: Reads,
        *,
        abandoned: Callable[[str], None] = lambda digest: None,
    ) -> None:
        """``service`` and ``peers``, which it closes, reach the service and other workers. ``abandoned(hash)`` is
        called where the upload of a staged version fails or is cancelled."""
        self._http = service
        self._peers = peers
        self._cache = cache
        self._events = events
        self._published = published
        self._reads = reads
        self._abandoned = abandoned
        self._handed = HandedFolders(self._cache)
        self._bases: LRUCache[str, str] = LRUCache(KEPT_SOURCES)
        """By hash, the earlier version to which a difference may be read."""
        self._pulls: dict[tuple[str, bool], asyncio.Task[Path]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._orders = BackgroundTasks()
        self._tidy_after = 0.0
        """The monotonic time."""
        self._received: dict[str, int] = {}
        """By hash, the bytes of the complete shards of the artifacts that it receives."""
        self._parts: dict[str, Path] = {}
        """By hash, the shard that arrives now."""
        self.bytes_from_service = 0
        """Bytes of artifacts received from the service."""
        self.rebuilt = 0
        """Shards made from an earlier version and a difference."""
        self.corrupt = 0
        """Shards and manifests that arrived, or were on disk, with a wrong hash."""

    @property
    def cache_identity(self) -> str:
        """Equal in all workers that share this one's cache."""
        return self._cache.identity

    def use(self, base: str) -> None:
        """From now on the service at the HTTP address ``base`` is asked: a standby has taken over."""
        self._http.base_url = base

    async def close(self) -> None:
        await self._orders.cancel()
        self._cache.retain([])
        for task in self._pulls.values():
            task.cancel()
        await self._http.aclose()
        await self._peers.close()

    @property
    def receiving(self) -> dict[str, int]:
        """By hash, the bytes that are here of the artifacts that it receives."""
        return {digest: size + self._size_of_part(digest) for digest, size in self._received.items()}

    def _size_of_part(self, digest: str) -> int:
        part = self._parts.get(digest)
        try:
            return part.stat().st_size if part is not None else 0
        except FileNotFoundError:  # not begun, or complete just now
            return 0

    @property
    def bytes_from_peers(self) -> int:
        """Bytes of artifacts received from other workers."""
        return self._peers.bytes_received

    # --- pulls ------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def pulled(self, ref: protocol.AdapterRef, *, state: bool = False) -> AsyncIterator[Path]:
        """The folder of an artifact, pulled if needed and pinned within this context; with ``state``, the trainer's
        state is in it too. Raises :class:`TransferFailed`."""
        self._peers.set_sources(ref.hash, ref.sources)
        self._bases[ref.hash] = ref.base
        key = (ref.hash, state)
        if key not in self._pulls:
            task = asyncio.create_task(self._pull(*key))
            task.add_done_callback(lambda done: self._on_pulled(key, done))
            self._pulls[key] = task
        self._cache.keep(ref.hash)
        self._published.publish(ref.hash)
        with self._cache.pinned(ref.hash):
            yield await asyncio.shield(self._pulls[key])

    def replicate(self, ref: protocol.AdapterRef) -> None:
        """Receive an artifact that work will name. The result is reported in ``events``."""
        self._orders.start(self._replicate(ref))

    async def _replicate(self, ref: protocol.AdapterRef) -> None:
        try:
            async with self.pulled(ref):
                pass
        except Exception as error:  # it is reported
            log.info("version %d of %s did not arrive: %s", ref.version, ref.policy, one_line(error))

    def replace_sources(self, digest: str, sources: Iterable[str]) -> None:
        """Read an artifact from these workers from now on, or from the service. One from the service continues."""
        if digest in self._received:
            self._peers.replace_sources(digest, sources)

    def retain(self, hashes: Iterable[str]) -> None:
        """Evict these artifacts last; replaces the set given before."""
        self._cache.retain(hashes)

    def cached(self) -> list[str]:
        """Hashes of the artifacts whose adapter is complete in the cache."""
        return self._cache.complete_adapters()

    def evict(self, digest: str) -> None:
        """Delete an artifact that nothing will name again; one that is in use or arrives, after that."""
        self._published.unpublish(digest)
        self._handed.withdraw([digest])
        self._peers.discard(digest)
        self._cache.discard(digest)
        self._events.on_evicted(digest)

    async def fetch_batch(self, ticket: str) -> bytes:
        """The encoded training batch that the controller published under ``ticket``."""
        url = f"/wire/batches/{ticket}"
        return await _with_retries(f"GET {url}", lambda: fetch(self._http, url))

    def _on_pulled(self, key: tuple[str, bool], task: asyncio.Task[Path]) -> None:
        self._pulls.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("pull of artifact %s failed: %s", key[0][:12], error)
            self._events.on_failed(key[0], one_line(error))

    async def _pull(self, digest: str, state: bool) -> Path:
        folder = self._cache.folder(digest)
        async with self._locks.setdefault(digest, asyncio.Lock()):
            self._cache.touch(folder)
            self._published.begin(digest)
            self._received[digest] = 0
            try:
                self._handed.adopt(digest)
                with self._cache.pinned(digest):
                    fetched = await self._with_space(lambda: self._fetch(digest, folder, state))
            finally:
                self._published.end(digest)
                del self._received[digest]
                self._parts.pop(digest, None)
        if self._published.withdrawn(digest):  # while it arrived
            self._cache.discard(digest)
            return folder
        self._events.on_arrived(digest)
        if fetched:
            log.info("pulled %s of artifact %s", ", ".join(fetched), digest[:12])
            await self._evict()
        return folder

    async def _evict(self, *, disk_full: bool = False) -> None:
        """Make room in the cache, and report what left it. No transfer fails because there is less room."""
        try:
            evicted = await self._cache.evict(disk_full=disk_full)
        except OSError as error:
            log.warning("the cache cannot be made smaller: %s", error)
            return
        for digest in evicted:
            self._events.on_evicted(digest, report=True)

    async def _fetch(self, digest: str, folder: Path, state: bool) -> list[str]:
        """Complete the artifact on disk; the names of the shards that had to be fetched."""
        self._cache.make()
        manifest = await self._manifest(digest, folder)
        self._cache.lock(digest)
        needed = [shard for shard in manifest.shards if state or not is_state(shard.name)]
        fetched = [shard.name for shard in needed if await self._fetch_shard(digest, folder, shard)]
        self._cache.mark_complete(folder)
        return fetched

    async def _manifest(self, digest: str, folder: Path) -> protocol.Manifest:
        path = folder / MANIFEST
        if path.is_file():
            try:
                return decode_manifest(path.read_bytes(), digest)
            except TransferFailed:
                self._on_corrupt(f"{path} is damaged on disk and is fetched again")
        content = await self._peers.manifest(digest)
        if content is None:
            url = f"/wire/artifacts/{digest}"
            content = await _with_retries(
                f"GET {url}", lambda: fetch_manifest(self._http, url, self._reads.sign(digest))
            )
        manifest = decode_manifest(content, digest)
        write_atomically(path, content)
        return manifest

    async def _fetch_shard(self, digest: str, folder: Path, shard: protocol.Shard) -> bool:
        """Whether it had to be fetched."""
        path = folder / shard.name
        if path.is_file():
            if await self._cache.verify(path, shard.sha256):
                self._received[digest] += shard.size
                return False
            self._on_corrupt(f"{path} is damaged on disk and is fetched again")
            path.unlink()
        part, fetches = self._cache.part_of(path), SERVICE_FETCHES
        self._parts[digest] = part
        while fetches:
            rebuilt = not is_state(shard.name) and await self._rebuild(digest, shard, part)
            with locked(part):
                from_peers, arriving, running = rebuilt, None, RunningHash()
                if not is_state(shard.name):
                    arriving = self._published.arrive(digest, shard, part)
                    from_peers |= await self._peers.download(digest, shard, part, running)
                if size_of(part) != shard.size:
                    await self._download(digest, shard, part, running)
                if (running.digest(shard.size) or await asyncio.to_thread(sha256, part)) == shard.sha256:
                    self._cache.insert(part, path)
                    if arriving is not None:  # a reader that has not opened the part yet opens the file
                        arriving.path, arriving.ended = path, True
                    self._received[digest] += shard.size
                    return True
                if arriving is not None:
                    arriving.ended = True
                part.unlink()
            self._bases.pop(digest, None)
            self._on_corrupt(f"artifact {digest[:12]}: {shard.name} arrived with a wrong hash")
            if from_peers:
                self._peers.mark_failed(digest)  # the service's own bytes are not known to be wrong
            else:
                fetches -= 1
        raise CorruptDownload(f"artifact {digest[:12]} is corrupt: {shard.name} does not have the hash that names it")

    async def _rebuild(self, digest: str, shard: protocol.Shard, part: Path) -> bool:
        """Make ``part`` from the earlier version and a difference, if there are both."""
        base = self._bases.get(digest, "")
        if not base or size_of(part) > 0:
            return False
        source = self._cache.folder(base)
        with self._cache.pinned(base):
            try:
                before = decode_manifest((source / MANIFEST).read_bytes(), base).shards
                known = next((one for one in before if (one.name, one.size) == (shard.name, shard.size)), None)
                if known is None or not await self._cache.verify(source / shard.name, known.sha256):
                    return False
                if known.sha256 == shard.sha256:
                    link_shard(source / shard.name, part)
                    return True
                folder = self._cache.staging_folder()
                try:
                    delta, made = folder / "delta", folder / "made"
                    if not await self._peers.delta(digest, shard, base, delta):
                        return False
                    await asyncio.to_thread(apply_delta, source / shard.name, delta, made)
                    made.rename(part)
                finally:
                    self._cache.delete_staging(folder)
            except (OSError, TransferFailed, BadDelta) as error:
                log.info("artifact %s is read whole: %s", digest[:12], one_line(error))
                return False
        self.rebuilt += 1
        return True

    async def _download(self, digest: str, shard: protocol.Shard, part: Path, running: RunningHash) -> None:
        """Append to ``part`` until it has all bytes of ``shard``, from the service."""
        url = f"/wire/artifacts/{digest}/{shard.name}"

        async def attempt() -> None:
            await download(self._http, url, self._reads.sign(digest), part, shard.size, self._count, running)
            if size_of(part) != shard.size:
                raise RetryTransfer("the connection ended early")

        await _with_retries(f"GET {url}", attempt, progress=lambda: size_of(part))

    def _count(self, size: int) -> None:
        self.bytes_from_service += size

    def _on_corrupt(self, message: str) -> None:
        self.corrupt += 1
        log.warning("%s", message)

    # --- versions that are not committed yet --------------------------------------------------------------------------

    async def receive_handed(self, digest: str, name: str) -> Path:
        """Take the version that another worker of the machine made in the private folder ``name`` of the cache; its
        folder. Raises :class:`TransferFailed`."""
        self._tidy()
        async with self._locks.setdefault(digest, asyncio.Lock()):  # a pull waits for it
            folder = await self._handed.receive(digest, name)
        self._events.on_handed(digest)
        return folder

    def adopt(self, ref: protocol.AdapterRef) -> None:
        """``ref`` is committed: if it was handed over, it is an artifact of the cache now."""
        if ref.hash in self._handed:
            self.replicate(ref)

    def withdraw(self, digests: Iterable[str]) -> list[str]:
        """These versions are not committed; those of them that are no artifact of the cache."""
        digests = list(digests)
        self._handed.withdraw(digests)
        self._tidy()
        return self._private(digests)

    def withdraw_all(self) -> list[str]:
        """No version that was handed over is committed, as far as known: those that are no artifact of the cache."""
        return self._private(self._handed.clear())

    def _tidy(self) -> None:
        """Begin to delete what killed processes have left, unless that was done just now."""
        if time.monotonic() >= self._tidy_after:
            self._tidy_after = time.monotonic() + TIDY_SECONDS
            self._orders.start(asyncio.to_thread(self._cache.delete_private_leftovers))

    def _private(self, digests: Iterable[str]) -> list[str]:
        """A staged artifact of the cache was committed, by this policy or with the same bytes by another one."""
        return [digest for digest in digests if not self._cache.is_complete(digest)]

    # --- uploads ----------------------------------------------------------------------------------------------------

    async def upload(
        self,
        ticket: str,
        write: Callable[[Path], object],
        staged: Callable[[str, Path], Awaitable[None]] | None = None,
    ) -> protocol.Manifest:
        """Upload the files that ``write(folder)`` creates in an empty folder. Those that generation needs are kept in
        the cache, so that this worker does not pull them again: at once, or with ``staged`` when the artifact is
        committed (:meth:`adopt`). ``staged(hash, folder)`` is called before the upload. Raises
        :class:`TransferFailed`."""
        staging, manifest = await self._with_space(lambda: self._staged(write))
        kept = False
        try:
            if staged is not None:
                await staged(manifest.hash, staging)
            with _cache_errors():
                for shard in manifest.shards:
                    await self._put(f"/wire/uploads/{ticket}/{shard.name}", staging / shard.name)
                if staged is not None:
                    for shard in manifest.shards:
                        if is_state(shard.name):
                            (staging / shard.name).unlink()
                    self._handed.keep(manifest, staging)
                    kept = True
                else:
                    self._cache.insert_staged(manifest, staging)
                    self._published.publish(manifest.hash)
                    self._events.on_arrived(manifest.hash)
        finally:
            if not kept:
                if staged is not None and manifest.hash not in self._handed and self._private([manifest.hash]):
                    self._abandoned(manifest.hash)
                await asyncio.to_thread(self._cache.delete_staging, staging)
        await self._evict()
        return manifest

    async def _staged(self, write: Callable[[Path], object]) -> tuple[Path, protocol.Manifest]:
        """A private folder with the files that ``write`` creates; it is deleted if ``write`` fails."""
        staging = self._cache.staging_folder()

        def create() -> protocol.Manifest:
            write(staging)
            manifest = protocol.manifest_of(
                protocol.Shard(name=path.name, size=path.stat().st_size, sha256=sha256(path))
                for path in staging.iterdir()
            )
            write_atomically(staging / MANIFEST, msgspec.json.encode(manifest))
            return manifest

        try:
            return staging, await asyncio.to_thread(create)
        except BaseException:
            await asyncio.to_thread(self._cache.delete_staging, staging)
            raise

    # --- retries ----------------------------------------------------------------------------------------------------

    async def _with_space(self, call: Callable[[], Awaitable[T]]) -> T:
        """``call()``, once more after eviction if the disk was full. Raises :class:`TransferFailed` where the cache
        cannot be used."""
        with _cache_errors():
            try:
                return await call()
            except Exception as error:
                if errno_of(error) not in NO_ROOM:
                    raise
                log.warning("the disk is full: evicting unused artifacts from the cache")
            await self._evict(disk_full=True)
            return await call()

    async def _put(self, url: str, file: Path) -> None:
        """Send a file; the response has status 2xx."""
        size = size_of(file)
        seconds = 2 * (self._http.timeout.read or 0.0) + size / SLOWEST

        async def attempt() -> None:
            headers = {"Content-Length": str(size)}
            try:
                async with asyncio.timeout(seconds):
                    response = await self._http.put(url, content=_blocks(file), headers=headers)
            except TimeoutError:
                raise SlowTransfer(f"no answer within {seconds:.0f} s") from None
            raise_for_status("PUT", url, response.status_code)

        await _with_retries(f"PUT {url}", attempt)


@contextmanager
def _cache_errors() -> Iterator[None]:
    """Raises :class:`TransferFailed` for an error of the cache's disk: its path is in this worker's log, and not in the
    answer, which tenants read."""
    try:
        yield
    except Exception as error:
        if not (number := errno_of(error)):
            raise
        log.warning("the cache cannot be used: %s", one_line(error))
        raise TransferFailed(f"the worker's cache cannot be used ({os.strerror(number).lower()})") from error


async def _with_retries(what: str, attempt: Callable[[], Awaitable[T]], progress: Callable[[], int] = lambda: 0) -> T:
    """The result of ``attempt``, repeated until ``ATTEMPTS`` in a row fail without raising ``progress()``. Raises
    :class:`Unreachable`."""
    failures = 0
    while True:
        before = progress()
        try:
            return await attempt()
        except (httpx.TransportError, RetryTransfer) as error:
            moved = progress() > before and not isinstance(error, SlowTransfer)
            failures = 0 if moved else failures + 1
            if failures == ATTEMPTS:
                raise Unreachable(f"{what}: {one_line(error)}") from None
        await asyncio.sleep(FIRST_PAUSE_SECONDS * 2 ** (failures - 1))


async def _blocks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            yield block
