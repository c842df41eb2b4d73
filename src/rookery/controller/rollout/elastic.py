"""The number of rollout workers of each base model, counted again after every few steps of its jobs
(:mod:`rookery.scheduling.elastic`), and passed to the cluster where the settings allow it to change.

* Only policies whose rollouts and training overlap count: a strictly synchronous trainer waits whatever the pool is.
* A window belongs to one number of workers: it begins again when that changes, so that a worker that still starts, or
  one that was just lost, is not asked for twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from rookery.clock import Clock
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.fleet.worker import Worker
from rookery.scheduling.elastic import StepWindow, wanted_workers, within
from rookery.settings import Settings

log = logging.getLogger("rookery.controller.rollout.elastic")


@dataclass
class _Window:
    """The figures of one base model since its window began."""

    began: float
    busy: dict[str, float] = field(default_factory=dict)
    """By worker, the seconds with requests by the beginning of the window."""
    steps: int = 0
    """Optimizer steps of asynchronous policies."""
    seconds: float = 0.0
    """The time that these steps took."""
    waited: float = 0.0
    """The part of that time in which they waited for trajectories."""
    entered: int = 0
    """Trajectories that became complete."""
    consumed: int = 0
    """Trajectories that steps were taken with."""
    wanted: int | None = None
    """The number of workers that the window before this one led to; None for the first one."""


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
        """``window`` is the number of optimizer steps after which the number of workers is computed again.
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
        window.steps += 1
        window.waited += waited
        window.seconds += seconds
        window.consumed += consumed
        if window.steps < self._window_steps:
            return
        wanted = wanted_workers(self._measured(model, window))
        if self._settings.scale_max:
            wanted = within(wanted, self._settings.scale_min, self._settings.scale_max)
        if wanted != window.wanted:
            log.info("base model %s: %d rollout workers, wanted %d", model, len(window.busy), wanted)
        self._windows[model] = self._new(model, wanted)
        self._request(model, wanted)

    def keep(self, models: Collection[str]) -> None:
        """Jobs of these base models run: for the others the least number of workers is enough."""
        for model in self._windows.keys() - {*models}:
            del self._windows[model]
            self._request(model, self._settings.scale_min)

    def _request(self, model: str, wanted: int) -> None:
        """Have the cluster provide this number of workers, where the settings allow it to change."""
        if self._settings.scale_max:
            self._scale(model, wanted, [worker.name for worker in self._workers(model)])

    def _measured(self, model: str, window: _Window) -> StepWindow:
        workers = self._workers(model)
        elapsed = max(1e-9, self._clock.monotonic() - window.began) * max(1, len(workers))
        busy = sum(self._busy_seconds(worker) - window.busy.get(worker.name, 0.0) for worker in workers)
        return StepWindow(
            max(1, len(workers)), window.waited, window.seconds, window.entered, window.consumed,
            min(1.0, max(0.0, busy / elapsed)),
        )  # fmt: skip

    def _window(self, model: str) -> _Window:
        """The present window, a new one where the workers have changed."""
        window = self._windows.get(model)
        if window is None or {worker.name for worker in self._workers(model)} != window.busy.keys():
            window = self._windows[model] = self._new(model, window.wanted if window is not None else None)
        return window

    def _new(self, model: str, wanted: int | None) -> _Window:
        busy = {worker.name: self._busy_seconds(worker) for worker in self._workers(model)}
        return _Window(self._clock.monotonic(), busy, wanted=wanted)

    def _workers(self, model: str) -> Sequence[Worker]:
        return self._fleet.serving("rollout", model)
