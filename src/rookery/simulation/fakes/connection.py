"""Connections in memory: two ends, whole frames in order. When either end is cut, both end at once. And the identity
that a worker reports when it connects."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rookery.protocol.connection import ConnectionClosed


@dataclass(frozen=True)
class Identity:
    """The identity that a worker reports in its Hello."""

    name: str
    instance: str
    """Unique per process."""
    model: str
    token: str
    roles: Sequence[Literal["rollout", "train"]] = ("rollout", "train")
    kind: Literal["reserved", "preemptible"] = "reserved"
    price: float = 0.0
    """Per hour."""


class MemoryConnection:
    """One end of a connection in memory; a :class:`rookery.protocol.connection.Connection`."""

    def __init__(self, inbox: asyncio.Queue[bytes | None], outbox: asyncio.Queue[bytes | None]) -> None:
        self._inbox, self._outbox = inbox, outbox
        self._ended = asyncio.Event()
        self.other: MemoryConnection

    @property
    def closed(self) -> bool:
        return self._ended.is_set()

    async def send(self, frame: bytes) -> None:
        if self.closed:
            raise ConnectionClosed("closed")
        self._outbox.put_nowait(frame)

    async def receive(self) -> bytes:
        frame = None if self.closed else await self._inbox.get()
        if frame is None:
            self._ended.set()
            raise ConnectionClosed("closed")
        return frame

    async def close(self, reason: str) -> None:
        self.cut()

    async def wait_closed(self) -> None:
        """Return when this end is closed."""
        await self._ended.wait()

    def cut(self) -> None:
        """Both ends end at once: a pending ``receive`` returns the frames sent before, then raises."""
        for end in (self, self.other):
            if not end.closed:
                end._ended.set()
                end._inbox.put_nowait(None)


def connection_pair() -> tuple[MemoryConnection, MemoryConnection]:
    """The two ends of a new connection."""
    here: asyncio.Queue[bytes | None] = asyncio.Queue()
    there: asyncio.Queue[bytes | None] = asyncio.Queue()
    one, other = MemoryConnection(here, there), MemoryConnection(there, here)
    one.other, other.other = other, one
    return one, other
