"""A worker as the controller knows it on one of its connections, and the life cycle of that connection.

The life cycle is the table :data:`TRANSITIONS`. A worker is *joining* until its base model is loaded, *catching up*
while it pulls the versions that jobs sample from, then *serving*. A worker that announces its end is *draining*. One
whose connection fails is *suspect*: its work moves to others at once, and its process may reconnect as a new
:class:`Worker` until it is *gone*.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Literal

from rookery import protocol
from rookery.protocol.connection import Connection, Outbox

State = Literal["joining", "catching up", "serving", "suspect", "draining", "gone"]
Event = Literal["lagging", "ready", "drain", "lost", "expire"]

CONNECTED = ("joining", "catching up", "serving", "draining")
"""States of a worker whose connection is believed to be up."""

TRANSITIONS: dict[tuple[State, Event], State] = {
    ("joining", "lagging"): "catching up",  # its model is loaded, and versions in use are missing
    ("joining", "ready"): "serving",  # its model is loaded
    ("catching up", "ready"): "serving",  # no version in use is missing any more
    **{(state, "drain"): "draining" for state in ("joining", "catching up", "serving")},
    ("draining", "drain"): "draining",  # it announces its end again, with a reason
    **{(state, "lost"): "suspect" for state in ("joining", "catching up", "serving")},
    ("draining", "lost"): "gone",
    ("suspect", "lost"): "suspect",  # its connection was abandoned, and ends now
    ("gone", "lost"): "gone",  # the same, later
    ("suspect", "expire"): "gone",  # its process has not reconnected in time
}
"""The next state by state and event. Any other event is a mistake of the controller."""

RATE_HEARTBEATS = 6
"""Heartbeats over which a worker's tokens per second are averaged: ten seconds at the usual interval."""


@dataclass
class AdapterOrder:
    """A version that a worker is to receive, and since when (monotonic seconds)."""

    ref: protocol.AdapterRef
    since: float
    able: float
    """When its source came to have it whole, or was replaced, else as ``since``: before that it waited for others."""


class AdapterOrders(Mapping[str, AdapterOrder]):
    """By hash, the versions that a worker is to receive and has not reported. No change looks at the versions of other
    policies: there may be one for each running job."""

    def __init__(self) -> None:
        self._orders: dict[str, AdapterOrder] = {}
        self._waiting: dict[str, None] = {}
        """Hashes of those that it was not asked to receive yet, the earliest first."""
        self._versions: dict[str, dict[str, int]] = {}
        """By policy, the versions by hash."""

    def __getitem__(self, digest: str) -> AdapterOrder:
        return self._orders[digest]

    def __iter__(self) -> Iterator[str]:
        return iter(self._orders)

    def __len__(self) -> int:
        return len(self._orders)

    def add(self, order: AdapterOrder) -> None:
        """It waits; an earlier order of the same hash is replaced."""
        ref = order.ref
        self.remove(ref.hash)
        self._orders[ref.hash] = order
        self._waiting[ref.hash] = None
        self._versions.setdefault(ref.policy, {})[ref.hash] = ref.version

    def remove(self, digest: str) -> AdapterOrder | None:
        """The order, if there was one."""
        order = self._orders.pop(digest, None)
        if order is not None:
            self._waiting.pop(digest, None)
            versions = self._versions[order.ref.policy]
            del versions[digest]
            if not versions:
                del self._versions[order.ref.policy]
        return order

    def begin(self, most: int) -> list[AdapterOrder]:
        """At most so many of those that wait, the earliest first; they wait no more."""
        first = [*islice(self._waiting, max(0, most))]
        for digest in first:
            del self._waiting[digest]
        return [self._orders[digest] for digest in first]

    def older(self, ref: protocol.AdapterRef) -> list[str]:
        """The hashes of earlier versions of the policy of ``ref``."""
        versions = self._versions.get(ref.policy, {})
        return [digest for digest, version in versions.items() if version < ref.version]


