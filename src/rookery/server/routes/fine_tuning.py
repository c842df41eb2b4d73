"""``/v1/files`` and ``/v1/fine_tuning``: OpenAI's fine-tuning API over datasets and jobs.

* An uploaded file is a dataset: its id names its content, so the same content is the same file. Its rows are checked in
  a confined process, by the check of the environment that will read them.
* Every job is a job as any other, with the tenant's quotas; ``ft:`` names its model at ``/v1``.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from rookery.bounds import ORDER
from rookery.controller.targets import Target
from rookery.controller.uploads import DATASET
from rookery.controller.views import JobView
from rookery.environments.judges import answer_of
from rookery.environments.models import ModelAnswer, ModelQuestion
from rookery.environments.verifiers.graders import Graded, OneGrader, check_item, grade
from rookery.environments.verifiers.parts import spoken
from rookery.environments.verifiers.running_graders import GraderTools, ModelSilent
from rookery.errors import NotFound, RookeryError, Unavailable, UserError, short
from rookery.server.auth import Cursor, Owner, Service, ServiceContext, room_for
from rookery.server.fine_tuning import (
    FILE,
    PURPOSE,
    GraderRun,
    GraderValidate,
    JobCreate,
    MissingObject,
    Start,
    checkpoint,
    checkpoint_version,
    dataset_of,
    event_number,
    file_object,
    fine_tuning_id,
    fine_tuning_job,
    grader_models,
    grader_run,
    is_fine_tuning,
    job_id,
    job_of,
    line_event,
    not_listed,
    page_of,
    read_grader,
    step_event,
)
from rookery.server.multipart import Form, Multipart
from rookery.server.openai import UnsupportedField
from rookery.server.peft_archive import stream
from rookery.server.responses import json_response, uploaded
from rookery.server.routes.jobs import DATASET_ROWS, IdempotencyKey
from rookery.server.routes.openai import ERRORS, OpenAIRoute
from rookery.spec.fine_tuned import CHECKPOINT_OF
from rookery.spec.parsing import SpecError
from rookery.storage.columns import LONGEST_PAGE, PAGE, Page, find
from rookery.storage.models import EventRow, JobRow, StepRow, UploadRow
from rookery.storage.repositories import jobs, tenants, versions
from rookery.turns import TENANT


class FineTuningRoute(OpenAIRoute):
    """A route that refuses unknown parameters of its address: most are lists, and a filter that is not read would leave
    in one what it should leave out."""

    strict = True
    passed = re.compile(r"api-version|metadata(\[.*\])?", re.DOTALL)
    """The version is Azure's. Metadata are read by the list of jobs."""


routes = APIRouter(prefix="/v1", route_class=FineTuningRoute, responses=ERRORS, tags=["fine-tuning"])

FILES_LISTED = 10_000
"""Most files of one page."""

BEFORE_ALL, AFTER_ALL = -1, 2**63 - 1
"""Numbers that no step and no line of a log has."""

After = Annotated[str, Query(max_length=200)]
Limit = Annotated[int, Query(ge=1, le=100)]
FileLimit = Annotated[int, Query(ge=1, le=FILES_LISTED)]


# --- files ------------------------------------------------------------------------------------------------------------


@routes.post(
    "/files",
    response_model=dict[str, Any],
    openapi_extra={"requestBody": {"content": {"multipart/form-data": {"schema": {"type": "object"}}}}},
)
async def add_file(service: Service, owner: Owner, request: Request) -> Response:
    """Upload rows as a file: a form with ``purpose`` fine-tune and ``file``."""
    form = await Multipart(request.headers.get("content-type", ""), uploaded(request), _check_field).form()
    if form.content is None:
        raise UnsupportedField("file: missing; send it as a file of the form", "file")
    limits = service.context.settings.limits
    count = partial(service.checks.environments.count_rows, row_bytes=limits.row_bytes, rows=DATASET_ROWS)
    try:
        digest, _ = await service.controller.add_dataset(owner.id, _with_purpose(form), count, form.filename)
    except UnsupportedField:
        raise
    except UserError as error:
        raise UnsupportedField(str(error), "file") from None
    row = await service.context.store.read(tenants.get_upload, owner.id, "dataset", digest)
    return json_response(file_object(row))


