"""The asynchronous database, the writer thread that runs its calls one after another, and the threads of artifacts.

* ``database.write(jobs.add_groups, job, groups)`` blocks; ``await store.write(jobs.add_groups, job, groups)`` runs the
  same in the writer. A submitted call runs even if its caller is cancelled.
* The calls of one tenant (:data:`~rookery.turns.TENANT`) keep their order, and the tenants take turns. The service's
  own calls are one more line: whatever must follow a tenant's calls, such as a deletion of what they write, is
  submitted as that tenant's work (:func:`~rookery.turns.work_of`).
* Database calls that wait in the writer at the same time share one transaction; each returns once it is durable.
* Artifacts may lie behind a network, and have gigabytes: each tenant's wait in a separate line for one of several
  threads, so that a part that hangs, or a large upload, holds up its tenant's alone.
* A request waits :data:`READ_SECONDS` for a read, and then reports that the database does not answer: a server may
  stand still, with connections that the system keeps alive.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, runtime_checkable

from sqlalchemy import Connection

from rookery.errors import DatabaseAway, StorageFull
from rookery.storage.columns import LONGEST_PAGE, Page
from rookery.storage.db import Database
from rookery.turns import SPENT, TENANT, TenantLines

P = ParamSpec("P")
T = TypeVar("T")


READ_SECONDS = 8.0
"""How long a request waits for a read of the database: less than the ten seconds that clients wait for the response,
and more than a read waits for a lock, whose error has the cause."""


def read_within(seconds: float = READ_SECONDS) -> AbstractAsyncContextManager[None]:
    """Raises :class:`DatabaseAway` where the reads within take longer than so many ``seconds`` together."""
    return _answered(asyncio.timeout(seconds), seconds)


@asynccontextmanager
async def _answered(limit: asyncio.Timeout, seconds: float) -> AsyncIterator[None]:
    """Raises :class:`DatabaseAway`, which names ``seconds``, where the ``limit`` expires within."""
    try:
        async with limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise DatabaseAway(f"the database does not answer within {seconds:g} s") from None


async def every(
    fetch: Callable[[Page], Coroutine[Any, Any, list[T]]], cursor: Callable[[T], tuple[str | float, ...]]
) -> AsyncIterator[T]:
    """All rows of a list, read page by page; ``cursor(row)`` has the values of the list's order."""
    async for found in pages(fetch, cursor):
        for row in found:
            yield row


async def pages(
    fetch: Callable[[Page], Coroutine[Any, Any, list[T]]], cursor: Callable[[T], tuple[str | float, ...]]
) -> AsyncIterator[list[T]]:
    """All rows of a list by the page, as :func:`every` reads them."""
    page = Page(LONGEST_PAGE)
    while found := await fetch(page):
        yield found
        page = Page(LONGEST_PAGE, cursor(found[-1]))


class Writer(Protocol):
    """Runs blocking calls off the event loop; a submitted call runs even if its caller is cancelled."""

    def __call__(self, call: Callable[..., T], *arguments: Any, **named: Any) -> Coroutine[Any, Any, T]: ...


GROUPED_CALLS, GROUPED_SECONDS = 64, 0.02
"""Largest number of database calls in one transaction, and the time after which no further one joins it: they bound how
long the first of them waits for the last, and how long another tenant's call waits for a transaction of slow ones."""


@runtime_checkable
class BatchTransaction(Protocol):
    def batch_transaction(self) -> AbstractContextManager[None]:
        """Within the context, this thread's calls of the object's methods become durable together, at the end."""
        ...


