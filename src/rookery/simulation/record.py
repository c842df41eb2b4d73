"""The event log of a run: every frame that crosses the controller's links, both ways, with its virtual time. Two runs
are the same if their digests are."""

from __future__ import annotations

import asyncio
import hashlib
import struct
from collections.abc import Callable

from rookery.protocol.connection import Connection
from rookery.simulation.links import MemoryLink, link_pair


class EventLog:
    def __init__(self) -> None:
        self.frames = 0
        self._hash = hashlib.sha256()

    def note(self, link: str, direction: str, frame: bytes) -> None:
        """``frame`` crossed ``link`` towards (``>``) or from (``<``) the peer, now."""
        self.frames += 1
        now = asyncio.get_running_loop().time()
        self._hash.update(struct.pack("<d", now) + f"{direction}{link}\0".encode() + struct.pack("<I", len(frame)))
        self._hash.update(frame)

    def digest(self) -> str:
        """SHA-256 over all so far, in hex."""
        return self._hash.hexdigest()

    def links(self, name: str) -> Callable[[], tuple[MemoryLink, Connection]]:
        """Makes connections of which the controller's end is noted under ``name``."""

        def make() -> tuple[MemoryLink, Connection]:
            ours, theirs = link_pair()
            return ours, _Noted(theirs, self, name)

        return make


class _Noted:
    """The controller's end of a connection."""

    def __init__(self, link: MemoryLink, log: EventLog, name: str) -> None:
        self._link, self._log, self._name = link, log, name

    async def send(self, frame: bytes) -> None:
        self._log.note(self._name, ">", frame)
        await self._link.send(frame)

    async def receive(self) -> bytes:
        frame = await self._link.receive()
        self._log.note(self._name, "<", frame)
        return frame

    async def close(self, reason: str) -> None:
        await self._link.close(reason)
