"""An index over workers that answers :mod:`rookery.scheduling.balancing`'s questions without looking at all of them.

* The instances that it names decide as all of them would (tested against that).
* A change of one instance costs the logarithm of how many there are, and nothing where its place did not change.
* An instance stands in *lanes*: a request asks for the first of each lane that suits it. One without a lane is given
  nothing, but may have something to move away.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

from rookery.scheduling.balancing import Instance, by_executing, by_pending, order

Key = tuple[Any, ...]
"""What is compared; its last part is the name."""

SLACK = 16
"""Outdated entries that a ranking may carry besides as many as it has members, before it is built anew."""


class Ranking:
    """Names in the order of their keys. Outdated entries stay in the heap until they come up."""

    def __init__(self) -> None:
        self._keys: dict[str, Key] = {}
        self._heap: list[Key] = []

    def __len__(self) -> int:
        return len(self._keys)

    def put(self, key: Key) -> None:
        """The name that the key ends with stands where the key says, and nowhere else."""
        if self._keys.get(key[-1]) == key:
            return
        self._keys[key[-1]] = key
        if len(self._heap) > 2 * len(self._keys) + SLACK:
            self._heap = list(self._keys.values())
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, key)

    def drop(self, name: str) -> None:
        del self._keys[name]

    def first(self) -> str | None:
        while self._heap:
            key = self._heap[0]
            if self._keys.get(key[-1]) == key:
                return str(key[-1])
            heapq.heappop(self._heap)
        return None


class WorkerIndex:
    """The instances of one base model."""

    def __init__(self) -> None:
        self._instances: dict[str, Instance] = {}
        self._lanes: dict[str, frozenset[str]] = {}
        self._least: dict[str, Ranking] = {}
        self._pending = Ranking()
        self._executing = Ranking()

    def put(self, instance: Instance, lanes: frozenset[str]) -> None:
        """The instance is as it says now, and stands in these lanes."""
        name = instance.name
        before = self._lanes.get(name, frozenset())
        if lanes != before:
            self._leave(name, before - lanes)
        self._instances[name], self._lanes[name] = instance, lanes
        key = order(instance)
        for lane in lanes:
            self._least.setdefault(lane, Ranking()).put(key)
        self._pending.put(by_pending(instance))
        self._executing.put(by_executing(instance))

    def drop(self, name: str) -> None:
        del self._instances[name]
        self._leave(name, self._lanes.pop(name))
        self._pending.drop(name)
        self._executing.drop(name)

    def _leave(self, name: str, lanes: Iterable[str]) -> None:
        for lane in lanes:
            self._least[lane].drop(name)
            if not self._least[lane]:
                del self._least[lane]

    def first(self, lanes: Iterable[str]) -> list[Instance]:
        """Of each of these lanes the one that is first in line for a request."""
        names = [self._least[lane].first() for lane in lanes if lane in self._least]
        return [self._instances[name] for name in names if name is not None]

    def fullest(self) -> list[Instance]:
        """The most-pending and the most-executing one."""
        names = (self._pending.first(), self._executing.first())
        return [self._instances[name] for name in names if name is not None]
