"""Placement: which worker gets the next request, and which requests move. Every function is pure and deterministic:
ties are decided by name.

Requests follow RLBoost's Algorithm 2 (arXiv 2510.19225).

A worker's *pending* requests are those beyond the rows that it decodes, *executing* the rest, *free* the rows that a
new request would get at once. The controller knows how many requests a worker holds, for how many of them tokens have
arrived since the worker got them, and the worker's last heartbeats (:func:`load`).

As published, with four additions:

* A worker without pending requests is a target only with a free row. So every move of a pending request lowers the
  sum of all pending requests by one, every move of executing ones lowers the sum of executing requests beyond B, and
  neither raises the other: without arrivals there are never more moves than these two sums, and none can oscillate.
* Among workers with equally many pending requests, one with a free row is chosen, then one without interactive
  requests (ROSE, arXiv 2605.06534), then the one that holds least, then the first by name: the same state gives the
  same choice.
* A slow worker counts as holding the rows with which the quickest decodes as slowly as it would (:func:`handicap`), so
  that a request goes where it is decoded soonest, and a slow worker gets one where the others have no row.
* Θ = 0 means that nothing is ever pending by choice: a request goes to a free row or waits in the controller.

B, the saturation batch size, is learned from heartbeats (:mod:`rookery.scheduling.saturation`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rookery.scheduling.costs import CostTable, interpolate

SHORTAGE_HEARTBEATS = 2
"""Consecutive heartbeats with waiting requests that prove a shortage: a single one may fall between a request's arrival
and its first step."""

SLOWER = 1.5
"""Times as slow as the quickest, from which a worker counts as slow: equal workers measure unequal costs."""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's figures."""

    name: str
    pending: int
    executing: int
    free: int
    """Requests that it would begin at once."""
    saturated_rows: int | None = None
    """B: the number of rows that gives nearly all of its throughput; None while unknown."""
    serving: bool = False
    """It has interactive requests: rollouts go to others first."""
    handicap: int = 0
    """Rows that it counts as holding beyond its own."""


@dataclass(frozen=True, slots=True)
class MigrationPlan:
    """``count`` requests of ``source`` resume at ``target``: pending ones, or ``executing`` ones."""

    source: str
    target: str
    count: int
    executing: bool


def load(rows: int, held: int, decoding: int, beats: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """``(pending, executing, free)`` of a worker with ``rows`` rows that holds ``held`` requests; tokens have arrived
    for ``decoding`` of them. ``beats`` are the (active, waiting) requests of its last heartbeats, at most
    :data:`SHORTAGE_HEARTBEATS`.

    The worker decodes all requests that it holds, up to its rows. Where all those heartbeats report waiting requests
    (no memory for more, or their adapter is on its way), it decodes up to the number that was active, or ``decoding``
    if that is more: received tokens prove more than a heartbeat."""
    stuck = len(beats) == SHORTAGE_HEARTBEATS and all(waiting for _, waiting in beats)
    room = min(rows, max(decoding, *(active for active, _ in beats))) if stuck else rows
    executing = min(held, room)
    return held - executing, executing, room - executing


def order(worker: WorkerLoad) -> tuple[int, bool, bool, int, str]:
    """Sort key: the least gets the next request. Ends with the name."""
    held = worker.pending + worker.executing + worker.handicap
    return worker.pending, not worker.free, worker.serving, held, worker.name


def handicap(costs: CostTable, quickest: CostTable, held: int) -> int:
    """The rows beyond ``held`` that the quickest worker decodes in the time in which a worker of these costs would
    decode one more than it holds. 0 where it is not :data:`SLOWER` times as slow with as many, or reported nothing."""
    seconds, best = costs.predict("decode", held + 1), quickest.predict("decode", held + 1)
    if not best or seconds < SLOWER * best:
        return 0
    sizes, times = zip(*quickest.curves["decode"], strict=True)
    return max(0, round(interpolate(times, sizes, seconds)) - 1 - held)


def select(workers: Iterable[WorkerLoad], theta: float) -> str | None:
    """Delayed join-shortest-pending: the worker with the fewest pending requests, if fewer than ``theta``; None to
    hold the request until another one completes."""
    able = [worker for worker in workers if worker.free or worker.pending < theta]
    return min(able, key=order).name if able else None


def balance(workers: Iterable[WorkerLoad], takers: Iterable[WorkerLoad]) -> MigrationPlan | None:
    """Continuous load balancing: the next move, None when there is nothing to gain. ``takers`` are the workers that
    accept the requests to be moved.

    If some worker has nothing pending while another has, one request of the most-pending moves there; else if some
    worker executes nothing, max(executing − B, 0) requests of the most-executing one move, as many as find a row."""
    target = min((taker for taker in takers if taker.free and not taker.pending), key=order, default=None)
    if target is None:
        return None
    known = list(workers)
    crowded = min(known, key=by_pending)
    if crowded.pending:
        return MigrationPlan(crowded.name, target.name, 1, executing=False)
    busiest = min(known, key=by_executing)
    if target.executing or busiest.saturated_rows is None:
        return None
    count = min(max(busiest.executing - busiest.saturated_rows, 0), target.free)
    return MigrationPlan(busiest.name, target.name, count, executing=True) if count else None


def by_pending(worker: WorkerLoad) -> tuple[int, str]:
    """Sort key: the most pending first."""
    return -worker.pending, worker.name


def by_executing(worker: WorkerLoad) -> tuple[int, str]:
    """Sort key: the most executing first."""
    return -worker.executing, worker.name
