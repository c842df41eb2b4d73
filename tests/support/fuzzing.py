"""Strategies for inputs that look valid and are not: JSON bodies from a JSON schema, frames from message types."""

from __future__ import annotations

import logging
import struct
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Self

import msgspec
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from tests.support.draws import SEED, examples


def fuzzed(count: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator of a test with ``count`` examples of :data:`SEED`, none repeated to make it smaller: a service
    does not forget the first."""
    print(f"ROOKERY_FUZZ_SEED={SEED} repeats these examples")
    chosen = settings(
        max_examples=examples(count),
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    return lambda test: seed(SEED)(chosen(test))


ODD: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, 1, -1, 2**31, -(2**31) - 1, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64 - 1]),
    st.sampled_from([1e308, -0.0, 1e-40, 0.5]),
    st.sampled_from(["", "\0", "x" * 5000, "../..", "tinker://a/weights/b", "a/b", "%s", "\u2028\U0001f600", "-1"]),
    st.lists(st.integers(-5, 300), max_size=4),
    st.lists(st.none(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(-(2**63), 2**64 - 1), max_size=2),  # all that MessagePack holds
    st.just([[[[[]]]]]),
)
"""JSON values at the edges of what a field may hold."""


def of_schema(schema: Mapping[str, Any], root: Mapping[str, Any] | None = None) -> st.SearchStrategy[Any]:
    """JSON values that a JSON schema of pydantic's allows, and a few that it does not."""
    root = schema if root is None else root
    if "$ref" in schema:
        return of_schema(root["$defs"][schema["$ref"].rpartition("/")[2]], root)
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return st.one_of([of_schema(choice, root) for choice in schema[key]])
    if "const" in schema or "enum" in schema:
        return st.sampled_from([schema["const"]] if "const" in schema else schema["enum"])
    match schema.get("type"):
        case "object" if "properties" in schema:
            fields = {name: of_schema(part, root) for name, part in schema["properties"].items()}
            needed = {name: fields.pop(name) for name in schema.get("required", ())}
            return st.fixed_dictionaries(needed, optional=fields)
        case "object":
            return st.dictionaries(st.text(max_size=5), ODD, max_size=3)
        case "array":
            return st.lists(of_schema(schema.get("items", {}), root), max_size=4)
        case "integer":
            return st.integers(0, 40) | st.integers()
        case "number":
            return st.floats(0, 1) | st.floats(allow_nan=False, allow_infinity=False)
        case "boolean":
            return st.booleans()
        case "string":
            return st.text(max_size=12)
        case "null":
            return st.none()
    return ODD


@st.composite
def mangled(draw: st.DrawFn, values: st.SearchStrategy[Any], odd: st.SearchStrategy[Any] = ODD) -> Any:
    """Values in which up to two places are removed or replaced by odd ones."""
    value = draw(values)
    for _ in range(draw(st.integers(0, 2))):
        value = _replace(draw, value, odd)
    return value


def _replace(draw: st.DrawFn, value: Any, odd: st.SearchStrategy[Any]) -> Any:
    if isinstance(value, dict) and value and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(value, key=str)))
        if draw(st.integers(0, 4)) == 0:
            return {name: inner for name, inner in value.items() if name != key}
        return {**value, key: _replace(draw, value[key], odd)}
    if isinstance(value, list) and value and draw(st.integers(0, 9)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], _replace(draw, value[at], odd), *value[at + 1 :]]
    return draw(odd)


def of_type(kind: Any, names: Mapping[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Plain values (dicts, lists, numbers …) of a type in a message; ``names`` has strategies of fields by name."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return of_type(arguments[0], names)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([of_type(choice, names) for choice in arguments])
    if origin is list:
        return st.lists(of_type(arguments[0], names), max_size=3)
    if origin is tuple:
        return st.tuples(*(of_type(part, names) for part in arguments)).map(list)
    if origin is dict or kind is dict:
        return st.dictionaries(st.text(max_size=5), st.floats() | st.integers(-9, 9), max_size=3)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return message(kind, names)
    plain: dict[Any, st.SearchStrategy[Any]] = {
        int: st.integers(-3, 70) | st.integers(-(2**63), 2**64 - 1),
        float: st.floats(),
        bool: st.booleans(),
        bytes: st.binary(max_size=20),
        str: st.text(max_size=12),
        type(None): st.none(),
    }
    return plain[kind]


def message(kind: type[msgspec.Struct], names: Mapping[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """A message, or a part of one, as a plain dict."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {name: names[name] if name in names else of_type(hint, names) for name, hint in hints.items()}
    needed = {field.name: fields.pop(field.name) for field in msgspec.structs.fields(kind) if field.required}
    whole = st.fixed_dictionaries(needed, optional=fields)
    tag = kind.__struct_config__.tag
    return whole if tag is None else whole.map(lambda value: {"type": tag, **value})


EPOCH = (1 << 40) + 7
"""Stands in a frame for the epoch of the connection: :func:`of_epoch`."""


def of_epoch(frame: bytes, epoch: int) -> bytes:
    """The frame as it is sent on the connection with that epoch."""
    return frame.replace(struct.pack(">BQ", 0xCF, EPOCH), struct.pack(">BQ", 0xCF, epoch))


def frames(kinds: Iterable[Any], names: Mapping[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[bytes]:
    """Frames: a valid message, one with odd values, one cut or changed in a byte, one that announces four billion
    items, or random bytes."""
    odd = ODD | st.binary(max_size=8) | st.just(list(range(2000)))
    whole = st.one_of([message(kind, names) for kind in kinds])
    wrong = mangled(whole, odd)
    counts = st.sampled_from([lead + b"\xff\xff\xff\xff" for lead in (b"\xdd", b"\xdf", b"\xc6", b"\xdb")])
    inserted = st.one_of(st.binary(min_size=1, max_size=1), counts)

    @st.composite
    def one(draw: st.DrawFn) -> bytes:
        damage = draw(st.sampled_from(["none", "none", "odd", "cut", "bytes", "random"]))
        if damage == "random":
            return draw(st.binary(max_size=200))
        frame = msgspec.msgpack.encode(draw(wrong if damage == "odd" else whole))
        at = draw(st.integers(0, len(frame) - 1))
        if damage == "cut":
            return frame[:at]
        return frame[:at] + draw(inserted) + frame[at + 1 :] if damage == "bytes" else frame

    return one()


def tuned(**fields: Any) -> dict[str, st.SearchStrategy[Any]]:
    """Strategies by field name: mostly one of the given values, sometimes anything."""
    choose: Callable[[Any], st.SearchStrategy[Any]] = lambda given: (  # noqa: E731
        given if isinstance(given, st.SearchStrategy) else st.sampled_from(given)
    )
    return {name: choose(given) for name, given in fields.items()}


class Failures(logging.Handler):
    """Collects the errors that the service logs during the ``with`` block: none of a client's making is one."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            self.records.append(logging.Formatter().format(record))

    def __enter__(self) -> Self:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *ended: object) -> None:
        logging.getLogger().removeHandler(self)
