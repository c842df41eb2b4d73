"""The token face with the real clients, which have environments of their own: ``make test-environments``."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import httpx
import pytest
from tests.support.faces import served
from tests.support.small_model import save_small_model
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".bench" / "verifiers" / "bin" / "python"

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(not PYTHON.exists(), reason="verifiers is not here: make test-environments"),
]


def test_the_client_of_renderers_trains_on_the_token_face(tmp_path: Path) -> None:
    model = str(save_small_model(tmp_path / "small"))
    with served(tmp_path, models=model, workers=1, threads=1) as service:
        with httpx.Client(base_url=service.url, headers={"Authorization": f"Bearer {service.key}"}, timeout=60) as http:
            until(lambda: model in [one["id"] for one in http.get("/v1/models").json()["data"]])
        command = [str(PYTHON), str(Path(__file__).with_name("token_flow.py")), service.url, service.key, model, model]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert len(found["completion_ids"]) == len(found["completion_logprobs"]) > 0
    assert all(map(math.isfinite, found["completion_logprobs"]))
    assert found["finish_reason"] in ("stop", "length") and found["same"]
    assert found["usage"]["prompt_tokens"] == len(found["prompt_ids"])
    assert "exceeds maximum context length (512)" in found["overlong"]
