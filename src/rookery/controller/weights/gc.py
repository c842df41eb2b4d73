"""Deletion of artifacts: the one answer to "may this artifact be deleted?".

An artifact is deleted, here and at every worker, when no row of the database names it (a version, checkpoint, sampler
or upload) and nothing in memory pins it:

* a running request or a start from its weights pins the artifact that it reads (:meth:`ArtifactCollector.pin`),
* an uploaded artifact is pinned until a version names it (:meth:`ArtifactCollector.hold`): equal content is one
  artifact, so retention of one job must not delete the upload of another.

Rows disappear in :meth:`ArtifactCollector.delete_unnamed`; an artifact that is pinned then is deleted when its last pin
ends. An upload that no version came to name is deleted by :meth:`ArtifactCollector.drop`. At the start of the service
:meth:`ArtifactCollector.collect_all` deletes what a crash left behind, once nothing has named it for
:data:`ORPHAN_KEEP_SECONDS`: the database may be an older copy for a moment.

No transaction can come to name an artifact that is being deleted. The rows disappear in the writer thread, between
other database calls; an upload is pinned before it is stored (:meth:`ArtifactCollector.commit`), and neither happens
during a deletion. A service that lost its database to another one deletes nothing: its transactions are refused.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rookery import protocol
from rookery.controller.weights.store import WeightStore
from rookery.errors import StorageFull, Unavailable
from rookery.storage.artifacts import Artifacts, Staging
from rookery.storage.repositories import versions
from rookery.storage.store import Store

log = logging.getLogger("rookery.controller.weights.gc")

ORPHAN_KEEP_SECONDS = 86400.0
"""An artifact that the database does not name when the service starts is deleted by a start that comes this much later,
if nothing names it still: a service that was started once with an old copy of its database loses none."""


class ArtifactCollector:
    def __init__(self, store: Store, artifacts: Artifacts, references: WeightStore) -> None:
        self.pins: Counter[str] = Counter()
        """Readers and uploads by the hash of the artifact that they need."""
        self.deferred: set[str] = set()
        """Artifacts that nothing names any more and that are pinned: the end of the last pin deletes them."""
        self._store = store
        self._artifacts = artifacts
        self._references = references
        self._lock = threading.Lock()
        """Guards ``pins`` and ``deferred``: the event loop and threads change them."""
        self._deletion = threading.RLock()
        """Held from the check whether an artifact may be deleted to its deletion, which may wait for a network."""

    # --- pins ---------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def pin(self, ref: protocol.AdapterRef | None) -> AsyncIterator[None]:
        """The artifact of ``ref`` is not deleted within: its request may have to move to a worker that must pull it."""
        if ref is None:
            yield
            return
        self.hold(ref.hash)
        try:
            yield
        finally:
            if self._release(ref.hash):
                await self.delete_unnamed(versions.unnamed, ref.hash)

    def hold(self, digest: str) -> None:
        """Pin an artifact until :meth:`named` or :meth:`drop`."""
        with self._lock:
            self.pins[digest] += 1

    def commit(self, staging: Staging) -> protocol.Manifest:
        """Store an upload; it is pinned, and durable when this returns. Runs in :meth:`Store.transfer`."""
        digest = staging.manifest().hash
        with self._deletion:
            self.hold(digest)
        try:
            return staging.commit()
        except BaseException:
            self._release(digest)
            raise

    def named(self, digest: str) -> None:
        """A version names the artifact now: end its pin."""
        self._release(digest)

    def drop(self, policy: str, digest: str) -> None:
        """Runs in :meth:`Store.transfer`: end the pin of an artifact that was uploaded for ``policy`` and, as far as
        known, never named; delete it if so. Where that cannot be established, it stays until the next start."""
        try:
            with self._deletion:
                self._release(digest)
                if not self._store.database.write(versions.names, policy, digest):
                    self._delete(digest)
        except (StorageFull, Unavailable, OSError) as error:  # the error that ended the step is the one to report
            log.warning("artifact %s of %s stays until the next start: %s", digest, policy, error,
                        extra={"policy": policy})  # fmt: skip

    def _release(self, digest: str) -> bool:
        """Whether that was the last pin of an artifact whose deletion was deferred."""
        with self._lock:
            self.pins[digest] -= 1
            if self.pins[digest]:
                return False
            del self.pins[digest]
            deferred = digest in self.deferred
            self.deferred.discard(digest)
            return deferred

    # --- deletion -----------------------------------------------------------------------------------------------------

    async def delete_unnamed(self, function: Callable[..., str | None], *arguments: Any) -> None:
        """Run a repository function that deletes a row and returns the hash of an artifact that nothing names any more,
        or None; delete that artifact, here and at every worker."""

        def both() -> str | None:
            digest = self._store.database.write(function, *arguments)
            return digest if digest is not None and self._delete(digest) else None

        if (deleted := await self._store.run(both)) is not None:
            self._references.unpublish([deleted])

    async def collect_all(self, now: float, keep: float) -> None:
        """Delete half-written uploads and every artifact that nothing has named for ``keep`` seconds before ``now``.
        Only at start, before new uploads."""
        await self._store.transfer(self._artifacts.sweep)
        live = await self._store.read(versions.live_hashes)
        for digest in await self._store.transfer(self._artifacts.prune, live, now, keep):
            log.info("deleted artifact %s, which no commit names", digest)

    def _delete(self, digest: str) -> bool:
        """Whether the artifact was deleted: not while it is pinned."""
        with self._deletion:
            with self._lock:
                if digest in self.pins:
                    self.deferred.add(digest)
                    return False
            self._artifacts.delete(digest)
            return True
