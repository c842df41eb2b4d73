"""What the controller tells about its things: plain typed data that every face shows as it is."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from rookery.storage.rows import JobState as JobState

NUMBER = re.compile(r"[0-9]{1,18}")
"""A version's or a step's number as text: what fits the database and every message."""


class PolicyView(msgspec.Struct, kw_only=True):
    name: str
    id: str
    rank: int
    alpha: float
    version: int
    """The newest durable one."""


class CostView(msgspec.Struct, kw_only=True):
    """What something cost, in the unit of the workers' prices. Idle time of workers is in none of it."""

    cost: float
    reserved: float
    """Of it, on reserved workers …"""
    preemptible: float
    """… and on preemptible ones."""
    seconds: float
    """Of workers' computing."""
    tokens_per_unit: float | None
    """Sampled tokens per price unit; null where nothing cost anything."""
    reserved_alone: float | None
    """What the work would have cost on reserved workers alone; null where none has been seen to work."""


class FleetCost(msgspec.Struct, kw_only=True):
    """What the workers of one kind with one base model cost. ``used``, ``idle`` and ``waiting`` are all of it."""

    model: str
    kind: str
    hours: float
    """For which they were connected, together."""
    cost: float
    used: float
    """By tenants."""
    idle: float
    """Nobody's: no work, or work whose result never came."""
    waiting: float
    """For work under way, whose owner is known when it ends."""


class JobView(msgspec.Struct, kw_only=True):
    """A job as its owner sees it. Times are Unix seconds, 0 where the thing has not happened."""

    id: str
    name: str
    tenant: str
    """The tenant's name."""
    state: JobState
    reason: str
    """Why it is paused or failed, or how it ended."""
    waits_for: str
    """What a running job waits for right now: ``engine``, ``environment``, ``trainer``, ``worker: …``, or nothing."""
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
    groups_in_flight: int
    groups_ready: int
    tokens: int
    counters: dict[str, int]
    """episodes, episodes_failed, groups_dropped_stale, groups_failed, zero_variance_groups, steps_skipped,
    trajectory_splits, …"""
    cost: CostView
    policies: list[PolicyView]
    created: float
    started: float
    finished: float
    spec: dict[str, Any]


class Sampled(msgspec.Struct, kw_only=True):
    """One completion. ``logprobs`` under the distribution sampled from; ``version`` stamped by the engine."""

    text: str
    tokens: list[int]
    logprobs: list[float]
    finish: str
    version: int
    policy: str
    prompt_tokens: int
