"""Cores and memory of a process by the files of its control groups, and in a real group with a limit."""

from __future__ import annotations

import math
import os
import secrets
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rookery import machine

GB = 1 << 30
CHILD = "from rookery import machine; print(machine.cores(), *machine.memory())"


def process(folder: Path, cgroup: str, *mounts: str) -> Path:
    """A process's folder of ``/proc``: its groups, and the mounts as (root, folder, kind, options)."""
    proc = folder / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(cgroup)
    lines = ("31 23 0:28 {} {} rw,nosuid shared:9 - {} {} {}".format(*mount.split()) for mount in mounts)
    (proc / "mountinfo").write_text("\n".join(["22 1 8:1 / / rw - ext4 /dev/sda1 rw", *lines]))
    return proc


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


LIMITED = {"memory__max": str(GB), "memory__current": str(GB // 2), "memory__stat": f"anon 1\ninactive_file {GB // 4}"}


@pytest.mark.parametrize(
    "path, root, limited, free",
    [
        ("/", "/", "", GB * 3 // 4),  # a container sees its own group as the root
        ("/pods/a/b", "/", "pods/a/b", GB * 3 // 4),
        ("/pods/a/b", "/", "pods/a", GB * 3 // 4),  # the limit of a group above counts
        ("/docker/abc", "/docker/abc", "", GB * 3 // 4),
        ("/../other", "/", "", GB * 3 // 4),
        ("/pods/a/b", "/", "pods/c", None),
        ("/docker/abcd", "/docker/abc", "d", None),
    ],
)
def test_memory_by_groups_of_version_2(tmp_path: Path, path: str, root: str, limited: str, free: int | None) -> None:
    mounted = tmp_path / "fs"
    group(mounted / "pods/a/b", memory__max="max")
    group(mounted / limited, **LIMITED)
    proc = process(tmp_path, f"0::{path}\n", f"{root} {mounted} cgroup2 cgroup2 rw")
    found = machine.memory(proc)
    if free is None:
        assert found.total == psutil.virtual_memory().total
    else:
        assert found == (GB, free)


def test_memory_by_groups_of_version_1(tmp_path: Path) -> None:
    mounted = tmp_path / "memory"
    none = {"memory__limit_in_bytes": "9223372036854771712", "memory__usage_in_bytes": str(5 * GB)}
    limit = {"memory__limit_in_bytes": str(2 * GB), "memory__usage_in_bytes": str(GB)}
    group(mounted, **none)
    group(mounted / "batch", **limit, memory__stat=f"inactive_file 1\ntotal_inactive_file {GB // 2}")
    group(mounted / "batch/step", **none)
    groups = "4:memory:/batch/step\n2:cpu,cpuacct:/\n0::/\n"
    proc = process(
        tmp_path, groups, f"/ {mounted} cgroup cgroup rw,memory", f"/ {tmp_path / 'cpu'} cgroup cgroup rw,cpu"
    )
    assert machine.memory(proc) == (2 * GB, GB * 3 // 2)


@pytest.mark.parametrize(
    "files, share",
    [
        ({"cpu__max": "max 100000"}, None),
        ({"cpu__max": "50000 100000"}, 0.5),
        ({"cpu__max": "100000 100000"}, 1.0),
        ({"cpu__max": "6400000 100000"}, 64.0),
        ({"cpu__cfs_quota_us": "-1", "cpu__cfs_period_us": "100000"}, None),
        ({"cpu__cfs_quota_us": "150000", "cpu__cfs_period_us": "100000"}, 1.5),
        ({}, None),
    ],
)
def test_cores_by_the_time_that_a_group_gets(tmp_path: Path, files: dict[str, str], share: float | None) -> None:
    mounted = tmp_path / "fs"
    group(mounted, **files)
    proc = process(
        tmp_path, "2:cpu,cpuacct:/\n0::/\n", f"/ {mounted} {'cgroup2' if 'cpu__max' in files else 'cgroup'} x rw,cpu"
    )
    present = len(os.sched_getaffinity(0))
    assert machine.cores(proc) == (present if share is None else min(present, math.ceil(share)))


@pytest.mark.parametrize("missing", ["cgroup", "mountinfo"])
def test_a_system_without_groups_has_all_of_the_machine(tmp_path: Path, missing: str) -> None:
    proc = process(tmp_path, "0::/\n")
    (proc / missing).unlink()
    assert machine.memory(proc).total == psutil.virtual_memory().total
    assert machine.cores(proc) == len(os.sched_getaffinity(0))


V1 = Path("/sys/fs/cgroup/memory")


@pytest.mark.skipif(not os.access(V1, os.W_OK), reason="needs root and control groups of version 1")
def test_a_process_in_a_real_group_sees_its_limits() -> None:
    name = f"rookery-{secrets.token_hex(4)}"
    memory, processor = V1 / name, V1.parent / "cpu" / name
    try:
        memory.mkdir(), processor.mkdir()
        (memory / "memory.limit_in_bytes").write_text(str(GB))
        (processor / "cpu.cfs_quota_us").write_text("100000")
        enter = f'echo $$ > {memory}/cgroup.procs; echo $$ > {processor}/cgroup.procs; exec "$@"'
        command = ["sh", "-c", enter, "sh", sys.executable, "-c", CHILD]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        cores, total, free = map(int, done.stdout.split())
        assert cores == 1 and total == GB and 0 < free < GB
    finally:
        memory.rmdir(), processor.rmdir()
