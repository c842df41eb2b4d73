"""Runs users' methods so that none delays another or the connection.

Plain methods run in daemon threads, a bounded number per job; a stuck one does not keep the process alive. ``async``
methods run on a separate event loop, where a blocking one delays other ``async`` methods and nothing else.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

THREADS_PER_JOB = 64
"""Plain methods of one job that run at the same time; more queue. A method that never returns keeps its thread, so this
also bounds the threads of a broken environment."""

JOIN_SECONDS = 1.0
"""Time that closing waits for the event loop; a loop blocked by user code is abandoned."""


class UserCodeExecutor:
    def __init__(self, threads_per_job: int = THREADS_PER_JOB) -> None:
        self._limit = threads_per_job
        self._threads: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: threading.Thread | None = None

    def thread_limit(self, job: str) -> asyncio.Semaphore:
        """The semaphore that limits the threads of ``job``; it lives as long as it is referenced."""
        semaphore = self._threads.get(job)
        if semaphore is None:
            semaphore = self._threads[job] = asyncio.Semaphore(self._limit)
        return semaphore

    async def __call__(self, threads: asyncio.Semaphore, method: Callable[..., Any], *arguments: Any) -> Any:
        """The method's result, or its exception. Cancelling ends an ``async`` method; a plain one runs to its end, so
        callers that must not overlap it do not cancel (see :func:`cancellable`)."""
        if cancellable(method):
            return await self._on_loop(method(*arguments))
        async with threads:
            result = await _in_thread(method, *arguments)
        return await self._on_loop(result) if inspect.isawaitable(result) else result

    async def _on_loop(self, awaitable: Awaitable[Any]) -> Any:
        async def wait() -> Any:
            try:
                return await awaitable
            except (SystemExit, KeyboardInterrupt) as error:  # these would end the loop for all methods
                raise _carried(error) from error

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._runner = threading.Thread(target=self._loop.run_forever, daemon=True, name="environments")
            self._runner.start()
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(wait(), self._loop))

    def close(self) -> None:
        if self._loop is None or self._runner is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._runner.join(JOIN_SECONDS)
        if not self._runner.is_alive():
            self._loop.close()


def cancellable(method: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(method)


async def _in_thread(method: Callable[..., Any], *arguments: Any) -> Any:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():  # cancelled meanwhile
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(_carried(error))

    def work() -> None:
        result, error = None, None
        try:
            result = method(*arguments)
        except BaseException as raised:  # re-raised in the caller
            error = raised
        with suppress(RuntimeError):  # the loop closed while the method ran
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True, name="environment").start()
    return await future


def _carried(error: BaseException) -> Exception:
    """``error`` as an exception that a future can carry: a user's ``exit()`` ends its call and not the process."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
