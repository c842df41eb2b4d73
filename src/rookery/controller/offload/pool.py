"""The remote workers of one base model: those that generate and do not train, so that training workers may leave
generating to them. No more are used than pay off; left out are, of those that may vanish, the ones that came last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from rookery.aio import Clock
from rookery.controller.fleet.worker import Worker


@dataclass(frozen=True, slots=True)
class UsageTotals:
    """Seconds since the service started, summed over the workers in use: how long they were, and how long they had
    something to generate."""

    used: float
    busy: float


class RemotePool:
    def __init__(self, clock: Clock, busy: Callable[[Worker], float]) -> None:
        """``busy(worker)`` is for how many seconds it has had something to generate."""
        self._clock = clock
        self._busy = busy
        self._used: OrderedDict[Worker, tuple[float, float]] = OrderedDict()
        """In the order in which they came: since when, and how busy they had been by then."""
        self._spare: OrderedDict[Worker, None] = OrderedDict()
        self._most: int | None = None
        self._before = UsageTotals(0.0, 0.0)

    def __len__(self) -> int:
        return len(self._used) + len(self._spare)

    def __contains__(self, worker: Worker) -> bool:
        return worker in self._used or worker in self._spare

    @property
    def used(self) -> int:
        return len(self._used)

    @property
    def full(self) -> bool:
        """Whether one more would be left out."""
        return self._most is not None and len(self._used) >= self._most

    def standby(self, worker: Worker) -> bool:
        """Whether it is left out."""
        return worker in self._spare

    def totals(self) -> UsageTotals:
        now, used, busy = self._clock.monotonic(), self._before.used, self._before.busy
        for worker, (since, before) in self._used.items():
            used += now - since
            busy += self._busy(worker) - before
        return UsageTotals(used, busy)

    def add(self, worker: Worker) -> list[Worker]:
        """It is there. This and the others answer whose part may have changed."""
        if worker.hello.kind == "reserved":
            self._use(worker)
        else:
            self._spare[worker] = None
        return [worker, *self._settle()]

    def drop(self, worker: Worker) -> list[Worker]:
        """It is there no more, or trains."""
        if worker in self._used:
            self._retire(worker)
        else:
            del self._spare[worker]
        return [worker, *self._settle()]

    def limit(self, most: int | None) -> list[Worker]:
        """Use at most so many, None: all. Those in use that change answer, and all that are left out."""
        if most == self._most:
            return []
        self._most = most
        return [*self._settle(), *self._spare]

    def _settle(self) -> list[Worker]:
        changed = []
        most = len(self) if self._most is None else self._most
        while self._spare and len(self._used) < most:
            worker, _ = self._spare.popitem(last=False)
            self._use(worker)
            changed.append(worker)
        while len(self._used) > most and (last := self._last()) is not None:
            self._retire(last)
            self._spare[last] = None
            self._spare.move_to_end(last, last=False)
            changed.append(last)
        return changed

    def _last(self) -> Worker | None:
        """Of those in use that may vanish, the one that came last."""
        return next((worker for worker in reversed(self._used) if worker.hello.kind == "preemptible"), None)

    def _use(self, worker: Worker) -> None:
        self._used[worker] = self._clock.monotonic(), self._busy(worker)

    def _retire(self, worker: Worker) -> None:
        since, before = self._used.pop(worker)
        now = self._clock.monotonic()
        self._before = UsageTotals(self._before.used + now - since, self._before.busy + self._busy(worker) - before)
