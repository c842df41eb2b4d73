"""Waiting in threads for what happens elsewhere: the one place where such tests sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE_SECONDS = 120.0
"""A test that waits longer for something fails: far more than a loaded machine needs."""

LOOK_SECONDS = 0.02

T = TypeVar("T")


def until(look: Callable[[], T]) -> T:
    """What ``look`` returns as soon as that is true. Fails the test after :data:`PATIENCE_SECONDS`."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := look()):
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(LOOK_SECONDS)
    return found
