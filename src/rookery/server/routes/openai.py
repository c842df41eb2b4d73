"""``/v1``: the OpenAI API over base models and policies, for clients that speak it.

* Answers come from the engines and the queue that the rollouts use; streamed or whole they are the same.
* A choice's text ends before the stop string; its token ids (an extension) are all that were sampled.
* A prompt of any length is read aside, so that nobody else waits for it.
* Whoever hangs up ends the generation. Every wait ends: with an answer, an error of OpenAI's shape, or the service.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from rookery.controller.rollout.completions import PreparedPrompt, PromptTooLong
from rookery.controller.rollout.scheduler import SamplingResult
from rookery.errors import NotFound, RookeryError, Unauthorized, Unavailable
from rookery.server.auth import AuthenticatedRoute, Owner, Service, ServiceContext
from rookery.server.openai_responses import ChatFormat, Choice, ResponseFormat, TextFormat
from rookery.server.openai_schemas import (
    ChatRequest,
    CompletionOptions,
    CompletionRequest,
    UnsupportedField,
    refuse_unsupported,
)
from rookery.server.responses import json_response

log = logging.getLogger("rookery.server.openai")

COMPLETION_TOKENS = 16
"""Tokens of a completion that sets no limit, as OpenAI has it."""

MOST_ANSWERS = 1024
"""Of one request, which is held in memory until it is answered."""

CLIENT_GONE = 499
"""Status of an answer that nobody is there to read, as proxies log it."""

T = TypeVar("T")


# --- errors -----------------------------------------------------------------------------------------------------------


def _problem(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of an error in OpenAI's shape."""
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    if isinstance(error, RequestValidationError):
        detail = error.errors()[0]
        where = ".".join(str(part) for part in detail["loc"] if part != "body")
        status, message, param = 400, f"{where}: {detail['msg']}" if where else detail["msg"], where or None
    elif isinstance(error, RookeryError):
        status, message = error.status, " ".join(str(error).split())
        if isinstance(error, Unauthorized):
            code = "invalid_api_key"
        elif isinstance(error, PromptTooLong):
            code = "context_length_exceeded"
        elif isinstance(error, NotFound):
            param, code = "model", "model_not_found"
    elif isinstance(error, HTTPException):
        status, message = error.status_code, error.detail
    else:
        status, message = 500, f"internal error ({type(error).__name__}); the service's log has the traceback"
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _told(error: Exception, path: str) -> tuple[int, dict[str, Any]]:
    """The same, and what its operator should know is logged."""
    status, body = _problem(error)
    if not isinstance(error, RookeryError | RequestValidationError | HTTPException):
        log.error("%s failed", path, exc_info=error)
    elif status >= 500:
        log.warning("%s: %s", path, error)
    return status, body


