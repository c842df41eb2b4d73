"""Chat messages as rows and environments give them, and as the policy reads them.

The chat template of an episode gets a role and a text per message, nothing else. So a message with anything more is
refused, not cut: a call of a tool that is dropped makes another conversation. Rows that are trained on as they are may
have the calls of tools, their results and the tools themselves, as OpenAI writes them (:func:`with_calls`).
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rookery.bounds import TOOLS
from rookery.environments.base import Message
from rookery.errors import nearest
from rookery.spec import values
from rookery.tokenization.written import THOUGHT_MARKS, controls

ROLES = ("system", "user", "assistant", "tool")
"""Roles of a message, as in the chat API."""

_FORM = '{"role": "user", "content": "…"}'
_ROLE_HINTS = {"human": "write user", "gpt": "write assistant", "developer": "write system", "function": "write tool"}
_FIELD_HINTS = {
    "tool_calls": "write the calls into content, as the model writes them",
    "function_call": "write the call into content, as the model writes it",
    "tool_call_id": "leave it out",
    "name": "write it into content, or leave it out",
    "reasoning_content": "write it into content, as the model writes it",
}


EMPTY: tuple[Any, ...] = (None, "", [], {})
"""Values of further fields that say nothing, as clients write them: ``annotations`` of a reply are ``[]``."""


class MessageRefused(ValueError):
    """Messages that a policy cannot read as they are; one line: the message, the mistake, the remedy."""


_AS_TEXT = re.compile(r"\s*\[\s*\{\s*[\"'](?:role|content|from|value)[\"']\s*:")
"""The beginning of a list of messages that a table's export wrote as a text, in JSON or as Python shows it."""


def refuse_as_text(text: str, name: str) -> None:
    """Raises :class:`MessageRefused` for a list of messages as a text, which the policy would read letter by letter."""
    if _AS_TEXT.match(text):
        raise MessageRefused(
            f"{name} is a list of messages as a text; give the list itself, or the text as the content of a message"
        )


def conversation(messages: Sequence[Any], path: str = "messages", *, before_reply: bool = True) -> list[Message]:
    """The messages as a chat template gets them; ``path`` names them in errors. Fields that are null or empty count as
    absent, and a content of several texts as their concatenation. With ``before_reply`` the policy replies next.
    Raises :class:`MessageRefused`."""
    taken = [
        {**message} if _plain(message) else _taken(message, f"{path}.{number}")
        for number, message in enumerate(messages)
    ]
    if before_reply and taken and taken[-1]["role"] == "assistant":
        raise MessageRefused(
            f"{path}.{len(taken) - 1} is the assistant's: the policy replies after the last message, and would read an"
            " answer there; leave it out, and give the answer in a field of its own, such as answer"
        )
    return taken


def _plain(message: Any) -> bool:
    """Whether a message needs no closer look, as nearly all do."""
    if type(message) is not dict or len(message) != 2:
        return False
    return type(message.get("content")) is str and message.get("role") in ROLES