async def _with_purpose(form: Form) -> AsyncIterator[bytes]:
    """The content of a form's file. Raises :class:`UnsupportedField` where the form has no purpose, or other fields,
    also after the file."""
    assert form.content is not None
    async for piece in form.content:
        yield piece
    _check_field("purpose", form.fields.get("purpose", ""))


def _check_field(name: str, value: str) -> None:
    """Check a field of a form with a file. Raises :class:`UnsupportedField`."""
    if name == "file":
        how = "send it as a file of the form, as curl -F file=@PATH does"
        raise UnsupportedField(f"file: it has no file name; {how}", name)
    if name != "purpose":
        kept = name.startswith("expires_after")
        why = "files are kept until they are deleted" if kept else "unknown field; the form has purpose and file"
        raise UnsupportedField(f"{short(name)}: {why}; leave it out", short(name))
    if value != PURPOSE:
        given = f"given {value[:40]!r}" if value else "missing"
        raise UnsupportedField(f"purpose: {given}; give {PURPOSE}", "purpose")


async def _files(service: ServiceContext, tenant: str, after: str, count: int, *, descending: bool) -> list[UploadRow]:
    """Up to ``count`` of the tenant's datasets, those behind the one with the id ``after``. Raises
    :class:`MissingObject`."""
    cursor: Cursor = ()
    if after:
        try:
            cursor = _cursor(await _file(service, tenant, after))
        except MissingObject as error:
            cursor = service.deleted.find(tenant, after)
            if not cursor:
                raise MissingObject(f"after: {error}", "after") from None
    found: list[UploadRow] = []
    while (left := count - len(found)) > 0:
        page = Page(min(left, LONGEST_PAGE), cursor)
        rows = await service.context.store.read(tenants.datasets, tenant, page, descending=descending)
        found += rows
        if len(rows) < page.limit:
            break
        cursor = _cursor(rows[-1])
    return found


def _cursor(row: UploadRow) -> Cursor:
    return row.created, row.hash, row.kind


@routes.get("/files", response_model=dict[str, Any], dependencies=[room_for()])
async def list_files(
    service: Service,
    owner: Owner,
    after: After = "",
    limit: FileLimit = FILES_LISTED,
    order: Annotated[str, Query(pattern=ORDER)] = "desc",
    purpose: Annotated[str, Query(max_length=100)] = PURPOSE,
) -> Response:
    """The tenant's files; inline rows of jobs are among them."""
    rows: list[UploadRow] = []
    if purpose == PURPOSE:
        rows = await _files(service, owner.id, after, limit + 1, descending=order == "desc")

    def page() -> Response:
        data = [file_object(row) for row in rows[:limit]]
        return json_response({"object": "list", "data": data, "has_more": len(rows) > limit})

    return await service.encoders(page)


async def _file(service: ServiceContext, tenant: str, file: str) -> UploadRow:
    try:
        return await service.context.store.read(tenants.get_upload, tenant, "dataset", dataset_of(file, "file_id"))
    except (NotFound, UnsupportedField):
        raise MissingObject(f"no file {file[:80]!r} of yours", "file_id") from None


@routes.get("/files/{file_id}", response_model=dict[str, Any])
async def show_file(service: Service, owner: Owner, file_id: str) -> Response:
    row = await _file(service, owner.id, file_id)
    return json_response(file_object(row))


@routes.get("/files/{file_id}/content")
async def file_content(service: Service, owner: Owner, file_id: str) -> Response:
    """The rows as they were uploaded. A range that is asked for is ignored (RFC 9110, section 14.2)."""
    row = await _file(service, owner.id, file_id)
    response: Response = await service.openers(stream, service.context.artifacts, row.hash, DATASET, None)
    response.headers["Accept-Ranges"] = "none"
    return response


@routes.delete("/files/{file_id}", response_model=dict[str, Any])
async def delete_file(service: Service, owner: Owner, file_id: str) -> Response:
    """Delete a file that no job which has not ended uses."""
    row = await _file(service, owner.id, file_id)
    await service.controller.delete_upload(owner.id, row.hash)
    service.deleted.add(owner.id, FILE + row.hash, _cursor(row))
    return json_response({"id": FILE + row.hash, "object": "file", "deleted": True})


