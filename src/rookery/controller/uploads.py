"""Datasets and adapters that tenants upload: received in pieces, checked, and stored as artifacts that the database
names. An upload that is refused or interrupted leaves nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from rookery.controller.quotas import Quotas, counted
from rookery.controller.service_time import LONGEST_WORK_WAIT
from rookery.controller.services import Services
from rookery.controller.weights.gc import ArtifactCollector
from rookery.errors import NotFound
from rookery.storage.artifacts import Staging
from rookery.storage.models import UploadKind
from rookery.storage.repositories import tenants
from rookery.storage.store import Writer
from rookery.turns import measured

T = TypeVar("T")

DATASET = "rows.jsonl"
"""The only file of a stored dataset."""

ARCHIVE = "upload.tar"
"""An uploaded adapter, until its files are stored."""

Unpack = Callable[[Path], AbstractContextManager[Mapping[str, Iterable[bytes]]]]
"""Opens an archive: its files by name, in pieces."""


class Uploads:
    """Stores what tenants upload."""

    def __init__(self, services: Services, quotas: Quotas, collector: ArtifactCollector) -> None:
        self._services = services
        self._quotas = quotas
        self._collector = collector

    async def add_dataset(
        self, tenant: str, chunks: AsyncIterable[bytes], count: Callable[[Path], int], name: str = ""
    ) -> tuple[str, int]:
        """Store a dataset that arrives in pieces, never held whole, as the file ``name``; returns its hash and the
        number of its rows, which ``count(path)`` checks. Raises what ``count`` raises; then nothing of it stays."""
        await self._quotas.check_stored(tenant)
        async with self._uploaded(tenant, DATASET, chunks) as staging:
            rows = await self.checked(tenant, count, staging.path(DATASET))
            return await self._keep(tenant, "dataset", staging, name), rows

    async def keep_rows(self, tenant: str, content: bytes) -> str:
        """Store the rows of a job as a dataset; returns its hash."""
        async with self._received(DATASET, _whole(content)) as staging:
            return await self._keep(tenant, "dataset", staging)

    async def checked(self, tenant: str, check: Callable[..., T], *arguments: Any, threads: Writer | None = None) -> T:
        """The result of a check, when it is the tenant's turn for one, in the ``threads`` of its kind. Raises
        :class:`TooManyRequests`."""
        times, loop = self._quotas.check_time, asyncio.get_running_loop()
        account = await times.begin(tenant, LONGEST_WORK_WAIT)

        def spent(seconds: float) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits for it
                loop.call_soon_threadsafe(times.spend, tenant, seconds, account)

        try:
            return await (threads or self._services.threads.checkers)(measured, partial(check, *arguments), spent)
        finally:
            times.end(tenant, account)

    async def add_adapter(self, tenant: str, chunks: AsyncIterable[bytes], unpack: Unpack) -> str:
        """Store the files of an archive that arrives in pieces, never held whole; returns their hash. Raises what
        ``unpack(path)`` raises; then nothing of it stays."""
        await self._quotas.check_stored(tenant)
        reserve = self._services.settings.server.reserved_disk_bytes
        async with self._uploaded(tenant, ARCHIVE, chunks) as received, self._staging() as staging:

            def write() -> None:
                with unpack(received.path(ARCHIVE)) as files:
                    for name, content in files.items():
                        staging.write(name, content, reserve)

            await self._services.threads(write)
            return await self._keep(tenant, "adapter", staging)

    @asynccontextmanager
    async def _uploaded(self, tenant: str, name: str, chunks: AsyncIterable[bytes]) -> AsyncIterator[Staging]:
        """As :meth:`_received`. Raises :class:`TooManyRequests` where a piece is more than the tenant may store,
        :class:`StorageFull` where the rest of the disk is reserved for commits."""
        reserve = self._services.settings.server.reserved_disk_bytes
        with self._quotas.uploading(tenant) as count:
            async with self._received(name, counted(chunks, count), reserve) as staging:
                yield staging

    @asynccontextmanager
    async def _received(self, name: str, chunks: AsyncIterable[bytes], reserve: int = 0) -> AsyncIterator[Staging]:
        """The file ``name`` with the content of ``chunks``, written as they arrive; without a commit it is removed."""
        in_thread = self._services.threads
        async with self._staging() as staging:
            writer = await in_thread(staging.begin, name, reserve)
            try:
                async for chunk in chunks:
                    await in_thread(writer.write, chunk)
                await in_thread(writer.finish)
            finally:
                await in_thread(writer.close)
            yield staging

    @asynccontextmanager
    async def _staging(self) -> AsyncIterator[Staging]:
        """An artifact to be written, which is removed without a commit."""
        staging = await self._services.threads(self._services.artifacts.begin)
        try:
            yield staging
        finally:
            await self._services.threads(staging.abandon)

    async def _keep(self, tenant: str, kind: UploadKind, staging: Staging, name: str = "") -> str:
        """Commit an upload of the tenant; returns its hash. Raises :class:`TooManyRequests` where the tenant may have
        no further one: each takes a row, and a folder with two files, however few bytes these have."""
        services = self._services
        async with AsyncExitStack() as within:
            if not await self._is_stored(tenant, kind, staging.manifest().hash):
                await within.enter_async_context(self._quotas.describing(tenant, name))
            manifest = await within.enter_async_context(self._collector.storing(staging))
            now = services.clock.time()
            await services.store.write(tenants.add_upload, tenant, kind, manifest.hash, manifest.size, now, name)
        return manifest.hash

    async def _is_stored(self, tenant: str, kind: UploadKind, digest: str) -> bool:
        """Whether the tenant has uploaded these bytes before."""
        try:
            await self._services.store.read(tenants.get_upload, tenant, kind, digest)
        except NotFound:
            return False
        return True


async def _whole(content: bytes) -> AsyncIterator[bytes]:
    yield content
