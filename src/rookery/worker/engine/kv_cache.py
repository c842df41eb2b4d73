"""Caches of a batch's sequences: a budget of tokens, in which segments are ranges. ``KVCache`` has one pool of keys and
values, allocated once.

Promises:

* A segment (the shared prompt of a group, or the private tail of one request) is one range, and the pool's tensors
  never move, so that plans, kernels and CUDA graphs may hold addresses.
* Ranges never exceed the budget. A segment that no request uses can be *retained*: it stays where it is, is restored
  for a later request, and is evicted, least recently used first, when its range is needed, or when it is old.
* No one reads a token that its owner has not written. So ranges are not zeroed, and memory is touched only where a
  segment has been.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rookery.worker.model.batch_invariance import LANES, key_capacity

SCRATCH = 0
"""A token that belongs to no segment: padding reads it, and the padding rows of a GPU's batch write it."""

RETAIN_SECONDS = 180.0
"""A retained segment is evicted after this time: nobody says which episodes and groups have ended, and those of an
adapter in constant use would fill the whole budget. A later turn costs one prefill."""


@dataclass(eq=False)
class KVSlot:
    """Tokens ``start`` … ``start + capacity - 1`` of the pool; both are multiples of ``LANES``."""

    start: int
    capacity: int
    copied: int = 0
    """Further tokens of the budget, for a copy of the shared prompt before the segment."""


@dataclass(frozen=True)
class RetainedSegment:
    """A segment that no request uses, its owner's metadata, and when it was retained."""

    slot: KVSlot
    metadata: Any
    since: float


