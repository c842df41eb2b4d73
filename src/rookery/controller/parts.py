"""The parts that a controller is made of, where an experiment may give it others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rookery.controller.fleet import Fleet
from rookery.controller.ports import Clock
from rookery.controller.rollouts import Rollouts
from rookery.controller.seeding import Seeding
from rookery.controller.training import Training
from rookery.settings import Settings


@dataclass(frozen=True)
class Parts:
    rollouts: Callable[[Fleet, Settings, Clock], Rollouts] = Rollouts
    seeding: Callable[[Fleet, Rollouts, Training, Settings, Clock], Seeding] = Seeding


SHIPPED = Parts()
