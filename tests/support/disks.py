"""Disks that are full, read-only or small."""

from __future__ import annotations

import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from tests.support.waiting import until


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """Within, no file that this process writes grows beyond ``most`` bytes: a later write fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def mounted(folder: Path, megabytes: int = 64) -> Iterator[None]:
    """A separate disk at ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ["-t", "tmpfs", "-o", f"size={megabytes}m,mode=755", "none"]
    made = subprocess.run(["mount", *options, str(folder)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"this machine mounts nothing: {made.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def make_read_only(disk: Path) -> Callable[[], object]:
    """As soon as no file is open for writing there."""
    until(lambda: subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True).returncode == 0, "busy")
    return lambda: subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


def fill(disk: Path) -> Callable[[], object]:
    """To the last byte, also what its owner frees meanwhile."""
    filler, full = disk / "filler", threading.Event()

    def write() -> None:
        with filler.open("wb", buffering=0) as file:
            while not full.wait(0.01):
                with suppress(OSError):
                    while True:
                        file.write(bytes(4096))

    writer = threading.Thread(target=write)
    writer.start()
    return lambda: (full.set(), writer.join(), filler.unlink())
