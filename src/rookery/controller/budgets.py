"""Budgets of a job: what its spec may ask of the service's memory, decided before anything is stored or started. Pure.

* The environment's options travel with every episode: they are small, and rows are stored once as a dataset.
* All groups of a step are complete before it is taken, so the tokens of ``max_staleness + 1`` steps are in memory.
* A refusal names the field, the numbers and the setting, and is counted under the setting's name.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rookery.limits import LimitSettings
from rookery.spec.job import EnvironmentSpec, JobSpec

ROWS = {"rows": "dataset", "eval_rows": "eval_dataset"}
"""Options of a ``jsonl`` environment that hold rows, with the option that names their stored dataset."""

SINGLE_TURN = frozenset({"jsonl", "reasoning-gym"})
"""Built-in environments whose episodes end with the first reply."""

COUNTED = ("options_bytes", "job_tokens", "start_crashes", "allowed_models")
"""The limits whose refusals are counted."""


def job_problems(spec: JobSpec, limits: LimitSettings, refused: Counter[str]) -> list[str]:
    """One line per limit that the job exceeds; ``refused`` counts them."""
    problems = []
    options = {name: value for name, value in spec.environment.options.items() if name not in ROWS}
    size = len(json.dumps(options))
    if size > limits.options_bytes:
        refused["options_bytes"] += 1
        problems.append(
            f"environment: its options have {size} bytes without rows, allowed: at most {limits.options_bytes}"
            " (the service's ROOKERY_OPTIONS_BYTES)"
        )
    algorithm, turns = spec.algorithm, _turns(spec.environment.id, spec.environment.max_turns)
    groups = algorithm.groups_per_step * (algorithm.max_staleness + 1)
    tokens = tokens_in_memory(spec.model_dump(include={"algorithm", "environment", "sampling"}))
    if tokens > limits.job_tokens:
        refused["job_tokens"] += 1
        problems.append(
            f"algorithm: {groups} groups in memory (groups_per_step x (max_staleness + 1)) x group_size"
            f" {algorithm.group_size} x max_tokens {spec.sampling.max_tokens} x turns {turns} = {tokens} tokens,"
            f" allowed: at most {limits.job_tokens} (the service's ROOKERY_JOB_TOKENS)"
        )
    return problems


def tokens_in_memory(spec: Mapping[str, Any]) -> int:
    """Sampled tokens that the groups of a stored job may hold at once."""
    algorithm, environment = spec["algorithm"], spec["environment"]
    groups = algorithm["groups_per_step"] * (algorithm["max_staleness"] + 1)
    most = environment.get("max_turns", EnvironmentSpec.model_fields["max_turns"].default)
    turns = _turns(environment["id"], most)
    return int(groups * algorithm["group_size"] * spec["sampling"]["max_tokens"] * turns)


def _turns(environment: str | None, most: int) -> int:
    return 1 if environment in SINGLE_TURN else most


def groups_at_once(spec: JobSpec, limits: LimitSettings) -> int:
    """Groups of the job that may run at once; at least one."""
    return max(1, limits.job_episodes // spec.algorithm.group_size)


def as_jsonl(rows: Sequence[Any]) -> bytes:
    """Rows as the content of a JSONL file."""
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