# --- jobs -------------------------------------------------------------------------------------------------------------


async def _job(service: ServiceContext, tenant: str, name: str, field: str = "fine_tuning_job_id") -> JobView:
    try:
        view = await service.controller.queries.show(tenant, job_id(name))
    except NotFound:
        view = None
    if view is None or not is_fine_tuning(view.spec):
        raise MissingObject(f"no fine-tuning job {name[:80]!r} of yours", field)
    return view


async def _shown(service: ServiceContext, tenant: str, view: JobView) -> dict[str, Any]:
    """A job of this tenant as every response shows it."""
    done = view.state == "completed"
    tokens = await service.context.store.read(versions.trained_tokens, tenant, view.id) if done else None
    return fine_tuning_job(view, tokens)


@routes.post("/fine_tuning/jobs", response_model=dict[str, Any])
async def create_fine_tuning(service: Service, owner: Owner, given: JobCreate, key: IdempotencyKey = None) -> Response:
    """Start a fine-tuning job. A second request with the same ``Idempotency-Key`` returns the existing job."""
    request = given.model_dump(mode="json")
    view = await service.controller.repeated(owner.id, key, request)
    if view is None:
        view = await _submitted(service, owner.id, given, key, request)
    return json_response(await _shown(service, owner.id, view))


async def _submitted(
    service: ServiceContext, tenant: str, given: JobCreate, key: str | None, request: Mapping[str, Any]
) -> JobView:
    """The job of a ``request`` that was not sent before."""
    asked = given.method.reinforcement if given.method is not None else None
    if asked is not None:
        await _checked_grader(service, tenant, asked.grader, "method.reinforcement.grader")
    try:
        start = await _start(service, tenant, given.model)
        data = await service.threads(job_of, given, start)
        view, _ = await service.controller.submit(tenant, data, key, request)
    except SpecError as error:
        line = error.problems[0]
        param = _param_of(line, given)
        raise UnsupportedField(f"{param}: {line}", param) from None
    return view


async def _start(service: ServiceContext, tenant: str, model: str) -> Start | None:
    """The fine-tuned model that a job starts from; None for a base model. Raises :class:`NotFound`."""
    if not model.startswith("ft:"):
        return None
    target = await service.controller.completions.find(tenant, model)
    assert target.adapter is not None  # a version of a job
    view = await service.controller.queries.show(tenant, _job_of(target))
    policy = next(policy.name for policy in view.policies if policy.id == target.adapter.policy)
    return Start(view.id, policy, target.adapter.version, target.model, view.spec["policies"][policy])


def _job_of(target: Target) -> str:
    """The job of a version's name ``JOB@VERSION`` or ``JOB/POLICY@VERSION``."""
    return target.name.partition("@")[0].partition("/")[0]


def _param_of(line: str, given: JobCreate) -> str:
    """The argument that a refused job's first mistake concerns."""
    if line.startswith(("base_model", "policies.main.warm_start", "policies.main.rank")):
        return "model"
    if "the grader names" in line:
        return "method.reinforcement.grader"
    if line.startswith("environment"):
        held_out = line.startswith(("environment: eval", "environment.eval"))
        return "validation_file" if held_out and given.validation_file else "training_file"
    return "method" if given.method is not None else "hyperparameters"


@routes.get("/fine_tuning/jobs", response_model=dict[str, Any])
async def list_fine_tunings(
    service: Service, owner: Owner, request: Request, after: After = "", limit: Limit = 20
) -> Response:
    """The tenant's fine-tuning jobs, newest first; ``metadata[KEY]=VALUE`` chooses, ``metadata=null`` those without
    any."""
    wanted = {
        name[len("metadata[") : -1]: value
        for name, value in request.query_params.items()
        if name.startswith("metadata[") and name.endswith("]")
    }
    without = request.query_params.get("metadata") == "null"
    cursor: Cursor = ()
    if after and not (cursor := service.deleted.find(owner.id, after)):
        last = await _job(service, owner.id, after, "after")
        cursor = (last.created, last.id)
    found: list[JobRow] = []
    while len(found) <= limit:
        rows = await service.context.store.read(jobs.list_jobs, owner.id, Page(PAGE, cursor))
        for row in rows:
            metadata = row.spec.get("metadata") or {}
            chosen = not metadata if without else wanted.items() <= metadata.items()
            if is_fine_tuning(row.spec) and chosen:
                found.append(row)
        if len(rows) < PAGE:
            break
        cursor = (rows[-1].created, rows[-1].id)
        await request.state.pause()  # a filter that no job passes reads them all
    data = []
    for view in await service.controller.queries.views(owner.id, found[:limit]):
        data.append(await _shown(service, owner.id, view))
        await request.state.pause()
    return json_response({"object": "list", "data": data, "has_more": len(found) > limit})


