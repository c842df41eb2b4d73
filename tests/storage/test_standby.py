"""A second service on the same PostgreSQL database and the same artifacts takes over when the first dies."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

import httpx
import psutil
import pytest
from sqlalchemy import select, text
from tests.support.faces import ThreadedWorker, job, served, tokenizer, write_model
from tests.support.storing import connected, new_database, running_postgres
from tests.support.waiting import PATIENCE_SECONDS
from typer.testing import CliRunner
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from rookery.cli import app
from rookery.client import Client
from rookery.errors import Unavailable, UserError
from rookery.storage.db import Database
from rookery.storage.models import GroupRow, VersionRow
from rookery.storage.repositories import tenants

STEPS = 5

get = partial(httpx.get, timeout=PATIENCE_SECONDS)

CUT = text(
    "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory' AND database ="
    " (SELECT oid FROM pg_database WHERE datname = current_database())"
)

pytestmark = pytest.mark.heavy
"""Ends the connection of a claim, as a network does."""


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    with running_postgres() as server:
        yield server


class Serving:
    """A ``rookery serve`` process, whose log is read as it comes: a full pipe would hold it up. ``url`` is set by
    :meth:`until`."""

    def __init__(self, root: Path, name: str, database: str, **settings: str) -> None:
        self.data = root / name
        self.url = ""
        environment = {
            **os.environ, "ROOKERY_DATA": str(self.data), "ROOKERY_CACHE": str(root / "cache"), "ROOKERY_PORT": "0",
            "ROOKERY_DATABASE": database, "ROOKERY_ARTIFACTS_URL": str(root / "shared"), "ROOKERY_MODELS": "",
            "ROOKERY_WORKERS": "0", "ROOKERY_HEARTBEAT_SECONDS": "0.2", **settings,
        }  # fmt: skip
        command = [sys.executable, "-m", "rookery.cli", "serve"]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self._log: SimpleQueue[str] = SimpleQueue()
        """Its lines that :meth:`until` has not read; an empty one is the end."""
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as log:
            for line in log:
                self._log.put(line)
        self._log.put("")

    def until(self, line: str) -> None:
        """Wait for a line of its log."""
        shown = []
        while found := self._next_line():
            shown.append(found)
            if address := re.search(r"https?://[\d.]+:\d+", found):
                self.url = address[0]
            if line in found:
                return
        raise AssertionError("".join(shown))

    def _next_line(self) -> str:
        """Empty at the end, and after a long silence."""
        try:
            return self._log.get(timeout=PATIENCE_SECONDS)
        except Empty:
            return ""

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def serving(root: Path, name: str, database: str, **settings: str) -> Iterator[Serving]:
    service = Serving(root, name, database, **settings)
    try:
        yield service
    finally:
        service.kill()


def test_a_standby_takes_over_from_a_killed_service(postgres: str, tmp_path: Path) -> None:
    """The job continues there from its last commit: every step once, every group in one of them."""
    url = new_database(postgres)
    write_model(tmp_path / "cache")
    endless = job(stop={"steps": 1_000_000}, checkpoints={"keep_last": 2, "keep_best": False})
    with ExitStack() as opened:
        first = opened.enter_context(serving(tmp_path, "one", url))
        first.until("Rookery serves")
        second = opened.enter_context(serving(tmp_path, "two", url))
        second.until("standby at")
        token = (first.data / "worker.token").read_text().strip()
        check_standby(second, token)
        client = opened.enter_context(Client(first.url, (first.data / "admin.key").read_text().strip()))
        with ThreadedWorker(first.url, token, tokenizer(tmp_path)):
            submitted = client.submit(endless)
            before = [row.step for row, _ in zip(submitted.metrics(), range(STEPS), strict=False)]
            first.kill()
        second.until("Rookery serves")
        assert get(f"{second.url}/healthz").json()["status"] == "ok"
        assert get(f"{second.url}/readyz").json()["status"] == "ready"
        client = opened.enter_context(Client(second.url, (second.data / "admin.key").read_text().strip()))
        again = client.job(submitted.id)
        committed = again.show().step
        assert committed >= before[-1]
        with ThreadedWorker(second.url, token, tokenizer(tmp_path)):  # the first one's key
            steps = [row.step for row, _ in zip(again.metrics(), range(committed + STEPS), strict=False)]
            again.cancel()
        assert steps == list(range(1, committed + STEPS + 1))
    check_history(url)


def test_a_standby_under_attack_takes_over_at_once(postgres: str, tmp_path: Path) -> None:
    """Connections that read no response do not hold it until its claim lapses; nor do heads and hellos without end."""
    url = new_database(postgres)
    write_model(tmp_path / "cache")
    with ExitStack() as opened:
        first = opened.enter_context(serving(tmp_path, "one", url))
        first.until("Rookery serves")
        second = opened.enter_context(serving(tmp_path, "two", url, ROOKERY_STOP_SECONDS="3600"))
        second.until("standby at")
        address = httpx.URL(second.url)
        for _ in range(50):
            half = opened.enter_context(socket.create_connection((address.host, address.port or 80)))
            half.sendall(b"GET /wire/worker HTTP/1.1\r\nUpgrade: websocket\r\nX: " + bytes(1000))
        for _ in range(20):
            deaf = opened.enter_context(socket.socket())
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.settimeout(2)
            deaf.connect((address.host, address.port or 80))
            with suppress(OSError):
                for _ in range(12):  # each response repeats the path
                    deaf.sendall(b"GET /%0A" + b"x" * 50_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n")
        large = httpx.post(f"{second.url}/api/v1/datasets", content=bytes(1 << 20), timeout=PATIENCE_SECONDS)
        assert large.status_code == 503 and int(large.headers["Retry-After"]) > 0
        assert psutil.Process(second.process.pid).memory_info().rss < 300 << 20
        first.kill()
        second.until("Rookery serves")  # not after the time that connections have to end
        assert get(f"{second.url}/healthz").json()["status"] == "ok"


def check_standby(second: Serving, token: str) -> None:
    """It says that it is one, and refuses everything else, for which a client tries again."""
    assert get(f"{second.url}/healthz").json()["status"] == "standby"
    assert get(f"{second.url}/readyz").status_code == 503
    answer = get(f"{second.url}/api/v1/jobs")
    assert answer.status_code == 503 and "standby" in answer.json()["error"]
    environment = {"ROOKERY_URL": second.url, "ROOKERY_DATA": str(second.data), "ROOKERY_MODELS": ""}
    assert "standby" in CliRunner().invoke(app, ["doctor"], env=environment).output

    async def dial() -> int:
        address = second.url.replace("http", "ws", 1) + "/wire/worker"
        with pytest.raises(InvalidStatus) as refused:
            async with connect(address, additional_headers={"Authorization": f"Bearer {token}"}):
                pass
        return refused.value.response.status_code

    assert asyncio.run(dial()) == 503


def check_history(url: str) -> None:
    """Versions are a chain without gaps, and as many groups were consumed as their steps took."""
    with connected(url) as connection:
        chain = connection.execute(select(VersionRow.version, VersionRow.parent).order_by(VersionRow.version)).all()
        consumed = connection.execute(select(GroupRow.consumed_by).where(GroupRow.state == "consumed")).scalars().all()
    assert [tuple(row) for row in chain] == [(n, n - 1 if n else None) for n in range(len(chain))]
    assert all(consumed.count(version) == 2 for version in set(consumed)) and len(set(consumed)) == len(chain) - 1


def test_artifacts_that_the_database_does_not_know_are_refused(postgres: str, tmp_path: Path) -> None:
    url = new_database(postgres)
    with (
        served(tmp_path, database=url, artifacts_url=str(tmp_path / "shared")) as service,
        Client(service.url, service.key) as client,
    ):
        client.submit(job())
    with pytest.raises(UserError, match=r"elsewhere on .* has none of the 2 artifacts .*; it used .*/shared on"):
        served(tmp_path, database=url, artifacts_url=str(tmp_path / "elsewhere")).__enter__()


def test_a_service_that_lost_its_claim_changes_nothing(postgres: str) -> None:
    url = new_database(postgres)
    with closing(Database(url)) as one, closing(Database(url)) as other:
        one.claim()
        one.create()
        one.write(tenants.create_tenant, "alice", "Alice", 0.0)
        with connected(url) as connection:
            connection.execute(CUT)
        other.claim()
        other.create()
        with pytest.raises(Unavailable, match="has another service since"):
            one.write(tenants.create_tenant, "bob", "Bob", 0.0)
        with pytest.raises(Unavailable, match="has another service since"), one.batch_transaction():
            one.write(tenants.create_tenant, "bob", "Bob", 0.0)
        other.write(tenants.create_tenant, "carol", "Carol", 0.0)
        assert {row.name for row in one.read(tenants.list_tenants)} == {"Alice", "Carol"}


def test_a_service_that_stands_still_loses_its_claim(postgres: str) -> None:
    """A stopped process keeps its connections: PostgreSQL ends that of a claim which is not renewed."""
    url = new_database(postgres)
    with closing(Database(url, claim_silent=1)) as one, closing(Database(url, claim_wait=60)) as other:
        one.claim()
        one.create()
        other.claim()
        with pytest.raises(Unavailable):
            one.write(tenants.create_tenant, "bob", "Bob", 0.0)
