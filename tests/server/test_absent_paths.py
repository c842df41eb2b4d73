"""Paths of OpenAI's API, as the SDK has them, that have no route here."""

from __future__ import annotations

import re
from pathlib import Path

import openai
import pytest
from fastapi.routing import APIRoute
from starlette.routing import compile_path

from rookery.server.absent_paths import ABSENT, absence
from rookery.server.routes import fine_tuning
from rookery.server.routes import openai as chats


def paths_of_the_sdk() -> set[str]:
    """Below ``/v1``, with ``x`` for each parameter. Paths that begin with it are values of arguments."""
    folder = Path(openai.__file__).parent / "resources"
    text = "\n".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    found = {path.partition("?")[0] for path in re.findall(r'"/([a-z_]+[^" ]*)"', text)}
    return {re.sub(r"\{\w+\}", "x", path) for path in found if not path.startswith("v1/")}


PATHS = paths_of_the_sdk()
ROUTES = [route.path for router in (chats.routes, fine_tuning.routes) for route in router.routes
          if isinstance(route, APIRoute)]  # fmt: skip


def test_every_path_of_the_sdk_has_a_route_or_a_reason() -> None:
    assert {"chat/completions", "models/x", "fine_tuning/jobs/x/events", "batches/x/cancel"} <= PATHS
    served = [compile_path(path)[0] for path in ROUTES]
    left = {path for path in PATHS if not any(pattern.match(f"/v1/{path}") for pattern in served)}
    assert {path for path in left if not absence(path)} == {"embeddings"}, "that one has a line in its route"


@pytest.mark.parametrize("beginning", ABSENT)
def test_each_reason_is_of_paths_of_the_sdk(beginning: str) -> None:
    assert any(path == beginning or path.startswith(f"{beginning}/") for path in PATHS)


def test_other_paths_have_no_reason() -> None:
    assert [absence(path) for path in ("", "no/such", "chat", "fine_tuning/others", "response")] == [""] * 5
