"""The remote workers of one base model: those that generate and do not train, so that training workers may leave
generation to them.

No more are used than pay off. The others stand by: of the preemptible ones, those that joined last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from rookery.clock import Clock
from rookery.controller.fleet.worker import Worker


@dataclass(frozen=True, slots=True)
class UsageTotals:
    """Seconds since the service started, summed over the workers in use: in use, and with requests."""

    used: float
    busy: float


class RemotePool:
    """Which remote workers are in use and which stand by, and the time that they were in use."""

    def __init__(self, clock: Clock, busy_seconds: Callable[[Worker], float]) -> None:
        """``busy_seconds(worker)`` is the time for which it has had requests."""
        self._clock = clock
        self._busy_seconds = busy_seconds
        self._used: OrderedDict[Worker, tuple[float, float]] = OrderedDict()
        """In the order of joining: the time since when it is in use, and its busy seconds by then."""
        self._standby: OrderedDict[Worker, None] = OrderedDict()
        self._limit: int | None = None
        self._before = UsageTotals(0.0, 0.0)

    def __len__(self) -> int:
        return len(self._used) + len(self._standby)

    def __contains__(self, worker: Worker) -> bool:
        return worker in self._used or worker in self._standby

    @property
    def used(self) -> int:
        """The number of workers in use."""
        return len(self._used)

    @property
    def full(self) -> bool:
        """Whether one more worker would stand by."""
        return self._limit is not None and len(self._used) >= self._limit

    def standby(self, worker: Worker) -> bool:
        return worker in self._standby

    def totals(self) -> UsageTotals:
        now, used, busy = self._clock.monotonic(), self._before.used, self._before.busy
        for worker, (since, before) in self._used.items():
            used += now - since
            busy += self._busy_seconds(worker) - before
        return UsageTotals(used, busy)

    def add(self, worker: Worker) -> list[Worker]:
        """It joined. Returns the workers that may have changed between in use and standby."""
        if worker.hello.kind == "reserved":
            self._use(worker)
        else:
            self._standby[worker] = None
        return [worker, *self._apply_limit()]

    def remove(self, worker: Worker) -> list[Worker]:
        """It left, or trains now. Returns as :meth:`add`."""
        if worker in self._used:
            self._retire(worker)
        else:
            del self._standby[worker]
        return [worker, *self._apply_limit()]

    def limit(self, limit: int | None) -> list[Worker]:
        """Use at most so many; None: all. Returns the workers that changed, and all on standby."""
        if limit == self._limit:
            return []
        self._limit = limit
        return [*self._apply_limit(), *self._standby]

    def _apply_limit(self) -> list[Worker]:
        changed = []
        limit = len(self) if self._limit is None else self._limit
        while self._standby and len(self._used) < limit:
            worker, _ = self._standby.popitem(last=False)
            self._use(worker)
            changed.append(worker)
        while len(self._used) > limit and (last := self._last_preemptible()) is not None:
            self._retire(last)
            self._standby[last] = None
            self._standby.move_to_end(last, last=False)
            changed.append(last)
        return changed

    def _last_preemptible(self) -> Worker | None:
        """The preemptible worker in use that joined last."""
        return next((worker for worker in reversed(self._used) if worker.hello.kind == "preemptible"), None)

    def _use(self, worker: Worker) -> None:
        self._used[worker] = self._clock.monotonic(), self._busy_seconds(worker)

    def _retire(self, worker: Worker) -> None:
        since, before = self._used.pop(worker)
        used, busy = self._clock.monotonic() - since, self._busy_seconds(worker) - before
        self._before = UsageTotals(self._before.used + used, self._before.busy + busy)
