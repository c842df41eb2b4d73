"""The links between a fake process and the service: a connection in memory, and the HTTP routes as a worker sees
them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from rookery.protocol.connection import ConnectionClosed
from rookery.storage.artifacts import Artifacts, Staging


class MemoryConnection:
    """One end of a connection in memory, a :class:`rookery.protocol.connection.Connection`: whole frames in order. When
    either end is cut, both end at once."""

    other: MemoryConnection

    def __init__(self, observe: Callable[[str, bytes], None] | None = None) -> None:
        """``observe`` is called with each frame of this end, and whether it is sent (``>``) or received (``<``)."""
        self._observe = observe
        self._inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._ended = asyncio.Event()

    @property
    def closed(self) -> bool:
        return self._ended.is_set()

    async def send(self, frame: bytes) -> None:
        if self._observe is not None:
            self._observe(">", frame)
        if self.closed:
            raise ConnectionClosed("closed")
        self.transmit(frame)

    def transmit(self, frame: bytes) -> None:
        """Send without waiting; the frame is lost where the connection has ended."""
        self.other.deliver(frame)

    async def receive(self) -> bytes:
        frame = None if self.closed else await self._inbox.get()
        if frame is None:
            self._ended.set()
            raise ConnectionClosed("closed")
        if self._observe is not None:
            self._observe("<", frame)
        return frame

    async def close(self, reason: str) -> None:
        self.cut()

    async def wait_closed(self) -> None:
        """Return when this end is closed."""
        await self._ended.wait()

    def cut(self) -> None:
        """Both ends end at once: a pending ``receive`` returns the frames sent before, then raises."""
        for end in (self, self.other):
            end.deliver(None)

    def deliver(self, frame: bytes | None) -> None:
        """A frame arrives here; None is the end of the connection."""
        if not self.closed:
            self._inbox.put_nowait(frame)
            if frame is None:
                self._ended.set()


def connection_pair(
    observe: Callable[[str, bytes], None] | None = None,
) -> tuple[MemoryConnection, MemoryConnection]:
    """The two ends of a new connection; ``observe`` sees the frames of the second one."""
    one, other = MemoryConnection(), MemoryConnection(observe)
    one.other, other.other = other, one
    return one, other


class TicketRoutes(Protocol):
    """The worker's view of the service's HTTP routes; :class:`rookery.controller.weights.tickets.Tickets` is one."""

    @property
    def artifacts(self) -> Artifacts: ...

    def open_batch(self, ticket: str) -> bytes | None: ...

    def staging(self, ticket: str) -> Staging | None: ...
