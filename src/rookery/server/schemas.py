"""The request and response models of ``/api/v1``, as its documentation shows them.

Views of jobs, costs, completions and episodes are defined by the controller (:mod:`rookery.controller.views`,
:mod:`rookery.controller.episode_views`), which returns them; the routes build the other responses of rows. Request
models refuse unknown fields. A number that is not finite becomes null.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, FailFast, Field, model_validator

from rookery.bounds import (
    CONVERSATION,
    GIVEN_NAME,
    METRICS,
    PRINTABLE,
    STOP_TEXTS,
    GivenModel,
    Line,
    Name,
    StopText,
    Text,
)
from rookery.controller.views import CostView, RunView
from rookery.errors import count_of
from rookery.protocol import MOST_POLICIES
from rookery.spec.parsing import MAX_PROBLEMS
from rookery.spec.policy import Temperature
from rookery.storage.models import KeyRole

Role = Literal["system", "user", "assistant", "tool"]


class RunPage(BaseModel):
    """A page of jobs in short."""

    runs: list[RunView]
    total: int = Field(description="Jobs on all pages")


class AccountView(BaseModel):
    """The holder of the key of a request."""

    tenant: str
    name: str
    role: KeyRole
    limits: dict[str, float] = Field(description="Every limit that holds for the tenant, and its weight")
    tokens_today: int = Field(description="Sampled and trained on since 00:00 UTC")
    used: dict[str, float] = Field(description="What counts against some of the limits now, by their names")
    cost: CostView


class SignInLink(BaseModel):
    path: str = Field(description="Opened in a browser within a minute, it signs in once")


class MetricsRow(BaseModel):
    """One optimizer step. Further fields: ``reward/<name>`` for each metric of the environment, the mean over the
    ``reward_episodes/<name>`` episodes that have it; ``lag_share/<n>`` for the share of tokens that were n steps old;
    and the loss's own metrics; docs/operations.md explains each. A number that was not finite is null. A step on rows
    has no reward and none of the fields of episodes, but ``rows``, ``rows_cut`` and ``rows_empty``."""

    model_config = ConfigDict(extra="allow")

    step: int
    version: int = Field(description="The version that holds the step")
    time: float = Field(description="Unix seconds")
    reward: float | None = None
    reward_std: float | None = None
    episodes: float | None = None
    groups: float | None = None
    zero_variance_share: float | None = None
    length_mean: float
    length_max: float
    turns_mean: float | None = None
    staleness_mean: float | None = None
    staleness_max: float | None = None
    versions_mean: float | None = Field(None, description="Versions that a mean episode's tokens came from")
    tokens: float = Field(description="Tokens that carried the loss")
    tokens_sampled: int | None = Field(None, description="Sampled by the job so far")
    cost: float | None = Field(None, description="Cost of the job so far")
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
    seconds: float | None = Field(None, description="Of the optimizer step")
    queue_seconds: float | None = Field(None, alias="seconds/queue")
    generation_seconds: float | None = Field(None, alias="seconds/generation")
    environment_seconds: float | None = Field(None, alias="seconds/environment")
    waiting_seconds: float = Field(alias="seconds/waiting")
    train_seconds: float = Field(alias="seconds/train")
    commit_seconds: float | None = Field(
        None,
        alias="seconds/commit",
        description="Absent after a crash before it was measured; with commit_every, its share",
    )
    seed_seconds: float | None = Field(None, alias="seconds/seed", description="Present where remote workers are used")
    trainer_wait_seconds: float | None = Field(None, alias="seconds/trainer_wait")
    remote_wait_seconds: float | None = Field(None, alias="seconds/remote_wait")
    remote_workers: float | None = None


class SpanView(BaseModel):
    """A piece of work, or a moment."""

    kind: str = Field(description="waiting, prefill, decode, train, transfer, environment, busy (work of others), idle,"
                      " connected; moments: joined, preemption, migration, switch, commit")  # fmt: skip
    start: float = Field(description="Unix seconds, as all times here")
    end: float
    worker: str = Field(description="Empty for what no worker does")
    tenant: str
    job: str = Field(description="The job, or the session of a client; empty where it is no job's, as the policy")
    policy: str
    text: str
    count: int = Field(description="The number of spans that it stands for")
    covered: float = Field(description="Seconds in which one of several ran; 0 where it stands for itself")


class TimelineView(BaseModel):
    """Spans by their start, as few as a picture of the asked width needs."""

    start: float
    end: float
    resolution: float = Field(description="Spans of one lane that are at most so many seconds apart are one")
    oldest: float = Field(description="Nothing of earlier times is kept")
    complete_from: float = Field(description="Of earlier times, spans are left out: ask for a shorter time")
    spans: list[SpanView]


class TraceView(BaseModel):
    """A trace in Chrome's JSON format."""

    trace_events: list[dict[str, Any]] = Field(alias="traceEvents")
    display_unit: str = Field(alias="displayTimeUnit")
    other: dict[str, Any] = Field(alias="otherData", description="start: the Unix time of the events' time 0;"
                                  " complete_from, where spans before that time are left out")  # fmt: skip


class UsageLine(BaseModel):
    """The usage of one job."""

    tenant: str
    job: str
    name: str
    base_model: str
    state: str
    created: float
    finished: float
    steps: int
    tokens: int = Field(description="Sampled")
    seconds: float = Field(description="Compute time of workers")
    cost: float
    reserved: float
    preemptible: float


class UsagePage(BaseModel):
    jobs: list[UsageLine]
    total: int = Field(description="Jobs on all pages")


