"""Requests of the OpenAI API's completions.

No argument that would change a response is ignored: an unsupported argument is refused by name, unless its value
requests the default behaviour.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, field_validator, model_validator

from rookery import protocol
from rookery.bounds import (
    CONVERSATION,
    ENTRIES,
    FUNCTION,
    INTEGER,
    LONGEST_TEXT,
    PROMPTS,
    SETTINGS,
    STOP_TEXT,
    STOP_TEXTS,
    TOOLS,
    GivenModel,
    Integer,
    JsonSize,
    Line,
    Name,
    SmallJson,
    StopText,
    Text,
    Token,
    check_parts,
)
from rookery.errors import UserError, short
from rookery.server.bodies import JSON_ITEMS, BodyRefused, measure
from rookery.spec.policy import Temperature
from rookery.tokenization.call_readers import READERS
from rookery.tokenization.call_values import read_json
from rookery.tokenization.grammar import ANY_OBJECT
from rookery.tokenization.reply_schemas import forced_schema, schema_of

# --- requests ---------------------------------------------------------------------------------------------------------

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "best_of": (1,),
    "echo": (False,),
    "priority": (0,),
    "chat_template_kwargs": ({},),
    "include_reasoning": (True,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "stream_options.continuous_usage_stats": (False,),
    "text.verbosity": ("medium",),
}
"""Unsupported arguments with the values of each that request the default behaviour. Those of
:data:`NOTHING` do so for all."""

MEANT = {
    "functions": "give tools instead",
    "previous_response_id": "a previous response is not found, none is stored; send the whole conversation as input",
    "conversation": "conversations are not stored; send the whole one as input",
    "background": "leave it out, and wait for the response or stream it",
}
"""Unsupported arguments that are what a request is about, with what to do instead."""

NOT_FOUND = {"previous_response_id": "previous_response_not_found"}
"""The codes of arguments that name what could be stored and is not: clients try again without them."""

IGNORED = {
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prompt_cache_options",
    "stream_options.include_obfuscation",
}
"""Arguments that do not concern the response."""


NOTHING: tuple[Any, ...] = (None, "", [])
"""Values of unknown fields that ask for nothing."""


class UnsupportedField(UserError):
    """The refusal of an argument, which ``param`` names."""

    def __init__(self, message: str, param: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class OpenAIModel(GivenModel):
    """Base of the request models: unknown fields are kept, and :func:`refuse_unsupported` checks them, also those of
    the models within."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, SmallJson]

    sent_back: ClassVar[frozenset[str]] = frozenset()
    """Unknown fields that clients send and that change nothing."""

    @property
    def unread(self) -> dict[str, Any]:
        """The fields that have a value, and that nothing reads."""
        extra = self.model_extra or {}
        return {name: value for name, value in extra.items() if name not in self.sent_back and value not in NOTHING}

    def unread_within(self, where: str = "") -> Iterator[tuple[str, Any]]:
        """The unread fields of the models within, by their paths in a request."""
        for name, field in type(self).model_fields.items():
            value, path = getattr(self, name), f"{where}{field.alias or name}"
            inner = [(path, value)]
            if isinstance(value, list):
                if not value or not isinstance(value[0], OpenAIModel):  # a prompt may be 200,000 token ids
                    continue
                inner = [(f"{path}.{number}", one) for number, one in enumerate(value)]
            for at, one in inner:
                if isinstance(one, OpenAIModel):
                    yield from ((f"{at}.{unread}", given) for unread, given in one.unread.items())
                    yield from one.unread_within(f"{at}.")

    @property
    def unknown(self) -> dict[str, Any]:
        """The fields of the request, and of the models in it, that these models do not have, by their paths."""
        return {**(self.model_extra or {}), **dict(self.unread_within())}


class OpenAIError(BaseModel):
    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class OpenAIErrorResponse(BaseModel):
    """The reason why a request failed."""

    error: OpenAIError


class StreamOptions(OpenAIModel):
    include_usage: bool | None = False


