"""A worker's time among its tenants, where engine and trainer take turns.

Each tenant has a share of the time by its weight. One with work in both engine and trainer has half of its share in
each, one with work in one of them, as a small job always is, has all of it there. Engine and trainer take turns in
proportion to the shares of their tenants (:func:`next_slice`), and each divides its time in that proportion. So neither
of them ever has less than the shares of the tenants that need it, and no tenant pays for another's work in both. Shares
follow the work of the moment: time that a tenant does not use is not saved up. Nor does a tenant pay for it: where one
comes to have work in one of them only, that one's debt to the other is forgiven (:attr:`WorkerTime.arrived`), as long
as the other has nine tenths of its share. A small job, whose phases follow each other, would wait in each for the other
to catch up.

Within the engine, the tenant with the least time, by counters as in :mod:`rookery.scheduling.queues`, decides between
prompts and decoding.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Protocol

from rookery.scheduling.queues import TokenCounters

FORGIVEN, MOST_FORGIVEN = 0.5, 10.0
"""Of a second of engine or trainer, so much of the other's debt to it may be forgiven, and so many seconds at once.
With a half, simulated small jobs next to long training slices gain 7 to 14%, and no part has less than 0.94 of its
share."""


class WorkerTime:
    """Seconds that tenants used, divided by their ``weights``, which may change at any time. Engine and trainer may ask
    and charge from two threads."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._counters = TokenCounters(weights)
        self._parts: tuple[set[str], set[str]] = set(), set()
        """Tenants that had work in engine and trainer at the last choice."""
        self.arrived = [False, False]
        """Whether at the last choice a tenant came to have work in the engine only; and in the trainer only."""
        self._lock = threading.Lock()

    @property
    def weights(self) -> Mapping[str, float]:
        return self._counters.weights

    def weight_within(self, tenant: str) -> float:
        """The tenant's weight within engine or trainer: half where it has work in both."""
        engine, trainer = self._parts
        return self.weights.get(tenant, 1.0) / (2 if tenant in engine and tenant in trainer else 1)

    def weights_within(self, tenants: Collection[str]) -> dict[str, float]:
        return {tenant: self.weight_within(tenant) for tenant in tenants}

    @property
    def only_in_engine(self) -> bool:
        """Whether some tenant has work in the engine and not in the trainer."""
        engine, trainer = self._parts
        return not engine <= trainer

    @property
    def same_tenants(self) -> bool:
        """Whether engine and trainer work for the same tenants."""
        engine, trainer = self._parts
        return engine == trainer

    def divide(self, engine: Collection[str], trainer: Collection[str]) -> tuple[float, float]:
        """The shares of engine and trainer, for the tenants that have work in each: equal ones if one of them works for
        no tenant. A tenant that had no work at the last call has no credit for that time."""
        with self._lock:
            earlier, before = self._parts, self._parts[0] | self._parts[1]
            self._parts = one, other = set(engine), set(trainer)
            self.arrived = [bool(one - other - earlier[0]), bool(other - one - earlier[1])]
            working = self._parts[0] | self._parts[1]
            for tenant in sorted(working - before):
                self._counters.lift(tenant)
            self._counters.order(sorted(working))
        if not engine or not trainer:
            return 0.5, 0.5
        parts = [sum(map(self.weight_within, sorted(part))) for part in self._parts]
        return parts[0] / sum(parts), parts[1] / sum(parts)

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
        with self._lock:
            for tenant, share in shares.items():
                if share:
                    self._counters.charge(tenant, seconds * share / total)


class Steppable(Protocol):
    """The engine or the trainer."""

    def step(self) -> bool:
        """Run one bounded slice; False if there was nothing to do."""
        ...


class TimeSlice:
    """Time used by the engine or the trainer. ``clock`` orders the two: seconds divided by their shares, where equal
    ones are 1. ``seconds`` is reported, ``present`` is of the present slice."""

    def __init__(self, steppable: Steppable, busy: Callable[[], bool]) -> None:
        self.steppable = steppable
        self.busy = busy
        self.clock = 0.0
        self.share = 1.0
        self.seconds = self.present = 0.0
        self.idle = True
        self.forgivable = 0.0
        """Of the other one's debt to this one; grows with ``clock``."""
        self.charged = 0.0
        """The moment until which its time is charged."""
        self.began: float | None = None
        """When the present slice, or its present layer, began; None between two."""
        self.full = True
        """Whether the present slice has had all cores, or all of its lane's, so far."""

    def charge(self, seconds: float) -> None:
        self.clock += seconds / self.share
        self.forgivable = min(self.forgivable + FORGIVEN * seconds / self.share, MOST_FORGIVEN)


def divide_slices(slices: list[TimeSlice], time: WorkerTime, engine: Collection[str], trainer: Collection[str]) -> None:
    """The shares of engine and trainer, for the tenants that have work in each. The debt that one of them has to the
    other is forgiven where a tenant comes to have work in it only, as far as ``forgivable`` allows: neither starves."""
    shares = time.divide(engine, trainer)
    for part, other, share, arrived in zip(slices, reversed(slices), shares, time.arrived, strict=True):
        part.share = len(slices) * share
        if arrived and (forgiven := min(part.clock - other.clock, other.forgivable)) > 0:
            part.clock, other.forgivable = part.clock - forgiven, other.forgivable - forgiven


def next_slice(slices: list[TimeSlice], allows_training: Callable[[], bool] = lambda: True) -> TimeSlice | None:
    """The busy one of engine and trainer that has used the least of its share; None if none is busy. One that was idle
    starts level with those that worked. The trainer's turn is the engine's while ``allows_training`` is False: the
    trainer stays the next."""
    busy = [s for s in slices if s.busy()]
    level = min((s.clock for s in busy if not s.idle), default=0.0)
    for s in slices:
        if s in busy and s.idle:
            s.clock = level
        s.idle = s not in busy
    chosen = min(busy, key=lambda s: s.clock, default=None)
    engine, trainer = slices
    return engine if chosen is trainer and engine in busy and not allows_training() else chosen
