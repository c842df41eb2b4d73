"""Time and identity. A :class:`Clock` and an :class:`IdGenerator` are passed as arguments, so that a simulation runs
the shipped code on virtual time and with seeded ids. A service uses :class:`SystemClock` and :class:`RandomIds`.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from typing import Protocol


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
