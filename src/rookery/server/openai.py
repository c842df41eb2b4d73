"""Requests and responses of the OpenAI API.

* No argument that would change a response is ignored: an unsupported argument is refused by name, unless its value
  requests the default behaviour.
* A response has choices as they are sampled, written as chunks of a stream or as one message. A delta is the part of a
  choice that was not sent yet; the deltas of a stream, joined, equal the message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import BaseModel, ConfigDict, FailFast, Field, field_validator

from rookery.bounds import (
    ENTRIES,
    INTEGER,
    LONGEST_TEXT,
    STOP_TEXT,
    STOP_TEXTS,
    Integer,
    Line,
    SmallJson,
    StopText,
    Text,
    Token,
)
from rookery.controller.completions import PreparedPrompt
from rookery.controller.rollout.request import SamplingResult
from rookery.errors import UserError, short
from rookery.server.auth import ServiceContext
from rookery.server.responses import event_data
from rookery.spec.policy import Temperature
from rookery.tokenization.detokenizer import StreamingText

# --- requests ---------------------------------------------------------------------------------------------------------

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "echo": (False,),
    "suffix": ("",),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
}
"""Unsupported arguments with the values of each that request the default behaviour. Null does so for all."""

_AS_TEXT = "a reply is text; ask for JSON in a message (instructor: Mode.MD_JSON), or leave it out"
MEANT = {"tools": _AS_TEXT, "functions": _AS_TEXT, "response_format": _AS_TEXT}
"""Unsupported arguments that are what a request is about, with what to do instead."""

IGNORED = {
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
}
"""Arguments that do not concern the response."""


class UnsupportedField(UserError):
    """The refusal of an argument, which ``param`` names."""

    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class OpenAIModel(BaseModel):
    """Base of the request models: unknown fields are kept, and :func:`refuse_unsupported` checks them."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, SmallJson]


class OpenAIError(BaseModel):
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class OpenAIErrorResponse(BaseModel):
    """The reason why a request failed."""

    error: OpenAIError


class StreamOptions(OpenAIModel):
    include_usage: bool = False


class CompletionOptions(OpenAIModel):
    """Fields of both endpoints."""

    model: Line = Field(min_length=1, description="A base model, or JOB, JOB:latest, JOB@VERSION with an id or name")
    n: int | None = Field(None, ge=1, le=128)
    temperature: Annotated[Temperature, Field(le=10)] | None = Field(
        None, description="1 when absent; 0 takes the likeliest token"
    )
    max_tokens: int | None = Field(None, ge=1, le=INTEGER)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="The same seed gives the same answers")
    stop: StopText | Annotated[list[StopText], Field(max_length=STOP_TEXTS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="Token ids, log-probs and versions with each choice")

    @field_validator("stop", mode="before")
    @classmethod
    def _few_texts(cls, value: Any) -> Any:
        """One error for a wrong list, however many of its items are wrong."""
        texts = value if isinstance(value, list) else [value] if value is not None else []
        if len(texts) > STOP_TEXTS or not all(isinstance(text, str) and 0 < len(text) <= STOP_TEXT for text in texts):
            raise ValueError(f"up to {STOP_TEXTS} texts, each of 1 to {STOP_TEXT} characters")
        return value

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class TextPart(OpenAIModel):
    type: Literal["text"]
    text: Text


class ConversationMessage(OpenAIModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=1000)]

    @field_validator("content", mode="before")
    @classmethod
    def _has_content(cls, value: Any) -> Any:
        if value is None:
            raise ValueError("null is not supported: give a text; tool calls, which replace it, are not supported")
        if not isinstance(value, str | list):
            raise ValueError("give a text, or a list of parts of the type text")
        for number, part in enumerate(value if isinstance(value, list) else []):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text":
                raise ValueError(f"part {number} is of the type {short(str(kind))}; the models here read text alone")
        return value

    def for_template(self, where: str) -> dict[str, str]:
        """The message as chat templates expect it. Raises :class:`UnsupportedField`."""
        for name, value in (self.model_extra or {}).items():
            if value and name != "tool_call_id":  # an id is not part of the prompt
                raise UnsupportedField(
                    f"{where}.{name} is not supported: leave it out", f"{where}.{name}", "unknown_parameter"
                )
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatRequest(CompletionOptions):
    messages: Annotated[list[ConversationMessage], FailFast()] = Field(min_length=1, max_length=ENTRIES)
    max_completion_tokens: int | None = Field(None, ge=1, le=INTEGER)
    logprobs: bool | None = None


