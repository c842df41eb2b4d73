"""Between a fake process and the service: a connection in memory, the HTTP routes as a worker sees them, the hooks at
which a worker fails."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal, Protocol

from rookery import protocol
from rookery.protocol.connection import ConnectionClosed
from rookery.simulation.fakes.engine import FakeEngine, Row
from rookery.storage.artifacts import Artifacts, Staging


class MemoryConnection:
    """One end of a connection in memory, a :class:`rookery.protocol.connection.Connection`: whole frames in order. When
    either end is cut, both end at once."""

    observe: Callable[[str, bytes], None] | None = None
    """Called with each frame of this end, and whether it is sent (``>``) or received (``<``)."""
    other: MemoryConnection

    def __init__(self) -> None:
        self._inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._ended = asyncio.Event()

    @property
    def closed(self) -> bool:
        return self._ended.is_set()

    async def send(self, frame: bytes) -> None:
        if self.observe is not None:
            self.observe(">", frame)
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
        if self.observe is not None:
            self.observe("<", frame)
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


def connection_pair() -> tuple[MemoryConnection, MemoryConnection]:
    """The two ends of a new connection."""
    one, other = MemoryConnection(), MemoryConnection()
    one.other, other.other = other, one
    return one, other


class TicketRoutes(Protocol):
    """The worker's view of the service's HTTP routes; :class:`rookery.controller.weights.tickets.Tickets` is one."""

    @property
    def artifacts(self) -> Artifacts: ...

    def open_batch(self, ticket: str) -> bytes | None: ...

    def staging(self, ticket: str) -> Staging | None: ...


Phase = Literal["begin", "upload", "reply", "replied", "committed"]
"""Of a training operation: before it, before each file of its upload, before and after its reply, at its commit."""


class FaultyProcess(Protocol):
    """The worker process that fails."""

    name: str
    hello: protocol.Hello
    engine: FakeEngine
    connection: MemoryConnection | None

    @property
    def faults(self) -> Faults: ...


class AdapterSource(Protocol):
    """A worker process that others read adapters from."""

    def serves(self, digest: str) -> bool:
        """Whether it has the adapter, or receives it."""
        ...


class Faults:
    """Hooks at which a fake worker fails. This one injects nothing."""

    def delay(self, kind: Literal["pull", "batch", "upload", "redial"], seconds: float) -> float:
        """How long something takes that takes ``seconds`` usually."""
        return seconds

    def peer(self, address: str) -> AdapterSource | None:
        """The live worker that answers at an address."""
        return None

    def evicts(self) -> bool:
        """Whether an adapter leaves the cache to make room for another one."""
        return False

    def pull_fails(self) -> bool:
        return False

    def request_error(self) -> str:
        """The error with which the engine fails a new request; empty for none."""
        return ""

    def resend_from(self, row: Row) -> int:
        """The first token of the next chunk of a request."""
        return row.sent

    def repeats_flush(self) -> bool:
        """Whether a frame of tokens is sent twice."""
        return False

    def upload_fails(self) -> bool:
        """Whether the upload of a file fails, to be tried again."""
        return False

    def corrupt(self, name: str, content: bytes) -> bytes:
        """The bytes of a file that arrive."""
        return content

    def repeats_upload(self) -> float | None:
        """After how many seconds a file arrives a second time."""
        return None

    def dies(self, worker: FaultyProcess, phase: Phase) -> bool:
        """Whether the worker's process dies in this phase of a training operation."""
        return False

    async def joined(self, worker: FaultyProcess, previous_epoch: int) -> None:
        """Called after each welcome; ``previous_epoch`` is -1 on the first one."""
