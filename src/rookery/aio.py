"""Waiting: the small asynchronous tools that every room uses.

* :func:`wait_event` waits for an event with a timeout and never loses a cancellation that arrives in the same moment as
  the event or the timeout. ``asyncio.wait_for`` loses it before Python 3.12.
* :class:`Signal` wakes any number of waiters. :class:`TaskGroup` cancels its tasks in the order in which they started;
  :class:`BackgroundTasks` holds tasks that nobody awaits.
* :func:`cancel_all` ends tasks; :func:`first_of` and :func:`unless` run several until one of them ends.
* :class:`Portions` and :func:`in_portions` divide long work on the event loop.
* :class:`LoopThread` runs a service or an environment in a thread of another program.
* :func:`restarting` keeps a background task running; :func:`on_end_signals` ends a program in order;
  :func:`prefer_event_loop` lets one answer while its threads compute.
* :func:`in_new_thread` runs a blocking call that must not wait for the threads of others.
* :func:`close_within` closes what threads may hold, and :func:`run_to_end` a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from rookery.clock import Clock

log = logging.getLogger("rookery.aio")

T = TypeVar("T")

PORTION_SECONDS = 0.005
"""Seconds of the event loop after which a long computation lets other tasks run."""


SWITCH_SECONDS = 0.0005
"""A thread that computes gives way to the event loop after it. With Python's 5 ms a request, which comes back to the
loop a dozen times, would take 60 ms while one such thread computes."""

COLLECTIONS = (2000, 10, 50)
"""Thresholds of the garbage collector. A full collection looks at all objects that were made since the start: 60 ms
with 600 open requests. With these it comes after a million objects that stay, not after 70,000."""

RESTART_SECONDS = 1.0
"""Pause of a background task after an error."""

END_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
"""Signals that ask a program to end: Ctrl-C, an init system, a terminal that closes."""

TWICE_SECONDS = 1.0
"""A signal that comes again within this time is the same one: programs that start others pass Ctrl-C on to them."""

CLOSE_SECONDS = 10.0
"""Longest wait at a stop for threads that may hang in a request to a store or a sink."""

END_SECONDS = 5.0
"""Longest wait of a process that has stopped for its threads."""

INTERRUPTED = 130
"""Exit code of a process that ends by SIGINT: that of a shell."""


def prefer_event_loop() -> None:
    """Make this process answer quickly while its threads compute: they give way soon, and the garbage collector leaves
    out the modules and tables that are there now, 400,000 objects, which would take it 130 ms each time."""
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.set_threshold(*COLLECTIONS)
    gc.collect()
    gc.freeze()


async def restarting(work: Callable[[], Coroutine[Any, Any, None]], clock: Clock) -> None:
    """``work()``, which runs until it is cancelled; again after an error, such as that no memory was left."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("%s failed and starts again", getattr(work, "__qualname__", work))
        await clock.sleep(RESTART_SECONDS)


def end_signals() -> list[signal.Signals]:
    """The signals that ask a process to end. SIGHUP, which a closed terminal sends, is none of them where it is
    ignored, as by ``nohup``; Windows has none."""
    given = [getattr(signal, name) for name in END_SIGNALS if hasattr(signal, name)]
    return [one for one in given if one.name != "SIGHUP" or signal.getsignal(one) is not signal.SIG_IGN]


def on_end_signals(call: Callable[[], object], *, twice: bool = False) -> None:
    """Have ``call()`` run in this event loop when the process is asked to end. With ``twice`` a second signal ends the
    process at once, also while the loop stands still."""
    loop, first, numbers = asyncio.get_running_loop(), time.monotonic(), end_signals()

    def end(number: int, frame: object) -> None:
        if time.monotonic() - first > TWICE_SECONDS:
            os._exit(128 + number)

    def begin() -> None:
        nonlocal first
        first = time.monotonic()
        for number in numbers if twice else ():
            loop.remove_signal_handler(number)
            signal.signal(number, end)
        call()

    with contextlib.suppress(NotImplementedError):  # Windows lacks it; Ctrl-C cancels there
        for number in numbers:
            loop.add_signal_handler(number, begin)


