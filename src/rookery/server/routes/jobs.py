"""``/api/v1``: jobs, their results, models and samples. Every route is scoped by the key's tenant.

The metrics stream is a series of server-sent events: ``metrics`` (one row, its id is the step), ``job`` (the job, when
its state or reason changed), ``rollback`` (the job went back: the rows of later steps than its ``step`` are deleted and
come again as they are taken again) and ``end`` (the job, when it has ended; nothing follows). At least one event or
comment is sent per heartbeat, so a reader can tell a quiet job from a dead connection. A reader resumes with ``after``
or with ``Last-Event-ID``: the step of its last row, or STEP@TIME with the row's ``renewed``, or without one its
``time``, by which a row of the same step from before a rollback is recognised.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from functools import partial
from operator import itemgetter
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Body, Depends, Header, Path, Query, Request, Response

from rookery.aio import cancel_all
from rookery.controller.episode_views import DryRun, EpisodeView
from rookery.controller.episodes import RECENT_BYTES
from rookery.controller.feeds import FeedJob, FeedRow
from rookery.controller.queries import evaluation_view
from rookery.controller.views import (
    NUMBER,
    BaseModelView,
    Completion,
    EvaluationView,
    Health,
    JobEvent,
    JobState,
    JobView,
    VersionView,
)  # fmt: skip
from rookery.errors import NotFound
from rookery.server.auth import AuthenticatedRoute, Owner, Service, ServiceContext, room_for
from rookery.server.paging import Limit, Paged, encoded_page, mark_next
from rookery.server.peft_archive import pack, unpack
from rookery.server.responses import ERRORS, EventStream, Stream, encoded_view, event_data, uploaded
from rookery.server.schemas import (
    MetricsRow,
    RunPage,
    SampleRequest,
    UploadedAdapter,
    UploadedDataset,
    UploadView,
)
from rookery.storage.columns import PAGE
from rookery.storage.models import JobRow
from rookery.storage.repositories import jobs, tenants
from rookery.storage.repositories.runs import RunChoice, RunOrder, any_job
from rookery.turns import charged

DATASET_ROWS = 5_000_000
"""Rows of one uploaded dataset: the service holds an offset of each."""

routes = APIRouter(prefix="/api/v1", route_class=AuthenticatedRoute, responses=ERRORS)

JobData = Annotated[dict[str, Any], Body(description="A job: the fields of JobSpec")]
IdempotencyKey = Annotated[str | None, Header(alias="Idempotency-Key", max_length=200)]
STEPS, MOST_STEPS = 1000, 10_000
"""Rows of one page of a job's metrics, unless a request asks for another number, and at most."""

STEP_BYTES = 64 << 20
"""Largest page of metrics: more than 2,000 rows, which the service's page asks for, can have."""

StepLimit = Annotated[int, Query(ge=1, le=MOST_STEPS)]
OfVersion = Annotated[int | None, Query(ge=0, lt=2**63)]


async def _named_job(
    service: Service,
    owner: Owner,
    job: Annotated[
        str, Path(max_length=200, description="A job's id or name (the newest of that name), or NAME~1, the one before")
    ],
) -> JobRow:
    """A job of the key's tenant; for the administrator also one of another tenant, by its id. Raises
    :class:`NotFound`."""
    store = service.context.store
    try:
        return await store.read(jobs.find_job, owner.id, job)
    except NotFound:
        if owner.role != "admin":
            raise
        return await store.read(any_job, job)


OfJob = Annotated[JobRow, Depends(_named_job)]

VERSION = "X-Version"
"""The header with the number of the version whose adapter is sent."""

LAST_ROW = re.compile(rf"({NUMBER.pattern})(?:@({NUMBER.pattern}(?:\.[0-9]{{1,18}})?))?")
"""``Last-Event-ID`` of a reader of metrics: the step of its last row, and that row's time."""

After = Annotated[int, Query(ge=-1, lt=2**63, description="Only rows of later steps")]


@routes.post("/jobs", status_code=201, tags=["jobs"])
async def submit(
    service: Service, owner: Owner, data: JobData, response: Response, key: IdempotencyKey = None
) -> JobView:
    """Submit a job. A second request with the same ``Idempotency-Key`` returns the existing job with status 200."""
    view, created = await service.controller.submit(owner.id, data, key)
    response.status_code = 201 if created else 200
    return view


