"""The shapes of the HTTP API, as its documentation shows them.

What the controller tells (jobs, completions, trajectories) is defined once, beside it; :func:`documented` makes the
documentation's model from it. Answers are sent as the controller gives them, a test holds them against the models here.
Requests are read with the models here, which refuse unknown fields.
"""

from __future__ import annotations

import types
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from pydantic import BaseModel, ConfigDict, Field, create_model

from rookery.controller.jobs.trajectory import Trajectory
from rookery.controller.views import CostView, FleetCost, JobView, Sampled
from rookery.protocol import ChatMessage, Heartbeat


def documented(struct: type[msgspec.Struct]) -> type[BaseModel]:
    """A pydantic model with the fields of ``struct``; structs inside it become models too."""
    hints = get_type_hints(struct)
    fields: dict[str, Any] = {name: (_translated(hints[name]), ...) for name in struct.__struct_fields__}
    model: type[BaseModel] = create_model(struct.__name__, __doc__=struct.__doc__, **fields)
    return model


def _translated(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, msgspec.Struct):
        return documented(annotation)
    if get_origin(annotation) in (list, dict, types.UnionType):
        inner = tuple(_translated(argument) for argument in get_args(annotation))
        if isinstance(annotation, types.UnionType):
            union: Any = inner[0]
            for other in inner[1:]:
                union = union | other
            return union
        return get_origin(annotation)[inner]
    return annotation


Job = documented(JobView)
Jobs = types.GenericAlias(list, (Job,))
Completion = documented(Sampled)

_Cost, _FleetCost = documented(CostView), documented(FleetCost)
_Trajectory, _Turn, _Beat = documented(Trajectory), documented(ChatMessage), documented(Heartbeat)


class MetricsRow(BaseModel):
    """One optimizer step. Beside the fields here: ``reward/<name>`` for each of the environment's own metrics,
    ``lag_share/<n>`` for the share of tokens that were n steps old, and what the loss counts; docs/operations.md says
    what each means. A number that was not finite is null."""

    model_config = ConfigDict(extra="allow")

    step: int
    version: int = Field(description="The version that holds the step")
    time: float = Field(description="Unix seconds")
    reward: float | None
    reward_std: float | None
    episodes: float
    groups: float
    groups_no_variance_share: float
    length_mean: float
    length_max: float
    turns_mean: float
    staleness_mean: float
    staleness_max: float
    versions_mean: float = Field(description="Versions that a mean episode's tokens came from")
    tokens: float = Field(description="That carried the loss")
    tokens_sampled: int = Field(description="By the job so far")
    cost: float | None = Field(None, description="Of the job so far")
    lr: float
    loss: float | None = None
    entropy: float | None = None
    kl: float | None = None
    ratio: float | None = None
    clipped_share: float | None = None
    logp_diff_mean: float | None = None
    logp_diff_max: float | None = None
    grad_norm: float | None = None
    skipped: float | None = None
    seconds: float | None = Field(None, description="The optimizer's own")
    queue_seconds: float = Field(alias="seconds/queue")
    generation_seconds: float = Field(alias="seconds/generation")
    environment_seconds: float = Field(alias="seconds/environment")
    waiting_seconds: float = Field(alias="seconds/waiting")
    train_seconds: float = Field(alias="seconds/train")
    commit_seconds: float | None = Field(None, alias="seconds/commit", description="Absent after a crash between both")
    seed_seconds: float | None = Field(None, alias="seconds/seed", description="Where remote workers are used")
    trainer_wait_seconds: float | None = Field(None, alias="seconds/trainer_wait")
    remote_wait_seconds: float | None = Field(None, alias="seconds/remote_wait")
    remote_workers: float | None = None


class Event(BaseModel):
    """Something that happened to a job."""

    time: float
    kind: str
    text: str


class EpisodeRow(BaseModel):
    """An episode that ended. ``messages``, ``trajectories`` and ``finish`` are there while its text is kept."""

    episode: str
    group: str
    ordinal: int = Field(description="The group's number in the job")
    group_state: str
    consumed_by: int | None = Field(description="The version that was trained on it")
    prompt: Any
    state: str
    version: int | None
    reward: float | None
    metrics: dict[str, float | None]
    error: str
    finished: float | None
    messages: list[_Turn] | None = None  # type: ignore[valid-type]
    trajectories: list[_Trajectory] | None = None  # type: ignore[valid-type]
    finish: Literal["done", "max_turns", "context"] | None = None
    seconds: dict[str, float] | None = Field(None, description="In the queue, in generation, in the environment")


