"""Who may read which adapter where: tickets for the service, and peers that were told to honour the same ticket.

* Only workers that offer an address, are at work and said that they hold an adapter are named as its peers. Nobody
  depends on that: a peer that is gone, or has it no more, costs its asker a failed connection, and the service has
  everything.
* Of an artifact's lenders a bounded number is looked at for each grant, those first that have lent it longest ago.
* A peer hears of a ticket before anybody brings it there: both frames leave here, the lender's first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from rookery import protocol
from rookery.aio import Clock
from rookery.controller.fleet.worker import Worker
from rookery.controller.weights.tickets import Tickets
from rookery.scheduling.placement import PeerCandidate, select_peers

PEERS = 2
"""Peers named per grant: a second one where the first is gone; behind both there is the service."""

LOOKED_AT = 16
"""Lenders among whom those are chosen, so that a grant costs the same however many hold the adapter."""


@dataclass
class TicketLease:
    """A ticket that serves several grants of one artifact, so that its lenders are told once."""

    ticket: str
    until: float
    told: set[Worker] = field(default_factory=set)


class PeerDirectory:
    def __init__(self, tickets: Tickets, clock: Clock, seconds: float) -> None:
        """``seconds``: how long a ticket is good."""
        self._tickets = tickets
        self._clock = clock
        self._seconds = seconds
        self._lenders: dict[str, dict[Worker, None]] = {}
        """By hash, the one that lent it longest ago first."""
        self._lent: dict[Worker, float] = {}
        """When each lender was last told to lend."""
        self._loans: dict[str, TicketLease] = {}

    # --- who has what -------------------------------------------------------------------------------------------------

    def holds(self, worker: Worker, hashes: Iterable[str]) -> None:
        """``worker`` has these adapters and may be named as a peer for them."""
        if worker.hello.address:
            for digest in hashes:
                self._lenders.setdefault(digest, {}).setdefault(worker)

    def remove_worker(self, worker: Worker) -> None:
        """It lends nothing any more."""
        self._lent.pop(worker, None)
        if worker.hello.address:
            for digest in worker.cached:
                self._remove(digest, worker)

    def evict(self, hashes: Iterable[str]) -> None:
        """Nobody will ask for these again."""
        for digest in hashes:
            self._lenders.pop(digest, None)
            self._loans.pop(digest, None)

    def _remove(self, digest: str, worker: Worker) -> None:
        able = self._lenders.get(digest)
        if able is not None:
            able.pop(worker, None)
            if not able:
                del self._lenders[digest]

    # --- who may read what --------------------------------------------------------------------------------------------

    def adapter_ref(self, worker: Worker, ref: protocol.AdapterRef) -> protocol.AdapterRef:
        """``ref`` as ``worker`` may read it from now on."""
        worker.named.add(ref.hash)
        granted = self.grant(worker, ref.hash)
        return msgspec.structs.replace(ref, ticket=granted.ticket, peers=granted.peers)

    def grant(self, worker: Worker, digest: str) -> protocol.TicketGrant:
        """A ticket for the service, and who lends the artifact for it."""
        peers = self._peers(worker, digest) if digest not in worker.cached else []
        if not peers:
            return protocol.TicketGrant(hash=digest, ticket=self._tickets.grant(digest))
        now = self._clock.monotonic()
        loan = self._loans.get(digest)
        if loan is None or now > loan.until - self._seconds / 2:
            loan = self._loans[digest] = TicketLease(self._tickets.grant(digest), now + self._seconds)
        able = self._lenders[digest]
        for peer in peers:
            if peer not in loan.told:
                loan.told.add(peer)
                peer.post(protocol.ServeArtifact(hash=digest, ticket=loan.ticket, seconds=loan.until - now))
            self._lent[peer] = now
            able[peer] = able.pop(peer)  # to the end
        return protocol.TicketGrant(hash=digest, ticket=loan.ticket, peers=[peer.hello.address for peer in peers])

    def _peers(self, worker: Worker, digest: str) -> list[Worker]:
        first = islice(self._lenders.get(digest, ()), LOOKED_AT)
        able = {peer.name: peer for peer in first if peer is not worker}
        host = worker.hello.host
        chosen = select_peers(
            (PeerCandidate(name, peer.hello.host == host, self._lent.get(peer, 0.0)) for name, peer in able.items()),
            PEERS,
        )
        return [able[name] for name in chosen]
