"""``/v1``: the OpenAI API over base models and policies.

* Completions are sampled by the engines and the queue that rollouts use; a streamed response equals a whole one.
* A choice's text ends before the stop string; its token ids (an extension) include every sampled token.
* Prompts are tokenized in a thread, so a long one does not delay other requests.
* A client that disconnects ends its generation. Every request ends with a response, an error in OpenAI's format, or the
  end of the service.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from rookery.aio import Portions, cancel_all, in_portions, unless, wait_event
from rookery.bounds import TOOLS
from rookery.controller.prompts import CallOptions, PreparedPrompt, Sampling
from rookery.controller.rollout.request import SamplingResult
from rookery.controller.targets import Target
from rookery.errors import NotFound, RookeryError, TooManyRequests, Unauthorized, Unavailable, UserError, shortage
from rookery.server.absent_paths import absence
from rookery.server.auth import AuthenticatedRoute, Owner, Service, ServiceContext, make_room, room_for
from rookery.server.bodies import off_loop
from rookery.server.completion_formats import ChatFormat, Choice, ResponseFormat, TextFormat
from rookery.server.fine_tuning import is_fine_tuning, model_name
from rookery.server.openai import (
    ChatRequest,
    CompletionOptions,
    CompletionRequest,
    OpenAIErrorResponse,
    UnsupportedField,
    read_arguments,
    refuse_unsupported,
)
from rookery.server.openai_responses import ResponsesFormat, ResponsesInput, ResponsesRequest
from rookery.server.responses import ERRORS as SERVICE_ERRORS
from rookery.server.responses import (
    HEARTBEAT,
    METHODS,
    EventStream,
    event_data,
    first_problem,
    json_response,
    problem,
    retry_headers,
)
from rookery.server.token_face import TokenFormat, TokenRequest
from rookery.storage.columns import Page
from rookery.tokenization.call_readers import READERS, CallReader, ForcedReader
from rookery.tokenization.chat import Chat, PromptTooLong, check_letters

log = logging.getLogger("rookery.server.openai")

T = TypeVar("T")

COMPLETION_TOKENS = 16
"""Tokens of a completion without a limit, as in OpenAI's API."""

MAX_CHOICES = 1024
"""Choices of one request, which are held in memory until it ends."""

MAX_LOGPROBS = 1 << 20
"""Log-probabilities of a request that asks for more than those of the sampled tokens; each takes about 100 bytes."""

FINE_TUNED = 100
"""Newest jobs among which fine-tuned models are looked up for a list of models."""

CLIENT_GONE = 499
"""Status of a request whose client has disconnected, as proxies log it."""


# --- errors -----------------------------------------------------------------------------------------------------------


REQUEST_ID = "x-request-id"
"""The header of every response by which its client and the log name it."""


def _error_body(error: Exception, request: Request, id: str) -> tuple[int, dict[str, Any]]:
    """Status and body of an error in OpenAI's format. Unexpected errors and those of the server are logged, with the
    ``id`` of the response."""
    error = shortage(error) or error
    param, code = getattr(error, "param", None), getattr(error, "code", None)
    if isinstance(error, RequestValidationError):
        where, line = problem(first_problem(error.errors(), {"body": error.body}), request, error.body)
        status, message, param = 400, f"{where}: {line}" if where else line, where or None
    elif isinstance(error, RookeryError):
        status, message = error.status, " ".join(str(error).split())
        if isinstance(error, Unauthorized):
            code = "invalid_api_key"
        elif isinstance(error, TooManyRequests):
            code = "insufficient_quota" if error.lasting else "rate_limit_exceeded"
        elif isinstance(error, NotFound) and param is None:
            param, code = "model", "model_not_found"
    elif isinstance(error, HTTPException):
        status, message = 400 if error.status_code == 422 else error.status_code, error.detail
    else:
        status, message = 500, f"internal error ({type(error).__name__}); the service's log has the traceback"
        log.error("%s failed (%s)", request.url.path, id, exc_info=error)
    kind = "server_error" if status >= 500 else "invalid_request_error"
    if isinstance(error, RookeryError) and status >= 500:
        log.warning("%s: %s (%s)", request.url.path, error, id)
    return status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


