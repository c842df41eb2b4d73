"""Tickets, short-lived permission to read or write named bytes over HTTP, and the peers that serve artifacts for them.

* A read ticket is bound to one artifact hash by an HMAC under this process's secret: a hash is a name, not a
  permission.
* A published batch stays in memory, for the worker that has its ticket, until it is retracted.
* An upload ticket names one staging folder of the artifact store, until its operation ends.
* Only working workers that offer an address and reported the adapter are named as peers. Nothing depends on a peer:
  one that is gone, or has evicted the adapter, costs a failed connection, and the service has every artifact.
* A bounded number of holders is considered for each grant, those first that have served it longest ago.
* A peer learns of a ticket before anybody presents it: both messages leave here, the peer's first.
"""

from __future__ import annotations

import base64
import hmac
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from rookery import protocol
from rookery.clock import Clock
from rookery.controller.fleet.worker import Worker
from rookery.scheduling.peers import PeerCandidate, select_peers
from rookery.storage.artifacts import Artifacts, Staging

PEERS_PER_GRANT = 2
"""A second peer in case the first is gone; after both, the worker asks the service."""

CANDIDATES = 16
"""Holders considered per grant, so that its cost does not grow with the number of holders."""


class Tickets:
    def __init__(
        self,
        artifacts: Artifacts,
        clock: Clock,
        seconds: float,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self.artifacts = artifacts
        self._clock = clock
        self._seconds = seconds
        self._random_bytes = random_bytes
        self._secret = random_bytes(32)
        self._batches: dict[str, bytes] = {}
        self._uploads: dict[str, Staging] = {}

    def grant(self, digest: str) -> str:
        """A ticket that reads the artifact ``digest`` until it expires."""
        until = str(int(self._clock.time() + self._seconds))
        return f"{until}.{self._sign(digest, until)}"

    def reads(self, ticket: str, digest: str) -> bool:
        """Whether ``ticket`` opens the artifact ``digest`` now."""
        until, _, signature = ticket.partition(".")
        if not hmac.compare_digest(signature.encode(), self._sign(digest, until).encode()):
            return False
        return int(until) >= self._clock.time()  # a number: this process wrote it

    def _sign(self, digest: str, until: str) -> str:
        return hmac.digest(self._secret, f"{digest}.{until}".encode(), "sha256").hex()

    def _new(self) -> str:
        return base64.urlsafe_b64encode(self._random_bytes(24)).decode()

    def publish_batch(self, content: bytes) -> str:
        """A ticket that reads ``content`` until :meth:`retract_batch`."""
        ticket = self._new()
        self._batches[ticket] = content
        return ticket

    def open_batch(self, ticket: str) -> bytes | None:
        """The published bytes, or None when they were retracted."""
        return self._batches.get(ticket)

    def retract_batch(self, ticket: str) -> None:
        self._batches.pop(ticket, None)

    def upload(self) -> str:
        """A ticket under which a worker may write one artifact's shards."""
        ticket = self._new()
        self._uploads[ticket] = self.artifacts.begin()
        return ticket

    def staging(self, ticket: str) -> Staging | None:
        """The folder that ``ticket`` writes to, or None when the upload has ended."""
        return self._uploads.get(ticket)

    def collect(self, ticket: str) -> Staging | None:
        """End an upload: the caller commits or abandons the staged files."""
        return self._uploads.pop(ticket, None)


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
