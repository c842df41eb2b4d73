"""A machine whose clock is hours wrong gets the same results: only the service's time counts."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.faces import MODEL, ThreadedWorker, job, served
from tests.support.waiting import until

from rookery.client import Client
from rookery.server.launcher import EmbeddedService

HOURS = 2 * 3600.0
SOURCE = Path(__file__).parents[2] / "src/rookery"

WALL_CLOCK = {
    "clock.py": "the service's clock",
    "client/connection.py": "before the service's first response",
    "telemetry/metrics.py": "the time of a row in a file of this machine",
    "tokenization/chat.py": "the date that a model's template shows",
}
"""The files that read the wall clock, and why. Others pass the service's times along, or measure with the monotonic
clock."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedService]:
    with served(tmp_path_factory.mktemp("clocks")) as running, ThreadedWorker.of(running):
        yield running


def skewed(ahead: float, code: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process whose wall clock is ahead of the service's by so many seconds."""
    skew = f"import time; present = time.time; time.time = lambda: present() + {ahead}"
    command = [sys.executable, "-c", f"{skew}\n{code}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)


@pytest.mark.parametrize("ahead", [-HOURS, 0.0, HOURS])
def test_a_trace_of_the_last_minutes_ends_at_the_services_present(
    service: EmbeddedService, ahead: float, tmp_path: Path
) -> None:
    with Client(service.url, service.key) as client:
        client.submit(job(name="traced")).wait()
    code = "import sys; from rookery.cli import main; main(sys.argv[1:])"
    given = ("--url", service.url, "--key", service.key)
    for last in ("5m", "999999d"):
        done = skewed(ahead, code, "trace", "x.json", "--job", "traced", "--last", last, *given, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        found = json.loads((tmp_path / "x.json").read_text())["traceEvents"]
        assert any(event["ph"] == "X" for event in found), found


def test_a_trace_has_only_the_seconds_that_were_asked_for(service: EmbeddedService, tmp_path: Path) -> None:
    with Client(service.url, service.key) as client:
        ended = client.submit(job(name="shown")).wait()
        about = client.job("shown")

        def spans(**times: Any) -> int:
            events = json.loads(about.trace(tmp_path / "x.json", **times).read_text())["traceEvents"]
            return sum(event["ph"] == "X" for event in events)

        assert spans(seconds=600) == spans() > 0
        assert spans(end=ended.created - HOURS, seconds=60) == 0 < spans(end=ended.finished + 1, seconds=600)


TRAIN = """
import sys, rookery
from rookery.client import client as limits

class Adder(rookery.Environment):
    def prompts(self, split):
        return [{"a": 1}]
    def reset(self, prompt, seed):
        return [{"role": "user", "content": "?"}]
    def step(self, reply):
        return rookery.Step(reward=1.0, done=True)

limits.START_SECONDS = float(sys.argv[3])
with rookery.Client(sys.argv[1], sys.argv[2]) as client:
    job = client.train(base_model=sys.argv[4], environment=Adder, name="left", stop={"steps": 2})
    print(job.id)
"""


@pytest.mark.parametrize(("ahead", "start", "continues"), [(HOURS, 600.0, False), (-HOURS, -60.0, True)])
def test_the_age_of_a_job_that_was_left_is_that_at_the_service(
    ahead: float, start: float, continues: bool, tmp_path: Path
) -> None:
    """The service has no worker, so nothing of the job was sampled. Its program may be about to host its environment
    for so many seconds from its ``start``; -60 because responses tell the service's time a second late, and later where
    the machine is busy."""
    with served(tmp_path) as service, Client(service.url, service.key) as client:
        begun = skewed(0.0, TRAIN, service.url, service.key, "0", MODEL, folder=tmp_path).stdout.strip()
        until(lambda: client.job(begun).show().hosted is False, "the service did not notice the program's end")
        done = skewed(ahead, TRAIN, service.url, service.key, str(start), MODEL, folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert (done.stdout.strip() == begun) is continues


def test_only_the_service_and_clocks_of_one_machine_read_the_wall_clock() -> None:
    found = {}
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in (
                "time.time",
                "datetime.now",
                "datetime.utcnow",
            ):
                found[path.relative_to(SOURCE).as_posix()] = node.lineno
    assert found.keys() == WALL_CLOCK.keys(), found
