"""The base models of a service: each is prepared once in a child process, because preparing needs torch; the service
itself reads only the chat template and the tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path

from rookery.aio import cancel_all
from rookery.children import child_variables, interpreter
from rookery.errors import EXIT_REFUSED, Unavailable, UserError
from rookery.tokenization.chat import Chat
from rookery.tokenization.registry import is_prepared, model_folder
from rookery.turns import TENANT, TenantSlots, service_task

log = logging.getLogger("rookery.server")

PREPARE_SECONDS = 3600.0
"""Time limit of preparing one base model: a download of 15 GB at 5 MB/s."""

PREPARED_AT_ONCE = 1
"""Base models that are downloaded and converted at the same time: each conversion holds a whole model in memory.
Tenants take turns: one that asks for many delays another one's by a single one."""


CHATS_KEPT = 32
"""Chat templates with tokenizers that stay in memory without a user, those used last: each may take 100 MB, and where a
tenant may name every model of a hub, it can name thousands."""


class BaseModels:
    """Chat templates with tokenizers by base model; concurrent calls load each once."""

    def __init__(self, cache: Path, seconds: float = PREPARE_SECONDS) -> None:
        """``cache``: the folder of base models. Preparing one may take ``seconds``."""
        self._cache = cache
        self._seconds = seconds
        self._preparing = TenantSlots(PREPARED_AT_ONCE)
        self._loading: dict[str, asyncio.Task[Chat]] = {}
        """By model, the one that was asked for last at the end."""

    async def chat(self, model: str) -> Chat:
        """The chat template of ``model``, prepared if necessary. Raises :class:`UserError` if it cannot be prepared,
        :class:`Unavailable` for a failure that may be temporary; a later call tries again."""
        loading = self._loading.pop(model, None)
        if loading is None or (loading.done() and (loading.cancelled() or loading.exception() is not None)):
            loading = service_task(self._load(model, TENANT.get()), name=f"model {model}")
        self._loading[model] = loading
        loaded = [name for name, task in self._loading.items() if task.done() and name != model]
        for name in loaded[: max(0, len(loaded) + 1 - CHATS_KEPT)]:
            del self._loading[name]
        return await asyncio.shield(loading)

    async def close(self) -> None:
        """Stop preparing models."""
        await cancel_all(*self._loading.values())

    async def _load(self, model: str, tenant: str) -> Chat:
        folder = model_folder(self._cache, model)
        if not await asyncio.to_thread(is_prepared, folder):
            async with self._preparing.slot(tenant):
                await self._prepare(model)
        return await asyncio.to_thread(Chat.load, folder)

    async def _prepare(self, model: str) -> None:
        log.info("preparing base model %s; the first time takes a while", model)
        process = await asyncio.create_subprocess_exec(
            *interpreter("rookery.worker.model.convert", model, "--cache", str(self._cache), "--die-with-parent"),
            stdin=asyncio.subprocess.PIPE,  # never written to: it closes when this process ends
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=child_variables(),
            start_new_session=True,
        )
        try:
            assert process.stderr is not None
            async with asyncio.timeout(self._seconds):
                output = await process.stderr.read()
                await process.wait()
        except (asyncio.CancelledError, TimeoutError) as end:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            if isinstance(end, TimeoutError):
                seconds = f"{self._seconds:g} s"
                raise Unavailable(f"base_model: preparing {model} took longer than {seconds}") from None
            raise
        if process.returncode != 0:
            lines = output.decode(errors="replace").strip().splitlines()
            problem = lines[-1] if lines else f"base_model: preparing {model} ended with {process.returncode}"
            raise UserError(problem) if process.returncode == EXIT_REFUSED else Unavailable(problem)
        log.info("base model %s is prepared", model)
