"""An event loop in which tenants take turns.

One thread does the service's work for everybody, a callback at a time. asyncio runs callbacks in the order in which
they became ready: where a tenant has sixteen jobs, sixteen of its callbacks run between two of another tenant's job.
Here each tenant (:data:`~rookery.turns.TENANT`) has a line of callbacks, which keep their order, and the tenant that
took the least of the loop's time is next. So a tenant with a callback waits for one of each other tenant at most, and
tenants that always have some share the time equally. A tenant without callbacks saves up no time for later, and one
that is alone takes all of it.

Callbacks of sockets and of timers, those from other threads, and the service's own wait for no tenant: they wake the
tasks that work for tenants, and take little time themselves. A longer part of them, such as a worker's message, is
charged to its tenant (:func:`~rookery.turns.loop_time_of`), whose next turn is later by it.
"""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Callable
from contextvars import Context
from itertools import count
from selectors import BaseSelector
from typing import TypeVarTuple, Unpack

from rookery.turns import TENANT, metered_seconds

Ts = TypeVarTuple("Ts")

TURNS_SECONDS = 0.002
"""Tenants take turns for so long before the loop looks at its sockets, its timers and the service's own callbacks: a
request comes back to the loop a dozen times."""

REMEMBERED = 1000
"""Tenants without callbacks whose time is kept at least; the time of one that took no more than the others do now
decides nothing."""


class TenantLoop(asyncio.SelectorEventLoop):
    """Its callbacks run in the turns of their tenants."""

    def __init__(self, selector: BaseSelector | None = None) -> None:
        super().__init__(selector)
        self._lines: dict[str, deque[asyncio.Handle]] = {}
        """By tenant that has callbacks, or whose callback runs."""
        self._waiting: list[tuple[float, int, str]] = []
        """A heap of the tenants that have callbacks: the time that each took, and a number by which equal ones keep
        their order."""
        self._taken: dict[str, float] = {}
        """By other tenant, the time that it took."""
        self._charged: dict[str, float] = {}
        """By tenant, time of the service's callbacks since its last turn."""
        self.spent: Callable[[str, float], object] = lambda tenant, seconds: None
        """Called with a tenant and the time of its work, without that of requests, which are metered."""
        self._kept = REMEMBERED
        self._least = 0.0
        """The time that the tenant of the last turn had taken before it."""
        self._numbers = count()
        self._turns_due = False
        self._context = Context()

    def processor_seconds(self) -> float:
        """The processor time of this thread."""
        return time.thread_time()

    def charge(self, tenant: str, seconds: float) -> None:
        """A callback of the service has worked for the tenant."""
        self._charged[tenant] = self._charged.get(tenant, 0.0) + seconds
        self.spent(tenant, seconds)

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """As in asyncio, in the tenant's turn."""
        tenant = TENANT.get() if context is None else context.get(TENANT, "")
        if not tenant:
            return super().call_soon(callback, *args, context=context)
        if self.is_closed():
            raise RuntimeError("the event loop is closed")
        handle = asyncio.Handle(callback, args, self, context)
        if (line := self._lines.get(tenant)) is None:
            line = self._lines[tenant] = deque()
            self._wait(tenant, max(self._taken.pop(tenant, 0.0), self._least) + self._charged.pop(tenant, 0.0))
        line.append(handle)
        return handle

    def _wait(self, tenant: str, taken: float) -> None:
        heapq.heappush(self._waiting, (taken, next(self._numbers), tenant))
        if not self._turns_due:
            self._turns_due = True
            super().call_soon(self._take_turns, context=self._context)

    def _take_turns(self) -> None:
        """Run callbacks of tenants; the rest after what has become ready meanwhile."""
        began = now = self.processor_seconds()
        try:
            while self._waiting and now - began < TURNS_SECONDS:
                now = self._take_turn(now)
        finally:  # also where a callback ends the loop, which runs again to cancel its tasks
            self._turns_due = bool(self._waiting)
            if self._turns_due:
                super().call_soon(self._take_turns, context=self._context)

    def _take_turn(self, began: float) -> float:
        """Run a callback of the tenant that took the least time, and return the time at its end."""
        self._least, _, tenant = heapq.heappop(self._waiting)
        line, now = self._lines[tenant], began
        handle = line.popleft()
        try:
            if not handle.cancelled():
                metered = metered_seconds()
                handle._run()
                now = self.processor_seconds()
                self.spent(tenant, max(0.0, now - began - (metered_seconds() - metered)))
        finally:
            taken = self._least + now - began + self._charged.pop(tenant, 0.0)
            if line:
                self._wait(tenant, taken)
            else:
                del self._lines[tenant]
                self._remember(tenant, taken)
        return now

    def _remember(self, tenant: str, taken: float) -> None:
        self._taken[tenant] = taken
        if len(self._taken) > self._kept:
            self._taken = {one: seconds for one, seconds in self._taken.items() if seconds > self._least}
            self._kept = REMEMBERED + 2 * len(self._taken)
