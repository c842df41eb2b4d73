"""The number of rollout workers of each base model, computed again after every step of its jobs
(:mod:`rookery.scheduling.elastic`), and passed to the cluster where the settings allow it to change.

* Only policies whose rollouts and training overlap count: a strictly synchronous trainer waits whatever the pool is.
* A window belongs to one number of workers: it begins again when that changes, so that a worker that still starts, or
  one that was just lost, is not asked for twice.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from rookery.clock import Clock
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.fleet.worker import Worker
from rookery.scheduling.elastic import LEAST_STEPS, StepWindow, wanted_workers, within
from rookery.settings import Settings

log = logging.getLogger("rookery.controller.rollout.elastic")


@dataclass
class _Step:
    """A step of a window."""

    ended: float
    """By the monotonic clock."""
    busy: float
    """The seconds with requests of all workers by its end."""
    waited: float
    seconds: float
    entered: int
    """Trajectories that became complete since the step before."""
    consumed: int


@dataclass
class _Window:
    """The last steps of asynchronous policies of one base model, with one number of workers."""

    workers: frozenset[str]
    """Their names."""
    before: _Step
    """The step before its first one: its end and its busy seconds are the beginning of the window."""
    steps: deque[_Step]
    entered: int = 0
    """Trajectories that became complete since the last step."""
    wanted: int | None = None
    """The number of workers that the last steps led to; None for the first ones."""
    quiet: int = 0
    """Steps since the cluster was asked for that number."""

    def seen(self) -> StepWindow:
        steps, last = self.steps, self.steps[-1]
        count = max(1, len(self.workers))
        elapsed = max(1e-9, last.ended - self.before.ended) * count
        return StepWindow(
            count, len(steps), sum(step.waited for step in steps), sum(step.seconds for step in steps),
            sum(step.entered for step in steps), sum(step.consumed for step in steps),
            min(1.0, max(0.0, (last.busy - self.before.busy) / elapsed)),
        )  # fmt: skip


class ElasticPool:
    def __init__(
        self,
        settings: Settings,
        window: int,
        clock: Clock,
        fleet: Fleet,
        busy_seconds: Callable[[Worker], float],
        scale: Callable[[str, int, Sequence[str]], None],
    ) -> None:
        """``window`` is the most optimizer steps by which the number of workers is computed.
        ``busy_seconds(worker)`` is the time for which it has had requests. ``scale(model, count, serving)`` asks for
        so many rollout workers of a base model, of which those of these names serve now."""
        self._settings = settings.cluster
        self._window_steps = window
        self._clock = clock
        self._fleet = fleet
        self._busy_seconds = busy_seconds
        self._scale = scale
        self._windows: dict[str, _Window] = {}

    def pools(self) -> list[dict[str, Any]]:
        """For each base model with rollout workers, their number, and the wanted one, if it is known."""
        models = dict.fromkeys(worker.hello.model for worker in self._fleet.all() if worker.working)
        bounds = (self._settings.scale_min, self._settings.scale_max) if self._settings.scale_max else (None, None)
        return [
            {"model": model, "workers": len(self._workers(model)), "wanted": self.wanted(model),
             "least": bounds[0], "most": bounds[1]}
            for model in models
        ]  # fmt: skip

    def wanted(self, model: str) -> int | None:
        """The number of rollout workers that suits the load; None where no asynchronous job has taken steps enough."""
        found = self._windows.get(model)
        return found.wanted if found is not None else None

    def entered(self, model: str, trajectories: int) -> None:
        """So many trajectories for an asynchronous policy are complete."""
        self._window(model).entered += trajectories

    def step(self, model: str, *, waited: float, seconds: float, consumed: int) -> None:
        """An asynchronous policy took a step with ``consumed`` trajectories in ``seconds``, for ``waited`` of which
        there were too few trajectories."""
        window = self._window(model)
        if len(window.steps) == window.steps.maxlen:
            window.before = window.steps[0]
        window.steps.append(self._step(model, waited, seconds, window.entered, consumed))
        window.entered, window.quiet = 0, window.quiet + 1
        acts = self._settings.scale_max > 0
        awaited = acts and window.wanted not in (None, len(window.workers))  # the cluster still starts or ends workers
        if len(window.steps) < (self._window_steps if awaited else min(LEAST_STEPS, self._window_steps)):
            return
        wanted = wanted_workers(window.seen())
        if acts:
            wanted = within(wanted, self._settings.scale_min, self._settings.scale_max)
        if wanted != window.wanted:
            log.info("base model %s: %d rollout workers, wanted %d", model, len(window.workers), wanted)
        if wanted != window.wanted or window.quiet >= self._window_steps:  # a worker that failed is started again
            window.quiet = 0
            self._request(model, wanted)
        window.wanted = wanted
        if acts and wanted != len(window.workers):
            self._windows[model] = self._new(model, wanted)

    def keep(self, models: Collection[str]) -> None:
        """Jobs of these base models run: for the others the least number of workers is enough."""
        for model in self._windows.keys() - {*models}:
            del self._windows[model]
            self._request(model, self._settings.scale_min)

    def _request(self, model: str, wanted: int) -> None:
        """Have the cluster provide this number of workers, where the settings allow it to change."""
        if self._settings.scale_max:
            self._scale(model, wanted, [worker.name for worker in self._workers(model)])

    def _step(self, model: str, waited: float, seconds: float, entered: int, consumed: int) -> _Step:
        """A step that ends now."""
        busy = sum(self._busy_seconds(worker) for worker in self._workers(model))
        return _Step(self._clock.monotonic(), busy, waited, seconds, entered, consumed)

    def _window(self, model: str) -> _Window:
        """The present window, a new one where the workers have changed."""
        window = self._windows.get(model)
        if window is None or {worker.name for worker in self._workers(model)} != window.workers:
            window = self._windows[model] = self._new(model, window.wanted if window is not None else None)
        return window

    def _new(self, model: str, wanted: int | None) -> _Window:
        names = frozenset(worker.name for worker in self._workers(model))
        return _Window(names, self._step(model, 0.0, 0.0, 0, 0), deque(maxlen=self._window_steps), wanted=wanted)

    def _workers(self, model: str) -> Sequence[Worker]:
        return self._fleet.serving("rollout", model)
