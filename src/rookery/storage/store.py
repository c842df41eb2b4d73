"""The asynchronous database, and the writer thread that runs blocking calls one after another.

* ``database.write(jobs.add_groups, job, groups)`` blocks; ``await store.write(jobs.add_groups, job, groups)`` runs the
  same in the writer. A submitted call runs even if its caller is cancelled.
* The calls of one tenant (:data:`~rookery.turns.TENANT`) keep their order, and the tenants take turns. The service's
  own calls are one more line: whatever must follow a tenant's calls, such as a deletion of what they write, is
  submitted as that tenant's work (:func:`~rookery.turns.work_of`).
* Database calls that wait in the writer at the same time share one transaction; each returns once it is durable.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, runtime_checkable

from sqlalchemy import Connection

from rookery.errors import StorageFull
from rookery.storage.columns import LONGEST_PAGE, Page
from rookery.storage.db import Database
from rookery.turns import TENANT, TenantLines

P = ParamSpec("P")
T = TypeVar("T")


async def every(
    fetch: Callable[[Page], Coroutine[Any, Any, list[T]]], cursor: Callable[[T], tuple[str | float, ...]]
) -> AsyncIterator[T]:
    """All rows of a list, read page by page; ``cursor(row)`` has the values of the list's order."""
    page = Page(LONGEST_PAGE)
    while found := await fetch(page):
        for row in found:
            yield row
        page = Page(LONGEST_PAGE, cursor(found[-1]))


class Writer(Protocol):
    """Runs blocking calls off the event loop; a submitted call runs even if its caller is cancelled."""

    def __call__(self, call: Callable[..., T], *arguments: Any, **named: Any) -> Coroutine[Any, Any, T]: ...


GROUPED_CALLS = 64
"""Largest number of database calls in one transaction: it bounds how long the first of them waits for the last."""


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

    def settle(self, result: Any, error: BaseException | None) -> None:
        if self.future.done():  # the caller was cancelled
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class StorageWriter:
    """One thread. Each transaction is filled from the tenants' lines, one call of each in turn. If the disk has no room
    for all calls of a shared transaction, each call gets a separate one."""

    def __init__(self, name: str = "writer") -> None:
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
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
            calls = _next_transaction(waiting)
            for call, outcome in zip(calls, _execute(calls), strict=True):
                with suppress(RuntimeError):  # its loop is closed: nobody waits for it
                    call.loop.call_soon_threadsafe(call.settle, *outcome)


def _next_transaction(waiting: TenantLines[_Call]) -> list[_Call]:
    """The calls that run next: one, or several of one database. The first line of all is served."""
    if (first := waiting.take()) is None:
        return []
    calls = [first]
    while first.store is not None and len(calls) < GROUPED_CALLS:
        if (other := waiting.take(lambda call: call.store is first.store)) is None:
            break
        calls.append(other)
    return calls


def _execute(calls: list[_Call]) -> list[tuple[Any, BaseException | None]]:
    """Run the calls in one transaction; their results and errors."""
    store = calls[0].store if len(calls) > 1 else None
    if store is None:
        return [call.attempt() for call in calls]
    try:
        with store.batch_transaction():
            return [call.attempt() for call in calls]
    except StorageFull:  # nothing is durable: calls that need no room may still succeed
        return [call.attempt() for call in calls]
    except Exception as error:  # nothing is known to be durable
        return [(None, error) for _ in calls]


class Store:
    """``database`` behind ``writer``."""

    def __init__(
        self, database: Database, writer: Writer, transfers: Writer | None = None, readers: Writer | None = None
    ) -> None:
        """``transfers`` runs calls that read or write whole artifacts, for which no transaction waits; else the writer
        does. ``readers`` runs calls that only read: they see what is durable and wait for nobody's changes; else the
        writer does."""
        self.database = database
        self._writer = writer
        self._readers: Writer = readers or writer
        self.transfer: Writer = transfers or writer
        """Runs calls that read or write whole artifacts, one after another. An artifact is durable when such a call
        returns; a row that names it is written after that."""

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
        """Run a function of :mod:`rookery.storage.repositories` that only reads. It sees what is durable."""
        return self._readers(self.database.read, function, *arguments, **named)