class OpenAIRoute(AuthenticatedRoute):
    """A route whose errors have OpenAI's format. Clients of that API send parameters that it may not have yet."""

    strict = False

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handler(request: Request) -> Response:
            id = request.app.state.context.context.ids.new("req")
            try:
                response = await handle(request)
            except Exception as error:  # every error becomes a response of one format
                status, body = _error_body(error, request, id)
                response = json_response(body, status)
                response.headers.update(getattr(error, "headers", None) or retry_headers(shortage(error) or error))
                if status == Unauthorized.status:
                    response.headers["WWW-Authenticate"] = "Bearer"
                if status == RookeryError.status:
                    response.headers["x-should-retry"] = "false"  # the result would be the same
            response.headers.setdefault(REQUEST_ID, id)
            return response

        return handler


ERRORS = {status: {**documented, "model": OpenAIErrorResponse} for status, documented in SERVICE_ERRORS.items()}

routes = APIRouter(prefix="/v1", route_class=OpenAIRoute, responses=ERRORS, tags=["openai"])
token_routes = APIRouter(prefix="/inference/v1", route_class=OpenAIRoute, responses=ERRORS, tags=["openai"])


# --- endpoints --------------------------------------------------------------------------------------------------------


@routes.post("/chat/completions", response_model=dict[str, Any])
async def chat_completions(service: Service, owner: Owner, request: Request, options: ChatRequest) -> Response:
    """Complete a conversation with a base model or a policy."""
    return await complete_chat(service, service.controller.completions, owner.id, request, options)


async def complete_chat(
    service: ServiceContext, source: Sampling, owner: str, request: Request, options: ChatRequest
) -> Response:
    """A chat of ``source``."""
    refuse_unsupported(options.model_extra)
    messages, schemas = await service.threads(_read_chat, options)
    target, chat = await source.open(owner, options.model)
    if options.top_logprobs and not options.logprobs:
        raise UnsupportedField("top_logprobs needs logprobs: give logprobs=true too", "top_logprobs")
    limits = [limit for limit in (options.max_tokens, options.max_completion_tokens) if limit is not None]
    form = ChatFormat(
        service, options, target.name, logprobs=bool(options.logprobs), trainable=_trainable(source, target, options)
    )
    _limit_choices(options, 1)
    await service.checks.schemas.check(*schemas)
    prompt = await service.threads(_of_argument, "messages", _prepare_chat, source, target, chat, options, messages)
    return await _respond(service, source, owner, request, form, [prompt], min(limits, default=None))


def _of_argument(param: str, work: Callable[..., T], *arguments: Any) -> T:
    """The result of ``work``, whose errors concern the argument ``param`` where they name no other."""
    try:
        return work(*arguments)
    except UnsupportedField:
        raise
    except UserError as error:
        code = "context_length_exceeded" if isinstance(error, PromptTooLong) else None
        raise UnsupportedField(str(error), param, code) from None


Schemas = tuple[dict[str, str], dict[str, str]]
"""The JSON schemas that a chat offers, and the one that its reply follows, as they are checked."""


def _read_chat(options: ChatRequest) -> tuple[list[dict[str, Any]], Schemas]:
    """The messages of a chat as templates expect them, and its schemas. It runs in a thread, once for all choices.
    Raises :class:`UnsupportedField`."""
    refuse_unsupported(dict(options.unread_within()))
    messages = [message.for_template(f"messages.{number}") for number, message in enumerate(options.messages)]
    _ = options.logits  # the choices share it
    return messages, (options.offered_schemas, options.followed_schema)


def _trainable(source: Sampling, target: Target, options: CompletionOptions) -> bool:
    return source.trainable(target, options.temperature, options.logits)


def _prepare_chat(
    source: Sampling, target: Target, chat: Chat, options: ChatRequest, messages: list[dict[str, Any]]
) -> PreparedPrompt:
    """Raises :class:`UserError`. The arguments of calls are read once their letters were counted."""
    forced, tools = options.forced, [tool.for_template() for tool in options.offered]
    opening = ""
    if forced:
        if chat.tools.style == "harmony" and len(forced) > 1:
            raise UnsupportedField("tool_choice: this model needs the name of the tool", "tool_choice")
        opening = chat.tools.opening(forced[0].function.name)
    if messages[-1].get("tool_calls"):
        where = f"messages.{len(messages) - 1}.tool_calls"
        raise UnsupportedField(f"{where}: the last message calls tools: append their results", where)
    if messages[-1]["role"] == "assistant" and messages[-1]["content"] and options.offered:
        raise UnsupportedField(
            "messages: a reply that is continued cannot call tools: end with another message, or leave tools out",
            "messages",
        )
    check_letters(chat, messages, tools)
    read_arguments(messages)
    values = options.template_values(chat.values)
    return source.prepare(target, chat, messages, tools, opening=opening, values=values)


