"""The whole flow with the oldest and the newest supported version of the Tinker SDK, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.tinkered import MODEL

from rookery.server.launcher import EmbeddedService
from rookery.server.tinker.protobuf import OLDEST, older_than_supported, supported

SDKS = Path(sys.prefix) / "sdks"
"""Versions beside the installed one, a folder each; ``make`` puts them there."""

FLOW = Path(__file__).parent / "sdk_flow.py"
PATIENCE = 240


def flow(service: EmbeddedService, *first: Path) -> dict[str, Any]:
    """The results of a client with the SDK found ``first``, or with the installed one."""
    folders = os.pathsep.join([*map(str, first), os.environ.get("PYTHONPATH", "")])
    more = {"PYTHONPATH": folders, "PYTHONWARNINGS": "ignore", "TINKER_TELEMETRY": "0"}
    asked = [sys.executable, str(FLOW), f"{service.url}/tinker", service.key, MODEL]
    done = subprocess.run(asked, env=os.environ | more, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def newest(service: EmbeddedService) -> dict[str, Any]:
    return flow(service)


def test_the_newest_sdk(newest: dict[str, Any]) -> None:
    assert newest["models"] and newest["named texts"] and newest["refused"] and newest["archive"]
    assert newest["rank"] == 4 and newest["many"][0] == 1100
    assert newest["resumed"] == newest["loaded"]
    assert (newest["listed"], newest["left"]) == (["sampler_weights/named", "weights/state"], ["weights/state"])
    assert len(newest["losses"]) == 6 and newest["losses"][2] < newest["losses"][0]


@pytest.mark.parametrize("version", sorted({OLDEST, *(path.name for path in SDKS.glob("*"))}))
def test_other_versions_get_the_same(service: EmbeddedService, newest: dict[str, Any], version: str) -> None:
    if not (SDKS / version).exists():
        pytest.skip(f"SDK {version} is not here: make {SDKS.relative_to(Path(sys.prefix).parent)}/{version}")
    assert supported(version)
    found = flow(service, SDKS / version)
    assert found.keys() == newest.keys()
    for name, value in newest.items():
        mine, others = leaves(value), leaves(found[name])
        numbers = all(isinstance(leaf, float) for leaf in mine)
        assert others == (pytest.approx(mine, rel=1e-4) if numbers else mine), name


def leaves(value: Any) -> list[Any]:
    """Numbers and whatever else, without the lists around them."""
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list) else [value]


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.22.3", True), ("0.25.0", True), ("0.37.9", True), ("0.38.0", False), ("0.38.1", False), ("1.0.0", False),
     ("", False), ("nonsense", False), ("0", False), ("0.9", True)],
)  # fmt: skip
def test_versions_that_are_older_than_the_supported_one(version: str, expected: bool) -> None:
    assert older_than_supported(version) is expected


@pytest.mark.parametrize(
    ("version", "expected"),
    [("0.22.3", True), ("0.38.0", True), ("0.38.9", True), ("0.30.4", True), ("0.22.2", False), ("0.39.0", False),
     ("1.0", False), ("0.9.0", False), ("", False), ("0.38.0rc1", False)],
)  # fmt: skip
def test_the_supported_range(version: str, expected: bool) -> None:
    assert supported(version) is expected