@dataclass(frozen=True, eq=False)
class _Call:
    tenant: str
    run: Callable[[], Any]
    store: BatchTransaction | None
    """The database whose method it is; None for calls that cannot share a transaction."""
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]

    def attempt(self) -> tuple[Any, BaseException | None]:
        """The result or the error."""
        try:
            return self.run(), None
        except BaseException as error:  # the caller handles it, not this thread
            return None, error

    def report(self, result: Any, error: BaseException | None) -> None:
        """Let the caller have the outcome, in its event loop."""
        with suppress(RuntimeError):  # its loop is closed: nobody waits for it
            self.loop.call_soon_threadsafe(self._settle, result, error)

    def _settle(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():  # the caller was cancelled
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class StorageWriter:
    """One thread. Each transaction is filled from the tenants' lines, one call of each in turn. If the disk has no room
    for all calls of a shared transaction, each call gets a separate one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
        self._closed = False
        self._thread.start()

    async def __call__(self, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        if self._closed:
            raise RuntimeError("the storage writer is closed")
        loop = asyncio.get_running_loop()
        owner = getattr(call, "__self__", None)
        store = owner if isinstance(owner, BatchTransaction) else None
        future: asyncio.Future[T] = loop.create_future()
        self._queue.put(_Call(TENANT.get(), partial(call, *arguments, **named), store, loop, future))
        return await future

    def close(self) -> None:
        """Return when every submitted call has run."""
        self._closed = True
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        waiting, closing = TenantLines[_Call](), False
        while waiting or not closing:
            with suppress(Empty):
                block = not waiting
                while not closing:
                    submitted = self._queue.get(block)
                    block, closing = False, submitted is None
                    if submitted is not None:
                        waiting.add(submitted.tenant, submitted)
            if (first := waiting.take()) is not None:
                self._transact(first, waiting)

    def _transact(self, first: _Call, waiting: TenantLines[_Call]) -> None:
        """Run the call, whose turn it is, with those that may share its transaction; settle them all."""

        def another() -> _Call | None:
            return None if store is None else waiting.take(lambda call: call.store is store)

        store = first.store
        second = another()
        if store is None or second is None:
            first.report(*first.attempt())
            return
        calls, outcomes = [first, second], list[tuple[Any, BaseException | None]]()
        try:
            with store.batch_transaction():
                until = self._clock() + GROUPED_SECONDS
                outcomes = [call.attempt() for call in calls]
                while len(calls) < GROUPED_CALLS and self._clock() < until and (call := another()) is not None:
                    calls.append(call)
                    outcomes.append(call.attempt())
        except StorageFull:  # nothing is durable: calls that need no room may still succeed
            outcomes = [call.attempt() for call in calls]
        except Exception as error:  # nothing is known to be durable
            outcomes = [(None, error) for _ in calls]
        for call, outcome in zip(calls, outcomes, strict=True):
            call.report(*outcome)


class TransferThreads:
    """Threads for blocking calls about artifacts. Each tenant's run one after another, and so do the service's own, for
    which one thread is reserved; the tenants take turns."""

    def __init__(self, threads: int) -> None:
        """At least two ``threads``."""
        self._most = threads - 1
        """Of tenants at once."""
        self._lines = TenantLines[_Call]()
        self._busy: set[str] = set()
        """The tenants whose calls run."""
        self._closed = False
        self._changed = threading.Condition()
        """Guards the above."""
        names = [f"transfers {number}" for number in range(threads)]
        self._threads = [threading.Thread(target=self._work, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    async def __call__(self, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        tenant = TENANT.get()
        with self._changed:
            if self._closed:
                raise RuntimeError("the threads of transfers are closed")
            self._lines.add(tenant, _Call(tenant, partial(call, *arguments, **named), None, loop, future))
            self._changed.notify()
        return await future

    def close(self) -> None:
        """Return when every submitted call has run."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _may_run(self, call: _Call) -> bool:
        return call.tenant not in self._busy and (not call.tenant or len(self._busy - {""}) < self._most)

    def _work(self) -> None:
        while True:
            with self._changed:
                while (call := self._lines.take(self._may_run)) is None:
                    if self._closed and not self._lines:
                        return
                    self._changed.wait()
                self._busy.add(call.tenant)
            outcome = call.attempt()
            with self._changed:
                self._busy.discard(call.tenant)
                self._changed.notify_all()
            call.report(*outcome)


class Store:
    """``database`` behind ``writer``."""

    def __init__(
        self,
        database: Database,
        writer: Writer,
        transfers: Writer | None = None,
        readers: Writer | None = None,
        read_seconds: float = READ_SECONDS,
    ) -> None:
        """``transfers`` runs calls that read or write whole artifacts, those of a tenant in order, for which no
        transaction waits; else the writer does. ``readers`` runs calls that only read: they see what is durable and
        wait for nobody's changes; else the writer does. A request waits ``read_seconds`` for one of them."""
        self.database = database
        self._read_seconds = read_seconds
        self._last_read = -math.inf
        """When a read of a request ended last (seconds of the loop)."""
        self._writer = writer
        self._readers: Writer = readers or writer
        self.transfer: Writer = transfers or writer
        """Runs calls that read or write whole artifacts, those of one tenant one after another. An artifact is durable
        when such a call returns; a row that names it is written after that."""

    def run(self, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> Coroutine[Any, Any, T]:
        """Run any blocking call in the writer, such as one of the artifact store or several of :attr:`database`."""
        return self._writer(call, *arguments, **named)

    def write(
        self, function: Callable[Concatenate[Connection, P], T], *arguments: P.args, **named: P.kwargs
    ) -> Coroutine[Any, Any, T]:
        """Run a function of :mod:`rookery.storage.repositories` in a transaction that may change rows."""
        return self._writer(self.database.write, function, *arguments, **named)

    def read(
        self, function: Callable[Concatenate[Connection, P], T], *arguments: P.args, **named: P.kwargs
    ) -> Coroutine[Any, Any, T]:
        """Run a function of :mod:`rookery.storage.repositories` that only reads. It sees what is durable. In a request
        it raises :class:`DatabaseAway` where the database takes longer than a client waits for."""
        call = partial(self.database.read, function, *arguments, **named)
        return self._readers(call) if SPENT.get() is None else self._read_in_time(call)

    async def _read_in_time(self, call: Callable[[], T]) -> T:
        """The time in which reads of others end before this one begins does not count: it is theirs."""
        loop, limit = asyncio.get_running_loop(), asyncio.timeout(None)
        submitted, begun = loop.time(), list[float]()
        timer = loop.call_later(self._read_seconds, lambda: look())

        def run() -> T:
            begun.append(loop.time())
            try:
                return call()
            finally:
                self._last_read = loop.time()

        def look() -> None:
            nonlocal timer
            left = (begun[0] if begun else max(submitted, self._last_read)) + self._read_seconds - loop.time()
            if left <= 0:
                limit.reschedule(loop.time())
            else:
                timer = loop.call_later(left, look)

        async with _answered(limit, self._read_seconds):
            try:
                return await self._readers(run)
            finally:
                timer.cancel()
