"""Keys and values on a GPU: one pool of tokens, allocated once, in which segments are ranges.

Promises:

* The pool's tensors never move, so that what a CUDA graph has recorded about them stays true.
* A segment is contiguous. What nobody runs with is *parked* where it lies and is given up, least recently used first,
  when others need the room.
* Nothing is read that its owner has not written: attention over the pool takes ranges with their lengths. So places are
  not cleaned.

The pool is what ``cache.KvStore`` is on a CPU, where products over whole arenas are the fast ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rookery.worker.engine.native.kv_cache import Kind
from rookery.worker.model.batch_invariance import LANES, key_capacity
from rookery.worker.model.config import DecoderConfig

SCRATCH = 0
"""A token that is nobody's: rows that only fill up a batch write there."""


@dataclass(eq=False)
class KVRange:
    """Tokens ``start`` … ``start + capacity - 1`` of the pool."""

    start: int
    capacity: int


@dataclass(frozen=True)
class _RetainedRange:
    place: KVRange
    length: int
    about: Any


class KVPool:
    """``k`` and ``v`` [layers, tokens, kv_heads, head_dim]. See ``cache.Store``."""

    def __init__(
        self, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str, budget_bytes: int
    ) -> None:
        self.config = config
        self.budget = budget_bytes
        self.token_bytes = 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize
        self.tokens = max(LANES, budget_bytes // self.token_bytes)
        shape = (config.layers, self.tokens, config.kv_heads, config.head_dim)
        self.k: Tensor = torch.empty(shape, dtype=dtype, device=device)
        self.v: Tensor = torch.empty(shape, dtype=dtype, device=device)
        self.retained: OrderedDict[Hashable, _RetainedRange] = OrderedDict()
        self._free = [(LANES, self.tokens)]
        """Free ranges (start, stop) in order, none touching the next; the first ``LANES`` tokens are scratch."""

    @property
    def free_tokens(self) -> int:
        """Tokens that nobody holds, parked segments aside."""
        return sum(stop - start for start, stop in self._free)

    def fits_alone(self, *lengths: int) -> bool:
        """Whether segments of these lengths would fit if nothing else were there."""
        return sum(key_capacity(length) for length in lengths if length) <= self.tokens - LANES

    def allocate(self, kind: Kind, length: int) -> KVRange | None:
        """A place for ``length`` tokens, at the cost of parked segments if need be; None when there is no room."""
        size = key_capacity(length)
        while True:
            for i, (start, stop) in enumerate(self._free):
                if stop - start >= size:
                    self._free[i : i + 1] = [(start + size, stop)] if stop - start > size else []
                    return KVRange(start, size)
            if not self.retained:
                return None
            _, oldest = self.retained.popitem(last=False)
            self.free(oldest.place)

    def resize(self, kind: Kind, place: KVRange, length: int) -> KVRange | None:
        """The same segment with room for ``length`` tokens; None (and nothing changed) when there is no room."""
        if length <= place.capacity:
            return place
        new = self.allocate(kind, length)
        if new is not None:
            for x in (self.k, self.v):
                x[:, new.start : new.start + place.capacity] = x[:, place.start : place.start + place.capacity]
            self.free(place)
        return new

    def free(self, place: KVRange) -> None:
        start, stop = place.start, place.start + place.capacity
        at = sum(free < start for free, _ in self._free)
        if at < len(self._free) and self._free[at][0] == stop:
            stop = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start:
            start = self._free.pop(at - 1)[0]
            at -= 1
        self._free.insert(at, (start, stop))

    def contains(self, key: Hashable) -> bool:
        """Whether a segment is parked under ``key``."""
        return key in self.retained

    def retain(self, place: KVRange, length: int, key: Hashable, about: Any) -> None:
        """Keeps the segment under ``key`` while nobody needs its room."""
        before = self.retained.pop(key, None)
        if before is not None:
            self.free(before.place)
        self.retained[key] = _RetainedRange(place, length, about)

    def restore(self, kind: Kind, key: Hashable, length: int) -> tuple[KVRange, Any] | None:
        """A parked segment with room for ``length`` tokens, and what was kept about it; None when it is not there, or
        (still parked) when there is no room."""
        parked = self.retained.pop(key, None)
        if parked is None:
            return None
        place = self.resize(kind, parked.place, length)
        if place is None:
            self.retained[key] = parked
            return None
        return place, parked.about
