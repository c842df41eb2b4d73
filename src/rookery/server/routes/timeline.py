"""``/api/v1/timeline`` and ``/trace``: what workers, environments and the trainer did, for a picture for Perfetto."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response

from rookery.controller.activity import Reader
from rookery.errors import UserError
from rookery.server.auth import AuthenticatedRoute, Caller, Owner, Service, ServiceContext, room_for
from rookery.server.responses import ERRORS
from rookery.server.routes.jobs import OfJob
from rookery.server.schemas import TimelineView, TraceView

routes = APIRouter(prefix="/api/v1", route_class=AuthenticatedRoute, responses=ERRORS, tags=["timeline"])

USUAL_SECONDS = 600.0
"""The time that is shown unless a request gives its start."""

LATEST = 1e11
"""Unix seconds of the year 5138: beyond it a time is a mistake, such as milliseconds."""

Time = Annotated[float | None, Query(ge=0, le=LATEST, allow_inf_nan=False, description="Unix seconds")]
Seconds = Annotated[float, Query(gt=0, le=1e9, allow_inf_nan=False, description="Length of the time without a start")]
TraceSeconds = Annotated[
    float | None,
    Query(gt=0, le=LATEST, allow_inf_nan=False, description="Length of the time without a start; null is all of it"),
]
Columns = Annotated[int, Query(ge=10, le=10_000, description="Width of the picture: shorter gaps than a column close")]


def _times(
    service: ServiceContext, start: float | None, end: float | None, seconds: float | None
) -> tuple[float, float]:
    """The time that a request asks for: without a start, the last ``seconds`` before its end, or all. Raises
    :class:`UserError`."""
    until = service.context.clock.time() if end is None else end
    since = (0.0 if seconds is None else max(0.0, until - seconds)) if start is None else start
    if since >= until:
        raise UserError(f"start: given {since:.3f}, expected less than end ({until:.3f})")
    return since, until


def _reader(owner: Caller) -> Reader:
    return Reader() if owner.role == "admin" else Reader(owner.id)


@routes.get("/timeline", response_model=TimelineView)
async def timeline(
    service: Service, owner: Owner, start: Time = None, end: Time = None, seconds: Seconds = USUAL_SECONDS,
    columns: Columns = 1000,
) -> Response:  # fmt: skip
    """The work of workers, environments and the trainer between two times, the last ten minutes if none is given, and
    what happened to them. A tenant sees its own work, and that of others as ``busy`` without a name; the administrator
    everything. Spans of a job are kept as long as its episodes; of a busy hour, neighbours are joined."""
    activity = service.controller.queries.activity
    return _json(await activity.timeline(_reader(owner), *_times(service, start, end, seconds), columns))


@routes.get("/timeline/trace", response_model=TraceView, dependencies=[room_for()])
async def trace(
    service: Service, owner: Owner, start: Time = None, end: Time = None, seconds: TraceSeconds = None
) -> Response:
    """The timeline of all the time that is kept, as a trace in Chrome's JSON format, which https://ui.perfetto.dev
    opens."""
    activity = service.controller.queries.activity
    return _file(await activity.trace(_reader(owner), *_times(service, start, end, seconds)), "rookery")


@routes.get("/jobs/{job}/timeline", response_model=TimelineView)
async def job_timeline(
    service: Service, job: OfJob, start: Time = None, end: Time = None, seconds: Seconds = USUAL_SECONDS,
    columns: Columns = 1000,
) -> Response:  # fmt: skip
    """The timeline of one job; all other work is ``busy``."""
    activity = service.controller.queries.activity
    return _json(await activity.timeline(Reader(job.tenant, (job.id,)), *_times(service, start, end, seconds), columns))


@routes.get("/jobs/{job}/trace", response_model=TraceView, dependencies=[room_for()])
async def job_trace(
    service: Service, job: OfJob, start: Time = None, end: Time = None, seconds: TraceSeconds = None
) -> Response:
    """The trace of one job; all other work is ``busy``."""
    activity = service.controller.queries.activity
    return _file(await activity.trace(Reader(job.tenant, (job.id,)), *_times(service, start, end, seconds)), job.id)


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")


def _file(content: bytes, name: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{name}.trace.json"'}
    return Response(content, media_type="application/json", headers=headers)