class RequestModel(GivenModel):
    """Base of the request models: an unknown field is refused."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _few(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > MAX_PROBLEMS:
            raise ValueError(f"{count_of(len(data), 'field')} are given, most of them unknown")
        return data


def _outcome(value: Any) -> Any:
    """An outcome may be given as true or false, as an environment's ``Step`` takes it."""
    return float(value) if isinstance(value, bool) else value


OutcomeNumber = Annotated[float, BeforeValidator(_outcome)]


class EpisodeOpening(RequestModel):
    wait: float = Field(30.0, ge=0, le=60, description="Seconds to wait for an episode that wants an agent")


class EpisodeOpened(BaseModel):
    """An episode for an agent. Without one, ``episode`` is null and the other fields are absent."""

    episode: str | None
    task: Any = Field(None, description="The row")
    seed: int | None = Field(None, description="The same for all episodes of its group")
    split: Literal["train", "eval"] | None = None
    base_url: str | None = Field(None, description="For clients of OpenAI's API")
    token_url: str | None = Field(None, description="The token face")
    key: str | None = Field(None, description="Opens these addresses until the episode ends")
    models: list[str] | None = Field(None, description="The job's policies, as names for ``model``")


class EpisodeEnd(RequestModel):
    reward: OutcomeNumber = Field(description="Every policy that replied gets it")
    metrics: dict[Name, OutcomeNumber] = Field(default_factory=dict, max_length=METRICS)
    rewards: dict[Name, OutcomeNumber] = Field(
        default_factory=dict, max_length=MOST_POLICIES, description="By policy, in addition to ``reward``"
    )


class EpisodeFailure(RequestModel):
    reason: Line = Field(min_length=1, description="Why the agent failed")


class EpisodeState(BaseModel):
    episode: str
    state: Literal["done", "failed"] = Field(description="As the job counts it")
    error: str | None = Field(None, description="Why it failed")


class SampleMessage(RequestModel):
    role: Role
    content: Text


class SampleRequest(RequestModel):
    """``target`` is a base model's name, ``JOB`` (its newest version) or ``JOB@VERSION``."""

    target: Line = Field(min_length=1)
    messages: Annotated[list[SampleMessage], FailFast()] = Field(min_length=1, max_length=CONVERSATION)
    max_tokens: int = Field(256, ge=1, le=131072)
    temperature: Temperature = Field(1.0, le=10, description="0 always takes the likeliest token")
    seed: int | None = Field(None, ge=0, lt=2**63, description="The same seed gives the same text; drawn when absent")
    stop: list[StopText] = Field(default_factory=list, max_length=STOP_TEXTS)


class UploadedDataset(BaseModel):
    dataset: str = Field(description="SHA-256 of the bytes; jobs name it as environment.dataset")
    rows: int


class UploadedAdapter(BaseModel):
    adapter: str = Field(description="Hash of the upload; jobs name it as policies.<name>.warm_start.upload")


class UploadView(BaseModel):
    hash: str
    kind: Literal["dataset", "adapter"]
    size: int = Field(description="Bytes")
    created: float


class SecretText(RequestModel):
    value: str = Field(
        min_length=1, max_length=4096, pattern=PRINTABLE, repr=False, description="One word of printable ASCII"
    )


class SecretView(BaseModel):
    name: str
    created: float = Field(description="When it was set")


class NewTenant(RequestModel):
    name: str = Field(pattern=GIVEN_NAME, max_length=100)


class TenantView(BaseModel):
    id: str
    name: str
    created: float
    limits: dict[str, float] = Field(description="Every limit that holds for the tenant, and its weight")
    overrides: dict[str, float] = Field(description="Those of them that are not the service's settings")
    tokens_today: int = Field(description="Sampled and trained on since 00:00 UTC")
    requests: int = Field(description="Generations of its clients that wait or run")
    service_seconds: float = Field(description="Processor time of the service for it since the start")
    service_parts: dict[str, float] = Field(description="The same of its requests, hosts, checks and jobs")


Limit = Annotated[int | None, Field(ge=1, le=1 << 53)]


class TenantLimits(RequestModel):
    """Limits to change; null is the service's setting, an absent one stays as it is. Settings ``tenant_…`` explain
    them."""

    jobs: Limit = None
    waiting_jobs: Limit = None
    requests: Limit = None
    request_tokens: Limit = None
    queued_bytes: Limit = None
    adapters: Limit = None
    bytes: Limit = None
    tokens_per_day: Limit = None
    models: Limit = None
    hosts: Limit = None
    metadata_bytes: Limit = None
    uploads: Limit = None
    database_bytes: Limit = None
    service_share: float | None = Field(None, gt=0, le=64)
    requests_per_second: float | None = Field(None, gt=0, le=1e6)
    weight: float | None = Field(None, ge=0.1, le=10, description="Share of engines and trainers relative to others'")


class NewKey(RequestModel):
    label: str = Field("", max_length=100)
    role: KeyRole | None = Field(None, description="What the key opens; by default everything of its tenant")
    lifetime_seconds: float | None = Field(None, gt=0, le=1e10, description="It expires then; null is never")


class CreatedKey(BaseModel):
    key: str = Field(description="Returned once; the service stores only its hash")
    tenant: str
    label: str
    role: KeyRole
    expires: float | None


class KeyView(BaseModel):
    """An API key without its text."""

    id: str = Field(description="Identifies the key, for example to revoke it")
    label: str
    created: float
    revoked: float | None = Field(description="When it was revoked, Unix seconds")
    role: KeyRole
    expires: float | None = Field(description="When it expires, Unix seconds; null is never")
