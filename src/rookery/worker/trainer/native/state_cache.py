"""States of policies that are not in training now, in main memory: coming back costs a copy instead of a transfer.

* A state is kept under the hash of the version that it is: whoever goes on from that version gets it, bit for bit what
  the version's files would give.
* At most so many bytes are kept, those used least recently go first. Nothing is lost by that: a version is durable.
"""

from __future__ import annotations

from collections import OrderedDict

from rookery.worker.trainer.native.optim import Export


class TrainerStateCache:
    def __init__(self, cap_bytes: int) -> None:
        self._cap = cap_bytes
        self._kept: OrderedDict[str, Export] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, version: str, state: Export) -> None:
        """Keep ``state``, which is the version with this hash."""
        self.discard(version)
        self._kept[version] = state
        self.bytes += state.bytes
        while self.bytes > self._cap:
            self.discard(next(iter(self._kept)))

    def pop(self, version: str) -> Export | None:
        """What is kept of the version; it is the caller's from now on."""
        state = self._kept.pop(version, None)
        if state is not None:
            self.bytes -= state.bytes
        return state

    def discard(self, version: str) -> None:
        """Nobody will go on from it."""
        self.pop(version)

    def clear(self) -> None:
        self._kept.clear()
        self.bytes = 0
