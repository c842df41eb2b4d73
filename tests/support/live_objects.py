"""Live Python objects of another process by type: the figures of a leak, which resident memory hides."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
from collections import Counter
from functools import lru_cache
from pathlib import Path
from types import BuiltinMethodType
from weakref import ReferenceType

from cachetools import Cache
from tests.support.waiting import until

from rookery.worker.engine.kv_cache import RetainedSegment

LRU = type(lru_cache(int))

TRANSIENT = (
    "weakref.ReferenceType of type", "builtins.builtin_function_or_method ReferenceType._destroy",
    "asyncio.events.TimerHandle", "_contextvars.Context",
)  # fmt: skip
"""Left out: an abstract class remembers each type that it was asked about, once; a loop keeps cancelled timers until
their time."""

LOOKS = 5
"""The least of so many counts is taken: heartbeats and answers under way come and go."""


def count_on_signal(path: str) -> None:
    """In the observed process: SIGUSR1 writes the counts to ``path``."""
    signal.signal(signal.SIGUSR1, lambda *_: threading.Thread(target=_write, args=(Path(path),)).start())


def _write(path: Path) -> None:
    for one in gc.get_objects():
        if isinstance(one, Cache) and not any(isinstance(kept, RetainedSegment) for kept in one.values()):
            one.clear()  # a cache is bounded by its size; retained segments belong to a store, which frees them
        elif isinstance(one, LRU) and one.cache_info().maxsize is not None:
            one.cache_clear()
    gc.collect()
    counts = Counter(map(_name, gc.get_objects()))
    new = path.with_suffix(".new")
    new.write_text(json.dumps(counts))
    new.rename(path)


def _name(one: object) -> str:
    """Its type, and for a method or a reference what it belongs to."""
    name = f"{type(one).__module__}.{type(one).__qualname__}"
    if isinstance(one, BuiltinMethodType):
        return f"{name} {one.__qualname__}"
    if not isinstance(one, ReferenceType):
        return name
    kind = "type" if isinstance(one(), type) else type(one()).__qualname__
    return f"{name} of {kind}"


def live_objects(pid: int, path: Path) -> Counter[str]:
    """The counts of a process that has called :func:`count_on_signal` with ``path``. Its caches are emptied."""

    def look() -> Counter[str]:
        path.unlink(missing_ok=True)
        os.kill(pid, signal.SIGUSR1)
        until(path.exists, "the process counts its objects")
        return Counter(json.loads(path.read_text()))

    looks = [look() for _ in range(LOOKS)]
    return Counter({name: min(one[name] for one in looks) for name in looks[0] if name not in TRANSIENT})
