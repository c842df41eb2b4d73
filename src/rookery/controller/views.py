"""Views of jobs, costs and completions, as every API returns them.

The models are validated when they are built and serialized as they are: the HTTP API uses them as its response models,
and their field docstrings are its documentation.
"""

from __future__ import annotations

import math
import re
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from rookery import protocol
from rookery.storage.models import JobState as JobState

NUMBER = re.compile(r"[0-9]{1,18}")
"""A version's or a step's number as text: what fits the database and every message."""

BY_OWNER = "{state} by its owner"
"""The reason of a job that its owner paused or cancelled."""


class View(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True, from_attributes=True)


class PolicyView(View):
    name: str
    id: str
    rank: int
    alpha: float
    version: int
    """The newest durable one; of a policy that follows another, the version of that one with which it replies."""
    follows: str = ""
    """The policy whose versions it uses, if it follows one."""
    step: int | None = None
    """Its optimizer steps so far. This figure and those below are the job's where it has one policy: then they are null
    here, and likewise before its first step and of a policy that does not train."""
    reward: float | None = None
    """Mean training reward of its last step."""
    loss: float | None = None
    """Loss of its last step, summed over the batch as its algorithm weighs tokens."""
    staleness: float | None = None
    """Mean staleness of the groups of its last step, in optimizer steps."""


class CostView(View):
    """The cost of a job or a tenant, in the unit of the workers' prices. Idle time of workers is not included."""

    cost: float
    reserved: float
    """The part that reserved workers cost."""
    preemptible: float
    """The part that preemptible workers cost."""
    seconds: float
    """Compute time of workers."""
    tokens_per_unit: float | None
    """Sampled tokens per price unit; null where nothing cost anything."""


class FleetCost(View):
    """The cost of the workers of one kind with one base model: the sum of ``used``, ``idle`` and ``waiting``."""

    model: str
    kind: str
    hours: float
    """Time that these workers were connected, summed."""
    cost: float
    used: float
    """Charged to tenants."""
    idle: float
    """Charged to nobody: no work, or work whose result was lost."""
    waiting: float
    """Work in progress, which is charged when it ends."""


class WorkerEventView(View):
    """Something that happened at a worker."""

    number: int
    """Grows with each event, also across restarts of the service: give the last one as ``after``."""
    time: float
    """Unix seconds."""
    event: str
    """Its kind: joined, loaded, catching up, ready, roles, stalled, failed, draining, suspect, gone, adapter loaded,
    pull failed, trained, training moved."""
    worker: str
    model: str
    tenant: str
    """Whose work it concerns; empty where it is no tenant's. Likewise ``job`` and ``policy``."""
    job: str
    policy: str
    text: str
    """One line about it; empty where the kind says all."""


class RunView(View):
    """A job in short. Times are Unix seconds, 0 where the event has not happened."""

    id: str
    name: str
    tenant: str
    """The tenant's name."""
    state: JobState
    reason: str
    """Why it is paused or failed, or how it ended."""
    paused_by: Literal["", "owner", "outage", "fault"] = ""
    """The cause of a pause: the owner; an outage, after which it resumes by itself; or a fault that the owner mends."""
    waits_for: str
    """The resource that a running job waits for: ``engine``, ``environment``, ``trainer``, ``worker: …``, or empty."""
    since: float = 0.0
    """When it came into its state."""
    base_model: str
    step: int
    steps: int | None
    policy: str = ""
    """The policy whose reward, rewards and staleness these are, in a job with several: the first that trains."""
    reward: float | None
    """Mean training reward of the newest step."""
    rewards: list[float]
    """The last steps' mean rewards, for a sparkline."""
    tokens_per_second: float
    """Sampled tokens over the last half minute."""
    staleness: float | None
    """Mean staleness of the newest step's groups, in optimizer steps."""
    tokens: int
    cost: CostView
    created: float
    started: float
    finished: float


class JobView(RunView):
    """A job. Times are Unix seconds, 0 where the event has not happened."""

    hosted: bool | None = None
    """Whether an environment host of the owner is connected that offers the job's environment; null for a built-in."""
    groups_in_flight: int
    groups_ready: int
    counters: dict[str, int]
    """episodes, episodes_failed, groups_dropped_stale, groups_failed, zero_variance_groups, steps_skipped,
    trajectory_splits, … In a job with several policies a counter of single policies is their sum, and each one's is
    COUNTER/POLICY."""
    policies: list[PolicyView]
    spec: dict[str, Any]


class Completion(View):
    """One completion. ``logprobs`` are under the distribution sampled from; the engine stamps ``version``."""

    text: str
    tokens: list[int]
    logprobs: list[float]
    finish: str
    version: int
    policy: str
    prompt_tokens: int


class JobEvent(View):
    """An entry of a job's event log."""

    time: float
    kind: str
    text: str


class HeldOutView(View):
    prompt: Any
    reward: float | None
    answer: str
    metrics: dict[str, float | None]
    error: str


class BestConstantView(View):
    """The fixed reply that earns most, as far as the environment knows one: a policy that earns no more has learned
    nothing about the prompts."""

    reply: str = Field(description="Shortened")
    reward: float = Field(description="Its mean reward")
    prompts: int = Field(description="Number of the prompts")


