"""A service that is killed again and again, at random moments: every job goes on by itself."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from tests.storage.test_standby import Serving
from tests.support.faces import ThreadedWorker, job, tokenizer, write_model
from tests.support.timelines import Starts, check_same, starts_of_run
from tests.support.waiting import until

from rookery.client import Client
from rookery.controller.stored_spans import SAVE_SECONDS
from rookery.errors import RookeryError

KILLS = 14
LONGEST_LIFE = 2.5
"""Seconds of a service between two kills: most end before a job has trained a step."""

JOBS = 3
PATIENCE = 90.0
PAUSE = 0.1
"""Seconds between two looks: each asks for every job."""


@contextmanager
def scripted_service(root: Path) -> Iterator[tuple[Serving, Client]]:
    """A service in a process of its own with a scripted worker, and the administrator's client. It ends by a kill."""
    with ExitStack() as opened:
        service = Serving(root, "data", f"sqlite:///{root}/data/rookery.db")
        opened.callback(service.kill)
        service.until("Rookery serves")
        key, token = ((service.data / name).read_text().strip() for name in ("admin.key", "worker.token"))
        client = opened.enter_context(Client(service.url, key))
        opened.enter_context(ThreadedWorker(service.url, token, tokenizer(root)))
        yield service, client


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(2))
def test_every_job_resumes_by_itself_after_random_kills(seed: int, tmp_path: Path) -> None:
    write_model(tmp_path / "cache")
    moments = random.Random(seed)
    endless = [job(name=f"job{number}", seed=number, stop={"steps": 1_000_000}) for number in range(JOBS)]
    ids: list[str] = []
    for kill in range(KILLS + 1):
        with scripted_service(tmp_path) as (_, client):
            ids = ids or [client.submit(one).id for one in endless]
            if kill < KILLS:
                time.sleep(moments.uniform(0.0, LONGEST_LIFE))
                continue
            advanced(client, ids, 2, PATIENCE)


@pytest.mark.heavy
def test_killed_service_keeps_the_timeline_of_its_runs(tmp_path: Path) -> None:
    write_model(tmp_path / "cache")

    def spans(client: Client, id: str, end: float) -> Starts:
        return starts_of_run(client.job(id).timeline(0.0, end), id)

    with scripted_service(tmp_path) as (_, client):
        ended = client.submit(job()).wait()
        running = client.submit(job(stop={"steps": 1_000_000}))
        advanced(client, [running.id], 2, PATIENCE)
        time.sleep(2 * SAVE_SECONDS)
        end = time.time() - SAVE_SECONDS - 2  # what ended before is stored
        last = spans(client, ended.id, end)
        assert {"decode", "train", "commit"} <= {kind for kind, _ in last}
    with scripted_service(tmp_path) as (_, client):
        check_same(spans(client, ended.id, end), last)
        assert spans(client, running.id, end)


FATAL = """
import sys
if sys.orig_argv[-1:] == ["serve"]:
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
def test_a_job_that_ends_the_service_is_held_and_others_resume(tmp_path: Path) -> None:
    """That job waits for a person; nobody resumes the others."""
    write_model(tmp_path / "cache")
    (tmp_path / "sitecustomize.py").write_text(FATAL)
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    settings = {"ROOKERY_START_CRASHES": "2", "PYTHONPATH": paths}
    endless = [job(name=f"job{number}", seed=number, stop={"steps": 1_000_000}) for number in range(JOBS)]
    ids: list[str] = []
    fatal, lives, deadline = "", 0, time.monotonic() + PATIENCE
    while True:
        lives += 1
        with ExitStack() as opened:
            service = Serving(tmp_path, "data", f"sqlite:///{tmp_path}/data/rookery.db", **settings)
            opened.callback(service.kill)
            service.until("Rookery serves")
            key, token = ((service.data / name).read_text().strip() for name in ("admin.key", "worker.token"))
            client = opened.enter_context(Client(service.url, key))
            opened.enter_context(ThreadedWorker(service.url, token, tokenizer(tmp_path)))
            try:
                if not ids:
                    ids = [client.submit(one).id for one in endless]
                    advanced(client, ids, 1, deadline - time.monotonic())
                fatal = fatal or client.submit(job(name="fatal"), key="once").id
                held = client.job(fatal)
                until(
                    lambda held=held: held.show().state == "paused",  # type: ignore[misc]
                    lambda held=held: held.show(),  # type: ignore[misc]
                    patience=deadline - time.monotonic(),
                    pause=PAUSE,
                )
            except RookeryError:
                assert service.process.wait(30) == -signal.SIGKILL
                continue
            assert "times in a row while it started this job alone" in client.job(fatal).show().reason
            advanced(client, ids, 2, deadline - time.monotonic())
            assert lives > 2
            return


def advanced(client: Client, ids: list[str], steps: int, patience: float) -> None:
    """Each of the jobs trains so many steps more, and none pauses."""
    before = {id: client.job(id).show().step for id in ids}
    shown: dict[str, tuple[str, str]] = {}

    def all_have() -> bool:
        views = {id: client.job(id).show() for id in ids}
        shown.update({id: (view.state, view.reason) for id, view in views.items()})
        assert all(view.state != "paused" for view in views.values()), shown
        return all(view.step >= before[id] + steps for id, view in views.items())

    until(all_have, lambda: shown, patience=patience, pause=PAUSE)
