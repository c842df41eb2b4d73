"""The options of a controller that have defaults: what the service passes, and what experiments and tests replace."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rookery.controller.completions import ANSWER_TOKENS
from rookery.controller.job_sinks import SINK_RULES, SinkRules
from rookery.controller.offload.seeding import Seeding
from rookery.controller.rollout.rules import ROLLOUT_RULES, RolloutRules
from rookery.controller.rollout.scheduler import RolloutScheduler
from rookery.controller.sessions.rules import SESSION_RULES, SessionRules
from rookery.controller.weights.gc import ORPHAN_KEEP_SECONDS
from rookery.spec.fleet import Plan


def _nothing(*arguments: object) -> None:
    """There are no workers to start or end."""


@dataclass(frozen=True, kw_only=True)
class LocalWorkers:
    """Asks the cluster for workers; by default there is none, and workers are started by others."""

    provide: Callable[[str], None] = _nothing
    """``provide(model)``: have a worker with that base model, if none is expected."""
    release: Callable[[str], None] = _nothing
    """``release(model)``: end the workers of ``provide``."""
    scale: Callable[[str, int, Sequence[str]], None] = _nothing
    """``scale(model, count, serving)``: have so many rollout workers with it, where those named ``serving`` work."""


@dataclass(frozen=True, kw_only=True)
class ControllerOptions:
    workers: LocalWorkers = field(default_factory=LocalWorkers)
    plan: Plan | None = None
    """The roles that workers are given."""
    random_bytes: Callable[[int], bytes] = secrets.token_bytes
    """The source of tickets; it must be unpredictable."""
    scheduler: type[RolloutScheduler] = RolloutScheduler
    """An experiment may replace this class, and the next one."""
    seeding: type[Seeding] = Seeding
    rollout_rules: RolloutRules = ROLLOUT_RULES
    """Tuned values, as the following ones: no setting changes them."""
    session_rules: SessionRules = SESSION_RULES
    sink_rules: SinkRules = SINK_RULES
    orphan_keep_seconds: float = ORPHAN_KEEP_SECONDS
    answer_tokens: int = ANSWER_TOKENS
