"""A service that runs out of file descriptors or memory, or whose disk takes no more: what asked for them waits, and
goes on by itself when they are back. The service is a process of its own, whose limits the tests change while it runs.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.support.faces import ScriptedWorker, job, tokenizer, write_model


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A running service and its administrator."""
    write_model(tmp_path / "cache")
    settings = {"DATA": str(tmp_path / "data"), "CACHE": str(tmp_path / "cache"), "HEARTBEAT_SECONDS": "0.2"}
    environment = {**os.environ, **{f"ROOKERY_{name}": value for name, value in settings.items()}}
    command = [sys.executable, "-m", "rookery.cli", "serve", "--port", "0", "--models", "", "--workers", "0"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as served:
        assert served.stderr is not None
        url = next(line for line in served.stderr if "serves at" in line).split("serves at ")[1].split(" ")[0]
        key = (tmp_path / "data" / "admin.key").read_text().strip()
        with httpx.Client(base_url=url, headers={"X-API-Key": key}, timeout=60) as client:
            yield served, client
        served.terminate()
        served.communicate(timeout=60)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.heavy
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="changing another process's limits is Linux's")
@pytest.mark.parametrize(
    ("kind", "limit"),
    [(resource.RLIMIT_NOFILE, lambda pid: descriptors(pid) + 1), (resource.RLIMIT_FSIZE, lambda pid: 4096)],
    ids=["descriptors", "disk"],
)
def test_job_waits_for_what_has_run_out_and_goes_on_by_itself(
    process: tuple[subprocess.Popen[str], httpx.Client], tmp_path: Path, kind: int, limit: Callable[[int], int]
) -> None:
    served, client = process
    url, token = str(client.base_url), (tmp_path / "data" / "worker.token").read_text().strip()

    def view() -> dict[str, Any]:
        answer = client.get(f"/api/v1/jobs/{id}")
        assert answer.status_code in (200, 503, 507), answer.text
        return answer.json() if answer.status_code == 200 else {"state": "?", "step": 0}

    with ScriptedWorker(url.rstrip("/"), token, tokenizer(tmp_path)):
        made = client.post("/api/v1/jobs", json=job(stop={"steps": 100_000}))
        assert made.status_code == 201, made.text
        id = made.json()["id"]
        while view()["step"] < 2:
            time.sleep(0.05)
        before = resource.prlimit(served.pid, kind)
        resource.prlimit(served.pid, kind, (limit(served.pid), before[1]))
        time.sleep(3)
        short = view()
        resource.prlimit(served.pid, kind, before)
        assert short["state"] in ("paused", "?"), short
        while (now := view())["step"] <= max(short["step"], 2) or now["state"] != "running":
            assert now["state"] != "failed", now
            time.sleep(0.1)


@pytest.mark.heavy
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="changing another process's limits is Linux's")
def test_requests_that_find_no_memory_fail_alone(
    process: tuple[subprocess.Popen[str], httpx.Client], tmp_path: Path
) -> None:
    """With a few megabytes left, large requests are refused, and another tenant's job goes on, at the latest when the
    memory is back."""
    served, client = process
    url, token = str(client.base_url).rstrip("/"), (tmp_path / "data" / "worker.token").read_text().strip()
    tenant = client.post("/api/v1/tenants", json={"name": "greedy"}).json()["id"]
    key = client.post(f"/api/v1/tenants/{tenant}/keys", json={}).json()["key"]
    rows = [{"prompt": "x" * 1000, "answer": ""}] * 12_000
    large = json.dumps(job(environment={"id": "jsonl", "rows": rows, "verifier": "exact"})).encode()

    def view() -> dict[str, Any]:
        answer = client.get(f"/api/v1/jobs/{id}")
        return answer.json() if answer.status_code == 200 else {"state": "?", "step": 0}

    headers = {"X-API-Key": key, "Content-Type": "application/json"}

    def ask() -> int:
        """The status of the answer; 0 where the connection was closed."""
        try:
            return httpx.post(f"{url}/api/v1/jobs/dry-run", headers=headers, content=large, timeout=60).status_code
        except httpx.TransportError:
            return 0

    with ScriptedWorker(url, token, tokenizer(tmp_path)):
        id = client.post("/api/v1/jobs", json=job(stop={"steps": 100_000})).json()["id"]
        while view()["step"] < 2:
            time.sleep(0.05)
        before = resource.prlimit(served.pid, resource.RLIMIT_AS)
        held = int(Path(f"/proc/{served.pid}/statm").read_text().split()[0]) * resource.getpagesize()
        answers: Counter[int] = Counter()
        for left in (32 << 20, 16 << 20, 8 << 20):  # enough to receive a request, but not to read it; or not even that
            resource.prlimit(served.pid, resource.RLIMIT_AS, (held + left, before[1]))
            answers.update(ask() for _ in range(5))
            assert served.poll() is None
        resource.prlimit(served.pid, resource.RLIMIT_AS, before)
        assert answers[200] < answers.total(), answers  # the rest was refused, by whichever part found no memory
        short = view()
        while (now := view())["step"] <= max(short["step"], 2) or now["state"] != "running":
            assert now["state"] != "failed", now
            time.sleep(0.1)
        assert ask() == 200
