"""``/api/v1``: jobs, what they leave, models and samples. Every route is scoped by the key's tenant."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Header, Query, Request, Response
from fastapi.responses import StreamingResponse

from rookery.controller.views import NUMBER
from rookery.environments.jsonl import read_jsonl
from rookery.errors import NotFound
from rookery.server.auth import AuthenticatedRoute, Owner, Service
from rookery.server.peft_archive import pack, unpack
from rookery.server.responses import PROBLEMS, json_response
from rookery.server.schemas import (
    AdapterAnswer,
    BaseModelRow,
    Completion,
    DatasetAnswer,
    DryRun,
    EpisodeRow,
    Evaluation,
    Event,
    Health,
    Job,
    Jobs,
    MetricsRow,
    SampleRequest,
    Version,
)
from rookery.server.streams import follow_job
from rookery.spec.parsing import SpecError

routes = APIRouter(prefix="/api/v1", route_class=AuthenticatedRoute, responses=PROBLEMS)

JobData = Annotated[dict[str, Any], Body(description="A job: the fields of JobSpec")]
IdempotencyKey = Annotated[str | None, Header(alias="Idempotency-Key", max_length=200)]
Limit = Annotated[int, Query(ge=1, le=1000)]
OfVersion = Annotated[int | None, Query(ge=0, lt=2**63)]
After = Annotated[int, Query(ge=-1, description="Only rows of later steps")]


@routes.post("/jobs", response_model=Job, status_code=201, tags=["jobs"])
async def submit(service: Service, owner: Owner, data: JobData, key: IdempotencyKey = None) -> Response:
    """Submit a job. The same ``Idempotency-Key`` again answers 200 with the job that it made the first time."""
    _refuse_paths(data)
    view, created = await service.controller.submit(owner.id, data, key)
    return json_response(view, 201 if created else 200)


@routes.post("/jobs/dry-run", response_model=DryRun, tags=["jobs"])
async def dry_run(service: Service, owner: Owner, data: JobData) -> Response:
    """Validate a job, fill in its defaults and render three of its prompts. Nothing is created."""
    _refuse_paths(data)
    return json_response(await service.controller.dry_run(owner.id, data))


@routes.get("/jobs", response_model=Jobs, tags=["jobs"])
async def list_jobs(service: Service, owner: Owner) -> Response:
    return json_response(await service.controller.list(owner.id))


@routes.get("/jobs/{job}", response_model=Job, tags=["jobs"])
async def show(service: Service, owner: Owner, job: str) -> Response:
    return json_response(await service.controller.show(owner.id, job))


@routes.post("/jobs/{job}/{action}", response_model=Job, tags=["jobs"])
async def act(service: Service, owner: Owner, job: str, action: Literal["pause", "resume", "cancel"]) -> Response:
    """Pause a job (nothing is lost), let it go on, or end it for good. Answers the job as it is then."""
    await getattr(service.controller, action)(owner.id, job)
    return json_response(await service.controller.show(owner.id, job))


@routes.get("/jobs/{job}/metrics", response_model=list[MetricsRow], tags=["results"])
async def metrics(service: Service, owner: Owner, job: str, after: After = -1) -> Response:
    """One row per optimizer step, as in the job's metrics.jsonl."""
    return json_response(await service.controller.metrics(owner.id, job, after))


@routes.get("/jobs/{job}/metrics/stream", response_class=StreamingResponse, tags=["results"])
async def metrics_stream(
    service: Service,
    owner: Owner,
    job: str,
    after: After = -1,
    last: Annotated[str | None, Header(alias="Last-Event-ID")] = None,
) -> Response:
    """Server-sent events while the job runs: ``metrics`` (a row), ``job`` (its state changed), ``end``."""
    await service.controller.show(owner.id, job)
    if last is not None and NUMBER.fullmatch(last):
        after = int(last)
    events = follow_job(service, owner.id, job, after)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})


@routes.get("/jobs/{job}/events", response_model=list[Event], tags=["results"])
async def events(service: Service, owner: Owner, job: str, limit: Limit = 100) -> Response:
    """What happened to the job, newest last."""
    return json_response(await service.controller.events(owner.id, job, limit))


@routes.get("/jobs/{job}/trajectories", response_model=list[EpisodeRow], tags=["results"])
async def trajectories(
    service: Service, owner: Owner, job: str, limit: Limit = 20, version: OfVersion = None
) -> Response:
    """Recent episodes: text, tokens, log-probabilities, versions, rewards."""
    return json_response(await service.controller.trajectories(owner.id, job, limit, version))


