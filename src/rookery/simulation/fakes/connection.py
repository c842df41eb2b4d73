"""Connections in memory: two ends, whole frames in order, over at once when either end is cut."""

from __future__ import annotations

import asyncio

from rookery.protocol.connection import ConnectionClosed


class MemoryConnection:
    """One end of a connection in memory; a :class:`rookery.protocol.connection.Link`."""

    def __init__(self, inbox: asyncio.Queue[bytes | None], outbox: asyncio.Queue[bytes | None]) -> None:
        self._inbox, self._outbox = inbox, outbox
        self.closed = False
        self.other: MemoryConnection

    async def send(self, frame: bytes) -> None:
        if self.closed:
            raise ConnectionClosed("closed")
        self._outbox.put_nowait(frame)

    async def receive(self) -> bytes:
        frame = None if self.closed else await self._inbox.get()
        if frame is None:
            self.closed = True
            raise ConnectionClosed("closed")
        return frame

    async def close(self, reason: str) -> None:
        self.cut()

    def cut(self) -> None:
        """Both ends are over at once: who waits for a frame hears of it after what was sent before."""
        for end in (self, self.other):
            end.closed, was = True, end.closed
            if not was:
                end._inbox.put_nowait(None)


def connection_pair() -> tuple[MemoryConnection, MemoryConnection]:
    """The two ends of a new connection."""
    here: asyncio.Queue[bytes | None] = asyncio.Queue()
    there: asyncio.Queue[bytes | None] = asyncio.Queue()
    one, other = MemoryConnection(here, there), MemoryConnection(there, here)
    one.other, other.other = other, one
    return one, other