@routes.post("/jobs/dry-run", tags=["jobs"])
async def dry_run(service: Service, owner: Owner, data: JobData) -> DryRun:
    """Validate a job, fill in its defaults, list warnings and render three of its prompts. Nothing is created."""
    return await service.controller.dry_run(owner.id, data)


@routes.get("/jobs", response_model=list[JobView], dependencies=[room_for()], tags=["jobs"])
async def list_jobs(service: Service, owner: Owner, page: Paged) -> Response:
    """A page of the tenant's jobs, newest first, of up to 4 MB. Where more follow, the header ``X-Next-Page`` has their
    ``after``."""
    fetch = partial(service.controller.queries.list, owner.id)
    return await page.encoded(service.encoders, fetch, encoded_view, lambda view: (view.created, view.id), float, str)


@routes.get("/runs", response_model=RunPage, tags=["jobs"])
async def runs(
    service: Service,
    owner: Owner,
    state: Annotated[list[JobState], Query(max_length=6, description="Only jobs in these states")] = [],  # noqa: B006
    text: Annotated[str, Query(max_length=200, description="Part of a name or an id")] = "",
    id: Annotated[list[str], Query(max_length=200, description="Only these jobs")] = [],  # noqa: B006
    order: RunOrder = "created",
    descending: bool = True,
    offset: Annotated[int, Query(ge=0, lt=2**31)] = 0,
    limit: Annotated[int, Query(ge=1, le=200)] = 100,
) -> Any:
    """A page of jobs in short; for the administrator of all tenants."""
    tenant = None if owner.role == "admin" else owner.id
    chosen = RunChoice(tenant, state, text, order, descending, offset, limit, id)
    found, total = await service.controller.queries.runs(chosen)
    return {"runs": found, "total": total}


@routes.get("/jobs/{job}", tags=["jobs"])
async def show(service: Service, job: OfJob) -> JobView:
    return await service.controller.queries.show(job.tenant, job.id)


@routes.delete("/jobs/{job}", tags=["jobs"])
async def delete_job(service: Service, job: OfJob) -> JobView:
    """Delete a job that has ended, with its versions and all its results. Returns it as it was."""
    view = await service.controller.queries.show(job.tenant, job.id)
    await service.controller.delete_job(job.tenant, job.id)
    return view


@routes.post("/jobs/{job}/differences", tags=["jobs"])
async def differences(service: Service, owner: Owner, job: OfJob, data: JobData) -> list[str]:
    """The fields in which a job differs from another one, whose fields are sent and which is validated as by a dry run:
    a client that submits the same job again learns whether it may continue the first one."""
    return await service.controller.differences(owner.id, job.spec, data)


@routes.post("/jobs/{job}/{action}", tags=["jobs"])
async def act(service: Service, job: OfJob, action: Literal["pause", "resume", "rollback", "cancel"]) -> JobView:
    """Pause a job (nothing is lost), resume it, resume it from the newest version whose bytes are there, or end it for
    good. Returns the job."""
    await getattr(service.controller, action)(job.tenant, job.id)
    return await service.controller.queries.show(job.tenant, job.id)


@routes.get(
    "/jobs/{job}/metrics", response_model=list[MetricsRow], response_model_exclude_unset=True,
    dependencies=[room_for()], tags=["results"],
)  # fmt: skip
async def metrics(service: Service, job: OfJob, after: After = -1, limit: StepLimit = STEPS) -> Response:
    """One row per optimizer step, the first ``limit``. Where more follow, the header ``X-Next-Page`` has
    their ``after``."""

    async def fetch(count: int, last: dict[str, Any] | None) -> Sequence[dict[str, Any]]:
        behind = after if last is None else int(last["step"])
        return await service.controller.queries.metrics(job.tenant, job.id, behind, count)

    return await encoded_page(service.encoders, limit, fetch, _encoded_metrics, itemgetter("step"), STEP_BYTES)


def _encoded_metrics(row: dict[str, Any]) -> bytes:
    return encoded_view(MetricsRow.model_validate(row), exclude_unset=True)


