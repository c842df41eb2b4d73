"""Equal shares by round-robin: tenants take turns, within a tenant its jobs take turns, within a job first come first.

What somebody waits for goes ahead of the rest, within a bound. Every item put in comes out exactly once, or is removed
exactly once. Putting, removing and taking what is ready first cost the same however many wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class RoundRobin(Generic[T]):
    """Queues nested as tenant → job → items, which are distinct. ``take`` rotates both levels."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, OrderedDict[str, OrderedDict[T, None]]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[T]:
        for jobs in self._tenants.values():
            for items in jobs.values():
                yield from items

    def put(self, tenant: str, job: str, item: T, *, first: bool = False) -> None:
        """Append ``item``; ``first`` puts it before its job's others (it has waited already)."""
        items = self._tenants.setdefault(tenant, OrderedDict()).setdefault(job, OrderedDict())
        items[item] = None
        if first:
            items.move_to_end(item, last=False)
        self._size += 1

    def take(self, ready: Callable[[T], bool]) -> T | None:
        """The next item for which ``ready``; of each job only the first is looked at, so that its order holds."""
        for tenant, jobs in self._tenants.items():
            for job, items in jobs.items():
                item = next(iter(items))
                if not ready(item):
                    continue
                del items[item]
                self._size -= 1
                jobs.move_to_end(job)
                self._tenants.move_to_end(tenant)
                self._prune(tenant, job)
                return item
        return None

    def before(self, tenant: str, job: str) -> int | None:
        """How many items will be taken before the job's first one, if all are ready; None when it has none."""
        if job not in self._tenants.get(tenant, ()):
            return None
        own = list(self._tenants[tenant]).index(job)  # turns that the tenant's other jobs have first
        place = list(self._tenants).index(tenant)
        return own + sum(
            min(sum(map(len, jobs.values())), own + (number < place))
            for number, (name, jobs) in enumerate(self._tenants.items())
            if name != tenant
        )

    def remove(self, tenant: str, job: str, item: T) -> bool:
        """Take ``item`` out, wherever it stands; False when it is not there."""
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


class Lanes(Generic[T]):
    """Two round-robins. The express lane goes first where it has room of its own; then the common lane; what room that
    leaves is the express lane's too. So neither lane can keep the other waiting for ever."""

    def __init__(self) -> None:
        self.express: RoundRobin[T] = RoundRobin()
        self.common: RoundRobin[T] = RoundRobin()

    def __len__(self) -> int:
        return len(self.express) + len(self.common)

    def __iter__(self) -> Iterator[T]:
        yield from self.express
        yield from self.common

    def take(self, ahead: Callable[[T], bool] | None, ready: Callable[[T], bool] | None) -> tuple[T, bool] | None:
        """The next item, and whether it goes ahead: ``ahead`` tells for one of the express lane whether its own room
        takes it, ``ready`` for any whether the common room does. None for either: there is no such room at all."""
        for lane, fits in ((self.express, ahead), (self.common, ready), (self.express, ready)):
            item = lane.take(fits) if fits is not None else None
            if item is not None:
                return item, fits is ahead
        return None