@dataclass(eq=False)
class Worker:
    """One connection of a worker's process: another connection of the same process is another object."""

    hello: protocol.Hello
    outbox: Outbox
    since: float
    """When it entered its state (monotonic seconds, as all times here)."""
    last_progress: float
    """When its compute progress last moved, or it last had nothing to compute."""
    state: State = "joining"
    serving_since: float = 0.0
    """When it served first on this connection; 0 where it has not yet."""
    beat: protocol.Heartbeat | None = None
    """The latest heartbeat."""
    decoding: float = 0.0
    """The processor time that the decoding of its latest frame took."""
    max_flush_tokens: int = 0
    """The most tokens that one flush brought on this connection: the loss if it had died just before."""
    reads: protocol.ReadKey = field(default_factory=partial(protocol.read_key, ""))
    """Signs its reads of artifacts; shared by the workers that have the same API key."""
    serves: bool = False
    """Whether others reach it at its address."""
    named_hashes: set[str] = field(default_factory=set)
    """Hashes of artifacts that its work names: it may ask for other sources of these."""
    active_requests: set[str] = field(default_factory=set)
    """Requests that the process still holds from an earlier controller."""
    cached: set[str] = field(default_factory=set)
    """Hashes of the adapters that it reported. Its cache is bounded, so one may be evicted again: the worker then pulls
    it again when work names it."""
    orders: AdapterOrders = field(default_factory=AdapterOrders)
    receiving: set[str] = field(default_factory=set)
    """Hashes of artifacts on their way to it."""
    retained: set[str] = field(default_factory=set)
    """Hashes of artifacts that it evicts last, as their last reserved holder."""
    lagging: set[str] = field(default_factory=set)
    """Hashes of missing versions, while it catches up after it joined."""
    slow: bool = False
    """Whether it takes much longer than others to cache a version."""
    planned_roles: frozenset[str] | None = None
    """The roles that a plan leaves it (:mod:`rookery.controller.planned`); None: all roles of its process."""
    status_message: str = ""
    """Note for the operator next to the state, such as the reason why it gets no work."""
    generated: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATE_HEARTBEATS))
    """Times of its last heartbeats, and the token counts in them."""

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def roles(self) -> list[str]:
        """The roles that it plays: those of its process, as far as a plan leaves them."""
        planned = self.planned_roles
        return [role for role in self.hello.roles if planned is None or role in planned]

    @property
    def epoch(self) -> int:
        return self.outbox.epoch

    @property
    def connection(self) -> Connection:
        return self.outbox.connection

    @property
    def working(self) -> bool:
        """Whether it may be given work."""
        return self.state in ("serving", "catching up")

    @property
    def note(self) -> str:
        """For the operator: why it makes no progress, else its status message, else that a plan leaves it no role."""
        stalled = self.beat.stalled if self.beat is not None else ""
        unused = "the plan does not need it" if self.planned_roles == frozenset() else ""
        return f"no progress: {stalled}" if stalled else self.status_message or unused

    def has_role(self, role: str, model: str) -> bool:
        """Whether it may be given work of ``role``: while it catches up, rollouts that it :meth:`accepts`."""
        able = self.working if role == "rollout" else self.state == "serving"
        return able and role in self.roles and self.hello.model == model

    @property
    def missing_adapters(self) -> frozenset[str]:
        """Adapters whose requests a slow serving worker does not get: others have them long before."""
        return frozenset(self.orders) if self.slow else frozenset()

    def accepts(self, ref: protocol.AdapterRef | None) -> bool:
        """Whether a request for this adapter (None: the base model) may be sent here now. While it catches up, it must
        have the adapter; when it serves, it may pull it first, unless it is slow at that."""
        if ref is None or self.state != "catching up":
            return self.working and (ref is None or ref.hash not in self.missing_adapters)
        return ref.hash in self.cached

    def tokens_per_second(self) -> float:
        """Sampled tokens per second over its last heartbeats."""
        if len(self.generated) < 2:
            return 0.0
        (began, before), (ended, after) = self.generated[0], self.generated[-1]
        return (after - before) / (ended - began) if ended > began else 0.0

    def post(self, message: protocol.Message) -> None:
        """Send ``message`` as soon as the connection accepts it. If it never does, the worker is reported lost."""
        self.outbox.post(message)
