"""Whose work a task does, and lines and threads in which tenants take turns.

* :data:`TENANT` names the tenant for whom the current task works: the one whose key a request brought, or the owner of
  the job that runs. It is empty for the service's own work. Tasks inherit it; :func:`work_of` changes it, and
  :func:`service_task` starts one that does not inherit it.
* :class:`TenantLines` holds what waits: in order for each tenant, and the tenants take turns.
* :class:`TenantThreads` runs blocking calls, one at a time for each tenant, and the tenants take turns. A tenant with
  a thousand slow calls delays another one by a single call, and the service's own calls by none.
* :class:`TenantSlots` has slots for tasks, for which the tenants take turns.
* :func:`metered` measures the processor time that a coroutine takes of the event loop; :func:`charged` does so in a
  further task of a request, and :func:`loop_time_of` in a part of the service's work.
"""

from __future__ import annotations

import asyncio
import threading
import time
import types
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from rookery.children import take_child_seconds

T = TypeVar("T")

TENANT: ContextVar[str] = ContextVar("tenant", default="")
"""The id of the tenant whose work this is; empty for the service's own."""


@contextmanager
def work_of(tenant: str) -> Iterator[None]:
    """Within, the current task and the tasks that it starts work for ``tenant``."""
    turn = TENANT.set(tenant)
    try:
        yield
    finally:
        TENANT.reset(turn)


