"""A job on a worker with vLLM, and the end of vLLM with its worker. In vLLM's environment: ``make test-vllm``."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.support.small_model import save_small_model

import rookery
from rookery.server.launcher import EmbeddedService
from rookery.settings import Settings

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="make test-vllm"),
]

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]

HOLDER = """
import sys
from pathlib import Path
from rookery.settings import Settings
from rookery.worker.engine.vllm.loading import load_vllm
from rookery.worker.model.convert import prepare
if __name__ == "__main__":
    folder = prepare(sys.argv[1], Path(sys.argv[2]))
    engine = load_vllm(folder, Settings(inference_engine="vllm", vllm_adapters=2, max_rank=8), "float32", 1 << 26)
    print("ready", flush=True)
    sys.stdin.read()
"""


def spec(model: Path) -> dict[str, object]:
    return {
        "base_model": str(model),
        "environment": {"id": "jsonl", "rows": ROWS, "verifier": {"name": "regex", "pattern": "[a-f0-9]"}},
        "policies": {"main": {"rank": 4, "optimizer": {"lr": 1e-2}}},
        "algorithm": {"group_size": 4, "groups_per_step": 2, "max_staleness": 0},
        "sampling": {"max_tokens": 8},
        "stop": {"steps": 3},
    }


def test_a_job_trains_until_a_version_differs_by_more_than_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is below any numerical error. The first version has no canary; the second is refused."""
    model = save_small_model(tmp_path / "model", hidden=128)
    monkeypatch.setenv("ROOKERY_INFERENCE_ENGINE", "vllm")
    monkeypatch.setenv("ROOKERY_ENGINE_GAP_LIMIT", "1e-9")
    settings = Settings.load(
        data=tmp_path / "data", cache=tmp_path / "cache", port=0, models=str(model), threads=1, failure_rate_window=4
    )
    with EmbeddedService(settings) as service, rookery.Client(service.url, service.key) as client:
        job = client.train(**spec(model))
        view = next(view for kind, view in job.follow() if kind == "job" and view.state == "paused")
        assert view.step == 1
        assert "log-probabilities differ from the trainer's" in view.reason and "ENGINE_GAP_LIMIT" in view.reason
        (row,) = job.metrics(follow=False)
        assert 0 < row.logp_diff_mean < 0.1 and row.staleness_max == 0


def test_vllm_ends_with_its_killed_worker(tmp_path: Path) -> None:
    model = save_small_model(tmp_path / "model", hidden=128)
    script = tmp_path / "holder.py"
    script.write_text(HOLDER)
    command = [sys.executable, str(script), str(model), str(tmp_path / "cache")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and "ready\n" in process.stdout  # after lines of vLLM's log
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) > 1
        process.kill()
        _, alive = psutil.wait_procs(children, timeout=60)
    assert not alive
