"""OpenAI's Responses API over chats: input items become messages, a reply becomes output items.

Nothing is stored: a request brings its whole conversation. A streamed response equals a whole one: its last event has
the whole response.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from rookery.bounds import CONVERSATION, INTEGER, TOOLS, Line, Name, Text, check_parts, mistake
from rookery.errors import short
from rookery.server.auth import ServiceContext
from rookery.server.completion_formats import Choice, reply_bytes, token_entries
from rookery.server.openai import (
    IGNORED,
    LIKELIEST,
    ChatRequest,
    OpenAIModel,
    Parameters,
    Part,
    ReplyFormat,
    SmallObject,
    UnsupportedField,
    refuse_unsupported,
)
from rookery.server.responses import event_data, first_problem, named_steps
from rookery.spec.policy import Temperature


class InputPart(Part):
    type: Literal["input_text", "output_text", "text", "refusal"]


def _as_parts(value: Any) -> Any:
    """A text is one part."""
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


Parts = Annotated[list[InputPart], Field(max_length=1000, fail_fast=True), BeforeValidator(_as_parts)]


_READ = {
    "message": {"type", "role", "content"},
    "function_call": {"type", "call_id", "name", "arguments"},
    "function_call_output": {"type", "call_id", "name", "output"},
}
"""Fields of an item by its type."""


class InputItem(OpenAIModel):
    """A message, a call of a function, its output, or reasoning, which no template writes."""

    sent_back = frozenset({"id", "status", "phase", "parsed_arguments"})

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Parts | None = None
    call_id: Name = ""
    name: Name = ""
    arguments: Text = ""
    output: Parts | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_reasoning(cls, value: Any) -> Any:
        """Items of reasoning have other forms and sizes, and are not read. There are no stored items."""
        if isinstance(value, dict) and value.get("type") == "item_reference":
            raise ValueError("an item_reference names a stored item, and none are stored; send the item itself")
        unread = isinstance(value, dict) and value.get("type") == "reasoning"
        return {"type": "reasoning"} if unread else value

    @property
    def unread(self) -> dict[str, Any]:
        others = type(self).model_fields.keys() - _READ.get(self.type, set())
        given = {name: value for name in sorted(others & self.model_fields_set) if (value := getattr(self, name))}
        return {**super().unread, **(given if self.type in _READ else {})}


class ResponseTool(OpenAIModel):
    type: Literal["function"]
    name: Name
    description: Text | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class NamedResponseTool(OpenAIModel):
    type: Literal["function"]
    name: Name


class AllowedResponseTools(OpenAIModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedResponseTool], Field(min_length=1, max_length=TOOLS)]


ResponseToolChoice = Annotated[NamedResponseTool | AllowedResponseTools, Field(discriminator="type")]


class TextFormatOption(OpenAIModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name = ""
    description: Text | None = None
    schema_: SmallObject | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(OpenAIModel):
    format: TextFormatOption | None = None


class ReasoningOptions(OpenAIModel):
    effort: Name | None = Field(None, description="As reasoning_effort of a chat")
    summary: Literal["auto", "none"] | None = Field(None, description="No effect: a reply has its reasoning as it is")
    generate_summary: Literal["auto", "none"] | None = Field(None, description="No effect, as summary")


class ResponseStreamOptions(OpenAIModel):
    include_obfuscation: bool | None = Field(None, description="No effect: nothing is obfuscated")


def _as_items(value: Any) -> Any:
    """A text is the user's message. Raises ``ValueError`` for too many parts."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else check_parts(value, "content", "output")


_OF_CHATS = (
    (r"response_format\.json_schema$", "text.format.schema"),
    (r"response_format(?=\.|$)", "text.format"),
    (r"max_completion_tokens$", "max_output_tokens"),
    (r"logprobs$", "top_logprobs"),
    (r"(tools\.\d+)\.function(?=\.|$)", r"\1"),
    (r"tool_choice\.(function|allowed_tools)(?=\.|$)", "tool_choice"),
    (r"reasoning_effort$", "reasoning.effort"),
)
"""Arguments of a chat, as patterns, and what they are called here."""