def _taken(message: Any, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise MessageRefused(f"{where} is {shown(message)}; give {_FORM}")
    for name in message:
        if name not in ("role", "content") and message[name] not in EMPTY:
            hint = _FIELD_HINTS.get(str(name), "write it into content, or leave it out")
            raise MessageRefused(
                f"{where}.{name} is {shown(message[name])}, but only role and content reach the model; {hint}"
            )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or content is None:
        raise MessageRefused(f"{where} is {shown(message)}; give {_FORM}")
    if role not in ROLES:
        hint = _ROLE_HINTS.get(role) or nearest(role, ROLES) or f"give {', '.join(ROLES)}"
        raise MessageRefused(f"{where}.role is {shown(role)}; {hint}")
    return {"role": role, "content": content if isinstance(content, str) else _joined(content, f"{where}.content")}


def _joined(content: Any, where: str) -> str:
    """The text of a content in parts."""
    parts = content if isinstance(content, Sequence) else ()
    texts = [part["text"] for part in parts if isinstance(part, Mapping) and _is_text(part)]
    if not texts or len(texts) < len(parts):
        form = '{"type": "text", "text": …}'
        raise MessageRefused(f"{where} is {shown(content)}; give a text, or a list of {form}")
    return "".join(texts)


def _is_text(part: Mapping[Any, Any]) -> bool:
    """Whether a part of a content is a text and nothing more."""
    extra = [name for name, value in part.items() if name not in ("type", "text") and value is not None]
    return part.get("type") == "text" and isinstance(part.get("text"), str) and not extra


# --- calls of tools ---------------------------------------------------------------------------------------------------

_CALL = '{"type": "function", "function": {"name": "…", "arguments": "{…}"}}'
_TOOL = '{"type": "function", "function": {"name": "…", "parameters": {…}}}'


def with_calls(
    messages: Sequence[Any], path: str = "messages", *, before_reply: bool = True, first: int = 0
) -> list[dict[str, Any]]:
    """As :func:`conversation`, where the assistant's messages may have ``tool_calls``, with which the content may be
    null, and results the ``tool_call_id`` of an earlier call. The arguments of calls become objects. Ids are written in
    one form, numbered from ``first``: some templates demand nine letters and digits."""
    plain: list[Any] = []
    more: dict[int, dict[str, Any]] = {}
    ids: dict[str, str] = {}
    numbers = itertools.count(first)
    for number, message in enumerate(messages):
        where = f"{path}.{number}"
        if isinstance(message, Mapping) and message.get("tool_calls"):
            if message.get("role") != "assistant":
                raise MessageRefused(f"{where} has tool_calls, but only the assistant calls tools; leave them out")
            calls = _calls(message["tool_calls"], f"{where}.tool_calls", numbers)
            given = zip(message["tool_calls"], calls, strict=True)
            ids |= {str(call["id"]): made["id"] for call, made in given if call.get("id") is not None}
            more[number] = {"tool_calls": calls}
            message = {**message, "content": message.get("content") or "", "tool_calls": None}
        elif isinstance(message, Mapping) and message.get("role") == "tool":
            more[number] = _of_result(message, where, ids)
            message = {**message, **dict.fromkeys(more[number])}
        plain.append(message)
    taken = conversation(plain, path, before_reply=before_reply)
    return [{**message, **more.get(number, {})} for number, message in enumerate(taken)]


def _of_result(message: Mapping[str, Any], where: str, ids: Mapping[str, str]) -> dict[str, Any]:
    """The fields of a tool's result besides its content; ``ids`` are those of calls, by the ones that were given."""
    found: dict[str, Any] = {}
    if (given := message.get("tool_call_id")) is not None:
        if not isinstance(given, str) or given not in ids:
            raise MessageRefused(f"{where}.tool_call_id is {shown(given)}, the id of no earlier call; give that of one")
        found["tool_call_id"] = ids[given]
    if isinstance(message.get("name"), str):
        found["name"] = message["name"]
    return found


def _calls(given: Any, where: str, numbers: Iterator[int]) -> list[dict[str, Any]]:
    """The calls of a message, with ids of these ``numbers``."""
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) > TOOLS:
        raise MessageRefused(f"{where} is {shown(given)}; give a list of at most {TOOLS} such as {_CALL}")
    calls, fields = [], {"id", "type", "function", "index"}
    for number, call in enumerate(given):
        function = _function(call, f"{where}.{number}", fields, {"name", "arguments"}, _CALL)
        arguments = _arguments(function.get("arguments"))
        if arguments is None:
            text = shown(function["arguments"])
            raise MessageRefused(f"{where}.{number}.function.arguments is {text}; give an object as JSON")
        about = {"name": function["name"], "arguments": arguments}
        calls.append({"id": f"call{next(numbers):05d}", "type": "function", "function": about})
    return calls


def _arguments(given: Any) -> dict[str, Any] | None:
    """The arguments of a call, an object or its JSON; none for null and no text. None for anything else."""
    if isinstance(given, str) and given.strip():
        try:
            given = values.decode(given.encode())
        except ValueError:
            return None
    elif given is None or isinstance(given, str):
        return {}
    return dict(given) if isinstance(given, Mapping) else None


def offered_tools(given: Any, where: str = "tools") -> list[dict[str, Any]]:
    """The tools of a row as chat templates get them; none for null. Raises :class:`MessageRefused`."""
    if given is None:
        return []
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) > TOOLS:
        raise MessageRefused(f"{where} is {shown(given)}; give a list of at most {TOOLS} such as {_TOOL}")
    tools = []
    for number, tool in enumerate(given):
        fields = {"name", "description", "parameters", "strict"}
        function = _function(tool, f"{where}.{number}", {"type", "function"}, fields, _TOOL)
        description, parameters = function.get("description"), function.get("parameters")
        if not isinstance(description or "", str) or not _is_schema(parameters):
            raise MessageRefused(f"{where}.{number}.function is {shown(function)}; give {_TOOL}")
        plain = {"type": "object", "properties": {}}
        about = {"name": function["name"], "description": description or "", "parameters": parameters or plain}
        tools.append({"type": "function", "function": about})
    return tools


