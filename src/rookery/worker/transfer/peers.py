"""Adapters from other workers of the service.

* A peer is asked only for what the controller named it for, with the ticket that it named; what it gives is checked by
  who asked.
* One that fails in any way, or gives no byte for a named time, is left at the byte where it stopped. If it could not be
  reached, broke off or sent something wrong, it is left alone for a while; if it has not this one, or is busy, it may
  be asked for the next.
* Nothing raises: what the peers do not give, the service has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from rookery import protocol
from rookery.worker.transfer.http import (
    RetryTransfer,
    TicketRefused,
    TransferFailed,
    fill,
    manifest_in,
    one_line,
    raise_for_status,
    size_of,
)

log = logging.getLogger("rookery.worker.transfer.client")

AVOID_SECONDS = 60.0
"""A peer that failed is not asked for this long: it may be gone, or out of reach from here."""


class PeerClient:
    """Belongs to the I/O thread."""

    def __init__(self, seconds: float) -> None:
        """``seconds``: how long a peer may be silent."""
        self._http = httpx.AsyncClient(timeout=seconds, trust_env=False)  # no proxy stands between workers
        self._named: dict[str, tuple[str, list[str]]] = {}
        """By hash: the ticket, and whom to ask."""
        self._avoided: dict[str, float] = {}
        """Peers that failed, and until when they are left alone."""
        self.bytes_received = 0
        """Bytes that came from peers."""

    async def close(self) -> None:
        await self._http.aclose()

    def name(self, digest: str, ticket: str, peers: Sequence[str]) -> None:
        """``peers`` lend the artifact for ``ticket``."""
        self._named[digest] = (ticket, list(peers))

    def forget(self, digest: str) -> None:
        self._named.pop(digest, None)

    async def manifest(self, digest: str) -> bytes | None:
        """The artifact's manifest as a peer gave it, checked; None where none did."""
        for ticket, peer in self._able(digest):
            with self._trying(digest, peer):
                headers = {"X-Rookery-Ticket": ticket}
                response = await self._http.get(f"{peer}/artifacts/{digest}", headers=headers)
                raise_for_status("GET", str(response.url), response.status_code)
                manifest_in(response.content, digest)
                return response.content
        return None

    async def fill(self, digest: str, shard: protocol.Shard, part: Path) -> bool:
        """Bring the file ``part`` as far as the peers give it; whether any of them gave a byte."""
        before = size_of(part)
        for ticket, peer in self._able(digest):
            if size_of(part) == shard.size:
                break
            with self._trying(digest, peer):
                url = f"{peer}/artifacts/{digest}/{shard.name}"
                await fill(self._http, url, ticket, part, shard.size, self._count)
        return size_of(part) != before

    def mark_failed(self, digest: str) -> None:
        """What they gave was wrong; it may have been any of them."""
        ticket, peers = self._named.get(digest, ("", []))
        self._backoff_until(peers)
        self._named[digest] = (ticket, [])

    def _count(self, size: int) -> None:
        self.bytes_received += size

    def _able(self, digest: str) -> list[tuple[str, str]]:
        ticket, peers = self._named.get(digest, ("", []))
        now = time.monotonic()
        return [(ticket, peer) for peer in peers if self._avoided.get(peer, 0.0) < now]

    @contextmanager
    def _trying(self, digest: str, peer: str) -> Iterator[None]:
        """A peer that fails within gives no more of this artifact."""
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL, TransferFailed, RetryTransfer) as error:
            log.info("peer %s gives no more: %s", peer, one_line(error))
            named = self._named.get(digest)
            if named is not None and peer in named[1]:
                named[1].remove(peer)
            if not isinstance(error, TicketRefused | RetryTransfer):
                self._backoff_until([peer])

    def _backoff_until(self, peers: Sequence[str]) -> None:
        now = time.monotonic()
        self._avoided = {peer: until for peer, until in self._avoided.items() if until > now}
        self._avoided.update(dict.fromkeys(peers, now + AVOID_SECONDS))
