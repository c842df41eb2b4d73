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


CLOCK_JUMP_SECONDS = 60.0
"""The wall clock was set where it and the monotonic one differ by so much: one that is corrected little by little stays
below for days."""

UNKNOWN_JUMP_SECONDS = 3600.0
"""By so much the wall clock may be wrong when a process starts: a machine without a clock that runs while it is off
sets it in its first minutes."""


class SteadyTime:
    """Whether the ages that the wall clock gives stored things are true. Where the clock was set, or the machine slept,
    everything from before looks older than it was for those who could use it. So nothing is deleted for its age until
    the clock has gone as fast as time for as long as it was set ahead, or for that age: whatever is deleted then was
    there for half of that age at least. How often that is asked has no influence, as long as it is asked."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since = (clock.time(), clock.monotonic())
        self._jump = UNKNOWN_JUMP_SECONDS
        """By how much the ages of things from before may be wrong."""

    @property
    def seconds(self) -> float:
        """The time for which this process runs and the wall clock has gone as fast as time."""
        time, monotonic = self._clock.time(), self._clock.monotonic()
        passed = monotonic - self._since[1]
        jump = abs(time - self._since[0] - passed)
        if jump > CLOCK_JUMP_SECONDS:
            self._jump = jump + max(0.0, self._jump - passed)
            self._since, passed = (time, monotonic), 0.0
        return passed

    def may_expire(self, age: float) -> bool:
        """Whether what looks older than ``age`` may be deleted."""
        return self.seconds >= min(age, self._jump)

    def before(self, age: float) -> float:
        """The time before which things are older than ``age``; that of no thing while the clock cannot tell."""
        return self._clock.time() - age if self.may_expire(age) else 0.0


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
