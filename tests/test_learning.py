"""The real model really learns: on-policy and with bounded staleness, side by side on one resident base.

The task is to write a sentence as strict JSON, from a JSONL file with a named verifier. The best constant answer earns
little more than the reward for valid JSON. The held-out prompts are the same before and after.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from pathlib import Path

import pytest

import rookery
from rookery.server.launcher import EmbeddedService
from rookery.settings import Settings

MODEL = "smollm2-135m-instruct"
TRAINING, HELD_OUT = 100, 128
"""Rewards of single texts are spread by 0.6 before and after: so many tell a gain of 0.15 from none."""
STEPS = 5
LEARNING_RATE = 5.0e-4
"""Twice that learns no more in these steps, and with stale data the reward falls back for a step now and then."""
NAMES = "Maria John Anna Peter Lucy Omar Nina Paul Rosa Kenji Ivan Elsa Mina Carl Dora Emil Faye Gita Hans Jana".split()
CITIES = "Paris Rome Cairo Oslo Delhi Tokyo Madrid Berlin Dublin Athens Lisbon Vienna Prague Boston Denver".split()


def write_rows(path: Path) -> None:
    """Pairs of a name and a city, held-out ones last."""
    pairs = random.Random("contacts").sample(list(itertools.product(NAMES, CITIES)), TRAINING + HELD_OUT)
    with path.open("w", encoding="utf-8") as file:
        for name, city in pairs:
            example = [
                {"role": "user", "content": "Hugo moved to Lima. As JSON:"},
                {"role": "assistant", "content": '{"name": "Hugo", "city": "Lima"}'},
            ]
            messages = [*example, {"role": "user", "content": f"{name} moved to {city}. As JSON:"}]
            file.write(json.dumps({"messages": messages, "name": name, "city": city}) + "\n")


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_on_policy_and_stale_jobs_learn_side_by_side(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.jsonl")
    settings = Settings.load(data=tmp_path / "data", port=0, models=MODEL)
    jobs: dict[int, rookery.Job] = {}
    with EmbeddedService(settings) as service, rookery.Client(service.url, service.key) as client:
        for staleness in (0, 2):
            jobs[staleness] = client.train(
                name=f"contacts-{staleness}",
                base_model=MODEL,
                environment={
                    "id": "jsonl",
                    "path": str(tmp_path / "rows.jsonl"),
                    "eval_last": HELD_OUT,
                    "verifier": {"name": "json", "strict": True, "fields": {"name": "name", "city": "city"}},
                },
                policies={"main": {"rank": 8, "optimizer": {"lr": LEARNING_RATE}}},
                algorithm={"group_size": 8, "groups_per_step": 6, "max_staleness": staleness},
                sampling={"max_tokens": 24},
                evaluation={"prompts": HELD_OUT},
                stop={"steps": STEPS},
                seed=1,
            )
        for staleness, job in jobs.items():
            assert job.wait()["state"] == "completed"
            rows = list(job.metrics(follow=False))
            assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
            assert max(row["staleness_max"] for row in rows) <= staleness
            first, last = job.evaluations()
            before = [result["reward"] for result in first.held_out]
            after = [result["reward"] for result in last.held_out]
            assert [result["prompt"] for result in first.held_out] == [result["prompt"] for result in last.held_out]
            gains = [b - a for a, b in zip(before, after, strict=True)]
            mean = sum(gains) / HELD_OUT
            error = math.sqrt(sum((gain - mean) ** 2 for gain in gains) / (HELD_OUT - 1) / HELD_OUT)
            shown = f"staleness {staleness}: {sum(before) / HELD_OUT:.3f}, then {sum(after) / HELD_OUT:.3f}"
            assert mean > 2 * error, shown
