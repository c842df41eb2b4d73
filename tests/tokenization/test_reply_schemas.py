"""Objects of a reply's schema have their declared properties alone where the schema says nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from rookery.errors import UserError
from rookery.tokenization.grammar import COMPACT, check_followed
from rookery.tokenization.reply_schemas import forced_schema, schema_of

ON = {"on": {"type": "boolean"}}
FLAG: dict[str, Any] = {"type": "object", "properties": ON, "required": ["on"]}
CLOSED = FLAG | {"additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (FLAG, CLOSED),
        ({"type": "object", "properties": {}}, {"type": "object", "properties": {}, "additionalProperties": False}),
        ({"type": "array", "items": FLAG}, {"type": "array", "items": CLOSED}),
        ({"type": "array", "prefixItems": [FLAG]}, {"type": "array", "prefixItems": [CLOSED]}),
        ({"$ref": "#/$defs/F", "$defs": {"F": FLAG}}, {"$ref": "#/$defs/F", "$defs": {"F": CLOSED}}),
        ({"anyOf": [FLAG, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        (
            {"properties": {"a": FLAG}, "additionalProperties": FLAG},
            {"properties": {"a": CLOSED}, "additionalProperties": CLOSED},
        ),
        ({"const": FLAG}, {"const": FLAG}),
    ],
)
def test_objects_that_declare_properties_are_closed(schema: dict[str, Any], closed: dict[str, Any]) -> None:
    assert json.loads(schema_of(schema)) == closed
    assert json.loads(schema_of(closed)) == closed


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        FLAG | {"additionalProperties": True},
        FLAG | {"additionalProperties": {"type": "integer"}},
        FLAG | {"patternProperties": {"^x": {}}},
        FLAG | {"propertyNames": {"pattern": "^x|on$"}},
        FLAG | {"required": ["on", "off"]},
        FLAG | {"minProperties": 2},
        FLAG | {"dependentRequired": {"on": ["off"]}},
        FLAG | {"required": 5},
        FLAG | {"required": [[]]},
        FLAG | {"minProperties": "a"},
        {"properties": [], "type": "object"},
        {"allOf": [FLAG, {"type": "object", "properties": {"b": {}}}]},
        {"properties": {"a": {"not": FLAG}}},
        FLAG | {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"$defs": {"base": FLAG}, "$ref": "#/$defs/base", "properties": {"b": {}}},
        {"if": FLAG, "then": {"properties": {"c": {}}}},
    ],
)
def test_objects_that_may_need_other_properties_stay_open(schema: dict[str, Any]) -> None:
    assert json.loads(schema_of(schema)) == schema


def test_tools_are_closed_each_by_itself() -> None:
    both = {"allOf": [FLAG, {"type": "object", "properties": {"b": {}}}]}
    named = {"closed": FLAG, "open": both, "empty": None}
    tools = [{"type": "function", "function": {"name": name, "parameters": given}} for name, given in named.items()]
    schema = schema_of(forced_schema(tools))
    definitions = json.loads(schema)["$defs"]
    assert definitions["tool0"] == CLOSED
    assert definitions["tool1"] == both | {"type": "object"}
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides=COMPACT)
    for call, fits in [
        ({"name": "closed", "arguments": {"on": True}}, True),
        ({"name": "closed", "arguments": {"on": True, "off": 1}}, False),
        ({"name": "open", "arguments": {"on": True, "b": 1, "c": 2}}, True),
        ({"name": "empty", "arguments": {}}, True),
        ({"name": "empty", "arguments": {"a": 1}}, False),
    ]:
        matcher = LLMatcher(LLTokenizer("byte"), grammar)
        assert (matcher.consume_tokens(list(json.dumps(call).encode())) and matcher.is_accepting()) == fits, call


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": ON, "required": ["on"]},
        FLAG | {"type": ["object", "null"]},
        {"anyOf": [FLAG, {"type": "null"}, {"type": "integer"}]},
        {"description": "on or off", "properties": ON},
    ],
)
def test_the_arguments_of_a_forced_call_are_an_object(parameters: dict[str, Any]) -> None:
    schema = schema_of(forced_schema([{"type": "function", "function": {"name": "f", "parameters": parameters}}]))
    grammar = LLMatcher.grammar_from_json_schema(schema, overrides=COMPACT)
    for arguments, fits in [({"on": True}, True), (None, False), (5, False), ([], False), ("a", False)]:
        matcher = LLMatcher(LLTokenizer("byte"), grammar)
        call = json.dumps({"name": "f", "arguments": arguments})
        assert (matcher.consume_tokens(list(call.encode())) and matcher.is_accepting()) == fits, call


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"$ref": "#"}, "no reply can begin; a $ref may lead to itself alone"),
        ({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "no reply can begin"),
        ({"enum": []}, "anyOf is empty"),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum (5) is greater than maximum (2)"),
    ],
)
def test_a_schema_that_no_reply_can_follow_is_refused_in_plain_words(schema: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError) as refused:
        check_followed(json.dumps(schema))
    line = str(refused.value)
    assert line.startswith("the schema cannot be followed: ") and reason in line
    assert "Extension" not in line and "<" not in line
