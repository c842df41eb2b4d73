"""A job among those of 31 other tenants learns what it learns alone: a real service, worker and environments."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.support.small_model import save_small_model

import rookery
from rookery.server.launcher import EmbeddedService
from rookery.settings import Settings

STEPS, TENANTS = 4, 32


class Letters(rookery.Environment):
    """A reply earns by its different letters."""

    def prompts(self, split: str) -> list[int]:
        return list(range(8))

    def reset(self, prompt: Any, seed: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"say {prompt}"}]

    def step(self, reply: rookery.Reply) -> rookery.Step:
        return rookery.Step(reward=len(set(reply.text)) / 8, done=True)


def begun(client: rookery.Client, model: str, seed: int) -> rookery.Job:
    return client.train(
        base_model=model,
        environment={"hosted": Letters()},
        policies={"main": {"rank": 4, "optimizer": {"lr": 1e-2}}},
        algorithm={"group_size": 4, "groups_per_step": 2},
        sampling={"max_tokens": 8},
        seed=seed,
        stop={"steps": STEPS},
    )


def rewards(job: rookery.Job) -> list[float]:
    view = job.wait(480)
    assert view.reason == f"{STEPS} steps", view.reason
    return [row.reward for row in job.metrics(follow=False)]


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_curve_of_a_job_is_the_same_among_32_tenants(tmp_path: Path) -> None:
    """On-policy, number by number: each curve is that of the same job alone."""
    model = str(save_small_model(tmp_path / "model"))
    folders = {"data": tmp_path / "data", "cache": tmp_path / "cache"}
    settings = Settings.load({}, port=0, models=model, workers=1, **folders)
    with EmbeddedService(settings) as service, ExitStack() as stack:
        owner = stack.enter_context(rookery.Client(service.url, service.key))
        clients = []
        for number in range(TENANTS):
            tenant = owner.add_tenant(f"tenant-{number}")
            clients.append(stack.enter_context(rookery.Client(service.url, owner.add_key(tenant.id).key)))
        alone = {seed: rewards(begun(clients[seed], model, seed)) for seed in (0, TENANTS - 1)}
        crowd = [begun(client, model, seed) for seed, client in enumerate(clients)]
        curves = [rewards(job) for job in crowd]
        assert len(set(map(tuple, curves))) > TENANTS / 2, "other seeds, other curves"
        for seed, curve in alone.items():
            assert curves[seed] == pytest.approx(curve, abs=1e-9)
