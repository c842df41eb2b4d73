"""Bounds of everything that a stranger sends, as annotated types for pydantic models and msgspec structs alike.

A text, a list, a mapping, a number or any JSON that a client, an environment host or a worker sends has its bound where
its field is declared: the sender is refused before anything is copied, compared, logged or stored.
``tests/test_bounds.py`` walks the schemas and fails for a field without one. Sizes of whole requests and messages are
limited first, by :mod:`rookery.settings`; these bounds say how a request may spend them.

Models of such data derive from :class:`GivenModel`: a number is a number.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Le, MaxLen, MinLen
from msgspec import Meta
from pydantic import AfterValidator, BaseModel, ConfigDict, GetCoreSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

NAME, LINE, ERROR = 200, 4096, 1 << 16
"""Characters of a name; of a path, an address or a description; of an error, which may bring a story."""

GIVEN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
"""The form of a name that a user gives to a job, a tenant or a secret; with a bound of 100 characters."""

PRINTABLE, HASH, FUNCTION, TAG = r"^[!-~]+$", r"^[0-9a-f]{64}$", r"^[a-zA-Z0-9_.-]+$", r"^\w[\w.-]*$"
SUFFIX, EXPERIMENT = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", r"^[A-Za-z0-9/][A-Za-z0-9._/@ -]{0,199}$"
MODEL_NAME, ORDER = r"^[a-z][a-z0-9]{0,30}$", "^(asc|desc)$"
FORMS = {
    GIVEN_NAME: "1 to 100 letters, digits, dots, dashes or underscores, the first one a letter or digit",
    PRINTABLE: "one word of printable ASCII characters",
    HASH: "64 digits and letters a to f, the SHA-256 of an upload",
    FUNCTION: "letters, digits, dots, dashes and underscores",
    TAG: "letters, digits, dots, dashes and underscores, the first one none of dot and dash",
    SUFFIX: "1 to 64 letters, digits, dots, dashes or underscores, the first one a letter or digit",
    EXPERIMENT: "1 to 200 letters, digits, spaces or characters of . _ / @ -, the first one a letter, digit or slash",
    MODEL_NAME: "1 to 31 lower-case letters or digits, the first one a letter",
    ORDER: "asc or desc",
}
"""Each form of a text in words: no error shows a regular expression."""

LONGEST_TEXT = 1 << 24
"""Characters of a text that a model reads or writes. The limits of a request's bytes are lower."""

STOP_TEXTS, STOP_TEXT = 16, 1000
"""Texts that end a reply, and the characters of each: they travel with every request of a job."""

MESSAGES, METRICS = 256, 100
"""Messages and metrics in one answer of an environment; also the metrics of an episode, and of all of a step."""

METRIC_LETTERS = METRICS * NAME // 2
"""Characters of the names of an episode's metrics together, and of those of a step: they are stored with each."""

MAX_FRAME = 64 << 20
"""Size limit of one frame of the protocol in bytes; an end closes a connection that brings a larger one. The largest
frames carry an environment's texts and options with a job's rows, so senders of a tenant's texts check the size
first."""

ENTRIES = 1 << 20
"""Items of a list of tokens, chunks or hashes: more than the longest context has."""

CONVERSATION, PROMPTS = 2048, 1024
"""Messages of one conversation, as in OpenAI's API, and prompts of one request. Checking a message takes 6 µs in which
nothing else runs; each takes some tokens of the context."""

PARTS = 4096
"""Parts of text and calls of tools in all messages of one conversation. Checking one takes 4 to 8 µs."""

CHUNKS = 32 << 10
"""Chunks of one prompt, of which a client may make one for each token."""

TOOLS = 128
"""Tools of one request or row, and calls of one message, as in OpenAI's API."""

METADATA = 16 << 10
"""Bytes of a client's own metadata as JSON: it is stored, and returned with every listing."""

