"""The KV cache of a CPU engine: contiguous segments in arenas, under one budget in bytes.

Promises:

* A segment (the shared prompt of a group, or the private tail of one request) is contiguous, and the segments of one
  capacity lie side by side without gaps, so that one batched product reads them in place.
* Allocated bytes never exceed the budget. A segment that no request uses can be *retained*: copied out at its exact
  length, restored for a later request, and evicted least recently used first.
* A slot is zeroed before it is used: no value of another tenant, and no NaN, remains in it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from cachetools import LRUCache
from torch import Tensor

from rookery.worker.model.batch_invariance import exact_key_capacity
from rookery.worker.model.config import DecoderConfig

Kind = Literal["shared", "tail"]

_FIRST_SLOTS = 4
"""Slots of a new arena; it grows by half."""


class KVStore(Protocol):
    """Memory for keys and values: ``KVCache`` on a CPU, ``cuda.KVPool`` on a GPU. Slots are opaque to all but the store
    and the attention that reads it; each has a ``capacity`` in tokens."""

    @property
    def budget(self) -> int:
        """Bytes."""
        ...

    def fits_alone(self, *lengths: int) -> bool:
        """Whether segments of these lengths would fit in an empty store."""
        ...

    def allocate(self, kind: Kind, length: int) -> Any | None:
        """A slot for ``length`` tokens; evicts retained segments if it must. None when the store is full."""
        ...

    def resize(self, kind: Kind, slot: Any, length: int) -> Any | None:
        """The slot of the same segment with room for ``length`` tokens; None (and nothing changes) when the store is
        full."""
        ...

    def free(self, slot: Any) -> None: ...

    def contains(self, key: Hashable) -> bool:
        """Whether a segment is retained under ``key``."""
        ...

    def retain(self, slot: Any, length: int, key: Hashable, metadata: Any) -> None:
        """Frees the slot and retains its first ``length`` tokens under ``key`` as long as there is room for them."""
        ...

    def restore(self, kind: Kind, key: Hashable, length: int) -> tuple[Any, Any] | None:
        """A slot with room for ``length`` tokens that holds the segment retained under ``key``, and its metadata. None
        when there is no such segment, or (it stays retained) no room."""
        ...


class KVSlot:
    """The place of one segment in its arena. ``index`` changes when an earlier slot is freed."""

    __slots__ = ("arena", "index")

    def __init__(self, arena: Arena, index: int) -> None:
        self.arena = arena
        self.index = index

    @property
    def capacity(self) -> int:
        return self.arena.capacity


class Arena:
    """Slots of one capacity: ``k`` and ``v`` [layers, slots, kv_heads, capacity, head_dim], of which the first
    ``len(taken)`` are in use."""

    def __init__(self, config: DecoderConfig, capacity: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.capacity = capacity
        self.taken: list[KVSlot] = []
        self.k = torch.zeros(config.layers, 0, config.kv_heads, capacity, config.head_dim, dtype=dtype, device=device)
        self.v = self.k.clone()
        self.slot_bytes = 2 * dtype.itemsize * config.layers * config.kv_heads * capacity * config.head_dim

    @property
    def num_slots(self) -> int:
        return self.k.shape[1]

    @property
    def bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    def resize(self, slots: int) -> None:
        self.k, self.v = (self._resized(old, slots) for old in (self.k, self.v))

    def _resized(self, old: Tensor, slots: int) -> Tensor:
        new = old.new_empty(old.shape[0], slots, *old.shape[2:])  # ``allocate`` zeroes a slot
        new[:, : len(self.taken)] = old[:, : len(self.taken)]
        return new

    def allocate(self) -> KVSlot:
        """A zeroed slot; there must be a free one."""
        slot = KVSlot(self, len(self.taken))
        self.taken.append(slot)
        for x in (self.k, self.v):
            x[:, slot.index].zero_()
        return slot

    def free(self, slot: KVSlot) -> None:
        """Frees ``slot``; the last slot moves into the gap."""
        last = self.taken.pop()
        if last is not slot:
            for x in (self.k, self.v):
                x[:, slot.index] = x[:, last.index]
            last.index = slot.index
            self.taken[last.index] = last


@dataclass
class RetainedSegment:
    """A segment that no request uses: ``k``, ``v`` [layers, kv_heads, length, head_dim] and its owner's metadata."""

    k: Tensor
    v: Tensor
    metadata: Any

    @property
    def bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes + (self.metadata.nbytes if isinstance(self.metadata, Tensor) else 0)


