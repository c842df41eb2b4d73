"""Jobs written for Prime Intellect's hosted training: one TOML file with a model, steps, sampling and environments.

The environment becomes ``{id: verifiers}``. Fields that have no meaning here are named, with the reason, and never
dropped in silence; a value that cannot be followed is refused.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rookery.errors import UserError, short

NEEDED = "model, max_steps, batch_size, rollouts_per_example and [[env]]"

MEANINGLESS = {
    "oversampling_factor": "groups without signal are replaced as they occur",
    "trajectory_strategy": "calls that continue an earlier one extend its trajectory, others begin one",
    "env_file": "the environment has the variables of the service that runs it",
    "wandb": "metrics go to the sinks of the service",
    "val": "held-out tasks come from [eval]",
    "buffer": "prompts are drawn in the order of the seed",
    "checkpoints": "every version is kept as the job's checkpoints say",
    "infrastructure": "the service's own workers train",
    "sampling.enable_thinking": "the chat template of the model decides",
    "sampling.reasoning_effort": "the chat template of the model decides",
    "eval.env": "the environment of training is evaluated, on its last tasks",
    "eval.rollouts_per_example": "each prompt is evaluated once",
    "eval.eval_base_model": "the first evaluation is that of the untrained policy",
    "env.id's owner and version": "the package is the one that the administrator installed",
}
"""Why a field is not used here, by its path."""


def read_prime(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The job in a TOML file, and a line for each field that has no meaning here. Raises :class:`UserError`."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the path of a job file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path}: is not TOML ({' '.join(str(error).split())})") from None
    try:
        return job_of_prime(given)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def job_of_prime(given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """As :func:`read_prime`, for the fields of the file."""
    left = _Fields(given, "")
    model, steps = left.take("model", str), left.take("max_steps", int)
    batch, group = left.take("batch_size", int), left.take("rollouts_per_example", int, other="group_size")
    if group < 2:
        raise UserError(f"rollouts_per_example: given {group}, allowed: at least 2, because a group compares replies")
    if batch < group or batch % group:
        raise UserError(f"batch_size: given {batch}, allowed: a multiple of rollouts_per_example, which is {group}")
    environment = _environment(left)
    sampling, evaluation = _Fields(left.take("sampling", dict, {}), "sampling."), {}
    if (held_out := left.take("eval", dict, None)) is not None:
        fields = _Fields(held_out, "eval.")
        prompts = fields.take("num_examples", int, 0)
        evaluation = {"every": fields.take("interval", int, 0), **({"prompts": prompts} if prompts else {})}
        environment["eval_last"] = prompts
        left.unused += fields.rest()
    policy: dict[str, Any] = {}
    if (rate := left.take("learning_rate", float, None)) is not None:
        policy["optimizer"] = {"lr": rate}
    if (alpha := left.take("lora_alpha", float, None)) is not None:
        policy["alpha"] = alpha
    algorithm: dict[str, Any] = {"name": "grpo", "group_size": group, "groups_per_step": batch // group}
    if (level := left.take("max_async_level", int, None)) is not None:
        algorithm["max_staleness"] = level
    chosen = {name: sampling.take(name, kind, None) for name, kind in (("max_tokens", int), ("temperature", float))}
    name = left.take("name", str, None) or environment.pop("name") or environment["package"]
    environment.pop("name", None)
    job: dict[str, Any] = {
        "name": re.sub(r"[^\w.-]+", "-", name).strip("-.") or "prime", "base_model": model, "environment": environment,
        "policies": {"main": policy}, "algorithm": algorithm, "stop": {"steps": steps},
        "sampling": {name: value for name, value in chosen.items() if value is not None},
    }  # fmt: skip
    if evaluation:
        job["evaluation"] = evaluation
    unused = [*left.unused, *sampling.rest(), *left.rest()]
    return job, [f"{field}: no meaning here; {MEANINGLESS.get(field, 'it is not used')}" for field in unused]


def _environment(left: _Fields) -> dict[str, Any]:
    """The environment of ``[[env]]``, with its ``name``."""
    given = left.take("env", list)
    if len(given) != 1 or not isinstance(given[0], Mapping):
        raise UserError(
            f"env: there are {len(given)}, allowed: one; a job has one environment, so write a file for each"
        )
    fields = _Fields(given[0], "env.")
    id, arguments = fields.take("id", str), fields.take("args", dict, {})
    package = id.rsplit("/", 1)[-1].split("@", 1)[0]
    if package != id:
        left.unused.append("env.id's owner and version")
    config = {"config": {"taskset": arguments}} if arguments else {}
    environment = {"id": "verifiers", "package": package, "name": fields.take("name", str, None), **config}
    left.unused += fields.rest()
    return environment


_MISSING: Any = object()


class _Fields:
    """The fields of a table that are not read yet."""

    def __init__(self, given: Mapping[str, Any], prefix: str) -> None:
        self._left, self._prefix = dict(given), prefix
        self.unused: list[str] = []
        """Fields of tables within that are not used."""

    def take(self, name: str, kind: type, default: Any = _MISSING, other: str = "") -> Any:
        """The value of a field, also by its ``other`` name. Raises :class:`UserError`."""
        if other in self._left and name not in self._left:
            name = other
        value = self._left.pop(name, default)
        if value is _MISSING:
            raise UserError(f"{self._prefix}{name}: missing; a file needs at least {NEEDED}")
        if value is default:
            return value
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise UserError(f"{self._prefix}{name}: given {short(repr(value))}, allowed: {_KINDS[kind]}")
        return value

    def rest(self) -> list[str]:
        """The paths of the fields that nobody has read."""
        return [self._prefix + name for name in self._left]


_KINDS = {str: "a text", int: "a whole number", float: "a number", dict: "a table", list: "a list of tables"}
