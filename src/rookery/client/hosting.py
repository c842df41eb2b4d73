"""An environment of the user's own, hosted in the user's own process, in a thread beside whatever else runs there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import uuid

from rookery.environments.base import Environment
from rookery.environments.host import Host

log = logging.getLogger("rookery.client")

STOP_SECONDS = 5.0
"""How long the thread gets to close its episodes; an environment that blocks longer ends with the process."""


class Hosting:
    """Offers ``environment`` to the service at ``url`` as ``name`` until :meth:`stop`, or until the process ends: the
    thread keeps nothing alive."""

    def __init__(self, url: str, key: str, name: str, environment: Environment) -> None:
        self.name = name
        self._host = Host(url, key, {name: environment}, f"{name}-{uuid.uuid4().hex[:12]}")
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"environment {name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Calling it twice is fine; so is calling it from the environment's own thread."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            with contextlib.suppress(RuntimeError):  # the loop closed just now, by itself
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(STOP_SECONDS)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        hosted = asyncio.ensure_future(self._host.run())
        stopping = asyncio.ensure_future(self._stopping.wait())
        await asyncio.wait({hosted, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in (hosted, stopping):
            task.cancel()
        ended, _ = await asyncio.gather(hosted, stopping, return_exceptions=True)
        if isinstance(ended, Exception):
            log.error("environment %s is not hosted any more: %s", self.name, ended, exc_info=ended)
