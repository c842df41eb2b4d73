"""Connections as a network makes them: ordered and reliable while they last, each frame late by a time of its own.

* A connection that breaks loses what was under way: some suffix of each direction's frames, each its own.
* An end may never hear that the other one is gone (half-open): it sends into the void until it gives up by itself.
* The controller's end is a :class:`~rookery.protocol.connection.Link`; the other calls its peer back, without a task.
* Frames of one connection may arrive while the same process has another one already.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any, Protocol

import msgspec

from rookery import protocol
from rookery.protocol.connection import ConnectionClosed


class Peer(Protocol):
    """Who dialled."""

    def heard(self, link: Wire, message: Any) -> None: ...

    def closed(self, link: Wire) -> None: ...


class Watch(Protocol):
    """Who looks on at the controller's end."""

    def arrived(self, link: Wire, message: Any) -> None:
        """The controller is about to be given ``message``; None for a frame that is none."""

    def settled(self, link: Wire) -> None:
        """What arrived last has been dealt with."""


class Wire:
    """One connection. ``latency`` is the mean delay of a frame in either direction, seconds."""

    def __init__(
        self,
        peer: Peer,
        decoder: msgspec.msgpack.Decoder[Any],
        watch: Watch,
        random: Random,
        latency: float,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._peer: Peer | None = peer
        self._decoder = decoder
        self._watch = watch
        self._random = random
        self._latency = latency
        self._down: deque[bytes | None] = deque()
        """Under way to the peer; None is the end."""
        self._up: deque[tuple[bytes, Any] | None] = deque()
        """Under way to the controller."""
        self._down_at = self._up_at = 0.0
        """When the last frame of each direction arrives: none overtakes another."""
        self._arrived: deque[tuple[bytes, Any] | None] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self.over = False
        """Broken somewhere in the middle: nothing sent now arrives."""
        self.shut = False
        """The controller's end knows that it is over."""
        self.owner: Any = None
        """Whose connection the onlooker takes it for."""

    # --- the controller's end -----------------------------------------------------------------------------------------

    async def send(self, frame: bytes) -> None:
        if self.shut:
            raise ConnectionClosed("closed")
        if not self.over:
            self._down.append(frame)
            self._down_at = max(self._down_at, self._loop.time() + self._delay())
            self._loop.call_at(self._down_at, self._land_down)

    async def receive(self) -> bytes:
        self._watch.settled(self)
        while not self._arrived:
            if self.shut:
                raise ConnectionClosed("closed")
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        found = self._arrived.popleft()
        if found is None:
            self.shut = True
            raise ConnectionClosed("closed")
        self._watch.arrived(self, found[1])
        return found[0]

    async def close(self, reason: str) -> None:
        """What is under way from the peer may still arrive first, as it does where a server closes."""
        if self.shut:
            return
        if not self.over:
            self.cut()
        elif None not in self._up and None not in self._arrived:
            self._end_up()

    # --- the peer's end -----------------------------------------------------------------------------------------------

    def say(self, message: protocol.Message) -> None:
        self.say_raw(protocol.encode(message), message)

    def say_raw(self, frame: bytes, message: Any = None) -> None:
        if not self.over:
            self._up.append((frame, message))
            self._up_at = max(self._up_at, self._loop.time() + self._delay())
            self._loop.call_at(self._up_at, self._land_up)

    def finish(self) -> None:
        """The peer closes cleanly: what it has said arrives first."""
        if not self.over:
            self.over = True
            self._peer = None
            self._end_up()

    def cut(self, *, heard_here: bool = True, heard_there: bool = True) -> None:
        """The connection breaks, with a suffix of what is under way. ``heard_here``: whether the controller's end hears
        of it by itself; ``heard_there``: whether the peer does."""
        if self.over:
            return
        self.over = True
        for under_way in (self._down, self._up):
            for _ in range(self._random.randint(0, len(under_way))):
                under_way.pop()
        if heard_here:
            self._end_up()
        if heard_there:
            self._down.append(None)
            self._loop.call_at(max(self._down_at, self._loop.time() + self._delay()), self._land_down)

    def forsake(self) -> None:
        """There is no process any more that would hear anything."""
        self._peer = None

    # --- under way ----------------------------------------------------------------------------------------------------

    def _delay(self) -> float:
        return self._latency * (0.5 + self._random.random())

    def _end_up(self) -> None:
        self._up.append(None)
        self._up_at = max(self._up_at, self._loop.time() + self._delay())
        self._loop.call_at(self._up_at, self._land_up)

    def _land_up(self) -> None:
        if self._up:
            self._arrived.append(self._up.popleft())
            self._wake()

    def _land_down(self) -> None:
        if not self._down:
            return
        frame = self._down.popleft()
        peer = self._peer
        if peer is None:
            return
        if frame is None:
            self._peer = None
            peer.closed(self)
        else:
            peer.heard(self, protocol.decode(self._decoder, frame))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


Serve = Callable[[Wire], Any]
"""Speaks for the controller on a new connection, until that is over."""
