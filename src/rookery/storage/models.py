"""The tables of the database, each one class; its instances are the values that the rest of the program reads.

* Instances are detached: they hold what a query read, and no change of an attribute reaches the database. Treat them as
  immutable.
* Every row has an owner (``tenant``). Times are wall-clock seconds since the epoch, seeds lie in [0, 2**63), ids are
  chosen by the caller.

A change of this file needs a migration in :mod:`rookery.storage.migrations`.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any, Literal

from sqlalchemy import BigInteger, ForeignKey, Index, Integer, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from rookery.protocol import Manifest
from rookery.storage.columns import Base, SafeText

JobState = Literal["queued", "running", "paused", "completed", "failed", "cancelled"]
FINAL_JOB_STATES: frozenset[JobState] = frozenset({"completed", "failed", "cancelled"})
"""A job that reached one of these never changes its state again."""

GroupState = Literal["open", "ready", "consumed", "dropped", "failed"]
"""open: episodes run · ready: complete, may be trained on · consumed: in exactly one version · dropped: too old, or its
job ended · failed: too few members survived."""

EpisodeState = Literal["open", "done", "failed", "dropped"]

KeyRole = Literal["admin", "tenant", "worker", "host"]
"""admin: every route · tenant: all of its own tenant · worker: connections of workers and of the service's environment
hosts · host: connections of its tenant's environment hosts."""

UploadKind = Literal["dataset", "adapter"]

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]


Id = Annotated[str, mapped_column(primary_key=True)]
Owner = Annotated[str, mapped_column(ForeignKey("tenants.id"))]
OfJob = Annotated[str, mapped_column(ForeignKey("jobs.id"))]
OfPolicy = Annotated[str, mapped_column(ForeignKey("policies.id"), primary_key=True)]
OfSession = Annotated[str, mapped_column(ForeignKey("sessions.id"))]
Number = Annotated[int, mapped_column(primary_key=True, autoincrement=False)]
Small = Annotated[int, mapped_column(Integer)]


class MetaRow(Base):
    """A named value of the whole database: its identity, its epoch, the place of its artifacts, the fleet's usage."""

    __tablename__ = "meta"

    name: Mapped[Id]
    value: Mapped[str]


class TenantRow(Base):
    __tablename__ = "tenants"

    id: Mapped[Id]
    name: Mapped[str]
    created: Mapped[float]
    admin: Mapped[bool]
    limits: Mapped[dict[str, Any]] = mapped_column(default_factory=dict)
    """Limits that are not the service's settings, and the weight (:mod:`rookery.controller.quotas`)."""
    deleted: Mapped[float | None] = mapped_column(default=None)
    """When it was deleted; None while it lives. The row stays for the costs that it caused."""
    stored: Mapped[int] = mapped_column(default=0)
    """Bytes of its rows in the tables :data:`~rookery.storage.migrations.COUNTED`, which the database counts."""


class OwnedRow(Base):
    """Base of the rows that belong to a tenant."""

    __abstract__ = True

    tenant: Mapped[Owner]


class KeyRow(OwnedRow):
    """An API key; only the SHA-256 of its text is stored."""

    __tablename__ = "keys"

    hash: Mapped[Id]
    label: Mapped[str]
    created: Mapped[float]
    revoked: Mapped[float | None] = mapped_column(default=None)
    """When it was revoked; None while it is valid."""
    role: Mapped[KeyRole] = mapped_column(SafeText, default="tenant")
    expires: Mapped[float | None] = mapped_column(default=None)
    """Not valid from then on; None is never."""


class SecretRow(Base):
    """A text that a tenant's jobs use by its name, such as the key of a sink. No route, log or job shows it; whoever
    reads the database can."""

    __tablename__ = "secrets"

    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    name: Mapped[Id]
    value: Mapped[str] = mapped_column(repr=False)
    created: Mapped[float]


