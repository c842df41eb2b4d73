"""The memory budget of a worker: one sum, divided among the parts that grow with their users.

Promises:

* The base model and all parts together stay within ``memory_bytes``, or by default within a share of the memory that
  is free when the worker starts. On a GPU this is the device's memory.
* A part that is full evicts contents that nothing uses, or raises :class:`NoRoom`, and its caller waits
  (:class:`MemoryQueue`). What can never fit is refused with its size and the setting.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from rookery.aio import wait_event
from rookery.errors import UserError
from rookery.settings import Settings
from rookery.worker.device import free_bytes, used_bytes

T = TypeVar("T")

SHARES = {
    "cpu": {"kv_cache": 0.3, "adapters": 0.2, "training_states": 0.35, "activations": 0.15},
    "cuda": {"kv_cache": 0.55, "adapters": 0.1, "training_states": 0.1, "activations": 0.25},
}
"""The share of each part in the memory that the base model leaves. A GPU needs many rows and long passes to be busy. On
a CPU, with 3 GB for a 135M model: caches of 20,000 tokens, two adapters of rank 64 in one batch (ten of rank 16), one
training state of rank 64 (five of rank 16), passes of 3,000 tokens."""

OVERHEAD_BYTES = 448 << 20
"""Not divided, on a CPU: the compilers of kernels and what they compile (:mod:`rookery.worker` limits it), files and
batches in transfer, grammars of replies (:mod:`rookery.worker.grammars`), buffers of one layer, and free blocks that
the allocator keeps."""

SMALLEST_BYTES = 64 << 20
"""A budget that leaves less than this to be divided is refused."""

GPU_MEMORY_SHARE = 0.9
"""Share of a GPU's free memory that a worker uses; the rest is for what PyTorch allocates besides tensors."""

RETRY_SECONDS = 1.0
"""A call that waits for memory is tried again at least this often: contents become evictable with time, too."""


class NoRoom(Exception):
    """The part is full of contents that are in use; there will be room later."""


class NotOnThisWorker(UserError, ValueError):
    """It can never run on this worker; another one may run it."""


class TooSmall(NotOnThisWorker):
    """It exceeds the memory or a limit of this worker, for ever; another one may have more."""


class MemoryUse(NamedTuple):
    """Bytes of one part."""

    used: int
    budget: int


class MemoryBudget(NamedTuple):
    """Bytes. ``total`` is the budget of the worker; ``base`` the base model and what is not divided."""

    total: int
    base: int
    kv_cache: int
    adapters: int
    training_states: int
    activations: int


def divide(total: int, base: int, device_type: str) -> MemoryBudget:
    """Shares of a budget of ``total`` bytes of which ``base`` are in use. Raises ``UserError`` if too few are left."""
    if device_type == "cpu":
        base += OVERHEAD_BYTES
    if total < base + SMALLEST_BYTES:
        raise UserError(
            f"this worker's memory budget is {_mb(total)}, but its base model and overhead take {_mb(base)} and "
            f"{_mb(SMALLEST_BYTES)} must be left; free memory, or set ROOKERY_MEMORY_BYTES"
        )
    return MemoryBudget(total, base, **{part: int((total - base) * x) for part, x in SHARES[device_type].items()})


def total_bytes(settings: Settings, device: torch.device) -> int:
    """The budget of a worker that starts now. Call it before the base model is loaded."""
    if settings.worker.memory_bytes:
        return settings.worker.memory_bytes
    share = GPU_MEMORY_SHARE if device.type == "cuda" else settings.worker.memory_share
    return used_bytes(device) + int(share * free_bytes(device))


def require(part: str, needed: int, budget: int) -> None:
    """Raises :class:`TooSmall` if ``needed`` bytes never fit the part."""
    if needed > budget:
        raise TooSmall(
            f"{part} of {_mb(needed)} do not fit this worker, whose memory budget has {_mb(budget)} for them; "
            "raise ROOKERY_MEMORY_BYTES"
        )


@dataclass(order=True)
class _QueuedCall:
    """A call that waits; the least is next."""

    later: bool
    number: int
    since: float = field(compare=False)
    changed: asyncio.Event = field(default_factory=asyncio.Event, compare=False)
    """Something was freed, or no other call is before it."""


class MemoryQueue:
    """Calls that need memory of one part. While there is room they run side by side; those without wait in order of
    arrival, those that go ``first`` before all others. Belongs to the I/O thread."""

    def __init__(self) -> None:
        self._turns: list[_QueuedCall] = []
        """Calls without room, and those behind them, the next one first."""
        self._numbers = itertools.count()
        self._freed = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Calls without room, and those behind them."""
        return len(self._turns)

    @property
    def waited(self) -> float:
        """Seconds for which the call that came first of them has waited; 0 without one."""
        since = min((turn.since for turn in self._turns), default=None)
        return time.monotonic() - since if since is not None else 0.0

    def notify(self) -> None:
        """Something was freed: try the first call again."""
        self._freed.set()
        self._notify_first()

    async def run(self, call: Callable[[], Awaitable[T]], *, first: bool = False) -> T:
        """``call()``, again until it does not raise :class:`NoRoom`; calls that come meanwhile wait behind it, but for
        those that go ``first``."""
        if not self._turns:
            with contextlib.suppress(NoRoom):
                return await call()
        turn = _QueuedCall(not first, next(self._numbers), time.monotonic())
        bisect.insort(self._turns, turn)
        try:
            while True:
                turn.changed.clear()
                if self._turns[0] is turn:
                    with contextlib.suppress(NoRoom):
                        return await call()
                await wait_event(turn.changed, RETRY_SECONDS)
        finally:
            self._turns.remove(turn)
            self._notify_first()

    def _notify_first(self) -> None:
        for turn in self._turns[:1]:
            turn.changed.set()

    async def retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """The result of ``call`` once there is room, out of order: for calls that free the room for which others
        wait."""
        while True:
            self._freed.clear()
            try:
                return await call()
            except NoRoom:
                await wait_event(self._freed, RETRY_SECONDS)


def _mb(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MB"
