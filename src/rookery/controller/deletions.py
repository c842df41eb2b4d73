"""Deletions of tenants, and those of artifacts that an outage interrupted: the service completes them by itself. The
deletion of a tenant is that tenant's work, so that it follows the tenant's writes that were submitted before."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from typing import Protocol
from weakref import WeakValueDictionary

from rookery.clock import Clock
from rookery.controller.quotas import Quotas
from rookery.controller.sessions.sessions import Sessions
from rookery.controller.weights.gc import ArtifactCollector
from rookery.errors import Conflict, RookeryError, count_of
from rookery.storage.repositories import jobs, sessions, tenants
from rookery.storage.store import Store, every
from rookery.turns import work_of

log = logging.getLogger("rookery.controller")

DELETION_SECONDS = 60.0
"""How often deletions that were interrupted are tried again."""

SHOWN_JOBS = 3
"""Jobs that an error names of many."""


class JobCommands(Protocol):
    """The commands that delete what belongs to a tenant."""

    async def cancel(self, tenant: str, job: str) -> None: ...

    async def delete_job(self, tenant: str, job: str) -> None: ...

    async def delete_upload(self, tenant: str, digest: str) -> None: ...


class Deletions:
    def __init__(
        self,
        store: Store,
        clock: Clock,
        quotas: Quotas,
        collector: ArtifactCollector,
        clients: Sessions,
        commands: JobCommands,
    ) -> None:
        self._store = store
        self._clock = clock
        self._quotas = quotas
        self._collector = collector
        self._clients = clients
        self._commands = commands
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By tenant."""

    async def delete_tenant(self, tenant: str, force: bool) -> None:
        """As the controller's command. After an outage a repetition continues, and so does :meth:`watch`."""
        store = self._store
        if tenant not in await store.read(tenants.half_deleted):
            await store.read(tenants.get_tenant, tenant)
            unfinished = await store.read(jobs.unfinished_job_ids, tenant)
            if unfinished and not force:
                shown = ", ".join(sorted(unfinished)[:SHOWN_JOBS])
                raise Conflict(
                    f"tenant {tenant} has {count_of(len(unfinished), 'job that has', 'jobs that have')} not ended"
                    f" ({shown}); delete it with force (rookery tenants delete --force), which cancels them"
                )
            with work_of(tenant):
                await store.write(tenants.delete_tenant, tenant, self._clock.time())
        await self._clear_tenant(tenant)

    async def watch(self) -> None:
        """Complete the deletions that an outage or the end of the service interrupted; until cancelled."""
        while True:
            await self._collector.delete_left()
            half = set[str]()
            with suppress(RookeryError):  # it is read again
                half = await self._store.read(tenants.half_deleted)
            for tenant in half:
                try:
                    await self._clear_tenant(tenant)
                except RookeryError as error:
                    log.warning("tenant %s is deleted later: %s", tenant, error, extra={"tenant": tenant})
            await self._clock.sleep(DELETION_SECONDS)

    async def _clear_tenant(self, tenant: str) -> None:
        """Delete what a deleted tenant stored."""
        with work_of(tenant):
            await self._delete_rows(tenant)
        self._quotas.forget(tenant)
        log.info("tenant %s is deleted", tenant, extra={"tenant": tenant})

    async def _delete_rows(self, tenant: str) -> None:
        store, commands = self._store, self._commands
        async with self._locks.setdefault(tenant, asyncio.Lock()):
            for job in await store.read(jobs.unfinished_job_ids, tenant):  # before anything that may fail: they cost
                with suppress(Conflict):  # it has just ended
                    await commands.cancel(tenant, job)
            async for session in every(
                partial(store.read, sessions.list_sessions, tenant), lambda row: (row.created, row.id)
            ):
                if session.finished is None:
                    await self._clients.finish(tenant, session.id, "deleted")
            async for row in every(partial(store.read, jobs.list_jobs, tenant), lambda row: (row.created, row.id)):
                await commands.delete_job(tenant, row.id)
            async for upload in every(
                partial(store.read, tenants.uploads, tenant), lambda row: (row.created, row.hash, row.kind)
            ):
                await commands.delete_upload(tenant, upload.hash)
            pages = partial(store.read, sessions.list_checkpoints, tenant, None)
            async for saved in every(pages, sessions.checkpoint_cursor):
                await self._clients.delete_checkpoint(tenant, saved.model, saved.kind, saved.name)
