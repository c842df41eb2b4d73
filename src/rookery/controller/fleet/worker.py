"""A worker as the controller knows it, on one of its connections."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from rookery import protocol
from rookery.protocol.connection import Connection

State = Literal["joining", "catching up", "serving", "suspect", "draining", "gone"]

LINKED = ("joining", "catching up", "serving", "draining")
"""States of a worker whose link is thought to be up."""

RATE_BEATS = 6
"""Beats over which a worker's tokens per second are taken: ten seconds at the usual interval."""


class AdapterRequested(NamedTuple):
    """What a worker was asked to have, and since when."""

    ref: protocol.AdapterRef
    since: float


@dataclass(eq=False)
class Worker:
    """One connection of a worker's process: another connection of the same process is another object."""

    hello: protocol.Hello
    epoch: int
    connection: Connection
    state: State
    since: float
    last_beat: float
    beat: protocol.Heartbeat | None = None
    last_progress: float = 0.0
    max_flush_tokens: int = 0
    """The most tokens that one of its flushes brought on this connection: what its death just before had cost."""
    outbox: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    """Frames on their way out: a worker that does not read delays nobody but itself."""
    sending: float | None = None
    """Since when its link has been taking one of them."""
    named: set[str] = field(default_factory=set)
    """Hashes of artifacts that its work named: what it may ask a new ticket for."""
    active_requests: set[str] = field(default_factory=set)
    """Requests that the process brought along from a controller before this one."""
    cached: set[str] = field(default_factory=set)
    """Hashes of the adapters that it said it has. Its cache is bounded, so one of them may be gone again: then it pulls
    that once more when work names it."""
    prefetch_requests: dict[str, AdapterRequested] = field(default_factory=dict)
    """By hash, what it was asked to have and has not said it has."""
    lagging: set[str] = field(default_factory=set)
    """Those of them without which it is catching up."""
    slow: bool = False
    """Whether it takes much longer than others to get what it is asked to have."""
    status_message: str = ""
    """What an operator should know about it beside its state, such as why it is given nothing."""
    generated: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATE_BEATS))
    """When its last beats came, and the tokens that they had counted."""

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def working(self) -> bool:
        """Whether it may be given work."""
        return self.state in ("serving", "catching up")

    def has_role(self, role: str, model: str) -> bool:
        """Whether it may be given work of ``role``. One that catches up may be given rollouts that it :meth:`takes`."""
        able = self.working if role == "rollout" else self.state == "serving"
        return able and role in self.hello.roles and self.hello.model == model

    @property
    def missing_adapter(self) -> frozenset[str]:
        """What a serving worker takes no requests for: others will have it long before."""
        return frozenset(self.prefetch_requests) if self.slow else frozenset()

    def accepts(self, ref: protocol.AdapterRef | None) -> bool:
        """Whether a request for this adapter (None: the base model) may be sent here now. While it catches up, it has
        to hold the adapter; when it serves, it may have to pull it first, but not if it is slow at that."""
        if ref is None or self.state != "catching up":
            return self.working and (ref is None or ref.hash not in self.missing_adapter)
        return ref.hash in self.cached

    def tokens_per_second(self) -> float:
        """Sampled, over its last beats."""
        if len(self.generated) < 2:
            return 0.0
        (began, before), (ended, after) = self.generated[0], self.generated[-1]
        return (after - before) / (ended - began) if ended > began else 0.0

    def post(self, message: protocol.Message) -> None:
        """Send ``message`` when the link takes it. If it never does, the worker is lost and ``lost`` tells."""
        self.outbox.put_nowait(protocol.encode(message))