def _is_schema(parameters: Any) -> bool:
    """Whether templates can write the parameters of a tool: null, or a schema whose properties are schemas."""
    if parameters is None:
        return True
    properties = parameters.get("properties", {}) if isinstance(parameters, Mapping) else None
    return isinstance(properties, Mapping) and all(isinstance(one, Mapping) for one in properties.values())


def _function(given: Any, where: str, outer: set[str], inner: set[str], form: str) -> Mapping[str, Any]:
    """The ``function`` of a call or a tool, which has these fields alone."""
    function = given.get("function") if isinstance(given, Mapping) else None
    if not isinstance(function, Mapping) or (given.get("type") or "function") != "function":
        raise MessageRefused(f"{where} is {shown(given)}; give {form}")
    for mapping, known, at in ((given, outer, where), (function, inner, f"{where}.function")):
        for name in mapping:
            if name not in known and mapping[name] is not None:
                raise MessageRefused(f"{at}.{name} is {shown(mapping[name])}, which no template gets; leave it out")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise MessageRefused(f"{where}.function.name is {shown(function.get('name'))}; give a text")
    return function


def readable(message: Mapping[str, Any]) -> Message:
    """A message for readers: calls of tools as JSON after its text."""
    text = message.get("content") or ""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return {"role": message["role"], "content": "\n".join([*([text] if text else []), *calls])}


TOOLS_FORM = "+tools"
"""The mark of a form with tools."""

CONTEXT = "~"
"""The mark of a message of the assistant that is not learned."""

MOST_MARKS = 8
"""Marks of thoughts in the form of one message: more are of the same kind."""


def form_of(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] = (), learned: Sequence[Any] | None = None
) -> tuple[str, ...]:
    """The parts of a conversation that a chat template may refuse or leave out: the roles, ``role+N`` for a message
    with N calls, ``role:…`` for one with thoughts, with a text next to its calls, or with marks of a template in its
    text, and ``+tools`` before them where there are tools. ``learned`` says of each message whether it is, by default
    all of the assistant's: thoughts of others may be left out."""
    marks = []
    for number, message in enumerate(messages):
        calls = len(message.get("tool_calls") or ())
        context = message["role"] == "assistant" and learned is not None and not learned[number]
        text = message.get("content") or ""
        shape = _shape(text) if message["role"] == "assistant" and not context else "-" if text.strip() else ""
        shape += "".join(controls(text)[:MOST_MARKS])
        shape = "" if shape == ("" if calls else "-") else f":{shape}"
        marks.append(message["role"] + CONTEXT * context + (f"+{calls}" if calls else "") + shape)
    return (TOOLS_FORM, *marks) if tools else tuple(marks)


def _shape(text: str) -> str:
    """A text with ``-`` for all but the marks of thoughts."""
    pieces = THOUGHT_MARKS.split(text, MOST_MARKS)
    return "".join(piece if number % 2 else "-" * bool(piece.strip()) for number, piece in enumerate(pieces))


def example_of(form: Sequence[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A conversation of this form, and its tools. No two texts of it are alike."""
    tools = offered_tools([{"function": {"name": "f"}}]) if TOOLS_FORM in form else []
    messages: list[dict[str, Any]] = []
    number = itertools.count()
    for mark in form:
        kind, given, shape = mark.partition(":")
        role, _, calls = kind.replace(CONTEXT, "").partition("+")
        if not role:
            continue
        made = [{"function": {"name": "f", "arguments": {"text": f"x{next(number)}x"}}} for _ in range(int(calls or 0))]
        shape = shape if given else "" if made else "-"
        content = re.sub("-", lambda _: f"x{next(number)}x", shape)
        messages.append({"role": role, "content": content, **({"tool_calls": made} if made else {})})
    return with_calls(messages, before_reply=False), tools


def learned_of(form: Sequence[str]) -> list[bool]:
    """Whether each message of a form is learned."""
    return [
        mark.startswith("assistant") and CONTEXT not in mark.partition(":")[0] for mark in form if mark != TOOLS_FORM
    ]


def shown(value: Any) -> str:
    """``value`` as JSON, short enough for a line."""
    text = json.dumps(value, ensure_ascii=False, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."
