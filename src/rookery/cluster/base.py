"""The shared part of all clusters: the protocol, and the processes' environments and names.

Tokens are passed in the environment, where other users of the machine cannot read them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from ctypes.util import find_library
from functools import cache
from typing import Protocol

from rookery.cluster.supervisor import Child
from rookery.settings import MAY_BE_EMPTY, TOKEN_VARIABLE, Settings

PRELOAD = "LD_PRELOAD"

SCALED = "-rollout-"
"""Precedes the number in the names of workers that are started and ended by the load."""

DRAINS = 2.5
"""Times ``drain_seconds`` that a worker has when it is not wanted any more: for its drain, which takes up to that, and
then for its end on a busy machine."""

_PRIVATE = {"key", "database"}
"""Settings that children do not need and that may contain secrets."""


class Cluster(Protocol):
    """Starts the workers of a service, which then connect to it by themselves."""

    async def start(self) -> None:
        """Start the workers of the service's base models, and the host of the built-in environments. Workers that do
        not work are reported to whoever made this, by model, with the reason."""

    def provide(self, model: str) -> None:
        """Make sure that there are workers for ``model``; called when a job names it."""

    def release(self, model: str) -> None:
        """End the workers that :meth:`provide` started for ``model``; called when nothing has used it for a while."""

    def scale(self, model: str, count: int, serving: Iterable[str]) -> None:
        """Have ``count`` rollout workers for ``model``, and at least its other workers, which have that role, too.
        Workers of the names ``serving`` serve it now, also those that others started."""

    async def stop(self) -> None:
        """End every process that was started."""


def preloaded(environment: Mapping[str, str], name: str) -> dict[str, str]:
    """``environment`` for a process that loads the allocator library ``name`` (as a linker names it) if this machine
    has it. It is unchanged when the name is empty, or when an allocator (tcmalloc, jemalloc, mimalloc) is already
    chosen.

    A training or decode step allocates hundreds of tensors and frees them. The C library's allocator reuses the blocks
    of a heap in turn, so a worker that has run for a while computes in memory that no cache holds; tcmalloc reuses the
    most recently freed block. Measured with two cores on the 135M model: a decode step of 64 rows takes 67 to 72 ms
    with the C library's allocator and 60 to 63 ms with tcmalloc; a job on a worker that had served 32 tenants before
    takes 18.5 and 15.1 s of compute, on a fresh worker 16.5 s with either. The allocator is chosen by the process
    environment; no Python package provides one.
    """
    before = environment.get(PRELOAD, "")
    if not name or "malloc" in before:
        return dict(environment)
    found = _library(name)
    return {**environment, PRELOAD: f"{found} {before}".strip()} if found else dict(environment)


@cache
def _library(name: str) -> str | None:
    """The file of a library on this machine; finding it starts processes."""
    return find_library(name)


def environment_host(settings: Settings, url: str, token: str) -> Child:
    """The process that runs the built-in environments."""
    arguments = ["rookery.environments.host", "--connect", url, "--die-with-parent"]
    return Child("environments", arguments, child_environment(settings, token))


def child_environment(settings: Settings, token: str, inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The child's environment: the settings of this process, except those that it must not have."""
    values = settings.flat()
    names = {f"ROOKERY_{name.upper()}" for name in values}
    others = {name: value for name, value in inherited.items() if name not in names}
    given = {
        f"ROOKERY_{name.upper()}": str(value)
        for name, value in values.items()
        if name not in _PRIVATE and (value != "" or name in MAY_BE_EMPTY)
    }
    return others | given | {TOKEN_VARIABLE: token}


def file_name(model: str) -> str:
    """A model's name as part of a file name; of a path, its last part."""
    return re.sub(r"[^\w.-]+", "-", model.rstrip("/").rsplit("/", 1)[-1])
