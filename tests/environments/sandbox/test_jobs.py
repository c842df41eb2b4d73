"""Jobs whose replies are run: a real service with its environment host, and a worker that writes two programs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.support.faces import ThreadedWorker, job, served, tokenizer

from rookery.client import Client

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap: apt-get install bubblewrap"),
]

ROWS = [{"prompt": f"Print {number}.", "cases": [{"stdout": "5"}]} for number in range(8)]
ANSWERS = [{"prompt": f"Compute {number}.", "answer": 5} for number in range(8)]


@pytest.mark.parametrize(
    ("environment", "replies"),
    [
        ({"rows": ROWS, "verifier": {"name": "sandbox", "seconds": 1}}, ("print(5)", "import os; os.fork()")),
        ({"rows": ANSWERS, "verifier": "number", "tools": [{"tool": "python"}], "calls": 1},
         ("<python>print(5)</python> 5", "6")),
    ],
    ids=["verifier", "tool"],
)  # fmt: skip
def test_a_job_trains_on_replies_that_run(
    environment: dict[str, Any], replies: tuple[str, str], tmp_path: Path
) -> None:
    with served(tmp_path) as service, Client(service.url, service.key) as client:
        token = (service.settings.data / "worker.token").read_text(encoding="utf-8").strip()
        with ThreadedWorker(service.url, token, tokenizer(tmp_path), replies):
            made = client.submit(job(environment={"id": "jsonl", **environment}, sampling={"max_tokens": 40}))
            assert made.wait().state == "completed"
            rewards = [step.reward for step in made.metrics()]
    assert rewards and all(0 < reward < 1 for reward in rewards)
