"""Which workers serve an artifact to other workers.

* Only working workers that offer an address and reported the adapter are named as peers. Nothing depends on a peer:
  one that is gone, or has evicted the adapter, costs a failed connection, and the service has every artifact.
* A bounded number of holders is considered for each grant, those first that have served it longest ago.
* A peer learns of a ticket before anybody presents it: both messages leave here, the peer's first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from rookery import protocol
from rookery.clock import Clock
from rookery.controller.fleet.worker import Worker
from rookery.controller.weights.tickets import Tickets
from rookery.scheduling.peers import PeerCandidate, select_peers

PEERS_PER_GRANT = 2
"""A second peer in case the first is gone; after both, the worker asks the service."""

CANDIDATES = 16
"""Holders considered per grant, so that its cost does not grow with the number of holders."""


@dataclass
class TicketLease:
    """A ticket that serves several grants of one artifact, so that each peer is notified once."""

    ticket: str
    until: float
    notified: set[Worker] = field(default_factory=set)


class PeerDirectory:
    """Which workers may serve an artifact to others, and under which ticket."""

    def __init__(self, tickets: Tickets, clock: Clock, seconds: float) -> None:
        """``seconds``: how long a ticket is valid."""
        self._tickets = tickets
        self._clock = clock
        self._seconds = seconds
        self._holders: dict[str, dict[Worker, None]] = {}
        """By hash, in the order of their last grant, oldest first."""
        self._last_grant: dict[Worker, float] = {}
        self._leases: dict[str, TicketLease] = {}

    def add(self, worker: Worker, hashes: Iterable[str]) -> None:
        """``worker`` has these adapters and may be named as a peer for them."""
        if worker.hello.address:
            for digest in hashes:
                self._holders.setdefault(digest, {}).setdefault(worker)

    def remove_worker(self, worker: Worker) -> None:
        """It is not named as a peer any more."""
        self._last_grant.pop(worker, None)
        for digest in worker.cached:
            if (holders := self._holders.get(digest)) is not None:
                holders.pop(worker, None)
                if not holders:
                    del self._holders[digest]

    def evict(self, hashes: Iterable[str]) -> None:
        """These artifacts will not be requested again."""
        for digest in hashes:
            self._holders.pop(digest, None)
            self._leases.pop(digest, None)

    def adapter_ref(self, worker: Worker, ref: protocol.AdapterRef) -> protocol.AdapterRef:
        """``ref`` with a ticket for ``worker``, which may renew it from now on."""
        worker.authorized.add(ref.hash)
        granted = self.grant(worker, ref.hash)
        return msgspec.structs.replace(ref, ticket=granted.ticket, peers=granted.peers)

    def grant(self, worker: Worker, digest: str) -> protocol.TicketGrant:
        """A ticket for the service, and the addresses of peers that accept it."""
        peers = self._peers(worker, digest) if digest not in worker.cached else []
        if not peers:
            return protocol.TicketGrant(hash=digest, ticket=self._tickets.grant(digest))
        now = self._clock.monotonic()
        lease = self._leases.get(digest)
        if lease is None or now > lease.until - self._seconds / 2:
            lease = self._leases[digest] = TicketLease(self._tickets.grant(digest), now + self._seconds)
        holders = self._holders[digest]
        for peer in peers:
            if peer not in lease.notified:
                lease.notified.add(peer)
                peer.post(protocol.ServeArtifact(hash=digest, ticket=lease.ticket, seconds=lease.until - now))
            self._last_grant[peer] = now
            holders[peer] = holders.pop(peer)  # to the end
        return protocol.TicketGrant(hash=digest, ticket=lease.ticket, peers=[peer.hello.address for peer in peers])

    def _peers(self, worker: Worker, digest: str) -> list[Worker]:
        first = islice(self._holders.get(digest, ()), CANDIDATES)
        able = {peer.name: peer for peer in first if peer is not worker}
        candidates = [
            PeerCandidate(name, peer.hello.host == worker.hello.host, self._last_grant.get(peer, 0.0))
            for name, peer in able.items()
        ]
        return [able[name] for name in select_peers(candidates, PEERS_PER_GRANT)]
