"""Views of jobs, costs and completions, as every API returns them.

The models are validated when they are built and serialized as they are: the HTTP API uses them as its response models,
and their field docstrings are its documentation.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from rookery.storage.models import JobState as JobState

NUMBER = re.compile(r"[0-9]{1,18}")
"""A version's or a step's number as text: what fits the database and every message."""

BY_OWNER = "{state} by its owner"
"""The reason of a job that its owner paused or cancelled."""


class View(BaseModel):
    model_config = ConfigDict(use_attribute_docstrings=True)


class PolicyView(View):
    name: str
    id: str
    rank: int
    alpha: float
    version: int
    """The newest durable one; of a policy that follows another, the version of that one with which it replies."""
    follows: str = ""
    """The policy whose versions it uses, if it follows one."""


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
    """Who paused it: its owner; an outage, after which it resumes by itself; or a fault that its owner must mend."""
    waits_for: str
    """The resource that a running job waits for: ``engine``, ``environment``, ``trainer``, ``worker: …``, or empty."""
    since: float = 0.0
    """When it came into its state."""
    base_model: str
    step: int
    steps: int | None
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
    trajectory_splits, …"""
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
