"""The order of one job's waiting requests: Seer's context-aware scheduling (arXiv 2511.14617, Algorithm 2). Pure.

A step that waits for all of its groups ends with its longest reply, so long ones should begin first. Lengths are not
known, but those of a group are alike: one member of each group, the *probe*, begins before the others (of several the
one with the fewest tokens), and tells how long they will be. A group's estimate is its longest finished member, or the
limit while none has finished; the members of the group with the largest estimate are next.

* Items that are put in ``first`` (later turns of episodes, requests that lost their worker) precede all others.
* **Starvation guard**: every :data:`GUARD`-th item is the one that waits longest. So an item with ``a`` earlier ones
  before it is taken at the latest as the ``GUARD · (a + 1)``-th item from then on, whatever the estimates are.
* Where a group's members predict each other no better than the job's mean does, or all replies are about equally long,
  there is nothing to learn: the order is not :attr:`~RolloutOrder.active`, and is first come, first served.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from sortedcontainers import SortedList

T = TypeVar("T", bound=Hashable)

GUARD = 8
"""A higher number follows the estimates more closely, and lets an item that they put last wait longer."""

ENOUGH = 16
"""Finished members that are compared with the estimates before these are judged: two groups of the usual size."""

NEWEST = 1 / 256
"""Weight of the newest member in means: they reach over a step. Short replies finish first, so that means over less
would follow the lengths by themselves."""

GAIN = 0.75
"""The group's squared error is at most this share of the job's. Independent lengths have 1 + 1/n, n members known."""

NARROW = math.log(1.1) ** 2
"""Squared errors below this (lengths within a tenth of each other) are too small to gain from."""


class Description(NamedTuple):
    """An item as the order sees it."""

    group: str = ""
    """Empty: the item is alone. Such items keep the order of their arrival, before those that are not probes."""
    tokens: int = 0
    """Tokens that were sampled for it."""
    limit: int = 0
    """The most that it can have."""


@dataclass
class _Group(Generic[T]):
    number: int
    """The number of its first item."""
    estimate: int
    waiting: OrderedDict[T, None] = field(default_factory=OrderedDict)
    """Its items but the probe."""
    unfinished: set[T] = field(default_factory=set)
    logs: list[float] = field(default_factory=list)
    """The logarithms of the finished members' lengths."""


class RolloutOrder(Generic[T]):
    """The waiting items of one job, each put in once. The cost of a call is the logarithm of their number."""

    def __init__(self, describe: Callable[[T], Description] = lambda item: Description()) -> None:
        self.probes = 0
        """Probes that were taken."""
        self._describe = describe
        self._first: OrderedDict[T, None] = OrderedDict()
        self._others: OrderedDict[T, int] = OrderedDict()
        """Every other item, as they came, with its number."""
        self._groups: dict[str, _Group[T]] = {}
        """The groups with unfinished members."""
        self._probes: Any = SortedList()
        """(tokens, number, item) of those that wait."""
        self._ranked: Any = SortedList()
        """(-estimate, number, group) of those with waiting items."""
        self._probing: dict[T, tuple[int, int, T]] = {}
        self._number = self._taken = self._compared = self._finished = 0
        self._mean = 0.0
        """The mean of the logarithms of the job's lengths."""
        self._errors = (0.0, 0.0)
        """Mean squares of the errors in the logarithm: of the group's mean, and of the job's."""

    def __len__(self) -> int:
        return len(self._first) + len(self._others)

    def __iter__(self) -> Iterator[T]:
        yield from self._first
        yield from self._others

    @property
    def active(self) -> bool:
        """Whether estimates decide: until they are judged, and where they proved to predict."""
        by_group, by_job = self._errors
        return self._compared < ENOUGH or (by_job > NARROW and by_group < GAIN * by_job)

    def estimate(self, item: T) -> int | None:
        """Tokens that the item is expected to have; None while no member of its group has finished."""
        group = self._groups.get(self._describe(item).group)
        return group.estimate if group is not None and group.logs else None

    def put(self, item: T, *, first: bool = False) -> None:
        """Add ``item``; ``first`` puts it before all others."""
        name, tokens, limit = self._describe(item)
        group = self._groups.get(name)
        probes = group is None and not first
        if name:
            if group is None:
                group = self._groups[name] = _Group(self._number, limit)
            group.unfinished.add(item)
        if first:
            self._first[item] = None
            self._first.move_to_end(item, last=False)
            return
        self._number += 1
        self._others[item] = self._number
        if probes:
            self._probing[item] = (tokens, self._number, item)
            self._probes.add(self._probing[item])
        else:
            assert group is not None
            if not group.waiting:
                self._ranked.add((-group.estimate, group.number, name))
            group.waiting[item] = None

    def next(self) -> T:
        """The item to be taken next; there must be one."""
        if self._first:
            return next(iter(self._first))
        if not self.active or self._taken % GUARD == GUARD - 1:
            return next(iter(self._others))
        if self._probes:
            return self._probes[0][2]
        return next(iter(self._groups[self._ranked[0][2]].waiting))

    def take(self, item: T) -> None:
        """The item begins."""
        self._taken += item in self._others
        self.probes += item in self._probing and bool(self._describe(item).group)
        self.remove(item)

    def remove(self, item: T) -> bool:
        """Whether the item was waiting; it is no more."""
        if item in self._first:
            del self._first[item]
            return True
        if self._others.pop(item, None) is None:
            return False
        if (probe := self._probing.pop(item, None)) is not None:
            self._probes.remove(probe)
            return True
        name = self._describe(item).group
        group = self._groups[name]
        del group.waiting[item]
        if not group.waiting:
            self._ranked.remove((-group.estimate, group.number, name))
        return True

    def finish(self, item: T, length: int | None) -> None:
        """The item, which does not wait, has ended with ``length`` tokens; None: it was cancelled or has failed."""
        name = self._describe(item).group
        if (group := self._groups.get(name)) is None:
            return
        group.unfinished.discard(item)
        if length:
            self._learn(group, math.log(length))
            longest = max(length, group.estimate if len(group.logs) > 1 else 0)
            if group.waiting and longest != group.estimate:
                self._ranked.remove((-group.estimate, group.number, name))
                self._ranked.add((-longest, group.number, name))
            group.estimate = longest
        if not group.unfinished:
            del self._groups[name]

    def _learn(self, group: _Group[T], log: float) -> None:
        """Compare a member's length with the means of its group and of its job before it."""
        if group.logs:
            errors = (log - sum(group.logs) / len(group.logs)) ** 2, (log - self._mean) ** 2
            self._compared += 1
            weight = max(NEWEST, 1 / self._compared)
            by_group, by_job = (old + weight * (new - old) for old, new in zip(self._errors, errors, strict=True))
            self._errors = by_group, by_job
        group.logs.append(log)
        self._finished += 1
        self._mean += max(NEWEST, 1 / self._finished) * (log - self._mean)