@routes.get("/jobs/{job}/metrics/stream", response_class=Stream, tags=["results"])
async def metrics_stream(
    service: Service,
    job: OfJob,
    after: After = -1,
    last: Annotated[str | None, Header(alias="Last-Event-ID")] = None,
) -> Response:
    """Server-sent events while the job runs: ``metrics`` (a row), ``job`` (its state changed), ``rollback`` (the rows
    of later steps than its ``step`` are deleted), ``end``."""
    await service.controller.queries.show(job.tenant, job.id)
    time = None
    if last is not None and (found := LAST_ROW.fullmatch(last)):
        after, time = int(found[1]), float(found[2] or "inf")
    events = _follow_job(service, job.tenant, job.id, after, time)
    return EventStream(events)


@routes.get("/jobs/{job}/events", response_model=list[JobEvent], tags=["results"])
async def events(
    service: Service,
    job: OfJob,
    response: Response,
    limit: Limit = PAGE,
    after: Annotated[int | None, Query(ge=0, lt=2**63, description="The X-Next-Page header of the page before")] = None,
) -> Any:
    """The newest events of the job's log, newest last. Where there are older ones, the header ``X-Next-Page`` has their
    ``after``."""
    found, older = await service.controller.queries.events_before(job.tenant, job.id, limit, after)
    if older is not None:
        mark_next(response, older)
    return found


@routes.get(
    "/jobs/{job}/trajectories", response_model=list[EpisodeView], response_model_exclude_unset=True,
    dependencies=[room_for(4 * RECENT_BYTES)], tags=["results"],
)  # fmt: skip
async def trajectories(service: Service, job: OfJob, limit: Limit = 20, version: OfVersion = None) -> Response:
    """Recent episodes: text, tokens, log-probabilities, versions, rewards; fewer than ``limit`` where these have more
    than 16 MB as they are stored."""
    found = await service.controller.queries.episodes.trajectories(job.tenant, job.id, limit, version)
    encoded = await service.encoders(lambda: b",".join(encoded_view(view, exclude_unset=True) for view in found))
    return Response(b"[" + encoded + b"]", media_type="application/json")


@routes.get("/jobs/{job}/evaluations", response_model=list[EvaluationView], dependencies=[room_for()], tags=["results"])
async def evaluations(
    service: Service,
    job: OfJob,
    page: Paged,
    held_out: Annotated[
        bool, Query(description="With each prompt and its answer; without them, the list is empty")
    ] = True,
) -> Response:
    """A page of the evaluations on held-out prompts, by version, of up to 4 MB."""
    queries = service.controller.queries
    names = await queries.policy_names(job.tenant, job.id)
    return await page.encoded(
        service.encoders, partial(queries.evaluation_rows, job.tenant, job.id, answers=held_out),
        lambda row: encoded_view(evaluation_view(names, row)), lambda row: (row.policy, row.version), str, float,
    )  # fmt: skip


@routes.get(
    "/jobs/{job}/policies/{policy}/versions", response_model=list[VersionView], dependencies=[room_for()],
    tags=["results"],
)  # fmt: skip
async def versions(service: Service, job: OfJob, policy: str, page: Paged) -> Response:
    """A page of a policy's versions, oldest first, of up to 4 MB."""
    fetch = partial(service.controller.queries.versions, job.tenant, job.id, policy)
    return await page.encoded(service.encoders, fetch, encoded_view, lambda row: (row.version,), float)


@routes.get(
    "/jobs/{job}/policies/{policy}/versions/{version}/adapter",
    response_class=Response,
    responses={200: {"content": {"application/x-tar": {}}, "description": "The files of the PEFT folder"}},
    tags=["results"],
)
async def adapter(service: Service, job: OfJob, policy: str, version: str) -> Response:
    """The PEFT folder of a version (a number, or ``latest``) as a tar, without the trainer's state. The header
    ``X-Version`` has its number."""
    if version != "latest" and not NUMBER.fullmatch(version):
        raise NotFound(f"no version {version!r}; give a number or latest")
    number = None if version == "latest" else int(version)
    found, manifest = await service.controller.queries.adapter(job.tenant, job.id, policy, number)
    size, chunks = await service.openers(pack, service.context.artifacts, manifest, service.context.clock.time())
    name = f"{job.id}-{policy}-{found}.tar"
    headers = {
        "Content-Length": str(size),
        "Content-Disposition": f'attachment; filename="{name}"',
        VERSION: str(found),
    }
    return Stream(chunks, media_type="application/x-tar", headers=headers)


@routes.post("/sample", tags=["models"])
async def sample(service: Service, owner: Owner, request: SampleRequest) -> Completion:
    """One completion from a base model or a job's policy, by the same engines as rollouts."""
    messages = [message.model_dump() for message in request.messages]
    sampling = request.model_dump(include={"max_tokens", "temperature", "seed", "stop"})
    return await service.controller.completions.sample(owner.id, request.target, messages, sampling)


