"""``/api/v1/jobs/{job}/groups`` and ``/episodes``: what a policy wrote and earned, page by page."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Response

from rookery.controller.episode_views import EpisodePage, EpisodeReading, FailureView, GroupPage, GroupView
from rookery.controller.views import JobHealthView
from rookery.server.auth import AuthenticatedRoute, Service, room_for
from rookery.server.paging import decoded, encoded
from rookery.server.responses import ERRORS, view_response
from rookery.server.routes.jobs import OfJob
from rookery.storage.models import GroupState
from rookery.storage.repositories.episodes import EpisodeChoice

routes = APIRouter(prefix="/api/v1", route_class=AuthenticatedRoute, responses=ERRORS, tags=["results"])

OF_STEP = "Only groups consumed by the version that holds this step; with commit_every, it may hold several"
Step = Annotated[int | None, Query(ge=0, lt=2**63, description=OF_STEP)]
Reward = Annotated[float | None, Query(allow_inf_nan=False)]
Name = Annotated[str, Path(max_length=200)]


@routes.get("/jobs/{job}/groups", response_model=GroupPage, dependencies=[room_for()])
async def groups(
    service: Service,
    job: OfJob,
    step: Step = None,
    state: GroupState | None = None,
    offset: Annotated[int, Query(ge=0, lt=2**31)] = 0,
    limit: Annotated[int, Query(ge=1, le=200)] = 50,
) -> Response:
    """Training groups, newest first, with their episodes' rewards and advantages."""
    queries = service.controller.queries.episodes
    found = await queries.groups(job.tenant, job.id, step=step, state=state, offset=offset, limit=limit)
    return await view_response(service.encoders, found)


@routes.get("/jobs/{job}/groups/{group}", response_model=GroupView, dependencies=[room_for()])
async def group(service: Service, job: OfJob, group: Name) -> Response:
    """One group with the replies of its episodes, as far as 16 MB hold them as they are stored."""
    found = await service.controller.queries.episodes.group(job.tenant, job.id, group)
    return await view_response(service.encoders, found)


@routes.get("/jobs/{job}/episodes", response_model=EpisodePage, dependencies=[room_for()])
async def episodes(
    service: Service,
    job: OfJob,
    step: Step = None,
    version: Annotated[int | None, Query(ge=0, lt=2**63, description="Only those that this version began")] = None,
    group: Annotated[str | None, Query(max_length=200)] = None,
    failed: Annotated[bool | None, Query(description="Only failed ones, or only others")] = None,
    min_reward: Reward = None,
    max_reward: Reward = None,
    text: Annotated[str, Query(max_length=1000, description="Exact part of a text, or of an error")] = "",
    before: Annotated[str | None, Query(max_length=300, description="``next`` of the page before")] = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 25,
) -> Response:
    """Episodes that have ended, newest first, with their replies while their text is kept. A search of a text looks
    for a tenth of a second; ``next`` continues it."""
    cursor = decoded(before or "", (float, str), "before", "``next``") or None
    chosen = EpisodeChoice(step, version, group, failed, min_reward, max_reward, text, cursor, limit)
    rows, following = await service.controller.queries.episodes.episodes(job.tenant, job.id, chosen)
    found = EpisodePage(episodes=rows, next=None, reached=None)
    if following is not None:
        found = EpisodePage(episodes=rows, next=encoded(following), reached=following[0])
    return await view_response(service.encoders, found)


@routes.get("/jobs/{job}/episodes/{episode}", response_model=EpisodeReading, dependencies=[room_for()])
async def episode(service: Service, job: OfJob, episode: Name) -> Response:
    """One episode: its conversation, what each turn earned, and its tokens with log-probabilities and versions."""
    found = await service.controller.queries.episodes.episode(job.tenant, job.id, episode)
    return await view_response(service.encoders, found)


@routes.get("/jobs/{job}/failures")
async def failures(service: Service, job: OfJob, limit: Annotated[int, Query(ge=1, le=100)] = 20) -> list[FailureView]:
    """The most frequent errors of failed episodes."""
    return await service.controller.queries.episodes.failures(job.tenant, job.id, limit)


@routes.get("/jobs/{job}/health", dependencies=[room_for()])
async def job_health(service: Service, job: OfJob) -> JobHealthView:
    """Alarms about the job, each with what to do; advice where nothing is wrong."""
    return await service.controller.queries.job_health(job.tenant, job.id)
