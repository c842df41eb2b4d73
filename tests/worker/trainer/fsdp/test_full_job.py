"""A full-parameter job with a real service and worker: it trains, its versions answer, and a restart goes on from the
last commit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.support.small_model import save_small_model

import rookery
from rookery.errors import RookeryError
from rookery.server.launcher import EmbeddedService
from rookery.settings import Settings

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]


def spec(model: Path, **policy: object) -> dict[str, object]:
    return {
        "base_model": str(model),
        "environment": {"id": "jsonl", "rows": ROWS, "verifier": {"name": "regex", "pattern": "[a-f0-9]"}},
        "policies": {"main": {"full": True, "optimizer": {"lr": 1e-3}} | policy},
        "algorithm": {"group_size": 4, "groups_per_step": 2, "max_staleness": 1, "in_flight": "switch"},
        "sampling": {"max_tokens": 8},
        "stop": {"steps": 4},
        "checkpoints": {"keep_last": 8},
    }


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_full_parameter_job_trains_and_resumes(tmp_path: Path) -> None:
    model = save_small_model(tmp_path / "model")
    settings = Settings.load(data=tmp_path / "data", cache=tmp_path / "cache", port=0, models=str(model), threads=1)
    with EmbeddedService(settings) as service, rookery.Client(service.url, service.key) as client:
        with pytest.raises(RookeryError, match=r"optimizer\.lr: give one"):
            client.train(**spec(model, optimizer={}))
        with pytest.raises(RookeryError, match="rank: not with full: true"):
            client.train(**spec(model, rank=8))
        job = client.train(**spec(model))
        for row in job.metrics():
            if row["step"] == 2:
                break
    with EmbeddedService(settings) as service, rookery.Client(service.url, service.key) as client:
        job = client.job(job.id)
        assert job.wait()["state"] == "completed"
        assert [row["step"] for row in job.metrics(follow=False)] == [1, 2, 3, 4]
        assert [version["version"] for version in job.versions()] == [0, 1, 2, 3, 4]
        folders = [job.adapter(version).download(tmp_path / f"v{version}") for version in (0, 4)]
        assert not list(folders[1].glob("trainer_state*"))
        first, last = (load_file(folder / "model.safetensors") for folder in folders)
        assert any(not torch.equal(first[name], last[name]) for name in first)
        transformers.AutoModelForCausalLM.from_pretrained(folders[1])
        text = job.sample("1+1=", version=4, max_tokens=4, temperature=0.0)
        assert text["version"] == 4
