"""Deletion of artifacts: the one answer to "may this artifact be deleted?".

An artifact is deleted, here and at every worker, when no row of the database names it (a version, checkpoint, sampler
or upload) and nothing in memory references it:

* a running request, or a start from its weights, has a reference to the artifact that it reads
  (:meth:`ArtifactCollector.referenced`),
* an uploaded artifact has one until a version names it (:meth:`ArtifactCollector.hold`): equal content is one artifact,
  so retention of one job must not delete the upload of another.

A submitted row write runs even if its caller is cancelled. Whatever ends a reference or drops an upload after an error
follows, in the writer's line of the same tenant, every row write that its caller has submitted and that may name the
artifact (:meth:`ArtifactCollector._after_writes`).

Rows disappear in :meth:`ArtifactCollector.delete_unnamed`; an artifact that is referenced then is deleted when its last
reference ends, and one whose place does not answer then by :meth:`ArtifactCollector.delete_left`. An upload that no
version came to name is deleted by :meth:`ArtifactCollector.drop`. At the start of the service
:meth:`ArtifactCollector.collect_all` deletes what a crash left behind, once services have run for
:data:`ORPHAN_KEEP_SECONDS` and nothing named it: the database may be an older copy for a moment.

No transaction can come to name an artifact that is being deleted. Its bytes are deleted in a thread of transfers,
which may wait for a network, after a transaction has found that no row names it. A row can come to name an artifact
only where another row does, or after an upload, which is referenced before it is stored
(:meth:`ArtifactCollector.commit`), and not during a deletion. A service that lost its database to another one deletes
nothing: its transactions are refused.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from rookery import protocol
from rookery.aio import BackgroundTasks
from rookery.clock import Clock
from rookery.controller.weights.store import WeightStore
from rookery.errors import ArtifactsAway, DatabaseAway, StorageFull, Unavailable
from rookery.storage.artifacts import Artifacts, Staging
from rookery.storage.repositories import versions
from rookery.storage.store import Store

log = logging.getLogger("rookery.controller.weights.gc")

T = TypeVar("T")

ORPHAN_KEEP_SECONDS = 86400.0
"""An artifact that the database does not name when the service starts is deleted by a start after services have run for
this much longer, if nothing names it still: a service that was started once with an old copy of its database loses
none."""

RUN_SECONDS = 600.0
"""How often the time for which the service runs is stored: little of it is lost at a crash, and a day has 144 of
these small writes, of which there are none where no artifact is without a name."""


class ArtifactCollector:
    def __init__(self, store: Store, artifacts: Artifacts, weight_store: WeightStore) -> None:
        self.references: Counter[str] = Counter()
        """The number of readers and uploads, by the hash of the artifact that they need."""
        self.deferred: set[str] = set()
        """Artifacts that no row names any more and that are referenced: the end of the last reference deletes them."""
        self.left: set[str] = set()
        """Artifacts that nothing named, and whose deletion has not succeeded yet."""
        self._store = store
        self._artifacts = artifacts
        self._weight_store = weight_store
        self._lock = threading.Lock()
        """Guards ``references``, ``deferred`` and ``left``: the event loop and threads change them."""
        self._ends = BackgroundTasks()
        """Ends of references and drops of uploads that wait for row writes."""
        self._deletions: WeakValueDictionary[str, AbstractContextManager[object]] = WeakValueDictionary()
        """By hash: held from the check whether the artifact may be deleted to its deletion, which may wait for a
        network. A lock lives as long as a thread holds it or waits for it."""

    # --- references ---------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def referenced(self, ref: protocol.AdapterRef | None) -> AsyncIterator[None]:
        """The artifact of ``ref`` is not deleted within: its request may have to move to a worker that must pull it."""
        if ref is None:
            yield
            return
        self.hold(ref.hash)
        try:
            yield
        except BaseException:  # nobody waits for the end of the reference: a cancelled request ends at once
            self._ends.start(self._after_writes(partial(self._end_reference_late, ref.hash)))
            raise
        await self._end_reference(ref.hash)

    async def _end_reference(self, digest: str) -> None:
        if self._release(digest):
            await self.delete_unnamed(versions.unnamed, digest)

    async def _end_reference_late(self, digest: str) -> None:
        with suppress(StorageFull, Unavailable, OSError):  # it was reported, and is deleted later
            await self._end_reference(digest)

    @asynccontextmanager
    async def storing(self, staging: Staging) -> AsyncIterator[protocol.Manifest]:
        """Store an upload; within, a row comes to name it."""
        held: list[str] = []

        def commit() -> protocol.Manifest:
            manifest = self.commit(staging)
            held.append(manifest.hash)
            return manifest

        async def release() -> None:
            for digest in await self._store.transfer(held.copy):
                self.named(digest)

        try:
            manifest = await self._store.transfer(commit)
            yield manifest
        except BaseException:  # the row may be written all the same
            await self._after_writes(release)
            raise
        self.named(manifest.hash)

    @asynccontextmanager
    async def naming(self, policy: str, digest: str) -> AsyncIterator[None]:
        """Within, a version of ``policy`` comes to name an uploaded artifact; after an error it is dropped."""
        try:
            yield
        except BaseException:  # the commit may have succeeded all the same: the drop finds out
            await self.drop(policy, digest)
            raise
        self.named(digest)

    async def _after_writes(self, end: Callable[[], Awaitable[T]]) -> T:
        """The result of ``end()``, which is called when each row write that this task has submitted before has ended.
        It is called also where the caller is cancelled during this wait."""

        async def run() -> T:
            await self._store.run(_nothing)
            return await end()

        return await asyncio.shield(self._ends.start(run()))

    def hold(self, digest: str) -> None:
        """Reference an artifact until :meth:`named` or :meth:`drop`."""
        with self._lock:
            self.references[digest] += 1

    def commit(self, staging: Staging) -> protocol.Manifest:
        """Store an upload; it is referenced, and durable when this returns. Runs in :meth:`Store.transfer`."""
        digest = staging.manifest().hash
        with self._deletion(digest):
            self.hold(digest)
        try:
            return staging.commit()
        except BaseException:
            self._release(digest)
            raise

    def named(self, digest: str) -> None:
        """A version or an upload names the artifact now: end its reference."""
        if self._release(digest):
            self._leave([digest])  # perhaps it failed to

    async def drop(self, policy: str, digest: str) -> None:
        """End the reference to an artifact that was uploaded for ``policy`` and, as far as known, never named; delete
        it if so. Where that cannot be established, it stays until the next start."""
        await self._after_writes(lambda: self._store.transfer(self.drop_unwritten, policy, digest))

    def drop_unwritten(self, policy: str, digest: str) -> None:
        """As :meth:`drop`, in :meth:`Store.transfer`, where no row write was submitted that may name the artifact."""
        try:
            with self._deletion(digest):
                self._release(digest)
                self._delete(digest, lambda: self._store.database.write(versions.names, policy, digest))
        except (StorageFull, Unavailable, OSError) as error:  # the error that ended the step is the one to report
            log.warning("artifact %s of %s stays until the next start: %s", digest, policy, error,
                        extra={"policy": policy})  # fmt: skip

    def _release(self, digest: str) -> bool:
        """Whether that was the last reference to an artifact whose deletion was deferred."""
        with self._lock:
            self.references[digest] -= 1
            if self.references[digest]:
                return False
            del self.references[digest]
            deferred = digest in self.deferred
            self.deferred.discard(digest)
            return deferred

    # --- deletion -----------------------------------------------------------------------------------------------------

    async def delete_unnamed(self, function: Callable[..., str | list[str] | None], *arguments: Any) -> None:
        """Run a repository function that deletes rows and returns the hash of an artifact that nothing may name any
        more, several, or None; delete these artifacts, here and at every worker. Where that is not possible now,
        :meth:`delete_left` tries again: the rows are gone. The first error is raised all the same, as the work that
        meets it waits for the end of the outage."""

        def forget() -> list[str]:
            found = self._store.database.write(function, *arguments)
            hashes = [found] if isinstance(found, str) else found or []
            self._leave(hashes)
            return hashes

        failed: Exception | None = None
        for digest in await self._store.run(forget):
            try:
                await self._delete_everywhere(digest)
            except (StorageFull, Unavailable, OSError) as error:
                log.warning("artifact %s is deleted later: %s", digest, error)
                failed = failed or error
        if failed is not None:
            raise failed

    async def delete_left(self) -> None:
        """Try the deletions again that have not succeeded, until the place or the database does not answer."""
        with self._lock:
            left = sorted(self.left)
        for digest in left:
            try:
                await self._delete_everywhere(digest)
            except (ArtifactsAway, DatabaseAway):
                return
            except (StorageFull, Unavailable, OSError):  # it was reported
                continue

    async def _delete_everywhere(self, digest: str) -> None:
        if await self._store.transfer(self._delete_if_unnamed, digest):
            self._weight_store.unpublish([digest])

    def _delete_if_unnamed(self, digest: str) -> bool:
        return self._delete(digest, lambda: self._store.database.write(versions.unnamed, digest) is None)

    async def collect_all(self, keep: float) -> None:
        """Delete half-written uploads and every artifact that nothing has named while services ran for ``keep``
        seconds. Only at start, before new uploads."""
        await self._store.transfer(self._artifacts.sweep)
        live = await self._store.read(versions.live_hashes)
        for digest in await self._store.transfer(self._artifacts.prune, live, keep):
            log.info("deleted artifact %s, which no commit names", digest)

    async def count_time(self, clock: Clock) -> None:
        """Store for how long the service runs, for the next :meth:`collect_all`; until cancelled."""
        since = clock.monotonic()
        while True:
            await clock.sleep(RUN_SECONDS)
            now = clock.monotonic()
            with suppress(StorageFull, Unavailable, OSError):  # the next time has this one in it
                await self._store.transfer(self._artifacts.ran, now - since)
                since = now

    def _delete(self, digest: str, named: Callable[[], bool]) -> bool:
        """Whether the artifact was deleted: not while it is referenced or ``named()``. References are looked at
        first: that of an upload ends after something names it."""
        with self._deletion(digest):
            with self._lock:
                if referenced := digest in self.references:
                    self.deferred.add(digest)
            deleted = not referenced and not named()
            if deleted:
                self._leave([digest])  # until it is
                self._artifacts.delete(digest)
            with self._lock:
                self.left.discard(digest)
            return deleted

    def _deletion(self, digest: str) -> AbstractContextManager[object]:
        """The lock of the artifact's deletion; a thread may hold it several times."""
        with self._lock:
            return self._deletions.setdefault(digest, threading.RLock())

    def _leave(self, hashes: Iterable[str]) -> None:
        """Nothing may name these any more."""
        with self._lock:
            self.left.update(hashes)


def _nothing() -> None:
    """The last call of a line ends after the others."""
