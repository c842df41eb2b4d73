"""A service inside another program: in a thread with its own event loop, for the duration of a ``with`` block."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from types import TracebackType
from typing import Self

from rookery.aio import LoopThread, first_of
from rookery.server.launcher import Service
from rookery.settings import Settings

log = logging.getLogger("rookery.server")


class EmbeddedService:
    """``url`` and ``key`` (the administrator's) are set once it runs. Entering raises the errors of a failed start."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.url = self.key = ""
        self._service = Service(settings)
        self._started: Future[None] = Future()

    def __enter__(self) -> Self:
        self._thread = LoopThread("service", self._serve, daemon=False)
        try:
            self._started.result()
        except BaseException:
            self._thread.stop()
            raise
        self.url, self.key = self._service.url, self._service.admin_key
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._thread.stop()

    async def _serve(self, stopping: asyncio.Event) -> None:
        try:
            await self._service.start()
        except BaseException as error:
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        try:
            async with first_of(stopping.wait(), self._service.serving()) as (_, serving):
                if serving.done():
                    log.error("the service stopped: %s", serving.exception())
        finally:
            await self._service.stop()
