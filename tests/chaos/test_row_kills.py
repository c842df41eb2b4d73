"""Fine-tuning on rows with the real model: a run that is killed at a step ends with the bytes of one that is not."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

MODEL = "smollm2-135m-instruct"
STEPS, KILLED_AFTER = 3, (1,)

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]


def environment(algorithm: str) -> dict[str, Any]:
    if algorithm == "sft":
        texts = [(f"Number {n}?", f"It is {n}.", "Sure?", "Yes.") for n in range(9)]
        roles = ("user", "assistant", "user", "assistant")
        rows: list[Any] = [
            {"messages": [{"role": role, "content": text} for role, text in zip(roles, row, strict=True)]}
            for row in texts
        ]
        rows[0]["messages"][1]["weight"] = 0.5
        return {"id": "demonstrations", "rows": rows}
    pairs = [{"prompt": f"Say {n}.", "chosen": f"{n}!", "rejected": "No."} for n in range(9)]
    return {"id": "preferences", "rows": pairs}


def job(algorithm: str) -> dict[str, Any]:
    return {
        "name": algorithm, "base_model": MODEL, "environment": environment(algorithm), "seed": 3,
        "policies": {"main": {"rank": 4}}, "algorithm": {"name": algorithm, "batch_size": 2}, "stop": {"steps": STEPS},
    }  # fmt: skip


def run(folder: Path, algorithm: str, kills: tuple[int, ...]) -> str:
    """The hash of the final adapter of a run that was killed after these steps, and resumed each time."""
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(job(algorithm)))
    command = [sys.executable, "-m", "rookery.cli", "run", "job.json", "--data", "data", "--adapter", "adapter"]
    for step in (*kills, 0):
        ran = subprocess.Popen(
            command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "ROOKERY_WORKERS": "1"},
        )  # fmt: skip
        assert ran.stdout is not None
        lines = []
        for line in ran.stdout:
            lines.append(line)
            if step and line.split()[:2] == ["step", str(step)]:
                os.killpg(ran.pid, signal.SIGKILL)
                break
        code = ran.wait()
        ran.stdout.close()
        assert code == (-signal.SIGKILL if step else 0), lines
    with closing(sqlite3.connect(folder / "data" / "rookery.db")) as database:
        assert database.execute("SELECT count(*) FROM jobs").fetchone() == (1,)
    return hashlib.sha256((folder / "adapter" / "adapter_model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_a_killed_run_ends_with_the_bytes_of_a_whole_one(algorithm: str, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", algorithm, ())
    assert run(tmp_path / "killed", algorithm, KILLED_AFTER) == whole