class HeldOutRow(BaseModel):
    prompt: Any
    reward: float | None
    answer: str
    metrics: dict[str, float | None]
    error: str


class Evaluation(BaseModel):
    """A version's held-out figures. ``prompts`` counts the episodes that ended well."""

    version: int
    prompts: int
    mean: float
    stderr: float | None
    split: str
    seed: int
    held_out: list[HeldOutRow]


class Version(BaseModel):
    """``kept``: whether its bytes are still there; ``lost``: why it was stepped back from, empty otherwise."""

    version: int
    parent: int | None
    hash: str
    step: int
    created: float
    metrics: dict[str, Any]
    kept: bool
    lost: str
    evaluation: float | None


class BaseModelRow(BaseModel):
    name: str
    state: Literal["loaded", "prepared", "known", "refused"]
    reason: str = Field(description="Why it is refused")
    note: str
    workers: int


class WorkerRow(BaseModel):
    name: str
    state: Literal["joining", "catching up", "serving", "suspect", "draining", "gone"]
    seconds: float = Field(description="In this state")
    model: str
    roles: list[str]
    kind: Literal["reserved", "preemptible"]
    price: float = Field(description="Of an hour, in its owner's unit")
    address: str = Field(description="Where other workers may pull adapters from it; empty where they may not")
    device: str
    host: str
    pid: int
    adapters: int = Field(description="That it said it has")
    requests: int = Field(description="That it was given and has not ended")
    tokens_per_second: float = Field(description="Sampled, over its last beats")
    note: str = Field(description="What an operator should know, such as why it is given nothing")
    max_flush_tokens: int = Field(description="The most tokens that one of its flushes brought")
    beat: _Beat | None  # type: ignore[valid-type]


class RequestModel(BaseModel):
    """Base of what is asked for: an unknown field is a mistake."""

    model_config = ConfigDict(extra="forbid")


class SampleMessage(RequestModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str


class SampleRequest(RequestModel):
    """``target`` is a base model's name, ``JOB`` (its newest version) or ``JOB@VERSION``."""

    target: str = Field(min_length=1)
    messages: list[SampleMessage] = Field(min_length=1)
    max_tokens: int = Field(256, ge=1, le=131072)
    temperature: float = Field(1.0, ge=0, le=10, description="0 takes the likeliest token each time")
    seed: int | None = Field(None, ge=0, lt=2**63, description="The same seed gives the same text; drawn when absent")
    stop: list[str] = Field(default_factory=list, max_length=16)


class DatasetAnswer(BaseModel):
    dataset: str = Field(description="SHA-256 of the bytes; jobs name it as environment.dataset")
    rows: int


class AdapterAnswer(BaseModel):
    adapter: str = Field(description="Hash of the upload; jobs name it as policies.<name>.warm_start.upload")


class NewTenant(RequestModel):
    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")


class TenantAnswer(BaseModel):
    id: str
    name: str
    created: float


class NewKey(RequestModel):
    label: str = Field("", max_length=100)


class KeyAnswer(BaseModel):
    key: str = Field(description="Shown once; the service keeps only its hash")
    tenant: str
    label: str


class KeyRow(BaseModel):
    """A key; its text is nowhere."""

    id: str = Field(description="Names the key where it is revoked")
    label: str
    created: float
    revoked: float | None = Field(description="Since when it is nobody's")


class TenantCost(BaseModel):
    """Everything that a tenant used. ``reserved_alone`` is told by job, for jobs may be of several base models."""

    tenant: str
    name: str
    cost: _Cost  # type: ignore[valid-type]


class Costs(BaseModel):
    tenants: list[TenantCost]
    workers: list[_FleetCost]  # type: ignore[valid-type]


class PromptRow(BaseModel):
    messages: list[dict[str, str]]
    text: str = Field(description="As the chat template renders it")
    tokens: int


class DryRun(BaseModel):
    """What a job would be: every default filled in, and three of its prompts as the policy would read them."""

    spec: dict[str, Any]
    prompts: list[PromptRow]


class Health(BaseModel):
    """The figures of ``/metrics``: jobs by state, totals since the service started, and how things are now."""

    jobs: dict[str, int]
    totals: dict[str, int | float]
    gauges: dict[str, int | float]
