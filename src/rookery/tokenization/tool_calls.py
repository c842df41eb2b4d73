"""Tools in conversations: how a template offers them, and how calls are read from a reply.

Promises:

* A call is read in the format that the model's template writes: Hermes (Qwen, SmolLM3, Qwen3-Coder's too), Llama 3,
  Mistral, or Harmony (gpt-oss). Text that does not parse stays text.
* Text is released as soon as it cannot be part of a call; the pieces of a stream, joined, are those of the whole reply.
* A template without tools gets them in the system message, calls and results in Hermes' form: any model can be trained
  to use them.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rookery.errors import UserError

Style = Literal["hermes", "llama3", "mistral", "harmony"]

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ToolCall:
    """``arguments`` is JSON text of an object."""

    name: str
    arguments: str


Piece = str | ToolCall


def style_of(template: str) -> Style:
    """The format of calls in a chat template's source."""
    if "<|channel|>" in template and "<|start|>" in template:
        return "harmony"
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" not in template and ("<|python_tag|>" in template or '"parameters": dictionary' in template):
        return "llama3"
    return "hermes"


# --- reading ----------------------------------------------------------------------------------------------------------


class CallReader:
    """Reads one reply. White space around calls belongs to neither text nor call."""

    opening = ""
    """Text from which on a call may follow."""
    closing: tuple[str, ...] = ()
    """Texts that end the calls; without one they end with the reply."""

    def __init__(self, names: Sequence[str], parameters: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        """``names`` are the tools', ``parameters`` the JSON schemas of their arguments by name."""
        self.names = frozenset(names)
        self.calls = 0
        self._parameters = parameters or {}
        self._held = ""
        self._inside = False
        self._searched = 0
        self._space = ""

    def feed(self, text: str, *, last: bool) -> list[Piece]:
        """The further pieces; ``last``: no text follows."""
        self._held += text
        pieces: list[Piece] = []
        while self._held:
            if not self._inside:
                at = self._held.find(self.opening)
                if at < 0:
                    kept = 0 if last else _overlap(self._held, self.opening)
                    pieces += self._text(self._held[: len(self._held) - kept])
                    self._held = self._held[len(self._held) - kept :]
                    break
                pieces += self._text(self._held[:at])
                self._held, self._inside, self._searched = self._held[at:], True, len(self.opening)
            end = self._end()
            if end < 0 and not last:
                self._searched = max(self._searched, len(self._held) - max(map(len, self.closing), default=0))
                break
            block, self._held = (self._held, "") if end < 0 else (self._held[:end], self._held[end:])
            self._inside = False
            calls = list(self.parse(block))
            self.calls += len(calls)
            self._space = "" if calls else self._space
            pieces += calls or self._text(block)
        if last and not self.calls and self._space:
            pieces.append(self._space)
        return pieces

    def parse(self, block: str) -> Iterator[ToolCall]:
        """The calls of a block from ``opening`` to ``closing``; none if it does not parse."""
        raise NotImplementedError

    def _end(self) -> int:
        found = [at + len(text) for text in self.closing if (at := self._held.find(text, self._searched)) >= 0]
        return min(found, default=-1)

    def _text(self, text: str) -> list[Piece]:
        """Trailing white space is held until text follows it."""
        whole = self._space + text
        shown = whole.rstrip()
        self._space = whole[len(shown) :]
        if self.calls:
            shown = shown.lstrip() if not text.strip() else shown
        return [shown] if shown else []


class HermesReader(CallReader):
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, and Qwen3-Coder's
    ``<function=NAME><parameter=KEY>VALUE</parameter></function>`` in the same brackets."""

    opening = "<tool_call>"
    closing = ("</tool_call>",)

    def parse(self, block: str) -> Iterator[ToolCall]:
        inner = block.removeprefix(self.opening).strip().removesuffix("</tool_call>").strip()
        if inner.startswith("<function="):
            yield from _xml_call(inner, self._parameters)
        else:
            yield from _calls(inner)


class LlamaReader(CallReader):
    """A reply that is ``{"name": …, "parameters": {…}}``, after ``<|python_tag|>`` or not, or several with ``;``. Since
    any JSON may be a reply, all names must be tools'."""

    opening = ""

    def __init__(self, names: Sequence[str], parameters: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__(names, parameters)
        self._plain = False

    def feed(self, text: str, *, last: bool) -> list[Piece]:
        if self._plain:
            return self._text(text) + ([self._space] if last and self._space else [])
        self._held += text
        begun = self._held.lstrip()
        tag = "<|python_tag|>"
        if not last and (not begun or begun.startswith(("{", tag)) or tag.startswith(begun)):
            return []
        calls = list(_calls(begun.removeprefix(tag), ";"))
        calls = calls if all(call.name in self.names for call in calls) else []
        self.calls, held, self._held = len(calls), self._held, ""
        if calls:
            return list(calls)
        self._plain = True
        return self.feed(held, last=last)


class MistralReader(CallReader):
    """``[TOOL_CALLS][{"name": …, "arguments": {…}}, …]``, or ``[TOOL_CALLS]NAME[ARGS]{…}`` for each call."""

    opening = "[TOOL_CALLS]"

    def parse(self, block: str) -> Iterator[ToolCall]:
        found: list[ToolCall] = []
        for part in block.split(self.opening)[1:]:
            named = re.fullmatch(r"\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(\{.*\})\s*", part, re.DOTALL)
            if named:
                call = _call({"name": named[1], "arguments": named[2]})
                calls = [call] if call is not None else []
            else:
                calls = list(_calls(part))
            if not calls:
                return
            found += calls
        yield from found


class HarmonyReader(CallReader):
    """Channels of gpt-oss: ``final`` is the text, ``commentary to=functions.NAME`` a call, also without ``functions.``
    before the name of a tool, and text for another recipient or without one; ``analysis`` is neither."""

    def __init__(self, names: Sequence[str], parameters: Mapping[str, Mapping[str, Any]] | None = None) -> None:
        super().__init__(names, parameters)
        self._header: str | None = None

    def feed(self, text: str, *, last: bool) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._held:
            if self._header is None:
                header, found, rest = self._held.partition("<|message|>")
                if not found:
                    if last and "<|channel|>" not in header:  # a model that was not asked for channels
                        pieces += self._text(header)
                    break
                self._header, self._held = header, rest
            ends = [at for mark in _HARMONY_ENDS if (at := self._held.find(mark)) >= 0]
            kept = max(_overlap(self._held, mark) for mark in _HARMONY_ENDS) if not last else 0
            end = min(ends, default=len(self._held) - kept)
            body = self._held[:end]
            recipient = re.search(r"to=(functions\.)?([\w.-]+)", self._header)
            if recipient and (recipient[1] or recipient[2] in self.names):
                if not ends and not last:
                    break
                call = _call({"name": recipient[2], "arguments": body})
                if call is not None:
                    self.calls += 1
                    pieces.append(call)
                else:
                    pieces += self._text(body)
            elif "analysis" not in self._header:
                pieces += self._text(body)
            self._held = self._held[end:]
            if not ends:
                break
            mark = next(mark for mark in _HARMONY_ENDS if self._held.startswith(mark))
            self._held, self._header = self._held[len(mark) :], None
        if last and not self.calls and self._space:
            pieces.append(self._space)
        return pieces


_HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")


class ForcedReader(CallReader):
    """A reply that is one call as JSON, because a grammar made it so."""

    def feed(self, text: str, *, last: bool) -> list[Piece]:
        self._held += text
        if not last:
            return []
        calls = list(_calls(self._held))
        self.calls = len(calls)
        return list(calls) if calls else [self._held] if self._held else []


READERS: dict[Style, type[CallReader]] = {
    "hermes": HermesReader,
    "llama3": LlamaReader,
    "mistral": MistralReader,
    "harmony": HarmonyReader,
}


def _calls(text: str, separator: str = "") -> Iterator[ToolCall]:
    """Of JSON objects, or a list of them; none unless all are calls."""
    at, found = 0, []
    text = text.strip()
    while at < len(text):
        try:
            value, end = _DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        for one in value if isinstance(value, list) else [value]:
            call = _call(one)
            if call is None:
                return
            found.append(call)
        rest = text[end:].lstrip()
        if rest and not (separator and rest.startswith(separator)):
            return
        at = len(text) - len(rest.removeprefix(separator).lstrip()) if rest else len(text)
    yield from found


def _call(value: Any) -> ToolCall | None:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    if not value.keys() & {"arguments", "parameters"} and value.keys() - {"name", "type", "id"}:
        return None  # data, or a call whose arguments stand elsewhere
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    written = write_json(arguments) if isinstance(arguments, dict) else None
    if written is None or write_json(value["name"]) is None:
        return None
    return ToolCall(value["name"], written)


def _xml_call(text: str, parameters: Mapping[str, Mapping[str, Any]]) -> Iterator[ToolCall]:
    """A parameter is JSON or a value of Python, or text: as its schema declares it, and where none does, text that is
    no JSON. There is no call where other text stands between the parameters."""
    named = re.match(r"<function=([^>\s]+)>", text)
    if named is None or not text.endswith("</function>"):
        return
    found = _xml_parameters(text.removesuffix("</function>"), named.end())
    if found is None:
        return
    schema = parameters.get(named[1], {})
    written = write_json({key: _value(value, schema, key) for key, value in found})
    if written is not None and write_json(named[1]) is not None:
        yield ToolCall(named[1], written)


_PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>")


def _xml_parameters(text: str, at: int) -> list[tuple[str, str]] | None:
    closing, found = "</parameter>", []
    while (opened := _PARAMETER.match(text, at)) is not None:
        end = text.find(closing, opened.end())
        if end < 0:
            return None
        found.append((opened[1], text[opened.end() : end].removeprefix("\n").removesuffix("\n")))
        at = end + len(closing)
    return None if text[at:].strip() else found


def _value(text: str, schema: Mapping[str, Any], key: str) -> Any:
    properties = schema.get("properties")
    types = _types(properties.get(key) if isinstance(properties, dict) else None, schema, set())
    if types == {"string"}:
        return text
    value = read_json(text)
    if value is None and text.strip() != "null":
        value = _python_value(text.strip())
        return value if _types_of(value) & (types - {"string"}) else text
    if "string" in types and (isinstance(value, str) or not _types_of(value) & types):
        return text
    return value


_CONSTANTS = {"True": True, "False": False, "None": None}

LONGEST_LITERAL = 20_000
"""Characters of a dict or a list in Python's syntax: longer ones stay text."""


def _python_value(text: str) -> Any:
    """A constant, a dict or a list as Python writes it, where JSON has the same value; the text for any other."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    unknown_escape = re.search(r"\\[^'\"abfnrtvxuU]", text.replace("\\\\", ""))
    if not text.startswith(("{", "[")) or len(text) > LONGEST_LITERAL or unknown_escape:
        return text
    try:
        value = ast.literal_eval(text)
        written = write_json(value)
        return value if written is not None and json.loads(written) == value else text
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text


def _types(schema: Any, root: Mapping[str, Any], seen: set[str]) -> set[str]:
    """The JSON types that a schema names; ``seen`` are the references that were followed."""
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type")
    types = {one for one in (declared if isinstance(declared, list) else [declared]) if isinstance(one, str)}
    values = schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
    if not types:
        types = {name for value in values for name in _types_of(value)}
    for word in ("anyOf", "oneOf", "allOf"):
        for part in schema[word] if isinstance(schema.get(word), list) else ():
            types |= _types(part, root, seen)
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and reference not in seen:
        seen.add(reference)
        pointer: Any = root
        for name in reference[2:].split("/"):
            pointer = pointer.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(pointer, dict) else None
        types |= _types(pointer, root, seen)
    return types


def _types_of(value: Any) -> set[str]:
    """The names that a JSON schema has for the type of a value."""
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case str():
            return {"string"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number"}
    return {"object"} if isinstance(value, dict) else {"array"}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


def read_json(text: str) -> Any:
    """JSON text as data; None for text that is none, or whose data :func:`write_json` cannot write."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return value if write_json(value) is not None else None


def write_json(value: Any) -> str | None:
    """The value as JSON text; None for one with a half of a surrogate pair, or with a number beyond those of JSON."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (ValueError, RecursionError):
        return None
    return text


def _overlap(text: str, mark: str) -> int:
    """Length of the text's end that may be the beginning of ``mark``."""
    return next((n for n in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:n])), 0)