class _Route(AuthenticatedRoute):
    """A route whose errors have OpenAI's shape."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await handle(request)
            except Exception as error:  # every one is answered, in one shape; what was not foreseen is logged
                status, body = _told(error, request.url.path)
                response = json_response(body, status)
                if status == Unauthorized.status:
                    response.headers["WWW-Authenticate"] = "Bearer"
                if status == RookeryError.status:
                    response.headers["x-should-retry"] = "false"  # it would end the same
                return response

        return handler


routes = APIRouter(prefix="/v1", route_class=_Route, tags=["openai"])


# --- endpoints --------------------------------------------------------------------------------------------------------


@routes.post("/chat/completions", response_model=dict[str, Any])
async def chat_completions(service: Service, owner: Owner, request: Request, asked: ChatRequest) -> Response:
    """Answers to a conversation, by a base model or a policy."""
    refuse_unsupported(asked.model_extra)
    messages = [message.plain(f"messages.{number}") for number, message in enumerate(asked.messages)]
    target, chat = await service.controller.completions.open(owner.id, asked.model)
    limits = [limit for limit in (asked.max_tokens, asked.max_completion_tokens) if limit is not None]
    shape = ChatFormat(service, asked, target.name, logprobs=bool(asked.logprobs))
    _refuse_many(asked, 1)
    question = await asyncio.to_thread(service.controller.completions.prepare, target, chat, messages)
    return await _respond(service, owner.id, request, shape, [question], min(limits, default=None))


@routes.post("/completions", response_model=dict[str, Any])
async def completions(service: Service, owner: Owner, request: Request, asked: CompletionRequest) -> Response:
    """Continuations of texts, or of token ids, which stay as they are: no template, no special tokens added."""
    refuse_unsupported(asked.model_extra)
    if asked.logprobs:
        raise UnsupportedField(
            "logprobs: other likely tokens are not supported; give 0 for the tokens' own",
            "logprobs",
            "unsupported_parameter",
        )
    if asked.best_of not in (None, asked.n or 1):
        raise UnsupportedField("best_of is not supported: leave it out", "best_of", "unsupported_parameter")
    target, chat = await service.controller.completions.open(owner.id, asked.model)
    shape = TextFormat(service, asked, target.name, logprobs=asked.logprobs is not None)
    _refuse_many(asked, len(asked.prompts))
    ask = partial(service.controller.completions.prepare, target, chat)
    questions = await asyncio.to_thread(lambda: [ask(prompt) for prompt in asked.prompts])
    return await _respond(service, owner.id, request, shape, questions, asked.max_tokens or COMPLETION_TOKENS)


@routes.get("/models", response_model=dict[str, Any], name="openai_models")
async def list_models(service: Service, owner: Owner) -> Response:
    """What can be asked now: base models that a worker has, and the versions of the tenant's jobs."""
    rows = await service.controller.completions.targets(owner.id)
    return json_response({"object": "list", "data": [_model(row["name"], row) for row in rows]})


@routes.get("/models/{model:path}", response_model=dict[str, Any])
async def show_model(service: Service, owner: Owner, model: str) -> Response:
    """One of them, by any of its names."""
    found = await service.controller.completions.find(owner.id, model)
    rows = {row["name"]: row for row in await service.controller.completions.targets(owner.id)}
    return json_response(_model(model, rows.get(found.name, {"created": 0.0, "owner": "rookery"})))


@routes.api_route("/{path:path}", methods=["GET", "POST", "PUT", "PATCH", "DELETE"], include_in_schema=False)
async def nothing(owner: Owner, path: str) -> Response:
    raise _Nothing(f"nothing at /v1/{path}; there are /v1/chat/completions, /v1/completions and /v1/models")


class _Nothing(RookeryError):
    status = 404


def _model(name: str, row: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(row["created"]), "owned_by": row["owner"]}


# --- answering --------------------------------------------------------------------------------------------------------


async def _respond(
    service: ServiceContext,
    owner: str,
    request: Request,
    shape: ResponseFormat,
    questions: Sequence[PreparedPrompt],
    limit: int | None,
) -> Response:
    """``n`` answers to each question, streamed or whole."""
    asked, stops = shape.asked, shape.asked.stops
    seed = asked.seed if asked.seed is not None else service.controller.completions.draw_seed()
    count = asked.n or 1
    choices = [
        Choice(number * count + i, question, _seed(seed, number * count + i), stops)
        for number, question in enumerate(questions)
        for i in range(count)
    ]
    growing = _grow(service, owner, asked, choices, limit)
    headers = {"x-request-id": shape.id}
    if asked.stream:
        events = _events(shape, choices, growing, request.url.path)
        return _Stream(events, media_type="text/event-stream", headers={**headers, "Cache-Control": "no-store"})
    if not await _unless_gone(request, _exhaust(growing)):
        return Response(status_code=CLIENT_GONE)
    response = json_response(shape.body(choices, _usage(choices)))
    response.headers.update(headers)
    return response


def _refuse_many(asked: CompletionOptions, questions: int) -> None:
    """Before the prompts are read. Raises :class:`Refused`."""
    if (asked.n or 1) * questions > MOST_ANSWERS:
        raise UnsupportedField(f"n: at most {MOST_ANSWERS} answers to one request", "n")


