"""Agents: the episodes that a process opens and ends with its tenant's key, and the addresses that an episode's key
opens, where whatever its agent runs on finds the model."""

from __future__ import annotations

from typing import Annotated, Any, cast

from fastapi import APIRouter, Depends, Path, Request, Response

from rookery.aio import unless
from rookery.bounds import Line
from rookery.controller.fleet.agents import AgentOutcome, AgentSession, EpisodeEnded
from rookery.controller.prompts import Sampling
from rookery.errors import Conflict, NotFound, Unavailable, UserError, short
from rookery.server.auth import AuthenticatedRoute, Service, ServiceContext, authenticate_agent
from rookery.server.openai import ChatRequest
from rookery.server.openai_responses import ResponsesInput, ResponsesRequest
from rookery.server.responses import ERRORS, json_response, public_address
from rookery.server.routes.jobs import OfJob
from rookery.server.routes.openai import ERRORS as OPENAI_ERRORS
from rookery.server.routes.openai import (
    OpenAIRoute,
    UnknownPath,
    complete_chat,
    complete_tokens,
    count_input,
    disconnected,
    respond,
)
from rookery.server.schemas import EpisodeEnd, EpisodeFailure, EpisodeOpened, EpisodeOpening, EpisodeState
from rookery.server.token_face import TokenRequest
from rookery.spec import values
from rookery.spec.job import AGENT
from rookery.storage.models import FINAL_JOB_STATES, JobRow

routes = APIRouter(prefix="/api/v1", route_class=AuthenticatedRoute, responses=ERRORS, tags=["agents"])

EpisodeId = Annotated[str, Path(max_length=200, description="The episode's id")]


# --- the process that opens and ends them -----------------------------------------------------------------------------


@routes.post("/jobs/{job}/episodes", response_model=EpisodeOpened)
async def open_episode(service: Service, job: OfJob, request: Request, asked: EpisodeOpening) -> Any:
    """Open the next episode of a job with ``environment: {id: agent}``: its task, and the address and the key for its
    agent. Waits for one; ``episode`` is null if there is none within ``wait`` seconds."""
    if job.spec.get("environment", {}).get("id") != AGENT:
        raise Conflict("the job's environment is not {id: agent}: its hosts run its episodes")
    if job.state in FINAL_JOB_STATES:
        raise EpisodeEnded(f"job {job.id} is {job.state}: it has no more episodes")
    agents = service.context.rooms.hosts.agents
    opened = await unless(disconnected(request), unless(service.closing.wait(), agents.open(job.id, asked.wait)))
    if opened is None:
        if service.closing.is_set():
            raise Unavailable("the service is stopping; try again when it is back")
        return {"episode": None}
    session, key = opened
    base = f"{public_address(request, service.context.settings.server.public_url)}/agents/{session.id}"
    return {
        "episode": session.id, "task": values.decode(session.prompt), "seed": session.seed, "split": session.split,
        "base_url": f"{base}/v1", "token_url": f"{base}/inference/v1", "key": key, "models": list(session.policies),
    }  # fmt: skip


@routes.post("/jobs/{job}/episodes/{episode}/finish", response_model=EpisodeState)
async def finish_episode(service: Service, job: OfJob, request: Request, episode: EpisodeId, end: EpisodeEnd) -> Any:
    """End an episode with its reward. The answer comes when that is durable; calls that still run are ended."""
    outcome = AgentOutcome(end.reward, end.metrics, end.rewards)
    return await _end(service, request, job, episode, outcome)


@routes.post("/jobs/{job}/episodes/{episode}/fail", response_model=EpisodeState)
async def fail_episode(
    service: Service, job: OfJob, request: Request, episode: EpisodeId, failure: EpisodeFailure
) -> Any:
    """End an episode that cannot be finished. It is counted with its reason, and changes nothing for others."""
    reason = " ".join(failure.reason.split())
    if not reason:
        raise UserError("reason: it is empty; say in a line why the agent failed")
    return await _end(service, request, job, episode, reason)


