"""A service that is killed again and again, at random moments: every job goes on by itself."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.storage.test_standby import Serving
from tests.support.faces import ScriptedWorker, job, tokenizer, write_model

from rookery.client import Client

KILLS = 14
LONGEST_LIFE = 2.5
"""Seconds of a service between two kills: most end before a job has trained a step."""

JOBS = 3
PATIENCE = 90.0


@pytest.mark.heavy
@pytest.mark.parametrize("seed", range(2))
def test_every_job_goes_on_by_itself_after_random_kills(seed: int, tmp_path: Path) -> None:
    write_model(tmp_path / "cache")
    moments = random.Random(seed)
    endless = [job(name=f"job{number}", seed=number, stop={"steps": 1_000_000}) for number in range(JOBS)]
    ids: list[str] = []
    for kill in range(KILLS + 1):
        with ExitStack() as opened:
            service = Serving(tmp_path, "data", f"sqlite:///{tmp_path}/data/rookery.db")
            opened.callback(service.kill)
            service.until("Rookery serves")
            key, token = ((service.data / name).read_text().strip() for name in ("admin.key", "worker.token"))
            client = opened.enter_context(Client(service.url, key))
            opened.enter_context(ScriptedWorker(service.url, token, tokenizer(tmp_path)))
            ids = ids or [client.submit(one).id for one in endless]
            if kill < KILLS:
                time.sleep(moments.uniform(0.0, LONGEST_LIFE))
                continue
            before = {id: client.job(id).show().step for id in ids}
            deadline = time.monotonic() + PATIENCE
            while any(client.job(id).show().step < before[id] + 2 for id in ids):
                shown = {id: (client.job(id).show().state, client.job(id).show().reason) for id in ids}
                assert all(state != "paused" for state, _ in shown.values()), shown
                assert time.monotonic() < deadline, shown
                time.sleep(0.2)