def _upload(media_type: str, **schema: str) -> dict[str, Any]:
    """The documentation of a route that reads its body itself."""
    content = {media_type: {"schema": {"type": "string", **schema}}}
    return {"requestBody": {"content": content, "required": True}}


@routes.post("/datasets", status_code=201, openapi_extra=_upload("application/jsonl"), tags=["uploads"])
async def add_dataset(service: Service, owner: Owner, request: Request) -> UploadedDataset:
    """Upload the rows of a ``jsonl`` environment: one JSON object per line."""
    limits = service.context.settings.limits
    count = partial(service.checks.environments.count_rows, row_bytes=limits.row_bytes, rows=DATASET_ROWS)
    dataset, rows = await service.controller.add_dataset(owner.id, uploaded(request), count)
    return UploadedDataset(dataset=dataset, rows=rows)


@routes.post(
    "/adapters", status_code=201, openapi_extra=_upload("application/x-tar", format="binary"), tags=["uploads"]
)
async def add_adapter(service: Service, owner: Owner, request: Request) -> UploadedAdapter:
    """Upload a PEFT folder to start from: a tar with adapter_config.json and adapter_model.safetensors."""
    return UploadedAdapter(adapter=await service.controller.add_adapter(owner.id, uploaded(request), unpack))


@routes.get("/uploads", tags=["uploads"])
async def uploads(service: Service, owner: Owner, page: Paged) -> list[UploadView]:
    """A page of the datasets (inline rows of jobs too) and adapters that this tenant stores, oldest first."""
    fetch = partial(service.context.store.read, tenants.uploads, owner.id)
    found = await page.read(fetch, lambda row: (row.created, row.hash, row.kind), float, str, str)
    return [UploadView(hash=row.hash, kind=row.kind, size=row.size, created=row.created) for row in found]


@routes.delete("/uploads/{upload}", status_code=204, tags=["uploads"])
async def delete_upload(service: Service, owner: Owner, upload: str) -> None:
    """Delete a dataset or an adapter that no job which has not ended uses."""
    await service.controller.delete_upload(owner.id, upload)


@routes.get("/models", tags=["models"])
async def models(service: Service, owner: Owner) -> Sequence[BaseModelView]:
    """Base models that the tenant may name: loaded (a worker has it), known (can be prepared), or refused with the
    reason."""
    return await service.controller.queries.models(owner.id)


@routes.get("/health", tags=["service"])
async def health(service: Service, owner: Owner) -> Health:
    return service.controller.queries.health()


def _event(kind: str, data: bytes, id: int | None = None) -> bytes:
    """One server-sent event; ``data`` is JSON on one line."""
    number = b"" if id is None else f"id: {id}\n".encode()
    return number + f"event: {kind}\n".encode() + event_data(data)


async def _follow_job(
    service: ServiceContext, tenant: str, job: str, after: int, time: float | None
) -> AsyncIterator[bytes]:
    """The events of ``job``, with the rows of steps later than ``after``, until it ends or the service stops. ``time``:
    of the row of step ``after``, for a reader that has it."""
    interval = service.context.settings.worker.heartbeat_seconds
    async with aclosing(service.controller.queries.feeds.follow(tenant, job, after, interval, time)) as events:
        closing = asyncio.ensure_future(service.closing.wait())
        upcoming = asyncio.create_task(charged(anext(events, None)))
        try:
            while True:
                await asyncio.wait((upcoming, closing), return_when=asyncio.FIRST_COMPLETED)
                if not upcoming.done() or (event := upcoming.result()) is None:
                    return
                match event:
                    case ("metrics", FeedRow() as row):
                        row.encoded = row.encoded or _event("metrics", msgspec.json.encode(row.metrics), row.step)
                        yield row.encoded
                    case ("rollback", int() as step):
                        yield _event("rollback", msgspec.json.encode({"step": step}), max(step, 0))
                    case (kind, FeedJob() as changed):
                        yield _event(kind, changed.encoded)
                    case ("quiet", None):
                        yield b": heartbeat\n\n"
                upcoming = asyncio.create_task(charged(anext(events, None)))
        finally:
            await cancel_all(upcoming, closing)  # before the events are closed, which nothing may read then