def service_task(work: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
    """A task of the service's own work, whose result several tenants wait for: the tenant whose work starts it must not
    delay it."""
    charged = SPENT.set(None)
    try:
        with work_of(""):
            return asyncio.create_task(work, name=name)
    finally:
        SPENT.reset(charged)


def outlive_request(tenant: str) -> None:
    """The current task works for ``tenant`` from now on, and belongs to no request, though one may have started it."""
    TENANT.set(tenant)
    SPENT.set(None)


class TenantLines(Generic[T]):
    """Items that wait, in order for each tenant. The tenants take turns, and the service's own items are one more
    line."""

    def __init__(self) -> None:
        self._lines: OrderedDict[str, deque[T]] = OrderedDict()
        """By tenant, the next one first; none is empty."""

    def __bool__(self) -> bool:
        return bool(self._lines)

    def add(self, tenant: str, item: T) -> None:
        self._lines.setdefault(tenant, deque()).append(item)

    def take(self, fits: Callable[[T], bool] = lambda item: True) -> T | None:
        """Remove the first item of the first line whose first item ``fits``, and put that line behind the others; None
        where there is none. A line that is passed over keeps its place."""
        tenant = next((tenant for tenant, line in self._lines.items() if fits(line[0])), None)
        if tenant is None:
            return None
        line = self._lines[tenant]
        item = line.popleft()
        if line:
            self._lines.move_to_end(tenant)
        else:
            del self._lines[tenant]
        return item


@dataclass(frozen=True, eq=False)
class _ThreadCall:
    run: Callable[[], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class TenantThreads:
    """A pool of threads for one event loop; one of them only runs the service's own calls."""

    def __init__(self, threads: int, name: str, spent: Callable[[str, float], None] = lambda tenant, seconds: None):
        """``spent(tenant, seconds)`` is called with the processor time of each call, and that of processes that it
        waited for."""
        self._pool = ThreadPoolExecutor(threads, name)
        self._threads = threads
        self.spent = spent
        self._waiting: dict[str, deque[_ThreadCall]] = {}
        """By tenant, the next one first."""
        self._running: dict[str, int] = {}

    async def __call__(self, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        """The result of a blocking call, in the context of the caller. Where that is cancelled, a call that has begun
        runs to its end."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        run = partial(copy_context().run, call, *arguments, **named)
        self._waiting.setdefault(TENANT.get(), deque()).append(_ThreadCall(run, future, loop))
        self._start()
        return await future

    def close(self) -> None:
        self._pool.shutdown()

    def _start(self) -> None:
        """Start the calls whose turn it is."""
        for tenant in sorted(self._waiting, key=bool):  # the service's own calls first; the order is kept otherwise
            while tenant in self._waiting and self._may_start(tenant):
                queue = self._waiting.pop(tenant)
                call = queue.popleft()
                if queue:
                    self._waiting[tenant] = queue  # now the last
                if not call.future.done():
                    self._running[tenant] = self._running.get(tenant, 0) + 1
                    self._pool.submit(self._run, tenant, call)

    def _may_start(self, tenant: str) -> bool:
        running = sum(self._running.values())
        if not tenant:
            return running < self._threads
        return tenant not in self._running and running < max(1, self._threads - 1)

    def _run(self, tenant: str, call: _ThreadCall) -> None:
        result, error, seconds = None, None, list[float]()
        try:
            result = measured(call.run, seconds.append)
        except BaseException as raised:  # the caller handles it, not this thread
            error = raised
        with suppress(RuntimeError):  # the loop is closed: nobody waits for it
            call.loop.call_soon_threadsafe(self._end, tenant, call, result, error, sum(seconds))

    def _end(self, tenant: str, call: _ThreadCall, result: Any, error: BaseException | None, seconds: float) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]
        self.spent(tenant, seconds)
        if not call.future.done():  # else the caller was cancelled
            if error is not None:
                call.future.set_exception(error)
            else:
                call.future.set_result(result)
        self._start()


class TenantSlots:
    """Slots for tasks of one event loop, for which tenants take turns."""

    def __init__(self, slots: int) -> None:
        self._free = slots
        self._waiting = TenantLines[asyncio.Future[None]]()

    @asynccontextmanager
    async def slot(self, tenant: str) -> AsyncIterator[None]:
        """A slot within, for work of the tenant."""
        if self._free:
            self._free -= 1
        else:
            given = asyncio.get_running_loop().create_future()
            self._waiting.add(tenant, given)
            try:
                await given
            except asyncio.CancelledError:
                if given.done() and not given.cancelled():  # in the moment in which it was given
                    self._leave()
                raise
        try:
            yield
        finally:
            self._leave()

    def _leave(self) -> None:
        while (given := self._waiting.take()) is not None:
            if not given.done():  # else its task was cancelled
                given.set_result(None)
                return
        self._free += 1


def measured(call: Callable[[], T], spent: Callable[[float], object]) -> T:
    """The result of a blocking call; ``spent(seconds)`` is called with the processor time that it took in this thread,
    and that of processes that it waited for."""
    began = time.thread_time()
    take_child_seconds()
    try:
        return call()
    finally:
        spent(time.thread_time() - began + take_child_seconds())


async def in_thread(call: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """The result of a blocking call, in a thread that everybody shares."""
    return await asyncio.to_thread(call, *arguments, **named)


SPENT: ContextVar[Callable[[float], None] | None] = ContextVar("spent", default=None)
"""Charges the tenant of the current request for processor time; None outside of requests."""


async def charged(work: Awaitable[T]) -> T:
    """The result of ``work``, for a separate task: the tenant of the request that starts the task is charged."""

    async def run() -> T:
        return await work

    return await run() if (spent := SPENT.get()) is None else await metered(run(), spent)


class _Metered(threading.local):
    seconds = 0.0


_metered = _Metered()


def metered_seconds() -> float:
    """The processor time that :func:`metered` has measured in this thread."""
    return _metered.seconds


@types.coroutine
def metered(coroutine: Coroutine[Any, Any, T], spent: Callable[[float], None]) -> Generator[Any, Any, T]:
    """Runs ``coroutine``; ``spent(seconds)`` is called with the processor time of each stretch between two waits."""
    value: Any = None
    error: BaseException | None = None
    while True:
        began = time.thread_time()
        try:
            waits_for = coroutine.send(value) if error is None else coroutine.throw(error)
        except StopIteration as end:
            return end.value
        finally:
            seconds = time.thread_time() - began
            _metered.seconds += seconds
            spent(seconds)
        value = error = None
        try:
            value = yield waits_for
        except BaseException as raised:  # a cancellation, which the coroutine handles
            error = raised


@contextmanager
def loop_time_of(tenant: str, before: float = 0.0) -> Iterator[None]:
    """The time that a part of the service's work takes of the event loop within is the tenant's, and the seconds
    ``before`` it that this work took already."""
    charge = getattr(asyncio.get_running_loop(), "charge", None)
    if charge is None or not tenant:
        yield
        return
    began = time.thread_time()
    try:
        yield
    finally:
        charge(tenant, time.thread_time() - began + before)