class CacheShape(Protocol):
    """Sizes of the keys and values of a model's attention."""

    @property
    def layers(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...


class SegmentStore:
    """The ranges of a budget of ``tokens`` tokens. Subclasses keep their contents."""

    rewinds = True
    """Whether a segment can continue from any of its tokens, not from its last one only."""
    copies_prefix = False
    """Whether a segment holds a copy of the shared prompt that it follows."""

    def __init__(self, budget_bytes: int, token_bytes: int, state_bytes: int = 0) -> None:
        """``state_bytes`` are those of a segment besides its tokens."""
        self.budget = budget_bytes
        self.token_bytes = token_bytes
        self.state_tokens = -(-state_bytes // token_bytes // LANES) * LANES
        """``state_bytes`` in tokens, of each segment."""
        self.tokens = max(LANES, budget_bytes // token_bytes // LANES * LANES)
        self.retained: OrderedDict[Hashable, RetainedSegment] = OrderedDict()
        """The one retained first, which is the least recently used, first."""
        self._retained_tokens = 0
        self.free_ranges = [(LANES, self.tokens)]
        """(start, stop) in order, none adjacent to the next; the first ``LANES`` tokens are scratch."""

    def move(self, old: KVSlot, new: KVSlot) -> None:
        """Moves the contents of a segment into a larger slot."""
        raise NotImplementedError

    def _size(self, length: int) -> int:
        """Tokens of the budget that a segment takes, besides a copy of the prompt before it."""
        return key_capacity(length) + self.state_tokens

    def _copied(self, prefix: int) -> int:
        """Tokens of the budget for a segment's copy of the shared prompt, of ``prefix`` tokens, before it."""
        return key_capacity(prefix) if prefix and self.copies_prefix else 0

    def _held(self, slot: KVSlot) -> int:
        """Tokens of the budget that the segment in ``slot`` takes."""
        return self._size(slot.capacity) + slot.copied

    @property
    def bytes(self) -> int:
        """The bytes of all segments, retained ones included."""
        return (self.used_tokens + self._retained_tokens) * self.token_bytes

    @property
    def used_tokens(self) -> int:
        """Tokens in segments that are not retained."""
        free = sum(stop - start for start, stop in self.free_ranges)
        return self.tokens - LANES - free - self._retained_tokens

    def fits_alone(self, prefix: int, tail: int) -> bool:
        """Whether a shared prompt of ``prefix`` tokens and a tail would fit in an empty cache. Either may have none."""
        size = sum(self._size(length) for length in (prefix, tail) if length)
        return size + (self._copied(prefix) if tail else 0) <= self.tokens - LANES

    @property
    def longest(self) -> int:
        """Tokens of a shared prompt and its tail that fit in an empty cache, however they are divided; at least 1."""
        steps = [1]  # the first lengths of each size
        while steps[-1] < self.tokens:
            steps.append(key_capacity(steps[-1]) + 1)

        def fits(length: int) -> bool:
            return all(self.fits_alone(first, length - first) for first in steps if first <= length)

        return max(1, bisect_left(range(1, self.tokens), True, key=lambda length: not fits(length)))

    def allocate(self, length: int, prefix: int = 0) -> KVSlot | None:
        """A slot for ``length`` tokens after a shared prompt of ``prefix`` tokens; evicts retained segments if it must.
        None when the cache is full."""
        return self._allocate(length, self._copied(prefix), evict=True)

    def _allocate(self, length: int, copied: int, *, evict: bool) -> KVSlot | None:
        size = self._size(length) + copied
        while True:
            for i, (start, stop) in enumerate(self.free_ranges):
                if stop - start >= size:
                    self.free_ranges[i : i + 1] = [(start + size, stop)] if stop - start > size else []
                    return KVSlot(start, key_capacity(length), copied)
            if not (evict and self.retained):
                return None
            self._evict(next(iter(self.retained)))

    def resize(self, slot: KVSlot, length: int, *, evict: bool = True) -> KVSlot | None:
        """The slot of the same segment with room for ``length`` tokens; None (and nothing changes) when the cache is
        full, without ``evict`` also while retained segments fill it."""
        if length <= slot.capacity:
            return slot
        new = self._allocate(length, slot.copied, evict=evict)
        if new is not None:
            self.move(slot, new)
            self.free(slot)
        return new

    def free(self, slot: KVSlot) -> None:
        start, stop = slot.start, slot.start + self._held(slot)
        at = sum(free < start for free, _ in self.free_ranges)
        if at < len(self.free_ranges) and self.free_ranges[at][0] == stop:
            stop = self.free_ranges.pop(at)[1]
        if at and self.free_ranges[at - 1][1] == start:
            start = self.free_ranges.pop(at - 1)[0]
            at -= 1
        self.free_ranges.insert(at, (start, stop))

    def contains(self, key: Hashable) -> bool:
        """Whether a segment is retained under ``key``."""
        return key in self.retained

    def retain(self, slot: KVSlot, key: Hashable, metadata: Any, now: float) -> None:
        """Retains the segment in ``slot``, which is no longer its caller's, under ``key`` from ``now`` (seconds) on."""
        if key in self.retained:
            self._evict(key)
        self.retained[key] = RetainedSegment(slot, metadata, now)
        self._retained_tokens += self._held(slot)
        while now - self.retained[oldest := next(iter(self.retained))].since > RETAIN_SECONDS:
            self._evict(oldest)

    def discard(self, condition: Callable[[Hashable, Any], bool]) -> None:
        """Deletes the retained segments whose key and metadata fulfil the condition."""
        for key in [key for key, kept in self.retained.items() if condition(key, kept.metadata)]:
            self._evict(key)

    def _evict(self, key: Hashable) -> None:
        self.free(self._take(key).slot)

    def _take(self, key: Hashable) -> RetainedSegment:
        """The segment retained under ``key``, which is no longer."""
        kept = self.retained.pop(key)
        self._retained_tokens -= self._held(kept.slot)
        return kept

    def restore(self, key: Hashable, length: int) -> tuple[KVSlot, Any] | None:
        """A slot with room for ``length`` tokens that holds the segment retained under ``key``, and its metadata. None
        when there is no such segment, or (it stays retained) no room."""
        if key not in self.retained:
            return None
        kept = self._take(key)
        slot = self.resize(kept.slot, length)
        if slot is None:  # every other one was evicted for it: it is the only one
            self.retained[key] = kept
            self._retained_tokens += self._held(kept.slot)
            return None
        return slot, kept.metadata


class KVCache(SegmentStore):
    """Memory for keys and values.

    ``k`` and ``v`` are [layers, tokens, kv_heads, head_dim] if ``token_major``, as a GPU's kernels read them. Else the
    tokens of a slot lie together, [layers, kv_heads, capacity, head_dim] (see ``segment``), in a tensor [tokens ·
    layers · kv_heads, head_dim]: a small cache is small in memory too, however large its budget is."""

    def __init__(
        self,
        config: CacheShape,
        dtype: torch.dtype,
        device: torch.device | str,
        budget_bytes: int,
        *,
        token_major: bool = False,
    ) -> None:
        super().__init__(budget_bytes, 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize)
        self.layers, self.kv_heads, self.head_dim = config.layers, config.kv_heads, config.head_dim
        self.token_major = token_major
        rows = config.layers * self.tokens * config.kv_heads
        self.k, self.v = (torch.empty(rows, config.head_dim, dtype=dtype, device=device) for _ in range(2))
        if token_major:
            shape = (config.layers, self.tokens, config.kv_heads, config.head_dim)
            self.k, self.v = self.k.view(shape), self.v.view(shape)
        for x in (self.k, self.v):
            self.segment(x, KVSlot(SCRATCH, LANES)).zero_()

    def segment(self, x: Tensor, slot: KVSlot) -> Tensor:
        """The slot's part of ``k`` or ``v``: [layers, capacity, kv_heads, head_dim] if ``token_major``, else [layers,
        kv_heads, capacity, head_dim]. A view."""
        start, stop = slot.start, slot.start + slot.capacity
        if self.token_major:
            return x[:, start:stop]
        rows = self.layers * self.kv_heads
        return x[start * rows : stop * rows].view(self.layers, self.kv_heads, slot.capacity, self.head_dim)

    def move(self, old: KVSlot, new: KVSlot) -> None:
        axis = 1 if self.token_major else 2
        for x in (self.k, self.v):
            self.segment(x, new).narrow(axis, 0, old.capacity).copy_(self.segment(x, old))
