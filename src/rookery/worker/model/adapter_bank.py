"""Adapters in the memory of an engine.

Promises:

* An adapter in use is not dropped under a running request: eviction waits for the last pin.
* All adapters stay within ``budget_bytes``: the least recently used ones that no request uses are dropped, and
  :meth:`AdapterBank.make_room` refuses more than fit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from rookery.errors import UserError
from rookery.worker.model.adapter import Adapter

_IDLE_ADAPTERS = 64
"""Adapters that no request uses are dropped above this number even where there is room: with each one go the caches of
its prompts, which only a request for it could use."""


class Resident(Protocol):
    """An adapter in memory."""

    pins: int
    """Requests that use it."""
    evict_pending: bool

    @property
    def bytes(self) -> int: ...


R = TypeVar("R", bound=Resident)


class AdapterBank(Generic[R]):
    """Resident adapters by key, the manifest hash. Subclasses say how one is kept."""

    def __init__(self, max_rank: int, budget_bytes: int = sys.maxsize) -> None:
        self.max_rank = max_rank
        self.budget_bytes = budget_bytes
        self.dropped: list[str] = []
        """Adapters that left memory; the engine drops their caches and clears the list."""
        self.residents: dict[str, R] = {}
        """The least recently used first."""

    # --- how adapters are kept --------------------------------------------------------------------------------------

    def load(self, adapter: Adapter) -> R:
        """``adapter`` as products read it."""
        raise NotImplementedError

    def make_room(self, rank: int) -> None:
        """Drops unused adapters until another one of ``rank`` fits. Raises :class:`~rookery.worker.memory.NoRoom` while
        those in use leave no room, ``UserError`` if there can never be room for one of this rank."""
        raise NotImplementedError

    def on_dropped(self, key: str) -> None:
        """``key`` has left memory."""

    def add_full(self, key: str, size: int, load: Callable[[], Any]) -> None:
        """Makes a full-parameter version of ``size`` bytes resident; ``load`` is called once there is room. Raises as
        :meth:`make_room`, and ``UserError`` where there are LoRA only."""
        raise UserError("this engine serves LoRA only; full-parameter versions need a family of the native engine")

    def decoder(self, key: str) -> Any:
        """That of a full-parameter version; None for a LoRA and for the base model."""
        return None

    def lora_key(self, key: str) -> str:
        """The key under which products know an adapter: a full-parameter version has no LoRA."""
        return "" if self.decoder(key) is not None else key

    def slot_order(self, key: str) -> int:
        """Sort key of a batch's rows. Sorted rows need no rearrangement."""
        return 0

    # --- residents --------------------------------------------------------------------------------------------------

    def __contains__(self, key: str) -> bool:
        return key in self.residents and not self.residents[key].evict_pending

    def __len__(self) -> int:
        return len(self.residents)

    @property
    def bytes(self) -> int:
        return sum(resident.bytes for resident in self.residents.values())

    def keys(self) -> list[str]:
        """Adapters that new requests may use."""
        return [key for key, resident in self.residents.items() if not resident.evict_pending]

    def add(self, key: str, adapter: Adapter) -> None:
        """Makes ``adapter`` resident. Raises ``UserError`` when its rank is above ``max_rank``, and as
        :meth:`make_room`."""
        if adapter.rank > self.max_rank:
            raise UserError(f"rank {adapter.rank} is over this worker's max_rank {self.max_rank}")
        if key in self.residents:
            self.residents[key].evict_pending = False
        else:
            self.make_room(adapter.rank)
            self.residents[key] = self.load(adapter)

    def evict(self, key: str) -> None:
        """Drops an adapter, at once or when its last request ends. Unknown keys are ignored."""
        resident = self.residents.get(key)
        if resident is not None:
            resident.evict_pending = True
            self._drop_if_unused(key, resident)

    def pin(self, key: str) -> None:
        """A request starts to use ``key``; raises ``KeyError`` when it is not resident."""
        resident = self.residents[key] = self.residents.pop(key)
        resident.pins += 1

    def unpin(self, key: str) -> None:
        resident = self.residents[key]
        resident.pins -= 1
        self._drop_if_unused(key, resident)

    def drop_idle(self, most_bytes: int) -> None:
        """Drops unused adapters, the least recently used first, above ``most_bytes`` in all or ``_IDLE_ADAPTERS``."""
        idle = [(key, resident) for key, resident in self.residents.items() if not resident.pins]
        total = sum(resident.bytes for resident in self.residents.values())
        while idle and (total > most_bytes or len(idle) >= _IDLE_ADAPTERS):
            key, resident = idle.pop(0)
            total -= resident.bytes
            self._drop(key)

    def _drop_if_unused(self, key: str, resident: R) -> None:
        if resident.evict_pending and resident.pins == 0:
            self._drop(key)

    def _drop(self, key: str) -> None:
        del self.residents[key]
        self.on_dropped(key)
        self.dropped.append(key)