class ResponsesInput(OpenAIModel):
    """The input of a response, and the form of its reply."""

    chat_type: ClassVar[type[ChatRequest]] = ChatRequest

    model: Line = Field(min_length=1)
    input: Annotated[
        list[InputItem], Field(min_length=1, max_length=CONVERSATION, fail_fast=True), BeforeValidator(_as_items)
    ]
    instructions: Text | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None

    @property
    def effort(self) -> str | None:
        given = self.reasoning.effort if self.reasoning is not None else None
        return None if given == "auto" else given

    def as_chat(self) -> ChatRequest:
        """Raises :class:`UnsupportedField`."""
        extra = {name: value for name, value in (self.model_extra or {}).items() if not _neutral(name, value)}
        refuse_unsupported({**extra, **dict(self.unread_within())})
        choice: Any = self.tool_choice
        if isinstance(choice, NamedResponseTool):
            choice = _chosen(choice)
        elif isinstance(choice, AllowedResponseTools):
            allowed = {"mode": choice.mode, "tools": [_chosen(tool) for tool in choice.tools]}
            choice = {"type": choice.type, "allowed_tools": allowed}
        plain = {
            "model": self.model, "messages": [message for _, message in self._messages()],
            "tool_choice": choice, "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._format(), "reasoning_effort": self.effort,
            "tools": [{"type": "function", "function": {
                "name": tool.name, "description": tool.description, "parameters": tool.parameters,
            }} for tool in self.tools or []] or None,
            **self._sampling(),
        }  # fmt: skip
        try:
            return self.chat_type.model_validate(plain)
        except ValidationError as error:
            first = first_problem(error.errors(), plain)
            where = ".".join(named_steps(first["loc"], plain, first["type"]))
            raise UnsupportedField(f"{where}: {short(mistake(first))}", where) from None

    def _sampling(self) -> dict[str, Any]:
        """The arguments of the chat that say how its reply is sampled and sent. Raises :class:`UnsupportedField`."""
        return {}

    @contextmanager
    def renamed(self) -> Iterator[None]:
        """Errors about arguments of the chat that :meth:`as_chat` makes name those of this request."""
        try:
            yield
        except UnsupportedField as error:
            name = self._argument(error.param)
            raise UnsupportedField(str(error).replace(error.param, name, 1), name, error.code) from None

    def _argument(self, param: str) -> str:
        """The argument of this request that becomes ``param`` of the chat."""
        head, _, rest = param.partition(".")
        if head != "messages":
            return next((re.sub(given, own, param) for given, own in _OF_CHATS if re.match(given, param)), param)
        number, _, inner = rest.partition(".")
        if not number.isdecimal():
            return "input"
        fields = [field for field, _ in self._messages()]
        return ".".join(filter(None, (fields[int(number)], inner)))

    def _format(self) -> ReplyFormat | None:
        asked = self.text.format if self.text is not None else None
        if asked is None or asked.type == "text":
            return None
        schema = {"name": asked.name, "schema": asked.schema_} if asked.schema_ is not None else None
        return ReplyFormat.model_validate({"type": asked.type, "json_schema": schema})

    def _messages(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The messages of the conversation, each with the field that it begins with. Calls that follow the
        assistant's text, or each other, and text that follows them, are of one message."""
        if self.instructions:
            yield "instructions", {"role": "system", "content": self.instructions}
        assistant: dict[str, Any] | None = None
        began = ""
        for number, item in enumerate(self.input):
            if item.type == "reasoning":
                continue
            field = f"input.{number}"
            if item.type == "function_call":
                if not item.name:
                    raise UnsupportedField(f"{field}.name: a call names its function", f"{field}.name")
                if assistant is None:
                    assistant, began = {"role": "assistant", "content": None}, field
                assistant.setdefault("tool_calls", []).append({
                    "id": item.call_id, "type": "function",
                    "function": {"name": item.name, "arguments": item.arguments},
                })  # fmt: skip
                continue
            if item.role == "assistant" and assistant is not None and "tool_calls" in assistant:
                assistant["content"] = (assistant["content"] or "") + _text(item.content, f"{field}.content")
                continue
            if assistant is not None:
                yield began, assistant
                assistant = None
            if item.type == "function_call_output":
                content = _text(item.output, f"{field}.output")
                name = {"name": item.name} if item.name else {}
                yield field, {"role": "tool", "tool_call_id": item.call_id, **name, "content": content}
            elif item.role is None:
                raise UnsupportedField(f"{field}.role: a message needs one", f"{field}.role")
            else:
                message = {"role": item.role, "content": _text(item.content, f"{field}.content")}
                if item.role == "assistant":
                    assistant, began = message, field
                else:
                    yield field, message
        if assistant is not None:
            yield began, assistant


class ResponsesRequest(ResponsesInput):
    temperature: Annotated[Temperature, Field(le=10)] | None = None
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=LIKELIEST)
    max_output_tokens: int | None = Field(None, ge=1, le=INTEGER)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    store: bool | None = Field(None, description="No effect: nothing is stored")
    include: Annotated[list[Name], Field(max_length=20)] | None = None

    @property
    def logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or [])

    def _sampling(self) -> dict[str, Any]:
        for name in self.include or []:
            if name not in ("reasoning.encrypted_content", "message.output_text.logprobs"):
                raise UnsupportedField(f"include: {name} is not supported: leave it out", "include")
        if self.top_logprobs and not self.logprobs:
            raise UnsupportedField("top_logprobs needs include: ['message.output_text.logprobs']", "top_logprobs")
        return {
            "temperature": self.temperature, "top_p": self.top_p, "top_logprobs": self.top_logprobs,
            "logprobs": self.logprobs, "max_completion_tokens": self.max_output_tokens, "seed": self.seed,
            "stream": self.stream,
        }  # fmt: skip


