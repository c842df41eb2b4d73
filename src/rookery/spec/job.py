"""A job: one reinforcement-learning task that trains a policy.

Every field, default and bound of a job is defined here and in :mod:`rookery.spec.policy`, and nowhere else.
``docs/job.md`` is generated from both.
"""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from rookery.bounds import INTEGER, STOP_TEXTS, Line, Name, SmallJson, StopText
from rookery.errors import short
from rookery.spec.policy import PolicySpec, Seconds, SpecModel, StrictModel, named

LOSS_PARAMETERS: dict[str, dict[str, float]] = {
    "cross_entropy": {},
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "aipo": {"rho": 4.0},
    "dro": {"beta": 0.05},
    "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
}
"""Losses by name, with their parameters' defaults (``algorithms/losses.py`` has the formulas)."""


BUILTIN_TURNS = {"jsonl": 1, "reasoning-gym": 1, "calculator": 2}
"""The most replies of an episode of each built-in environment."""

MIN_TEMPERATURE = 1e-6
"""Logits over a smaller one can exceed float32."""


def _usable(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"temperature is 0 or at least {MIN_TEMPERATURE:g}")
    return temperature


Temperature = Annotated[float, Field(ge=0), AfterValidator(_usable)]
"""Temperature of a completion: 0 takes the likeliest token."""


class EnvironmentSpec(SpecModel):
    """Where episodes come from. Give exactly one of ``id`` and ``hosted``. With ``id``, every other field is an
    option of that [built-in environment](#built-in-environments). With ``hosted``, the environment is an object in your
    own process and takes no options."""

    model_config = ConfigDict(extra="allow")

    id: Name | None = None
    """A built-in environment: `jsonl`, `calculator`, `reasoning-gym`."""
    hosted: Name | None = None
    """A name that an environment host of yours offers. `Client.train` fills it in."""
    max_turns: int = Field(8, ge=1, le=1000)
    """An episode that has not ended after this many replies is closed with the reward it has."""
    step_timeout: Seconds = 60.0
    """Time limit of `prompts`, `reset` and `step`. A late `reset` or `step` fails its episode; late `prompts` pause the
    job."""
    return_timeout: Seconds = 60.0
    """Time to wait for an environment host that is away, before its episodes fail or, if no host is left, the job
    pauses."""

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

    @property
    def turns(self) -> int:
        """The most replies of an episode."""
        return min(self.max_turns, BUILTIN_TURNS.get(self.id or "", self.max_turns))