Penalty = Annotated[float, Field(ge=-2, le=2)]
Bias = Annotated[float, Field(ge=-100, le=100)]

BIASES = 1024
"""Tokens of one ``logit_bias``."""

LIKELIEST = 20
"""The most tokens that come with each token's log-probability, as in OpenAI's API."""


class CompletionOptions(OpenAIModel):
    """Fields of both endpoints."""

    reads_comments: ClassVar[bool] = True
    """Whether clients of the endpoint read comments in a stream of events."""

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
    top_p: float | None = Field(None, gt=0, le=1, description="The likeliest tokens that have this much probability")
    top_k: int | None = Field(None, ge=-1, le=INTEGER, description="So many of the likeliest tokens; 0 and -1: all")
    min_p: float | None = Field(None, ge=0, le=1, description="Tokens at least so likely, relative to the likeliest")
    frequency_penalty: Penalty | None = Field(None, description="Subtracted from a token's logit for each time it came")
    presence_penalty: Penalty | None = Field(None, description="Subtracted from a token's logit once it came")
    repetition_penalty: float | None = Field(
        None, gt=0, le=10, description="Divides the logits of tokens of prompt and answer"
    )
    logit_bias: Annotated[dict[Name, Bias], Field(max_length=BIASES)] | None = Field(
        None, description="Added to the logits of tokens, by token id"
    )
    return_token_ids: bool | None = Field(None, description="Token ids, log-probs and versions with each choice")

    @field_validator("stop", mode="before")
    @classmethod
    def _few_texts(cls, value: Any) -> Any:
        """One error for a wrong list, however many of its items are wrong."""
        texts = value if isinstance(value, list) else [value] if value is not None else []
        if len(texts) > STOP_TEXTS or not all(isinstance(text, str) and 0 < len(text) <= STOP_TEXT for text in texts):
            raise ValueError(f"up to {STOP_TEXTS} texts, each of 1 to {STOP_TEXT} characters")
        return value

    @field_validator("logit_bias")
    @classmethod
    def _has_token_ids(cls, value: dict[str, float] | None) -> Any:
        for token in value or {}:
            if not (token.isascii() and token.isdigit() and int(token) < 2**31):
                raise ValueError(f"{short(token)!r} is not a token id")
        return value

    @property
    def likeliest(self) -> int:
        """How many likeliest tokens are returned with each token."""
        return 0

    @cached_property
    def schema_text(self) -> str:
        """The JSON schema that the reply follows; empty: none."""
        return ""

    @cached_property
    def logits(self) -> protocol.LogitsParams | None:
        """How the logits are changed, an object that all choices share; None: not at all. Its first use takes a time
        that grows with the request: it is in a thread."""
        params = protocol.LogitsParams(
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=[(int(token), bias) for token, bias in (self.logit_bias or {}).items() if bias],
            top_logprobs=self.likeliest,
            schema=self.schema_text,
        )
        return params if params != protocol.LogitsParams() else None

    @property
    def stop_tokens(self) -> list[int]:
        """Token ids that end an answer, in addition to the model's own."""
        return []

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


SmallObject = Annotated[dict[str, Any], JsonSize(SETTINGS)]


class Part(OpenAIModel):
    """A part of a message's content."""

    sent_back = frozenset({"annotations", "logprobs", "parsed", "cache_control", "prompt_cache_breakpoint"})

    text: Text

    @model_validator(mode="before")
    @classmethod
    def _refused(cls, value: Any) -> Any:
        """A refusal has its text under its own name."""
        if isinstance(value, dict) and value.get("type") == "refusal" and "refusal" in value:
            rest = {name: part for name, part in value.items() if name != "refusal"}
            return {"text": value["refusal"], **rest}
        return value


class TextPart(Part):
    type: Literal["text", "refusal"]


class CalledFunction(OpenAIModel):
    sent_back = frozenset({"parsed_arguments"})  # of SDKs that read the arguments

    name: Name = Field(min_length=1)
    arguments: Text


