"""A policy of a job: one LoRA adapter, how it is optimised, and where it differs from the rest of the job."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, field_validator, model_validator

from rookery.bounds import (
    FLOAT32,
    FLOAT32_LEAST,
    HASH,
    INTEGER,
    STOP_TEXTS,
    GivenModel,
    Line,
    Name,
    SmallJson,
    StopText,
)
from rookery.errors import short

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
"""The linear layers of a decoder block that can carry a LoRA."""

_GROUPS = {"all-linear": list(TARGETS), "attention": ["q", "k", "v", "o"], "mlp": ["gate", "up", "down"]}

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _seconds(value: Any) -> Any:
    """``90``, ``"90s"``, ``"1.5h"`` → seconds."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*([smhd]?)\s*", value)
        if match is None:
            raise ValueError("a number of seconds, or a number with s, m, h or d, like 30m")
        return float(match[1]) * _UNITS[match[2] or "s"]
    return value


Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0)]


def named(value: Any) -> Any:
    """``"cosine"`` → ``{"name": "cosine"}``."""
    return {"name": value} if isinstance(value, str) else value


class SpecModel(GivenModel):
    """Base of every part of a job. Field docstrings become the job reference."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)


class StrictModel(SpecModel):
    """Base of parts in which unknown fields are mistakes."""

    model_config = ConfigDict(extra="forbid")


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


MIN_TEMPERATURE = 1e-6
"""Logits over a smaller one can exceed float32."""


def _usable(temperature: float) -> float:
    if 0 < temperature < MIN_TEMPERATURE:
        raise ValueError(f"temperature is 0 or at least {MIN_TEMPERATURE:g}")
    return temperature


Temperature = Annotated[float, Field(ge=0), AfterValidator(_usable)]
"""Temperature of a completion: 0 takes the likeliest token."""


def check_parameters(params: dict[str, float]) -> dict[str, float]:
    """The parameters of a loss. Raises ``ValueError`` for numbers that float32 does not hold, in which a loss is
    computed, and for bounds of the ratio that do not enclose 1, the ratio of a token that the trained policy itself
    sampled: with a high bound below 1 no good reply has a gradient."""
    for name, value in params.items():
        if not abs(value) < FLOAT32:
            raise ValueError(f"{name} is below {FLOAT32:g}, given {value:g}")
    low, high = params.get("clip_low_threshold", 1.0), params.get("clip_high_threshold", 1.0)
    if low > 1:
        raise ValueError(f"clip_low_threshold is a bound of the ratio, at most 1, given {low:g}")
    if high < 1:
        raise ValueError(
            f"clip_high_threshold is a bound of the ratio, at least 1, given {high:g}; for an epsilon of {high:g} give"
            f" {1 + high:g}"
        )
    return params


class LossSpec(SpecModel):
    """The loss of a token, given as a name (``loss: ppo``) or with its parameters (``loss: {name: ppo,
    clip_high_threshold: 1.28}``). Every parameter is a number above 0; thresholds are bounds of the ratio, 1 − ε and
    1 + ε. A loss is a pure sum over tokens."""

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
        check_parameters(self.params)
        return self

    @property
    def params(self) -> dict[str, float]:
        return {**LOSS_PARAMETERS[self.name], **{k: float(v) for k, v in (self.model_extra or {}).items()}}


InFlight = Literal["finish", "switch", "recompute"]

ROW_ALGORITHMS = ("sft", "dpo")
"""Algorithms that train on the rows of a dataset; the others train on what the policy sampled."""

_OF_ROWS = {"batch_size": 16, "max_length": 2048, "beta": 0.1}
"""Fields of algorithms on rows, with their values where they are absent."""
_OF_GROUPS = (
    "group_size", "groups_per_step", "max_staleness", "in_flight", "micro_batch", "buffer", "loss", "kl_weight",
)  # fmt: skip


class AlgorithmSpec(StrictModel):
    """How rewards become gradients."""

    name: Literal["grpo", "dr_grpo", "rloo", "mean", "sft", "dpo"] = "grpo"
    """Advantages and token weights: [see below](#advantages-and-weights). `sft` trains on the assistant's turns of the
    environment `demonstrations`, `dpo` on the pairs of `preferences` ([fine-tuning on rows](fine-tuning.md)); of the
    fields below they take `batch_size`, `max_length`, and `dpo` also `beta` and `kl_reference`. The others take the
    rest."""
    batch_size: int | None = Field(None, ge=1, le=4096)
    """`sft`, `dpo`: rows of one optimizer step, 16 when absent."""
    max_length: int | None = Field(None, ge=2, le=131072)
    """`sft`, `dpo`: the most tokens of a conversation, 2048 when absent, also bounded by the model's context. A longer
    one is cut at its end, and counted."""
    beta: float | None = Field(None, gt=0, le=100)
    """`dpo`: how much a difference of log-probabilities counts, 0.1 when absent."""
    group_size: int = Field(8, ge=2, le=1024)
    """Episodes of one prompt."""
    groups_per_step: int = Field(8, ge=1, le=4096)
    """Groups of one optimizer step."""
    max_staleness: int = Field(0, ge=0, le=64)
    """Optimizer steps that may lie between the version of a group's oldest token and the step that trains on it. 0 is
    on-policy: every token of a step was sampled by the version that the step starts from."""
    in_flight: InFlight = "finish"
    """The behaviour of running episodes when a new version is published. `finish`: end on the version of their start.
    `switch`: use the new version from the next token on and keep the KV cache. `recompute`: the same, with the cache
    computed again."""
    micro_batch: int = Field(0, ge=0, le=INTEGER)
    """Training on a step's groups starts when this many of its episodes are complete, in any order; at most
    `group_size` x `groups_per_step`. 0 starts with the whole step. The gradient is the same sum."""
    buffer: Literal["edf", "fifo"] = "edf"
    """Which complete groups are trained on first. `edf`: those whose oldest token was sampled by the oldest version, so
    that they expire first. `fifo`: those that were complete first."""
    loss: Annotated[LossSpec, BeforeValidator(named)] = LossSpec()
    """The loss of a token: a name or a [loss](#loss)."""
    kl_weight: float = Field(0.0, ge=0, lt=FLOAT32)
    """Weight of a KL penalty (k3 estimator), added per token. Not with `cross_entropy`, which gives no weight to
    episodes below their group's mean, and not with `full`, which keeps no other model."""
    kl_reference: Literal["start", "base"] = "start"
    """The model that the KL penalty, or `dpo`, compares with. `start`: the policy's version 0, which after a warm start
    has its weights and otherwise answers like the base model. `base`: the base model."""

    @property
    def on_rows(self) -> bool:
        """Whether it trains on rows, and nothing is sampled."""
        return self.name in ROW_ALGORITHMS

    @property
    def on_pairs(self) -> bool:
        """Whether a row is a prompt with two replies to it, one of them preferred."""
        return self.name == "dpo"

    @property
    def off_policy(self) -> bool:
        """Whether groups may start before the step is committed that is due before theirs. Only such a policy keeps
        more rollout workers busy than a step needs: the elastic pool counts it."""
        return self.max_staleness > 0 and not self.on_rows

    @property
    def overlaps(self) -> bool:
        """Whether it can train while its rollouts run: off policy, or on the first micro-batches of a step. Seeding
        asks this, and the order of rollouts: where it is false, a step waits for its last rollout."""
        return self.off_policy or (self.micro_batch > 0 and not self.on_rows)

    @model_validator(mode="before")
    @classmethod
    def _fields_of_rows(cls, data: Any) -> Any:
        if not isinstance(data, dict) or data.get("name") not in ROW_ALGORITHMS:
            return data
        absent = {name: value for name, value in _OF_ROWS.items() if data.get(name) is None}
        return {**data, **{name: value for name, value in absent.items() if name != "beta" or data["name"] == "dpo"}}

    @model_validator(mode="after")
    def _own_fields(self) -> AlgorithmSpec:
        others = [*(_OF_GROUPS if self.on_rows else _OF_ROWS)]
        if self.name == "sft":
            others += ["beta", "kl_reference"]
        for name in others:
            if getattr(self, name) != type(self).model_fields[name].default:
                meant = "did you mean kl_weight?" if name == "beta" and not self.on_rows else "leave it out"
                raise ValueError(f"{name}: no effect with {self.name}; {meant}")
        return self

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


class ScheduleSpec(StrictModel):
    """The learning rate as a function of the step (``algorithms/schedules.py``). Given as a name (``schedule: cosine``)
    or as a mapping. ``linear``, ``cosine`` and ``uba`` need ``total_steps``, or ``stop.steps`` in its place."""

    name: Literal["constant", "linear", "cosine", "warmup", "uba"] = "constant"
    """`warmup` is constant after its warm-up. `uba` is the unified budget-aware schedule (arXiv 2505.24452)."""
    warmup_steps: int = Field(0, ge=0, le=INTEGER)
    """Steps over which the rate rises to `lr`, before any schedule."""
    total_steps: int | None = Field(None, ge=1, le=INTEGER)
    """Steps over which the schedule runs, warm-up included. `stop.steps` when absent."""
    min_ratio: float = Field(0.0, ge=0, le=1)
    """Lowest rate after warm-up, as a share of `lr`."""
    phi: float = Field(1.0, gt=0, le=2)
    """`uba` only: 2 is cosine, towards 0 constant."""


class OptimizerSpec(StrictModel):
    """AdamW with decoupled weight decay. Master weights, gradients and moments are float32."""

    lr: float = Field(3e-4, gt=0, le=1)
    """Learning rate that the schedule scales."""
    schedule: Annotated[ScheduleSpec, BeforeValidator(named)] = ScheduleSpec()
    """Learning rate over the steps: a name or a [schedule](#schedule)."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, ge=FLOAT32_LEAST, lt=FLOAT32)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0, lt=FLOAT32)
    """Decoupled decay, scaled by the learning rate."""
    grad_clip: float = Field(1.0, ge=0)
    """Global gradient norm; 0 turns clipping off."""


class WarmStart(StrictModel):
    """Start from existing weights: give exactly one of ``job``, ``peft`` and ``upload``. The optimizer starts new.
    ``rank``, ``alpha`` and ``targets`` of this policy must equal theirs, and so must the base model."""

    job: Name | None = None
    """Id or name of a job of yours on the same base model; `NAME~1` is the one before the newest of that name."""
    policy: Name = "main"
    """With `job`: a policy of that job."""
    version: int | None = Field(None, ge=0, lt=2**63)
    """With `job`: which version, if it is still kept; the newest when absent. It is found when the job is submitted,
    and kept until the job has begun, however long it waits."""
    peft: Line | None = None
    """A PEFT folder on your machine. The Python client and `rookery run` upload it and put `upload` in its place; over
    plain HTTP it is refused."""
    upload: str | None = Field(None, pattern=HASH, max_length=64)
    """The hash that `POST /api/v1/adapters` answered."""

    @model_validator(mode="after")
    def _one_source(self) -> WarmStart:
        if sum(source is not None for source in (self.job, self.peft, self.upload)) != 1:
            raise ValueError("exactly one of job, peft and upload")
        return self


def _targets(value: Any) -> Any:
    if isinstance(value, str) and value not in _GROUPS:
        raise ValueError(f"one of {', '.join(_GROUPS)}, or a list of {', '.join(TARGETS)}")
    return _GROUPS[value] if isinstance(value, str) else value


class PolicyAlgorithm(StrictModel):
    """Fields of the job's [algorithm](#algorithm) that have another value for one policy. The groups are the same."""

    name: Literal["grpo", "dr_grpo", "rloo", "mean"] | None = None
    """Advantages and token weights."""
    groups_per_step: int | None = Field(None, ge=1, le=4096)
    """Groups of one optimizer step."""
    max_staleness: int | None = Field(None, ge=0, le=64)
    """Optimizer steps of this policy that may lie between its oldest token in a group and the step that trains on
    it."""
    micro_batch: int | None = Field(None, ge=0, le=INTEGER)
    """Episodes with which training on a step begins."""
    buffer: Literal["edf", "fifo"] | None = None
    """The order of complete groups."""
    loss: Annotated[LossSpec | None, BeforeValidator(named)] = None
    """The loss of a token: a name or a [loss](#loss)."""
    kl_weight: float | None = Field(None, ge=0, lt=FLOAT32)
    """Weight of the KL penalty."""
    kl_reference: Literal["start", "base"] | None = None
    """The model that the KL penalty compares with."""


class PolicySampling(StrictModel):
    """Fields of the job's [sampling](#sampling) that have another value for one policy."""

    temperature: float | None = Field(None, ge=MIN_TEMPERATURE, le=10)
    """Its temperature."""
    max_tokens: int | None = Field(None, ge=1, le=131072)
    """Longest reply in tokens."""
    stop: list[StopText] | None = Field(None, max_length=STOP_TEXTS)
    """Texts that end a reply."""


class PolicyStop(StrictModel):
    """Fields of the job's [stop](#stop) that have another value for one policy."""

    steps: int | None = Field(None, ge=1, le=INTEGER)
    """Optimizer steps of this policy."""
    reward: float | None = None
    """Mean reward of a training step at or above this."""


_FOREIGN_WEIGHTS = {
    "warm_start": ("seed",),
    "base": ("rank", "alpha", "targets", "seed", "full"),
    "follows": ("rank", "alpha", "targets", "seed", "full", "base_model"),
}
"""Fields that a frozen policy does not have which takes its weights from elsewhere."""


class FollowsSpec(StrictModel):
    """A policy without its own weights: it replies with an earlier version of another policy of the job, as the
    opponent in self-play does."""

    policy: Name
    """The policy that it follows, one that trains."""
    every: int = Field(ge=1, le=INTEGER)
    """Optimizer steps of that policy after which its newest version is swapped in. In evaluations it is version 0, so
    that all versions meet the same opponent."""


class PolicySpec(StrictModel):
    """One adapter, or with ``full`` a whole model, and how it is optimised. ``policies`` maps names to policies; the
    environment names the policy of each reply, without a name it is the first one. A name is not of digits alone."""

    rank: int = Field(16, ge=1, le=512)
    """Rank of the LoRA, at most the service's `max_rank` setting."""
    alpha: float | None = Field(None, gt=0, lt=FLOAT32)
    """The adapter's output is scaled by alpha / rank; twice the rank when absent."""
    targets: Annotated[list[Literal["q", "k", "v", "o", "gate", "up", "down"]], BeforeValidator(_targets)] = Field(
        default=["q", "k", "v", "o", "gate", "up", "down"], max_length=100, validate_default=True
    )
    """Layers that carry a LoRA: a list, or `all-linear`, `attention` (q k v o), `mlp` (gate up down)."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Draws the initial A matrices, not with `warm_start`. B starts at zero, so version 0 answers like the base
    model."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """The [optimizer](#optimizer)."""
    warm_start: WarmStart | None = None
    """Start from existing weights: [warm start](#warm_start)."""
    trainers: int = Field(1, ge=1, le=64)
    """Training workers that compute each step's gradient together, as far as there are so many: the batch is divided
    among them by tokens, and the sums equal those of one worker up to rounding. It pays from several thousand tokens
    per step on; steps between commits (`checkpoints.commit_every` above 1) are taken by one worker."""
    full: bool = False
    """Train all parameters instead of a LoRA: `rank`, `alpha`, `targets`, `seed`, `warm_start` and `trainers` stay
    away, and `optimizer.lr` is given. A version is a whole model, and its training state takes 16 bytes per
    parameter."""

    train: bool = True
    """False freezes the policy at the weights that `warm_start` gives, at the base model, or at versions of another
    policy: a judge, an opponent ([several policies](multi-policy.md))."""
    base_model: Line | None = Field(None, min_length=1)
    """Base model of this policy, if it is another than the job's: it replies and trains on other workers. Between
    models, a conversation passes as text."""
    base: bool = False
    """With `train: false`: the base model itself, without an adapter."""
    follows: FollowsSpec | None = None
    """With `train: false`: an earlier version of another policy, swapped in every so many steps:
    [follows](#follows)."""
    algorithm: PolicyAlgorithm | None = None
    """Where this policy's [algorithm](#policy_algorithm) differs from the job's."""
    sampling: PolicySampling | None = None
    """Where this policy's [sampling](#policy_sampling) differs from the job's."""
    stop: PolicyStop | None = None
    """When this policy [stops training](#policy_stop); the job continues until all have."""

    @model_validator(mode="after")
    def _frozen(self) -> PolicySpec:
        if self.train:
            if self.warm_start is not None and self.seed:
                raise ValueError("seed: not with warm_start, which gives the first weights; leave it out")
            if self.base:
                raise ValueError("base: the base model is not trained; give train: false, or leave base out")
            if self.follows is not None:
                raise ValueError("follows: a policy that follows another one is not trained; give train: false")
            return self
        sources = [name for name in ("warm_start", "base", "follows") if getattr(self, name)]
        if not sources:
            raise ValueError(
                "train: a frozen policy needs weights; give warm_start, base: true for the base model, or follows"
            )
        if len(sources) > 1:
            raise ValueError(f"{sources[0]}: not with {sources[1]}; leave one of them out")
        for name in ("optimizer", "algorithm", "stop", "trainers", *_FOREIGN_WEIGHTS.get(sources[0], ())):
            if getattr(self, name) != type(self).model_fields[name].default:
                source = {"base": ", base: true", "follows": " and follows"}.get(sources[0], "")
                raise ValueError(f"{name}: not with train: false{source}; leave it out")
        return self

    @model_validator(mode="after")
    def _whole_model(self) -> PolicySpec:
        if self.full:
            fields = type(self).model_fields
            for name in ("rank", "alpha", "seed", "warm_start", "trainers", "targets"):
                if getattr(self, name) != (list(TARGETS) if name == "targets" else fields[name].default):
                    raise ValueError(f"{name}: not with full: true, which trains all parameters of the base model")
            if "lr" not in self.optimizer.model_fields_set:
                raise ValueError("optimizer.lr: give one; all parameters need a lower one than a LoRA, such as 1e-5")
        return self

    @property
    def lora_rank(self) -> int:
        """0 for a whole model, as in references to its versions."""
        return 0 if self.full else self.rank

    @property
    def scale_alpha(self) -> float:
        return self.alpha if self.alpha is not None else 2.0 * self.rank

    @field_validator("targets")
    @classmethod
    def _not_empty(cls, value: list[str]) -> list[str]:
        if not value:
            raise ValueError("at least one of " + ", ".join(TARGETS))
        return [target for target in TARGETS if target in value]
