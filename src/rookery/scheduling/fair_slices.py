"""How much of a slice, and of a worker's rows, each tenant has: pure functions, and counters of what was computed.

A slice that computes for several tenants takes as long as all of their work together, and each of them waits for all
of it. So its cost is bounded: with equal weights, by that of any tenant's work alone, times the number of tenants. The
tenant with the least work has all of it in every slice, and keeps its fair share of its speed alone. The room is
divided in turns, one item of each tenant per turn. A tenant alone has no bound. Where a slice has less room than that,
the tenants that were served least are first (:class:`ServedItems`).

A worker's rows are divided by weight among the tenants that have or want some (:func:`shares`). A tenant that comes
with less than its share waits for no other tenant's reply to end: while memory allows it, it gets rows beyond the
worker's number, up to half as many (:func:`next_row`). A slice computes no more rows than that number all the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from rookery.scheduling.queues import TokenCounters

Cost = Callable[[int], float]
"""Seconds of an amount of work; more work never costs less."""


def fair_amount(work: Mapping[str, int], weights: Mapping[str, float], cost: Cost, most: int) -> int:
    """How much of their ``work``, at most ``most`` in all, a slice computes for these tenants."""
    if len(work) < 2:
        return most
    total = sum(weights.get(tenant, 1.0) for tenant in work)
    bound = min(cost(amount) * total / weights.get(tenant, 1.0) for tenant, amount in work.items())
    low, high = 0, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost(middle) <= bound else (low, middle)
    return low


def turns(tenants: Sequence[str], weights: Mapping[str, float]) -> list[float]:
    """The turn in which each item, given by its tenant, comes: a tenant has as many per turn as its weight."""
    seen: Counter[str] = Counter()
    found = []
    for tenant in tenants:
        found.append(seen[tenant] / weights.get(tenant, 1.0))
        seen[tenant] += 1
    return found


def in_turns(tenants: Sequence[str], weights: Mapping[str, float], served: TokenCounters | None = None) -> list[int]:
    """The positions of items, given by their tenants, in the order of their turns: first one of every tenant. Within a
    turn the tenant with the least of ``served`` is first. Items of a tenant keep their order."""
    turn, counters = turns(tenants, weights), served if served is not None else TokenCounters({})
    return sorted(range(len(tenants)), key=lambda at: (turn[at], counters[tenants[at]]))


def fair_items(
    tenants: Sequence[str], weights: Mapping[str, float], cost: Cost, served: TokenCounters | None = None
) -> list[int]:
    """The positions of the items, given by their tenants, that the next slice computes, in turns. Whatever the costs,
    the tenant with the fewest for its weight has all of them."""
    work = Counter(tenants)
    if len(work) < 2:
        return list(range(len(tenants)))
    turn = turns(tenants, weights)
    complete = min(count / weights.get(tenant, 1.0) for tenant, count in work.items())
    least = max(len(work), sum(at < complete for at in turn))
    return in_turns(tenants, weights, served)[: max(least, fair_amount(work, weights, cost, len(tenants)))]


class ServedItems:
    """The items that slices computed for each tenant, divided by its weight (:mod:`rookery.scheduling.queues`). A
    tenant whose items a slice computed all has no credit for more."""

    def __init__(self) -> None:
        self.counters = TokenCounters({})
        self._left: set[str] = set()
        """Tenants of which the last slice left out items."""

    def begin(self, tenants: Collection[str]) -> TokenCounters:
        """The counters for a slice for which items of these tenants wait."""
        for tenant in set(tenants) - self._left:
            self.counters.lift(tenant)
        return self.counters

    def order(self, tenants: Sequence[str], weights: Mapping[str, float]) -> list[int]:
        """The positions of items, given by their tenants, in the order in which they find room in the slice that has
        begun."""
        turn = turns(tenants, weights)
        return sorted(range(len(tenants)), key=lambda at: self.counters[tenants[at]] + turn[at])

    def end(self, chosen: Mapping[str, float], left: Iterable[str], weights: Mapping[str, float]) -> None:
        """The slice computes so much of each tenant's, and leaves out items of the tenants ``left``."""
        for tenant, amount in chosen.items():
            self.counters.charge(tenant, amount / weights.get(tenant, 1.0))
        self._left = set(left)
        if self._left:
            self.counters.reach(min(self.counters[tenant] for tenant in self._left))
        elif chosen:
            self.counters.reach(max(self.counters[tenant] for tenant in chosen))


def shares(tenants: Collection[str], weights: Mapping[str, float], rows: int) -> dict[str, int]:
    """The rows, of so many, that each of these tenants has where all want some; at least one."""
    total = sum(weights.get(tenant, 1.0) for tenant in tenants)
    return {tenant: max(1, int(rows * weights.get(tenant, 1.0) / total)) for tenant in tenants}


def short_of_rows(
    waiting: Collection[str], held: Mapping[str, int], weights: Mapping[str, float], rows: int
) -> set[str]:
    """The tenants, of those that wait for a row, that have fewer of so many rows than their share; ``held``: the rows
    that tenants have. None where only one tenant works."""
    working = {*waiting, *(tenant for tenant, count in held.items() if count)}
    if not waiting or len(working) < 2:
        return set()
    share = shares(working, weights, rows)
    return {tenant for tenant in waiting if held.get(tenant, 0) < share[tenant]}


def most_rows(rows: int) -> int:
    """Requests that may have a row of so many at once, those of tenants beyond them included."""
    return rows + rows // 2


def next_row(waiting: Sequence[str], held: Mapping[str, int], weights: Mapping[str, float], rows: int) -> int | None:
    """The position of the waiting request, of those given by their tenants, that gets the next row: the first one of a
    tenant that has fewer than its share, also where :func:`most_rows` has one beyond ``rows``; else the first, where
    one is free. None: no row is free for any."""
    taken = sum(held.values())
    if taken < most_rows(rows) and (short := short_of_rows(set(waiting), held, weights, rows)):
        return next(at for at, tenant in enumerate(waiting) if tenant in short)
    return 0 if waiting and taken < rows else None