class MessageToolCall(OpenAIModel):
    sent_back = frozenset({"index"})  # of the pieces of a stream

    id: Name | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """The call with its arguments as text, which :func:`read_arguments` reads."""
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id or "", "type": "function", "function": function}


def read_arguments(messages: Sequence[Mapping[str, Any]]) -> None:
    """The arguments of the calls in a conversation become objects, which templates write as JSON; text that is none
    stays text. No text is no arguments, as some clients send them. It takes a time that grows with the texts. Raises
    :class:`UnsupportedField` for more items than a body may have. Python bounds depth and digits."""
    for number, message in enumerate(messages):
        for index, call in enumerate(message.get("tool_calls", ())):
            where, function = f"messages.{number}.tool_calls.{index}.function.arguments", call["function"]
            text = function["arguments"].strip() or "{}"
            try:
                measure(text.encode(errors="replace"), JSON_ITEMS, len(text), len(text), where)
            except BodyRefused as error:
                raise UnsupportedField(error.detail, where) from None
            arguments = read_json(text)
            if isinstance(arguments, dict):
                function["arguments"] = arguments


CONTEXT_FIELDS = {
    "tool": {"tool_call_id", "name"},
    "assistant": {"name", "refusal", "reasoning_content", "reasoning", "parsed"},
}
"""Fields of a message, by its role, that clients send back and templates do not write."""

NAMED = ("system", "developer", "user")
"""Roles of messages whose ``name``, that of a participant, templates get: few write it."""


class ConversationMessage(OpenAIModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], Field(max_length=1000, fail_fast=True)] | None = None
    tool_calls: Annotated[list[MessageToolCall], Field(max_length=TOOLS)] | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _has_text(cls, value: Any) -> Any:
        if not isinstance(value, str | list | None):
            raise ValueError("give a text, or a list of parts of the type text")
        for number, part in enumerate(value if isinstance(value, list) else []):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            if kind not in ("text", "refusal"):
                raise ValueError(f"part {number} is of the type {short(str(kind))}; the models here read text alone")
        return value

    @property
    def unread(self) -> dict[str, Any]:
        known = CONTEXT_FIELDS.get(self.role, {"name"} if self._name else ())
        given = {name: value for name, value in (self.model_extra or {}).items() if value and name not in known}
        # litellm sends a mapping of nulls back
        return {name: value for name, value in given.items() if not isinstance(value, dict) or any(value.values())}

    @property
    def _name(self) -> str:
        """The name of the participant; empty without one."""
        name = (self.model_extra or {}).get("name")
        return name if isinstance(name, str) else ""

    @property
    def _content_or_refusal(self) -> str | list[TextPart] | None:
        """The content, or the assistant's refusal in place of an empty one."""
        refusal = (self.model_extra or {}).get("refusal") if self.role == "assistant" else None
        return refusal if not self.content and isinstance(refusal, str) and refusal else self.content

    def for_template(self, where: str) -> dict[str, Any]:
        """The message as chat templates expect it. Raises :class:`UnsupportedField`."""
        if self.tool_calls and self.role != "assistant":
            raise UnsupportedField(f"{where}.tool_calls: only the assistant calls tools", f"{where}.tool_calls")
        content = self._content_or_refusal
        if content is None and not self.tool_calls:
            raise UnsupportedField(
                f"{where}.content: null is not supported: give a text, or an assistant's tool_calls", f"{where}.content"
            )
        parts = content if isinstance(content, list) else []
        if self.role != "assistant" and any(part.type == "refusal" for part in parts):
            raise UnsupportedField(f"{where}.content: only the assistant refuses", f"{where}.content")
        text = content if isinstance(content, str) else "".join(part.text for part in parts)
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": text}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.role in NAMED and self._name:
            message["name"] = self._name
        if self.role == "tool":
            extra = self.model_extra or {}
            message |= {name: extra[name] for name in ("tool_call_id", "name") if isinstance(extra.get(name), str)}
        return message


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise ValueError(f"the arguments of a call are an object, given the type {short(repr(kind))}")
    return schema


