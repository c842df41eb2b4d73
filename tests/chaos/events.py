"""The events in order: hashed whole, the last ones kept to be printed, and the first violation."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, deque

KEPT = 20_000
"""Events kept for the report of a violation: some seconds of the largest runs."""

SHOWN = 40
"""Of those about the thing itself, and of those about everything, how many are printed."""


class Violation(AssertionError):
    """Something that must hold did not. ``invariant`` is its short name, ``events`` how many had happened."""

    def __init__(self, invariant: str, text: str, events: int, told: list[str]) -> None:
        super().__init__("\n".join([f"{invariant}: {text}", *told]))
        self.invariant = invariant
        self.text = text
        self.events = events


class Events:
    """One run's log. ``seed`` is named where something fails."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.counts: Counter[str] = Counter()
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with the first :class:`Violation`."""
        self._loop = asyncio.get_running_loop()
        self._hash = hashlib.blake2b(digest_size=16)
        self._kept: deque[str] = deque(maxlen=KEPT)

    def note(self, kind: str, *about: object) -> None:
        """One event; ``about`` are names and numbers that are the same in every run of the seed."""
        self.counts[kind] += 1
        line = f"{self._loop.time():.6f} {kind} {' '.join(map(str, about))}"
        self._hash.update(line.encode())
        self._kept.append(line)

    def fail(self, invariant: str, text: str, *about: str) -> None:
        """The run is over: ``invariant`` does not hold. ``about`` names what the violation is about, so that its own
        events can be told from the others."""
        self.note("violation", invariant, text)
        if self.broken.done():
            return
        own = [line for line in self._kept if any(name in line for name in about)][-SHOWN:]
        shown = [f"seed {self.seed}; events of {' '.join(about)}:", *own] if about else [f"seed {self.seed}"]
        last = list(self._kept)[-SHOWN:]
        self.broken.set_exception(Violation(invariant, text, self.total, [*shown, "last events:", *last]))

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def digest(self) -> str:
        """Of every event so far."""
        return self._hash.hexdigest()
