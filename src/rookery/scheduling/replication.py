"""From which holder each receiver of an artifact reads. Pure: replicas in, routes out.

* The nearest source comes first: the same machine, the same site, another site. So one copy crosses to each site, and
  the other receivers of the site read that one, while it still arrives.
* Among equally near sources, a reader more costs as much as :func:`hops_of` places more in a chain: a large artifact
  passes along a chain, in which everybody sends it once; a small one spreads as a tree.
* The service has a durable copy of every artifact. It is a source like any other, and the last among equally near ones.
* A receiver never reads from one that reads, over others, from itself, nor from its own address.
* A slow receiver comes last in its site, so that others do not wait for what it has not received. One that turns out to
  be slow while it receives is left by its readers (:class:`SourceRates`), and reads behind them.
* All shards of an artifact follow one route: its hash names them all, so no receiver mixes two versions.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

SERVICE = ""
"""The name of the service among sources: no worker has it."""

ALTERNATIVES = 2
"""Further sources that a receiver is given, for the case that it cannot ask for others when its first one fails."""

ALTERNATIVES_AMONG = 8
"""Cheap sources that are looked at for an alternative."""

ADAPTER_HOPS, MODEL_HOPS = 16.0, 64.0
"""Places in a chain that cost as much as one reader more: about the time that an artifact takes over a link, divided by
the time for which a block waits in a receiver. An adapter has some ten megabytes, a model some hundred or more; but the
last one of a chain waits for its first byte as long as the chain is, and takes a long silence for a fault."""

SLOW_READERS = 4.0
"""Readers more that cost as much as to read from a slow receiver."""

FAR_BELOW = 4.0
"""A rate is far below another one that is more than so many times as high: less may be the load of other transfers."""

PACE_HEARTBEATS = 2
"""Heartbeats over which a receiver's rate is measured: shorter transfers are not judged."""

TRIES = 3
"""Receivers of one source that are left before its own link is taken to be the slow one."""

SAME_MACHINE, SAME_SITE, ELSEWHERE = range(3)


class Replica(NamedTuple):
    """A worker that holds an artifact, receives it, or is to receive it."""

    name: str
    machine: str
    site: str
    serves: bool = True
    """Whether others can read from it."""
    reserved: bool = True
    source: str | None = None
    """From whom it receives the artifact; None: it is complete here, or has no source yet."""
    address: str = ""
    """Where it answers. Of two workers with one address the earlier one has ended, though nobody has noticed yet."""
    slow: bool = False
    """Whether it receives far more slowly than others."""


class Route(NamedTuple):
    """The sources of a receiver by name, in the order in which to ask them; the service comes after the last."""

    receiver: str
    sources: tuple[str, ...]

    @property
    def source(self) -> str:
        """The one that it reads from first."""
        return self.sources[0] if self.sources else SERVICE


def hops_of(rank: int) -> float:
    """Places in a chain that cost as much as one reader more, for a version of this rank; 0 is a whole model."""
    return ADAPTER_HOPS if rank else MODEL_HOPS


def distance(one: Replica, other: Replica) -> int:
    """How far two workers are from each other. An unnamed machine is no other one's."""
    if one.site != other.site:
        return ELSEWHERE
    return SAME_MACHINE if one.machine and one.machine == other.machine else SAME_SITE


def plan_routes(
    receivers: Sequence[Replica],
    holders: Iterable[Replica],
    *,
    site: str,
    hops: float,
    excluded: Collection[str] = (),
) -> list[Route]:
    """One route for each of ``receivers``, in one decision. ``holders`` have the artifact or receive it; ``site`` is
    the service's; sources ``excluded`` have failed. Sites that have it come first, so that the others read from the
    ends of their chains; of a site, those that can pass it on, slow ones last, reserved ones before others, so that its
    first one is its best one. Costs O(n log n), however many there are."""
    fresh = {one.name for one in receivers}
    known = [one for one in holders if one.name not in fresh]
    sites = {one.site for one in known if one.serves}
    ordered = sorted(
        receivers,
        key=lambda one: (one.site not in sites, one.site, not one.serves, one.slow, not one.reserved, one.name),
    )
    table = SourceTable(known, hops, excluded)
    routes = []
    for receiver in ordered:
        sources = table.best(receiver, near=ELSEWHERE if receiver.site != site else SAME_SITE)
        table.add(receiver, sources[0] if sources else SERVICE)
        routes.append(Route(receiver.name, tuple(sources)))
    return routes


