"""The JSON values that users give: rows, prompts, options of environments, job files.

:func:`decode` and :func:`encode` are the round trip that a run does with each of them. A value that passes here passes
in the environment host, in messages, in the database, in a tokenizer and in responses, and is the same value there.
They refuse texts with half of a character, numbers beyond 64 bits, deep nesting, and fields that are given twice.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from decimal import Context, Decimal
from typing import Any, NoReturn

from rookery.errors import count_of, short

MAX_DEPTH = 64
"""Deepest nesting of a value, as for the JSON bodies of requests. Results hold a prompt a few levels deeper, and their
serializer allows 255."""

INTEGERS = range(-(2**63), 2**64)
"""Integers that messages, databases and other languages carry."""

_ESCAPED = re.compile(r"\\u[dD][89a-fA-F]")
"""An escape that may be half of a character."""
_HALF = re.compile("[\ud800-\udfff]")

_WHOLE = "a whole number from -2^63 to 2^64 - 1, or a text"
_FINITE = "a finite number, or a text"
_RANGE = "a number between 5e-324 and 1.8e308, or a text"
_TOO_DEEP = f"nested more than {MAX_DEPTH} deep; make it flatter, or write the inner part as a text"


class ValueRefused(ValueError):
    """A value that a run cannot carry; its text is one line: the path of the field, the mistake, the remedy."""


class Rounded(float):
    """A number of a JSON text with digits that a float does not have; ``written`` has them all."""

    written: str

    @property
    def loss(self) -> str:
        """The part of the line that refuses it: the number as it is written, its value, and the remedy."""
        return f"{short(self.written)}, which would become {self!r} in this row; quote it, as a text"


class _Mistake:
    """Stands in a decoded value at the place of a mistake."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


LONGEST_SHOWN = 200
"""Characters of a given text that are looked at for an error's line."""


def decode(content: bytes) -> Any:
    """The value in JSON. Raises :class:`ValueRefused`; ``json.JSONDecodeError`` for other text, and
    ``UnicodeDecodeError``."""
    text = content.decode()
    try:
        value = _strict.decode(text)
    except RecursionError:
        raise ValueRefused(_TOO_DEEP) from None
    except json.JSONDecodeError:
        raise
    except ValueError:
        check(_tolerant.decode(text))
        raise
    if text.count("[") + text.count("{") > MAX_DEPTH or _ESCAPED.search(text) is not None:
        check(value)
    return value


def decode_written(content: bytes) -> Any:
    """The value in JSON that :func:`decode` takes, with numbers that are not what is written as :class:`Rounded`."""
    return _written.decode(content.decode())


def encode(value: Any) -> bytes:
    """A value as JSON that :func:`decode` takes; tuples become lists, and keys texts. Raises :class:`ValueRefused`."""
    try:
        content = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        check(value)
        raise ValueRefused(f"not JSON: {' '.join(str(error).split())}") from None
    decode(content)
    return content


def check(value: Any, path: str = "") -> None:
    """Raises :class:`ValueRefused` for the first mistake in a value, below the field ``path``."""
    for problem in problems(value, path):
        raise ValueRefused(problem)


def lost_digits(value: Any, path: str = "") -> Iterator[str]:
    """One line per number of a value of :func:`decode_written` that is not what is written."""
    left: list[tuple[Any, str]] = [(value, path)]
    while left:
        value, path = left.pop()
        if isinstance(value, Rounded):
            yield _at(path, f"given {value.loss}")
        elif isinstance(value, dict | list):
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            left += [(entry, f"{path}.{_name(key)}".removeprefix(".")) for key, entry in reversed([*inner])]


