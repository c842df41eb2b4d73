"""Waiting in threads for what happens elsewhere: the one place where such tests sleep."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, TypeVar
from urllib.request import urlopen

PATIENCE_SECONDS = 120.0
"""A test that waits longer for something fails: far more than a loaded machine needs."""

LOOK_SECONDS = 0.05
"""Between two looks, which may be requests to a service that shares the machine."""

T = TypeVar("T")


def until(
    look: Callable[[], T | None],
    story: str | Callable[[], object] = "it did not come to that",
    *,
    patience: float = PATIENCE_SECONDS,
    pause: float = LOOK_SECONDS,
) -> T:
    """The result of ``look`` as soon as it is true. Fails the test with ``story`` after ``patience`` seconds; it looks
    each ``pause`` seconds."""
    deadline = time.monotonic() + patience
    while not (found := look()):
        assert time.monotonic() < deadline, story() if callable(story) else story
        time.sleep(pause)
    return found


def until_healthy(
    process: subprocess.Popen[Any], url: str, story: Callable[[], str] = str, path: str = "/health"
) -> None:
    """Wait until a ``GET`` of the server is 200. Fails the test with ``story`` if its process ends before."""

    def healthy() -> bool:
        assert process.poll() is None, story()
        try:
            with closing(urlopen(f"{url}{path}")) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    until(healthy)
