"""Request models of the OpenAI API, and the refusal of arguments that are not supported.

No argument that would change a response is ignored: an unsupported argument is refused by name, unless its value
requests the default behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, field_validator

from rookery.errors import UserError
from rookery.spec.job import Temperature

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

    model: str = Field(min_length=1, description="A base model, JOB (or JOB:latest), or JOB@VERSION")
    n: int | None = Field(None, ge=1, le=128)
    temperature: Annotated[Temperature, Field(le=10)] | None = Field(
        None, description="1 when absent; 0 takes the likeliest token"
    )
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63, description="The same seed gives the same answers")
    stop: str | list[str] | None = Field(None, max_length=4096)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="Token ids, log-probs and versions with each choice")

    @property
    def stops(self) -> list[str]:
        """Raises :class:`UnsupportedField`."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not all(stops) or len(stops) > 16:
            raise UnsupportedField("stop: up to 16 strings, none of them empty", "stop")
        return stops


class TextPart(OpenAIModel):
    type: Literal["text"]
    text: str


class ConversationMessage(OpenAIModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=1000)]

    @field_validator("content", mode="before")
    @classmethod
    def _has_content(cls, value: Any) -> Any:
        if value is None:
            raise ValueError("null is not supported: give a text; tool calls, which replace it, are not supported")
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
    messages: Annotated[list[ConversationMessage], FailFast()] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None


class CompletionRequest(CompletionOptions):
    prompt: str | list[int] | list[str] | list[list[int]] = Field(min_length=1)
    logprobs: int | None = Field(
        None, ge=0, description="0 returns the log-probs of the tokens; larger values are not supported"
    )
    best_of: int | None = None

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

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if not isinstance(prompt, int)]


def refuse_unsupported(fields: Mapping[str, Any] | None) -> None:
    """Raises :class:`UnsupportedField` for the first unknown field whose value is not a default."""
    for name, value in (fields or {}).items():
        if value is None or name in IGNORED or value in NEUTRAL.get(name, ()):
            continue
        if name not in NEUTRAL:
            raise UnsupportedField(f"{name} is not supported: leave it out", name, "unknown_parameter")
        raise UnsupportedField(
            f"{name} is not supported: leave it out, or give {NEUTRAL[name][0]!r}", name, "unsupported_parameter"
        )
