"""The artifacts that a worker serves to others, and signed reads. The I/O thread writes, the peer server's reads."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from rookery import protocol

MOST_WITHDRAWN = 4096
"""Withdrawn artifacts that are known: the folder of one is renamed at once, so this matters for moments only."""


@dataclass(eq=False)
class ArrivingShard:
    """A file of an artifact that is being received: others read the bytes that are there, and wait for the next."""

    path: Path
    size: int
    ended: bool = False
    """Nothing more is appended to it: it is complete, or was wrong and is received again."""


class PublishedArtifacts:
    """Artifacts that are withdrawn, and those that arrive; all others in the cache are served once they are
    complete."""

    def __init__(self) -> None:
        self._withdrawn: dict[str, None] = {}
        """The newest :data:`MOST_WITHDRAWN`, oldest first. Replaced, never changed: another thread reads it."""
        self._arriving: dict[str, dict[str, ArrivingShard]] = {}

    def publish(self, digest: str) -> None:
        """It may have new readers."""
        self._withdrawn = {one: None for one in self._withdrawn if one != digest}

    def unpublish(self, digest: str) -> None:
        """It gets no new reader; running ones read on."""
        self._withdrawn = dict.fromkeys([*self._withdrawn, digest][-MOST_WITHDRAWN:])

    def begin(self, digest: str) -> None:
        """It is being received: its shards are served as they arrive."""
        self.publish(digest)
        self._arriving.setdefault(digest, {})

    def arrive(self, digest: str, shard: protocol.Shard, path: Path) -> ArrivingShard:
        """The bytes of ``shard`` are appended to ``path`` from now on."""
        arriving = ArrivingShard(path, shard.size)
        self._arriving.setdefault(digest, {})[shard.name] = arriving
        return arriving

    def end(self, digest: str) -> None:
        """It is complete, or is not received any more."""
        for shard in self._arriving.pop(digest, {}).values():
            shard.ended = True

    # --- in the server's thread -------------------------------------------------------------------------------------

    def withdrawn(self, digest: str) -> bool:
        return digest in self._withdrawn

    def arriving(self, digest: str) -> bool:
        return digest in self._arriving

    def shard(self, digest: str, name: str) -> ArrivingShard | None:
        """A shard that arrives now."""
        shard = self._arriving.get(digest, {}).get(name)
        return shard if shard is not None and not shard.ended else None


class Reads:
    """Signs and checks reads with the key of the last welcome, in the service's time."""

    def __init__(self) -> None:
        self._state: tuple[protocol.ReadKey, float] | None = None
        """The key, and the service's wall clock minus this process's monotonic clock."""

    def use(self, welcome: protocol.Welcome) -> None:
        self._state = (welcome.reads, welcome.time - time.monotonic())

    def sign(self, digest: str) -> str:
        """The header with which the artifact is read now; empty before the first welcome."""
        if self._state is None:
            return ""
        key, offset = self._state
        return protocol.sign_read(key, digest, time.monotonic() + offset)

    def permits(self, header: str, digest: str) -> bool:
        """Whether ``header`` permits to read the artifact now."""
        if self._state is None:
            return False
        key, offset = self._state
        now = time.monotonic() + offset
        return protocol.may_read(header, digest, now, lambda id: key.secret if id == key.id else None)
