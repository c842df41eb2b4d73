"""Virtual time: a loop that never waits, and the controller's clock and storage writer on it.

* When nothing is ready, :class:`VirtualLoop`'s clock jumps to the next timer; what runs in other threads elsewhere runs
  inline here. So an hour passes in seconds, the same in every run, however busy the machine is.
* :class:`VirtualClock` and :class:`InlineWriter` are what a controller is given in place of the system's clock and the
  writer's thread.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

EPOCH = 1_000_000.0
"""The wall clock at virtual time 0, Unix seconds: the same in every run."""


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: everybody waits for somebody else."""


class _VirtualSelector(selectors.SelectSelector):
    """Where the loop would sleep, its time jumps instead."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        # Nothing here waits for a file; only the loop's own wake-up pipe is registered, and only signals write to it.
        ready = super().select(0) if timeout is None or timeout > 0 else []
        if not ready and timeout is None:
            raise Deadlock("nothing is ready and no timer is set: everybody waits for somebody else")
        if not ready:
            self.now += timeout or 0.0
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._hourglass = _VirtualSelector()
        super().__init__(self._hourglass)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._hourglass.now

    def run_in_executor(self, executor: Any, call: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future = self.create_future()
        try:
            future.set_result(call(*arguments))
        except Exception as error:  # the caller's, as from a thread
            future.set_exception(error)
        return future


def run(main: Coroutine[Any, Any, T]) -> T:
    """The result of ``main`` in virtual time from 0 on. Raises :class:`Deadlock` when nobody in it can continue."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class VirtualClock:
    """The clock of the running :class:`VirtualLoop`, as :class:`rookery.clock.Clock` asks for it."""

    def time(self) -> float:
        return EPOCH + self.monotonic()

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class InlineWriter:
    """Every call is carried out where it is made, and takes no time."""

    async def __call__(self, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        return call(*arguments, **named)

    def close(self) -> None:
        """There is nothing to wait for."""
