"""Placement: which worker gets the next request, and which requests move. Every function is pure and deterministic:
ties are decided by name.

Requests follow RLBoost's Algorithm 2 (arXiv 2510.19225).

A worker's *pending* requests are those beyond the rows that it decodes, *executing* the rest, *free* the rows that a
new request would get at once. The controller knows how many requests a worker holds, for how many of them tokens have
arrived since the worker got them, and the worker's last heartbeats (:func:`load`).

As published, with three additions:

* An instance without pending requests is a target only with a free row. So every move of a pending request lowers the
  sum of all pending requests by one, every move of executing ones lowers the sum of executing requests beyond B, and
  neither raises the other: without arrivals there are never more moves than these two sums, and none can oscillate.
* Among instances with equally many pending requests, one with a free row is chosen, then one without interactive
  requests (ROSE, arXiv 2605.06534), then the one that holds least, then the first by name: the same state gives the
  same choice.
* Θ = 0 means that nothing is ever pending by choice: a request goes to a free row or waits in the controller.

B, the saturation batch size, is learned from heartbeats (:mod:`rookery.scheduling.saturation`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sortedcontainers import SortedList

BEATS = 2
"""Consecutive heartbeats with waiting requests that prove a shortage: a single one may fall between a request's arrival
and its first step."""


@dataclass(frozen=True, slots=True)
class Instance:
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


@dataclass(frozen=True, slots=True)
class Move:
    """``count`` requests of ``source`` resume at ``target``: pending ones, or ``executing`` ones."""

    source: str
    target: str
    count: int
    executing: bool


def load(rows: int, held: int, decoding: int, beats: Sequence[tuple[int, int]]) -> tuple[int, int, int]:
    """``(pending, executing, free)`` of a worker with ``rows`` rows that holds ``held`` requests; tokens have arrived
    for ``decoding`` of them. ``beats`` are the (active, waiting) requests of its last :data:`BEATS` heartbeats.

    The worker decodes all requests that it holds, up to its rows. Where all those heartbeats report waiting requests
    (no memory for more, or their adapter is on its way), it decodes up to the number that was active, or ``decoding``
    if that is more: received tokens prove more than a heartbeat."""
    stuck = len(beats) == BEATS and all(waiting for _, waiting in beats)
    room = min(rows, max(decoding, *(active for active, _ in beats))) if stuck else rows
    executing = min(held, room)
    return held - executing, executing, room - executing


def order(instance: Instance) -> tuple[int, bool, bool, int, str]:
    """Sort key: the least gets the next request. Ends with the name."""
    held = instance.pending + instance.executing
    return instance.pending, not instance.free, instance.serving, held, instance.name


def select(instances: Iterable[Instance], theta: int) -> str | None:
    """Delayed join-shortest-pending: the instance with the fewest pending requests, if fewer than ``theta``; None to
    hold the request until another one completes."""
    able = [instance for instance in instances if instance.free or instance.pending < theta]
    return min(able, key=order).name if able else None


def balance(instances: Iterable[Instance], takers: Iterable[Instance]) -> Move | None:
    """Continuous load balancing: the next move, None when there is nothing to gain. ``takers`` are the instances that
    accept the requests to be moved.

    If some instance has nothing pending while another has, one request of the most-pending moves there; else if some
    instance executes nothing, max(executing − B, 0) requests of the most-executing one move, as many as find a row."""
    target = min((taker for taker in takers if taker.free and not taker.pending), key=order, default=None)
    if target is None:
        return None
    known = list(instances)
    crowded = min(known, key=_by_pending)
    if crowded.pending:
        return Move(crowded.name, target.name, 1, executing=False)
    busiest = min(known, key=_by_executing)
    if target.executing or busiest.saturated_rows is None:
        return None
    count = min(max(busiest.executing - busiest.saturated_rows, 0), target.free)
    return Move(busiest.name, target.name, count, executing=True) if count else None


def _by_pending(instance: Instance) -> tuple[int, str]:
    """Sort key: the most pending first."""
    return -instance.pending, instance.name


def _by_executing(instance: Instance) -> tuple[int, str]:
    """Sort key: the most executing first."""
    return -instance.executing, instance.name


class WorkerIndex:
    """The instances of one base model, sorted for :func:`select` and :func:`balance`: both decide on the instances that
    :meth:`first` and :meth:`fullest` return as they would on all of them. A change of one instance costs the logarithm
    of their number, a change that keeps its rank costs nothing.

    An instance has *tags*: a request asks for the first instance of each tag that suits it. An instance without tags
    gets no requests; requests may still be moved away from it."""

    def __init__(self) -> None:
        self._instances: dict[str, Instance] = {}
        self._tags_of: dict[str, frozenset[str]] = {}
        self._by_tag: dict[str, Any] = {}
        """By tag, the sorted keys (:func:`order`) of its instances."""
        self._pending: Any = SortedList()
        self._executing: Any = SortedList()

    def put(self, instance: Instance, tags: frozenset[str]) -> None:
        """Add the instance, or replace the one of its name."""
        name, key = instance.name, order(instance)
        old, old_tags = self._instances.get(name), self._tags_of.get(name, frozenset())
        old_key = order(old) if old is not None else None
        if old is None or key != old_key or tags != old_tags:
            self._untag(old_key, old_tags)
            for tag in tags:
                self._by_tag.setdefault(tag, SortedList()).add(key)
        for ranking, rank in ((self._pending, _by_pending), (self._executing, _by_executing)):
            if old is None or rank(old) != rank(instance):
                if old is not None:
                    ranking.remove(rank(old))
                ranking.add(rank(instance))
        self._instances[name], self._tags_of[name] = instance, tags

    def remove(self, name: str) -> None:
        """Raises KeyError for an unknown name."""
        instance = self._instances.pop(name)
        self._untag(order(instance), self._tags_of.pop(name))
        self._pending.remove(_by_pending(instance))
        self._executing.remove(_by_executing(instance))

    def _untag(self, key: tuple[int, bool, bool, int, str] | None, tags: Iterable[str]) -> None:
        for tag in tags:
            self._by_tag[tag].remove(key)
            if not self._by_tag[tag]:
                del self._by_tag[tag]

    def first(self, tags: Iterable[str]) -> list[Instance]:
        """Of each of these tags the instance that gets the next request."""
        return [self._instances[self._by_tag[tag][0][-1]] for tag in tags if tag in self._by_tag]

    def fullest(self) -> list[Instance]:
        """The most-pending and the most-executing instance; empty without instances."""
        return [self._instances[ranking[0][-1]] for ranking in (self._pending, self._executing) if ranking]
