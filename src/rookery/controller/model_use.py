"""Base models in use: local workers start when a model is needed and end when nothing has used it for a while.

Jobs, clients that are not idle, and requests use a model. Models that the service was configured with stay loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from rookery.aio import Clock
from rookery.settings import Settings


class ModelUse:
    """When each base model was used last."""

    def __init__(
        self, settings: Settings, clock: Clock, provide: Callable[[str], None], release: Callable[[str], None]
    ) -> None:
        """``provide(model)`` asks for a local worker with that model if none is expected; ``release(model)`` ends the
        local workers that were started by that."""
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
