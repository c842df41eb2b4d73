"""Chats with several choices beside a training job, through a whole service and its worker: both make progress."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.support.clusters import job_of_texts
from tests.support.tinkered import MODEL, new_key, place_model, running
from tests.support.waiting import until

import rookery

CLIENTS, CHOICES = 6, 8
PATIENCE = 240.0


@pytest.mark.heavy
@pytest.mark.timeout(4 * PATIENCE)
@pytest.mark.parametrize("same_tenant", [False, True], ids=["another tenant's job", "the tenant's own job"])
def test_chats_with_several_choices_and_a_training_job_both_progress(same_tenant: bool, tmp_path: Path) -> None:
    place_model(tmp_path)
    over, done = threading.Event(), Counter[int]()
    message = {"role": "user", "content": "hi " * 30}
    with running(tmp_path) as service:
        keys = [new_key(service, name) for name in ("one", "other")]
        job = rookery.Client(service.url, keys[0]).submit(
            job_of_texts(MODEL, 100_000) | {"sampling": {"max_tokens": 16}}
        )
        until(lambda: job.show().step > 0, "the job has trained a step", patience=PATIENCE)
        headers = {"Authorization": f"Bearer {keys[0 if same_tenant else 1]}"}

        def chat(_: int) -> None:
            with httpx.Client(base_url=service.url, headers=headers, timeout=PATIENCE) as http:
                while not over.is_set():
                    body = {"model": MODEL, "messages": [message], "max_tokens": 16, "n": CHOICES}
                    done[http.post("/v1/chat/completions", json=body).status_code] += 1

        with ThreadPoolExecutor(CLIENTS) as clients:
            chats = [clients.submit(chat, number) for number in range(CLIENTS)]
            try:
                before = job.show().step
                until(lambda: done[200] >= 3 * CLIENTS, lambda: f"chats: {done}", patience=PATIENCE)
                if not same_tenant:  # of one tenant, its chats go first as long as they are late
                    until(lambda: job.show().step > before + 1, "the job trains beside the chats", patience=PATIENCE)
            finally:
                over.set()
            for one in chats:
                one.result(PATIENCE)
        assert set(done) == {200}
        before = job.show().step
        until(lambda: job.show().step > before + 1, "the job trains after the chats", patience=PATIENCE)
        job.cancel()
