"""The order of a job's prompts: a function of (seed, index) for finite splits.

* Index i of a shuffled split is entry ``i mod size`` of that epoch's permutation, drawn from ``seed:epoch``.
* A split without a length that does not end within :data:`STREAM_AFTER` prompts is streamed in its own order.
"""

from __future__ import annotations

import itertools
import sys
import threading
from array import array
from collections.abc import Iterable, Iterator, Mapping, MappingView, Sequence, Set, Sized
from random import Random
from typing import Any

from cachetools import LRUCache

from rookery.environments.base import Environment, MadePrompts, Split
from rookery.errors import count_of
from rookery.spec import values

STREAM_AFTER = 10_000
"""Prompts read from an iterable without a length to find out whether it ends: a fraction of a second for a cheap
generator, tens of seconds for one that takes milliseconds per prompt."""

ORDERS, ORDERED = 4, 1 << 20
"""Permutations of one split that are kept at least, of different seeds and epochs, and more of them up to so many
entries together."""

ORDER_BYTES = array("I").itemsize
"""Of an entry in a permutation: a split has fewer than 2**32."""


class PromptDataset:
    """One split of one environment. Thread-safe; runs the user's iterator in the caller's thread."""

    def __init__(self, environment: Environment, split: Split, stream_after: int = STREAM_AFTER) -> None:
        self._environment = environment
        self._stream_after = stream_after
        self._split: Split = split
        self._lock = threading.Lock()
        self._finite: Sequence[Any] | None = None
        self._stream: Iterator[bytes] | None = None
        self._position = 0
        self._most = 0
        """The most entries that the stream has given."""
        self._length = -1
        self._orders: LRUCache[tuple[int, int], array[int]] | None = None
        """By seed and epoch; a dropped one is drawn again identically."""
        self._entry_bytes = 0
        """Of a finite split's entries."""

    def take(self, start: int, count: int, seed: int, shuffle: bool, *, wrap: bool) -> tuple[list[bytes], int]:
        """Prompts ``start`` … ``start + count - 1`` as JSON, and the split's size (-1 while unknown).

        ``wrap`` starts over at the end; without it fewer may be returned. Raises ValueError for an empty split.
        """
        with self._lock:
            if self._finite is None and self._stream is None:
                self._open()
            if self._finite is None:
                return self._read(start, count, wrap), self._length
            size = len(self._finite)
            stop = start + count if wrap else min(start + count, size)
            chosen = []
            for index in range(start, stop):
                epoch, offset = divmod(index, size)
                entry = self._finite[self._order(size, seed, epoch)[offset] if shuffle else offset]
                chosen.append(entry if isinstance(entry, bytes) else values.encode(entry))
            return chosen, size

    def known(self) -> Sequence[bytes]:
        """The prompts of a finite split that are in memory as JSON; none for others."""
        with self._lock:
            if self._finite is None and self._stream is None:
                self._open()
            finite = self._finite
        return [] if finite is None or isinstance(finite, MadePrompts) else finite

    @property
    def nbytes(self) -> int:
        """Memory that the split takes here: its entries, or their places, and the orders that are kept."""
        orders = self._orders
        return self._entry_bytes + (0 if orders is None else int(orders.currsize) * ORDER_BYTES)

    def _order(self, size: int, seed: int, epoch: int) -> array[int]:
        if self._orders is None:
            self._orders = LRUCache(max(ORDERED, ORDERS * size), len)
        if (found := self._orders.get((seed, epoch))) is None:
            found = array("I", Random(f"{seed}:{epoch}").sample(range(size), size))
            self._orders[seed, epoch] = found
        return found

    def _open(self) -> None:
        prompts = self._environment.prompts(self._split)
        if isinstance(prompts, MadePrompts) and prompts:
            self._finite, self._entry_bytes = prompts, prompts.nbytes
            return
        if isinstance(prompts, str | bytes | Mapping | Set) and not isinstance(prompts, MappingView):
            raise ValueError(
                f"prompts({self._split!r}) gave {type(prompts).__name__}; return a list of prompts, or another iterable"
                " with an order"
            )
        entries = _encoded(prompts)
        head = list(entries) if hasattr(prompts, "__len__") else list(itertools.islice(entries, self._stream_after + 1))
        if isinstance(prompts, Sized) and len(prompts) != len(head):  # such as a table, which gives its columns
            raise ValueError(
                f"prompts({self._split!r}) gave {type(prompts).__name__} of the length {len(prompts)} with"
                f" {count_of(len(head), 'entry')}; return a list of prompts"
            )
        if not head:
            remedy = "; give held-out prompts, or leave evaluation out of the job" if self._split == "eval" else ""
            raise ValueError(f"prompts({self._split!r}) gave none{remedy}")
        if hasattr(prompts, "__len__") or len(head) <= self._stream_after:
            self._finite, self._entry_bytes = head, sum(map(sys.getsizeof, head))
        else:
            self._stream, self._position, self._most = itertools.chain(head, entries), 0, len(head)

    def _read(self, start: int, count: int, wrap: bool) -> list[bytes]:
        chosen: list[bytes] = []
        while len(chosen) < count:
            index = start + len(chosen)
            if self._length > 0:
                if index >= self._length and not wrap:
                    break
                index %= self._length
            if self._stream is None or index < self._position:
                self._stream, self._position = _encoded(self._environment.prompts(self._split)), 0
            entry: bytes | None = b""
            try:
                while self._position <= index and (entry := next(self._stream, None)) is not None:
                    self._position += 1
            except BaseException:  # such as of a prompt that is no JSON: the stream ends with it
                self._stream = None
                raise
            if entry is None:  # the stream ended: later indices wrap
                if self._position < self._most:
                    raise ValueError(
                        f"prompts({self._split!r}) gave {count_of(self._most, 'entry')}, and {self._position} when it"
                        " was called again; return a new iterable at each call"
                    )
                self._length = self._position
                continue
            self._most = max(self._most, self._position)
            chosen.append(entry)
        return chosen


def _encoded(prompts: Iterable[Any]) -> Iterator[bytes]:
    for number, prompt in enumerate(prompts):
        try:
            yield values.encode(prompt)
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from None


def repeated_note(train: PromptDataset, held_out: PromptDataset) -> str:
    """How many held-out prompts are training prompts too, in one line; empty if none is."""
    asked = held_out.known()
    found = set(asked).intersection(train.known()) if asked else set()
    if not found:
        return ""
    count = sum(prompt in found for prompt in asked)
    return (
        f"{count} of {count_of(len(asked), 'held-out prompt')} are training prompts too: their reward shows what was"
        " learned by heart; give others to one of the two"
    )