class EvaluationView(View):
    """The evaluation of a version on held-out prompts. ``kept``: whether the prompts and answers, ``held_out``, still
    exist; those of old evaluations are deleted. ``prompts`` counts the episodes that completed; where there is none,
    ``mean`` is null, and ``held_out`` has the errors of all. A job on rows
    has no rewards: ``prompts`` counts its held-out rows, ``loss`` is theirs, ``accuracy`` the share of pairs in which
    the chosen reply is preferred, and ``mean`` is minus the loss, so that it is higher where a version is better.
    ``stderr`` is the standard error of the mean, null for one prompt and for a job on rows."""

    policy: str
    version: int
    prompts: int
    mean: float | None
    stderr: float | None
    split: str
    seed: int
    kept: bool
    held_out: list[HeldOutView]
    loss: float | None = None
    accuracy: float | None = None
    constant: BestConstantView | None = None


class AlarmView(View):
    name: str
    problem: str = Field(description="What is wrong, with its figures")
    remedy: str = Field(description="What to do")
    policy: str = Field(description="Whose it is, in a job with several policies; empty where it is the whole job's")


class JobHealthView(View):
    alarms: list[AlarmView]
    advice: list[str] = Field(description="About speed and settings; only where nothing is wrong")


class VersionView(View):
    """``kept``: whether its artifact still exists; ``lost``: why the policy was rolled back from it, else empty."""

    version: int
    parent: int | None
    hash: str
    step: int
    created: float
    metrics: dict[str, Any]
    kept: bool
    lost: str
    evaluation: float | None


class BaseModelView(View):
    name: str
    state: Literal["loaded", "prepared", "known", "refused"]
    reason: str = Field(description="Why it is refused")
    note: str
    workers: int
    engine: str = Field(description="`native` or `transformers`; empty where the model's family is not known yet")
    trainer: str
    why: str = Field(description="Reason for the choice of engine and trainer")


class HeartbeatView(View):
    """A worker's last heartbeat. ``progress`` counts finished compute slices."""

    progress: int
    active: int = Field(description="Requests that decode")
    waiting: int = Field(description="Requests that do not decode yet")
    training: int = Field(description="Training operations that are queued or run")
    generated: int = Field(description="Tokens sampled since the process began")
    decode_seconds: float = Field(description="Compute time of generation since the process began")
    train_seconds: float = Field(description="Compute time of training since the process began")
    interactive: int = Field(description="Requests with objectives that it holds")
    lanes: str = Field(
        "",
        description="How it trains and generates at once, and why: `beside: …` or `turns: …`",
    )
    free_tokens: int = Field(description="Of the KV cache: those that no running request occupies")
    receiving: dict[str, int] = Field(description="Bytes that are here of each artifact that it receives, by hash")
    memory_parts: dict[str, tuple[int, int]] = Field(description="(used, budget) in bytes of each part of the budget")
    gauges: dict[str, float | None] = Field(
        description="Figures for the operator, since the process began: the worker gauges of docs/gauges.md"
    )

    @classmethod
    def of(cls, beat: protocol.Heartbeat) -> Self:
        """The fields of a heartbeat that have a field of their name here."""
        view = cls.model_validate(beat, from_attributes=True)
        view.gauges = {name: value if math.isfinite(value) else None for name, value in beat.gauges.items()}
        return view


class WorkerView(View):
    name: str
    state: Literal["joining", "catching up", "serving", "suspect", "draining", "gone"]
    seconds: float = Field(description="In this state")
    model: str
    roles: list[str]
    kind: Literal["reserved", "preemptible"]
    price: float = Field(description="Per hour, in the operator's unit")
    address: str = Field(description="Where other workers read artifacts from it; empty where they cannot")
    site: str = Field(description="Where it runs, as its setting names the place")
    engine: str = Field(description="Its inference engine; empty while it loads")
    device: str
    host: str
    pid: int
    adapters: int = Field(description="Adapters that it reported as cached")
    requests: int = Field(description="Requests in flight")
    tokens_per_second: float = Field(description="Sampled, over its last heartbeats")
    note: str = Field(description="A message for the operator, such as why it gets no work")
    max_flush_tokens: int = Field(description="The most tokens in one of its flushes")
    beat: HeartbeatView | None

    @classmethod
    def of(cls, hello: protocol.Hello, **known: Any) -> Self:
        """The fields of its Hello that have a field of their name here, and those that are ``known`` otherwise."""
        named = cls.model_fields.keys() & {*hello.__struct_fields__}
        return cls(**{name: getattr(hello, name) for name in named} | known)


class PoolView(View):
    """The rollout workers of a base model."""

    model: str
    workers: int = Field(description="Rollout workers that serve")
    wanted: int | None = Field(description="How many suit the wait of the trainers; null without asynchronous jobs")
    least: int | None = Field(description="The service keeps at least so many; null where their number is fixed")
    most: int | None = Field(description="And at most so many")


class TenantCost(View):
    """The cost of all jobs of a tenant."""

    tenant: str
    name: str
    deleted: float | None = Field(None, description="When the tenant was deleted")
    cost: CostView
    service_seconds: float = Field(description="Processor time of the service for it since the start")
    service_parts: dict[str, float] = Field(description="The same of its requests, hosts, checks and jobs")


class Costs(View):
    tenants: list[TenantCost]
    workers: list[FleetCost]


class Health(View):
    """The values of ``/metrics``: jobs by state, totals since the service started, and current gauges."""

    jobs: dict[str, int]
    totals: dict[str, int | float]
    gauges: dict[str, int | float]