Parameters = Annotated[SmallObject, AfterValidator(_of_an_object)]
"""The JSON schema of a function's arguments."""


class FunctionDefinition(OpenAIModel):
    name: Name = Field(pattern=FUNCTION)
    description: Text | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class ToolDefinition(OpenAIModel):
    sent_back = frozenset({"strict", "cache_control"})

    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self.function.name, "description": self.function.description or ""}
        function["parameters"] = self.function.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class NamedFunction(OpenAIModel):
    name: Name


class NamedTool(OpenAIModel):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(OpenAIModel):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=TOOLS)]


class AllowedToolChoice(OpenAIModel):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[NamedTool | AllowedToolChoice, Field(discriminator="type")]


def _no_such_tool() -> UnsupportedField:
    return UnsupportedField("tool_choice names no tool of the request: give it in tools", "tool_choice")


class ReplySchema(OpenAIModel):
    """``strict`` makes no difference: a reply always follows the schema."""

    name: Name = ""
    description: Text | None = None
    schema_: SmallObject = Field(alias="schema")
    strict: bool | None = None


class ReplyFormat(OpenAIModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: ReplySchema | None = None


class ChatRequest(CompletionOptions):
    messages: Annotated[list[ConversationMessage], FailFast()] = Field(min_length=1, max_length=CONVERSATION)
    max_completion_tokens: int | None = Field(None, ge=1, le=INTEGER)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=LIKELIEST, description="Needs logprobs")
    tools: Annotated[list[ToolDefinition], Field(max_length=TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="false: the first call only")
    response_format: ReplyFormat | None = Field(None, description="JSON, or JSON of a schema")
    reasoning_effort: Name | None = Field(None, description="none, or what the model's chat template reads")
    chat_template_kwargs: SmallObject | None = Field(None, description="Values that the model's chat template reads")

    @field_validator("messages", mode="before")
    @classmethod
    def _has_few_parts(cls, value: Any) -> Any:
        return check_parts(value, "content", "tool_calls")

    @property
    def likeliest(self) -> int:
        return self.top_logprobs or 0

    def template_values(self, read: Collection[str]) -> dict[str, Any]:
        """The further values of the model's chat template, which reads those of the names ``read``. Raises
        :class:`UnsupportedField` for others."""
        given = self.chat_template_kwargs or {}
        if unread := next((name for name in given if name not in read), None):
            known = ", ".join(sorted(read)) or "none"
            raise UnsupportedField(
                f"chat_template_kwargs: {short(unread)} is not read by the model's chat template; it reads: {known}",
                "chat_template_kwargs",
            )
        if not self.reasoning_effort:
            return given
        if "reasoning_effort" in read:
            return {"reasoning_effort": self.reasoning_effort, **given}
        if self.reasoning_effort != "none":
            raise UnsupportedField(
                "reasoning_effort is not read by the model's chat template: leave it out, or give 'none'",
                "reasoning_effort",
                "unsupported_parameter",
            )
        return {"enable_thinking": False, **given} if "enable_thinking" in read else given

    @property
    def offered(self) -> list[ToolDefinition]:
        """The tools that the reply may call. Raises :class:`UnsupportedField`."""
        choice = self.tool_choice
        if isinstance(choice, AllowedToolChoice):
            return self._named([tool.function.name for tool in choice.allowed_tools.tools])
        return [] if choice == "none" else self.tools or []

    def _named(self, names: Sequence[str]) -> list[ToolDefinition]:
        """The tools with these names. Raises :class:`UnsupportedField`."""
        found = [tool for tool in self.tools or [] if tool.function.name in names]
        if not {tool.function.name for tool in found}.issuperset(names):
            raise _no_such_tool()
        return found

    @property
    def forced(self) -> list[ToolDefinition]:
        """The tools of which the reply must call one; empty: it need not. Raises :class:`UnsupportedField`."""
        choice = self.tool_choice
        if isinstance(choice, NamedTool):
            return self._named([choice.function.name])
        if choice == "required" and not self.tools:
            raise _no_such_tool()
        mode = choice.allowed_tools.mode if isinstance(choice, AllowedToolChoice) else choice
        return self.offered if mode == "required" else []

    @cached_property
    def schema_text(self) -> str:
        """The JSON schema that the reply follows; empty: none. Raises :class:`UnsupportedField`."""
        if forced := self.forced:
            try:
                return schema_of(forced_schema([tool.for_template() for tool in forced]))
            except UserError as error:
                raise UnsupportedField(f"tools: {error}", "tools") from None
        asked = self.response_format
        if asked is None or asked.type == "text":
            return ""
        if asked.type == "json_object":
            return ANY_OBJECT
        if asked.json_schema is None:
            raise UnsupportedField("response_format.json_schema: give the schema", "response_format.json_schema")
        return schema_of(asked.json_schema.schema_)

    def unless(self, style: str) -> str:
        """The text that begins a reply which follows no schema: that of a call, where the reply may call a tool
        instead; empty: none does. ``style``: how the model writes calls. Raises :class:`UnsupportedField` where they
        begin as other text does."""
        if not (self.schema_text and self.offered) or self.forced:
            return ""
        if not (opening := READERS[style].opening):
            raise UnsupportedField(
                "response_format together with tools is not supported for this model, whose calls have no mark: leave"
                " one of them out, or set tool_choice",
                "response_format",
                "unsupported_parameter",
            )
        return opening

    @property
    def offered_schemas(self) -> dict[str, str]:
        """The JSON schemas of the tools, by the names of their fields."""
        return {
            f"tools.{number}.function.parameters": schema_of(tool.function.parameters)
            for number, tool in enumerate(self.tools or [])
            if tool.function.parameters
        }

    @property
    def followed_schema(self) -> dict[str, str]:
        """The client's JSON schema that the reply follows, by the field that gave it; empty: none."""
        text = self.schema_text
        return {"tools" if self.forced else "response_format": text} if text not in ("", ANY_OBJECT) else {}


class CompletionRequest(CompletionOptions):
    prompt: (
        Text
        | Annotated[list[Token], Field(fail_fast=True)]
        | Annotated[list[Text], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[Token], Field(max_length=ENTRIES, fail_fast=True)]], Field(fail_fast=True)]
    ) = Field(min_length=1, max_length=LONGEST_TEXT)
    logprobs: int | None = Field(
        None, ge=0, le=LIKELIEST, description="The log-probs of the tokens, and so many of the likeliest in their place"
    )
    max_tokens: int | None = Field(None, ge=0, le=INTEGER, description="0 with echo: the prompt alone")
    echo: bool | None = Field(None, description="The prompt precedes the answer, in text and log-probs")
    best_of: Integer | None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _has_one_type(cls, value: Any) -> Any:
        """One error for a wrong list, however many of its items are wrong."""
        kinds = {type(item) for item in value} if isinstance(value, list) else set()
        if kinds & {list, str} and len(value) > PROMPTS:
            raise ValueError(f"at most {PROMPTS} prompts in one request; given {len(value)}")
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
    def likeliest(self) -> int:
        return self.logprobs or 0

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
        if value in NOTHING or name in IGNORED or value in NEUTRAL.get(name, ()):
            continue
        if name in MEANT:
            code = NOT_FOUND.get(name, "unsupported_parameter")
            raise UnsupportedField(f"{name} is not supported: {MEANT[name]}", name, code)
        if name not in NEUTRAL:
            raise UnsupportedField(f"{name} is not supported: leave it out", name, "unknown_parameter")
        raise UnsupportedField(
            f"{name} is not supported: leave it out, or give {NEUTRAL[name][0]!r}", name, "unsupported_parameter"
        )
