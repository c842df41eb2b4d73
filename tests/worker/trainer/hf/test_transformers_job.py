"""Jobs on families that the native decoder does not know, with a real service and real workers: prepared from a folder,
trained from an adapter of PEFT, answered, and loaded by PEFT again."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from tests.support.families import small_config
from tests.support.small_model import save_small_model

import rookery
from rookery.errors import RookeryError
from rookery.server.launcher import EmbeddedService
from rookery.settings import Settings

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]


def spec(model: Path, **policy: object) -> dict[str, object]:
    return {
        "base_model": str(model),
        "environment": {"id": "jsonl", "rows": ROWS, "verifier": {"name": "regex", "pattern": "[a-f0-9]"}},
        "policies": {"main": {"rank": 4, "optimizer": {"lr": 1e-2}} | policy},
        "algorithm": {"group_size": 4, "groups_per_step": 2},
        "sampling": {"max_tokens": 6},
        "stop": {"steps": 2},
    }


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_jobs_of_other_families_train_and_answer(tmp_path: Path) -> None:
    folders = {f: save_small_model(tmp_path / f, 0, small_config(f)) for f in ("qwen3_moe", "gemma3_text")}
    names = ",".join(map(str, folders.values()))
    settings = Settings.load(data=tmp_path / "data", cache=tmp_path / "cache", port=0, models=names, threads=1)
    begun = peft.get_peft_model(
        transformers.AutoModelForCausalLM.from_pretrained(folders["qwen3_moe"]),
        peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]),
    )
    begun.save_pretrained(tmp_path / "begun")
    with EmbeddedService(settings) as service, rookery.Client(service.url, service.key) as client:
        jobs = {
            "qwen3_moe": client.train(
                **spec(folders["qwen3_moe"], alpha=8, warm_start={"peft": str(tmp_path / "begun")})
            ),
            "gemma3_text": client.train(**spec(folders["gemma3_text"])),
        }
        with pytest.raises(RookeryError, match=r"full: .*does not know the family"):
            full = {"policies": {"main": {"full": True, "optimizer": {"lr": 1e-5}}}}
            client.train(**spec(folders["gemma3_text"]) | full)
        for family, job in jobs.items():
            ended = job.wait()
            assert ended["state"] == "completed", ended["reason"]
            versions = [job.adapter(version).download(tmp_path / f"{family}{version}") for version in (0, 2)]
            first, last = (load_file(folder / "adapter_model.safetensors") for folder in versions)
            assert any(not torch.equal(first[name], last[name]) for name in first)
            model = transformers.AutoModelForCausalLM.from_pretrained(folders[family])
            loaded = peft.PeftModel.from_pretrained(model, versions[1])
            state = {k: v for k, v in loaded.state_dict().items() if "lora_" in k}
            assert len(state) == len(last)
            text = job.sample("1+1=", max_tokens=4, temperature=0.0)
            assert text["version"] == 2 and len(text["text"]) > 0
        rows = {row["name"]: row for row in client.models()}
        assert {rows[str(folder)]["engine"] for folder in folders.values()} == {"transformers"}
        assert rows[str(folders["qwen3_moe"])]["why"] == "the native decoder does not know the family qwen3_moe"
        assert rows["qwen3-0.6b"]["engine"] == "native"