async def in_new_thread(call: Callable[..., T], *arguments: Any) -> T:
    """The result of a blocking call in a thread that it alone has: those of a pool, asyncio's too, may all be held by
    calls that hang, as on a disk that is away. Where the caller is cancelled, the call runs to its end, for which the
    end of the process does not wait."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():  # the caller was cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = call(*arguments)
        except BaseException as raised:  # the caller handles it, not this thread
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            loop.call_soon_threadsafe(settle, result, error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(run,), name=getattr(call, "__name__", "call"), daemon=True).start()
    return await future


async def close_within(
    close: Callable[[], object], name: str, seconds: float = CLOSE_SECONDS, **concerns: object
) -> None:
    """Call ``close()``, which waits for threads. After ``seconds`` they are left to themselves; that, or an error, is
    logged with the fields of the log that it ``concerns`` (tenant, job)."""
    try:
        async with asyncio.timeout(seconds) as limit:
            await in_new_thread(close)
    except Exception:
        if limit.expired():
            log.warning("%s: a call has not ended after %.0f s, and is left behind", name, seconds, extra=concerns)
        else:
            log.exception("%s: not closed", name, extra=concerns)


def run_to_end(
    work: Coroutine[Any, Any, None],
    codes: Callable[[Exception], tuple[int, str]],
    loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
) -> None:
    """Run the main part of a process. Calls in threads that asyncio waits for have :data:`END_SECONDS` to end
    afterwards. If one of them does not, the process ends without it, with the code and the line that ``codes`` gives
    for the error, or as Python would end it for SystemExit and KeyboardInterrupt; 0 without one. ``loop`` makes the
    event loop."""
    code, line = 0, ""

    def end() -> None:
        if line:
            with contextlib.suppress(OSError):  # a full disk, or a terminal that is gone, must not keep the process
                print(line, file=sys.stderr)
        logging.shutdown()
        os._exit(code)

    runner, timer = asyncio.Runner(loop_factory=loop), threading.Timer(END_SECONDS, end)
    timer.daemon = True
    try:
        runner.run(work)
    except SystemExit as error:
        code, line = (error.code or 0, "") if isinstance(error.code, int | None) else (1, str(error.code))
        raise
    except Exception as error:
        code, line = codes(error)
        raise
    except BaseException as error:
        code = INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1
        raise
    finally:
        timer.start()
        runner.close()
        timer.cancel()


async def wait_event(event: asyncio.Event, seconds: float) -> bool:
    """Whether ``event`` is set within ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True


async def cancel_all(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks; returns when they have ended, however they end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def first_of(*work: Awaitable[Any]) -> AsyncIterator[list[asyncio.Future[Any]]]:
    """Run all of ``work`` at the same time; within, one of them has ended. At the end the others are cancelled."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        yield tasks
    finally:
        await cancel_all(*tasks)


async def unless(end: Awaitable[object], work: Awaitable[T]) -> T | None:
    """The result of ``work``; None, and it is cancelled, if ``end`` comes before."""
    async with first_of(work, end) as (working, _):
        return working.result() if working.done() else None


class Signal:
    """A broadcast wake-up. Take :attr:`next` before you read the state that may change, read it, then wait on the event
    that you took: no notification is lost."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """Set by the first :meth:`notify` after it was taken."""
        return self._event

    def notify(self) -> None:
        """Wake everybody who waits."""
        self._event.set()
        self._event = asyncio.Event()


class Portions:
    """A long computation on the event loop, in portions: its length decides nothing about the others' wait."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    async def pause(self) -> None:
        """Other tasks run, if the last pause was :data:`PORTION_SECONDS` ago. Call it between two steps."""
        if time.monotonic() - self._began > PORTION_SECONDS:
            await asyncio.sleep(0)
            self._began = time.monotonic()


async def in_portions(items: Iterable[T], size: int = 16) -> AsyncIterator[T]:
    """The items, such as tasks that are to be started; other tasks run after each ``size`` of them."""
    for number, item in enumerate(items, 1):
        yield item
        if number % size == 0:
            await asyncio.sleep(0)


class _OrderedTasks(dict[asyncio.Future[Any], None]):
    """The part of a set's interface that a task group uses, in insertion order."""

    def add(self, task: asyncio.Future[Any]) -> None:
        self[task] = None

    def discard(self, task: asyncio.Future[Any]) -> None:
        self.pop(task, None)


class TaskGroup(asyncio.TaskGroup):
    """A task group that cancels its tasks in the order in which they started. ``asyncio.TaskGroup`` cancels them in the
    order of a set, that is of memory addresses: two runs of one simulation would send frames in different orders."""

    def __init__(self) -> None:
        super().__init__()
        self._tasks = _OrderedTasks()  # type: ignore[assignment]


class BackgroundTasks:
    """Tasks that nobody awaits, kept until they end, in the order in which they started."""

    def __init__(self) -> None:
        self._tasks = _OrderedTasks()

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def wait(self) -> None:
        """Return when the present tasks have ended. Raises the first error of one."""
        await asyncio.gather(*self._tasks)

    async def cancel(self) -> None:
        """Cancel the present tasks and wait for their ends."""
        await cancel_all(*self._tasks)


class LoopThread:
    """A thread with its own event loop, which runs ``work(stopping)`` until that returns; ``stopping`` is set by
    :meth:`stop`. As a ``daemon`` it does not delay the end of the process. ``loop`` makes the event loop."""

    def __init__(
        self,
        name: str,
        work: Callable[[asyncio.Event], Coroutine[Any, Any, None]],
        *,
        daemon: bool,
        loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    ) -> None:
        self._loop = loop()
        self._stopping = asyncio.Event()
        self._work = work
        self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)
        self._thread.start()

    def stop(self, seconds: float | None = None) -> None:
        """Returns when the thread has ended, or after ``seconds``. May be called twice, and from the thread itself."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            with contextlib.suppress(RuntimeError):  # the loop has just closed
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(seconds)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in this loop; it is cancelled where the loop ends first."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._work(self._stopping))
