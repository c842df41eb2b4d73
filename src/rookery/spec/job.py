"""What a tenant asks for: a job, validated whole before anything is created.

Every field, default and bound of a job lives here and nowhere else. A wrong job is refused by :func:`parse_job` with
one line per mistake: the field's path, what was given, what is allowed.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from rookery.errors import UserError, short

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
"""The linear layers of a decoder block that can carry a LoRA."""

LOSS_PARAMETERS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "aipo": {"rho": 4.0},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
}
"""Losses by name, with their parameters' defaults (algorithms/losses has the formulas)."""

INTEGERS = range(-(2**63), 2**64)
"""Whole numbers that an environment's options may hold: those that a message to its host can carry."""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _seconds(value: Any) -> Any:
    """``90``, ``"90s"``, ``"1.5h"`` → seconds."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([smhd]?)\s*", value)
        if match is None:
            raise ValueError("a number of seconds, or a number with s, m, h or d, like 30m")
        return float(match[1]) * _UNITS[match[2] or "s"]
    return value


Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0, allow_inf_nan=False)]


class Checked(BaseModel):
    """Base of all that follows: true and false are no numbers."""

    @field_validator("*", mode="before")
    @classmethod
    def _truth_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields.get(info.field_name or "")
        if isinstance(value, bool) and field is not None and field.annotation is not bool:
            raise ValueError("a value that is neither true nor false")
        return value


class Part(Checked):
    """Base of every part of a job: unknown fields are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class EnvironmentSpec(Checked):
    """Where episodes come from: a built-in by ``id``, or a process of the tenant's own by ``hosted``; every other field
    is an option of that environment and checked by it."""

    model_config = ConfigDict(extra="allow", frozen=True)

    id: str | None = None
    hosted: str | None = None
    max_turns: int = Field(8, ge=1, le=1000)
    """An episode that has not ended by then is closed with the reward it has."""
    step_timeout: Seconds = 60.0
    """An environment that has not answered a reset or step by then fails that episode."""
    return_timeout: Seconds = 60.0
    """How long episodes wait for an environment host that went away before they fail."""

    @model_validator(mode="after")
    def _one_source(self) -> EnvironmentSpec:
        if (self.id is None) == (self.hosted is None):
            raise ValueError("exactly one of id (a built-in) and hosted (your own process)")
        return self

    @property
    def name(self) -> str:
        """The name under which hosts offer it."""
        return self.hosted if self.hosted is not None else f"builtin:{self.id}"

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.model_extra or {})


