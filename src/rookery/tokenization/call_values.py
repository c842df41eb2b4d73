"""Values of tool calls as JSON: read from JSON, from XML by the schemas of the tools, from Python's syntax, and from
Gemma's. Text that is none of these is no call."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class ToolCall:
    """``arguments`` is JSON text of an object."""

    name: str
    arguments: str


def json_calls(
    text: str, separator: str | None = None, usual: Callable[[Any], Any] | None = None
) -> Iterator[ToolCall]:
    """The calls of a JSON object or a list of them, with a ``separator`` also of several; none unless all are calls.
    ``usual`` gives an object of another form the usual fields."""
    at, found = 0, []
    text = text.strip()
    while at < len(text):
        try:
            value, end = DECODER.raw_decode(text, at)
        except (ValueError, RecursionError):
            return
        for one in value if isinstance(value, list) else [value]:
            call = call_of(one if usual is None else usual(one))
            if call is None:
                return
            found.append(call)
        rest = text[end:].lstrip()
        if rest and (separator is None or not rest.startswith(separator)):
            return
        at = len(text) - len(rest.removeprefix(separator or "").lstrip())
    yield from found


def call_of(value: Any) -> ToolCall | None:
    """The call of a JSON object; None for one that is none."""
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    if not value.keys() & {"arguments", "parameters"} and value.keys() - {"name", "type", "id"}:
        return None  # data, or a call whose arguments stand elsewhere
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = read_json(arguments)
    return made_call(value["name"], arguments)


def made_call(name: str, arguments: Any) -> ToolCall | None:
    """None for arguments that are no object, or that JSON cannot hold."""
    written = write_json(arguments) if isinstance(arguments, dict) else None
    return None if written is None or write_json(name) is None else ToolCall(name, written)


@dataclass(frozen=True)
class XmlForm:
    """How calls are written in tags: what opens a call and a parameter, each with its name, and what ends a call."""

    call: re.Pattern[str]
    parameter: re.Pattern[str]
    """With a group ``string``, ``true`` or ``false``, the tag itself says whether its value is a text or JSON."""
    end: str
    parameter_end: str = "</parameter>"
    lines: bool = False
    """Values stand on lines of their own: a line end before and after one is none of it."""


FUNCTIONS = XmlForm(re.compile(r"\s*<function=([^>\s]+)>"), re.compile(r"\s*<parameter=([^>\s]+)>"), "</function>")
FUNCTIONS_ON_LINES = replace(FUNCTIONS, lines=True)
INVOCATIONS = XmlForm(
    re.compile(r"\s*<invoke name=\"([^\">]+)\">"), re.compile(r"\s*<parameter name=\"([^\">]+)\">"), "</invoke>"
)
DSML = XmlForm(
    re.compile(r"\s*<｜DSML｜invoke name=\"([^\">]+)\">"),
    re.compile(r"\s*<｜DSML｜parameter name=\"([^\">]+)\" string=\"(?P<string>true|false)\">"),
    "</｜DSML｜invoke>",
    "</｜DSML｜parameter>",
)


def xml_calls(text: str, form: XmlForm, parameters: Mapping[str, Mapping[str, Any]]) -> Iterator[ToolCall]:
    """A parameter is JSON or a value of Python, or text: as its tag says, else as its schema declares it, and where
    neither does, text that is no JSON. There is no call where other text stands between the parameters or the calls."""
    at, calls = 0, []
    while text[at:].strip():
        named = form.call.match(text, at)
        found = None if named is None else _xml_parameters(text, named.end(), form)
        if named is None or found is None or not text.startswith(form.end, found[1]):
            return
        at = found[1] + len(form.end)
        if "string" in form.parameter.groupindex:
            given = _stated(found[0])
        else:
            given = typed([(opened[1], value) for opened, value in found[0]], parameters.get(named[1], {}))
        call = made_call(named[1], given)
        if call is None:
            return
        calls.append(call)
    yield from calls


def _xml_parameters(text: str, at: int, form: XmlForm) -> tuple[list[tuple[re.Match[str], str]], int] | None:
    """Opening tags and texts, and the place of the first text that is not white space after them."""
    found = []
    while (opened := form.parameter.match(text, at)) is not None:
        end = text.find(form.parameter_end, opened.end())
        if end < 0:
            return None
        value = text[opened.end() : end]
        found.append((opened, value.removeprefix("\n").removesuffix("\n") if form.lines else value))
        at = end + len(form.parameter_end)
    return found, len(text) - len(text[at:].lstrip())


def _stated(given: list[tuple[re.Match[str], str]]) -> dict[str, Any] | None:
    """Values of parameters whose tags say which are texts; None where a name stands twice, or another is no JSON."""
    values = {}
    for opened, text in given:
        value = text if opened["string"] == "true" else read_json(text)
        if opened[1] in values or (value is None and text.strip() != "null"):
            return None
        values[opened[1]] = value
    return values


_GLM_CALL = re.compile(r"\s*([^\s<]+)")
_GLM_KEY = re.compile(r"\s*<arg_key>([^<]*)</arg_key>\s*<arg_value>")


def glm_calls(text: str, names: frozenset[str], parameters: Mapping[str, Mapping[str, Any]]) -> Iterator[ToolCall]:
    """``NAME <arg_key>KEY</arg_key> <arg_value>VALUE</arg_value>``, values as in :func:`xml_calls`. A call without
    arguments is that of a known name."""
    named = _GLM_CALL.match(text)
    if named is None:
        return
    at, found, closing = named.end(), list[tuple[str, str]](), "</arg_value>"
    while (key := _GLM_KEY.match(text, at)) is not None:
        end = text.find(closing, key.end())
        if end < 0:
            return
        found.append((key[1], text[key.end() : end]))
        at = end + len(closing)
    call = made_call(named[1], typed(found, parameters.get(named[1], {})))
    if call is not None and not text[at:].strip() and (found or named[1] in names):
        yield call


def typed(given: list[tuple[str, str]], schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Texts of arguments as their schema declares them; None where a name stands twice."""
    values = {key: _value(text, schema, key) for key, text in given}
    return values if len(values) == len(given) else None


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


