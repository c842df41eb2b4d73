"""A job's metrics as server-sent events, while they come.

Events: ``metrics`` (one row, its id the step), ``job`` (the job, when its state or reason changed), ``end`` (the job,
when it has ended; nothing follows). A stream says something at least once per beat, so a reader can tell a quiet job
from a dead connection, and goes on where it left off with ``Last-Event-ID`` or ``after``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from rookery.controller.views import JobView
from rookery.server.auth import ServiceContext
from rookery.storage.rows import FINAL_JOB_STATES


def event(kind: str, data: Any, id: int | None = None) -> bytes:
    """One server-sent event. ``data`` is JSON on one line."""
    number = b"" if id is None else f"id: {id}\n".encode()
    return number + f"event: {kind}\ndata: ".encode() + msgspec.json.encode(data) + b"\n\n"


async def follow_job(service: ServiceContext, tenant: str, job: str, after: int) -> AsyncIterator[bytes]:
    """Events of ``job`` from the row behind step ``after`` on, until it ends or the service stops."""
    rows = service.controller.follow(tenant, job, after)
    closing = asyncio.ensure_future(service.closing.wait())
    upcoming: asyncio.Task[dict[str, Any] | None] = asyncio.ensure_future(_next(rows))
    shown: tuple[str, str] | None = None
    try:
        while not closing.done():
            view: JobView = await service.controller.show(tenant, job)
            if (view.state, view.reason) != shown:
                shown = (view.state, view.reason)
                yield event("job", view)
            else:
                yield b": still here\n\n"
            await asyncio.wait(
                {upcoming, closing},
                timeout=service.settings.worker.heartbeat_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            while upcoming.done():
                row = upcoming.result()
                if row is None:
                    view = await service.controller.show(tenant, job)
                    if view.state in FINAL_JOB_STATES:
                        yield event("end", view)
                    return
                yield event("metrics", row, row["step"])
                upcoming = asyncio.ensure_future(_next(rows))
                await asyncio.sleep(0)
    finally:
        for task in (upcoming, closing):
            task.cancel()
        await asyncio.gather(upcoming, closing, return_exceptions=True)


async def _next(rows: AsyncIterator[dict[str, Any]]) -> dict[str, Any] | None:
    return await anext(rows, None)
