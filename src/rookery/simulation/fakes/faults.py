"""The hooks at which a fake worker fails, and its view of the service's HTTP routes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

from rookery.simulation.fakes.engine import Row
from rookery.storage.artifacts import Artifacts, Staging

if TYPE_CHECKING:
    from rookery.simulation.fakes.worker import FakeWorker

Phase = Literal["begin", "upload", "reply", "replied", "committed"]
"""Of a training operation: before it, before each file of its upload, before and after its reply, at its commit."""


class TicketRoutes(Protocol):
    """The worker's view of the service's HTTP routes; :class:`rookery.controller.weights.tickets.Tickets` is one."""

    @property
    def artifacts(self) -> Artifacts: ...

    def reads(self, ticket: str, digest: str) -> bool: ...

    def open_batch(self, ticket: str) -> bytes | None: ...

    def staging(self, ticket: str) -> Staging | None: ...


class Faults:
    """Hooks at which a fake worker fails. This one injects nothing."""

    def delay(self, kind: Literal["pull", "batch", "upload", "redial"], seconds: float) -> float:
        """How long something takes that takes ``seconds`` usually."""
        return seconds

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

    def dies(self, worker: FakeWorker, phase: Phase) -> bool:
        """Whether the worker's process dies in this phase of a training operation."""
        return False

    async def joined(self, worker: FakeWorker, previous_epoch: int) -> None:
        """Called after each welcome; ``previous_epoch`` is -1 on the first one."""
