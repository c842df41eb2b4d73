"""Runs a user's environment in the user's process, in a thread, and serves it to a Rookery service."""

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
"""Time that the thread has to close its episodes; an environment that blocks longer ends with the process."""


class EnvironmentServer:
    """Offers ``environment`` to the service at ``url`` as ``name`` until :meth:`stop` or the end of the process, which
    the thread does not delay."""

    def __init__(self, url: str, key: str, name: str, environment: Environment, ca_file: str = "") -> None:
        self.name = name
        self._host = Host(url, key, {name: environment}, f"{name}-{uuid.uuid4().hex[:12]}", ca_file)
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name=f"environment {name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """May be called twice, and from the environment's own thread."""
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            with contextlib.suppress(RuntimeError):  # the loop has just closed
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
            log.error("environment %s is no longer hosted: %s", self.name, ended, exc_info=ended)
