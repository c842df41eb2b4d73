"""Deletion of artifacts that nothing names any more, here and at every worker.

* An artifact that a running request reads stays until its last reader has ended.
* An artifact that a training step uploaded stays while a version may come to name it (``pinned``): equal content is one
  artifact, so retention of one job must not delete the upload of another.
* A stray upload whose fate cannot be established stays until the next start.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from rookery import protocol
from rookery.controller.fleet.fleet import Fleet
from rookery.errors import StorageFull, Unavailable
from rookery.storage.artifacts import Artifacts
from rookery.storage.store import Store

log = logging.getLogger("rookery.controller.weights.gc")


class ArtifactCollector:
    def __init__(self, store: Store, artifacts: Artifacts, fleet: Fleet, pinned: Mapping[str, int]) -> None:
        """``pinned`` counts, by hash, the artifacts that are durable and that a version is about to name."""
        self.readers: Counter[str] = Counter()
        """Running requests by the hash of the artifact that they read."""
        self.deferred: set[str] = set()
        """Artifacts that nothing names any more and that are still read: the last reader deletes them."""
        self._store = store
        self._artifacts = artifacts
        self._fleet = fleet
        self._pinned = pinned

    @asynccontextmanager
    async def reading(self, ref: protocol.AdapterRef | None) -> AsyncIterator[None]:
        """The artifact of ``ref`` is not deleted within: its request may have to move to a worker that must pull it."""
        if ref is None:
            yield
            return
        self.readers[ref.hash] += 1
        try:
            yield
        finally:
            self.readers[ref.hash] -= 1
            if not self.readers[ref.hash]:
                del self.readers[ref.hash]
                if ref.hash in self.deferred:
                    self.deferred.discard(ref.hash)
                    await self.delete_unnamed(self._unless_named, ref.hash)

    async def delete_unnamed(self, call: Callable[..., str | None], *arguments: Any) -> None:
        """Run ``call``, which returns the hash of an artifact that nothing names any more or None, and delete that
        artifact, here and at every worker."""

        def both() -> str | None:
            digest = call(*arguments)
            return digest if digest is not None and self._delete(digest) else None

        if (gone := await self._store.run(both)) is not None:
            self._fleet.evict([gone])

    def delete_stray(self, policy: str, digest: str) -> None:
        """Runs in the writer thread: the artifact was uploaded for ``policy`` and, as far as known, never named.
        Where that cannot be established, it stays until the next start."""
        try:
            if not self._store.database.names(policy, digest):
                self._delete(digest)
        except (StorageFull, Unavailable, OSError) as error:  # the error that ended the step is the one to report
            log.warning("artifact %s of %s stays until the next start: %s", digest, policy, error,
                        extra={"policy": policy})  # fmt: skip

    def _unless_named(self, digest: str) -> str | None:
        return None if digest in self._store.database.live_hashes() else digest

    def _delete(self, digest: str) -> bool:
        """Runs in the writer thread. Deletes the artifact unless it is pinned or read."""
        if digest in self._pinned:
            return False
        self.deferred.add(digest)  # before the check: a reader that starts now finds it there when it ends
        if digest in self.readers:
            return False
        self.deferred.discard(digest)
        self._artifacts.delete(digest)
        return True
