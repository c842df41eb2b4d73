"""Permissions to read or write bytes over HTTP: short-lived tickets for named bytes, and the read keys of workers.

* A download ticket lets anybody who has the link read the adapter of one artifact, by an HMAC under this process's
  secret. It names the tenant that asked for it, in whose name it is read. Workers read artifacts without one, by their
  read keys (:class:`ReadKeys`).
* A published batch stays in memory, for the worker that has its ticket, until it is retracted.
* An upload ticket names one staging folder of the artifact store, until its operation ends.
"""

from __future__ import annotations

import base64
import hmac
import json
import secrets
from collections.abc import Callable

from rookery import protocol
from rookery.clock import Clock
from rookery.storage.artifacts import Artifacts, Staging

TICKET_SECONDS = 600.0
"""Lifetime of a link of the Tinker API with which a checkpoint is downloaded without a key: long enough for a download
over a slow network to begin, too short to be kept."""


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

    def grant(self, tenant: str, digest: str) -> str:
        """A ticket that downloads the artifact ``digest`` in the tenant's name until it expires."""
        until = str(int(self._clock.time() + self._seconds))
        return f"{until}.{self._sign(tenant, digest, until)}.{tenant}"

    def reader(self, ticket: str, digest: str) -> str | None:
        """The tenant in whose name ``ticket`` downloads the artifact ``digest`` now; None for any other ticket."""
        until, _, rest = ticket.partition(".")
        signature, _, tenant = rest.partition(".")
        if not hmac.compare_digest(signature.encode(), self._sign(tenant, digest, until).encode()):
            return None
        return tenant if int(until) >= self._clock.time() else None  # a number: this process wrote it

    def _sign(self, *signed: str) -> str:
        return hmac.digest(self._secret, json.dumps(signed).encode(), "sha256").hex()

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


class ReadKeys:
    """The read keys with which workers read artifacts from the service (:mod:`rookery.protocol.reads`)."""

    def __init__(self, signing_time: Callable[[], float]) -> None:
        """``signing_time``: that of the welcomes, :meth:`~rookery.controller.fleet.fleet.Fleet.signing_time`."""
        self._signing_time = signing_time
        self._known: dict[str, tuple[protocol.ReadKey, str]] = {}
        """By id: the key, and the hash of the API key."""

    def add(self, key_hash: str) -> protocol.ReadKey:
        """The read key of the workers with the API key of this hash, known from now on."""
        key = protocol.read_key(key_hash)
        self._known[key.id] = (key, key_hash)
        return key

    def reader(self, header: str, digest: str) -> str | None:
        """The hash of the API key whose worker signed ``header`` to read the artifact ``digest`` now; None for any
        other header."""
        known = self._known.get(header.partition(".")[0])
        if known is None or not protocol.may_read(header, digest, self._signing_time(), lambda id: known[0].secret):
            return None
        return known[1]
