"""Something changed: a wake-up for any number of waiters, without a lost one.

Take ``next`` before looking at what may change, look, then wait on what was taken.
"""

from __future__ import annotations

import asyncio


class Signal:
    def __init__(self) -> None:
        self._event = asyncio.Event()

    @property
    def next(self) -> asyncio.Event:
        """Set at the next beat after it was taken."""
        return self._event

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()