def _readers(options: CompletionOptions, chat: Chat) -> Callable[[], CallReader | None]:
    """Makes the parser of tool calls in a reply; None where no tools are offered."""
    if not isinstance(options, ChatRequest):
        return lambda: None
    names = [tool.function.name for tool in options.offered]
    if options.forced:
        return partial(ForcedReader, names)
    if names or chat.tools.style == "harmony":
        parameters = {tool.function.name: tool.function.parameters or {} for tool in options.offered}
        return partial(READERS[chat.tools.style], names, parameters)
    return lambda: None


@routes.post("/completions", response_model=dict[str, Any])
async def completions(service: Service, owner: Owner, request: Request, options: CompletionRequest) -> Response:
    """Continue texts or token ids as they are: no chat template, no added special tokens."""
    return await complete_text(service, service.controller.completions, owner.id, request, options)


async def complete_text(
    service: ServiceContext, source: Sampling, owner: str, request: Request, options: CompletionRequest
) -> Response:
    """Texts of ``source``."""
    refuse_unsupported(options.unknown)
    if options.echo and options.stream:
        raise UnsupportedField("echo is not supported in a stream: leave stream out", "echo", "unsupported_parameter")
    if options.max_tokens == 0 and not options.echo:
        raise UnsupportedField("max_tokens: 0 asks for no answer; give 1 or more, or echo", "max_tokens")
    if options.best_of not in (None, options.n or 1):
        raise UnsupportedField("best_of is not supported: leave it out", "best_of", "unsupported_parameter")
    target, chat = await source.open(owner, options.model)
    _limit_choices(options, len(options.prompts))
    prompts = await service.threads(_of_argument, "prompt", _prepare_texts, source, target, chat, options)
    form = TextFormat(
        service, options, target.name, logprobs=options.logprobs is not None, trainable=options.logits is None
    )
    limit = COMPLETION_TOKENS if options.max_tokens is None else options.max_tokens
    return await _respond(service, source, owner, request, form, prompts, limit)


def _prepare_texts(source: Sampling, target: Target, chat: Chat, options: CompletionRequest) -> list[PreparedPrompt]:
    """Raises :class:`UserError`."""
    _ = options.logits  # the choices share it
    prompts = [source.prepare(target, chat, prompt) for prompt in options.prompts]
    if options.echo:
        for prompt in prompts:
            _ = prompt.written  # computed in this thread, once for all choices
    return prompts


@routes.post("/responses", response_model=dict[str, Any])
async def responses(service: Service, owner: Owner, request: Request, asked: ResponsesRequest) -> Response:
    """Continue a conversation, in the form of OpenAI's Responses API. Nothing is stored."""
    return await respond(service, service.controller.completions, owner.id, request, asked)


async def respond(
    service: ServiceContext, source: Sampling, owner: str, request: Request, asked: ResponsesRequest
) -> Response:
    """A response of ``source``."""
    with asked.renamed():
        options = await service.threads(asked.as_chat)
        messages, schemas = await service.threads(_read_chat, options)
        target, chat = await source.open(owner, options.model)
        form = ResponsesFormat(service, asked, target.name, trainable=_trainable(source, target, options))
        await service.checks.schemas.check(*schemas)
        prompt = await service.threads(_of_argument, "messages", _prepare_chat, source, target, chat, options, messages)
        limit = options.max_completion_tokens
        choices, call = await _choices(service, source, options, [prompt], limit)
    growth = _generate(service, source, owner, choices, call, limit)
    headers = {REQUEST_ID: form.id}
    if asked.stream:
        return await _streamed(request, growth, _response_events(service, form, choices[0], growth, request), headers)
    if not await unless(disconnected(request), _exhaust(growth)):
        return Response(status_code=CLIENT_GONE)
    return await _whole(
        service, request, form.size(choices[0]), headers, lambda: form.body(choices[0], _usage(choices))
    )


