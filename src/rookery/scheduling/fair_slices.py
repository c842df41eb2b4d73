"""How much of a slice each tenant has. The functions are pure.

A slice that computes for several tenants takes as long as all of their work together, and each of them waits for all
of it. So its cost is bounded: with equal weights, by that of any tenant's work alone, times the number of tenants. The
tenant with the least work has all of it in every slice, and keeps its fair share of its speed alone. The room is
divided in turns, one item of each tenant per turn. A tenant alone has no bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

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


def in_turns(tenants: Sequence[str], weights: Mapping[str, float]) -> list[int]:
    """The positions of items, given by their tenants, in the order of their turns: first one of every tenant. Items of
    a tenant keep their order."""
    turn = turns(tenants, weights)
    return sorted(range(len(tenants)), key=turn.__getitem__)


def fair_items(tenants: Sequence[str], weights: Mapping[str, float], cost: Cost) -> list[int]:
    """The positions of the items, given by their tenants, that the next slice computes, in turns. Whatever the costs,
    the tenant with the fewest for its weight has all of them."""
    work = Counter(tenants)
    if len(work) < 2:
        return list(range(len(tenants)))
    turn = turns(tenants, weights)
    complete = min(count / weights.get(tenant, 1.0) for tenant, count in work.items())
    least = max(len(work), sum(at < complete for at in turn))
    return in_turns(tenants, weights)[: max(least, fair_amount(work, weights, cost, len(tenants)))]
