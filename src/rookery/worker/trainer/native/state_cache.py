"""Training states of policies that are not in training now, kept in main memory.

A policy that returns to training costs a copy instead of a transfer.

* A state is kept under the hash of its version. A restored state equals, bit for bit, the one loaded from the version's
  files.
* The total size is bounded; the least recently used states are evicted first. Nothing is lost: a version is durable.
"""

from __future__ import annotations

from cachetools import LRUCache

from rookery.worker.trainer.native.optim import AdapterExport


class TrainerStateCache:
    """Version hash → state. Belongs to the trainer's thread."""

    def __init__(self, capacity_bytes: int) -> None:
        self._states: LRUCache[str, AdapterExport] = LRUCache(capacity_bytes, getsizeof=lambda state: state.bytes)

    def __len__(self) -> int:
        return len(self._states)

    @property
    def bytes(self) -> int:
        """Of all states."""
        return int(self._states.currsize)

    def put(self, version: str, state: AdapterExport) -> None:
        """Keep ``state``, unless it alone exceeds the capacity."""
        if state.bytes <= self._states.maxsize:
            self._states[version] = state

    def pop(self, version: str) -> AdapterExport | None:
        """Remove and return the version's state; None if it is not here."""
        return self._states.pop(version, None)

    def clear(self) -> None:
        self._states.clear()
