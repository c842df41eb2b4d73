"""Numbered items that arrive in any order and leave in theirs."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class ReorderBuffer(Generic[T]):
    """Hands out what was put in by number, without gaps, from ``next`` on. Every item leaves once."""

    def __init__(self, next: int) -> None:
        self.next = next
        self._held: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._held)

    def put(self, number: int, item: T) -> None:
        """Raises ``ValueError`` for a number that is held, or has left already."""
        if number < self.next or number in self._held:
            raise ValueError(f"number {number} came before; {self.next} is next")
        self._held[number] = item

    def pop(self) -> T | None:
        """The next item, if it is there."""
        item = self._held.pop(self.next, None)
        if item is not None:
            self.next += 1
        return item

    @property
    def missing(self) -> int | None:
        """The number that all held items wait for; None where nothing waits for one that has not come."""
        return self.next if self._held and self.next not in self._held else None

    @property
    def last(self) -> int:
        """The highest number that came."""
        return max(self._held, default=self.next - 1)

    def flush(self) -> list[T]:
        """Gives up on missing numbers: takes out everything that is held, in order, and goes on behind it."""
        held = [self._held[number] for number in sorted(self._held)]
        self.next = self.last + 1
        self._held.clear()
        return held
