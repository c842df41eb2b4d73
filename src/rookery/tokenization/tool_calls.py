"""Tools in conversations: how a template offers them, and in which format it writes calls.

Promises:

* A call is read in the format that the model's template writes (:mod:`~rookery.tokenization.call_readers`): the one
  whose reader reads a call back that the template wrote.
* A template without tools gets them in the system message, calls and results in Hermes' form: any model can be trained
  to use them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rookery.errors import UserError
from rookery.tokenization.call_readers import READERS, read_whole
from rookery.tokenization.call_values import read_json

Messages = Sequence[Mapping[str, Any]]


def style_of(template: str) -> str:
    """The format of calls in a chat template's source, by its marks."""
    if "<|channel|>" in template and "<|start|>" in template:
        return "harmony"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:
        return "hermes"
    if "<|python_tag|>" in template or '"parameters": dictionary' in template:
        return "llama3"
    return next((name for name, reader in READERS.items() if reader.opening and reader.opening in template), "hermes")


def called(call: Mapping[str, Any]) -> tuple[str, Any]:
    """Name and arguments of a call in a message."""
    return call["function"]["name"], call["function"]["arguments"]


def message_key(content: str, calls: Sequence[tuple[str, Any]]) -> str:
    """A text that two assistant's messages share where they say the same: white space around the text, and the way in
    which arguments are written, do not count."""
    known = []
    for name, given in calls:
        read = read_json(given) if isinstance(given, str) else given
        known.append((name, given if read is None else read))
    return json.dumps([content.strip(), known], sort_keys=True, default=str)


INSTRUCTIONS = (
    "You may call one or more functions. These are their signatures, one JSON object a line, within <tools></tools>:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call a function, write a JSON object with its name and arguments within <tool_call></tool_call>:\n"
    '<tool_call>\n{{"name": "NAME", "arguments": {{}}}}\n</tool_call>'
)


class _Ids:
    """The ids of a conversation's calls that have their names."""

    def __init__(self) -> None:
        self._made: dict[Any, str] = {}
        self._count = 0

    def make(self, name: str, given: Any) -> str:
        """The id of the next call, whose id was ``given``."""
        self._made[given] = made = f"functions.{name}:{self._count}"
        self._count += 1
        return made

    def of(self, given: Any) -> Any:
        """The id of the last call whose id was ``given``."""
        return self._made.get(given, given)


@dataclass(frozen=True)
class ToolSupport:
    """The form of tools in a chat template."""

    style: str
    """The name of its format of calls."""
    argument: str = ""
    """The name under which it takes tools; empty: it does not."""
    calls: bool = False
    """Whether it writes the calls of an assistant's message."""
    results: bool = False
    """Whether it knows the role ``tool``."""
    texts: bool = False
    """Whether it takes a call's arguments as JSON text."""
    ids: bool = False
    """Whether it writes a call's id in place of its name: ``functions.NAME:0``, numbered in the conversation."""

    def adapt(self, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> tuple[Messages, dict[str, Any]]:
        """The conversation as the template can write it, and its further arguments."""
        ids = _Ids()
        written = [self._message(dict(message), ids) for message in messages]
        if not tools:
            return written, {}
        if self.argument == "tools":
            return written, {"tools": list(tools)}
        functions = [tool["function"] for tool in tools]
        if self.argument:
            return written, {self.argument: functions}
        text = INSTRUCTIONS.format(tools="\n".join(json.dumps(one, ensure_ascii=False) for one in functions))
        if written and written[0].get("role") == "system":
            first = {**written[0], "content": f"{written[0]['content']}\n\n{text}"}
            return [first, *written[1:]], {}
        return [{"role": "system", "content": text}, *written], {}

    def _message(self, message: dict[str, Any], ids: _Ids) -> dict[str, Any]:
        message["content"] = message.get("content") or ""
        calls = message.get("tool_calls")
        if calls and not self.calls:
            del message["tool_calls"]
            blocks = [
                "<tool_call>\n"
                + json.dumps(
                    {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}, ensure_ascii=False
                )
                + "\n</tool_call>"
                for call in calls
            ]
            message["content"] = "\n".join([message["content"], *blocks] if message.get("content") else blocks)
        elif calls:
            message["tool_calls"] = [self._call(call, ids) for call in calls]
        if message.get("role") == "tool" and not self.results:
            return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        if self.ids and "tool_call_id" in message:
            message["tool_call_id"] = ids.of(message["tool_call_id"])
        return message

    def _call(self, call: Mapping[str, Any], ids: _Ids) -> Mapping[str, Any]:
        name, arguments = called(call)
        if self.ids:
            call = {**call, "id": ids.make(name, call.get("id"))}
        if self.texts and not isinstance(arguments, str):
            call = {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}}
        return call

    def opening(self, name: str) -> str:
        """The text before a forced call of this tool in a reply: the rest is one JSON object."""
        if self.style == "harmony":
            return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        return {"hermes": "<tool_call>\n", "mistral": "[TOOL_CALLS]"}.get(self.style, "")


