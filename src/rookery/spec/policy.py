"""The policy of a job: one LoRA adapter and how it is optimised."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from rookery.bounds import FLOAT32, INTEGER, Line, Name

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


Seconds = Annotated[float, BeforeValidator(_seconds), Field(gt=0, allow_inf_nan=False)]


def named(value: Any) -> Any:
    """``"cosine"`` → ``{"name": "cosine"}``."""
    return {"name": value} if isinstance(value, str) else value


class SpecModel(BaseModel):
    """Base of every part of a job: booleans are not accepted as numbers. Field docstrings become the job reference."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        field = cls.model_fields.get(info.field_name or "")
        if isinstance(value, bool) and field is not None and field.annotation is not bool:
            raise ValueError("a value that is neither true nor false")
        return value


class StrictModel(SpecModel):
    """Base of parts in which unknown fields are mistakes."""

    model_config = ConfigDict(extra="forbid")


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
    eps: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.0, ge=0)
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
    """With `job`: which version, if it is still kept; the newest when absent."""
    peft: Line | None = None
    """A PEFT folder on your machine. The Python client and `rookery run` upload it and put `upload` in its place; over
    plain HTTP it is refused."""
    upload: str | None = Field(None, pattern=r"^[0-9a-f]{64}$", max_length=64)
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


class PolicySpec(StrictModel):
    """One adapter, or with ``full`` a whole model, and how it is optimised. ``policies`` maps a name to a policy; a job
    has exactly one for now."""

    rank: int = Field(16, ge=1, le=512)
    """Rank of the LoRA, at most the service's `max_rank` setting."""
    alpha: float | None = Field(None, gt=0, lt=FLOAT32)
    """The adapter's output is scaled by alpha / rank; twice the rank when absent."""
    targets: Annotated[list[Literal["q", "k", "v", "o", "gate", "up", "down"]], BeforeValidator(_targets)] = Field(
        default=["q", "k", "v", "o", "gate", "up", "down"], max_length=100, validate_default=True
    )
    """Layers that carry a LoRA: a list, or `all-linear`, `attention` (q k v o), `mlp` (gate up down)."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Draws the initial A matrices. B starts at zero, so version 0 answers like the base model."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """The [optimizer](#optimizer)."""
    warm_start: WarmStart | None = None
    """Start from existing weights: [warm start](#warm_start)."""
    trainers: int = Field(1, ge=1, le=64)
    """Training workers that compute each step's gradient together, as far as there are so many: the batch is divided
    among them by tokens, and the sums equal those of one worker up to rounding. It pays from several thousand tokens
    per step on; steps between commits (`checkpoints.commit_every` above 1) are taken by one worker."""
    full: bool = False
    """Train all parameters instead of a LoRA: `rank`, `alpha`, `targets`, `warm_start` and `trainers` stay away, and
    `optimizer.lr` is given. A version is a whole model, and its training state takes 16 bytes per parameter."""

    @model_validator(mode="after")
    def _whole_model(self) -> PolicySpec:
        if self.full:
            fields = type(self).model_fields
            for name in ("rank", "alpha", "warm_start", "trainers", "targets"):
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
