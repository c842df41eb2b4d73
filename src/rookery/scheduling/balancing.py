"""Which worker takes the next request, and which requests move: RLBoost's Algorithm 2 (arXiv 2510.19225).

*Pending* is what a worker holds beyond the rows that it decodes, *executing* the rest, *free* the rows that a new
request would take at once. The controller knows of a worker how many requests it holds, of how many of them tokens have
come since it has them, and what its last beats said (:func:`load`).

As published, with three things stated:

* An instance that has nothing pending is a target only with a free row. So every move of a pending request lowers the
  sum of all that is pending by one, every move of executing ones lowers the sum of what executes beyond B, and neither
  raises the other: without arrivals there are never more moves than these two sums, and none can go back and forth.
* Of those with equally much pending, one with a free row is chosen, then the one that holds least, then the first by
  name: the same state gives the same choice.
* Θ = 0 means that nothing is ever pending by choice: a request goes to a free row or is held.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BEATS = 2
"""So many beats in a row show that what waits in a worker does so for want of more than its turn: one may just have
come between a request's arrival and its first step."""


@dataclass(frozen=True, slots=True)
class Instance:
    """A worker as balancing sees it."""

    name: str
    pending: int
    executing: int
    free: int
    """Requests that it would begin at once."""
    flat: int | None = None
    """B: how many rows give nearly all of its throughput; None while that is not known."""


@dataclass(frozen=True, slots=True)
class Move:
    """``count`` requests of ``source`` go on at ``target``: pending ones, or ``executing`` ones."""

    source: str
    target: str
    count: int
    executing: bool


def load(rows: int, held: int, decoding: int, beats: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """``(pending, executing, free)`` of a worker with ``rows`` that holds ``held`` requests, for ``decoding`` of which
    tokens have come since it has them. ``beats`` is what its last :data:`BEATS` beats said: requests (active, waiting).

    It decodes all that it holds, up to its rows; where all those beats said that some wait though not all rows are
    taken (it has no memory for more, or their adapter is on its way), up to those that were active, or ``decoding`` if
    that is more: tokens that came prove more than a beat does."""
    stuck = len(beats) == BEATS and all(waiting for _, waiting in beats)
    room = min(rows, max(decoding, *(active for active, _ in beats))) if stuck else rows
    executing = min(held, room)
    return held - executing, executing, room - executing


def order(instance: Instance) -> tuple[int, bool, int, str]:
    """The least comes first in line for a request."""
    return instance.pending, not instance.free, instance.pending + instance.executing, instance.name


def select(instances: Iterable[Instance], theta: int) -> str | None:
    """Delayed join-shortest-pending: among those with less than ``theta`` pending the one with the least, or None to
    hold the request until something completes."""
    able = [instance for instance in instances if instance.free or instance.pending < theta]
    return min(able, key=order).name if able else None


def balance(instances: Iterable[Instance], takers: Iterable[Instance]) -> Move | None:
    """Continuous load balancing: the next move, None when there is nothing to gain. ``takers`` are those of the
    instances that may be given what moves.

    If some instance has nothing pending while another has, one request of the most-pending moves there; else if some
    instance executes nothing, max(executing − B, 0) requests of the most-executing one do, as many as find a row."""
    target = min((taker for taker in takers if taker.free and not taker.pending), key=order, default=None)
    if target is None:
        return None
    known = list(instances)
    crowded = min(known, key=by_pending)
    if crowded.pending:
        return Move(crowded.name, target.name, 1, executing=False)
    busiest = min(known, key=by_executing)
    if target.executing or busiest.flat is None:
        return None
    count = min(max(busiest.executing - busiest.flat, 0), target.free)
    return Move(busiest.name, target.name, count, executing=True) if count else None


def by_pending(instance: Instance) -> tuple[int, str]:
    """The one with most pending comes first."""
    return -instance.pending, instance.name


def by_executing(instance: Instance) -> tuple[int, str]:
    """The one that executes most comes first."""
    return -instance.executing, instance.name