@routes.get("/fine_tuning/jobs/{tuning}", response_model=dict[str, Any])
async def show_fine_tuning(service: Service, owner: Owner, tuning: str) -> Response:
    return json_response(await _shown(service, owner.id, await _job(service, owner.id, tuning)))


@routes.post("/fine_tuning/jobs/{tuning}/cancel", response_model=dict[str, Any])
async def cancel_fine_tuning(service: Service, owner: Owner, tuning: str) -> Response:
    view = await _job(service, owner.id, tuning)
    await service.controller.cancel(owner.id, view.id)
    return json_response(await _shown(service, owner.id, await _job(service, owner.id, tuning)))


@routes.post("/fine_tuning/jobs/{tuning}/pause", response_model=dict[str, Any])
async def pause_fine_tuning(service: Service, owner: Owner, tuning: str) -> Response:
    view = await _job(service, owner.id, tuning)
    await service.controller.pause(owner.id, view.id)
    return json_response(await _shown(service, owner.id, await _job(service, owner.id, tuning)))


@routes.post("/fine_tuning/jobs/{tuning}/resume", response_model=dict[str, Any])
async def resume_fine_tuning(service: Service, owner: Owner, tuning: str) -> Response:
    view = await _job(service, owner.id, tuning)
    await service.controller.resume(owner.id, view.id)
    return json_response(await _shown(service, owner.id, await _job(service, owner.id, tuning)))


@routes.get("/fine_tuning/jobs/{tuning}/events", response_model=dict[str, Any], dependencies=[room_for()])
async def fine_tuning_events(
    service: Service, owner: Owner, tuning: str, after: After = "", limit: Limit = 20
) -> Response:
    """The lines of the job's log and its steps, the latest first; of one moment, the step before the line."""
    view, read = await _job(service, owner.id, tuning), service.context.store.read
    of_lines, of_steps = await _behind(service, owner.id, view, after) if after else ((), ())
    lines = await read(tenants.latest_events, owner.id, view.id, Page(limit + 1, of_lines))
    steps = await read(versions.latest_steps, owner.id, view.id, Page(limit + 1, of_steps))

    def page() -> dict[str, Any]:
        events = [((row.time, 0, row.id), line_event(view, row)) for row in lines]
        events += [((row.time, 1, row.step), step_event(view, row)) for row in steps]
        ordered = [event for _, event in sorted(events, key=lambda one: one[0], reverse=True)]
        return page_of(ordered, limit)

    return json_response(await service.encoders(page))


async def _behind(service: ServiceContext, tenant: str, view: JobView, event: str) -> tuple[Cursor, Cursor]:
    """Where the lines of a job and its steps continue behind the event of this id. Raises :class:`MissingObject`."""
    kind, number = event_number(view, event)
    read, of = service.context.store.read, {"tenant": tenant, "job": view.id}
    row: StepRow | EventRow | None
    if kind == "s":
        row = await read(find, StepRow, **of, step=number)
    else:
        row = await read(find, EventRow, **of, id=number)
    if row is None:
        raise not_listed(event)
    return (row.time, AFTER_ALL if kind == "s" else number), (row.time, number if kind == "s" else BEFORE_ALL)


@routes.get("/fine_tuning/jobs/{tuning}/checkpoints", response_model=dict[str, Any])
async def fine_tuning_checkpoints(
    service: Service, owner: Owner, tuning: str, after: After = "", limit: Limit = 10
) -> Response:
    """The kept versions of the job's policy, newest first."""
    view, queries = await _job(service, owner.id, tuning), service.controller.queries
    if not view.policies:
        return json_response(page_of([], limit, ends=True))
    policy = view.policies[0]
    page = Page(limit + 1)
    if after:
        if not (version := checkpoint_version(view, after)):
            raise not_listed(after)
        page = Page(limit + 1, (version,))  # also where that is not kept any more
    rows = [checkpoint(view, *one) for one in await queries.checkpoints(owner.id, view.id, policy, page)]
    return json_response(page_of(rows, limit, ends=True))