async def _end(
    service: ServiceContext, request: Request, job: JobRow, episode: str, result: AgentOutcome | str
) -> dict[str, Any]:
    agents = service.context.rooms.hosts.agents
    session = await agents.session(job.tenant, job.id, episode)
    session.end(result)
    durable = await unless(disconnected(request), unless(service.closing.wait(), session.settled()))
    if durable is None:
        raise Unavailable("the service is stopping; try again when it is back")
    state, error = "failed" if session.failure else "done", session.failure
    if not durable:
        if session.split == "eval":
            raise EpisodeEnded(f"the end of episode {episode} does not count: its job evaluates again, in others")
        found = await agents.standing(job.tenant, job.id, episode)
        if found.runs_again:
            raise Unavailable(f"the end of episode {episode} was not stored: its job is {found.job_state}; try again")
        if found.state not in ("done", "failed"):
            raise EpisodeEnded(f"episode {episode} was dropped: its job is {found.job_state}")
        state, error = found.state, found.error
    return {"episode": episode, "state": state, "error": error or None}


# --- the agent --------------------------------------------------------------------------------------------------------


class EpisodeRoute(OpenAIRoute):
    """A route that the key of the episode in its path opens."""

    @staticmethod
    async def authenticate(request: Request) -> object:
        return await authenticate_agent(request)


agent_routes = APIRouter(prefix="/agents/{episode}", route_class=EpisodeRoute, responses=OPENAI_ERRORS, tags=["agents"])


async def _session(request: Request, episode: EpisodeId) -> AgentSession:
    del episode  # its documentation
    return cast(AgentSession, request.state.session)


Session = Annotated[AgentSession, Depends(_session)]


class EpisodeChat(ChatRequest):
    """A chat of an agent."""

    model: Line = ""


class EpisodeResponses(ResponsesRequest):
    """A response of an agent."""

    chat_type = EpisodeChat

    model: Line = ""


class EpisodeInput(ResponsesInput):
    """The input of an agent's response."""

    chat_type = EpisodeChat

    model: Line = ""


class EpisodeTokens(TokenRequest):
    """Token ids of an agent."""

    model: Line = ""


def _sampler(session: AgentSession) -> Sampling:
    return cast(Sampling, session.sampler)


@agent_routes.post("/v1/chat/completions", response_model=dict[str, Any], name="agent_chat")
async def chat(service: Service, session: Session, request: Request, options: EpisodeChat) -> Response:
    """Complete a conversation with the episode's policy."""
    return await complete_chat(service, _sampler(session), session.tenant, request, options)


@agent_routes.post("/v1/responses", response_model=dict[str, Any], name="agent_responses")
async def responses(service: Service, session: Session, request: Request, asked: EpisodeResponses) -> Response:
    """Continue a conversation with the episode's policy, in the form of OpenAI's Responses API."""
    return await respond(service, _sampler(session), session.tenant, request, asked)


@agent_routes.post("/v1/responses/input_tokens", response_model=dict[str, Any], name="agent_input_tokens")
async def input_tokens(service: Service, session: Session, asked: EpisodeInput) -> Response:
    """The number of tokens that a response of the episode's policy would read."""
    return await count_input(service, _sampler(session), session.tenant, asked)


@agent_routes.post("/inference/v1/generate", response_model=dict[str, Any], name="agent_tokens")
async def generate(service: Service, session: Session, request: Request, asked: EpisodeTokens) -> Response:
    """Continue token ids with the episode's policy."""
    return await complete_tokens(service, _sampler(session), session.tenant, request, asked)


@agent_routes.get("/v1/models", response_model=dict[str, Any], name="agent_models")
async def models(session: Session) -> Response:
    """The policies that reply in the episode."""
    return json_response({"object": "list", "data": [_model(session, name) for name in session.policies]})


@agent_routes.get("/v1/models/{model}", response_model=dict[str, Any], name="agent_model")
async def model(session: Session, model: Annotated[str, Path(max_length=200)]) -> Response:
    """One of them."""
    if model not in session.policies:
        raise NotFound(f"no model {short(repr(model))} in an agent's episode; give {' or '.join(session.policies)}")
    return json_response(_model(session, model))


def _model(session: AgentSession, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": session.tenant}


@agent_routes.api_route(
    "/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"], include_in_schema=False, name="agent_unknown"
)
async def unknown_path(session: Session, path: str) -> Response:
    raise UnknownPath(
        f"nothing at /{path} of an episode; there are /v1/chat/completions, /v1/responses,"
        " /v1/responses/input_tokens, /v1/models and /inference/v1/generate"
    )