class LossSpec(SpecModel):
    """The loss of a token, given as a name (``loss: ppo``) or with its parameters (``loss: {name: ppo,
    clip_high_threshold: 1.28}``). Every parameter is a number above 0. A loss is a pure sum over tokens."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, SmallJson]

    name: Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "aipo", "dro", "gspo"] = "aipo"
    """Which loss."""

    @model_validator(mode="after")
    def _parameters(self) -> LossSpec:
        known = LOSS_PARAMETERS[self.name]
        for key, value in (self.model_extra or {}).items():
            if key not in known:
                raise ValueError(
                    f"{self.name} has no parameter {short(repr(key))}; it has {', '.join(known) or 'none'}"
                )
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
                raise ValueError(f"{key} is a number above 0, given {short(repr(value))}")
        if self.params.get("clip_low_threshold", 0.0) > self.params.get("clip_high_threshold", 1.0):
            raise ValueError("clip_low_threshold is at most clip_high_threshold")
        return self

    @property
    def params(self) -> dict[str, float]:
        return {**LOSS_PARAMETERS[self.name], **{k: float(v) for k, v in (self.model_extra or {}).items()}}


InFlight = Literal["finish", "switch", "recompute"]


class AlgorithmSpec(StrictModel):
    """How rewards become gradients."""

    name: Literal["grpo", "dr_grpo", "rloo", "mean"] = "grpo"
    """Advantages and token weights: [see below](#advantages-and-weights)."""
    group_size: int = Field(8, ge=2, le=1024)
    """Episodes of one prompt."""
    groups_per_step: int = Field(8, ge=1, le=4096)
    """Groups of one optimizer step."""
    max_staleness: int = Field(0, ge=0, le=64)
    """Optimizer steps that may lie between the version of a group's oldest token and the step that trains on it. 0 is
    on-policy: every token of a step was sampled by the version that the step starts from."""
    in_flight: InFlight = "finish"
    """What running episodes do when a new version is published. `finish`: end on the version on which they started.
    `switch`: use the new version from the next token on and keep the KV cache. `recompute`: the same, with the cache
    computed again."""
    micro_batch: int = Field(0, ge=0, le=INTEGER)
    """Training on a step's groups starts when this many of its episodes are complete, in any order. 0 starts with the
    whole step. The gradient is the same sum."""
    loss: Annotated[LossSpec, BeforeValidator(named)] = LossSpec()
    """The loss of a token: a name or a [loss](#loss)."""
    kl_weight: float = Field(0.0, ge=0)
    """Weight of a KL penalty (k3 estimator), added per token. Not with `cross_entropy`, which gives no weight to
    episodes below their group's mean, and not with `full`, which keeps no other model."""
    kl_reference: Literal["start", "base"] = "start"
    """The model that the KL penalty compares with. `start`: the policy's version 0, which after a warm start has its
    weights and otherwise answers like the base model. `base`: the base model."""

    @model_validator(mode="after")
    def _penalty_has_weights(self) -> AlgorithmSpec:
        if self.kl_weight > 0 and self.loss.name == "cross_entropy":
            raise ValueError("kl_weight: with the loss cross_entropy, allowed is 0: it weighs only the better episodes")
        return self


class SamplingSpec(StrictModel):
    """How replies are sampled. There is no top-p and no top-k: the trainer cannot reproduce their probabilities, which
    losses with ratios need."""

    temperature: float = Field(1.0, ge=MIN_TEMPERATURE, le=10)
    """The trainer's log-probabilities use the same temperature."""
    max_tokens: int = Field(64, ge=1, le=131072)
    """Longest reply in tokens, per turn; cut to the rest of the model's context."""
    stop: list[StopText] = Field(default_factory=list, max_length=STOP_TEXTS)
    """A reply ends with the token that completes one of these texts; that token is kept. The model's own end tokens
    always end a reply."""


class EvaluationSpec(StrictModel):
    """Held-out prompts, with the job's own sampling. With ``prompts`` above 0 the first and the last version are always
    evaluated. Prompts are fixed at the first evaluation, so every version answers the same ones with the same noise."""

    every: int = Field(0, ge=0, le=INTEGER)
    """Optimizer steps between evaluations; 0 leaves the first and the last. Only steps that became a version can be
    evaluated."""
    prompts: int = Field(0, ge=0, le=100_000)
    """Number of prompts of the eval split; 0 is no evaluation."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Draws the sampling noise of the evaluation."""


class CheckpointSpec(StrictModel):
    """Which versions are written and kept."""

    keep_last: int = Field(3, ge=1, le=INTEGER)
    """Versions whose adapter is kept. Older ones stay in the history without their bytes."""
    keep_best: bool = True
    """Also keep the version with the best evaluation or, without evaluations, the one from which the training step with
    the best mean reward was taken."""
    commit_every: int = Field(1, ge=1, le=INTEGER)
    """Optimizer steps per durable version, at most `max_staleness` + 1. A crash loses at most this many steps less one;
    rollouts see a version only when it is durable."""


class StopSpec(StrictModel):
    """The job ends at whichever comes first; give at least one."""

    steps: int | None = Field(None, ge=1, le=INTEGER)
    """Optimizer steps."""
    reward: float | None = None
    """Mean reward of a training step at or above this."""
    wall_time: Seconds | None = None
    """Time that the job has run, over restarts; paused time does not count."""
    tokens: int | None = Field(None, ge=1, le=INTEGER)
    """Sampled tokens, those of evaluations included."""

    @model_validator(mode="after")
    def _something(self) -> StopSpec:
        if self.steps is None and self.reward is None and self.wall_time is None and self.tokens is None:
            raise ValueError("at least one of steps, reward, wall_time, tokens")
        return self


class JobSpec(StrictModel):
    """One RL task that trains one policy."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$", max_length=100)
    """Name of the job: 1 to 100 letters, digits, `.`, `_`, `-`. Where several jobs share a name, it means the newest,
    and `NAME~1` the one before it."""
    base_model: Line = Field(min_length=1)
    """Model that the adapter is trained on: a catalogue name (`rookery models`), a hub id, or a folder written as a
    path (`./x`, `/x`), which only the administrator may name."""
    environment: EnvironmentSpec
    """Where episodes come from: [environment](#environment)."""
    policies: dict[Name, PolicySpec] = Field(
        default_factory=lambda: {"main": PolicySpec()}, min_length=1, max_length=16
    )
    """The adapter that is trained, by name: [policies](#policies)."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    """How rewards become gradients: [algorithm](#algorithm)."""
    sampling: SamplingSpec = SamplingSpec()
    """How replies are sampled: [sampling](#sampling)."""
    evaluation: EvaluationSpec = EvaluationSpec()
    """Held-out prompts: [evaluation](#evaluation)."""
    checkpoints: CheckpointSpec = CheckpointSpec()
    """Which versions are written and kept: [checkpoints](#checkpoints)."""
    stop: StopSpec
    """When the job ends: [stop](#stop)."""
    seed: int = Field(0, ge=0, lt=2**63)
    """The order of prompts and the randomness of every episode follow from it."""
    shuffle: bool = True
    """Shuffle the training prompts in each epoch. An endless split is taken in its own order."""

    @field_validator("policies")
    @classmethod
    def _policy_names(cls, value: dict[str, PolicySpec]) -> dict[str, PolicySpec]:
        for name in value:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
                raise ValueError(f"policy name {short(repr(name))}: letters, digits, dot, dash and underscore")
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
            if policy.full and self.algorithm.kl_weight:
                raise ValueError(f"algorithm.kl_weight: not with policies.{name}.full, which keeps no base model")
            schedule = policy.optimizer.schedule
            bounded = schedule.total_steps is not None or self.stop.steps is not None
            if schedule.name in ("linear", "cosine", "uba") and not bounded:
                raise ValueError(
                    f"policies.{name}.optimizer.schedule: {schedule.name} needs total_steps, or stop.steps"
                )
        return self

    def of_policy(self, name: str) -> JobSpec:
        """The job as one of its policies sees it: with that policy alone."""
        return self if len(self.policies) == 1 else self.model_copy(update={"policies": {name: self.policies[name]}})

    @property
    def policy(self) -> tuple[str, PolicySpec]:
        """The job's only policy, with its name."""
        return next(iter(self.policies.items()))

    @property
    def compares_with_start(self) -> bool:
        """Whether the KL penalty needs the weights of version 0, which the base model's alone do not give."""
        algorithm, (_, policy) = self.algorithm, self.policy
        return algorithm.kl_weight > 0 and algorithm.kl_reference == "start" and policy.warm_start is not None


def stored_job(data: dict[str, Any]) -> JobSpec:
    """The job in a row of the database. One from before ``kl_reference`` continues to compare with the base model."""
    algorithm = {"kl_reference": "base", **data.get("algorithm", {})}
    return JobSpec.model_validate({**data, "algorithm": algorithm})