def unique(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    """The fields as an object. Raises ``ValueError`` where one stands twice."""
    found = dict(fields)
    if len(found) < len(fields):
        raise ValueError("a field stands twice")
    return found


DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=unique)


def read_json(text: str) -> Any:
    """JSON text as data; None for text that is none, or whose data :func:`write_json` cannot write."""
    try:
        value = DECODER.decode(text)
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


_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPES = frozenset("\\'\"abfnrtvxuUN01234567\n")
"""Characters after a backslash that Python reads with it; any other stands for itself."""

_STRING = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)

_NAMES = {"true": True, "false": False, "null": None}
"""Constants of JSON, as some templates write them in Python's syntax."""


def python_calls(text: str) -> Iterator[ToolCall]:
    """``[NAME(KEY=VALUE, …), …]``, or a call a line. A line may end within a text: templates write texts as they
    are."""
    text = text.strip()
    if len(text) > LONGEST_LITERAL:
        return
    text = _ESCAPE.sub(lambda found: found[0] if found[1] in _ESCAPES else rf"\\{found[1]}", text)
    text = _STRING.sub(lambda found: found[0].replace("\n", "\\n"), text)
    try:
        calls = [_python_call(node) for node in _called(ast.parse(text))]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return
    if None not in calls:
        yield from (call for call in calls if call)


def _called(module: ast.Module) -> Iterator[ast.expr]:
    for statement in module.body:
        if not isinstance(statement, ast.Expr):
            raise ValueError("a statement is no call")
        yield from statement.value.elts if isinstance(statement.value, ast.List) else [statement.value]


def _python_call(node: ast.expr) -> ToolCall | None:
    """Raises ``ValueError`` for anything but a call with named arguments that are data."""
    if not isinstance(node, ast.Call) or node.args or any(one.arg is None for one in node.keywords):
        raise ValueError("no call with named arguments")
    return made_call(_dotted(node.func), unique([(str(one.arg), _literal(one.value)) for one in node.keywords]))


def _dotted(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=owner, attr=name):
            return f"{_dotted(owner)}.{name}"
    raise ValueError("no name")


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=None | bool() | int() | float() | str() as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=parts):
            return [_literal(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            return unique([(_key(key), _literal(value)) for key, value in zip(keys, values, strict=True)])
    raise ValueError("no data")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("no key")


_GEMMA_CALL = re.compile(r"\s*call:([^\s{}<]+)(?=\{)")
_GEMMA_KEY = re.compile(r"\s*([^\s:,{}\[\]<]+)\s*:")
_GEMMA_WORD = re.compile(r"[^,{}\[\]<]+")


def gemma_calls(text: str, quote: str) -> Iterator[ToolCall]:
    """``call:NAME{KEY:VALUE,…}``: texts stand between two ``quote``, keys may."""
    named = _GEMMA_CALL.match(text)
    if named is None:
        return
    try:
        arguments, end = _gemma_value(text, named.end(), quote)
    except (ValueError, RecursionError):
        return
    call = made_call(named[1], arguments)
    if call is not None and not text[end:].strip():
        yield call


def _gemma_value(text: str, at: int, quote: str) -> tuple[Any, int]:
    """A value and the place after it. Raises ``ValueError`` for text that is none."""
    at = _after_space(text, at)
    if text.startswith(quote, at):
        end = text.index(quote, at + len(quote))
        return text[at + len(quote) : end], end + len(quote)
    opening = text[at : at + 1]
    if opening in ("{", "["):
        return _gemma_parts(text, at + 1, quote, opening)
    word = _GEMMA_WORD.match(text, at)
    if word is None or not word[0].strip():
        raise ValueError("no value")
    written = word[0].strip()
    value = None if written in ("null", "None") else read_json(written)
    return written if value is None and written not in ("null", "None") else value, word.end()


def _gemma_parts(text: str, at: int, quote: str, opening: str) -> tuple[Any, int]:
    found: list[tuple[str, Any]] = []
    closing = "}" if opening == "{" else "]"
    while not text.startswith(closing, at := _after_space(text, at)):
        key = ""
        if opening == "{":
            key, at = _gemma_key(text, at, quote)
        value, at = _gemma_value(text, at, quote)
        found.append((key, value))
        at = _after_space(text, at)
        if text.startswith(",", at):
            at += 1
        elif not text.startswith(closing, at):
            raise ValueError("no end")
    return (unique(found) if opening == "{" else [value for _, value in found]), at + 1


def _gemma_key(text: str, at: int, quote: str) -> tuple[str, int]:
    if text.startswith(quote, at):
        end = text.index(quote, at + len(quote))
        if not text.startswith(":", end + len(quote)):
            raise ValueError("no key")
        return text[at + len(quote) : end], end + len(quote) + 1
    named = _GEMMA_KEY.match(text, at)
    if named is None:
        raise ValueError("no key")
    return named[1], named.end()


def _after_space(text: str, at: int) -> int:
    while text[at : at + 1].isspace():
        at += 1
    return at
