"""The service follows a plan: each worker that the plan names plays the roles that it has there.

Once all of the plan's workers are there, the plan holds as written. When some leave, the roles of those that are there
are planned again, and changed where no job can run otherwise, or where the predicted gain over the steps that are left
exceeds the cost of moving (:mod:`rookery.scheduling.plan.replan`). By the same rule the roles of the plan come back
with its workers. One that has left before is expected to stay as long as it did then: where it comes and leaves again
and again, no role of the others flaps.

No worker gets a role with which it was not started. A worker that the plan's fleet does not name keeps the roles with
which it was started. So does one that was started without a role that the plan gives it, or with another base model;
it counts as missing. Policies train where they end first, by the speeds of the fleet's machines.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

from rookery.aio import Signal, unless
from rookery.clock import Clock
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.fleet.worker import Worker
from rookery.errors import UserError
from rookery.scheduling.plan.predict import PLAYS, Role, devices_of, predict, role_of
from rookery.scheduling.plan.replan import replan
from rookery.spec.fleet import Plan, read_plan
from rookery.storage.store import Writer
from rookery.tokenization.registry import canonical

log = logging.getLogger("rookery.controller")

SETTLE_SECONDS = 5.0
"""Between a worker's coming or leaving and the next plan: machines tend to come and leave together."""

LOOK_SECONDS = 600.0
"""Between two reviews at most: meanwhile a job may have started, for whose steps it pays to move."""

LEAVING = ("suspect", "draining", "gone")
"""States of workers that are not there: one that is suspect has lost its work, and may return as one that has left."""

NAMES_SHOWN = 8
"""Missing workers that a line names."""


def plan_to_follow(path: Path) -> Plan:
    """The plan in a file. Raises :class:`UserError` of one line, also where its machines could not run its jobs."""
    plan = read_plan(path)
    models = {canonical(model) for model in (plan.model, *(kind.model for kind in plan.fleet.machines)) if model}
    if len(models) > 1:
        raise UserError(
            f"{path}: its jobs and machines have the base models {' and '.join(sorted(models))}; a plan is for one:"
            " plan again"
        )
    roles = {worker.name: role_of(worker.roles) for worker in plan.workers}
    devices = devices_of(plan.fleet)
    found = predict(plan.fleet, devices, plan.jobs, [roles.get(device.name, "off") for device in devices])
    if found.problem:
        raise UserError(f"{path}: no job could run: {found.problem}; plan again")
    return plan


def train_speeds(plan: Plan) -> dict[str, float]:
    """How quickly each worker of the plan's fleet trains, by name: 1 is the middle one."""
    seconds = {device.name: own for device in devices_of(plan.fleet) if (own := device.machine.train_token) > 0}
    middle = statistics.median(seconds.values()) if seconds else 1.0
    return {name: middle / own for name, own in seconds.items()}


