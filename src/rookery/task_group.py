"""Task groups whose tasks are cancelled in the order in which they began.

``asyncio.TaskGroup`` cancels in the order of a set, which is that of addresses in memory: two runs of one simulation
would send the same frames in different orders.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator


class _InOrder:
    """As much of a set as a task group uses, in the order of addition."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[object], None] = {}

    def add(self, task: asyncio.Task[object]) -> None:
        self._tasks[task] = None

    def discard(self, task: asyncio.Task[object]) -> None:
        self._tasks.pop(task, None)

    def __iter__(self) -> Iterator[asyncio.Task[object]]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)


class TaskGroup(asyncio.TaskGroup):
    def __init__(self) -> None:
        super().__init__()
        self._tasks = _InOrder()  # type: ignore[assignment]