class JobRow(OwnedRow, kw_only=True):
    __tablename__ = "jobs"
    __table_args__ = (
        UniqueConstraint("tenant", "idempotency_key"),
        Index("jobs_by_time", "tenant", "created", "id"),
        Index("jobs_by_number", "number"),
        Index("jobs_of_tenant", "tenant", "number"),
    )

    id: Mapped[Id]
    name: Mapped[str]
    spec: Mapped[dict[str, Any]]
    idempotency_key: Mapped[str | None] = mapped_column(default=None)
    request_hash: Mapped[str] = mapped_column(default="")
    """Of the request with that key, by which a repetition is recognised; empty without a key."""
    state: Mapped[JobState] = mapped_column(SafeText, default="queued")
    reason: Mapped[str] = mapped_column(default="")
    """Why it is in this state: one line for its owner."""
    error: Mapped[str] = mapped_column(default="")
    created: Mapped[float]
    started: Mapped[float | None] = mapped_column(default=None)
    finished: Mapped[float | None] = mapped_column(default=None)
    """Set exactly when ``state`` is final."""
    step: Mapped[int] = mapped_column(default=0)
    """Committed optimizer steps."""
    cursor: Mapped[int] = mapped_column(default=0)
    """The ordinal of the next training group."""
    counters: Mapped[dict[str, Any]] = mapped_column(default_factory=dict)
    rng: Mapped[dict[str, Any]] = mapped_column(default_factory=dict)
    crashes: Mapped[Small] = mapped_column(default=0)
    """Crashes of the service that it was shown to have caused, since it last trained a step or ran for a while."""
    resumes: Mapped[bool] = mapped_column(default=False)
    """It was paused by an outage and resumes by itself."""
    number: Mapped[int] = mapped_column(default=0)
    """Larger than that of each job before it: the wall clock may be set back."""


class PolicyRow(OwnedRow, kw_only=True):
    __tablename__ = "policies"
    __table_args__ = (UniqueConstraint("job", "name"), Index("policies_by_start", "warm_start"))

    id: Mapped[Id]
    job: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"), default=None)
    """None for a policy that a client drives: a row of ``models`` names it."""
    name: Mapped[str]
    rank: Mapped[Small]
    alpha: Mapped[float]
    targets: Mapped[list[str]]
    head_version: Mapped[int | None] = mapped_column(default=None)
    """The newest committed version that is intact; None before version 0."""
    warm_start: Mapped[str | None] = mapped_column(default=None)
    """The hash of the adapter from which it is to begin, found at its job's submission; None for a new adapter, and
    once it has version 0 or its job has ended."""
    lease: Mapped[int] = mapped_column(default=0)
    """The epoch under which training operations may commit; 0 is never issued."""


class VersionRow(OwnedRow):
    __tablename__ = "versions"
    __table_args__ = (
        Index("versions_by_hash", "hash", "kept"),
        Index("versions_by_step", "policy", "step"),
        Index("versions_kept", "tenant", "kept", "policy", "version"),
    )

    policy: Mapped[OfPolicy]
    version: Mapped[Number]
    parent: Mapped[int | None]
    manifest: Mapped[Manifest]
    hash: Mapped[str]
    size: Mapped[int]
    """Bytes of its files."""
    step: Mapped[int]
    created: Mapped[float]
    reward: Mapped[float | None] = mapped_column(default=None)
    """The best mean reward among the job's steps that led to it."""
    kept: Mapped[bool] = mapped_column(default=True)
    """False: its bytes may be gone (retired, or lost to corruption)."""
    lost: Mapped[str] = mapped_column(default="")
    """Why its bytes cannot be used, or empty."""
    evaluation: Mapped[float | None] = mapped_column(default=None)
    """Mean reward on held-out prompts."""


class StepRow(OwnedRow):
    """The metrics of one committed optimizer step of a job."""

    __tablename__ = "steps"
    __table_args__ = (Index("steps_by_version", "job", "version"), Index("steps_by_time", "job", "time", "step"))

    job: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[Number]
    version: Mapped[int]
    """The first version of its policy that contains the step."""
    reward: Mapped[float | None]
    """The mean reward of its batch, also among the metrics."""
    metrics: Mapped[dict[str, Any]]
    policy: Mapped[str] = mapped_column(default="")
    """The policy that took it; empty for the only policy of a job."""
    time: Mapped[float] = mapped_column(default=0.0)
    """When it was taken, Unix seconds; also among the metrics."""


class EpisodeRow(OwnedRow, kw_only=True):
    __tablename__ = "episodes"
    __table_args__ = (
        UniqueConstraint("group_id", "member"),
        Index("episodes_by_time", "job", "finished"),
        Index("episodes_by_state", "job", "state", "finished"),
    )

    id: Mapped[Id]
    job: Mapped[OfJob]
    group_id: Mapped[str] = mapped_column(ForeignKey("groups.id"))
    member: Mapped[Small]
    state: Mapped[EpisodeState] = mapped_column(SafeText, default="open")
    version: Mapped[int | None] = mapped_column(default=None)
    """The version of the job's first policy when it began."""
    versions: Mapped[dict[str, Any]] = mapped_column(default_factory=dict)
    """The values of the other policies, by name."""
    seed: Mapped[int]
    turns: Mapped[bytes] = mapped_column(default=b"")
    """Completed turns, in the controller's encoding."""
    trajectories: Mapped[bytes] = mapped_column(default=b"")
    """The trajectories that it produced, in the controller's encoding."""
    train_logprobs: Mapped[bytes] = mapped_column(default=b"")
    """The trainer's log-probabilities of the tokens that it sampled, float32; empty where no gradient was computed."""
    reward: Mapped[float | None] = mapped_column(default=None)
    metrics: Mapped[dict[str, Any]] = mapped_column(default_factory=dict)
    host_instance: Mapped[str] = mapped_column(default="")
    """The environment host process that holds it."""
    agent_keys: Mapped[str] = mapped_column(default="")
    """The hashes of the keys with which its agent calls, separated by spaces; empty without an agent."""
    error: Mapped[str] = mapped_column(default="")
    finished: Mapped[float | None] = mapped_column(default=None)


