"""Lifetimes, waits and bounds of clients' sessions. Tests pass others to the controller."""

from __future__ import annotations

from dataclasses import dataclass

HOUR = 3600.0
DAY = 24 * HOUR


@dataclass(frozen=True, kw_only=True)
class SessionRules:
    """Times are in seconds."""

    poll: float = 30.0
    """Long-poll timeout of a result request; below the client's 45 s."""
    result: float = DAY
    """For which a result can be fetched."""
    fetched: float = 900.0
    """For which a result that a client fetched can be fetched again; clients ask again within a minute."""
    seq_gap: float = 300.0
    """Calls that wait for one with a lower number fail when it has not arrived for this long; clients retry for five
    minutes."""
    idle: float = 120.0
    """A client without a heartbeat for this long is idle: its models give up their slots and its queued operations
    wait, until it returns. Clients send one every ten seconds."""
    abandon: float = HOUR
    """Queued operations of a client without a heartbeat for this long are dropped; each gets an error as its result."""
    expire: float = 30 * DAY
    """A client without any call for this long is finished; unnamed state of its models is deleted ``result`` later."""
    sampler_idle: float = HOUR
    """Weights of an unnamed sampler are deleted when unused for this long."""
    slot_wait: float = 5.0
    """A model with an unfinished gradient keeps its trainer slot this long without a call while others wait."""
    runs_loaded: int = 256
    """Training runs of one tenant in memory, not counting those with operations: a further one takes the place of the
    one that got its last operation before the others. It costs that one a start of the service: its state is read from
    the artifacts."""


SESSION_RULES = SessionRules()
"""The values that a service uses."""
