"""A service that runs out of file descriptors or memory, or whose disk takes no more: what asked for them waits, and
goes on by itself when they are back. The service is a process of its own, whose limits the tests change while it runs.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from tests.support import waiting
from tests.support.faces import ThreadedWorker, job, tokenizer, write_model

from rookery.client import Client, Job
from rookery.errors import StorageFull, Unavailable
from rookery.server.connections import Connections

LEFT = (64, 48, 32, 24, 16, 12, 8)
"""Megabytes of address space beside those that the service has: enough to read a request, to receive one but not to
read it, or not even that. (With less, libraries in Rust find no memory for a few bytes, and end the process.)"""

MALLOC = {f"MALLOC_{name}": value for name, value in [("ARENA_MAX", "1"), ("MMAP_THRESHOLD_", "131072")]}
"""A large block is mapped separately and returned when freed. By default the C library keeps 64 MB of address space for
each of some threads, in which all of these requests may find room, however low the limit is."""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    """A running service and its administrator."""
    write_model(tmp_path / "cache")
    settings = {
        "DATA": str(tmp_path / "data"), "CACHE": str(tmp_path / "cache"), "HEARTBEAT_SECONDS": "0.2",
        "OUTAGE_RETRY_SECONDS": "1",
        "JSON_BYTES": str(32 << 20),  # a request that needs much memory is let in
    }  # fmt: skip
    environment = {**os.environ, **MALLOC, **{f"ROOKERY_{name}": value for name, value in settings.items()}}
    command = [sys.executable, "-m", "rookery.cli", "serve", "--port", "0", "--models", "", "--workers", "0"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as served:
        assert served.stderr is not None
        url = next(line for line in served.stderr if "serves at" in line).split("serves at ")[1].split(" ")[0]
        reading = threading.Thread(target=lines_of, args=(served.stderr,))  # a full pipe would hold up the service
        reading.start()
        with Client(url, (tmp_path / "data" / "admin.key").read_text().strip()) as client:
            yield served, client
        served.terminate()
        served.wait(timeout=60)
        reading.join()


def lines_of(log: Iterable[str]) -> None:
    for line in log:
        sys.stderr.write(line)


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def until(job: Job, holds: Callable[[str, int], bool]) -> None:
    """Follow the job's stream until its state and its newest step are such. A stream that breaks is opened again."""
    state, step = "", -1
    while True:
        with suppress(Unavailable, StorageFull):
            for kind, data in job.follow(step):
                if kind == "metrics":
                    step = data.step
                elif kind in ("job", "end"):
                    state = data.state
                    assert state in ("queued", "running", "paused"), data
                if holds(state, step):
                    return


def exhaust(pid: int, kind: int, limit: Callable[[int], int], job: Job) -> None:
    """Lower a limit until the job is paused. A process that has many descriptors open at the first look would else keep
    as many as it needs."""
    most = limit(pid)

    def paused() -> bool:
        nonlocal most
        most = min(most, limit(pid))
        resource.prlimit(pid, kind, (most, resource.prlimit(pid, kind)[1]))
        with suppress(Unavailable, StorageFull):
            return bool(job.show().state == "paused")
        return False

    waiting.until(paused, "it does not run out")


def goes_on(job: Job) -> None:
    """It trains further steps."""
    before = job.show().step
    until(job, lambda state, step: state == "running" and step > before)


@pytest.mark.heavy
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="changing another process's limits is Linux's")
@pytest.mark.parametrize(
    ("kind", "limit"),
    [(resource.RLIMIT_NOFILE, lambda pid: descriptors(pid) + 1), (resource.RLIMIT_FSIZE, lambda pid: 4096)],
    ids=["descriptors", "disk"],
)
def test_job_waits_for_the_exhausted_resource_and_resumes_by_itself(
    process: tuple[subprocess.Popen[str], Client], tmp_path: Path, kind: int, limit: Callable[[int], int]
) -> None:
    served, client = process
    token = (tmp_path / "data" / "worker.token").read_text().strip()
    with ThreadedWorker(client.url, token, tokenizer(tmp_path)):
        running = client.submit(job(stop={"steps": 100_000}))
        until(running, lambda state, step: step >= 2)
        before = resource.prlimit(served.pid, kind)
        exhaust(served.pid, kind, limit, running)
        resource.prlimit(served.pid, kind, before)
        goes_on(running)


@pytest.mark.heavy
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="changing another process's limits is Linux's")
def test_requests_that_find_no_memory_fail_alone(process: tuple[subprocess.Popen[str], Client], tmp_path: Path) -> None:
    """Large requests are refused with 503 or find no one who answers, small ones too, and another tenant's job goes on,
    at the latest when the memory is back."""
    served, client = process
    token = (tmp_path / "data" / "worker.token").read_text().strip()
    key = client.add_key(client.add_tenant("greedy").id).key
    rows = [{"prompt": "x" * 1000, "answer": "x"}] * 12_000
    large = json.dumps(job(environment={"id": "jsonl", "rows": rows, "verifier": "exact"})).encode()
    headers = {"X-API-Key": key, "Content-Type": "application/json"}

    def ask(method: str, path: str, content: bytes = b"") -> int:
        """The status of the answer; 0 where the connection was closed."""
        try:
            answer = httpx.request(method, f"{client.url}{path}", headers=headers, content=content, timeout=60)
        except httpx.TransportError:
            return 0
        assert answer.status_code in (200, 503), answer.text
        assert answer.status_code == 200 or int(answer.headers["Retry-After"]) > 0
        return answer.status_code

    with ThreadedWorker(client.url, token, tokenizer(tmp_path)):
        running = client.submit(job(stop={"steps": 100_000}))
        until(running, lambda state, step: step >= 2)
        before = resource.prlimit(served.pid, resource.RLIMIT_AS)
        answers: Counter[int] = Counter()
        for left in LEFT:
            held = int(Path(f"/proc/{served.pid}/statm").read_text().split()[0]) * resource.getpagesize()
            resource.prlimit(served.pid, resource.RLIMIT_AS, (held + (left << 20), before[1]))
            for _ in range(3):
                answers[ask("POST", "/api/v1/jobs/dry-run", large)] += 1
                ask("GET", "/api/v1/jobs")
            assert served.poll() is None
            resource.prlimit(served.pid, resource.RLIMIT_AS, before)
        assert answers[503], answers
        goes_on(running)
        assert ask("POST", "/api/v1/jobs/dry-run", large) == 200


@pytest.mark.parametrize(
    ("files", "places"), [(65536, 4096), (4352, 4096), (1024, 768), (512, 256), (256, 128), (64, 32), (2, 1)]
)
def test_connections_have_half_of_few_descriptors(files: int, places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that had the only one left the service without an answer for anybody."""
    monkeypatch.setattr("rookery.server.connections.raise_descriptor_limit", lambda: files)
    connections, transport, admitted = Connections(4096, Counter()), cast(Any, SimpleNamespace()), 0
    while (slot := connections.admit(transport, str(admitted))) is not None:
        connections.welcome(slot)
        admitted += 1
    assert admitted == places
