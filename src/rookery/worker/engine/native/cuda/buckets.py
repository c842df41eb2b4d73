"""Which shapes decode steps are padded to, so that few CUDA graphs serve all of them.

Pure: numbers in, numbers out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

MOST_GRAPHS = 64
"""Graphs kept at once. A graph costs some megabytes of launch records and a second to record; a worker in its rhythm
uses about a dozen."""

LEAST_KEYS = 1024
KEYS_STEP = 4
"""Ranges of keys are bounded by 1,024, 4,096, 16,384 …: the fused kernels read a range's real length, so that a loose
bound costs them nothing and every further one is another graph."""


@dataclass(frozen=True)
class Bucket:
    """A decode step of ``rows`` rows over tails of at most ``keys`` tokens, shared prompts of at most ``prefix`` (0: no
    row has one), and ``adapters`` places of the adapters' stack (0: all rows are the base model's)."""

    rows: int
    keys: int
    prefix: int
    adapters: int


def bucket(rows: int, keys: int, prefix: int, adapters: int) -> Bucket:
    """The smallest bucket that holds a step."""
    return Bucket(padded_rows(rows), padded_keys(keys), padded_keys(prefix) if prefix else 0, adapters)


def padded_rows(rows: int) -> int:
    """1, 2, 3, 4, 6, 8, 12, 16, 24 …: at most a third more than asked for."""
    size = 1
    while size < rows:
        if size % 2 == 0 and rows <= size * 3 // 2:
            return size * 3 // 2
        size *= 2
    return size


def padded_keys(keys: int) -> int:
    size = LEAST_KEYS
    while size < keys:
        size *= KEYS_STEP
    return size


class Kept(Generic[T]):
    """At most ``most`` things by bucket; the one used least recently is dropped first."""

    def __init__(self, most: int = MOST_GRAPHS) -> None:
        self._most = most
        self._kept: OrderedDict[Bucket, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, of: Bucket, make: Callable[[], T]) -> T:
        """What is kept for the bucket, made now if need be."""
        if of not in self._kept:
            while len(self._kept) >= self._most:
                self._kept.popitem(last=False)
            self._kept[of] = make()
        self._kept.move_to_end(of)
        return self._kept[of]

    def drop(self, stale: Callable[[Bucket], bool]) -> None:
        """Forgets the buckets for which ``stale`` is true."""
        for of in [of for of in self._kept if stale(of)]:
            del self._kept[of]
