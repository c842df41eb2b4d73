"""The paths that the Tinker SDK requests."""

from __future__ import annotations

import re
from pathlib import Path

import tinker
from fastapi.routing import APIRoute
from starlette.routing import compile_path

from rookery.server.tinker import ROUTERS, UNSUPPORTED


def paths_of_the_sdk() -> set[str]:
    """Below ``/api/v1``, with ``x`` for each parameter."""
    files = (path for path in Path(tinker.__file__).parent.rglob("*.py") if not path.name.endswith("_test.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    found = re.findall(r'"/api/v1/([a-z_]+[^" ]*)"', text)
    return {re.sub(r"\{\w+\}", "x", path.replace("{checkpoint_id}", "weights/x")) for path in found}


def test_every_path_of_the_sdk_has_a_route_or_a_reason() -> None:
    paths = paths_of_the_sdk()
    assert {"retrieve_future", "retrieve_futures", "sessions/x/finish", "training_runs/x/checkpoints"} <= paths
    routes = [route for prefix, router in ROUTERS for route in router.routes if prefix == "/api/v1"]
    served = [compile_path(route.path)[0] for route in routes if isinstance(route, APIRoute)]
    left = {path for path in paths if not any(pattern.match(f"/{path}") for pattern in served)}
    assert {path for path in left if not any(part in path for part in UNSUPPORTED)} == set()
    reasons = {part for part in UNSUPPORTED if any(part in path for path in left)}
    assert UNSUPPORTED.keys() - reasons == {"unload_model"}, "that one is of older versions of the SDK"
