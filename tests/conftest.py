"""Fixtures of many tests."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Generator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest
from tests.support.draws import MORE, USUAL, examples, seed_everything
from tests.support.peers import Service
from tests.support.room import Room

import rookery.worker  # before any test imports torch: the worker's own setting of the OpenMP runtime  # noqa: F401
from rookery.aio import cancel_all

if TYPE_CHECKING:
    from tests.support.faces import Reach

    from rookery.server.launcher import EmbeddedService

if "PYTEST_XDIST_WORKER" in os.environ:  # such processes share the cores: their threads would wait for each other's
    os.environ.setdefault("OMP_NUM_THREADS", "1")

CACHE = Path(os.environ.get("ROOKERY_CACHE", "~/.cache/rookery")).expanduser()
os.environ.setdefault("NUMBA_CACHE_DIR", str(CACHE / "kernels"))  # or every worker of a test would compile its kernels

hypothesis.settings.register_profile(  # how long an example takes, or its inputs, depends on the machine
    "rookery", deadline=None, database=None, derandomize=not MORE, max_examples=examples(USUAL), print_blob=bool(MORE),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)  # fmt: skip
hypothesis.settings.load_profile("rookery")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing is garbage while the tests and what they import come into memory."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """The garbage collector leaves out the modules and the tests that are there now: a full collection would look at
    some million objects, and tests collect hundreds of times."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """No test depends on a fresh draw, or on the tests before it."""
    seed_everything()


@pytest.fixture
def reach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Reach:
    """Commands and clients of the test reach a service by its variables, from an empty working directory."""

    def reached(service: EmbeddedService) -> None:
        monkeypatch.setenv("ROOKERY_URL", service.url)
        monkeypatch.setenv("ROOKERY_KEY", service.key)
        monkeypatch.chdir(tmp_path)

    return reached


@pytest.fixture
def s3_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables with which a client of S3 signs."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")


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
    await cancel_all(watch)
    await room.close()
