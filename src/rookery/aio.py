"""Time, identity and waiting: the small asynchronous tools that every room uses.

* :class:`Clock` and :class:`IdGenerator` are passed in, so that a simulation can run the shipped code on virtual time
  and with seeded ids. :class:`SystemClock` and :class:`RandomIds` are the ones that a service uses.
* :func:`wait_event` waits for an event with a timeout and never loses a cancellation that arrives in the same moment as
  the event or the timeout. ``asyncio.wait_for`` loses it before Python 3.12.
* :func:`die_with_parent` ends a child process with its parent, also after ``kill -9``: the kernel closes the pipe
  between them.
* :class:`Signal` wakes any number of waiters. :class:`TaskGroup` cancels its tasks in the order in which they started;
  :class:`BackgroundTasks` holds tasks that nobody awaits.
* :func:`cancel_all` ends tasks; :func:`first_of` and :func:`unless` run several until one of them ends.
* :class:`LoopThread` runs a service or an environment in a thread of another program.
* :func:`restarting` keeps a background task running.
* :class:`LineSplitter` cuts a streamed response into lines.
* :func:`interpreter` is the command of every child process in Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar

log = logging.getLogger("rookery.aio")

T = TypeVar("T")


class Clock(Protocol):
    """A source of time and delays."""

    def time(self) -> float:
        """Wall clock, Unix seconds."""
        ...

    def monotonic(self) -> float:
        """Seconds since an arbitrary moment; never goes backwards."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds``."""
        ...


class IdGenerator(Protocol):
    """A source of identifiers."""

    def new(self, kind: str) -> str:
        """A new identifier that begins with ``kind``; never returned twice."""
        ...


async def restarting(work: Callable[[], Coroutine[Any, Any, None]], clock: Clock, pause: float = 1.0) -> None:
    """``work()``, which runs until it is cancelled; again after an error, such as that no memory was left."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("%s failed and starts again", getattr(work, "__qualname__", work))
        await clock.sleep(pause)


class SystemClock:
    """The clock of this machine."""

    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class RandomIds:
    """Ids with 96 random bits. With a seeded ``source`` the same run produces the same ids."""

    def __init__(self, source: random.Random | None = None) -> None:
        self._source = source

    def new(self, kind: str) -> str:
        bits = uuid.uuid4().int >> 32 if self._source is None else self._source.getrandbits(96)
        return f"{kind}-{bits:024x}"


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


class BusyTime:
    """Pieces of work under way, and the seconds with at least one."""

    def __init__(self, clock: Clock) -> None:
        self.count = 0
        self._clock = clock
        self._since = self._before = 0.0

    def add(self, change: int) -> None:
        """More or fewer pieces."""
        if not self.count:
            self._since = self._clock.monotonic()
        self.count += change
        if not self.count:
            self._before += self._clock.monotonic() - self._since

    @property
    def seconds(self) -> float:
        return self._before + (self._clock.monotonic() - self._since if self.count else 0.0)


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
    :meth:`stop`. As a ``daemon`` it does not delay the end of the process."""

    def __init__(self, name: str, work: Callable[[asyncio.Event], Coroutine[Any, Any, None]], *, daemon: bool) -> None:
        self._loop = asyncio.new_event_loop()
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

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._work(self._stopping))


def interpreter(module: str, *arguments: str) -> list[str]:
    """The command that runs ``module`` in a child process with this interpreter. It does not import from the working
    directory (``-P``): a ``random.py`` in a user's folder must neither replace the library's module nor run."""
    return [sys.executable, "-P", "-m", module, *arguments]


def die_with_parent(end: Callable[[], None]) -> None:
    """Calls ``end`` in a thread when standard input ends: the parent process holds its other end."""

    def watch() -> None:
        with contextlib.suppress(OSError):  # closed from the start: there is no parent
            while os.read(0, 4096):
                pass
        end()

    threading.Thread(target=watch, name="parent", daemon=True).start()


class LineSplitter:
    """The complete lines of a stream without their ends. Only a newline ends a line: ``str.splitlines``, which httpx
    uses, would also split at characters that may be part of a JSON string."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The lines that end in the next ``chunk``."""
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            yield b"".join([*self._parts, end])
            self._parts.clear()
        self._parts.append(rest)
