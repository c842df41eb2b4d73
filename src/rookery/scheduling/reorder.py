"""Restore the order of numbered items that arrive in any order."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class ReorderBuffer(Generic[T]):
    """Returns items in the order of their numbers, without gaps, from ``next`` on. Every item is returned once."""

    def __init__(self, next: int) -> None:
        self.next = next
        self._held: dict[int, T] = {}

    def __len__(self) -> int:
        return len(self._held)

    def put(self, number: int, item: T) -> None:
        """Raises ``ValueError`` for a number that is held or was returned already."""
        if number < self.next or number in self._held:
            raise ValueError(f"number {number} came before; {self.next} is next")
        self._held[number] = item

    def pop(self) -> T | None:
        """The next item, None while it has not arrived."""
        item = self._held.pop(self.next, None)
        if item is not None:
            self.next += 1
        return item

    @property
    def missing(self) -> int | None:
        """The number that all held items wait for; None when no item waits."""
        return self.next if self._held and self.next not in self._held else None

    @property
    def last(self) -> int:
        """The highest number that arrived."""
        return max(self._held, default=self.next - 1)

    def flush(self) -> list[T]:
        """Give up on missing numbers: return all held items in order, and continue after them."""
        held = [self._held[number] for number in sorted(self._held)]
        self.next = self.last + 1
        self._held.clear()
        return held
