"""Waiting for an event, but not for ever.

Promise: a cancellation that comes in the same moment as the event, or as the end of the time, is never lost.
``asyncio.wait_for`` loses it before Python 3.12, and who was cancelled then waits for ever.
"""

from __future__ import annotations

import asyncio


async def wait_event(event: asyncio.Event, seconds: float) -> bool:
    """Whether ``event`` is set within so many seconds."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return False
    return True
