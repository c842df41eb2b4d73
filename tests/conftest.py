"""What many tests need."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import hypothesis
import pytest

import rookery.worker  # before any test imports torch: the worker's own setting of the OpenMP runtime  # noqa: F401
from peers import Service

hypothesis.settings.register_profile("rookery", deadline=None)  # how long an example takes is the machine's affair
hypothesis.settings.load_profile("rookery")


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    """A controller in this process, to which a test brings workers and hosts."""
    service = Service(tmp_path)
    await service.start()
    yield service
    await service.close()
    service.database.close()
