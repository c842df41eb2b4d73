"""The JSON values of users: what is refused, and that a value which is taken survives every part of a run."""

from __future__ import annotations

import datetime
import json
import math
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery import protocol
from rookery.spec import values
from rookery.storage.columns import JsonText

REFUSED: list[tuple[str, str]] = [
    (r'{"a": {"b": "x\ud83d"}}', r'a\.b: given "x\\ud83d", allowed: whole characters \(\\ud83d is half of one\)'),
    (r'{"a": "\udc00\ud83d"}', r"a: given .* allowed: whole characters \(\\udc00"),
    (r'{"a": {"k\uDFFF": 1}}', r'a: given the field "k\\udfff", allowed: whole characters'),
    ('{"a": [1, 1e400]}', r"a\.1: given 1e400, allowed: a number between"),
    ('{"a": -0.1e1000}', r"a: given -0\.1e1000, allowed: a number between"),
    ('{"a": 1e-400}', "a: given 1e-400, allowed: a number between"),
    ('{"a": NaN}', "a: given NaN, allowed: a finite number"),
    ("[-Infinity]", "0: given -Infinity, allowed: a finite number"),
    ('{"a": 18446744073709551616}', "a: given 18446744073709551616, allowed: a whole number"),
    ('{"a": -9223372036854775809}', "a: given -9223372036854775809, allowed: a whole number"),
    ('{"a": ' + "9" * 5000 + "}", r"a: given 9{77}\.\.\., allowed: a whole number"),
    ('{"a": 1, "b": {"c": 1, "c": 2}}', r"b\.c: given twice"),
    ('{"x": ' * 65 + "1" + "}" * 65, "x: nested more than 64 deep"),
    ("[" * 255 + "]" * 255, "0: nested more than 64 deep"),
    ("[" * 100_000, "nested more than 64 deep"),
]


@pytest.mark.parametrize(("content", "says"), REFUSED, ids=[says[:30] for _, says in REFUSED])
def test_a_value_that_a_run_cannot_carry_is_refused_by_its_field(content: str, says: str) -> None:
    with pytest.raises(values.ValueRefused, match=says) as refused:
        values.decode(content.encode())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "content", ["{", "{'a': 1}", "[1,]", "01", "", '"\x01"', b"\xff", b'"\xed\xa0\xbd"', b"\xef\xbb\xbf1"], ids=repr
)
def test_other_text_is_not_json(content: str | bytes) -> None:
    with pytest.raises((json.JSONDecodeError, UnicodeDecodeError)):
        values.decode(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": datetime.date(2024, 1, 2)}, "a: given date, allowed: texts, numbers"),
        ({"a": {1: float("nan")}}, r"a\.1: given NaN"),
        ({"a": ("x", "\ud83d")}, r"a\.1: given .* whole characters"),
        ({"a": 10**5000}, "a: given a number of 5000 digits"),
        ({(1, 2): 3}, "keys must be str"),
        ({1: "a", "1": "b"}, "1: given twice"),
        (b"x", "given bytes"),
    ],
    ids=["date", "not a number", "surrogate", "huge", "tuple key", "twice", "bytes"],
)
def test_a_python_value_that_is_not_json_is_refused_by_its_field(value: Any, says: str) -> None:
    with pytest.raises(values.ValueRefused, match=says):
        values.encode(value)


@pytest.mark.parametrize("value", [["x" * 10**6], {"x" * 10**6: 1}, [[]] * 10**6, [{}] * 10**5])
def test_a_large_value_is_shown_by_its_beginning(value: Any) -> None:
    whole = json.dumps(value)
    assert values.escaped(value)[:70] == whole[:70] and len(values.escaped(value)) <= 80


def test_no_more_of_a_large_value_is_written_than_is_shown() -> None:
    read = iter(range(10**9))

    class Entry:
        def __str__(self) -> str:
            return str(next(read))

    values.escaped([Entry() for _ in range(10_000)])
    assert next(read) < 1000


def test_a_list_that_contains_itself_is_refused() -> None:
    ring: list[Any] = []
    ring.append(ring)
    with pytest.raises(values.ValueRefused, match="nested more than 64 deep"):
        values.encode(ring)


ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(2**63 - 2, 2**64 + 2)
    | st.floats()
    | st.text(st.characters(categories=["L", "N", "P", "Cc", "Cs", "Co"]), max_size=4)
    | st.sampled_from(["\x00", "\u2028", "\ufeff", "\ue000reply\ue001", "\U0001f600", "[" * 70]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


def carried(value: Any) -> bool:
    """Whether a run can carry a value, by the rules that the module states."""
    if isinstance(value, dict):
        return all(carried(entry) for pair in value.items() for entry in pair)
    if isinstance(value, list):
        return all(map(carried, value))
    if isinstance(value, str):
        return not re.search("[\ud800-\udfff]", value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or -(2**63) <= value < 2**64


@given(value=ANY, escapes=st.booleans())
def test_a_value_is_refused_or_survives_every_part_of_a_run(value: Any, escapes: bool) -> None:
    written = json.dumps(value, ensure_ascii=escapes).encode("utf-8", "surrogatepass")
    if not carried(value):
        with pytest.raises((values.ValueRefused, UnicodeDecodeError)):
            values.decode(written)
        with pytest.raises(values.ValueRefused):
            values.encode(value)
        return
    row = values.decode(written)
    prompt = values.encode(row)
    reset = protocol.Reset(call="", episode="", job="", environment="", options={"a": row}, prompt=prompt, seed=0)
    delivered = protocol.decode(protocol.to_host, protocol.encode(reset))
    assert isinstance(delivered, protocol.Reset) and delivered.options == {"a": row}
    column, dialect = JsonText(), None
    stored = column.process_result_value(column.process_bind_param(row, dialect), dialect)  # type: ignore[arg-type]
    response = msgspec.json.decode(msgspec.json.encode(row))
    assert values.decode(delivered.prompt) == stored == response == row == value
    assert values.encode(values.decode(prompt)) == prompt


@pytest.mark.parametrize(
    ("digits", "lost"),
    [
        ("0.1", False), ("1e5", False), ("-0.0", False), ("0e-400", False), ("1.50000000000000000000", False),
        ("0.10000000000000001", False),  # as C prints 0.1 with 17 digits
        ("0.1000000000000000055511151231257827", False),  # and with more
        ("12345678.123456789", False), ("9007199254740993.0", True), ("12345678.123456789012", True),
        ("0.1234567890123456789012", True), ("-1.00000000000000000001", True), ("1.7976931348623157085e308", True),
    ],
)  # fmt: skip
def test_numbers_that_a_float_does_not_hold_are_known(digits: str, lost: bool) -> None:
    found = values.decode_written(f'{{"a": [{digits}]}}'.encode())["a"][0]
    assert found == float(digits) and getattr(found, "written", "") == (digits if lost else "")


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(17, 40))
def test_digits_that_programs_print_of_a_float_are_held(number: float, digits: int) -> None:
    assert type(values.decode_written(f"{number:.{digits}e}".encode())) is float
