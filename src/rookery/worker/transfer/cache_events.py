"""What the controller is to be told of this worker's cache: adapters that arrived, and those that could not be had."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from rookery import protocol


class CacheEvents:
    """Belongs to the I/O thread. Whoever sends it waits for ``some`` and takes it."""

    def __init__(self) -> None:
        self.some = asyncio.Event()
        self._known: set[str] = set()
        """What the present connection's controller knows to be here."""
        self._arrived: list[str] = []
        self._absent: dict[str, str] = {}

    def begin(self, known: Iterable[str]) -> None:
        """A new connection's ``Hello`` tells of these."""
        self._known = set(known)
        self._arrived.clear()
        self._absent.clear()

    def asked(self, hashes: Iterable[str]) -> None:
        """The controller wants to hear of these, whatever it was told before."""
        self._known.difference_update(hashes)

    def arrived(self, digest: str) -> None:
        if digest not in self._known:
            self._known.add(digest)
            self._arrived.append(digest)
            self.some.set()

    def failed(self, digest: str, error: str) -> None:
        self._absent[digest] = error
        self.some.set()

    def forget(self, digest: str) -> None:
        """It is not here any more."""
        self._known.discard(digest)

    def take(self, epoch: int) -> list[protocol.Message]:
        """What there is to say, once."""
        self.some.clear()
        said: list[protocol.Message] = [
            protocol.PullFailed(epoch=epoch, hash=h, error=why) for h, why in self._absent.items()
        ]
        if self._arrived:
            said.append(protocol.AdaptersCached(epoch=epoch, hashes=list(self._arrived)))
        self._arrived.clear()
        self._absent.clear()
        return said
