"""A job with two trained policies and the base model as a judge: a real service, worker and environment host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tests.support.small_model import save_small_model

import rookery
from rookery.server.launcher import EmbeddedService
from rookery.settings import Settings

STEPS = 2


class Checked(rookery.Environment):
    """The solver proposes, the verifier decides, the judge rates both."""

    deterministic = True

    def prompts(self, split: str) -> list[int]:
        return list(range(8))

    def reset(self, prompt: Any, seed: int) -> rookery.Step:
        return rookery.Step(messages=[{"role": "user", "content": f"say {prompt}"}], policy="solver")

    def step(self, reply: rookery.Reply) -> rookery.Step:
        if reply.turn < 2:
            speaker = ("verifier", "judge")[reply.turn]
            return rookery.Step(messages=[{"role": "user", "content": f"{speaker}?"}], policy=speaker)
        said: Sequence[str] = [message["content"] for message in reply.messages if message["role"] == "assistant"]
        rewards = {"solver": len(set(said[0])) / 8, "verifier": len(set(said[1])) / 8}
        return rookery.Step(done=True, reward=len(reply.text) / 100, rewards=rewards)


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_two_policies_and_the_base_model_play_and_learn(tmp_path: Path) -> None:
    model = save_small_model(tmp_path / "model")
    folders = {"data": tmp_path / "data", "cache": tmp_path / "cache"}
    settings = Settings.load({}, port=0, models=str(model), workers=1, **folders)
    with EmbeddedService(settings) as service, rookery.Client(service.url, service.key) as client:
        optimizer = {"lr": 1e-2}
        job = client.train(
            base_model=str(model),
            environment={"hosted": Checked(), "max_turns": 3},
            policies={
                "solver": {"rank": 4, "optimizer": optimizer},
                "verifier": {"rank": 2, "optimizer": optimizer, "sampling": {"max_tokens": 4}},
                "judge": {"train": False, "base": True, "sampling": {"max_tokens": 3}},
            },
            algorithm={"group_size": 4, "groups_per_step": 2},
            sampling={"max_tokens": 8},
            evaluation={"prompts": 2},
            stop={"steps": STEPS},
        )
        view = job.wait(240)
        assert view.reason == f"solver: {STEPS} steps; verifier: {STEPS} steps", view.reason
        rows = list(job.metrics(follow=False))
        assert sorted((row["policy"], row["policy_step"]) for row in rows) == [
            (name, step) for name in ("solver", "verifier") for step in (1, 2)
        ]
        assert all(row["ratio"] == pytest.approx(1.0, abs=0.05) for row in rows), "each scores its own tokens"
        assert {(row.policy, row.version) for row in job.evaluations()} == {
            (name, version) for name in ("solver", "verifier") for version in (0, STEPS)
        }
        for name, rank in (("solver", 4), ("verifier", 2)):
            assert [version.version for version in job.versions(name)] == list(range(STEPS + 1))
            kept = [job.adapter(version, name).download(tmp_path / f"{name}{version}") for version in (0, STEPS)]
            first, last = (load_file(folder / "adapter_model.safetensors") for folder in kept)
            assert any(not last[key].equal(first[key]) for key in last)
            assert min(weight.shape[0] for key, weight in last.items() if "lora_A" in key) == rank
        replied = client.sample(f"{job.id}/verifier", "say 1", max_tokens=2, seed=1)
        assert replied.policy != client.sample(job.id, "say 1", max_tokens=2, seed=1).policy