class GroupRow(OwnedRow, kw_only=True):
    __tablename__ = "groups"
    __table_args__ = (
        UniqueConstraint("job", "ordinal"),
        Index("groups_by_state", "job", "state"),
        Index("groups_by_version", "job", "consumed_by", "ordinal"),
    )

    id: Mapped[Id]
    job: Mapped[OfJob]
    ordinal: Mapped[int]
    """By the job's cursor."""
    prompt: Mapped[bytes]
    """JSON; empty where it is not kept any more."""
    seed: Mapped[int]
    state: Mapped[GroupState] = mapped_column(SafeText, default="open")
    consumed_by: Mapped[int | None] = mapped_column(default=None)
    uses: Mapped[dict[str, Any]] = mapped_column(default_factory=dict)
    """Where several policies train on it, by policy: the version that consumed it, -1 where it was dropped, None while
    neither. It is ready while one is None."""
    min_version: Mapped[int | None] = mapped_column(default=None)
    """The oldest version among its tokens."""
    created: Mapped[float]
    finished: Mapped[float | None] = mapped_column(default=None)
    reason: Mapped[str] = mapped_column(default="")
    episodes: tuple[EpisodeRow, ...] = field(default=())
    """By member; empty where a method does not say that it loads them. Not a column."""


class EvaluationRow(OwnedRow):
    __tablename__ = "evaluations"
    __table_args__ = (Index("evaluations_by_job", "job", "policy", "version"),)

    policy: Mapped[OfPolicy]
    version: Mapped[Number]
    job: Mapped[OfJob]
    prompts: Mapped[Small]
    mean: Mapped[float]
    stderr: Mapped[float]
    results: Mapped[dict[str, Any]]
    created: Mapped[float]
    kept: Mapped[bool] = mapped_column(default=True)
    """False: its prompts and answers are deleted, its figures are there."""

    @property
    def score(self) -> float | None:
        """``mean``, which an evaluation without a completed episode does not have."""
        return self.mean if self.prompts else None

    @property
    def rank(self) -> float | None:
        """The score by which versions are compared, known while the answers are: the mean of a few episodes that
        completed, where most failed, is none."""
        return self.score if 2 * self.prompts >= len(self.results.get("held_out", ())) else None

    @property
    def error(self) -> float | None:
        """``stderr``, of which one prompt, and the loss of rows, have none."""
        return self.stderr if self.prompts > 1 and self.results.get("loss") is None else None


class UploadRow(Base):
    """Bytes that a tenant uploaded; ``hash`` names an artifact."""

    __tablename__ = "uploads"
    __table_args__ = (Index("uploads_by_time", "tenant", "created", "hash", "kind"),)

    hash: Mapped[Id]
    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    kind: Mapped[UploadKind] = mapped_column(SafeText, primary_key=True)
    size: Mapped[int]
    created: Mapped[float]
    name: Mapped[str] = mapped_column(SafeText, default="")
    """Of the file, as the tenant calls it; empty where none was given."""


class SessionRow(OwnedRow, kw_only=True):
    """A client's session; the things that it creates belong to it."""

    __tablename__ = "sessions"
    __table_args__ = (
        UniqueConstraint("tenant", "idempotency_key"),
        Index("sessions_by_time", "tenant", "created", "id"),
    )

    id: Mapped[Id]
    idempotency_key: Mapped[str | None]
    created: Mapped[float]
    seen: Mapped[float]
    """The newest heartbeat that was stored."""
    finished: Mapped[float | None] = mapped_column(default=None)
    status: Mapped[str] = mapped_column(default="")
    """How its client ended it; empty before."""
    sdk_version: Mapped[str]
    name: Mapped[str]
    about: Mapped[dict[str, Any]]
    """The client's tags and metadata."""


