"""The hooks at which a fake worker fails. The simulator injects nothing; chaos tests override them."""

from __future__ import annotations

from typing import Literal, Protocol

from rookery import protocol
from rookery.simulation.fakes.connection import MemoryConnection
from rookery.simulation.fakes.engine import FakeEngine, Row

Phase = Literal["begin", "upload", "reply", "replied", "committed"]
"""A moment of a training operation: before it, before each file of its upload, before and after its reply, at its
commit."""


class FaultyProcess(Protocol):
    """The part of a fake worker that the hooks see."""

    name: str
    hello: protocol.Hello
    engine: FakeEngine
    connection: MemoryConnection | None

    @property
    def faults(self) -> Faults: ...


class AdapterSource(Protocol):
    """A worker process from which others read adapters."""

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
        """Whether an adapter that was read cannot be used."""
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
        """The seconds after which a file arrives a second time."""
        return None

    def dies(self, worker: FaultyProcess, phase: Phase) -> bool:
        """Whether the worker's process dies in this phase of a training operation."""
        return False

    async def joined(self, worker: FaultyProcess, previous_epoch: int) -> None:
        """The worker is connected; ``previous_epoch`` is -1 on its first connection."""