@routes.post("/responses/input_tokens", response_model=dict[str, Any])
async def input_tokens(service: Service, owner: Owner, asked: ResponsesInput) -> Response:
    """The number of tokens that a response would read, also where they are more than the model's context."""
    return await count_input(service, service.controller.completions, owner.id, asked)


async def count_input(service: ServiceContext, source: Sampling, owner: str, asked: ResponsesInput) -> Response:
    """The number of tokens that a response of ``source`` would read."""
    with asked.renamed():
        options = await service.threads(asked.as_chat)
        messages, _ = await service.threads(_read_chat, options)
        target, chat = await source.open(owner, options.model)
        count = await service.threads(_of_argument, "messages", _count_chat, source, target, chat, options, messages)
    return json_response({"object": "response.input_tokens", "input_tokens": count})


def _count_chat(
    source: Sampling, target: Target, chat: Chat, options: ChatRequest, messages: list[dict[str, Any]]
) -> int:
    """Raises :class:`UserError`."""
    try:
        return len(_prepare_chat(source, target, chat, options, messages).prompt)
    except PromptTooLong as error:
        if error.tokens is None:
            raise
        return error.tokens


@token_routes.post("/generate", response_model=dict[str, Any], name="generate_tokens")
async def generate(service: Service, owner: Owner, request: Request, asked: TokenRequest) -> Response:
    """Continue token ids as they are, as vLLM's ``/inference/v1/generate`` does: token ids and log-probabilities come
    back, each with the version that sampled it."""
    return await complete_tokens(service, service.controller.completions, owner.id, request, asked)


async def complete_tokens(
    service: ServiceContext, source: Sampling, owner: str, request: Request, asked: TokenRequest
) -> Response:
    """Token ids of ``source``."""
    refuse_unsupported(asked.model_extra)
    refuse_unsupported(asked.sampling_params.unknown)
    options = asked.sampling_params.model_copy(update={"return_token_ids": asked.return_token_ids})
    target, chat = await source.open(owner, asked.model)
    _limit_choices(options, 1)
    prompt = await service.threads(_of_argument, "token_ids", _prepare_tokens, source, target, chat, options, asked)
    form = TokenFormat(service, options, target.name, logprobs=True, trainable=_trainable(source, target, options))
    return await _respond(service, source, owner, request, form, [prompt], options.max_tokens)


def _prepare_tokens(
    source: Sampling, target: Target, chat: Chat, options: CompletionOptions, asked: TokenRequest
) -> PreparedPrompt:
    """Raises :class:`UserError`."""
    _ = options.logits  # the choices share it
    return source.prepare(target, chat, asked.token_ids)


@routes.get("/models", response_model=dict[str, Any], dependencies=[room_for()], name="openai_models")
async def list_models(service: Service, owner: Owner) -> Response:
    """The models available now: base models that a worker has, the versions of the tenant's jobs, and its newest
    fine-tuned models by their names."""
    rows = await service.controller.completions.targets(owner.id)
    tenant, jobs = await service.controller.queries.completed(owner.id, Page(FINE_TUNED))
    contexts = {row["name"]: row.get("context") for row in rows}  # of base models
    rows += [
        {
            "name": model_name(job, tenant),
            "created": job.finished,
            "owner": tenant,
            "context": contexts.get(job.spec["base_model"]),
        }
        for job in jobs
        if is_fine_tuning(job.spec)
    ]

    def response() -> Response:
        return json_response({"object": "list", "data": [_model(row["name"], row) for row in rows]})

    return await service.encoders(response)


@routes.get("/models/{model:path}", response_model=dict[str, Any], dependencies=[room_for()])
async def show_model(service: Service, owner: Owner, model: str) -> Response:
    """One model, by any of its names."""
    found = await service.controller.completions.find(owner.id, model)
    rows = await service.controller.completions.targets(owner.id)
    known = (row for row in rows if row["name"] == found.name)
    return json_response(_model(model, next(known, {"created": 0.0, "owner": "rookery"})))


