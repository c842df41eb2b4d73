"""The examples of README and docs learn on the real model: ``make test-examples``, about ten minutes."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from tests.support.faces import Reach

from rookery.client import Client
from rookery.server.launcher import EmbeddedService
from rookery.settings import Settings
from rookery.spec.files import read_job

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[1]

STANDARD_ERRORS = 2.0
"""A gain beyond this many standard errors counts as learning."""


def check_learned(client: Client, best_constant: float | None) -> None:
    """The last version beats version 0 and, if given, the best constant answer on the same held-out prompts."""
    (job,) = client.jobs()
    first, *_, last = job.evaluations()
    print(f"{job.show().name}: {first.mean:.3f} -> {last.mean:.3f} +/- {last.stderr:.3f}, constant {best_constant}")
    assert last.mean - first.mean > STANDARD_ERRORS * (last.stderr**2 + first.stderr**2) ** 0.5
    if best_constant is not None:
        assert last.mean - best_constant > STANDARD_ERRORS * last.stderr


@pytest.fixture
def client(tmp_path: Path, reach: Reach) -> Any:
    """A client of a service with one local worker for the real model."""
    settings = Settings.load({}, data=tmp_path / "data", port=0)
    with EmbeddedService(settings) as service:
        reach(service)
        with Client() as client:
            yield client


def test_a_task_of_the_user_learns(client: Client) -> None:
    runpy.run_path(str(ROOT / "examples" / "own_task.py"), run_name="__main__")
    check_learned(client, best_constant=0.16)


def test_agent_on_the_openai_client_learns(client: Client) -> None:
    runpy.run_path(str(ROOT / "examples" / "agent_phone_book.py"), run_name="__main__")
    check_learned(client, best_constant=0.1)


def test_sums_learns(client: Client) -> None:
    file = ROOT / "examples" / "sums.yaml"
    client.submit(read_job(file), folder=file.parent).wait()
    check_learned(client, best_constant=0.16)


def test_all_parameters_learn(client: Client) -> None:
    file = ROOT / "examples" / "full_parameter.yaml"
    client.submit(read_job(file), folder=file.parent).wait()
    check_learned(client, best_constant=0.37)


def test_example_of_the_environments_page_learns_the_form_of_a_reply(client: Client) -> None:
    """A model of 135M parameters learns to reply with a number, not to search: the best constant answer earns more."""
    page = (ROOT / "docs" / "environments.md").read_text(encoding="utf-8")
    example = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    exec(compile(example, "docs/environments.md", "exec"), {"__name__": "example"})
    check_learned(client, best_constant=None)
