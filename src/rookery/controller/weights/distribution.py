"""What workers are asked to have in their caches, what they said they have, and who is slow to get it.

* A newer version of a policy overtakes older ones that a worker was asked for and has not: they need not come any more.
* A worker that took much longer for a version than the first one did, or was overtaken by the next version, is *slow*:
  until it has a version it is given no request for it. Requests go to the others, whose pulls it does not hold up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rookery import protocol
from rookery.aio import Clock
from rookery.controller.fleet.worker import AdapterRequested, Worker
from rookery.controller.weights.peers import PeerDirectory

SLOW_FACTOR = 3.0
"""A slow worker took this many times as long as the first one …"""

SLOW_SECONDS = 0.5
"""… and this much longer: what is quick anyhow needs no judging."""


class AdapterResidency:
    """Changes workers' ``holds``, ``asked``, ``behind`` and ``slow``; their states are the fleet's."""

    def __init__(self, lending: PeerDirectory, clock: Clock) -> None:
        self._lending = lending
        self._clock = clock
        self._quickest: dict[str, float] = {}
        """By hash: seconds that the first worker took for what it was asked for."""

    def prefetch(self, worker: Worker, refs: Sequence[protocol.AdapterRef]) -> None:
        """Have these in the cache."""
        now = self._clock.monotonic()
        for ref in refs:
            if self._overtake(worker, ref, worker.prefetch_requests.keys() - worker.lagging):
                worker.slow = True
        worker.prefetch_requests.update((ref.hash, AdapterRequested(ref, now)) for ref in refs)
        worker.post(protocol.PrefetchAdapters(refs=[self._lending.adapter_ref(worker, ref) for ref in refs]))

    def on_cached(self, worker: Worker, hashes: Iterable[str]) -> None:
        """``worker`` said that it has these."""
        worker.cached.update(hashes)
        self._lending.holds(worker, hashes)
        for digest in hashes:
            asked = worker.prefetch_requests.pop(digest, None)
            worker.lagging.discard(digest)
            if asked is not None:
                self._judge(worker, digest, self._clock.monotonic() - asked.since)
                self._overtake(worker, asked.ref, set(worker.prefetch_requests))

    def clear_missing(self, worker: Worker, digest: str) -> None:
        """It need not have this."""
        worker.prefetch_requests.pop(digest, None)
        worker.lagging.discard(digest)

    def evict(self, workers: Iterable[Worker], hashes: Sequence[str]) -> None:
        """No work will name these again."""
        self._lending.evict(hashes)
        for digest in hashes:
            self._quickest.pop(digest, None)
        for worker in workers:
            worker.post(protocol.EvictArtifacts(hashes=list(hashes)))
            worker.cached.difference_update(hashes)
            worker.named.difference_update(hashes)
            for digest in hashes:
                self.clear_missing(worker, digest)

    def _judge(self, worker: Worker, digest: str, seconds: float) -> None:
        quickest = self._quickest.setdefault(digest, seconds)
        worker.slow = seconds > SLOW_FACTOR * quickest + SLOW_SECONDS

    @staticmethod
    def _overtake(worker: Worker, by: protocol.AdapterRef, asked: Iterable[str]) -> bool:
        """Of these that it was asked for, older versions of the policy than ``by`` need not come any more; whether
        there were any."""
        older = [
            digest
            for digest in asked
            if (ref := worker.prefetch_requests[digest].ref).policy == by.policy and ref.version < by.version
        ]
        for digest in older:
            del worker.prefetch_requests[digest]
            worker.lagging.discard(digest)
        return bool(older)
