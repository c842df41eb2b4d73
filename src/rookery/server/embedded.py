"""A service inside another program: in a thread with its own event loop, for the duration of a ``with`` block."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from rookery.server.launcher import Service
from rookery.settings import Settings

log = logging.getLogger("rookery.server")


class EmbeddedService:
    """``url`` and ``key`` (the administrator's) are set once it runs. Entering raises the errors of a failed start."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._service = Service(settings)
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="service")

    @property
    def url(self) -> str:
        return self._service.url

    @property
    def key(self) -> str:
        return self._service.admin_key

    def __enter__(self) -> Self:
        self._thread.start()
        try:
            self._started.result()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()

    def _stop(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        try:
            await self._service.start()
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        stopping, serving = asyncio.create_task(self._stopping.wait()), asyncio.create_task(self._service.serving())
        try:
            await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                log.error("the service stopped: %s", serving.exception())
        finally:
            for task in (stopping, serving):
                task.cancel()
            await asyncio.gather(stopping, serving, return_exceptions=True)
            await self._service.stop()
