"""The processes that a service starts by itself: workers for its base models, more when a job names another model, and
the host of the built-in environments."""

from __future__ import annotations

import asyncio
import logging

from rookery.cluster.local import LocalHost, LocalProcesses, LocalWorkers
from rookery.settings import Settings

log = logging.getLogger("rookery.server")


class LocalCluster:
    """Children of the service at ``url``, which dial in. None is started before :meth:`start` or after :meth:`stop`."""

    def __init__(self, settings: Settings, url: str, token: str) -> None:
        self._settings = settings
        self._url = url
        self._token = token
        self._models = [model for model in settings.server.models.split(",") if model]
        self._groups: list[LocalProcesses] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._running = False

    async def start(self) -> None:
        self._running = True
        models = ",".join(self._models)
        self._groups.append(LocalWorkers(self._settings.replace(models=models), self._url, self._token))
        self._groups.append(LocalHost(self._settings, self._url, self._token))
        for group in list(self._groups):
            await group.start()

    def provide(self, model: str) -> None:
        """Sees to it that there are workers for ``model``, unless this service is to start none."""
        if model in self._models or self._settings.server.workers == 0:
            return
        self._models.append(model)
        if self._running:
            log.info("starting a worker for base model %s", model)
            settings = self._settings.replace(models=model)
            self._groups.append(LocalWorkers(settings, self._url, self._token))
            task = asyncio.create_task(self._groups[-1].start())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def stop(self) -> None:
        """Every child has ended when this returns."""
        self._running = False
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(group.stop() for group in self._groups))
