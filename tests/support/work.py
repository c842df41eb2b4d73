"""Counts of work, which no other process on the machine changes."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any


async def work_of(action: Callable[[], Awaitable[object]], *parts: str) -> int:
    """The bytecode instructions that the package's files with one of these ``parts`` of a path execute meanwhile."""
    count = 0

    def traced(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not any(f"rookery/{part}" in frame.f_code.co_filename for part in parts):
            return None
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return traced

    before = sys.gettrace()
    sys.settrace(traced)
    try:
        await action()
    finally:
        sys.settrace(before)
    return count
