"""Fair shares of an engine or a trainer by virtual token counters (VTC; Sheng and others, OSDI 2024, arXiv 2401.00588).

Each tenant has a counter of the tokens that it was served, divided by its weight; of the tenants that wait, the one
with the least counter is next (:class:`TokenCounters`). One that returns from a time without waiting work is lifted to
the least counter at the last choice: idle time is not saved up. While two tenants wait all the time, their counters
differ by less than

    (turn + in_flight) · L / weight

where L is the most tokens of one item, ``in_flight`` is the number of items that are served at once, and ``weight`` the
least weight. So the tokens that they get in any such period differ by at most twice that. An item may be charged in
advance by its expected tokens and corrected at its end: then counters differ by little more than a turn.

The starvation guard of :class:`FairQueue`: a tenant with a ready item from which nothing was taken for ``patience``
seconds is next, the longest waiting first. That is at most one item per tenant and ``patience`` seconds. It bounds the
wait where counters are far apart: with very different weights, or after a tenant's items could not be served for long.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Generic, TypeVar

from rookery.scheduling.rollout_order import RolloutOrder

T = TypeVar("T", bound=Hashable)
Item = TypeVar("Item")
Room = TypeVar("Room")

PROMPT_WEIGHT = 0.25
"""A prompt token in sampled ones: a prompt is computed in parallel, and a group's once for all its members."""


class TokenCounters:
    """The counter of every tenant. ``weights`` may change at any time; a tenant without one has weight 1."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.weights = weights
        self._counters: dict[str, float] = {}
        self._floor = 0.0
        """The least counter of a waiting tenant at the last choice."""

    def __getitem__(self, tenant: str) -> float:
        return self._counters.get(tenant, self._floor)

    def lift(self, tenant: str) -> None:
        """The tenant had nothing waiting, and has now."""
        self._counters[tenant] = max(self[tenant], self._floor)

    def charge(self, tenant: str, tokens: float) -> None:
        """The tenant was served these tokens; negative ones were charged before and not served."""
        self._counters[tenant] = self[tenant] + tokens / self.weights.get(tenant, 1.0)

    def reach(self, counter: float) -> None:
        """An item was begun that was put in at this counter: nobody is lifted to less from now on."""
        self._floor = max(self._floor, counter)

    def order(self, waiting: Iterable[str]) -> list[str]:
        """All tenants that wait, the next one first; equal ones keep their order."""
        ordered = sorted(waiting, key=self.__getitem__)
        if ordered:
            self.reach(self[ordered[0]])
        return ordered


class FairQueue(Generic[T]):
    """Distinct items by tenant and job. Tenants are served by their counters, in turns of ``turn`` items of one job;
    within a tenant its jobs take turns, within a job its :class:`~rookery.scheduling.rollout_order.RolloutOrder` holds.
    A job that runs out of items leaves the rest of its turn to the tenant's next job.

    Every item that is put in is taken exactly once or removed exactly once. No cost grows with the number of items by
    more than its logarithm.
    Times are seconds of one monotonic clock."""

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        *,
        turn: int = 1,
        patience: float = math.inf,
        order: Callable[[str], RolloutOrder[T] | None] = lambda job: None,
    ) -> None:
        """``order`` returns the order of a job that comes to have items; None: first come, first served."""
        self.turn = turn
        """Items per turn. A change applies from the next turn on."""
        self.counters = TokenCounters(weights if weights is not None else {})
        self._patience = patience
        self._order_of = order
        self._tenants: OrderedDict[str, OrderedDict[str, RolloutOrder[T]]] = OrderedDict()
        self._served: dict[str, float] = {}
        """By waiting tenant: when an item of it was last taken, or its first one began to wait."""
        self._current = ""
        """The tenant whose turn it is."""
        self._left = 0
        """The number of items that remain of its turn."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        for jobs in self._tenants.values():
            for items in jobs.values():
                yield from items

    @property
    def tenants(self) -> Collection[str]:
        """Tenants with items."""
        return self._tenants.keys()

    def put(self, tenant: str, job: str, item: T, *, first: bool = False, now: float = 0.0) -> None:
        """Append ``item``; ``first`` puts it before its job's other items."""
        if tenant not in self._tenants:
            self.counters.lift(tenant)
            self._served[tenant] = now
        jobs = self._tenants.setdefault(tenant, OrderedDict())
        if job not in jobs:
            order = self._order_of(job)
            jobs[job] = order if order is not None else RolloutOrder()
        jobs[job].put(item, first=first)
        self._size += 1

    def take(
        self,
        choose: Callable[[T], Room | None],
        now: float = 0.0,
        *,
        short: Collection[str] = (),
        among: Collection[str] | None = None,
    ) -> tuple[T, Room] | None:
        """The next item that ``choose`` finds room for, and that room, a true value; the caller charges it. Of each job
        only the first item is considered: its order holds. ``short``: tenants that have less than their share of the
        rows; where one of them has the least counter, the turn of a tenant that has its share ends. ``among``: only
        items of these tenants; None for all."""
        for tenant in self._order(now, short):
            if among is not None and tenant not in among:
                continue
            for job, items in self._tenants[tenant].items():
                item = items.next()
                if room := choose(item):
                    items.take(item)
                    self._on_taken(tenant, job, now)
                    return item, room
        return None

    def _order(self, now: float, short: Collection[str] = ()) -> list[str]:
        """The tenants, the next one first."""
        ordered = self.counters.order(self._tenants)
        ends = bool(ordered) and ordered[0] in short and self._current not in short
        if self._left and self._current in self._tenants and not ends:
            ordered.sort(key=lambda tenant: tenant != self._current)
        late = [tenant for tenant in ordered if now - self._served[tenant] > self._patience]
        return [*sorted(late, key=self._served.__getitem__), *ordered] if late else ordered

    def _on_taken(self, tenant: str, job: str, now: float) -> None:
        """An item of the job was taken."""
        self._size -= 1
        late, self._served[tenant] = now - self._served[tenant] > self._patience, now
        if not late and (tenant != self._current or not self._left):
            self._current, self._left = tenant, self.turn
        if tenant == self._current:
            self._left = max(0, self._left - 1)
        if tenant != self._current or not self._left:
            self._tenants[tenant].move_to_end(job)
            self._tenants.move_to_end(tenant)
        self._prune(tenant, job)

    def position(self, tenant: str, job: str) -> int | None:
        """How many items will be taken before the job's first one, if all are ready and cost the same; None when it has
        no items."""
        if job not in self._tenants.get(tenant, ()):
            return None
        ordered, jobs = self._order(0.0), self._tenants[tenant]
        turns = list(jobs).index(job)
        count = sum(min(self.turn, len(items)) for items in list(jobs.values())[:turns])
        for index, other in enumerate(ordered):
            if other != tenant:
                theirs = sum(map(len, self._tenants[other].values()))
                count += min(theirs, (turns + (index < ordered.index(tenant))) * self.turn)
        return count

    def remove(self, tenant: str, job: str, item: T) -> bool:
        """Remove ``item`` from any position; False when it is not queued."""
        items = self._tenants[tenant].get(job) if tenant in self._tenants else None
        if items is None or not items.remove(item):
            return False
        self._size -= 1
        self._prune(tenant, job)
        return True

    def _prune(self, tenant: str, job: str) -> None:
        jobs = self._tenants[tenant]
        if not len(jobs[job]):
            del jobs[job]
        if not jobs:
            del self._tenants[tenant], self._served[tenant]
            if tenant == self._current:
                self._left = 0


