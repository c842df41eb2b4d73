"""Which memory allocator a worker process runs with.

A compute step asks for hundreds of tensors and gives them back. The C library's allocator hands the blocks of a heap
out in turn, so that a worker that has run for a while computes in memory that no cache holds; tcmalloc hands out what
was given back last. Measured with two cores on the 135M model: a decode step of 64 rows 67 to 72 ms with the one, 60 to
63 with the other; a job on a worker that had served 32 tenants before, 18.5 and 15.1 s of compute, where a new worker
needs 16.5 with either. An allocator must be there before the process, hence in its environment; no Python package
brings one.
"""

from __future__ import annotations

from collections.abc import Mapping
from ctypes.util import find_library

PRELOAD = "LD_PRELOAD"


def preloaded(environment: Mapping[str, str], name: str) -> dict[str, str]:
    """``environment`` for a process that runs with the library ``name`` (as a linker names it), if this machine has it;
    nothing changes with an empty name, or where one (tcmalloc, jemalloc, mimalloc) is chosen already."""
    before = environment.get(PRELOAD, "")
    if not name or "malloc" in before:
        return dict(environment)
    found = find_library(name)
    return {**environment, PRELOAD: f"{found} {before}".strip()} if found else dict(environment)
