"""When a plan is made again: machines have joined or left. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rookery.scheduling.plan.predict import Device, Role, predict
from rookery.scheduling.plan.search import search
from rookery.spec.fleet import FleetSpec, JobDemand

LEAST_GAIN = 0.05
"""A smaller predicted gain is within the prediction's error on plans that resemble each other."""

BUDGET = 300
"""Plans that are predicted: a second or two of one thread."""

MOVING_SECONDS = 5.0
"""Each machine whose role changes: requests and policies move, and its caches are cold."""


@dataclass(frozen=True)
class Replan:
    roles: tuple[Role, ...]
    """The roles of the machines that are there."""
    before: float
    """Predicted seconds of a round with the roles until now; infinite if the jobs cannot run with them."""
    after: float
    changed: int
    """Machines whose role changes."""


def replan(
    fleet: FleetSpec,
    devices: Sequence[Device],
    demands: Sequence[JobDemand],
    roles: Sequence[Role],
    steps: int,
    *,
    stay: float = math.inf,
    planned: Sequence[Role] | None = None,
) -> Replan | None:
    """Other ``roles`` for the ``devices`` that are there, ``planned`` or those that a search finds, if they pay: if
    what they save in the ``steps`` that are left, within the seconds for which the devices ``stay``, exceeds the time
    that moving takes, and the gain is above the prediction's error. None: keep the roles."""
    before = predict(fleet, devices, demands, roles).seconds
    if planned is None:
        found = search(fleet, devices, demands, budget=BUDGET, start=roles)
        others, after = found.roles, found.prediction.seconds
    else:
        others, after = tuple(planned), predict(fleet, devices, demands, planned).seconds
    changed = sum(old != new for old, new in zip(roles, others, strict=True))
    if math.isinf(after) or not changed:
        return None
    rounds = min(steps, stay / before)
    if math.isinf(before) or (
        after <= before * (1 - LEAST_GAIN) and (before - after) * rounds > changed * MOVING_SECONDS
    ):
        return Replan(others, before, after, changed)
    return None
