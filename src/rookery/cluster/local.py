"""Workers and environment hosts as child processes of the service on the same machine, or on the nodes of a Ray
cluster, where a child process for each model supervises them (:mod:`rookery.cluster.ray`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from rookery.cluster import ray
from rookery.cluster.base import DRAINS, SCALED, child_environment, environment_host, file_name, preloaded
from rookery.cluster.supervisor import Child, Spawn, Supervisor
from rookery.machine import cores
from rookery.settings import Settings

log = logging.getLogger("rookery.cluster")

HOST_RETRY_SECONDS = 30.0
"""A host of the built-in environments that refused to start is started again after so long. Nobody else asks for it."""


class ProcessCluster:
    """The processes that the service at ``url`` starts, on this machine or by way of Ray: workers for its base models,
    more when a job names another model, and the host of the built-in environments. They connect to the service by
    themselves."""

    def __init__(
        self,
        settings: Settings,
        url: str,
        token: str,
        failed: Callable[[str, str, str], None] = lambda model, reason, worker: None,
        host_failed: Callable[[str], None] = lambda reason: None,
        host_retry_seconds: float = HOST_RETRY_SECONDS,
        spawn: Spawn | None = None,
    ) -> None:
        """``failed(model, reason, name)`` is called when a worker of a base model does not work; on Ray, where the name
        is empty, when none of those that were started does. ``host_failed(reason)`` is called when the host of the
        built-in environments does not work. ``spawn`` is that of :class:`~rookery.cluster.supervisor.Supervisor`."""
        self._settings = settings
        self._url = url
        self._token = token
        self._failed, self._host_failed, self._host_retry_seconds = failed, host_failed, host_retry_seconds
        self._models = [model for model in settings.server.models.split(",") if model]
        self._provided: dict[str, list[Child]] = {}
        """Children by their base model, of those that the service was not configured with."""
        self._elastic: dict[str, list[Child]] = {}
        """By base model, the rollout workers that :meth:`scale` started."""
        self._written: asyncio.Task[None] | None = None
        """The last write of a number of workers for the processes that start them on Ray."""
        self.processes = Supervisor(
            [],
            settings.data / "logs",
            settings.server.stop_seconds,
            spawn,
            remove_seconds=DRAINS * settings.worker.drain_seconds,
            failed=self._child_failed,
        )

    async def start(self) -> None:
        """Raises UserError if the settings name a Ray cluster and Ray is not installed, Unavailable if none answers."""
        if self._settings.cluster.cluster == "ray":
            await asyncio.to_thread(ray.check, self._settings.cluster.ray_address)
            await asyncio.to_thread(ray.clear_scale, self._settings.data)  # of an earlier service
        self.processes.add(await asyncio.to_thread(self._workers, self._models))
        host = ray_environment_host if self._settings.cluster.cluster == "ray" else environment_host
        self.processes.add([host(self._settings, self._url, self._token)])
        for model in self._models:
            self._have_least(model)
        await self.processes.start()

    def _child_failed(self, child: Child, reason: str) -> None:
        if child.model:
            self._failed(child.model, reason, child.worker)
            return
        self._host_failed(reason)
        if child.state == "refused":
            asyncio.get_running_loop().call_later(self._host_retry_seconds, self.processes.retry, [child])

    def _workers(self, models: Sequence[str]) -> list[Child]:
        make = ray_launchers if self._settings.cluster.cluster == "ray" else local_workers
        return make(self._settings, models, self._url, self._token)

    def provide(self, model: str) -> None:
        """Start workers for ``model`` if there are none, unless the service is configured to start none. Those that
        refused to start are started again."""
        elastic = self._elastic.get(model, [])
        there = [child for child in self.processes.children if child.model == model and child not in elastic]
        for children in (there, elastic):
            if children and all(child.state == "refused" for child in children):
                self.processes.retry(children)
        if there or model in self._models or not self._fixed:
            return
        log.info("starting a worker for base model %s", model)
        workers = self._provided[model] = self._workers([model])
        self.processes.add(workers)
        self._have_least(model)

    @property
    def _fixed(self) -> int:
        """The workers per model that always stay."""
        cluster = self._settings.cluster
        return self._settings.server.workers + (cluster.ray_spot_workers if cluster.cluster == "ray" else 0)

    def _have_least(self, model: str) -> None:
        """Start the fewest rollout workers of ``model`` that the settings ask for: no job has asked for more yet, and
        a synchronous one never does."""
        if self._settings.cluster.scale_max:
            self.scale(model, self._settings.cluster.scale_min, [])

    def release(self, model: str) -> None:
        """End the workers that :meth:`provide` started for ``model``."""
        if model in self._provided:
            log.info("ending the workers of base model %s, which nothing uses", model)
            self.processes.remove([*self._provided.pop(model), *self._elastic.pop(model, [])])

    def scale(self, model: str, count: int, serving: Iterable[str]) -> None:
        """Start or end rollout workers of ``model``, so that there are ``count``; never fewer than its other workers:
        those of the settings, and of the names ``serving`` those that were not started here. Those that were started
        last are ended first; they drain. Those that refused to start are started again."""
        if model not in self._models and model not in self._provided:
            return
        started = f"{file_name(model)}{SCALED}"
        others = sum(not name.removeprefix("local-").startswith(started) for name in serving)
        more = max(0, count - max(self._fixed, others))
        if self._settings.cluster.cluster == "ray":
            self._written = asyncio.create_task(self._write_scale(self._written, model, more))
            return
        elastic = self._elastic.setdefault(model, [])
        if more < len(elastic):
            log.info("ending %d rollout workers of base model %s", len(elastic) - more, model)
            self.processes.remove(elastic[more:])
            del elastic[more:]
            return
        self.processes.retry(elastic)
        if more > len(elastic):
            log.info("starting %d rollout workers of base model %s", more - len(elastic), model)
            numbers, models = range(len(elastic) + 1, more + 1), len({*self._models, *self._provided})
            new = elastic_workers(self._settings, model, models, self._url, self._token, numbers)
            elastic += new
            self.processes.add(new)

    async def _write_scale(self, before: asyncio.Task[None] | None, model: str, more: int) -> None:
        """Write the number after the write ``before``, so that the last one stays."""
        if before is not None:
            await asyncio.wait([before])
        try:
            await asyncio.to_thread(ray.write_scale, self._settings.data, model, more)
        except OSError as error:
            log.error("the number of workers of %s cannot be written: %s; the present ones stay", model, error)

    async def stop(self) -> None:
        """Every child has ended when this returns."""
        await self.processes.stop()


def local_workers(settings: Settings, models: Sequence[str], url: str, token: str) -> list[Child]:
    """``settings.server.workers`` workers for each of ``models``; they share the machine's cores and memory. Those of a
    model that a job names later compute with as many threads as if they were alone."""
    if not settings.server.workers:
        return []
    settings = _shared(settings, len(models))
    environment = preloaded(child_environment(settings, token), settings.worker.allocator)
    numbers = range(1, settings.server.workers + 1)
    return [_worker(model, f"-{number}", url, environment) for model in models for number in numbers]


def _worker(model: str, suffix: str, url: str, environment: dict[str, str], *more: str) -> Child:
    """A worker of ``model`` on this machine, with ``more`` arguments."""
    name = f"{file_name(model)}{suffix}"
    arguments = ["--connect", url, "--model", model, "--name", f"local-{name}", *more, "--die-with-parent"]
    arguments = ["rookery.worker.process", *arguments]
    return Child(f"worker-{name}", arguments, environment, model=model, worker=f"local-{name}")


def _shared(settings: Settings, models: int) -> Settings:
    """The settings of one of the workers of so many models, with its part of the machine's cores and memory when there
    are as many as the settings allow."""
    count = max(1, models * max(settings.server.workers, settings.cluster.scale_max))
    threads, share = settings.worker.threads or max(1, cores() // count), settings.worker.memory_share / count
    return settings.replace(threads=threads, memory_share=share)


def elastic_workers(
    settings: Settings, model: str, models: int, url: str, token: str, numbers: Iterable[int]
) -> list[Child]:
    """Rollout workers in addition to the :func:`local_workers` of ``model``, one of so many ``models``."""
    settings = _shared(settings, models)
    environment = preloaded(child_environment(settings, token), settings.worker.allocator)
    roles = "--roles", "rollout"
    return [_worker(model, f"{SCALED}{number}", url, environment, *roles) for number in numbers]


def ray_launchers(settings: Settings, models: Sequence[str], url: str, token: str) -> list[Child]:
    """The processes that keep the workers of ``models`` alive on Ray's nodes, one for each."""
    if settings.server.workers + settings.cluster.ray_spot_workers + settings.cluster.scale_max == 0:
        return []
    environment = child_environment(settings, token)
    arguments = ["rookery.cluster.ray", "--connect", url, "--model"]
    return [Child(f"ray-{file_name(model)}", [*arguments, model], environment, model=model) for model in models]


def ray_environment_host(settings: Settings, url: str, token: str) -> Child:
    """The process that keeps the host of the built-in environments alive on one of Ray's nodes."""
    return Child("ray-environments", ["rookery.cluster.ray", "--connect", url], child_environment(settings, token))
