"""``/api/v1/usage``: what each job used, as JSON and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from rookery.controller.views import RunView
from rookery.server.auth import AuthenticatedRoute, Owner, Service, ServiceContext
from rookery.server.responses import ERRORS, Stream
from rookery.server.schemas import UsageLine, UsagePage
from rookery.storage.repositories.runs import RunChoice

routes = APIRouter(prefix="/api/v1", route_class=AuthenticatedRoute, responses=ERRORS, tags=["usage"])

PAGE = 200
"""Jobs of one read of the database."""


def _line(run: RunView) -> UsageLine:
    return UsageLine(
        tenant=run.tenant, job=run.id, name=run.name, base_model=run.base_model, state=run.state, created=run.created,
        finished=run.finished, steps=run.step, tokens=run.tokens, seconds=run.cost.seconds, cost=run.cost.cost,
        reserved=run.cost.reserved, preemptible=run.cost.preemptible,
    )  # fmt: skip


@routes.get("/usage", response_model=UsagePage)
async def usage(
    service: Service,
    owner: Owner,
    offset: Annotated[int, Query(ge=0, lt=2**31)] = 0,
    limit: Annotated[int, Query(ge=1, le=PAGE)] = 100,
) -> Any:
    """The usage of each job, newest first; for the administrator of all tenants."""
    tenant = None if owner.role == "admin" else owner.id
    found, total = await service.controller.queries.runs(RunChoice(tenant, offset=offset, limit=limit))
    return {"jobs": [_line(run) for run in found], "total": total}


@routes.get("/usage.csv", response_class=Response, responses={200: {"content": {"text/csv": {}}}})
async def usage_csv(service: Service, owner: Owner) -> Response:
    """The usage of all jobs, for a spreadsheet."""
    headers = {"Content-Disposition": 'attachment; filename="usage.csv"'}
    tenant = None if owner.role == "admin" else owner.id
    return Stream(_csv(service, tenant), media_type="text/csv; charset=utf-8", headers=headers)


async def _csv(service: ServiceContext, tenant: str | None) -> AsyncIterator[str]:
    yield ",".join(UsageLine.model_fields) + "\r\n"
    after: tuple[float, str] | None = None  # not a count: a job may be deleted meanwhile
    while True:
        choice = RunChoice(tenant, order="created", descending=False, after=after, limit=PAGE)
        found, _ = await service.controller.queries.runs(choice)
        out = io.StringIO()
        for run in found:
            row = _line(run).model_dump()
            row |= {name: _date(row[name]) for name in ("created", "finished")}
            csv.writer(out).writerow(row.values())
        yield out.getvalue()
        if len(found) < PAGE:
            return
        after = (found[-1].created, found[-1].id)


def _date(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds") if time else ""
