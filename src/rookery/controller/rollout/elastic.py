"""The workers that each base model needs.

* :class:`ModelUse`: local workers start when a base model is needed and end when nothing has used it for a while. Jobs,
  clients that are not idle, and requests use a model. Models that the service was configured with stay loaded.
* :class:`ElasticPool`: the number of its rollout workers is computed again after every step of its jobs
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
from rookery.scheduling.elastic import LEAST_STEPS, PoolStep, change_of, step_window, wanted_workers, within
from rookery.settings import Settings

log = logging.getLogger("rookery.controller.rollout.elastic")


@dataclass
class _Window:
    """The last steps of asynchronous policies of one base model, with one number of workers."""

    workers: frozenset[str]
    """Their names."""
    ended: float
    """The end of the last step by the monotonic clock, at first the beginning of the window."""
    busy: float
    """The seconds with requests of all workers by then."""
    steps: deque[PoolStep]
    entered: int = 0
    """Trajectories that became complete since the last step."""
    wanted: int | None = None
    """The number of workers that the last steps led to; None for the first ones."""
    change: int = 0
    """The sign of its last change."""
    quiet: int = 0
    """Steps since the cluster was asked for that number."""


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
        """The number of rollout workers of each base model that has some, and the wanted one, if it is known."""
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
        window, now, busy = self._window(model), self._clock.monotonic(), self._busy(model)
        step = PoolStep(waited, seconds, window.entered, consumed, now - window.ended, busy - window.busy)
        window.steps.append(step)
        window.ended, window.busy, window.entered, window.quiet = now, busy, 0, window.quiet + 1
        acts = self._settings.scale_max > 0
        awaited = acts and window.wanted not in (None, len(window.workers))  # the cluster still starts or ends workers
        if len(window.steps) < (self._window_steps if awaited else min(LEAST_STEPS, self._window_steps)):
            return
        before = len(window.workers) if window.wanted is None else window.wanted
        wanted = wanted_workers(step_window(len(window.workers), window.steps), before, window.change)
        if acts:
            wanted = within(wanted, self._settings.scale_min, self._settings.scale_max)
        if wanted != window.wanted:
            log.info("base model %s: %d rollout workers, wanted %d", model, len(window.workers), wanted)
        if wanted != window.wanted or window.quiet >= self._window_steps:  # a worker that failed is started again
            window.quiet = 0
            self._request(model, wanted)
        window.wanted, window.change = wanted, change_of(before, wanted, window.change)
        if acts and wanted != len(window.workers):
            self._windows[model] = self._new(model, window)

    def keep(self, models: Collection[str]) -> None:
        """Jobs of these base models run: for the others the least number of workers is enough."""
        for model in self._windows.keys() - {*models}:
            del self._windows[model]
            self._request(model, self._settings.scale_min)

    def _request(self, model: str, wanted: int) -> None:
        """Have the cluster provide this number of workers, where the settings allow it to change."""
        if self._settings.scale_max:
            self._scale(model, wanted, [worker.name for worker in self._workers(model)])

    def _busy(self, model: str) -> float:
        """The seconds with requests of its rollout workers until now."""
        return sum(self._busy_seconds(worker) for worker in self._workers(model))

    def _window(self, model: str) -> _Window:
        """The present window, a new one where the workers have changed."""
        window = self._windows.get(model)
        if window is None or {worker.name for worker in self._workers(model)} != window.workers:
            window = self._windows[model] = self._new(model, window)
        return window

    def _new(self, model: str, before: _Window | None) -> _Window:
        names = frozenset(worker.name for worker in self._workers(model))
        steps = deque[PoolStep](maxlen=self._window_steps)
        window = _Window(names, self._clock.monotonic(), self._busy(model), steps)
        if before is not None:
            window.wanted, window.change = before.wanted, before.change
        return window

    def _workers(self, model: str) -> Sequence[Worker]:
        return self._fleet.serving("rollout", model)


class ModelUse:
    """When each base model was used last."""

    def __init__(
        self,
        settings: Settings,
        clock: Clock,
        provide: Callable[[str], None],
        release: Callable[[str], None],
        pool: ElasticPool,
    ) -> None:
        """``provide(model)`` asks for a local worker with that model if none is expected; ``release(model)`` ends the
        local workers that were started by that; ``pool`` counts the rollout workers that a model needs."""
        self.pool = pool
        self._settings = settings
        self._clock = clock
        self._provide = provide
        self._release = release
        self._used: dict[str, float] = {}

    def provide(self, model: str) -> None:
        """The model is needed now."""
        self._used[model] = self._clock.monotonic()
        self._provide(model)

    async def watch(self, in_use: Callable[[], Collection[str]]) -> None:
        """Release models that are not among ``in_use()`` for a while, until cancelled."""
        while True:
            await self._clock.sleep(self._settings.worker.heartbeat_seconds)
            now = self._clock.monotonic()
            self._used.update(dict.fromkeys(in_use(), now))
            for model, used in list(self._used.items()):
                if now - used > self._settings.limits.model_idle_seconds:
                    del self._used[model]
                    self._release(model)
