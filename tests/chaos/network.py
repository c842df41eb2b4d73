"""Connections as a network makes them: ordered and reliable while they last; each frame has a latency.

* A connection that breaks loses a random suffix of the frames in flight, separately in each direction.
* An end may not learn that the other one is gone (half-open): its frames are lost until it gives up by itself.
* Frames of one connection may arrive while the same process already has the next one.
"""

from __future__ import annotations

import asyncio
from collections import deque
from random import Random
from typing import Any, Protocol

from rookery.protocol.connection import ConnectionClosed
from rookery.simulation.fakes.connection import MemoryConnection


class Observer(Protocol):
    """Observes the controller's end."""

    def arrived(self, connection: NetworkConnection, frame: bytes) -> None:
        """The controller is about to receive ``frame``."""

    def handled(self, connection: NetworkConnection) -> None:
        """The frame that arrived last has been handled."""


class NetworkConnection:
    """The controller's end. ``latency`` is the mean delay of a frame in either direction, seconds."""

    def __init__(self, observer: Observer, random: Random, latency: float) -> None:
        self._loop = asyncio.get_running_loop()
        self.observer = observer
        self._random = random
        self._latency = latency
        self._down: deque[bytes | None] = deque()
        """In flight to the peer; None is the end."""
        self._up: deque[bytes | None] = deque()
        """In flight to the controller."""
        self._down_at = self._up_at = 0.0
        """When the last frame of each direction arrives: none overtakes another."""
        self._arrived: deque[bytes | None] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.broken = False
        """Nothing that is sent now arrives."""
        self.closed = False
        """The controller's end knows that the connection ended."""
        self.owner: Any = None
        """The observer's record of the peer."""
        self.peer = PeerEnd(self)

    # --- the controller's end -----------------------------------------------------------------------------------------

    async def send(self, frame: bytes) -> None:
        if self.closed:
            raise ConnectionClosed("closed")
        if not self.broken:
            self._down.append(frame)
            self._down_at = max(self._down_at, self._loop.time() + self._delay())
            self._loop.call_at(self._down_at, self._deliver_down)

    async def receive(self) -> bytes:
        self.observer.handled(self)
        while not self._arrived:
            if self.closed:
                raise ConnectionClosed("closed")
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        frame = self._arrived.popleft()
        if frame is None:
            self.closed = True
            raise ConnectionClosed("closed")
        self.observer.arrived(self, frame)
        return frame

    async def close(self, reason: str) -> None:
        """Frames in flight from the peer may still arrive first, as they do where a server closes."""
        if self.closed:
            return
        if not self.broken:
            self.cut()
        elif None not in self._up and None not in self._arrived:
            self._end_up()

    # --- the peer's end -----------------------------------------------------------------------------------------------

    def send_up(self, frame: bytes) -> None:
        if not self.broken:
            self._up.append(frame)
            self._schedule_up()

    def finish(self) -> None:
        """The peer closes cleanly: every frame that it sent arrives."""
        if not self.broken:
            self.broken = True
            self._end_up()

    def cut(self, *, reported: bool = True) -> None:
        """The connection breaks. ``reported``: whether the controller's end learns of it by itself."""
        if self.broken:
            return
        self.broken = True
        for in_flight in (self._down, self._up):
            for _ in range(self._random.randint(0, len(in_flight))):
                in_flight.pop()
        if reported:
            self._end_up()
        self._down.append(None)
        self._loop.call_at(max(self._down_at, self._loop.time() + self._delay()), self._deliver_down)

    # --- in flight ----------------------------------------------------------------------------------------------------

    def _delay(self) -> float:
        return self._latency * (0.5 + self._random.random())

    def _end_up(self) -> None:
        self._up.append(None)
        self._schedule_up()

    def _schedule_up(self) -> None:
        self._up_at = max(self._up_at, self._loop.time() + self._delay())
        self._loop.call_at(self._up_at, self._deliver_up)

    def _deliver_up(self) -> None:
        if self._up:
            self._arrived.append(self._up.popleft())
            if self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    def _deliver_down(self) -> None:
        if self._down:
            self.peer.deliver(self._down.popleft())


class PeerEnd(MemoryConnection):
    """The end of the process that dialled."""

    def __init__(self, network: NetworkConnection) -> None:
        super().__init__()
        self.network = network

    def transmit(self, frame: bytes) -> None:
        self.network.send_up(frame)

    async def close(self, reason: str) -> None:
        self.finish()

    def finish(self) -> None:
        """Close cleanly: every frame that was sent arrives."""
        self.network.finish()
        self.deliver(None)

    def cut(self, *, reported: bool = True) -> None:
        """The connection breaks, and this end knows. ``reported``: whether the controller learns of it by itself."""
        self.network.cut(reported=reported)
        self.deliver(None)
