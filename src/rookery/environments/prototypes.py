"""The environments that a host keeps built, of which episodes are copies, with their prompts. Each belongs to one
tenant: its processes, its threads' locks and its rows serve nobody else's episodes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from rookery import protocol
from rookery.aio import cancel_all
from rookery.environments.base import Environment
from rookery.environments.datasets import PromptDataset, repeated_note
from rookery.environments.reasoning_gym import ReasoningGym
from rookery.turns import TENANT

MAX_PROTOTYPES = 256
"""Environments kept built, one per tenant, name and options in use. Beyond that, of the tenant that has the most, the
one unused longest is dropped, and built again when needed."""

MOST_BYTES = 512 << 20
"""Memory of the built-in environments that are kept: their process serves all tenants, and each job, and each dry run,
may name a dataset of millions of rows. Beyond that, of the tenant that takes the most, the one unused longest is
dropped."""

OPTION_BYTES = 10
"""Memory of a byte of options, itself and the objects made of it: inline rows of 35 bytes take 8.9 times their size,
of a thousand bytes 2.3 times."""

WEIGH_SECONDS = 1.0
"""Between two looks at the memory of all of them, unless one is built: splits take more as they are read, and every
episode asks for its environment."""

UNUSED_SECONDS = 600.0
"""A built-in environment that nothing used for so long is dropped: its job has ended, and its rows may be many. One of
a user's is kept: to build it may take minutes."""


@dataclass
class Prototype:
    environment: Environment
    splits: dict[str, PromptDataset]

    @property
    def nbytes(self) -> int:
        """Memory of the splits."""
        return sum(dataset.nbytes for dataset in self.splits.values())

    def take(self, message: protocol.GetPrompts) -> tuple[list[bytes], int, str]:
        """Prompts as JSON, the split's size, and a note about the split with its first ones. Runs a user's code."""
        dataset, held_out = self.splits[message.split], message.split == "eval"
        wrap = not held_out and not message.constant
        prompts, size = dataset.take(message.start, message.count, message.seed, message.shuffle, wrap=wrap)
        note = ""
        if message.start == 0 and not message.constant:
            if isinstance(self.environment, ReasoningGym):
                note = self.environment.note(message.split)
            elif held_out:
                with contextlib.suppress(Exception):  # of the training split: its own call reports it
                    note = repeated_note(self.splits["train"], dataset)
        return prompts, size, note


class _Key(NamedTuple):
    tenant: str
    name: str
    options: bytes


class Prototypes:
    """Belongs to the event loop of its host."""

    def __init__(
        self,
        build: Callable[[str, dict[str, Any]], Awaitable[Environment]],
        droppable: Callable[[str], bool],
        most: int = MAX_PROTOTYPES,
        most_bytes: int = MOST_BYTES,
        unused_seconds: float = UNUSED_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``build(name, options)`` makes an environment; ``droppable(name)``: whether it is dropped when nothing has
        used it for ``unused_seconds``, and counts towards ``most_bytes``."""
        self._make = build
        self._droppable = droppable
        self._most = most
        self._most_bytes = most_bytes
        self._unused_seconds = unused_seconds
        self._clock = clock
        self._kept: dict[_Key, tuple[asyncio.Task[Prototype], float]] = {}
        """Each with the time of its last use, in this order."""
        self._weighed_at = clock()

    async def get(self, name: str, options: dict[str, Any]) -> Prototype:
        """The environment of the current tenant with these options, built if it is not kept. Raises the error of
        building it."""
        key = _Key(TENANT.get(), name, msgspec.msgpack.encode(options, order="deterministic"))
        task, _ = self._kept.pop(key, (None, 0.0))
        if task is None or (task.done() and task.exception() is not None):
            task = asyncio.create_task(self._build(name, options))
        now = self._clock()
        self._kept[key] = task, now
        for one, (_, used) in list(self._kept.items()):
            if now - used > self._unused_seconds and self._droppable(one.name):
                del self._kept[one]
        if len(self._kept) > self._most:
            self._drop(dict.fromkeys(self._kept, 1), self._most, key)
        new = not task.done()
        prototype = await asyncio.shield(task)
        if new or now - self._weighed_at > WEIGH_SECONDS:
            self._weighed_at = now
            droppable = [(one, task) for one, (task, _) in self._kept.items() if self._droppable(one.name)]
            self._drop({one: self._bytes(one, task) for one, task in droppable}, self._most_bytes, key)
        return prototype

    def _drop(self, sizes: dict[_Key, int], most: int, used: _Key) -> None:
        """Drop environments until the ``sizes`` of those left sum to at most ``most``: of the tenant that has the most,
        the one unused longest; never the one that is ``used`` now."""
        total, of_tenant = sum(sizes.values()), Counter[str]()
        for key, size in sizes.items():
            of_tenant[key.tenant] += size
        sizes.pop(used, None)
        while total > most and sizes:
            first = max(sizes, key=lambda one: of_tenant[one.tenant])
            size = sizes.pop(first)
            total -= size
            of_tenant[first.tenant] -= size
            del self._kept[first]

    @staticmethod
    def _bytes(key: _Key, task: asyncio.Task[Prototype]) -> int:
        built = task.done() and not task.cancelled() and task.exception() is None
        return OPTION_BYTES * len(key.options) + (task.result().nbytes if built else 0)

    async def _build(self, name: str, options: dict[str, Any]) -> Prototype:
        environment = await self._make(name, options)
        return Prototype(environment, {split: PromptDataset(environment, split) for split in ("train", "eval")})

    async def close(self) -> None:
        await cancel_all(*(task for task, _ in self._kept.values()))