def problems(value: Any, path: str = "") -> Iterator[str]:
    """One line per mistake in a value that was made from JSON or YAML or in Python."""
    left: list[tuple[Any, str, int]] = [(value, path, 0)]
    while left:
        value, path, depth = left.pop()
        if isinstance(value, dict | list | tuple):
            if depth >= MAX_DEPTH:
                yield _at(path.partition(".")[0], _TOO_DEEP)
                return
            if isinstance(value, dict):
                for key in value:
                    if isinstance(key, str) and (half := half_of(key)):
                        yield _at(path, f"given the field {escaped(key)}, {half}")
                inner = [(entry, f"{path}.{_name(key)}", depth + 1) for key, entry in value.items()]
            else:
                inner = [(entry, f"{path}.{number}", depth + 1) for number, entry in enumerate(value)]
            left += [(entry, where.removeprefix("."), deep) for entry, where, deep in reversed(inner)]
        elif isinstance(value, str):
            if half := half_of(value):
                yield _at(path, f"given {escaped(value)}, {half}")
        elif isinstance(value, _Mistake):
            yield _at(path, value.reason)
        elif isinstance(value, float):
            if not math.isfinite(value):
                yield _at(path, f"given {escaped(value)}, allowed: {_FINITE}")
        elif isinstance(value, int):
            if value not in INTEGERS:
                yield _at(path, f"given {_number(value)}, allowed: {_WHOLE}")
        elif value is not None:
            yield _at(
                path, f"given {type(value).__name__}, allowed: texts, numbers, true, false, null, lists, mappings"
            )


def half_of(text: str) -> str:
    """The allowed form of ``text`` if it has half of a character, else nothing."""
    if text.isascii() or (found := _HALF.search(text)) is None:
        return ""
    return f"allowed: whole characters (\\u{ord(found[0]):04x} is half of one)"


def escaped(value: Any) -> str:
    """``value`` as ASCII JSON, short enough for a line. No more items of a large value are written than are shown."""
    if isinstance(value, str):
        return short(json.dumps(value[:LONGEST_SHOWN]))
    shown = ""
    for part in json.JSONEncoder(default=str).iterencode(value):
        shown += part[:LONGEST_SHOWN]
        if len(shown) > LONGEST_SHOWN:
            break
    return short(shown)


def _name(key: Any) -> str:
    """A key of a mapping as a part of a path; other keys than texts become texts in JSON."""
    if isinstance(key, str):
        return escaped(key)[1:-1]
    return str(key) if isinstance(key, int) and key in INTEGERS else type(key).__name__


def _at(path: str, reason: str) -> str:
    return f"{path}: {reason}" if path else reason


def _number(value: int) -> str:
    return (
        f"a number of {count_of(round(value.bit_length() * 0.30103), 'digit')}"
        if value.bit_length() > 200
        else str(value)
    )


def unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """``object_pairs_hook`` that raises ``ValueError`` for a field that is given twice: readers differ about its
    value."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a field is given twice")
    return fields


def _fields_or_mistake(pairs: list[tuple[str, Any]]) -> Any:
    fields: dict[str, Any] = {}
    for key, value in pairs:
        fields[key] = value if key not in fields else _Mistake("given twice; keep one of them")
    return fields


def _integer(digits: str) -> int:
    if len(digits) < 19 or (len(digits) <= 20 and int(digits) in INTEGERS):
        return int(digits)
    raise ValueError


def _integer_or_mistake(digits: str) -> Any:
    try:
        return _integer(digits)
    except ValueError:
        return _Mistake(f"given {short(digits)}, allowed: {_WHOLE}")


def _float(digits: str) -> float:
    value = float(digits)
    if math.isinf(value) or (value == 0 and re.search("[1-9]", re.split("[eE]", digits)[0])):
        raise ValueError
    return value


def _float_as_written(digits: str) -> float:
    """A number that a program wrote with more digits than needed, such as 0.10000000000000001, is the float's value to
    as many digits, and no other number was meant."""
    value = float(digits)
    exact = Decimal(digits)
    if exact in (Decimal(repr(value)), Context(max(1, len(exact.as_tuple().digits))).create_decimal_from_float(value)):
        return value
    rounded = Rounded(value)
    rounded.written = digits
    return rounded


def _float_or_mistake(digits: str) -> Any:
    try:
        return _float(digits)
    except ValueError:
        return _Mistake(f"given {short(digits)}, allowed: {_RANGE}")


def _constant(name: str) -> NoReturn:
    raise ValueError


def _constant_or_mistake(name: str) -> Any:
    return _Mistake(f"given {name}, allowed: {_FINITE}")


_strict = json.JSONDecoder(
    object_pairs_hook=unique_fields, parse_int=_integer, parse_float=_float, parse_constant=_constant
)
_written = json.JSONDecoder(parse_float=_float_as_written)
_tolerant = json.JSONDecoder(
    object_pairs_hook=_fields_or_mistake, parse_int=_integer_or_mistake, parse_float=_float_or_mistake,
    parse_constant=_constant_or_mistake,
)  # fmt: skip
