"""Processes that live no longer than the one that started them.

Promise: however that one ends, ``kill -9`` included, its end is noticed, since the kernel closes what it held open.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable


def die_with_parent(end: Callable[[], None]) -> None:
    """Call ``end`` when standard input is at its end: the other end is held by the process that started this one."""

    def watch() -> None:
        with contextlib.suppress(OSError):  # closed from the start: there is no parent to live for
            while os.read(0, 4096):
                pass
        end()

    threading.Thread(target=watch, name="parent", daemon=True).start()
