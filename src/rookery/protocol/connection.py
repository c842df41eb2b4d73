"""A connection as the controller sees it: whole binary frames in order, until it is closed."""

from __future__ import annotations

from typing import Protocol


class ConnectionClosed(Exception):
    """The other end is gone; nothing more will arrive or leave."""


class Connection(Protocol):
    async def send(self, frame: bytes) -> None:
        """Raises :class:`LinkClosed`."""
        ...

    async def receive(self) -> bytes:
        """The next frame. Raises :class:`LinkClosed`."""
        ...

    async def close(self, reason: str) -> None:
        """Never raises; closing twice is fine."""
        ...
