"""The KV cache of a GPU engine: one pool of tokens, allocated once, in which segments are ranges.

Promises:

* The pool's tensors never move, so that CUDA graphs may hold their addresses.
* A segment is contiguous. A retained segment stays where it is and is evicted, least recently used first, when its
  range is needed.
* No one reads a token that its owner has not written: attention over the pool takes ranges with their lengths. So
  ranges are not zeroed.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from cachetools import LRUCache
from torch import Tensor

from rookery.worker.engine.native.kv_cache import Kind
from rookery.worker.model.batch_invariance import LANES, key_capacity
from rookery.worker.model.config import DecoderConfig

SCRATCH = 0
"""A token that belongs to no segment: the padding rows of a batch write there."""


@dataclass(eq=False)
class KVRange:
    """Tokens ``start`` … ``start + capacity - 1`` of the pool."""

    start: int
    capacity: int


@dataclass(frozen=True)
class RetainedRange:
    """A segment that no request uses, and its owner's metadata."""

    slot: KVRange
    metadata: Any


class KVPool:
    """``KVStore`` on a GPU: ``k`` and ``v`` [layers, tokens, kv_heads, head_dim]."""

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
        self.retained: LRUCache[Hashable, RetainedRange] = LRUCache(self.tokens, lambda kept: kept.slot.capacity)
        self.free_ranges = [(LANES, self.tokens)]
        """(start, stop) in order, none adjacent to the next; the first ``LANES`` tokens are scratch."""

    @property
    def free_tokens(self) -> int:
        """Tokens in no segment, retained ones included."""
        return sum(stop - start for start, stop in self.free_ranges)

    def fits_alone(self, *lengths: int) -> bool:
        """See ``KVStore``."""
        return sum(key_capacity(length) for length in lengths if length) <= self.tokens - LANES

    def allocate(self, kind: Kind, length: int) -> KVRange | None:
        """See ``KVStore``."""
        size = key_capacity(length)
        while True:
            for i, (start, stop) in enumerate(self.free_ranges):
                if stop - start >= size:
                    self.free_ranges[i : i + 1] = [(start + size, stop)] if stop - start > size else []
                    return KVRange(start, size)
            if not self.retained:
                return None
            _, oldest = self.retained.popitem()
            self.free(oldest.slot)

    def resize(self, kind: Kind, slot: KVRange, length: int) -> KVRange | None:
        """See ``KVStore``."""
        if length <= slot.capacity:
            return slot
        new = self.allocate(kind, length)
        if new is not None:
            for x in (self.k, self.v):
                x[:, new.start : new.start + slot.capacity] = x[:, slot.start : slot.start + slot.capacity]
            self.free(slot)
        return new

    def free(self, slot: KVRange) -> None:
        start, stop = slot.start, slot.start + slot.capacity
        at = sum(free < start for free, _ in self.free_ranges)
        if at < len(self.free_ranges) and self.free_ranges[at][0] == stop:
            stop = self.free_ranges.pop(at)[1]
        if at and self.free_ranges[at - 1][1] == start:
            start = self.free_ranges.pop(at - 1)[0]
            at -= 1
        self.free_ranges.insert(at, (start, stop))

    def contains(self, key: Hashable) -> bool:
        """See ``KVStore``."""
        return key in self.retained

    def retain(self, slot: KVRange, length: int, key: Hashable, metadata: Any) -> None:
        """See ``KVStore``."""
        before = self.retained.pop(key, None)
        if before is not None:
            self.free(before.slot)
        self.retained[key] = RetainedRange(slot, metadata)

    def restore(self, kind: Kind, key: Hashable, length: int) -> tuple[KVRange, Any] | None:
        """See ``KVStore``."""
        kept = self.retained.pop(key, None)
        if kept is None:
            return None
        slot = self.resize(kind, kept.slot, length)
        if slot is None:
            self.retained[key] = kept
            return None
        return slot, kept.metadata
