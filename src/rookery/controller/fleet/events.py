"""Events of workers: what the fleet and the rooms above it report, as data.

Whoever learns of something emits one event (:meth:`~rookery.controller.fleet.fleet.Fleet.emit`); one ``match`` in
:mod:`rookery.controller.controller` calls, in written order, the rooms that it concerns. Rooms above the fleet define
further events of this kind next to the code that reports them. An event that :attr:`~WorkerEvent.shown` is also kept
for the timeline (:mod:`rookery.controller.timeline`), as plain values.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from rookery import protocol
from rookery.controller.fleet.worker import Worker
from rookery.errors import count_of
from rookery.telemetry.spans import TraceSpan


class WorkerEvent(msgspec.Struct, frozen=True, gc=False):
    """Something that happened at a worker."""

    kind: ClassVar[str] = ""
    """Its name in the timeline."""
    shown: ClassVar[bool] = True
    """Whether the timeline keeps it: not those that come several times a second from each worker."""

    time: float
    """Unix seconds."""
    worker: Worker

    @property
    def tenant(self) -> str:
        """The tenant that it concerns; empty where it is no tenant's."""
        return ""

    @property
    def job(self) -> str:
        """The job that it concerns; empty where it is no job's."""
        return ""

    @property
    def policy(self) -> str:
        """The policy that it concerns; empty where it is none's."""
        return ""

    @property
    def text(self) -> str:
        """One line about it."""
        return ""

    @property
    def spans(self) -> tuple[TraceSpan, ...]:
        """Its entry in the timeline of work (:mod:`rookery.telemetry.spans`)."""
        return ()


class ReasonedEvent(WorkerEvent, frozen=True):
    """One whose line is its reason."""

    reason: str

    @property
    def text(self) -> str:
        return self.reason


# --- its life ---------------------------------------------------------------------------------------------------------


class WorkerJoined(WorkerEvent, frozen=True):
    """A connection was registered; the base model may still load."""

    kind: ClassVar[str] = "joined"

    @property
    def text(self) -> str:
        hello = self.worker.hello
        loads = f"loads {hello.model}" if hello.loading else f"has {hello.model}"
        return f"{hello.kind}, {' and '.join(hello.roles)}, {loads}"


class WorkerLoaded(WorkerEvent, frozen=True):
    """Its base model is loaded: :meth:`~rookery.controller.fleet.fleet.Fleet.admit` it."""

    kind: ClassVar[str] = "loaded"

    @property
    def text(self) -> str:
        hello = self.worker.hello
        return f"{hello.engine or 'engine'} on {hello.device}, {hello.dtype}"


class WorkerCatchingUp(WorkerEvent, frozen=True):
    """It pulls versions in use that it does not have, and serves when it has them."""

    kind: ClassVar[str] = "catching up"
    versions: int

    @property
    def text(self) -> str:
        return f"pulls {count_of(self.versions, 'version')} in use"


class WorkerReady(WorkerEvent, frozen=True):
    """It serves: it may be given work of all its roles."""

    kind: ClassVar[str] = "ready"

    @property
    def spans(self) -> tuple[TraceSpan, ...]:
        return (TraceSpan("joined", self.time, self.time, self.worker.name),)


class WorkerStalled(ReasonedEvent, frozen=True):
    """It reports that its work makes no progress."""

    kind: ClassVar[str] = "stalled"


class WorkerDraining(WorkerEvent, frozen=True):
    """It announced its end: its work must move."""

    kind: ClassVar[str] = "draining"

    @property
    def spans(self) -> tuple[TraceSpan, ...]:
        return (TraceSpan("preemption", self.time, self.time, self.worker.name, text="it drains"),)


class WorkerFailed(ReasonedEvent, frozen=True):
    """It ends because it does not work, for a reason in its own words."""

    kind: ClassVar[str] = "failed"
    last: bool
    """A restart does not help, and no other worker of its model trains or may soon."""


class WorkerSuspect(ReasonedEvent, frozen=True):
    """Its connection ended or was abandoned: its work must move, and its process may reconnect."""

    kind: ClassVar[str] = "suspect"
    served: float = 0.0
    """Seconds for which it served on this connection."""

    @property
    def spans(self) -> tuple[TraceSpan, ...]:
        name, now = self.worker.name, self.time
        lost = TraceSpan("preemption", now, now, name, text=self.reason)
        return (lost, TraceSpan("connected", now - self.served, now, name))


class WorkerGone(ReasonedEvent, frozen=True):
    """It drained and left, or has not reconnected in time."""

    kind: ClassVar[str] = "gone"
    served: float = 0.0
    """Seconds for which it served on this connection; 0 where that had ended before."""

    @property
    def spans(self) -> tuple[TraceSpan, ...]:
        if not self.served:
            return ()
        return (TraceSpan("connected", self.time - self.served, self.time, self.worker.name),)


# --- its adapters -----------------------------------------------------------------------------------------------------


class RolesChanged(WorkerEvent, frozen=True):
    """A plan gave it other roles."""

    kind: ClassVar[str] = "roles"

    @property
    def text(self) -> str:
        return " and ".join(self.worker.roles) or "not needed"


class AdaptersChanged(WorkerEvent, frozen=True):
    """The adapters that it :meth:`accepts <rookery.controller.fleet.worker.Worker.accepts>` have changed."""

    kind: ClassVar[str] = "adapters changed"
    shown: ClassVar[bool] = False


class AdapterLoaded(WorkerEvent, frozen=True):
    """It has cached a version that it was asked to."""

    kind: ClassVar[str] = "adapter loaded"
    ref: protocol.AdapterRef
    seconds: float
    """From the request to its report."""

    @property
    def policy(self) -> str:
        return self.ref.policy

    @property
    def text(self) -> str:
        return f"version {self.ref.version} after {self.seconds:.1f} s"

    @property
    def spans(self) -> tuple[TraceSpan, ...]:
        start, text = self.time - self.seconds, f"pulls version {self.ref.version}"
        return (TraceSpan("transfer", start, self.time, self.worker.name, policy=self.policy, text=text),)


class AdapterPullFailed(WorkerEvent, frozen=True):
    """It could not pull an artifact that its work names."""

    kind: ClassVar[str] = "pull failed"
    hash: str
    error: str

    @property
    def text(self) -> str:
        return f"artifact {self.hash[:12]}: {self.error}"


# --- its messages -----------------------------------------------------------------------------------------------------


class HeartbeatReceived(WorkerEvent, frozen=True):
    """A heartbeat of its present connection arrived."""

    kind: ClassVar[str] = "heartbeat"
    shown: ClassVar[bool] = False
    beat: protocol.Heartbeat


class MessageReceived(WorkerEvent, frozen=True):
    """A message of its present connection that is not the fleet's business arrived. Whom it concerns may raise
    :class:`~rookery.protocol.BadFrame`."""

    kind: ClassVar[str] = "message"
    shown: ClassVar[bool] = False
    message: protocol.WorkMessage
