"""The cores and the memory of the machine that this process may use, within the limits of its container.

* A limit is that of the process's control group or of any group above it, of version 1 or 2: a pod's, a systemd
  service's, a batch job's. The kernel ends a process that goes beyond one, whatever the machine has free.
* The file cache of a group counts against its limit but is given back when memory is short, so it counts as free.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

PROC = Path("/proc/self")


class Memory(NamedTuple):
    """Bytes that this process and its siblings may use in all, and that they can still allocate."""

    total: int
    free: int


def cores(proc: Path = PROC) -> int:
    """Cores that this process may keep busy. A part of one counts as a whole: two threads on one and a half cores
    compute more than one thread does."""
    present = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = [share for group in _groups("cpu", proc) if (share := _core_share(group)) is not None]
    return max(1, min([present, *(math.ceil(share) for share in shares)]))


def memory(proc: Path = PROC) -> Memory:
    """Memory of the machine, or what its container leaves of it."""
    machine = psutil.virtual_memory()
    found = Memory(machine.total, machine.available)
    for group in _groups("memory", proc):
        limit = _limit(group)
        if limit is None:
            continue
        used = _number(group / "memory.current", group / "memory.usage_in_bytes") or 0
        figures = _figures(group / "memory.stat")
        cached = figures.get("total_inactive_file", figures.get("inactive_file", 0))
        found = Memory(min(found.total, limit), min(found.free, max(0, limit - max(0, used - cached))))
    return found


def _limit(group: Path) -> int | None:
    """The memory limit of a group in bytes. Beyond ``memory.high`` a process is not ended, but hardly runs."""
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    limits = [limit for name in names if (limit := _number(group / name)) is not None]
    return min(limits, default=None)


def _core_share(group: Path) -> float | None:
    """Cores by the processor time that a group gets in each period."""
    words = _read(group / "cpu.max").split()
    quota, period = words if len(words) == 2 else ("", "")
    if not quota:
        quota, period = _read(group / "cpu.cfs_quota_us").strip(), _read(group / "cpu.cfs_period_us").strip()
    if not quota.isdecimal() or not period.isdecimal() or not int(period):
        return None  # "max", or -1: no limit
    return int(quota) / int(period)


def _groups(controller: str, proc: Path) -> Iterator[Path]:
    """The folders of the process's control groups that limit ``controller``, each before the one above it."""
    paths = {}
    for line in _read(proc / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        paths[controllers if number != "0" else ""] = path
    for line in _read(proc / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, options = after.split()[0], after.split()[-1].split(",")
        root, mounted = (field.encode().decode("unicode_escape") for field in before.split()[3:5])
        if kind == "cgroup2":
            found = paths.get("")
        elif kind == "cgroup" and controller in options:
            found = next((path for names, path in paths.items() if controller in names.split(",")), None)
        else:
            continue
        if found is None:
            continue
        inside = Path(found).is_relative_to(root) and ".." not in found
        here = Path(mounted) / (Path(found).relative_to(root) if inside else "")  # else the mount is this container's
        yield from (folder for folder in (here, *here.parents) if folder.is_relative_to(mounted) and folder.is_dir())


def _number(*files: Path) -> int | None:
    """The number in the first of these files that is there and has one."""
    return next((int(text) for file in files if (text := _read(file).strip()).isdecimal()), None)


def _figures(file: Path) -> Mapping[str, int]:
    lines = (line.split() for line in _read(file).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) == 2 and words[1].isdecimal()}


def _read(file: Path) -> str:
    """The text of a file of the kernel; empty where it is not there or may not be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
