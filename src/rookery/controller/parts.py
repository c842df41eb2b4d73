"""The parts that a controller is made of, where an experiment may give it others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rookery.aio import Clock
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.offload.seeding import Seeding
from rookery.controller.rollout.scheduler import RolloutScheduler
from rookery.controller.training.dispatcher import TrainingDispatcher
from rookery.settings import Settings


@dataclass(frozen=True)
class Overrides:
    rollouts: Callable[[Fleet, Settings, Clock], RolloutScheduler] = RolloutScheduler
    seeding: Callable[[Fleet, RolloutScheduler, TrainingDispatcher, Settings, Clock], Seeding] = Seeding


SHIPPED = Overrides()