def read_whole(reader: CallReader, text: str) -> tuple[str, list[tuple[str, str]]]:
    """The text of a whole reply without its calls, and these: name and arguments."""
    pieces = reader.feed(text, last=True)
    calls = [(piece.name, piece.arguments) for piece in pieces if isinstance(piece, ToolCall)]
    return "".join(piece for piece in pieces if isinstance(piece, str)), calls


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


# --- writing ----------------------------------------------------------------------------------------------------------

INSTRUCTIONS = (
    "You may call one or more functions. These are their signatures, one JSON object a line, within <tools></tools>:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call a function, write a JSON object with its name and arguments within <tool_call></tool_call>:\n"
    '<tool_call>\n{{"name": "NAME", "arguments": {{}}}}\n</tool_call>'
)


@dataclass(frozen=True)
class ToolSupport:
    """The form of tools in a chat template."""

    style: Style
    argument: str = ""
    """The name under which it takes tools; empty: it does not."""
    calls: bool = False
    """Whether it writes the calls of an assistant's message."""
    results: bool = False
    """Whether it knows the role ``tool``."""
    fields: dict[str, Any] = field(default_factory=dict)

    def adapt(self, messages: Messages, tools: Sequence[Mapping[str, Any]]) -> tuple[Messages, dict[str, Any]]:
        """The conversation as the template can write it, and its further arguments."""
        written = [self._message(dict(message)) for message in messages]
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

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
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
        if message.get("role") == "tool" and not self.results:
            return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        return message

    def opening(self, name: str) -> str:
        """The text before a forced call of this tool in a reply: the rest is one JSON object."""
        if self.style == "harmony":
            return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>"
        return {"hermes": "<tool_call>\n", "llama3": "", "mistral": "[TOOL_CALLS]"}[self.style]


PROBE = "rookery_probe"


def support_of(template: str, render: Any) -> ToolSupport:
    """The form of tools in a template: ``render(messages, **arguments)`` is tried with each."""
    style = style_of(template)
    user = {"role": "user", "content": "?"}
    function = {"name": PROBE, "description": "?", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "abcdefghi", "type": "function", "function": {"name": PROBE, "arguments": {}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "content": PROBE, "tool_call_id": "abcdefghi", "name": "probe"}

    def writes(messages: Messages, **arguments: Any) -> bool:
        try:
            return PROBE in render(messages, **arguments)
        except (UserError, KeyError):
            return False

    tools = {"tools": [{"type": "function", "function": function}], "xml_tools": [function]}
    argument = next((name for name, value in tools.items() if writes([user], **{name: value})), "")
    calls = writes([user, called, {"role": "user", "content": "?"}]) or writes([user, called])
    plain = {**called, "tool_calls": [{**call, "function": {"name": "other", "arguments": {}}}]}
    results = bool(argument) and writes([user, plain if calls else {"role": "assistant", "content": "?"}, result])
    return ToolSupport(style if argument else "hermes", argument, calls, results)
