"""The job that tests of clusters run: long texts of a small model, which take some seconds a step."""

from __future__ import annotations

from typing import Any


def job_of_texts(model: str, steps: int = 3) -> dict[str, Any]:
    return {
        "name": "texts", "base_model": model,
        "environment": {
            "id": "jsonl", "rows": [{"prompt": f"Write of {i}.", "answer": "x"} for i in range(7)],
            "verifier": {"name": "regex", "pattern": "[a-m].*[n-z]"},
        },
        "policies": {"main": {"rank": 4, "optimizer": {"lr": 0.01}}},
        "algorithm": {"group_size": 4, "groups_per_step": 4},
        "sampling": {"max_tokens": 400},
        "stop": {"steps": steps},
    }  # fmt: skip
