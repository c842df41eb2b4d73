"""The writer: one thread that runs the blocking calls of the database and the artifact store, one after another."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeVar, runtime_checkable

from rookery.errors import StorageFull

T = TypeVar("T")


class Writer(Protocol):
    """Runs blocking calls of the database and the artifact store, one after another, off the event loop. A call that
    was handed over is carried out, also when its caller is cancelled."""

    def __call__(self, call: Callable[..., T], *arguments: Any, **named: Any) -> Coroutine[Any, Any, T]: ...


GROUPED_CALLS = 64
"""Database calls that share one transaction at most: it bounds how long the first of them waits for the last."""


@runtime_checkable
class BatchTransaction(Protocol):
    def batch_transaction(self) -> AbstractContextManager[None]:
        """Within, this thread's calls of the object's methods become durable at once, at the end."""
        ...


@dataclass(eq=False)
class _Call:
    run: Callable[[], Any]
    store: BatchTransaction | None
    """Whose method it is, if such calls can share a transaction."""
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    result: Any = None
    error: BaseException | None = None

    def carry_out(self) -> None:
        try:
            self.result = self.run()
        except BaseException as error:  # it belongs to the caller, not to this thread
            self.error = error

    def settle(self) -> None:
        if self.future.done():  # the caller was cancelled
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)


class StorageWriter:
    """One writer thread: calls keep their order, and a transaction never waits for another of this process. Database
    calls that wait at the same time share one transaction; each is answered when it is durable. Where the disk has no
    room for all of them, each has a transaction of its own."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="writer", daemon=True)
        self._closed = False
        self._thread.start()

    async def __call__(self, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        if self._closed:
            raise RuntimeError("the storage writer is closed")
        loop = asyncio.get_running_loop()
        store = getattr(call, "__self__", None)
        future: asyncio.Future[T] = loop.create_future()
        self._queue.put(
            _Call(
                partial(call, *arguments, **named), store if isinstance(store, BatchTransaction) else None, loop, future
            )
        )
        return await future

    def close(self) -> None:
        """Returns when all that was handed over is carried out."""
        self._closed = True
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        waiting: deque[_Call | None] = deque()
        while True:
            if not waiting:
                waiting.append(self._queue.get())
            with suppress(Empty):
                while True:
                    waiting.append(self._queue.get_nowait())
            first = waiting.popleft()
            if first is None:
                return
            calls = [first]
            while waiting and len(calls) < GROUPED_CALLS and _share(first, waiting[0]):
                calls.append(waiting.popleft())  # type: ignore[arg-type]
            if len(calls) == 1:
                first.carry_out()
            else:
                self._carry_out_together(calls)
            for call in calls:
                with suppress(RuntimeError):  # its loop is closed: nobody listens any more
                    call.loop.call_soon_threadsafe(call.settle)

    @staticmethod
    def _carry_out_together(calls: list[_Call]) -> None:
        store = calls[0].store
        assert store is not None
        try:
            with store.batch_transaction():
                for call in calls:
                    call.carry_out()
        except StorageFull:  # nothing of it is durable: those that need no room shall not suffer from one that does
            for call in calls:
                call.result = call.error = None
                call.carry_out()
        except Exception as error:  # nor of this, as far as is known
            for call in calls:
                call.error = error


def _share(first: _Call, other: _Call | None) -> bool:
    return other is not None and first.store is not None and first.store is other.store