class PriorityQueues(Generic[T]):
    """Two queues. The interactive queue goes first where it has reserved room; then the common queue; the interactive
    queue gets the room that is left, too. So neither can starve the other; each has separate counters."""

    def __init__(
        self,
        weights: Mapping[str, float] | None = None,
        *,
        patience: float = math.inf,
        order: Callable[[str], RolloutOrder[T] | None] = lambda job: None,
    ) -> None:
        """``order``: of a job's items in the common queue, see :class:`FairQueue`."""
        self.interactive: FairQueue[T] = FairQueue(weights, patience=patience)
        self.common: FairQueue[T] = FairQueue(weights, patience=patience, order=order)

    def __len__(self) -> int:
        return len(self.interactive) + len(self.common)

    def __iter__(self) -> Iterator[T]:
        yield from self.interactive
        yield from self.common

    def take(
        self,
        reserved: Callable[[T], Room | None] | None,
        common: Callable[[T], Room | None] | None,
        now: float = 0.0,
        short: Collection[str] = (),
    ) -> tuple[T, Room, bool] | None:
        """The next item, its room, and whether that is reserved. ``reserved`` finds reserved room for an interactive
        item, ``common`` common room for any item; None means that there is no such room. ``short``: of the common
        queue, see :meth:`FairQueue.take`."""
        for queue, choose in ((self.interactive, reserved), (self.common, common), (self.interactive, common)):
            ending = short if queue is self.common else ()
            taken = queue.take(choose, now, short=ending) if choose is not None else None
            if taken is not None:
                return *taken, choose is reserved
        return None


class ReorderBuffer(Generic[Item]):
    """Returns items in the order of their numbers, without gaps, from ``next`` on. Every item is returned once."""

    def __init__(self, next: int) -> None:
        self.next = next
        self._held: dict[int, Item] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Item]:
        return iter(self._held.values())

    def put(self, number: int, item: Item) -> None:
        """Raises ``ValueError`` for a number that is held or was returned already."""
        if number < self.next or number in self._held:
            raise ValueError(f"number {number} came before; {self.next} is next")
        self._held[number] = item

    def pop(self) -> Item | None:
        """The next item, None while it has not arrived."""
        item = self._held.pop(self.next, None)
        if item is not None:
            self.next += 1
        return item

    @property
    def missing(self) -> int | None:
        """The number that all held items wait for; None when no item waits."""
        return self.next if self._held and self.next not in self._held else None

    @property
    def last(self) -> int:
        """The highest number that arrived."""
        return max(self._held, default=self.next - 1)

    def flush(self) -> list[Item]:
        """Give up on missing numbers: return all held items in order, and continue after them."""
        held = [self._held[number] for number in sorted(self._held)]
        self.next = self.last + 1
        self._held.clear()
        return held