# --- graders ----------------------------------------------------------------------------------------------------------


@routes.post("/fine_tuning/alpha/graders/validate", response_model=dict[str, Any])
async def validate_grader(service: Service, owner: Owner, given: GraderValidate) -> Response:
    await _checked_grader(service, owner.id, given.grader, "grader")
    return json_response({"grader": given.grader})


async def _checked_grader(service: ServiceContext, tenant: str, given: Any, where: str) -> OneGrader:
    """The grader in ``given``, whose Python defines its function and whose models can be asked. Raises
    :class:`UnsupportedField`."""
    grader: OneGrader = await service.threads(read_grader, given, where)
    graders = service.checks.graders
    for model in grader_models(given):
        if model not in graders.judges:
            try:
                await service.controller.completions.find(tenant, model)
            except (NotFound, Unavailable) as error:
                raise UnsupportedField(f"{where}.model: {error}", f"{where}.model") from None
    try:
        await service.controller.checked(tenant, graders.check, grader, threads=graders.threads)
    except ValueError as error:
        raise UnsupportedField(f"{where}.source: {error}", f"{where}.source") from None
    return grader


@routes.post("/fine_tuning/alpha/graders/run", response_model=dict[str, Any])
async def run_grader(service: Service, owner: Owner, given: GraderRun) -> Response:
    """The value of a grader for one reply."""
    grader: OneGrader = await service.threads(read_grader, given.grader, "grader")
    loop, graders = asyncio.get_running_loop(), service.checks.graders

    async def asked(question: ModelQuestion) -> ModelAnswer:
        TENANT.set(owner.id)
        try:
            answer = await service.controller.completions.judge(owner.id, question)
        except RookeryError as error:
            raise UserError(str(error)) from None
        return ModelAnswer(answer.text, answer.prompt_tokens, len(answer.tokens))

    def ask(question: ModelQuestion) -> ModelAnswer:
        judge = graders.judges.get(question.model)
        if judge is not None:
            return answer_of(judge, question)
        return graders.answer(asked(question), loop)

    found = await service.controller.checked(
        owner.id, _tried, grader, given, graders.tools(ask), threads=graders.threads
    )
    return json_response(found)


def _tried(grader: OneGrader, given: GraderRun, tools: GraderTools) -> dict[str, Any]:
    item = given.item or {}
    if not isinstance(item, dict):
        raise UnsupportedField("item: give an object", "item")
    missing, silent, began = "", "", time.perf_counter()
    try:
        check_item(grader, item)
    except ValueError as error:
        missing = str(error)
    try:
        graded = grade(grader, spoken(given.model_sample), item, tools)
    except ModelSilent as error:
        graded, silent = Graded(0.0, error=str(error)), str(error)
    return grader_run(grader, graded, tools, time.perf_counter() - began, missing, silent)


# --- models -----------------------------------------------------------------------------------------------------------


@routes.delete("/models/{model:path}", response_model=dict[str, Any])
async def delete_model(service: Service, owner: Owner, model: str) -> Response:
    """Delete a fine-tuned model: its job, once that has ended."""
    if not model.startswith("ft:"):
        raise MissingObject(f"no fine-tuned model {model[:80]!r}; give a name that begins with ft:", "model")
    if CHECKPOINT_OF in model:
        raise UnsupportedField("a checkpoint is not deleted alone; delete its model, or keep it", "model")
    target = await service.controller.completions.find(owner.id, model)
    job = _job_of(target)
    view = await service.controller.queries.show(owner.id, job)
    if not is_fine_tuning(view.spec):
        raise MissingObject(f"no fine-tuned model {model[:80]!r}; GET /v1/fine_tuning/jobs lists yours", "model")
    await service.controller.delete_job(owner.id, job)
    service.deleted.add(owner.id, fine_tuning_id(job), (view.created, view.id))
    return json_response({"id": model, "object": "model", "deleted": True})
