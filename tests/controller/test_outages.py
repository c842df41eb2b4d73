"""Jobs whose database stops: they pause, and nobody has to resume them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
from tests.support.faces import ThreadedWorker, job, served
from tests.support.storing import new_database, postgres_cluster
from tests.support.waiting import PATIENCE_SECONDS, until

from rookery.client import Client, Job
from rookery.clock import SystemClock
from rookery.controller.outages import Outages
from rookery.errors import RookeryError
from rookery.server.launcher import EmbeddedService

OUTAGES = 2


def next_step(of: Job, after: int) -> int:
    """The first step after another. The stream of a job ends while it is paused."""
    return int(until(lambda: next(iter(of.metrics(after=after)), None)).step)


def readiness(service: EmbeddedService, *, ready: bool) -> httpx.Response | None:
    """The answer of ``/readyz`` if it says that."""
    answer = httpx.get(f"{service.url}/readyz", timeout=PATIENCE_SECONDS)
    return answer if (answer.status_code == 200) == ready else None


async def test_a_question_without_an_answer_delays_no_other() -> None:
    """A store that takes a request and is silent: the outage lasts, and one question is asked."""
    answer, answered, asked = asyncio.Event(), asyncio.Event(), list[object]()

    async def transfer(call: object) -> None:
        asked.append(call)
        await answer.wait()
        answered.set()

    questions = Outages(Mock(transfer=transfer), Mock(remote=False), SystemClock(), 1.0, patience_seconds=0.01)
    assert await asyncio.gather(*(questions.lasts("artifacts") for _ in range(3))) == [True] * 3
    assert await questions.lasts("artifacts") and len(asked) == 1
    answer.set()
    await answered.wait()
    assert not await questions.lasts("artifacts")


@pytest.mark.heavy
def test_jobs_resume_when_postgresql_is_back(tmp_path: Path) -> None:
    log = tmp_path / "data/logs/service.jsonl"
    with postgres_cluster() as cluster:
        settings = {"database": new_database(cluster.url), "outage_retry_seconds": 3600.0}  # nobody waits that long
        with (
            served(tmp_path, **settings) as service,
            Client(service.url, service.key) as client,
            ThreadedWorker.of(service),
        ):
            jobs = [client.submit(job(stop={"steps": 1_000_000}, seed=seed)) for seed in range(3)]
            for outage in range(OUTAGES):
                reached = [next_step(one, one.show().step) for one in jobs]
                cluster.stop()
                with pytest.raises(RookeryError, match="does not answer"):
                    client.jobs()
                until(lambda most=outage: log.read_text().count("not stored yet") > most)  # type: ignore[misc]
                assert httpx.get(f"{service.url}/healthz", timeout=PATIENCE_SECONDS).status_code == 200
                not_ready = until(lambda: readiness(service, ready=False), "it stays ready")
                assert not_ready.status_code == 503 and "the database does not answer" in not_ready.json()["error"]
                assert "connection" not in not_ready.text, "the operator reads the reason in the log"
                cluster.start()
                for one, step in zip(jobs, reached, strict=True):
                    assert next_step(one, step + 2) == step + 3
                until(lambda: readiness(service, ready=True), "it does not become ready")
            for one in jobs:
                one.cancel()
                steps = [row.step for row in one.metrics(follow=False)]
                assert steps == list(range(1, len(steps) + 1))
                versions = [row.version for row in one.versions()]
                assert versions == list(range(len(versions)))