def unknown_paths(prefix: str, *others: str) -> APIRouter:
    """Refuses every other path below ``prefix``, by one line with the reason, or else with the paths that there are:
    those of :data:`routes` and ``others``. Comes after every other router."""
    paths = (route.path for route in routes.routes if isinstance(route, APIRoute))
    named = [*dict.fromkeys(path for path in paths if "{" not in path), *others]
    there = f"there are {', '.join(named[:-1])} and {named[-1]}"
    unknown = APIRouter(prefix=prefix, route_class=OpenAIRoute)

    @unknown.api_route("/{path:path}", methods=[*METHODS], include_in_schema=False)
    async def unknown_path(owner: Owner, path: str) -> Response:
        if path == "embeddings":
            raise UserError("embeddings are not supported: the models here write text; use another service for them")
        reason = absence(path)
        raise UnknownPath(f"nothing at {prefix}/{path}: {reason}" if reason else f"nothing at {prefix}/{path}; {there}")

    return unknown


class UnknownPath(RookeryError):
    """There is no route at this path."""

    status = 404


def _model(name: str, row: dict[str, Any]) -> dict[str, Any]:
    context = {"max_model_len": row["context"]} if row.get("context") else {}
    return {"id": name, "object": "model", "created": int(row["created"]), "owned_by": row["owner"], **context}


# --- responses --------------------------------------------------------------------------------------------------------


async def _respond(
    service: ServiceContext,
    source: Sampling,
    owner: str,
    request: Request,
    form: ResponseFormat,
    prompts: Sequence[PreparedPrompt],
    limit: int | None,
) -> Response:
    """``n`` completions of each prompt, streamed or whole."""
    options = form.options
    choices, call = await _choices(service, source, options, prompts, limit)
    growth = _generate(service, source, owner, choices, call, limit)
    headers = {REQUEST_ID: form.id}
    if options.stream:
        return await _streamed(request, growth, _events(form, choices, growth, request), headers)
    if not await unless(disconnected(request), _exhaust(growth)):
        return Response(status_code=CLIENT_GONE)
    return await _whole(service, request, form.size(choices), headers, lambda: form.body(choices, _usage(choices)))


async def _streamed(
    request: Request, growth: Growth, events: AsyncGenerator[bytes], headers: Mapping[str, str]
) -> Response:
    """The response with the ``events`` of ``growth``. It begins with the generation: an error before that has its
    status, by which clients decide whether to try again."""

    async def begun() -> bool:
        await anext(growth)
        return True

    if not await unless(disconnected(request), begun()):
        return Response(status_code=CLIENT_GONE)
    return ClosingStream(growth, events, headers)


async def _whole(
    service: ServiceContext,
    request: Request,
    size: int,
    headers: Mapping[str, str],
    body: Callable[[], dict[str, Any]],
) -> Response:
    """The response with ``body``, which has about ``size`` bytes."""
    await make_room(service, request, size)
    response = await off_loop(service.encoders, size, lambda: json_response(body()))
    response.headers.update(headers)
    return response


async def _choices(
    service: ServiceContext,
    source: Sampling,
    options: CompletionOptions,
    prompts: Sequence[PreparedPrompt],
    limit: int | None,
) -> tuple[list[Choice], CallOptions]:
    """The choices of a request, and how each is sampled but for its seed. Raises :class:`UserError`."""
    seed = options.seed if options.seed is not None else source.draw_seed()
    return await service.threads(_make_choices, source, options, prompts, limit, seed)


def _make_choices(
    source: Sampling, options: CompletionOptions, prompts: Sequence[PreparedPrompt], limit: int | None, seed: int
) -> tuple[list[Choice], CallOptions]:
    stops, reader, count = options.stops, _readers(options, prompts[0].chat), options.n or 1
    most_calls = 1 if isinstance(options, ChatRequest) and options.parallel_tool_calls is False else TOOLS
    choices = [
        Choice(number * count + i, prompt, _seed(seed, number * count + i), stops, reader(), most_calls)
        for number, prompt in enumerate(prompts)
        for i in range(count)
    ]
    _limit_logprobs(source, options, choices, limit)
    _check_logits(source, options, prompts[0])
    logits = options.logits
    if logits is not None and isinstance(options, ChatRequest):
        logits = msgspec.structs.replace(logits, unless=options.unless(prompts[0].chat.tools.style))
    return choices, CallOptions(
        max_tokens=limit if limit is None else max(1, limit),
        temperature=options.temperature,
        stop=stops,
        stop_tokens=options.stop_tokens,
        seed=options.seed,
        kind="chat" if isinstance(options, ChatRequest) else "completion",
        logits=logits,
        score_prompt=_scores_prompt(options),
    )


