"""The processes that a service starts by itself: workers for its base models, more when a job names another model, and
the host of the built-in environments."""

from __future__ import annotations

import asyncio
import logging

from rookery.cluster.local import LocalHost, LocalProcesses, LocalWorkers
from rookery.settings import Settings

log = logging.getLogger("rookery.service")


class Local:
    """Children of the service at ``url``. They dial in, and dial again, so they may start before it listens."""

    def __init__(self, settings: Settings, url: str, token: str) -> None:
        self._settings = settings
        self._url = url
        self._token = token
        self._models = {model for model in settings.models.split(",") if model}
        self._groups: list[LocalProcesses] = []
        self._starting: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        workers = LocalWorkers(self._settings, self._url, self._token)
        host = LocalHost(self._settings, self._url, self._token)
        self._groups += [workers, host]
        await workers.start()
        await host.start()

    def provide(self, model: str) -> None:
        """Starts workers for ``model`` unless there are some, or this service is to start none."""
        if model in self._models or self._settings.workers == 0:
            return
        log.info("starting a worker for base model %s", model)
        self._models.add(model)
        group = LocalWorkers(self._settings.model_copy(update={"models": model}), self._url, self._token)
        self._groups.append(group)
        task = asyncio.create_task(group.start())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def stop(self) -> None:
        """Every child has ended when this returns."""
        await asyncio.gather(*self._starting, return_exceptions=True)
        await asyncio.gather(*(group.stop() for group in self._groups))