def _seed(seed: int, index: int) -> int:
    """The seed of a choice: the request's own for the first, unrelated ones for the others."""
    return seed if index == 0 else random.Random(f"{seed}:{index}").getrandbits(63)


def _usage(choices: Sequence[Choice]) -> dict[str, int]:
    """Each prompt counts once, however many answers it has."""
    prompts = sum(len(prompt) for prompt in {id(c.question): c.question.prompt for c in choices}.values())
    sampled = sum(len(choice.reply.tokens) for choice in choices)
    return {"prompt_tokens": prompts, "completion_tokens": sampled, "total_tokens": prompts + sampled}


async def _grow(
    service: ServiceContext, owner: str, asked: CompletionOptions, choices: Sequence[Choice], limit: int | None
) -> AsyncGenerator[tuple[Choice, str, str | None] | None]:
    """Generates all choices. Yields (choice, further text, why it ended or None) as they grow, and None when nothing
    came for a heartbeat. Closed early, it ends their generation. Raises what ends the generation of any."""
    changed = asyncio.Event()

    def watch(choice: Choice) -> Callable[[SamplingResult], None]:
        def grown(reply: SamplingResult) -> None:
            choice.reply = reply
            changed.set()

        return grown

    tasks = {
        choice.index: asyncio.create_task(
            service.controller.completions.generate(
                owner,
                choice.question,
                max_tokens=limit,
                temperature=1.0 if asked.temperature is None else asked.temperature,
                seed=choice.seed,
                stop=asked.stops,
                on_tokens=watch(choice),
            )
        )
        for choice in choices
    }
    closing = asyncio.create_task(service.closing.wait())
    for task in (*tasks.values(), closing):
        task.add_done_callback(lambda _: changed.set())
    try:
        left = list(choices)
        while left:
            if closing.done():
                raise Unavailable("the service stops; ask again when it is back")
            changed.clear()
            for choice in list(left):
                last = tasks[choice.index].done()
                if last:
                    choice.reply = tasks[choice.index].result()
                    left.remove(choice)
                known = len(choice.text.starts)
                text = choice.take(last=last)
                if last or len(choice.text.starts) > known:
                    yield choice, text, choice.reply.finish if last else None
            if left:
                try:
                    async with asyncio.timeout(service.settings.worker.heartbeat_seconds):
                        await changed.wait()
                except TimeoutError:
                    yield None
    finally:
        for task in (*tasks.values(), closing):
            task.cancel()
        await asyncio.gather(*tasks.values(), closing, return_exceptions=True)


async def _exhaust(growing: AsyncGenerator[Any]) -> bool:
    async with aclosing(growing):
        async for _ in growing:
            pass
    return True


async def _events(
    shape: ResponseFormat,
    choices: Sequence[Choice],
    growing: AsyncGenerator[tuple[Choice, str, str | None] | None],
    path: str,
) -> AsyncGenerator[bytes]:
    """The stream of an answer. What goes wrong on the way is its last event."""
    async with aclosing(growing):
        try:
            for choice in choices:
                opening = shape.first_chunk(choice)
                if opening is not None:
                    yield shape.chunk([opening])
            async for news in growing:
                if news is None:
                    yield b": still here\n\n"
                    continue
                choice, text, finish = news
                if text or finish or shape.asked.return_token_ids:
                    yield shape.chunk([shape.delta(choice, text, finish)])
            if shape.asked.stream_options is not None and shape.asked.stream_options.include_usage:
                yield shape.chunk([], _usage(choices))
            yield b"data: [DONE]\n\n"
        except Exception as error:
            _, body = _told(error, path)
            yield b"data: " + msgspec.json.encode(body) + b"\n\n"


class _Stream(StreamingResponse):
    """A stream that has ended when its response has, whoever ended it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert isinstance(self.body_iterator, AsyncGenerator)
        async with aclosing(self.body_iterator):
            await super().__call__(scope, receive, send)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """What ``work`` answers; None, and it is cancelled, when the client hangs up before."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