def _chosen(tool: NamedResponseTool) -> dict[str, Any]:
    """A chosen tool as a chat has it."""
    return {"type": tool.type, "function": {"name": tool.name}}


def _text(value: list[InputPart] | None, field: str) -> str:
    if value is None:
        raise UnsupportedField(f"{field}: give a text", field)
    return "".join(part.text for part in value)


def _neutral(name: str, value: Any) -> bool:
    """Whether a further argument asks for what happens anyhow."""
    neutral = {"truncation": ("disabled",), "background": (False,), "service_tier": ("auto", "default")}
    return value is None or name in IGNORED or value in neutral.get(name, ())


class ResponsesFormat:
    """One response, whole or as the events of a stream."""

    def __init__(self, service: ServiceContext, asked: ResponsesRequest, model: str, *, trainable: bool) -> None:
        self.id = service.context.ids.new("resp")
        self._asked = asked
        self._number = -1
        self._index = 0
        """The place of the item that is open, or follows."""
        self._open = False
        """Whether a message is open."""
        self._calls = 0
        """The number of calls that were sent."""
        self._sent = 0
        """Characters of the open message that were sent."""
        choice = asked.tool_choice
        self._head: dict[str, Any] = {
            "id": self.id, "object": "response", "created_at": int(service.context.clock.time()), "model": model,
            "error": None, "incomplete_details": None, "instructions": asked.instructions,
            "metadata": (asked.model_extra or {}).get("metadata") or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False, "previous_response_id": None,
            "temperature": 1.0 if asked.temperature is None else asked.temperature,
            "top_p": 1.0 if asked.top_p is None else asked.top_p, "max_output_tokens": asked.max_output_tokens,
            "tool_choice": choice.model_dump() if isinstance(choice, OpenAIModel) else choice or "auto",
            "tools": [tool.model_dump() for tool in asked.tools or []], "truncation": "disabled", "store": False,
            "reasoning": {"effort": asked.effort, "summary": None}, "text": {"format": {"type": "text"}},
        }  # fmt: skip
        if asked.text is not None and asked.text.format is not None:
            self._head["text"] = {"format": asked.text.format.model_dump(by_alias=True, exclude_none=True)}
        if not trainable:
            self._head["trainable"] = False

    def size(self, choice: Choice) -> int:
        """About how many bytes :meth:`body` has, or more."""
        return reply_bytes(choice, self._asked.top_logprobs or 0, prompt=False)

    def body(self, choice: Choice, usage: dict[str, int]) -> dict[str, Any]:
        """The complete response."""
        cut = choice.reply.finish == "length"
        return {
            **self._head, "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output(choice),
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"], "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }  # fmt: skip

    def begin(self) -> bytes:
        """The first events of a stream."""
        begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
        return self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)

    def grow(self, choice: Choice) -> bytes:
        """The events of further text and calls, item by item: one ends before the next begins."""
        events = b""
        for number in range(self._calls, len(choice.calls) + 1):
            if text := choice.texts.get(number, "")[self._sent :]:
                events += self._open_message(choice)
                self._sent += len(text)
                scores = token_entries(choice, choice.next_scores() if self._asked.logprobs else [])
                events += self._event(
                    "response.output_text.delta", **self._message_at, content_index=0, delta=text, logprobs=scores
                )
            if number < len(choice.calls):
                events += self._close_message(choice) + self._call_events(choice)
        return events

    def _open_message(self, choice: Choice) -> bytes:
        """The events that begin a message; empty where it has begun."""
        if self._open:
            return b""
        self._open = True
        item = {**self._message(choice, self._calls), "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        added = self._event("response.output_item.added", output_index=self._index, item=item)
        return added + self._event("response.content_part.added", **self._message_at, content_index=0, part=part)

    def _close_message(self, choice: Choice) -> bytes:
        """The events that end the message; empty where none is open."""
        if not self._open:
            return b""
        item, item_at = self._message(choice, self._calls), self._message_at
        part = item["content"][0]
        events = self._event(
            "response.output_text.done", **item_at, content_index=0, text=part["text"], logprobs=part["logprobs"]
        )
        events += self._event("response.content_part.done", **item_at, content_index=0, part=part)
        events += self._event("response.output_item.done", output_index=self._index, item=item)
        self._open, self._sent = False, 0
        self._index += 1
        return events

    def _call_events(self, choice: Choice) -> bytes:
        """The events of the next call."""
        index, item = self._index, self._items(choice)[self._calls]
        self._calls += 1
        self._index += 1
        item_at = {"item_id": item["id"], "output_index": index}
        begun = {**item, "status": "in_progress", "arguments": ""}
        events = self._event("response.output_item.added", output_index=index, item=begun)
        events += self._event("response.function_call_arguments.delta", **item_at, delta=item["arguments"])
        events += self._event(
            "response.function_call_arguments.done", **item_at, name=item["name"], arguments=item["arguments"]
        )
        return events + self._event("response.output_item.done", output_index=index, item=item)

    def end(self, choice: Choice, usage: dict[str, int]) -> bytes:
        """The last events."""
        events = b"" if self._index else self._open_message(choice)
        body = self.body(choice, usage)
        return events + self._close_message(choice) + self._event(f"response.{body['status']}", response=body)

    def failed(self, error: dict[str, Any]) -> bytes:
        """The last event of a stream that failed."""
        about = error["error"]
        code = about["code"] or "server_error"
        return self._event("error", code=code, message=about["message"], param=about["param"])

    def _output(self, choice: Choice) -> list[dict[str, Any]]:
        """The items in the order in which the model wrote them."""
        output, calls = [], self._items(choice)
        for number in range(len(calls) + 1):
            if number in choice.texts:
                output.append(self._message(choice, number))
            output += calls[number : number + 1]
        return output or [self._message(choice, 0)]

    def _message(self, choice: Choice, number: int) -> dict[str, Any]:
        """The text between so many calls and the next one. The first such text has the log-probabilities of all."""
        numbers = range(
            choice.text.tokens_shown if self._asked.logprobs and number == min(choice.texts, default=0) else 0
        )
        scores = token_entries(choice, choice.scores(numbers))
        part = {"type": "output_text", "text": choice.texts.get(number, ""), "annotations": [], "logprobs": scores}
        cut = choice.reply.finish == "length" and number == len(choice.calls)  # it is the last item
        return {"id": self._message_id(number), "type": "message", "role": "assistant",
                "status": "incomplete" if cut else "completed", "content": [part]}  # fmt: skip

    def _message_id(self, number: int) -> str:
        return f"msg_{self.id.removeprefix('resp-')}" + (f"_{number}" if number else "")

    @property
    def _message_at(self) -> dict[str, Any]:
        """The id of the open message, and its index."""
        return {"item_id": self._message_id(self._calls), "output_index": self._index}

    def _items(self, choice: Choice) -> list[dict[str, Any]]:
        return [
            {"id": f"fc_{name.removeprefix('call_')}", "type": "function_call", "status": "completed", "call_id": name,
             "name": call.name, "arguments": call.arguments}
            for name, call in choice.calls
        ]  # fmt: skip

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        data = msgspec.json.encode({"type": kind, "sequence_number": self._number, **fields})
        return f"event: {kind}\n".encode() + event_data(data)
