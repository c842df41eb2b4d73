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

UNUSED_SECONDS = 600.0
"""A built-in environment that nothing used for so long is dropped: its job has ended, and its rows may be many. One of
a user's is kept: to build it may take minutes."""


@dataclass
class Prototype:
    environment: Environment
    splits: dict[str, PromptDataset]

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
        unused_seconds: float = UNUSED_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``build(name, options)`` makes an environment; ``droppable(name)``: whether it is dropped when nothing has
        used it for ``unused_seconds``."""
        self._make = build
        self._droppable = droppable
        self._most = most
        self._unused_seconds = unused_seconds
        self._clock = clock
        self._kept: dict[_Key, tuple[asyncio.Task[Prototype], float]] = {}
        """Each with the time of its last use, in this order."""

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
        while len(self._kept) > self._most:
            of_tenant = Counter(one.tenant for one in self._kept)
            del self._kept[max(self._kept, key=lambda one: of_tenant[one.tenant])]
        return await asyncio.shield(task)

    async def _build(self, name: str, options: dict[str, Any]) -> Prototype:
        environment = await self._make(name, options)
        return Prototype(environment, {split: PromptDataset(environment, split) for split in ("train", "eval")})

    async def close(self) -> None:
        await cancel_all(*(task for task, _ in self._kept.values()))
