"""What the controller is given from outside, so that a simulator can give it something else."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    def time(self) -> float:
        """Wall clock, Unix seconds."""
        ...

    def monotonic(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class Ids(Protocol):
    def new(self, kind: str) -> str:
        """A new identifier that begins with ``kind``; never given twice."""
        ...


class Ledger(Protocol):
    """Runs blocking calls of the database and the artifact store, one after another, off the event loop. A call that
    was handed over is carried out, also when its caller is cancelled."""

    async def __call__(self, call: Callable[..., T], *arguments: Any, **named: Any) -> T: ...


class SystemClock:
    def time(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class RandomIds:
    """Ids of 96 random bits. Given a seeded ``random``, the same run gives the same ids."""

    def __init__(self, source: random.Random | None = None) -> None:
        self._source = source

    def new(self, kind: str) -> str:
        bits = uuid.uuid4().int >> 32 if self._source is None else self._source.getrandbits(96)
        return f"{kind}-{bits:024x}"


class ThreadLedger:
    """One writer thread: calls keep their order, and a transaction never waits for another of this process."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ledger")

    async def __call__(self, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        running = asyncio.get_running_loop().run_in_executor(self._thread, lambda: call(*arguments, **named))
        return await asyncio.shield(running)

    def close(self) -> None:
        self._thread.shutdown(wait=True)
