"""The shared services of the controller, built once and passed to every room. Fields only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rookery.clock import Clock, IdGenerator
from rookery.controller.fleet.env_hosts import EnvironmentHosts
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.offload.seeding import Seeding
from rookery.controller.outages import Outages
from rookery.controller.quotas import Quotas
from rookery.controller.rollout.scheduler import RolloutScheduler
from rookery.controller.training.dispatcher import TrainingDispatcher
from rookery.controller.usage import ModelUse, UsageMeter
from rookery.controller.weights.distribution import AdapterResidency
from rookery.controller.weights.gc import ArtifactCollector
from rookery.environments.base import SplitSizes
from rookery.settings import Settings
from rookery.storage.artifacts import Artifacts
from rookery.storage.store import Store, Writer
from rookery.tokenization.chat import Chat


@dataclass(frozen=True)
class ControllerContext:
    settings: Settings
    clock: Clock
    ids: IdGenerator
    store: Store
    artifacts: Artifacts
    fleet: Fleet
    residency: AdapterResidency
    rollouts: RolloutScheduler
    training: TrainingDispatcher
    seeding: Seeding
    hosts: EnvironmentHosts
    usage: UsageMeter
    models: ModelUse
    quotas: Quotas
    collector: ArtifactCollector
    chat: Callable[[str], Awaitable[Chat]]
    """The chat template and tokenizer of a base model, prepared if they were not."""
    check_environment: Callable[[str, dict[str, Any]], SplitSizes | None]
    """Raises :class:`~rookery.errors.UserError` for a built-in environment that cannot be made with such options.
    Returns the sizes of its splits where they are known."""
    checkers: Writer
    """Runs checks of environments and datasets, which wait for processes of their own."""
    threads: Writer
    """Runs blocking calls of a tenant's work, off the event loop."""
    refused: Counter[str]
    """Refusals by the limit that caused them, since the service started."""
    outages: Outages
    on_metrics: Callable[[str, dict[str, Any]], None]
    """Called with a job's id and the metrics row of each committed step."""
