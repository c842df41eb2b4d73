"""A worker's time among its tenants, where engine and trainer take turns.

Engine and trainer have equal shares of the time, and each divides its own among tenants. A tenant whose jobs have work
in one of them only, as a small job always does, would get a half of its fair share: the other half goes to whoever has
work in both. So time counts for the tenants that used it, by counters as in :mod:`rookery.scheduling.queues`, and where
the tenant with the least has work in one of the two only, that one is next. So does the
engine choose between prompts and decoding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rookery.scheduling.queues import TokenCounters


class WorkerTime:
    """Seconds that tenants used, divided by their ``weights``, which may change at any time."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._counters = TokenCounters(weights)
        self._working: set[str] = set()
        """Tenants that had work at the last choice."""

    @property
    def weights(self) -> Mapping[str, float]:
        return self._counters.weights

    def favoured(self, parts: Sequence[Collection[str]]) -> int | None:
        """The tenants that have work in each part of the worker: the choice of :meth:`part_of_least`. Tenants that had
        no work at the last call have no credit for that time."""
        working = set().union(*parts)
        for tenant in sorted(working - self._working):
            self._counters.lift(tenant)
        self._working = working
        self._counters.order(sorted(working))
        return self.part_of_least(parts)

    def part_of_least(self, parts: Sequence[Collection[str]]) -> int | None:
        """The only one of these parts in which the tenant with the least time has work. None if it has work in several,
        or some part works for no tenant."""
        if not parts or not all(parts):
            return None
        least = min(sorted(set().union(*parts)), key=self._counters.__getitem__)
        having = [number for number, tenants in enumerate(parts) if least in tenants]
        return having[0] if len(having) == 1 else None

    def charge(self, seconds: float, shares: Mapping[str, float]) -> None:
        """These ``seconds`` were used by tenants in proportion to ``shares``."""
        total = sum(shares.values())
        for tenant, share in shares.items():
            if share:
                self._counters.charge(tenant, seconds * share / total)
