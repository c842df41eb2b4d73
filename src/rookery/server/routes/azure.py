"""``/openai/deployments/MODEL``: the completions of ``/v1`` where clients for Azure send them. The address names the
model, and a stream has no comments, at which azure-ai-inference fails: it skips chunks without choices, as Azure sends
them. Every other path below ``/openai`` is that below ``/v1`` (:mod:`rookery.server.methods`)."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field

from rookery.bounds import Line
from rookery.server.auth import Owner, Service
from rookery.server.openai import ChatRequest, CompletionRequest
from rookery.server.routes.openai import ERRORS, OpenAIRoute, complete_chat, complete_text

routes = APIRouter(prefix="/openai/deployments/{deployment:path}", route_class=OpenAIRoute, responses=ERRORS)

NotRead = Annotated[Line, BeforeValidator(lambda given: given or "")]


class DeployedChat(ChatRequest):
    """A chat with the model that its address names."""

    reads_comments = False
    model: NotRead = Field("", description="No effect: the address names the model")


class DeployedCompletion(CompletionRequest):
    """A completion of the model that its address names."""

    reads_comments = False
    model: NotRead = Field("", description="No effect: the address names the model")


@routes.post("/chat/completions", response_model=dict[str, Any], include_in_schema=False)
async def chat_completions(
    service: Service, owner: Owner, request: Request, deployment: str, options: DeployedChat
) -> Response:
    options.model = deployment
    return await complete_chat(service, service.controller.completions, owner.id, request, options)


@routes.post("/completions", response_model=dict[str, Any], include_in_schema=False)
async def completions(
    service: Service, owner: Owner, request: Request, deployment: str, options: DeployedCompletion
) -> Response:
    options.model = deployment
    return await complete_text(service, service.controller.completions, owner.id, request, options)