PROBE = "rookery_probe"

FORMS: list[dict[str, bool]] = [{}, {"texts": True}, {"ids": True}]
"""The forms of a call that templates take, of :class:`ToolSupport`."""

_USER = {"role": "user", "content": "?"}


def _calling(name: str) -> dict[str, Any]:
    """A message that calls a tool."""
    function = {"name": name, "arguments": {"text": "one two"}}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def support_of(template: str, render: Any) -> ToolSupport:
    """The form of tools in a template: ``render(messages, **arguments)`` is tried with each. Calls have the first form
    in which one is read back as the template writes it."""
    function = {"name": PROBE, "description": "?", "parameters": {"type": "object", "properties": {}}}
    result = {"role": "tool", "content": PROBE, "tool_call_id": "abcdefghi", "name": "probe"}

    def writes(form: ToolSupport, *messages: Mapping[str, Any], **arguments: Any) -> bool:
        try:
            return PROBE in render(form.adapt([_USER, *messages], ())[0], **arguments)
        except (UserError, KeyError):
            return False

    def offered(name: str) -> dict[str, Any]:
        tool = {**function, "name": name}
        return {"tools": [{"type": "function", "function": tool}], "xml_tools": [tool]}

    tools, plain = offered(PROBE), ToolSupport("hermes")
    argument = next((name for name, value in tools.items() if writes(plain, **{name: value})), "")
    if not argument:
        return plain
    others = {argument: offered("other")[argument]}  # a model may have a separate template for conversations with tools
    forms = [ToolSupport(style_of(template), argument, calls=True, results=True, **form) for form in FORMS]
    turns = ((_calling(PROBE), _USER), (_calling(PROBE),))
    written = [form for form in forms if any(writes(form, *messages, **others) for messages in turns)]
    read = (
        replace(form, style=style) for form in written if (style := _style(form, render, {argument: tools[argument]}))
    )
    form = next(read, None) or (written[0] if written else replace(forms[0], calls=False))
    before = _calling("other") if form.calls else {"role": "assistant", "content": "?"}
    return replace(form, results=writes(form, before, result, **others))


def _style(form: ToolSupport, render: Any, tools: Mapping[str, Any]) -> str:
    """The format whose reader reads a call as the template writes it, the given one if it does; empty where none
    does."""
    written: list[str] = []
    calling = _calling(PROBE)
    for reply in (calling, {"role": "assistant", "content": PROBE}):
        with contextlib.suppress(UserError, KeyError):
            messages, _ = form.adapt([_USER, reply], ())
            written.append(render(messages, add_generation_prompt=False, **tools))
    for begun in (True, False):
        with contextlib.suppress(UserError, KeyError, ValueError):
            text, plain = written
            before = render([_USER], add_generation_prompt=begun, **tools)
            if text.startswith(before):
                text = text.removeprefix(before).removesuffix(plain.rpartition(PROBE)[2])
                _, arguments = called(calling["tool_calls"][0])
                return next((name for name in (form.style, *READERS) if _reads(name, text, arguments)), "")
    return ""


def _reads(style: str, text: str, arguments: Mapping[str, Any]) -> bool:
    _, calls = read_whole(READERS[style]([PROBE]), text)
    return [(name, read_json(given)) for name, given in calls] == [(PROBE, arguments)]
