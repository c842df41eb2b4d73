"""Files of Prime's hosted training as jobs: what they mean here, what is named, what is refused."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from rookery.errors import UserError
from rookery.spec.parsing import parse_job
from rookery.spec.prime import job_of_prime, read_prime

PLAIN = """
model = "Qwen/Qwen3-0.6B"
max_steps = 100
batch_size = 32
rollouts_per_example = 8
[sampling]
max_tokens = 512
[[env]]
id = "primeintellect/alphabet-sort"
"""

WHOLE = """
model = "Qwen/Qwen3-0.6B"
max_steps = 20
batch_size = 16
rollouts_per_example = 4
learning_rate = 1e-4
lora_alpha = 16
oversampling_factor = 2.0
max_async_level = 2
trajectory_strategy = "interleaved"
env_file = ["secrets.env"]
[sampling]
max_tokens = 128
temperature = 0.8
enable_thinking = false
[[env]]
id = "team/alphabet-sort@1.2"
name = "my run!"
args = { min_turns = 3 }
[eval]
interval = 10
num_examples = 5
rollouts_per_example = 2
[[eval.env]]
id = "team/other"
[wandb]
project = "p"
[later]
field = 1
"""


def test_a_file_is_a_job() -> None:
    job, notes = job_of_prime(tomllib.loads(PLAIN))
    spec = parse_job(job)
    assert (spec.name, spec.base_model, spec.stop.steps) == ("alphabet-sort", "Qwen/Qwen3-0.6B", 100)
    assert spec.environment.options == {"package": "alphabet-sort"} and spec.environment.id == "verifiers"
    assert (spec.algorithm.group_size, spec.algorithm.groups_per_step, spec.sampling.max_tokens) == (8, 4, 512)
    assert [note.partition(":")[0] for note in notes] == ["env.id's owner and version"]


def test_every_field_is_used_or_named(tmp_path: Path) -> None:
    file = tmp_path / "prime.toml"
    file.write_text(WHOLE)
    job, notes = read_prime(file)
    spec = parse_job(job)
    assert spec.name == "my-run" and spec.policies["main"].alpha == 16 and spec.policies["main"].optimizer.lr == 1e-4
    assert spec.algorithm.max_staleness == 2 and spec.sampling.temperature == 0.8
    assert (spec.evaluation.every, spec.evaluation.prompts) == (10, 5)
    options = {"package": "alphabet-sort", "eval_last": 5, "config": {"taskset": {"min_turns": 3}}}
    assert spec.environment.options == options
    assert {note.partition(":")[0] for note in notes} == {
        "oversampling_factor", "trajectory_strategy", "env_file", "sampling.enable_thinking", "eval.env", "wandb",
        "eval.rollouts_per_example", "later", "env.id's owner and version",
    }  # fmt: skip
    assert all("\n" not in note and "no meaning here; " in note for note in notes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": None}, "model: missing"), ({"model": 3}, "model: given 3"), ({"max_steps": "x"}, "max_steps: given"),
        ({"max_steps": True}, "max_steps: given True"), ({"batch_size": 30}, "batch_size: given 30"),
        ({"batch_size": 4}, "batch_size: given 4"), ({"rollouts_per_example": 1}, "at least 2"),
        ({"rollouts_per_example": 0}, "at least 2"), ({"env": []}, "env: there are 0"),
        ({"env": ["x"]}, "env: there are 1"),
        ({"env": [{"id": "a"}, {"id": "b"}]}, "env: there are 2"), ({"env": [{}]}, "env.id: missing"),
        ({"env": [{"id": "a", "args": 3}]}, "env.args: given 3"), ({"sampling": 3}, "sampling: given 3"),
        ({"eval": {"interval": "x"}}, "eval.interval"), ({"learning_rate": "x"}, "learning_rate"),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_followed_is_refused(changes: dict[str, Any], said: str) -> None:
    given = {**tomllib.loads(PLAIN), **changes}
    with pytest.raises(UserError, match=said) as refused:
        job_of_prime({name: value for name, value in given.items() if value is not None})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [b"a = ", b"\xff", b"a" * 100, b"[[[["])
def test_a_file_that_is_no_toml_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "prime.toml"
    file.write_bytes(content)
    with pytest.raises(UserError, match="is not TOML"):
        read_prime(file)
    with pytest.raises(UserError, match="cannot be read"):
        read_prime(tmp_path / "absent.toml")