class CompletionRequest(CompletionOptions):
    prompt: Text | list[Token] | list[Text] | list[Annotated[list[Token], Field(max_length=ENTRIES)]] = Field(
        min_length=1, max_length=LONGEST_TEXT
    )
    logprobs: int | None = Field(
        None, ge=0, le=INTEGER, description="0 returns the log-probs of the tokens; larger values are not supported"
    )
    best_of: Integer | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _has_one_type(cls, value: Any) -> Any:
        """One error for a wrong list, however many of its items are wrong."""
        kinds = {type(item) for item in value} if isinstance(value, list) else set()
        if kinds == {list}:
            kinds = {type(token) for tokens in value for token in tokens}
            fits = kinds <= {int}
        else:
            fits = isinstance(value, str) or kinds in ({int}, {str}) or value == []
        if not fits:
            raise ValueError("a text, token ids, or a list of either")
        return value

    @field_validator("prompt")
    @classmethod
    def _has_no_empty_one(cls, prompt: Any) -> Any:
        empty = next((number for number, one in enumerate(prompt) if one in ("", [])), None)
        if not isinstance(prompt, str) and empty is not None:
            raise ValueError(f"prompt {empty} is empty: an answer needs at least one token to follow")
        return prompt

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


def refuse_unsupported(fields: Mapping[str, Any] | None) -> None:
    """Raises :class:`UnsupportedField` for an unknown field whose value is not a default: tools before what only says
    how they are used."""
    given = sorted((fields or {}).items(), key=lambda field: field[0] not in MEANT)
    for name, value in given:
        if value is None or name in IGNORED or value in NEUTRAL.get(name, ()):
            continue
        if name in MEANT:
            raise UnsupportedField(f"{name} is not supported: {MEANT[name]}", name, "unsupported_parameter")
        if name not in NEUTRAL:
            raise UnsupportedField(f"{name} is not supported: leave it out", name, "unknown_parameter")
        raise UnsupportedField(
            f"{name} is not supported: leave it out, or give {NEUTRAL[name][0]!r}", name, "unsupported_parameter"
        )


# --- responses --------------------------------------------------------------------------------------------------------


class Choice:
    """One completion while it is sampled. ``ids_sent`` and ``logprobs_sent`` count the tokens whose ids and whose
    log-probabilities were sent."""

    def __init__(self, index: int, prompt: PreparedPrompt, seed: int, stops: Sequence[str]) -> None:
        self.index = index
        self.prompt = prompt
        self.seed = seed
        self.text = StreamingText(prompt.chat.token_bytes, stops)
        self.reply = SamplingResult()
        self.ids_sent = 0
        self.logprobs_sent = 0

    def next_text(self, *, last: bool) -> str:
        """The further text that can be sent, given the tokens of ``reply``."""
        return self.text.take(self.reply.tokens[len(self.text.starts) :], last=last)