class KVCache:
    """``KVStore`` with all arenas and retained segments of one engine."""

    def __init__(
        self, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str, budget_bytes: int
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.budget = budget_bytes
        self.arenas: dict[Kind, dict[int, Arena]] = {"shared": {}, "tail": {}}
        self.retained: LRUCache[Hashable, RetainedSegment] = LRUCache(budget_bytes, getsizeof=lambda kept: kept.bytes)
        self.token_bytes = 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize

    @property
    def bytes(self) -> int:
        arenas = sum(arena.bytes for kind in self.arenas.values() for arena in kind.values())
        return arenas + int(self.retained.currsize)

    def fits_alone(self, *lengths: int) -> bool:
        """See ``KVStore``."""
        tokens = sum(exact_key_capacity(self.dtype, length) for length in lengths if length)
        return tokens * self.token_bytes <= self.budget

    def allocate(self, kind: Kind, length: int, others: int = 0) -> KVSlot | None:
        """See ``KVStore``. ``others`` is the number of segments that are likely to need a slot of this size soon."""
        size = exact_key_capacity(self.dtype, length)
        arena = self.arenas[kind].get(size)
        if arena is None:
            arena = self.arenas[kind][size] = Arena(self.config, size, self.dtype, self.device)
        if len(arena.taken) == arena.num_slots and not self._grow(arena, others):
            return None
        return arena.allocate()

    def resize(self, kind: Kind, slot: KVSlot, length: int) -> KVSlot | None:
        """See ``KVStore``."""
        if length <= slot.capacity:
            return slot
        new = self.allocate(kind, length, len(slot.arena.taken))
        if new is not None:
            for source, target in ((slot.arena.k, new.arena.k), (slot.arena.v, new.arena.v)):
                target[:, new.index, :, : slot.capacity] = source[:, slot.index]
            self.free(slot)
        return new

    def free(self, slot: KVSlot) -> None:
        slot.arena.free(slot)

    def contains(self, key: Hashable) -> bool:
        """See ``KVStore``."""
        return key in self.retained

    def retain(self, slot: KVSlot, length: int, key: Hashable, metadata: Any) -> None:
        """See ``KVStore``."""
        k, v = (x[:, slot.index, :, :length].clone() for x in (slot.arena.k, slot.arena.v))
        self.free(slot)
        self.retained.pop(key, None)
        kept = RetainedSegment(k, v, metadata)
        if self._reclaim(kept.bytes):
            self.retained[key] = kept

    def restore(self, kind: Kind, key: Hashable, length: int) -> tuple[KVSlot, Any] | None:
        """See ``KVStore``."""
        kept = self.retained.pop(key, None)
        if kept is None:
            return None
        size = kept.k.shape[2]
        slot = self.allocate(kind, max(length, size))
        if slot is None:
            self.retained[key] = kept
            return None
        slot.arena.k[:, slot.index, :, :size] = kept.k
        slot.arena.v[:, slot.index, :, :size] = kept.v
        return slot, kept.metadata

    def _grow(self, arena: Arena, others: int) -> bool:
        taken = len(arena.taken)
        for slots in (taken + max(_FIRST_SLOTS, taken // 2, others), taken + 1):
            # the old tensors stay allocated until they are copied
            if self._reclaim(slots * arena.slot_bytes, keep=arena):
                arena.resize(slots)
                return True
        return False

    def _reclaim(self, wanted: int, keep: Arena | None = None) -> bool:
        """Makes ``wanted`` bytes of room: evicts retained segments, which is free, then deletes unused arenas, then
        shrinks arenas with free slots, which costs a copy."""
        while self.bytes + wanted > self.budget and self.retained:
            self.retained.popitem()
        if self.bytes + wanted <= self.budget:
            return True
        for kind in self.arenas.values():
            for size, arena in list(kind.items()):
                if arena is not keep and arena.num_slots > len(arena.taken):
                    if arena.taken:
                        arena.resize(len(arena.taken))
                    else:
                        del kind[size]
        return self.bytes + wanted <= self.budget