class Pace:
    """How quickly one transfer makes progress, by the heartbeats of its receiver since it has its present source."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=PACE_HEARTBEATS + 1)

    def see(self, now: float, size: int) -> None:
        """``size`` bytes are there."""
        self._seen.append((now, size))

    @property
    def rate(self) -> float | None:
        """Bytes per second; None where it is not known yet, and while none come: readers notice a silence."""
        if len(self._seen) <= PACE_HEARTBEATS:
            return None
        (began, before), (ended, after) = self._seen[0], self._seen[-1]
        return (after - before) / (ended - began) if ended > began and after > before else None


class SourceRates:
    """Which receivers hold up those that read from them, by rates. Where a source receives itself, its own rate is the
    yardstick, within a site. A source that has the artifact whole gives as much as it ever gave over this link; where
    that is not known, the first receivers are left by their readers, :data:`TRIES` at most, to learn whether the next
    one receives more."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], float] = {}
        """By the sites of a source and its receiver, the bytes per second of the link."""

    def holds_up(
        self,
        link: tuple[str, str],
        rate: float,
        upstream: float | None,
        left: Collection[float],
        all_left: bool = False,
    ) -> bool:
        """Whether a receiver at ``rate`` is to be left by its readers. ``upstream``: the rate at which its source
        receives, None: that has the artifact whole; ``left``: the rates of those left before over the same link;
        ``all_left``: all receivers of its site were left, so there is no other one to try."""
        if upstream is not None:  # between sites the link itself may be the slow one
            return link[0] == link[1] and FAR_BELOW * rate < upstream
        known, tried = self._known.get(link), all_left or len(left) >= TRIES
        if tried:  # this is the most that the source gives now
            known = max((rate, *left))
        elif known is not None or (left and FAR_BELOW * max(left) < rate):
            known = max(known or 0.0, rate)
        if known is not None:
            self._known[link] = known
        return not tried and (known is None or FAR_BELOW * rate < known)


class SourceTable:
    """The sources of one artifact, cheapest first within a machine, within a site and altogether."""

    def __init__(self, holders: list[Replica], hops: float, excluded: Collection[str]) -> None:
        self._hops = hops
        self._excluded = excluded
        self._replicas = {one.name: one for one in holders}
        self._readers: dict[str, int] = {}
        self._upstream = {one.name: one.source for one in holders}
        for one in holders:
            if one.source is not None:
                self._readers[one.source] = self._readers.get(one.source, 0) + 1
        self._depth: dict[str, int] = {}
        for one in holders:
            self._measure(one.name)
        self._heaps: dict[tuple[str, ...], list[tuple[float, int, str]]] = {}
        for one in holders:
            self._push(one)

    def best(self, receiver: Replica, *, near: int) -> list[str]:
        """The sources of ``receiver``. The service, at the distance ``near``, follows the workers that are as near."""
        keys: list[tuple[str, ...]] = [("machine", receiver.site, receiver.machine)] if receiver.machine else []
        keys.append(("site", receiver.site))
        if near == ELSEWHERE:
            keys.append(("all",))
        for key in keys:
            if (found := self._cheapest(key, receiver)) is not None:
                return [found, *self._alternatives(key, receiver, found)]
        return []

    def add(self, receiver: Replica, source: str) -> None:
        """``receiver`` reads from ``source`` from now on, and is a source itself."""
        self._readers[source] = self._readers.get(source, 0) + 1
        self._replicas[receiver.name] = receiver._replace(source=source)
        self._upstream[receiver.name] = source
        self._depth[receiver.name] = self._depth.get(source, 0) + 1
        if (one := self._replicas.get(source)) is not None:
            self._push(one)
        self._push(self._replicas[receiver.name])

    def _cost(self, name: str) -> float:
        slow = SLOW_READERS if self._depth[name] and self._replicas[name].slow else 0.0
        return self._readers.get(name, 0) + self._depth[name] / self._hops + slow

    def _push(self, one: Replica) -> None:
        if not one.serves or one.name in self._excluded:
            return
        entry = (self._cost(one.name), self._depth[one.name], one.name)
        for key in (("machine", one.site, one.machine), ("site", one.site), ("all",)):
            heapq.heappush(self._heaps.setdefault(key, []), entry)

    def _cheapest(self, key: tuple[str, ...], receiver: Replica) -> str | None:
        heap, passed = self._heaps.get(key, []), []
        found = None
        while heap:
            cost, _, name = heap[0]
            if cost != self._cost(name):  # an entry from before it had its present readers
                heapq.heappop(heap)
                continue
            if self._same_process(name, receiver) or self._reads_from(name, receiver.name):
                passed.append(heapq.heappop(heap))
                continue
            found = name
            break
        for entry in passed:
            heapq.heappush(heap, entry)
        return found

    def _alternatives(self, key: tuple[str, ...], receiver: Replica, first: str) -> list[str]:
        """Complete ones, which wait for nobody: two receivers that both turn to an alternative never wait for each
        other."""
        able = (name for _, depth, name in self._heaps[key][:ALTERNATIVES_AMONG] if depth == 0)
        others = (name for name in able if name != first and not self._same_process(name, receiver))
        return list(dict.fromkeys(others))[:ALTERNATIVES]

    def _same_process(self, name: str, receiver: Replica) -> bool:
        address = self._replicas[name].address
        return name == receiver.name or (bool(address) and address == receiver.address)

    def _reads_from(self, name: str, receiver: str) -> bool:
        """Whether ``name`` is ``receiver``, or reads from it over any number of others."""
        if receiver not in self._readers:
            return name == receiver
        at: str | None = name
        for _ in range(len(self._upstream) + 1):
            if at is None or at == receiver:
                break
            at = self._upstream.get(at)
        return at == receiver

    def _measure(self, name: str) -> None:
        """The places from ``name`` to a worker that has the artifact whole."""
        path, at = [], self._upstream.get(name)
        waiting = name
        while at is not None and waiting not in self._depth and waiting not in path:
            path.append(waiting)
            waiting, at = at, self._upstream.get(at)
        depth = self._depth.setdefault(waiting, 0)
        for number, one in enumerate(reversed(path), 1):
            self._depth[one] = depth + number