def _limit_choices(options: CompletionOptions, prompts: int) -> None:
    """Called before the prompts are tokenized. Raises :class:`UnsupportedField`."""
    if (options.n or 1) * prompts > MAX_CHOICES:
        raise UnsupportedField(f"n: at most {MAX_CHOICES} choices in one request", "n")


def _limit_logprobs(source: Sampling, options: CompletionOptions, choices: Sequence[Choice], limit: int | None) -> None:
    """Raises :class:`UnsupportedField`."""
    echo, likeliest = _scores_prompt(options), options.likeliest
    if echo or likeliest:
        tokens = source.answer_tokens(choices[0].prompt.target, limit)
        prompts = sum(len(choice.prompt.prompt) for choice in choices) if echo else 0
        if (prompts + tokens * len(choices)) * (1 + likeliest) > MAX_LOGPROBS:
            raise UnsupportedField(
                f"logprobs: at most {MAX_LOGPROBS} in one request; ask for fewer choices, tokens or likeliest tokens",
                "logprobs",
            )


def _check_logits(source: Sampling, options: CompletionOptions, prompt: PreparedPrompt) -> None:
    """Raises :class:`UserError` for changes of the logits that the target's model or its engines do not know."""
    logits = options.logits
    if logits is not None:
        unknown = next((token for token, _ in logits.logit_bias if not prompt.chat.token_bytes.known(token)), None)
        if unknown is not None:
            model = prompt.target.model
            raise UnsupportedField(f"logit_bias has the token id {unknown}, which {model} does not have", "logit_bias")
        try:
            source.check_logits(prompt.target, logits)
        except UserError as error:
            forced = isinstance(options, ChatRequest) and options.forced
            param = ("tools" if forced else "response_format") if logits.schema else None
            if param is None:
                raise
            raise UnsupportedField(f"{param}: {error}", param) from None


def _scores_prompt(options: CompletionOptions) -> bool:
    """Whether the response has the log-probabilities of the prompt."""
    return isinstance(options, CompletionRequest) and bool(options.echo) and options.logprobs is not None


def _seed(seed: int, index: int) -> int:
    """The seed of a choice: the request's seed for the first, unrelated seeds for the others."""
    return seed if index == 0 else random.Random(f"{seed}:{index}").getrandbits(63)


def _prompts(choices: Sequence[Choice]) -> list[PreparedPrompt]:
    """The prompts of the choices, each once."""
    return [*{id(choice.prompt): choice.prompt for choice in choices}.values()]


def _usage(choices: Sequence[Choice]) -> dict[str, int]:
    """Token counts; each prompt counts once, however many choices it has."""
    prompts = sum(len(prompt.prompt) for prompt in _prompts(choices))
    sampled = sum(len(choice.reply.tokens) for choice in choices)
    return {"prompt_tokens": prompts, "completion_tokens": sampled, "total_tokens": prompts + sampled}


Growth = AsyncGenerator[tuple[Choice, str, str | None] | None]
"""Choices with their further text and their finish reason or None, as tokens arrive; None at a heartbeat."""