@routes.get("/jobs/{job}/evaluations", response_model=list[Evaluation], tags=["results"])
async def evaluations(service: Service, owner: Owner, job: str) -> Response:
    """Held-out figures of the versions that were evaluated."""
    return json_response(await service.controller.evaluations(owner.id, job))


@routes.get("/jobs/{job}/policies/{policy}/versions", response_model=list[Version], tags=["results"])
async def versions(service: Service, owner: Owner, job: str, policy: str) -> Response:
    return json_response(await service.controller.versions(owner.id, job, policy))


@routes.get(
    "/jobs/{job}/policies/{policy}/versions/{version}/adapter",
    response_class=Response,
    responses={200: {"content": {"application/x-tar": {}}, "description": "The PEFT folder's files"}},
    tags=["results"],
)
async def adapter(service: Service, owner: Owner, job: str, policy: str, version: str) -> Response:
    """The PEFT folder of a version (a number, or ``latest``) as a tar; the trainer's state is not in it."""
    if version != "latest" and not NUMBER.fullmatch(version):
        raise NotFound(f"no version {version!r}; give a number or latest")
    number = None if version == "latest" else int(version)
    manifest = await service.controller.adapter(owner.id, job, policy, number)
    size, pieces = await asyncio.to_thread(pack, service.artifacts, manifest, service.clock.time())
    name = f"{job}-{policy}-{version}.tar"
    headers = {"Content-Length": str(size), "Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(pieces, media_type="application/x-tar", headers=headers)


@routes.post("/sample", response_model=Completion, tags=["models"])
async def sample(service: Service, owner: Owner, asked: SampleRequest) -> Response:
    """One completion from a base model or a job's policy, by the engine that the rollouts use."""
    messages = [message.model_dump() for message in asked.messages]
    sampling = asked.model_dump(include={"max_tokens", "temperature", "seed", "stop"})
    return json_response(await service.controller.sample(owner.id, asked.target, messages, sampling))


@routes.post(
    "/datasets",
    response_model=DatasetAnswer,
    status_code=201,
    openapi_extra={"requestBody": {"content": {"application/jsonl": {"schema": {"type": "string"}}}, "required": True}},
    tags=["uploads"],
)
async def add_dataset(service: Service, owner: Owner, request: Request) -> Response:
    """Upload the rows of a ``jsonl`` environment: one JSON object per line."""
    content = await request.body()
    rows = await asyncio.to_thread(read_jsonl, content)
    digest = await service.controller.add_dataset(owner.id, content)
    return json_response({"dataset": digest, "rows": len(rows)}, 201)


@routes.post(
    "/adapters",
    response_model=AdapterAnswer,
    status_code=201,
    openapi_extra={
        "requestBody": {
            "content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}},
            "required": True,
        }
    },
    tags=["uploads"],
)
async def add_adapter(service: Service, owner: Owner, request: Request) -> Response:
    """Upload a PEFT folder to start from: a tar with adapter_config.json and adapter_model.safetensors."""
    files = await asyncio.to_thread(unpack, await request.body())
    return json_response({"adapter": await service.controller.add_adapter(owner.id, files)}, 201)


@routes.get("/models", response_model=list[BaseModelRow], tags=["models"])
async def models(service: Service, owner: Owner) -> Response:
    """Base models: loaded (a worker has it), known (can be prepared), refused and why."""
    return json_response(service.controller.models())


@routes.get("/health", response_model=Health, tags=["service"])
async def health(service: Service, owner: Owner) -> Response:
    return json_response(service.controller.health())


def _refuse_paths(data: dict[str, Any]) -> None:
    """A path means something on the machine of whoever wrote it, never here. Raises :class:`SpecError`."""
    problems = []
    environment = data.get("environment")
    for given, instead in (("path", "dataset"), ("eval_path", "eval_dataset")):
        if isinstance(environment, dict) and environment.get("id") == "jsonl" and given in environment:
            problems.append(
                f"environment.{given}: given {json.dumps(environment[given])}, but the service reads no files of yours:"
                " upload it (POST /api/v1/datasets; the Python client and rookery run do it) and give"
                f" environment.{instead}"
            )
    policies = data.get("policies")
    for name, policy in policies.items() if isinstance(policies, dict) else ():
        start = policy.get("warm_start") if isinstance(policy, dict) else None
        if isinstance(start, dict) and "peft" in start:
            problems.append(
                f"policies.{name}.warm_start.peft: given {json.dumps(start['peft'])}, but the service reads no files of"
                " yours: upload the folder (POST /api/v1/adapters; the Python client and rookery run do it) and give"
                " warm_start.upload"
            )
    if problems:
        raise SpecError(problems)
