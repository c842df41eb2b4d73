"""The read keys of workers: who may read artifacts from the service (:mod:`rookery.protocol.reads`)."""

from __future__ import annotations

from rookery import protocol
from rookery.clock import Clock


class ReadKeys:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
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
        if known is None or not protocol.may_read(header, digest, self._clock.time(), lambda id: known[0].secret):
            return None
        return known[1]