SETTINGS = 64 << 10
"""Bytes of a field's JSON that no model describes further, such as an ignored argument."""

FLOAT32 = 3.4e38
"""Numbers below it are finite in float32, in which adapters are scaled."""

FLOAT32_LEAST = 1.2e-38
"""Numbers from it on are not 0 in float32, on any device."""

INTEGER = 2**63 - 1
"""The largest integer of the database and of the protocol."""


def _in_one_line(text: str) -> str:
    if not text.isprintable():
        raise ValueError("printable characters, in one line")
    return text


Name = Annotated[str, MaxLen(NAME), Meta(max_length=NAME)]
Line = Annotated[str, MaxLen(LINE), Meta(max_length=LINE)]
ErrorText = Annotated[str, MaxLen(ERROR), Meta(max_length=ERROR)]
Text = Annotated[str, MaxLen(LONGEST_TEXT), Meta(max_length=LONGEST_TEXT)]
StopText = Annotated[str, MinLen(1), MaxLen(STOP_TEXT)]
ONE_LINE = AfterValidator(_in_one_line)
"""Of a text that commands and tables show as it is."""
SiteName = Annotated[Name, ONE_LINE]
"""The name of a place."""
Count = Annotated[int, Ge(0), Le(INTEGER), Meta(ge=0, le=INTEGER)]
Integer = Annotated[int, Ge(-INTEGER), Le(INTEGER), Meta(ge=-INTEGER, le=INTEGER)]
Token = Annotated[int, Ge(0), Le(2**31 - 1), Meta(ge=0, le=2**31 - 1)]


@dataclass(frozen=True)
class JsonSize:
    """The value has at most about ``most`` bytes as JSON."""

    most: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self._check, handler(source))

    def _check(self, value: Any) -> Any:
        if not is_small(value, self.most):
            raise ValueError(f"it has more than {self.most} bytes; give less")
        return value


_WITHIN = ("schema", "items_schema", "keys_schema", "values_schema", "extras_schema", "choices", "fields", "steps")
"""The keys of pydantic's schemas under which further schemas stand."""


LONGEST_NUMBER = 40
"""Characters of a text that is repeated as a number."""

_WRITTEN = re.compile("([-+]?[0-9]+)([.][0-9]*)?([eE][-+]?[0-9]+)?")

BOOLEANS = {"true": ("true", "yes", "on", "y", "t", "1"), "false": ("false", "no", "off", "n", "f", "0")}
"""Words of YAML 1.1 and of variables that mean a boolean: in JSON and in YAML 1.2 they are texts."""


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("boolean_for_number", "Input should be a number, neither true nor false")
    return value


