"""Distribution of adapter versions to workers: prefetch, tickets, slow workers, failed pulls.

* A newer version of a policy supersedes older ones that a worker was asked to cache and has not: those need not arrive.
* A worker that takes much longer for a version than the first one did, or that misses a version before the next one
  is published, is *slow*: until it has a version it gets no request for it. Requests go to workers that have it.
* A failed pull is checked against the service's copy. If that is intact, the fault lies between it and the worker: the
  worker becomes suspect. If not, no worker can have the artifact and none becomes suspect; the work that names it fails
  with that reason. However many workers report one artifact at a time, it is hashed once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from rookery import protocol
from rookery.aio import BackgroundTasks
from rookery.clock import Clock
from rookery.controller.fleet.events import AdapterLoaded, AdapterPullFailed
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.fleet.worker import AdapterRequested, Worker
from rookery.controller.weights.peer_directory import PeerDirectory
from rookery.errors import CorruptArtifact, NotFound, Unavailable
from rookery.storage.artifacts import Artifacts
from rookery.storage.models import CheckpointRow, PolicyRow, VersionRow
from rookery.storage.store import Writer

log = logging.getLogger("rookery.controller.weights.distribution")

SLOW_FACTOR = 3.0
"""A slow worker took this many times as long as the first one …"""

SLOW_SECONDS = 0.5
"""… and this much longer: short pulls are not judged."""

MOST_CACHED = 100_000
"""Adapters that a worker may report, each with a hash of 64 characters: more than fit any cache."""


def adapter_ref(policy: PolicyRow, row: VersionRow | CheckpointRow) -> protocol.AdapterRef:
    """The reference to a stored version of ``policy``, whose rank and alpha all of its versions share."""
    return protocol.AdapterRef(
        policy=policy.id, version=row.version, hash=row.hash, rank=policy.rank, alpha=policy.alpha
    )


class AdapterResidency:
    """Which worker caches which adapter, and which ones it must pull. Keeps ``cached``, ``prefetch_requests``,
    ``lagging`` and ``slow`` of every :class:`Worker`."""

    def __init__(self, fleet: Fleet, peers: PeerDirectory, artifacts: Artifacts, writer: Writer, clock: Clock) -> None:
        self.failed_pulls = 0
        """Pulls of artifacts that a worker reported as failed."""
        self._fleet = fleet
        self._peers = peers
        self._artifacts = artifacts
        self._writer = writer
        self._clock = clock
        self._quickest: dict[str, float] = {}
        """By hash: seconds from the request to the first worker's report."""
        self._failures: dict[str, list[tuple[Worker, str]]] = {}
        """By hash, while the service's copy is being checked: the workers that failed to pull it, and their errors."""
        self._checks = BackgroundTasks()

    async def close(self) -> None:
        await self._checks.cancel()

    # --- the service's side -------------------------------------------------------------------------------------------

    def adapter_ref(self, worker: Worker, ref: protocol.AdapterRef) -> protocol.AdapterRef:
        """``ref`` with a ticket that ``worker`` may use, and with peers that serve it for this ticket."""
        return self._peers.adapter_ref(worker, ref)

    def announce(self, model: str, ref: protocol.AdapterRef) -> None:
        """``ref`` is published: rollout workers of ``model`` prefetch it. Returns at once."""
        for worker in self._fleet.serving("rollout", model):
            if ref.hash not in worker.cached:
                self._prefetch(worker, [ref])
                self._fleet.refresh(worker)

    def evict(self, hashes: Sequence[str]) -> None:
        """No work will name these artifacts again: workers delete them."""
        self._peers.evict(hashes)
        for digest in hashes:
            self._quickest.pop(digest, None)
        for worker in self._fleet.all():
            if worker.working or worker.state == "joining":
                worker.post(protocol.EvictArtifacts(hashes=list(hashes)))
                worker.cached.difference_update(hashes)
                worker.authorized.difference_update(hashes)
                for digest in hashes:
                    _clear_missing(worker, digest)
                self._fleet.refresh(worker)

    # --- events -------------------------------------------------------------------------------------------------------

    def on_worker_loaded(self, worker: Worker, in_use: Sequence[protocol.AdapterRef]) -> None:
        """``in_use``: the versions of its base model that running jobs sample from."""
        self._peers.add(worker, worker.cached)
        if "rollout" in worker.roles:
            missing = [ref for ref in in_use if ref.hash not in worker.cached]
            if missing:
                worker.lagging = {ref.hash for ref in missing}
                self._prefetch(worker, missing)

    def on_worker_lost(self, worker: Worker) -> None:
        self._peers.remove_worker(worker)

    def on_cached(self, worker: Worker, message: protocol.AdaptersCached) -> None:
        if len(worker.cached) + len(message.hashes) > MOST_CACHED or any(len(digest) > 64 for digest in message.hashes):
            raise protocol.BadFrame(f"{len(message.hashes)} more adapters in its cache")
        worker.cached.update(message.hashes)
        self._peers.add(worker, message.hashes)
        for digest in message.hashes:
            requested = worker.prefetch_requests.pop(digest, None)
            worker.lagging.discard(digest)
            if requested is not None:
                seconds = self._clock.monotonic() - requested.since
                quickest = self._quickest.setdefault(digest, seconds)
                worker.slow = seconds > SLOW_FACTOR * quickest + SLOW_SECONDS
                _supersede(worker, requested.ref, set(worker.prefetch_requests))
                self._fleet.emit(AdapterLoaded(self._clock.time(), worker, requested.ref, seconds))
        self._fleet.refresh(worker)

    def on_ticket_request(self, worker: Worker, message: protocol.TicketRequest) -> None:
        if message.hash in worker.authorized:  # a hash is no permission: only artifacts that its work names
            worker.post(self._peers.grant(worker, message.hash))

    def _prefetch(self, worker: Worker, refs: Sequence[protocol.AdapterRef]) -> None:
        now = self._clock.monotonic()
        for ref in refs:
            if _supersede(worker, ref, worker.prefetch_requests.keys() - worker.lagging):
                worker.slow = True
        worker.prefetch_requests.update((ref.hash, AdapterRequested(ref, now)) for ref in refs)
        worker.post(protocol.PrefetchAdapters(refs=[self._peers.adapter_ref(worker, ref) for ref in refs]))

    # --- failed pulls -------------------------------------------------------------------------------------------------

    def on_pull_failed(self, worker: Worker, message: protocol.PullFailed) -> None:
        if message.hash not in worker.authorized:
            return  # not named by its work: perhaps requested on an earlier connection
        self.failed_pulls += 1
        self._fleet.emit(AdapterPullFailed(self._clock.time(), worker, message.hash, message.error))
        failures = self._failures.setdefault(message.hash, [])
        failures.append((worker, message.error))
        if len(failures) == 1:
            self._checks.start(self._check_copy(message.hash))

    async def _check_copy(self, digest: str) -> None:
        """Hash the service's copy and decide about the workers that could not pull it."""
        fault = ""
        try:
            await self._writer(self._artifacts.verify, digest)
        except (CorruptArtifact, NotFound, Unavailable, OSError) as error:
            fault = str(error)
        finally:
            failures = self._failures.pop(digest)
        for worker, reason in failures:
            if fault:
                log.error("worker %s failed to pull artifact %s: %s", worker.name, digest[:12], fault,
                          extra={"worker": worker.name})  # fmt: skip
                _clear_missing(worker, digest)
                self._fleet.refresh(worker)
            else:
                self._fleet.suspect(worker, f"it cannot pull artifact {digest[:12]}, which the service has: {reason}")


def _clear_missing(worker: Worker, digest: str) -> None:
    """The worker need not cache this artifact any more."""
    worker.prefetch_requests.pop(digest, None)
    worker.lagging.discard(digest)


def _supersede(worker: Worker, by: protocol.AdapterRef, requested: Iterable[str]) -> bool:
    """Cancel the ``requested`` versions that are older than ``by`` of the same policy; whether there were any."""
    older = [
        digest
        for digest in requested
        if (ref := worker.prefetch_requests[digest].ref).policy == by.policy and ref.version < by.version
    ]
    for digest in older:
        _clear_missing(worker, digest)
    return bool(older)