class ResponseFormat:
    """The response format of an endpoint: one completion request, whole or streamed."""

    object_type = ""
    chunk_type = ""
    id_prefix = ""

    def __init__(self, service: ServiceContext, options: CompletionOptions, model: str, *, logprobs: bool) -> None:
        self.options = options
        self.id = service.context.ids.new(self.id_prefix)
        self._head = {"id": self.id, "created": int(service.context.clock.time()), "model": model}
        self._logprobs = logprobs

    @property
    def include_usage(self) -> bool:
        """Whether the stream reports token counts."""
        return self.options.stream_options is not None and self.options.stream_options.include_usage

    def body(self, choices: Sequence[Choice], usage: dict[str, int]) -> dict[str, Any]:
        """The body of a response that is not streamed."""
        messages = [self.message(choice) for choice in choices]
        return {**self._head, "object": self.object_type, "choices": messages, "usage": usage}

    def chunk(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        """One event of a stream."""
        data = {**self._head, "object": self.chunk_type, "choices": choices}
        if self.include_usage:
            data["usage"] = usage
        return event_data(msgspec.json.encode(data))

    def first_chunk(self, choice: Choice) -> dict[str, Any] | None:
        """The first chunk of a choice, before any token was sampled; None where the format has none."""
        raise NotImplementedError

    def delta(self, choice: Choice, text: str, finish: str | None) -> dict[str, Any]:
        raise NotImplementedError

    def message(self, choice: Choice) -> dict[str, Any]:
        raise NotImplementedError

    def _tokens(self, choice: Choice) -> dict[str, Any]:
        """The extension fields for the tokens that were not sent yet."""
        if not self.options.return_token_ids:
            return {}
        reply, first = choice.reply, choice.ids_sent
        choice.ids_sent = len(reply.tokens)
        return {
            "token_ids": reply.tokens[first:],
            "token_logprobs": reply.logprobs[first:],
            "token_versions": reply.versions[first:],
        }

    def _prompt(self, choice: Choice) -> dict[str, Any]:
        return {"prompt_token_ids": choice.prompt.prompt} if self.options.return_token_ids else {}

    @staticmethod
    def _next_logprobs(choice: Choice) -> range:
        """The tokens whose text was reached since the last call."""
        first, choice.logprobs_sent = choice.logprobs_sent, choice.text.tokens_shown
        return range(first, choice.logprobs_sent)


class ChatFormat(ResponseFormat):
    object_type = "chat.completion"
    chunk_type = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def first_chunk(self, choice: Choice) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": choice.index, "delta": delta, "finish_reason": None, **self._prompt(choice)}

    def delta(self, choice: Choice, text: str, finish: str | None) -> dict[str, Any]:
        delta = {"content": text} if text else {}
        chunk = {"index": choice.index, "delta": delta, "logprobs": self._logprobs_of(choice), "finish_reason": finish}
        return {**chunk, **self._tokens(choice)}

    def message(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text.shown, "refusal": None},
            "logprobs": self._logprobs_of(choice),
            "finish_reason": choice.reply.finish,
            **self._prompt(choice),
            **self._tokens(choice),
        }

    def _logprobs_of(self, choice: Choice) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        entries = []
        for number in self._next_logprobs(choice):
            data = choice.prompt.chat.token_bytes.written(choice.reply.tokens[number])
            entries.append({
                "token": _token_text(data), "bytes": list(data), "logprob": choice.reply.logprobs[number],
                "top_logprobs": [],
            })  # fmt: skip
        return {"content": entries, "refusal": None}


class TextFormat(ResponseFormat):
    object_type = chunk_type = "text_completion"
    id_prefix = "cmpl"

    def first_chunk(self, choice: Choice) -> dict[str, Any] | None:
        if not self.options.return_token_ids:
            return None
        return {"index": choice.index, "text": "", "logprobs": None, "finish_reason": None, **self._prompt(choice)}

    def delta(self, choice: Choice, text: str, finish: str | None) -> dict[str, Any]:
        chunk = {"index": choice.index, "text": text, "logprobs": self._logprobs_of(choice), "finish_reason": finish}
        return {**chunk, **self._tokens(choice)}

    def message(self, choice: Choice) -> dict[str, Any]:
        return {**self._prompt(choice), **self.delta(choice, choice.text.shown, choice.reply.finish)}

    def _logprobs_of(self, choice: Choice) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        shown = self._next_logprobs(choice)
        written = [choice.prompt.chat.token_bytes.written(choice.reply.tokens[number]) for number in shown]
        return {
            "tokens": [_token_text(data) for data in written],
            "token_logprobs": [choice.reply.logprobs[number] for number in shown],
            "top_logprobs": None,
            "text_offset": [choice.text.starts[number] for number in shown],
        }


def _token_text(data: bytes) -> str:
    """A token as text, in OpenAI's notation if it is not a sequence of whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
