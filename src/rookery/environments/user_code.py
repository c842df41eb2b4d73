"""Runs users' methods so that none can hold up another, or the connection.

Plain methods run in daemon threads (a stuck one never keeps the process alive), a bounded number per job; ``async``
ones on an event loop of their own, so one that blocks by mistake delays other ``async`` ones and nothing else.
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
"""Plain methods of one job that run at the same time. They mostly wait; beyond it they queue. A method that never
returns holds its thread for good, so this also bounds what a broken environment can take."""

JOIN_SECONDS = 1.0
"""How long closing waits for the loop of the ``async`` methods; one blocked by user code is left behind."""


class UserCodeExecutor:
    def __init__(self, threads_per_job: int = THREADS_PER_JOB) -> None:
        self._limit = threads_per_job
        self._threads: weakref.WeakValueDictionary[str, asyncio.Semaphore] = weakref.WeakValueDictionary()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runner: threading.Thread | None = None

    def threads(self, job: str) -> asyncio.Semaphore:
        """What limits the threads of ``job``; kept as long as somebody holds it."""
        semaphore = self._threads.get(job)
        if semaphore is None:
            semaphore = self._threads[job] = asyncio.Semaphore(self._limit)
        return semaphore

    async def __call__(self, threads: asyncio.Semaphore, method: Callable[..., Any], *arguments: Any) -> Any:
        """The method's result, or what it raises. Cancelling ends an ``async`` method; a plain one runs on, unheard,
        so callers that must not overlap it do not cancel (see :func:`cancellable`)."""
        if cancellable(method):
            return await self._on_loop(method(*arguments))
        async with threads:
            result = await _in_thread(method, *arguments)
        return await self._on_loop(result) if inspect.isawaitable(result) else result

    async def _on_loop(self, awaitable: Awaitable[Any]) -> Any:
        async def wait() -> Any:
            try:
                return await awaitable
            except (SystemExit, KeyboardInterrupt) as error:  # these would end the loop, and all else that runs on it
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
        if future.done():  # cancelled meanwhile: nobody listens
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(_carried(error))

    def work() -> None:
        result, error = None, None
        try:
            result = method(*arguments)
        except BaseException as raised:  # whatever it is, it belongs to the caller, not to this thread
            error = raised
        with suppress(RuntimeError):  # the loop closed while the method ran
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True, name="environment").start()
    return await future


def _carried(error: BaseException) -> Exception:
    """``error`` as a future can carry it and a caller catch it: a user's ``exit()`` ends its own call, no process."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")