class ModelRow(OwnedRow):
    """A policy that a client drives call by call."""

    __tablename__ = "models"
    __table_args__ = (Index("models_by_session", "session"), Index("models_by_time", "tenant", "created", "id"))

    id: Mapped[Id]
    session: Mapped[OfSession]
    base_model: Mapped[str]
    requested_model: Mapped[str]
    """The base model's name as the client wrote it."""
    policy: Mapped[str] = mapped_column(ForeignKey("policies.id"))
    lora: Mapped[dict[str, Any]]
    about: Mapped[dict[str, Any]]
    created: Mapped[float]
    used: Mapped[float]
    done_seq: Mapped[int] = mapped_column(default=-1)
    """The calls up to this one are in the policy's head, or never changed it. -1 before version 0."""
    inflight: Mapped[int | None] = mapped_column(default=None)
    """The version that its in-flight samplers follow."""


class SamplerRow(OwnedRow, kw_only=True):
    """Weights that a client samples from: the base model (``hash`` empty), a version, or (``inflight``) the newest one
    that its model published."""

    __tablename__ = "samplers"
    __table_args__ = (Index("samplers_by_hash", "hash", "kept"), Index("samplers_by_session", "session"))

    id: Mapped[Id]
    session: Mapped[OfSession]
    base_model: Mapped[str]
    requested_model: Mapped[str]
    path: Mapped[str] = mapped_column(default="")
    """The checkpoint it was made from, if any."""
    model: Mapped[str | None] = mapped_column(ForeignKey("models.id"), default=None)
    inflight: Mapped[bool] = mapped_column(default=False)
    policy: Mapped[str] = mapped_column(default="")
    version: Mapped[int] = mapped_column(default=0)
    hash: Mapped[str] = mapped_column(default="")
    rank: Mapped[Small] = mapped_column(default=0)
    alpha: Mapped[float] = mapped_column(default=0.0)
    created: Mapped[float]
    used: Mapped[float]
    kept: Mapped[bool] = mapped_column(default=True)
    """False: its weights may be gone."""


class CheckpointRow(OwnedRow):
    """A version under a name that its owner chose."""

    __tablename__ = "checkpoints"
    __table_args__ = (
        Index("checkpoints_by_hash", "hash"),
        Index("checkpoints_by_time", "tenant", "created", "model", "kind", "name"),
    )

    model: Mapped[str] = mapped_column(ForeignKey("models.id"), primary_key=True)
    kind: Mapped[CheckpointKind] = mapped_column(SafeText, primary_key=True)
    name: Mapped[Id]
    policy: Mapped[str]
    version: Mapped[int]
    manifest: Mapped[Manifest]
    hash: Mapped[str]
    size: Mapped[int]
    created: Mapped[float]
    expires: Mapped[float | None]
    about: Mapped[dict[str, Any]]

    @property
    def path(self) -> str:
        return f"tinker://{self.model}/{self.kind}/{self.name}"


class FutureRow(OwnedRow, kw_only=True):
    """A client's call and, once it has one, its outcome; both in the controller's encoding."""

    __tablename__ = "futures"
    __table_args__ = (Index("futures_by_model", "model", "seq"), Index("futures_by_time", "finished"))

    id: Mapped[Id]
    model: Mapped[str | None] = mapped_column(ForeignKey("models.id"))
    seq: Mapped[int]
    digest: Mapped[str]
    """SHA-256 of the call."""
    call: Mapped[bytes]
    """Empty once nobody can need it again."""
    outcome: Mapped[bytes | None] = mapped_column(default=None)
    created: Mapped[float]
    finished: Mapped[float | None] = mapped_column(default=None)


class EventRow(OwnedRow):
    """A line in the log of a job or a tenant."""

    __tablename__ = "events"
    __table_args__ = (Index("events_by_job", "job", "id"),)

    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    job: Mapped[str | None] = mapped_column(ForeignKey("jobs.id"))
    time: Mapped[float]
    kind: Mapped[str]
    text: Mapped[str]


class UsageRow(Base):
    """The worker time that a job used, or a whole tenant (``job`` empty)."""

    __tablename__ = "usage"

    tenant: Mapped[str] = mapped_column(ForeignKey("tenants.id"), primary_key=True)
    job: Mapped[Id]
    used: Mapped[dict[str, Any]]
    """Counters by kind of worker, in the controller's encoding."""


class SpanRow(Base):
    """The timeline of an hour of a job, of a client's session, of a tenant's other work (``job`` empty), or of the
    workers (``tenant`` empty too)."""

    __tablename__ = "spans"
    __table_args__ = (Index("spans_by_hour", "hour"),)

    tenant: Mapped[Id]
    job: Mapped[Id]
    hour: Mapped[Number]
    """Hours since the epoch, of the ends of its spans."""
    begins: Mapped[float]
    """The start of the first span."""
    count: Mapped[Small]
    spans: Mapped[bytes]
    """In the encoding of :func:`rookery.telemetry.spans.packed`."""