async def _generate(
    service: ServiceContext,
    source: Sampling,
    owner: str,
    choices: Sequence[Choice],
    call: CallOptions,
    limit: int | None,
) -> Growth:
    """Samples all choices, which are admitted together. Yields None once when the first has tokens or a heartbeat has
    passed, and after each further heartbeat without tokens. Closing it early ends the generation. Raises the first
    error of any choice."""
    arrived, portions = asyncio.Event(), Portions()
    grown: set[int] = set()
    """Numbers of choices that have ended or have further tokens."""
    tasks: dict[int, asyncio.Task[SamplingResult]] = {}

    def grow(number: int, ended: object = None) -> None:
        grown.add(number)
        arrived.set()

    def watch(choice: Choice) -> Callable[[SamplingResult], None]:
        def on_tokens(reply: SamplingResult) -> None:
            choice.reply = reply
            grow(choice.index)

        return on_tokens

    admission = ExitStack()
    admission.enter_context(source.admitted(owner, [choice.prompt for choice in choices], call))
    closing = asyncio.create_task(service.closing.wait())
    closing.add_done_callback(lambda _: arrived.set())
    heartbeat = service.context.settings.worker.heartbeat_seconds
    try:
        async for choice in in_portions(choices):
            each = call if call.seed is None else replace(call, seed=choice.seed)
            on_tokens = watch(choice) if limit != 0 else None
            task = asyncio.create_task(source.generate(owner, choice.prompt, each, on_tokens))
            task.add_done_callback(partial(grow, choice.index))
            tasks[choice.index] = task
        asyncio.gather(*tasks.values(), return_exceptions=True).add_done_callback(lambda _: admission.close())
        await wait_event(arrived, heartbeat)
        if not closing.done():
            for task in tasks.values():
                if task.done():
                    task.result()
            yield None
        left = {choice.index: choice for choice in choices}
        while left:
            if closing.done():
                raise Unavailable("the service is stopping; try again when it is back")
            arrived.clear()
            numbers = sorted(grown & left.keys())
            grown.clear()
            for number in numbers:
                choice, last = left[number], tasks[number].done()
                if last:
                    choice.reply = tasks[number].result()
                    if limit == 0:
                        choice.reply = SamplingResult(finish="length", prompt_logprobs=choice.reply.prompt_logprobs)
                    del left[number]
                known = len(choice.text.starts)
                text = choice.next_text(last=last)
                if last or len(choice.text.starts) > known:
                    yield choice, text, choice.finish if last else None
                await portions.pause()
            if left and not await wait_event(arrived, heartbeat):
                yield None
        for prompt in _prompts(choices):
            source.delivered(prompt)
    finally:
        await cancel_all(*tasks.values(), closing)
        admission.close()
        for prompt in _prompts(choices):
            source.settled(prompt)


async def _exhaust(growth: AsyncGenerator[Any]) -> bool:
    async with aclosing(growth):
        async for _ in growth:
            pass
    return True


async def _events(
    form: ResponseFormat, choices: Sequence[Choice], growth: Growth, request: Request
) -> AsyncGenerator[bytes]:
    """The events of a streamed response. An error is its last event. As in OpenAI's streams text and calls of tools
    have separate chunks, of which clients read one or the other, and so has the end of a choice: the SDK closes a call
    that an earlier chunk brought."""
    try:
        for choice in choices:
            first = form.first_chunk(choice)
            if first is not None:
                yield form.chunk([first])
        async for update in growth:
            if update is None:
                yield form.heartbeat()
                continue
            choice, text, finish = update
            ids = form.options.return_token_ids and choice.ids_sent < len(choice.reply.tokens)
            if text or ids:
                yield form.chunk([form.delta(choice, text, None)])
            if choice.calls_sent < len(choice.calls):
                yield form.chunk([form.delta(choice, "", None)])
            if finish:
                yield form.chunk([form.delta(choice, "", finish)])
        if form.include_usage:
            yield form.chunk([], _usage(choices))
        yield b"data: [DONE]\n\n"
    except Exception as error:
        _, body = _error_body(error, request, form.id)
        yield event_data(msgspec.json.encode(body))


async def _response_events(
    service: ServiceContext, form: ResponsesFormat, choice: Choice, growth: Growth, request: Request
) -> AsyncGenerator[bytes]:
    """The events of a streamed response of the Responses API. An error is its last event."""
    try:
        yield form.begin()
        async for update in growth:
            events = HEARTBEAT if update is None else form.grow(choice)
            if events:
                yield events
        yield await off_loop(service.encoders, form.size(choice), lambda: form.end(choice, _usage([choice])))
    except Exception as error:
        _, body = _error_body(error, request, form.id)
        yield form.failed(body)


class ClosingStream(EventStream):
    """The events of a generation, which is closed when the response ends, however it ends."""

    def __init__(self, growth: Growth, events: AsyncGenerator[bytes], headers: Mapping[str, str]) -> None:
        super().__init__(events, headers=headers)
        self._growth, self._events = growth, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._growth), aclosing(self._events):
            await super().__call__(scope, receive, send)


async def disconnected(request: Request) -> None:
    """Returns when the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
