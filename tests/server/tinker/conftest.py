"""One service with a real worker on the small model, for the tests of this folder that need no other settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import tinker
from tests.support.tinkered import client, place_model, running

from rookery.server.launcher import EmbeddedService


@pytest.fixture(scope="package")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model in its cache."""
    folder = tmp_path_factory.mktemp("tinker")
    place_model(folder)
    return folder


@pytest.fixture(scope="package")
def service(root: Path) -> Iterator[EmbeddedService]:
    with running(root) as service:
        yield service


@pytest.fixture
def visitor(service: EmbeddedService) -> Iterator[tinker.ServiceClient]:
    with client(service) as visitor:
        yield visitor
