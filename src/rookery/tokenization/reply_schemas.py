"""JSON schemas of replies, as an engine's grammar gets them.

An object of a schema that declares its properties and does not say whether it allows others has these alone
(:func:`schema_of`): a model has nothing to go by for names that nobody declared, and a reply that may go on with them
ends only where it is cut off. vLLM's and xgrammar's strict modes read schemas so as well.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rookery.errors import UserError

MAPS = frozenset({"$defs", "definitions", "properties", "patternProperties", "dependentSchemas"})
"""Keywords of JSON schema whose value is an object of schemas by name."""

DATA = frozenset({"const", "enum", "default", "examples", "required", "type"})
"""Keywords whose value has no schema in it."""

COMBINING = frozenset({
    "allOf", "not", "if", "then", "else", "dependentSchemas", "dependencies", "extends", "unevaluatedProperties",
    "$dynamicRef", "$recursiveRef",
})  # fmt: skip
"""Keywords by which several schemas speak of one object: closed, one would refuse what another declares."""

ALTERNATIVES = frozenset({"anyOf", "oneOf", "$ref"})
"""Keywords that do so where they stand next to ``properties``."""

OPEN = frozenset({"additionalProperties", "patternProperties", "propertyNames", "dependentRequired"})
"""Keywords about properties other than the declared ones."""

NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
"""The parameters of a tool that names none, as OpenAI's API reads it."""


def schema_of(schema: Mapping[str, Any]) -> str:
    """A JSON schema as the text that an engine gets, its objects closed: each that declares properties gets
    ``additionalProperties: false``, unless it speaks of further ones, requires some or more of them, or the schema
    combines several into one object."""
    return json.dumps(_closed_unless_combined(schema), separators=(",", ":"))


def forced_schema(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The JSON schema of a call of one of these tools. Each tool's schema is a separate definition, to which its
    references point. Raises :class:`UserError` for one whose parts are not of the right type."""
    calls, definitions = [], {}
    for number, tool in enumerate(tools):
        function = tool["function"]
        pointer = f"#/$defs/tool{number}"
        described = function.get("parameters") or NOTHING
        if "$ref" not in described:  # a reply that is null, a number or a list calls nothing
            described = {**described, "type": "object"}
        parameters = _moved(_closed_unless_combined(described), pointer)
        definitions[f"tool{number}"] = {
            key: value for key, value in parameters.items() if key not in ("$id", "$schema")
        }
        calls.append({
            "type": "object",
            "properties": {"name": {"const": function["name"]}, "arguments": {"$ref": pointer}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        })  # fmt: skip
    return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "$defs": definitions}


def _parts(schema: Any) -> Iterator[Any]:
    """The schemas directly within a schema or a list of schemas."""
    if isinstance(schema, list):
        yield from schema
    elif isinstance(schema, Mapping):
        for key, value in schema.items():
            if key in MAPS and isinstance(value, Mapping):
                yield from value.values()
            elif key not in DATA:
                yield value


def _closed_unless_combined(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return schema if _combines(schema) else _closed(schema)


def _combines(schema: Any) -> bool:
    """Whether several schemas speak of one object anywhere in this one."""
    if isinstance(schema, Mapping):
        keys = schema.keys()
        if keys & COMBINING or ("properties" in keys and keys & ALTERNATIVES):
            return True
    return any(_combines(part) for part in _parts(schema))


def _rebuilt(schema: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a schema, or of a list of schemas, with ``change`` of the schemas directly within."""
    if isinstance(schema, list):
        return [change(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    rebuilt: dict[str, Any] = {}
    for key, value in schema.items():
        if key in MAPS and isinstance(value, Mapping):
            rebuilt[key] = {name: change(part) for name, part in value.items()}
        else:
            rebuilt[key] = value if key in DATA else change(value)
    return rebuilt


def _closed(schema: Any) -> Any:
    closed = _rebuilt(schema, _closed)
    if isinstance(schema, Mapping) and not schema.keys() & OPEN and _declares_all(schema):
        closed["additionalProperties"] = False
    return closed


def _declares_all(schema: Mapping[str, Any]) -> bool:
    """Whether an object can have all that is required with the declared properties alone. False without any, and for
    keywords of the wrong type, which the grammar refuses."""
    declared, required = schema.get("properties"), schema.get("required", [])
    least = schema.get("minProperties", 0)
    if not (isinstance(declared, Mapping) and isinstance(required, list) and isinstance(least, int | float)):
        return False
    return least <= len(declared) and all(isinstance(name, str) and name in declared for name in required)


def _moved(schema: Any, pointer: str) -> Any:
    """The schema where it stands at ``pointer`` of a document instead of at its root."""
    moved = _rebuilt(schema, partial(_moved, pointer=pointer))
    if isinstance(schema, Mapping):
        for key in MAPS & schema.keys():
            if not isinstance(schema[key], Mapping):
                raise UserError(f"{key} of a JSON schema must be an object")
        reference = schema.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            moved["$ref"] = pointer + reference[1:]
    return moved
