"""Equal shares by deficit round-robin (Shreedhar & Varghese, SIGCOMM 1995): tenants take turns of several items, within
a tenant its jobs take turns, within a job items are first come, first served.

Of two tenants with waiting items, neither gets ahead by more than a turn. Interactive items precede the others, within
a bound. Every item that is put in is taken exactly once or removed exactly once. Putting, removing and taking the first
ready item cost the same however many wait.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class DeficitRoundRobin(Generic[T]):
    """Queues nested as tenant → job → distinct items. ``take`` stays with a tenant and its job for a turn, then rotates
    both levels; a job that runs out of items earlier leaves the rest of the turn to the tenant's next job."""

    def __init__(self, turn: int = 1) -> None:
        self.turn = turn
        """Items per turn. A change applies from each tenant's next turn on."""
        self._tenants: OrderedDict[str, OrderedDict[str, OrderedDict[T, None]]] = OrderedDict()
        self._deficits: dict[str, int] = {}
        """By tenant: items that remain of a turn that has begun."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        for jobs in self._tenants.values():
            for items in jobs.values():
                yield from items

    def put(self, tenant: str, job: str, item: T, *, first: bool = False) -> None:
        """Append ``item``; ``first`` puts it before its job's other items."""
        items = self._tenants.setdefault(tenant, OrderedDict()).setdefault(job, OrderedDict())
        items[item] = None
        if first:
            items.move_to_end(item, last=False)
        self._size += 1

    def take(self, ready: Callable[[T], bool]) -> T | None:
        """The next item for which ``ready`` holds. Of each job only the first item is considered: its order holds."""
        for tenant, jobs in self._tenants.items():
            for job, items in jobs.items():
                item = next(iter(items))
                if not ready(item):
                    continue
                del items[item]
                self._size -= 1
                self._deficits[tenant] = self._deficits.get(tenant, self.turn) - 1
                if not self._deficits[tenant]:
                    del self._deficits[tenant]
                    jobs.move_to_end(job)
                    self._tenants.move_to_end(tenant)
                self._prune(tenant, job)
                return item
        return None

    def position(self, tenant: str, job: str) -> int | None:
        """How many items will be taken before the job's first one, if all are ready; None when it has no items."""
        if job not in self._tenants.get(tenant, ()):
            return None
        count, turns = self._items_before(tenant, job)
        place = list(self._tenants).index(tenant)
        for number, (name, jobs) in enumerate(self._tenants.items()):
            if name != tenant and (theirs := turns + (number < place)):
                most = self._deficits.get(name, self.turn) + (theirs - 1) * self.turn
                count += min(sum(map(len, jobs.values())), most)
        return count

    def _items_before(self, tenant: str, job: str) -> tuple[int, int]:
        """``(items, turns)``: how many of the tenant's items precede the first one of its ``job``, and how many of its
        turns end before."""
        waiting = deque((name, len(items)) for name, items in self._tenants[tenant].items())
        remaining = self._deficits.get(tenant, self.turn)
        count = turns = 0
        while waiting[0][0] != job:
            name, length = waiting.popleft()
            taken = min(length, remaining)
            count, remaining = count + taken, remaining - taken
            if not remaining:
                turns, remaining = turns + 1, self.turn
                if length > taken:
                    waiting.append((name, length - taken))
        return count, turns

    def remove(self, tenant: str, job: str, item: T) -> bool:
        """Remove ``item`` from any position; False when it is not queued."""
        items = self._tenants.get(tenant, OrderedDict()).get(job)
        if items is None or item not in items:
            return False
        del items[item]
        self._size -= 1
        self._prune(tenant, job)
        return True

    def _prune(self, tenant: str, job: str) -> None:
        jobs = self._tenants[tenant]
        if not jobs[job]:
            del jobs[job]
        if not jobs:
            del self._tenants[tenant]
            self._deficits.pop(tenant, None)


class PriorityQueues(Generic[T]):
    """Two round-robins. The express queue goes first where it has reserved room; then the common queue; the express
    queue gets the room that is left, too. So neither queue can starve the other."""

    def __init__(self) -> None:
        self.express: DeficitRoundRobin[T] = DeficitRoundRobin()
        self.common: DeficitRoundRobin[T] = DeficitRoundRobin()

    def __len__(self) -> int:
        return len(self.express) + len(self.common)

    def __iter__(self) -> Iterator[T]:
        yield from self.express
        yield from self.common

    def take(self, reserved: Callable[[T], bool] | None, ready: Callable[[T], bool] | None) -> tuple[T, bool] | None:
        """The next item, and whether it gets reserved room. ``reserved`` says whether an express item fits the reserved
        room, ``ready`` whether an item fits the common room; None means that there is no such room."""
        for queue, fits in ((self.express, reserved), (self.common, ready), (self.express, ready)):
            item = queue.take(fits) if fits is not None else None
            if item is not None:
                return item, fits is reserved
        return None