class ScheduleSpec(Part):
    """The learning rate as a function of the step (algorithms/schedules)."""

    name: Literal["constant", "linear", "cosine", "warmup", "uba"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    total_steps: int | None = Field(None, ge=1)
    """Steps over which it runs; ``stop.steps`` when absent."""
    min_ratio: float = Field(0.0, ge=0, le=1)
    """The lowest rate, as a share of ``lr``."""
    phi: float = Field(1.0, gt=0, le=2)
    """uba only: 2 is cosine, towards 0 constant."""


def _named(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


class OptimizerSpec(Part):
    """AdamW with decoupled weight decay."""

    lr: float = Field(3e-4, gt=0, le=1)
    schedule: Annotated[ScheduleSpec, BeforeValidator(_named)] = ScheduleSpec()
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, ge=0)
    """Global norm; 0 is off."""


class WarmStart(Part):
    """Begin from weights that exist: a version of one of the tenant's jobs, a PEFT folder (the client uploads it), or
    such an upload by its hash."""

    job: str | None = None
    policy: str = "main"
    version: int | None = Field(None, ge=0, lt=2**63)
    """The job's newest when absent."""
    peft: str | None = None
    upload: str | None = Field(None, pattern=r"^[0-9a-f]{64}$")

    @model_validator(mode="after")
    def _one_source(self) -> WarmStart:
        if sum(source is not None for source in (self.job, self.peft, self.upload)) != 1:
            raise ValueError("exactly one of job, peft and upload")
        return self


def _targets(value: Any) -> Any:
    if value == "all-linear":
        return list(TARGETS)
    if value == "attention":
        return ["q", "k", "v", "o"]
    if value == "mlp":
        return ["gate", "up", "down"]
    return value


class PolicySpec(Part):
    """One adapter and how it is optimised."""

    rank: int = Field(16, ge=1, le=512)
    alpha: float | None = Field(None, gt=0)
    """Scale of the adapter's output, alpha / rank; twice the rank when absent."""
    targets: Annotated[list[Literal["q", "k", "v", "o", "gate", "up", "down"]], BeforeValidator(_targets)] = Field(
        default_factory=lambda: _targets("all-linear")
    )
    """A list of layers, or all-linear, attention, mlp."""
    seed: int = Field(0, ge=0, lt=2**63)
    optimizer: OptimizerSpec = OptimizerSpec()
    warm_start: WarmStart | None = None

    @property
    def scale_alpha(self) -> float:
        return self.alpha if self.alpha is not None else 2.0 * self.rank

    @field_validator("targets")
    @classmethod
    def _not_empty(cls, value: list[str]) -> list[str]:
        if not value:
            raise ValueError("at least one of " + ", ".join(TARGETS))
        return [target for target in TARGETS if target in value]


class LossSpec(Checked):
    """A loss by name; its parameters stand beside the name."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    name: Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "aipo", "dro", "gspo"] = "aipo"

    @model_validator(mode="after")
    def _parameters(self) -> LossSpec:
        known = LOSS_PARAMETERS[self.name]
        for key, value in (self.model_extra or {}).items():
            if key not in known:
                raise ValueError(f"{self.name} has no parameter {key!r}; it has {', '.join(known) or 'none'}")
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
                raise ValueError(f"{key} is a number above 0, given {value!r}")
        if self.params.get("clip_low_threshold", 0.0) > self.params.get("clip_high_threshold", 1.0):
            raise ValueError("clip_low_threshold is at most clip_high_threshold")
        return self

    @property
    def params(self) -> dict[str, float]:
        return {**LOSS_PARAMETERS[self.name], **{k: float(v) for k, v in (self.model_extra or {}).items()}}


InFlight = Literal["finish", "switch", "recompute"]


class AlgorithmSpec(Part):
    """How rewards become gradients."""

    name: Literal["grpo", "dr_grpo", "rloo", "mean"] = "grpo"
    group_size: int = Field(8, ge=2, le=1024)
    """Episodes of one prompt."""
    groups_per_step: int = Field(8, ge=1, le=4096)
    max_staleness: int = Field(0, ge=0, le=64)
    """Optimizer steps that may lie between the version a group began on and the one it trains; 0 is on-policy: every
    token of a step was sampled by the version that the step begins from."""
    in_flight: InFlight = "finish"
    """What running episodes do when a new version is published: finish on the version they began on; switch to the new
    one at their next token, keeping the attention cache; or switch and compute the cache anew. Every token carries its
    own version in all three, and a group is as old as its oldest token."""
    micro_batch: int = Field(0, ge=0)
    """Training on a step's groups begins when so many of its episodes are complete, in any order, while others still
    run; 0 begins with the whole step. The step's gradient is the same sum."""
    loss: Annotated[LossSpec, BeforeValidator(_named)] = LossSpec()
    kl_weight: float = Field(0.0, ge=0)
    """Weight of the KL penalty to the base model, added to the loss per token."""

    @model_validator(mode="after")
    def _penalty_has_weights(self) -> AlgorithmSpec:
        if self.kl_weight > 0 and self.loss.name == "cross_entropy":
            raise ValueError("kl_weight: with the loss cross_entropy, allowed is 0: it weighs only the better episodes")
        return self


class SamplingSpec(Part):
    temperature: float = Field(1.0, gt=0, le=10)
    """Trainer log-probabilities use the same temperature. Top-p and top-k do not exist here: a trainer cannot reproduce
    them exactly, which losses with ratios need."""
    max_tokens: int = Field(64, ge=1, le=131072)
    """Per turn."""
    stop: list[str] = Field(default_factory=list, max_length=16)

    @field_validator("stop")
    @classmethod
    def _no_empty(cls, value: list[str]) -> list[str]:
        if any(not text for text in value):
            raise ValueError("stop strings are not empty")
        return value


class EvaluationSpec(Part):
    """Held-out prompts, sampled with the job's own sampling; the first and the last version are always evaluated."""

    every: int = Field(0, ge=0)
    """Steps between evaluations; 0 leaves the first and the last."""
    prompts: int = Field(0, ge=0, le=100_000)
    """How many prompts of the eval split; 0 is no evaluation."""
    seed: int = Field(0, ge=0, lt=2**63)


class CheckpointSpec(Part):
    keep_last: int = Field(3, ge=1)
    keep_best: bool = True
    """The version with the best evaluation (where there is none, that of the best training step taken from it) outlives
    ``keep_last``."""
    commit_every: int = Field(1, ge=1)
    """Optimizer steps per durable version. A crash loses at most this many steps less one; rollouts see a version only
    when it is durable, so ``max_staleness`` has to allow for commit_every - 1."""


class StopSpec(Part):
    """The job ends at whichever comes first."""

    steps: int | None = Field(None, ge=1)
    reward: float | None = None
    """Mean reward of a training step at or above this."""
    wall_time: Seconds | None = None
    tokens: int | None = Field(None, ge=1)
    """Sampled tokens."""

    @model_validator(mode="after")
    def _something(self) -> StopSpec:
        if self.steps is None and self.reward is None and self.wall_time is None and self.tokens is None:
            raise ValueError("at least one of steps, reward, wall_time, tokens")
        return self


class JobSpec(Part):
    """One RL task that trains one or more policies."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    base_model: str = Field(min_length=1)
    environment: EnvironmentSpec
    policies: dict[str, PolicySpec] = Field(default_factory=lambda: {"main": PolicySpec()}, min_length=1)
    algorithm: AlgorithmSpec = AlgorithmSpec()
    sampling: SamplingSpec = SamplingSpec()
    evaluation: EvaluationSpec = EvaluationSpec()
    checkpoints: CheckpointSpec = CheckpointSpec()
    stop: StopSpec
    seed: int = Field(0, ge=0, lt=2**63)
    shuffle: bool = True
    """Shuffle the training prompts anew each epoch."""

    @field_validator("policies")
    @classmethod
    def _policy_names(cls, value: dict[str, PolicySpec]) -> dict[str, PolicySpec]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
                raise ValueError(f"policy name {name!r}: letters, digits, dot, dash and underscore")
        if len(value) > 1:
            raise ValueError("one policy: jobs with several policies are not supported yet")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> JobSpec:
        if self.checkpoints.commit_every > self.algorithm.max_staleness + 1:
            raise ValueError(
                f"checkpoints.commit_every: given {self.checkpoints.commit_every}, allowed at most"
                f" algorithm.max_staleness + 1 = {self.algorithm.max_staleness + 1}"
            )
        for name, policy in self.policies.items():
            schedule = policy.optimizer.schedule
            bounded = schedule.total_steps is not None or self.stop.steps is not None
            if schedule.name in ("linear", "cosine", "uba") and not bounded:
                raise ValueError(
                    f"policies.{name}.optimizer.schedule: {schedule.name} needs total_steps, or stop.steps"
                )
        return self

    @property
    def policy(self) -> tuple[str, PolicySpec]:
        """The job's only policy, with its name."""
        return next(iter(self.policies.items()))


class SpecError(UserError):
    """A job that is refused. ``problems`` holds one line per mistake."""

    status = 422

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("the job is refused: " + "; ".join(problems))


def _known_fields(path: tuple[Any, ...]) -> list[str]:
    """Field names allowed at ``path`` of a job (the last part is the unknown one)."""
    model: Any = JobSpec
    for part in path[:-1]:
        if isinstance(part, int) or not (isinstance(model, type) and issubclass(model, BaseModel)):
            return []
        if part in model.model_fields:
            annotation: Any = model.model_fields[part].annotation
            inner = [a for a in getattr(annotation, "__args__", ()) if isinstance(a, type) and issubclass(a, BaseModel)]
            model = inner[-1] if inner else annotation
        elif not (model is JobSpec or path[0] == "policies"):
            return []
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _problem(error: ErrorDetails) -> str:
    path = ".".join(str(part) for part in error["loc"]) or "job"
    if error["type"] == "extra_forbidden":
        known = _known_fields(tuple(error["loc"]))
        near = difflib.get_close_matches(str(error["loc"][-1]), known, 1)
        hint = f"did you mean {near[0]}?" if near else "allowed: " + ", ".join(known) if known else "no such field"
        return f"{path}: unknown field; {hint}"
    if error["type"] == "missing":
        return f"{path}: missing"
    message = error["msg"].removeprefix("Value error, ")
    message = re.sub(r"^(Input|String|List|Dictionary) should (be )?", "", message)
    message = re.sub(r"a valid dictionary or instance of \w+|a valid dictionary", "a mapping of fields", message)
    if error["type"] == "value_error" and isinstance(error["input"], dict):
        return f"{path}: {message}" if path != "job" else message
    return f"{path}: given {_shown(error['input'])}, allowed: {message}"


def _shown(value: Any) -> str:
    """``value`` as JSON, short enough for a line."""
    return short(json.dumps(value, default=str))


def parse_job(data: Any) -> JobSpec:
    """The job in ``data`` (what YAML or JSON gave). Raises :class:`SpecError` naming every mistake at once."""
    if not isinstance(data, dict):
        raise SpecError([f"job: given {type(data).__name__}, allowed: a mapping of fields (name, base_model, …)"])
    try:
        json.dumps(data, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise SpecError([f"job: given a text with {half!r}, allowed: whole characters (that is half of one)"]) from None
    try:
        spec = JobSpec.model_validate(data)
    except ValidationError as error:
        raise SpecError([_problem(detail) for detail in error.errors(include_url=False)]) from None
    problems = [
        f"{path}: given {_shown(value)}, allowed: a whole number from -2^63 to 2^64 - 1, or a text"
        for path, value in _leaves(spec.environment.options, "environment")
        if isinstance(value, int) and value not in INTEGERS
    ]
    if problems:
        raise SpecError(problems)
    return spec


def _leaves(data: Any, path: str) -> Iterator[tuple[str, Any]]:
    """What ``data`` holds that holds nothing itself, each with its path, in order."""
    left = [(path, data)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            left += [(f"{path}.{key}", inner) for key, inner in reversed(value.items())]
        elif isinstance(value, list):
            left += [(f"{path}.{number}", inner) for number, inner in reversed(list(enumerate(value)))]
        else:
            yield path, value


def read_job(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON job file. Raises :class:`UserError` when there is none."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the path of a job file") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: is neither YAML nor JSON ({' '.join(str(error).split())})") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds {type(data).__name__}, not a mapping of fields (name, base_model, …)")
    return data
