"""What the database gives back: frozen values, detached from any connection.

A ``...Row`` has one field per column of the table it comes from. A ``New...`` holds what the caller decides about a row
that does not exist yet; owner and states are filled in from the job it belongs to. Times are wall-clock seconds since
the epoch, seeds lie in [0, 2**63), ids are the caller's.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from rookery.protocol import Manifest

JobState = Literal["queued", "running", "paused", "completed", "failed", "cancelled"]
FINAL_JOB_STATES: frozenset[JobState] = frozenset({"completed", "failed", "cancelled"})
"""A job that reached one of these never changes its state again."""

GroupState = Literal["open", "ready", "consumed", "dropped", "failed"]
"""open: episodes run · ready: complete, may be trained on · consumed: in exactly one version · dropped: too old, or its
job ended · failed: too few members survived."""

EpisodeState = Literal["open", "done", "failed", "dropped"]

UploadKind = Literal["dataset", "adapter"]


class TenantRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    created: float
    admin: bool


class KeyRow(msgspec.Struct, frozen=True, kw_only=True):
    """An API key; only the SHA-256 of its text is stored."""

    hash: str
    tenant: str
    label: str
    created: float
    revoked: float | None
    """When it stopped to be valid; None while it is."""


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tenant: str
    name: str
    spec: dict[str, Any]
    idempotency_key: str | None
    state: JobState
    reason: str
    """Why it is in this state: one line for its owner."""
    error: str
    created: float
    started: float | None
    finished: float | None
    """Set exactly when ``state`` is final."""
    step: int
    """Optimizer steps that are committed."""
    cursor: int
    """Training ordinals handed out: the next group has this one."""
    counters: dict[str, Any]
    rng: dict[str, Any]


class PolicyRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tenant: str
    job: str | None
    """None for a policy that a client drives: a row of ``models`` names it."""
    name: str
    rank: int
    alpha: float
    targets: list[str]
    head_version: int | None
    """The newest committed version that is intact; None before version 0."""
    lease: int
    """The epoch under which training operations may commit; 0 was never given out."""


class VersionRow(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    version: int
    tenant: str
    parent: int | None
    manifest: Manifest
    hash: str
    step: int
    created: float
    metrics: dict[str, Any]
    kept: bool
    """False: its bytes may be gone (retired, or lost to corruption)."""
    lost: str
    """Why its bytes cannot be used, or empty."""
    evaluation: float | None
    """Mean reward on held-out prompts."""


class EpisodeRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tenant: str
    job: str
    group_id: str
    member: int
    state: EpisodeState
    version: int | None
    """The policy's version when it began."""
    seed: int
    turns: bytes
    """Completed turns, in the controller's encoding."""
    trajectories: bytes
    """What the episode left, in the controller's encoding."""
    reward: float | None
    metrics: dict[str, Any]
    host_instance: str
    """The environment host process that holds it."""
    error: str
    finished: float | None


class GroupRow(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    tenant: str
    job: str
    ordinal: int
    split: str
    prompt: bytes
    """JSON."""
    seed: int
    state: GroupState
    consumed_by: int | None
    min_version: int | None
    """The oldest version among its tokens."""
    created: float
    finished: float | None
    reason: str
    episodes: tuple[EpisodeRow, ...] = ()
    """By member; empty where a method does not say that it loads them."""


class EvaluationRow(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    version: int
    tenant: str
    job: str
    prompts: int
    mean: float
    stderr: float
    results: dict[str, Any]
    created: float


class UploadRow(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a tenant brought; ``hash`` names an artifact."""

    hash: str
    tenant: str
    kind: UploadKind
    size: int
    created: float


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """A client's visit: what it creates belongs to it."""

    id: str
    tenant: str
    idempotency_key: str | None
    created: float
    seen: float
    """The newest heartbeat that was stored."""
    finished: float | None
    status: str
    """How its client said that it ended; empty before."""
    sdk_version: str
    name: str
    about: dict[str, Any]
    """What the client said about it: tags, metadata."""


class ModelRow(msgspec.Struct, frozen=True, kw_only=True):
    """A policy that a client drives call by call."""

    id: str
    tenant: str
    session: str
    base_model: str
    asked_model: str
    """The base model's name as the client wrote it."""
    policy: str
    lora: dict[str, Any]
    about: dict[str, Any]
    created: float
    used: float
    done_seq: int
    """The calls up to this one are in the policy's head, or never changed it. -1 before version 0."""
    inflight: int | None
    """The version that its in-flight samplers follow."""


class SamplerRow(msgspec.Struct, frozen=True, kw_only=True):
    """Weights that a client samples from: the base model (``hash`` empty), a version, or (``inflight``) the newest one
    that its model published."""

    id: str
    tenant: str
    session: str
    base_model: str
    asked_model: str
    path: str
    """The checkpoint it was made from, if any."""
    model: str | None
    inflight: bool
    policy: str
    version: int
    hash: str
    rank: int
    alpha: float
    created: float
    used: float
    kept: bool
    """False: its weights may be gone."""
    clones: int
    """Clients that joined it."""


CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]


class CheckpointRow(msgspec.Struct, frozen=True, kw_only=True):
    """A version under a name that its owner chose."""

    model: str
    kind: CheckpointKind
    name: str
    tenant: str
    policy: str
    version: int
    manifest: Manifest
    hash: str
    size: int
    created: float
    expires: float | None
    about: dict[str, Any]

    @property
    def path(self) -> str:
        return f"tinker://{self.model}/{self.kind}/{self.name}"


class FutureRow(msgspec.Struct, frozen=True, kw_only=True):
    """A call and, when it has one, its outcome; both in the controller's encoding."""

    id: str
    tenant: str
    model: str | None
    seq: int
    digest: str
    """SHA-256 of the call."""
    call: bytes
    """Empty once nobody can need it again."""
    outcome: bytes | None
    created: float
    finished: float | None


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    tenant: str
    job: str | None
    time: float
    kind: str
    text: str


class NewPolicy(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    rank: int
    alpha: float
    targets: list[str]


class NewEpisode(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    member: int
    seed: int
    version: int | None = None
    """The policy's version that it runs on, where that is decided already."""


class NewGroup(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    ordinal: int
    prompt: bytes
    seed: int
    created: float
    episodes: tuple[NewEpisode, ...]
    split: str = "train"
    """``train`` groups are numbered by the job's cursor; of any other split (job, split, ordinal) must be new."""