def _no_number(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise PydanticCustomError("number_for_boolean", "Input should be true or false, not a number")
    return value


def _number(value: Any) -> Any:
    if isinstance(value, str):
        written = _WRITTEN.fullmatch(value) if len(value) <= LONGEST_NUMBER else None
        point = ".0" if written and written[3] and not written[2] else ""  # without it PyYAML reads a text
        meant = f", without quotes: {written[1]}{point}{written[2] or ''}{written[3] or ''}" if written else ""
        raise PydanticCustomError("text_for_number", "Input should be a number{meant}", {"meant": meant})
    return _no_boolean(value)


def _boolean(value: Any) -> Any:
    if isinstance(value, str):
        meant = next((meaning for meaning, words in BOOLEANS.items() if value.lower() in words), "")
        meant = meant and f", without quotes: {meant}"
        raise PydanticCustomError("text_for_boolean", "Input should be true or false{meant}", {"meant": meant})
    return _no_number(value)


def _literal(schema: Any) -> Any:
    """A schema of given values, among which a boolean is equal to no number: ``True == 1`` in Python."""
    kinds = {isinstance(value, bool) for value in schema["expected"] if isinstance(value, int | float)}
    if len(kinds) != 1:
        return schema
    return core_schema.no_info_before_validator_function(_no_number if True in kinds else _no_boolean, schema)


_CHECKS = {"int": _number, "float": _number, "bool": _boolean}
"""The checks of the numbers and booleans of a schema, by their type."""


def _with_kinds(schema: Any, *, in_list: bool = False) -> Any:
    """A schema whose numbers refuse booleans and texts, and whose booleans refuse numbers and texts. Integers in lists,
    such as 200,000 tokens, refuse anything else as well, which takes no call for each."""
    if isinstance(schema, list | tuple):
        return type(schema)(_with_kinds(one) for one in schema)
    kind = schema.get("type") if isinstance(schema, dict) else None
    if kind == "int" and in_list:
        return {**schema, "strict": True}
    if kind in tuple(_CHECKS):  # that of a field called type is a schema
        return core_schema.no_info_before_validator_function(_CHECKS[kind], schema)
    if kind == "literal":
        return _literal(schema)
    if isinstance(kind, str) and not (
        kind == "function-before" and schema["function"]["function"] in (_no_boolean, _no_number, _number, _boolean)
    ):
        for key in _WITHIN:
            if key in schema:
                schema[key] = _with_kinds(schema[key], in_list=kind == "list")
    elif isinstance(schema, dict) and not isinstance(kind, str):  # fields or choices by name
        return {name: _with_kinds(one) for name, one in schema.items()}
    return schema


class GivenModel(BaseModel):
    """Base of models whose data a stranger gives. A boolean or a text is no number and a number or a text no boolean,
    also in a list or a mapping; neither NaN nor an infinity is a number: JSON has none."""

    model_config = ConfigDict(allow_inf_nan=False)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: CoreSchema = _with_kinds(handler(source))
        return schema


SmallJson = Annotated[Any, JsonSize(SETTINGS)]
Metadata = Annotated[dict[str, Any], JsonSize(METADATA)]


def metrics_problem(names: Iterable[str]) -> str:
    """Why an episode cannot have metrics of these names, to follow the name of their giver; empty where it can."""
    given = [*names]
    if len(given) > METRICS:
        return f"gave {len(given)} different metrics, allowed: {METRICS}"
    letters = sum(map(len, given))
    if letters > METRIC_LETTERS:
        return f"gave metrics whose names have {letters} characters together, allowed: {METRIC_LETTERS}"
    return ""


def check_parts(messages: Any, *fields: str) -> Any:
    """``messages`` of JSON-like data, whose lists in ``fields`` have at most :data:`PARTS` items in all; those of
    reasoning are not read. Raises ``ValueError``."""
    given = messages if isinstance(messages, list) else []
    found = [message for message in given if isinstance(message, dict) and message.get("type") != "reasoning"]
    lists = [message[field] for message in found for field in fields if isinstance(message.get(field), list)]
    if (parts := sum(map(len, lists))) > PARTS:
        raise ValueError(f"at most {PARTS} parts and calls in all messages; given {parts}")
    return messages


def mistake(error: Any) -> str:
    """The mistake of one of pydantic's errors, as a sentence."""
    if error["type"] == "string_pattern_mismatch":
        return f"String should be {FORMS[error['ctx']['pattern']]}"
    return str(error["msg"]).removeprefix("Value error, ")


def is_small(value: Any, most: int) -> bool:
    """Whether JSON-like data has at most about ``most`` bytes. Looks at no more of it than that."""
    left = [value]
    while left:
        part = left.pop()
        most -= 2
        if isinstance(part, str):
            most -= len(part) if part.isascii() else len(part.encode("utf-8", "replace"))
        elif isinstance(part, dict):
            most -= len(part)
            if most < 0:
                return False
            left += part.keys()
            left += part.values()
        elif isinstance(part, list | tuple):
            most -= len(part)
            if most < 0:
                return False
            left += part
        elif isinstance(part, int):
            most -= part.bit_length() // 3
        else:
            most -= 8
        if most < 0:
            return False
    return True
