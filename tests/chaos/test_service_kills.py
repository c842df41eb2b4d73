"""A service that is killed again and again, at random moments: every job goes on by itself."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from tests.storage.test_standby import Serving
from tests.support.faces import ThreadedWorker, job, tokenizer, write_model
from tests.support.timelines import Starts, check_same, starts_of_run
from tests.support.waiting import PATIENCE_SECONDS, until

from rookery.client import Client
from rookery.errors import RookeryError
from rookery.telemetry.spans import unpacked

KILLS = 14
LONGEST_LIFE = 2.5
"""Seconds of a service between two kills: most end before a job has trained a step."""

JOBS = 3
PAUSE = 0.1
"""Seconds between two looks: each asks for every job."""


def patched(folder: Path, code: str) -> dict[str, str]:
    """The settings of a service that runs ``code`` before anything else."""
    lines = "".join(f"    {line}\n" for line in code.strip().splitlines())
    (folder / "sitecustomize.py").write_text(f'import sys\nif sys.orig_argv[-1:] == ["serve"]:\n{lines}')
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}


@contextmanager
def scripted_service(root: Path, **settings: str) -> Iterator[tuple[Serving, Client]]:
    """A service in a process of its own with a scripted worker, and the administrator's client. It ends by a kill."""
    with ExitStack() as opened:
        service = Serving(root, "data", f"sqlite:///{root}/data/rookery.db", **settings)
        opened.callback(service.kill)
        service.until("Rookery serves")
        key, token = ((service.data / name).read_text().strip() for name in ("admin.key", "worker.token"))
        client = opened.enter_context(Client(service.url, key))
        opened.enter_context(ThreadedWorker(service.url, token, tokenizer(root)))
        yield service, client


SHORT_DELAYS = """
from rookery.scheduling import crashes
crashes.DELAYS, crashes.GROUP_SECONDS = (0.1, 0.2, 0.4, 0.8, 1.6), 0.2
"""
"""On a slow machine each kill comes while jobs start, and the last of their delays is ten minutes."""


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(2))
def test_every_job_resumes_by_itself_after_random_kills(seed: int, tmp_path: Path) -> None:
    write_model(tmp_path / "cache")
    settings = {"ROOKERY_START_CRASHES": str(KILLS + 1), **patched(tmp_path, SHORT_DELAYS)}
    moments = random.Random(seed)
    endless = [job(name=f"job{number}", seed=number, stop={"steps": 1_000_000}) for number in range(JOBS)]
    ids: list[str] = []
    for kill in range(KILLS + 1):
        with scripted_service(tmp_path, **settings) as (_, client):
            ids = ids or [client.submit(one).id for one in endless]
            if kill < KILLS:
                time.sleep(moments.uniform(0.0, LONGEST_LIFE))
                continue
            advanced(client, ids, 2)


@pytest.mark.heavy
def test_killed_service_keeps_the_timeline_of_its_runs(tmp_path: Path) -> None:
    write_model(tmp_path / "cache")

    def spans(client: Client, id: str, end: float) -> Starts:
        return starts_of_run(client.job(id).timeline(0.0, end), id)

    with scripted_service(tmp_path) as (_, client):
        ended = client.submit(job()).wait()
        running = client.submit(job(stop={"steps": 1_000_000}))
        advanced(client, [running.id], 2)
        end = time.time()
        until(lambda: stored_until(tmp_path / "data", running.id) > end)  # with all that ended before
        last = spans(client, ended.id, end)
        assert {"decode", "train", "commit"} <= {kind for kind, _ in last}
    with scripted_service(tmp_path) as (_, client):
        check_same(spans(client, ended.id, end), last)
        assert spans(client, running.id, end)


def stored_until(data: Path, job: str) -> float:
    """The end of the last stored span of a job."""
    with closing(sqlite3.connect(f"file:{data / 'rookery.db'}?mode=ro", uri=True, timeout=60)) as database:
        found = database.execute("select tenant, spans from spans where job = ?", [job]).fetchall()
    return max((span.end for tenant, spans in found for span in unpacked(spans, tenant, job)), default=0.0)


FATAL = """
import os, signal, time
from rookery.controller.jobs.runner import JobRunner
assemble = JobRunner._assemble
async def fatal(self):
    if self.row.name == "fatal":
        grown = b"x" * (600 << 20)
        time.sleep(0.6)
        os.kill(os.getpid(), signal.SIGKILL)
    return await assemble(self)
JobRunner._assemble = fatal
"""
"""In the service: the start of one job takes 600 MB, and then the machine, out of memory, kills the service."""


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_a_job_that_ends_the_service_is_held_and_others_resume(tmp_path: Path) -> None:
    """The job waits for a person; nobody resumes the others."""
    write_model(tmp_path / "cache")
    settings = {"ROOKERY_START_CRASHES": "2", **patched(tmp_path, FATAL)}
    endless = [job(name=f"job{number}", seed=number, stop={"steps": 1_000_000}) for number in range(JOBS)]
    ids: list[str] = []
    fatal, lives = "", 0
    while True:
        lives += 1
        with scripted_service(tmp_path, **settings) as (service, client):
            try:
                if not ids:
                    ids = [client.submit(one).id for one in endless]
                    advanced(client, ids, 1)
                fatal = fatal or client.submit(job(name="fatal"), key="once").id
                held = client.job(fatal)
                until(
                    lambda held=held: held.show().state == "paused",  # type: ignore[misc]
                    lambda held=held: held.show(),  # type: ignore[misc]
                    pause=PAUSE,
                )
            except RookeryError:
                assert service.process.wait(PATIENCE_SECONDS) == -signal.SIGKILL
                continue
            assert "times in a row while it started this job alone" in client.job(fatal).show().reason
            advanced(client, ids, 2)
            assert lives > 2
            return


def advanced(client: Client, ids: list[str], steps: int) -> None:
    """Each of the jobs trains so many steps more, and none pauses."""
    before = {id: client.job(id).show().step for id in ids}
    shown: dict[str, tuple[str, str]] = {}

    def all_have() -> bool:
        views = {id: client.job(id).show() for id in ids}
        shown.update({id: (view.state, view.reason) for id, view in views.items()})
        assert all(view.state != "paused" for view in views.values()), shown
        return all(view.step >= before[id] + steps for id, view in views.items())

    until(all_have, lambda: shown, pause=PAUSE)
