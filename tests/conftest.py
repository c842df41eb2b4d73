"""What many tests need, and in which order and beside whom they run."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import pytest
from tests.support.peers import Service
from tests.support.room import Room

import rookery.worker  # before any test imports torch: the worker's own setting of the OpenMP runtime  # noqa: F401

CACHE = Path(os.environ.get("ROOKERY_CACHE", "~/.cache/rookery")).expanduser()
os.environ.setdefault("NUMBA_CACHE_DIR", str(CACHE / "kernels"))  # or every worker of a test would compile its kernels

hypothesis.settings.register_profile("rookery", deadline=None)  # how long an example takes is the machine's affair
hypothesis.settings.load_profile("rookery")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of pytest-timeout: waiting for others does not count
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """No test of another process of the run (``pytest -n``) goes on beside one that is marked ``alone``. What fixtures
    of whole modules have started there stays."""
    assert item.config.cache is not None
    folder = Path(item.config.cache.mkdir("alone"))
    alone = item.get_closest_marker("alone") is not None
    # who wants to be alone keeps the gate shut meanwhile, or the others could run for ever by turns
    with (
        _locked(folder / "gate", fcntl.LOCK_EX) as gate,
        _locked(folder / "running", fcntl.LOCK_EX if alone else fcntl.LOCK_SH),
    ):
        if not alone:
            fcntl.flock(gate, fcntl.LOCK_UN)
        return (yield)


@contextmanager
def _locked(path: Path, how: int) -> Iterator[int]:
    """The file's descriptor."""
    with path.open("w") as file:
        fcntl.flock(file, how)
        try:
            yield file.fileno()
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # also where a forked process still has it open


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    """A controller in this process, to which a test brings workers and hosts."""
    service = Service(tmp_path)
    await service.start()
    yield service
    await service.close()
    service.database.close()


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    """A fleet to which a test brings workers; its watch runs."""
    room = Room(tmp_path)
    watch = asyncio.create_task(room.fleet.watch())
    yield room
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
    await room.close()
