"""Keys and values: contiguous segments in arenas, under one budget in bytes.

Promises:

* A segment (the shared prompt of a group, or one request's private tail) is contiguous, and the segments of one
  capacity lie side by side without gaps, so that one batched product reads them in place.
* What is allocated never exceeds the budget. What nobody runs with is *parked* (copied out at its exact length, least
  recently used first to go) and may be taken up again.
* A place is zeroed before it is used: nothing of another tenant, a NaN least of all, is left in it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from rookery.worker.model.batch_invariance import exact_key_capacity
from rookery.worker.model.config import DecoderConfig

Kind = Literal["shared", "tail"]

_FIRST_SLOTS = 4
"""Places of a new arena; it grows by half."""


class KVStore(Protocol):
    """Where segments lie: ``KvStore`` on a CPU, ``pool.Pool`` on a GPU. Places are opaque to all but the store and the
    attention that reads it; each has a ``capacity``."""

    @property
    def budget(self) -> int:
        """Bytes."""
        ...

    def fits_alone(self, *lengths: int) -> bool: ...
    def allocate(self, kind: Kind, length: int) -> Any | None: ...
    def resize(self, kind: Kind, place: Any, length: int) -> Any | None: ...
    def free(self, place: Any) -> None: ...
    def contains(self, key: Hashable) -> bool: ...
    def retain(self, place: Any, length: int, key: Hashable, about: Any) -> None: ...
    def restore(self, kind: Kind, key: Hashable, length: int) -> tuple[Any, Any] | None: ...


class KVSlot:
    """Where one segment lies. ``slot`` changes when neighbours leave."""

    __slots__ = ("arena", "index")

    def __init__(self, arena: Arena, slot: int) -> None:
        self.arena = arena
        self.index = slot

    @property
    def capacity(self) -> int:
        return self.arena.capacity


class Arena:
    """``k`` and ``v`` [layers, slots, kv_heads, capacity, head_dim]; slots [0, len(places)) are taken."""

    def __init__(self, config: DecoderConfig, size: int, dtype: torch.dtype, device: torch.device | str) -> None:
        self.capacity = size
        self.taken: list[KVSlot] = []
        self.k = torch.zeros(config.layers, 0, config.kv_heads, size, config.head_dim, dtype=dtype, device=device)
        self.v = self.k.clone()
        self.slot_bytes = (
            2 * self.k[:, :0].new_zeros(1).element_size() * (config.layers * config.kv_heads * size * config.head_dim)
        )

    @property
    def num_slots(self) -> int:
        return self.k.shape[1]

    @property
    def bytes(self) -> int:
        return self.num_slots * self.slot_bytes

    def resize(self, slots: int) -> None:
        taken = len(self.taken)
        for name in ("k", "v"):
            old: Tensor = getattr(self, name)
            new = old.new_empty(old.shape[0], slots, *old.shape[2:])  # a place is zeroed when it is taken
            new[:, :taken] = old[:, :taken]
            setattr(self, name, new)

    def allocate(self) -> KVSlot:
        """A zeroed place; there must be a free slot."""
        place = KVSlot(self, len(self.taken))
        self.taken.append(place)
        self.k[:, place.index].zero_()
        self.v[:, place.index].zero_()
        return place

    def free(self, place: KVSlot) -> None:
        """Frees ``place``; the last one moves into the gap."""
        last = self.taken.pop()
        if last is not place:
            self.k[:, place.index] = self.k[:, last.index]
            self.v[:, place.index] = self.v[:, last.index]
            last.index = place.index
            self.taken[last.index] = last


@dataclass
class RetainedSegment:
    """A segment that nobody runs with: ``k``, ``v`` [layers, kv_heads, length, head_dim], and what its owner knows."""

    k: Tensor
    v: Tensor
    metadata: Any

    @property
    def bytes(self) -> int:
        return self.k.nbytes + self.v.nbytes + (self.metadata.nbytes if isinstance(self.metadata, Tensor) else 0)


class KVCache:
    """All arenas and parked segments of one engine."""

    def __init__(
        self, config: DecoderConfig, dtype: torch.dtype, device: torch.device | str, budget_bytes: int
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.budget = budget_bytes
        self.arenas: dict[Kind, dict[int, Arena]] = {"shared": {}, "tail": {}}
        self.retained: OrderedDict[Hashable, RetainedSegment] = OrderedDict()
        self._parked_bytes = 0
        """Counted along: thousands may be parked, and the budget is asked for every new segment."""
        self.token_bytes = 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize

    @property
    def bytes(self) -> int:
        arenas = sum(arena.bytes for kind in self.arenas.values() for arena in kind.values())
        return arenas + self._parked_bytes

    def fits_alone(self, *lengths: int) -> bool:
        """Whether segments of these lengths would fit if nothing else were there."""
        return (
            sum(exact_key_capacity(self.dtype, length) for length in lengths if length) * self.token_bytes
            <= self.budget
        )

    def allocate(self, kind: Kind, length: int, others: int = 0) -> KVSlot | None:
        """A place for ``length`` tokens, at the cost of parked segments if need be; None when the budget is full. So
        many ``others`` are likely to want one soon."""
        size = exact_key_capacity(self.dtype, length)
        arena = self.arenas[kind].get(size)
        if arena is None:
            arena = self.arenas[kind][size] = Arena(self.config, size, self.dtype, self.device)
        if len(arena.taken) == arena.num_slots and not self._widen(arena, others):
            return None
        return arena.allocate()

    def resize(self, kind: Kind, place: KVSlot, length: int) -> KVSlot | None:
        """The same segment with room for ``length`` tokens; None (and nothing changed) when the budget is full."""
        if length <= place.capacity:
            return place
        new = self.allocate(kind, length, len(place.arena.taken))
        if new is not None:
            for source, target in ((place.arena.k, new.arena.k), (place.arena.v, new.arena.v)):
                target[:, new.index, :, : place.capacity] = source[:, place.index]
            self.free(place)
        return new

    def free(self, place: KVSlot) -> None:
        place.arena.free(place)

    def contains(self, key: Hashable) -> bool:
        """Whether a segment is parked under ``key``."""
        return key in self.retained

    def retain(self, place: KVSlot, length: int, key: Hashable, about: Any) -> None:
        """Copies ``length`` tokens out under ``key`` and frees the place. Forgotten if there is no room for it."""
        k, v = (x[:, place.index, :, :length].clone() for x in (place.arena.k, place.arena.v))
        self.free(place)
        self._unpark(key)
        parked = RetainedSegment(k, v, about)
        if self._reclaim(parked.bytes):
            self._keep(key, parked)

    def restore(self, kind: Kind, key: Hashable, length: int) -> tuple[KVSlot, Any] | None:
        """A parked segment with room for ``length`` tokens, and what was kept about it; None when it is not there, or
        (still parked) when there is no room."""
        parked = self._unpark(key)
        if parked is None:
            return None
        size = parked.k.shape[2]
        place = self.allocate(kind, max(length, size))
        if place is None:
            self._keep(key, parked)
            return None
        place.arena.k[:, place.index, :, :size] = parked.k
        place.arena.v[:, place.index, :, :size] = parked.v
        return place, parked.metadata

    def _keep(self, key: Hashable, parked: RetainedSegment) -> None:
        self.retained[key] = parked
        self._parked_bytes += parked.bytes

    def _unpark(self, key: Hashable) -> RetainedSegment | None:
        parked = self.retained.pop(key, None)
        if parked is not None:
            self._parked_bytes -= parked.bytes
        return parked

    def _widen(self, arena: Arena, others: int) -> bool:
        taken = len(arena.taken)
        for slots in (taken + max(_FIRST_SLOTS, taken // 2, others), taken + 1):
            # while it is copied the old one is there too
            if self._reclaim(slots * arena.slot_bytes, keep=arena):
                arena.resize(slots)
                return True
        return False

    def _reclaim(self, wanted: int, keep: Arena | None = None) -> bool:
        """Makes ``wanted`` bytes of room: first what was parked longest ago, which costs nothing, then unused arenas,
        then slack, which is copied and soon wanted again."""
        while self.bytes + wanted > self.budget and self.retained:
            self._unpark(next(iter(self.retained)))
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