class PlanFollower:
    def __init__(self, plan: Plan, fleet: Fleet, clock: Clock, threads: Writer, steps_left: Callable[[], int]) -> None:
        """``steps_left()``: the most optimizer steps that a running job has still to do."""
        self._plan = plan
        self._fleet = fleet
        self._clock = clock
        self._threads = threads
        self._steps_left = steps_left
        self._devices = {device.name: device for device in devices_of(plan.fleet)}
        self._planned = {worker.name: role_of(worker.roles) for worker in plan.workers}
        self._roles: dict[str, Role] = {name: self._planned.get(name, "off") for name in self._devices}
        self._changed = Signal()
        self._named: tuple[list[str], list[str]] = [], []
        """Workers of the plan that were not there at the last review, and those that were unlike the plan."""
        self._complete = False
        """Whether all of them were there at one."""
        self._joined: dict[str, float] = {}
        """When each worker of the fleet that is there joined, in monotonic seconds."""
        self._stays: dict[str, float] = {}
        """Seconds from the joining to the loss of each worker that was lost, the last time."""
        self.moves = 0
        """Roles that were changed since the start."""

    def on_worker_joined(self, worker: Worker) -> None:
        """Give it the roles of the plan, before any work."""
        role = self._roles.get(worker.name)
        if role is not None and self._able(worker):
            self._fleet.set_roles(worker, frozenset(PLAYS[role]))
        if worker.name in self._devices:
            self._joined[worker.name] = self._clock.monotonic()
        self._changed.notify()

    def _able(self, worker: Worker) -> bool:
        """Whether it was started with the roles that it has in the plan, and with the plan's base model."""
        roles = PLAYS[self._planned.get(worker.name, "off")]
        return {*roles} <= {*worker.hello.roles} and canonical(self._plan.model) in ("", worker.hello.model)

    def on_worker_lost(self, worker: Worker) -> None:
        """It drains, or its connection was lost, or it did not return: the first of these ends its stay."""
        newest = self._fleet.get(worker.name)
        if newest is not None and newest is not worker:
            return  # its process has reconnected
        if (joined := self._joined.pop(worker.name, None)) is not None:
            self._stays[worker.name] = self._clock.monotonic() - joined
        self._changed.notify()

    async def watch(self) -> None:
        """Plan again after each change, where workers have stayed as long as they were expected to, and after
        :data:`LOOK_SECONDS`."""
        change, stay = self._changed.next, math.inf
        while True:
            await unless(self._clock.sleep(min(stay, LOOK_SECONDS)), change.wait())
            await self._clock.sleep(SETTLE_SECONDS)
            change = self._changed.next
            stay = await self.review()

    def _stay(self, names: Iterable[str]) -> float:
        """Seconds for which all of these workers are expected to stay: each as long as the last time before it was
        lost, or as long again as it has been there now; infinite if none was ever lost."""
        now = self._clock.monotonic()
        return min((max(self._stays[name], now - self._joined[name]) for name in names if name in self._stays),
                   default=math.inf)  # fmt: skip

    async def review(self) -> float:
        """Plan for the workers that are there, with the plan's roles if all of its workers are. Returns the seconds
        for which that was planned."""
        there = [worker for worker in self._fleet.all() if worker.state not in LEAVING]
        workers = {worker.name: worker for worker in there if worker.name in self._devices and self._able(worker)}
        names = [name for name in self._devices if name in workers]
        connected = {worker.name for worker in there}
        absent = [name for name in self._planned if name not in connected]
        unlike = [name for name in self._planned if name in connected and name not in workers]
        if absent and absent != self._named[0]:
            log.warning("the plan names workers that are not there: %s; start them, or plan again", short_list(absent))
        if unlike and unlike != self._named[1]:
            log.warning(
                "workers have not the roles or the base model of the plan: %s; start them again without --roles and"
                " with the plan's model, or plan again", short_list(unlike),
            )  # fmt: skip
        self._named = absent, unlike
        if not names:
            return math.inf
        planned: list[Role] | None = None
        if self._planned.keys() <= workers.keys():
            planned = [self._planned.get(name, "off") for name in names]
            if not self._complete:  # roles were moved only because the others had not joined yet
                self._complete = True
                self._apply(dict(zip(names, planned, strict=True)))
                return math.inf
        devices = [replace(self._devices[name], may=frozenset(workers[name].hello.roles)) for name in names]
        roles = [self._roles[name] for name in names]
        stay = self._stay(names)
        call = partial(
            replan, self._plan.fleet, devices, self._plan.jobs, roles, self._steps_left(), stay=stay, planned=planned
        )
        if (found := await self._threads(call)) is None:
            return stay
        log.warning(
            "the roles of %d workers change: a step is predicted to take %.1f s instead of %.1f s",
            found.changed, found.after, found.before,
        )  # fmt: skip
        self._apply(dict(zip(names, found.roles, strict=True)))
        return stay

    def _apply(self, roles: dict[str, Role]) -> None:
        for name, role in roles.items():
            self.moves += self._roles[name] != role
            self._roles[name] = role
            if (worker := self._fleet.get(name)) is not None:
                self._fleet.set_roles(worker, frozenset(PLAYS[role]))


def short_list(names: list[str]) -> str:
    """The first of the names, and how many more there are."""
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
