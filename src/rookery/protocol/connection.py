"""A connection as the controller sees it: whole binary frames in order, until it is closed."""

from __future__ import annotations

from typing import Protocol


class ConnectionClosed(Exception):
    """The other end is gone; no frame will arrive or leave any more."""


class Connection(Protocol):
    """One end of a message channel. The service's are WebSockets, the simulator's are in memory."""

    async def send(self, frame: bytes) -> None:
        """Raises :class:`ConnectionClosed`."""
        ...

    async def receive(self) -> bytes:
        """The next frame. Raises :class:`ConnectionClosed`."""
        ...

    async def close(self, reason: str) -> None:
        """Never raises; closing twice is fine."""
        ...
