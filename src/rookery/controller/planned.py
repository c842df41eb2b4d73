"""The service follows a plan: each worker that the plan names plays the roles that it has there.

While some of the plan's workers are missing, the roles of those that are there are planned again, and changed where the
predicted gain over the steps that are left exceeds the cost of moving (:mod:`rookery.scheduling.plan.replan`); no
worker gets a role with which it was not started. A worker that the plan's fleet does not name keeps the roles with
which it was started. So does one that was started without a role that the plan gives it, or with another base model;
it counts as missing. Policies train where they end first, by the speeds of the fleet's machines.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from rookery.aio import Signal
from rookery.clock import Clock
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.fleet.worker import Worker
from rookery.scheduling.plan.predict import PLAYS, Role, devices_of, role_of
from rookery.scheduling.plan.replan import replan
from rookery.spec.fleet import Plan
from rookery.storage.store import Writer
from rookery.tokenization.registry import canonical

log = logging.getLogger("rookery.controller")

SETTLE_SECONDS = 5.0
"""Between a worker's coming or leaving and the next plan: machines tend to come and leave together."""


NAMES_SHOWN = 8
"""Missing workers that a line names."""


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
        self._missing: list[str] = []
        """Workers of the plan that were not there at the last review."""
        self.moves = 0
        """Roles that were changed since the start."""

    def on_worker_joined(self, worker: Worker) -> None:
        """Before it is given any work."""
        role = self._roles.get(worker.name)
        if role is not None and self._able(worker):
            self._fleet.set_roles(worker, frozenset(PLAYS[role]))
        self._changed.notify()

    def _able(self, worker: Worker) -> bool:
        """Whether it was started with the roles that it has in the plan, and with the plan's base model."""
        roles = PLAYS[self._planned.get(worker.name, "off")]
        return {*roles} <= {*worker.hello.roles} and canonical(self._plan.model) in ("", worker.hello.model)

    def on_worker_lost(self) -> None:
        self._changed.notify()

    async def watch(self) -> None:
        """Plan again after each change."""
        change = self._changed.next
        while True:
            await change.wait()
            await self._clock.sleep(SETTLE_SECONDS)
            change = self._changed.next
            await self.review()

    async def review(self) -> None:
        """Follow the plan if all of its workers are there, else plan for those that are."""
        there = [worker for worker in self._fleet.all() if worker.state not in ("draining", "gone")]
        workers = {worker.name: worker for worker in there if worker.name in self._devices and self._able(worker)}
        names = [name for name in self._devices if name in workers]
        missing = [name for name in self._planned if name not in workers]
        if missing and missing != self._missing:
            log.warning(
                "the plan names workers that are not there, or have not the roles or the base model of the plan: %s;"
                " start workers of these names without --roles, or plan again",
                short_list(missing),
            )
        self._missing = missing
        if not names:
            return
        if self._planned.keys() <= workers.keys():
            self._apply({name: self._planned.get(name, "off") for name in names})
            return
        devices = [replace(self._devices[name], may=frozenset(workers[name].hello.roles)) for name in names]
        roles = [self._roles[name] for name in names]
        call = partial(replan, self._plan.fleet, devices, self._plan.jobs, roles, self._steps_left())
        if (found := await self._threads(call)) is None:
            return
        log.warning(
            "the roles of %d workers change: a step is predicted to take %.1f s instead of %.1f s",
            found.changed, found.after, found.before,
        )  # fmt: skip
        self._apply(dict(zip(names, found.roles, strict=True)))

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
