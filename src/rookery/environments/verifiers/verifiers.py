"""Named verifiers: what a reply is worth, given what the data says is right.

Each is a pure function of (the reply's text, the row, its options) to (reward, metrics); the same arguments give the
same result in every process. Metrics are shares in [0, 1] unless said otherwise. No reply makes a verifier raise: what
cannot be read scores ``wrong``. A row that lacks what a verifier needs is a mistake in the data and raises ValueError.
"""

from __future__ import annotations

import decimal
import importlib.util
import json as json_module
import math as math_module
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Literal, NoReturn

import regex
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from rookery.environments.verifiers.math_verify import MathJudge
from rookery.errors import UserError, installs

Row = Mapping[str, Any]
Verdict = tuple[float, dict[str, float]]
Judge = Callable[[str, Row], Verdict]

REGEX_SECONDS = 1.0
"""Longest search for a pattern in one reply; an honest one takes microseconds."""

MINUS = "\N{MINUS SIGN}"
"""What typeset text has for the hyphen of a negative number."""

_NUMBER = re.compile(
    rf"(?:(?<![\w)])[-+{MINUS}])?"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][-+]?\d{1,3})?"
)

_EXACT = decimal.Context(prec=50, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX, traps=[])
"""Differences of numbers of any size: rounded ones, but never to zero."""


class Options(BaseModel):
    """Options of every verifier."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    answer: str = "answer"
    """The row's field that holds what is right."""
    right: float = 1.0
    """Reward of a right reply."""
    wrong: float = 0.0
    """Reward of any other."""

    def expected(self, row: Row) -> Any:
        if self.answer not in row:
            raise ValueError(f"the row has no field {self.answer!r}; it has {', '.join(map(repr, row)) or 'none'}")
        return row[self.answer]

    def check(self, row: Row) -> None:
        """Raises ValueError where ``row`` cannot be judged by."""
        self.expected(row)

    def verdict(self, right: bool) -> Verdict:
        return (self.right if right else self.wrong), {"right": float(right)}


class Exact(Options):
    """Right when the reply is the answer, white space around both apart."""

    name: Literal["exact"] = "exact"
    ignore_case: bool = False

    def judge(self, text: str, row: Row) -> Verdict:
        said, expected = text.strip(), _as_text(self.expected(row)).strip()
        if self.ignore_case:
            said, expected = said.casefold(), expected.casefold()
        return self.verdict(said == expected)


class Number(Options):
    """Right when the number in the reply is the answer's.

    ``where`` says which number of the reply counts: the ``last`` or ``first`` in it, ``any`` of them (a reply that
    lists many numbers then scores by luck), or the ``only`` text that there is. Thousands may be set apart by commas.
    """

    name: Literal["number"] = "number"
    where: Literal["last", "first", "any", "only"] = "last"
    tolerance: float = Field(0.0, ge=0)
    """Largest absolute difference that is still right."""
    found: float | None = None
    """Reward, in place of ``wrong``, of a reply that holds a number, though not the right one."""

    def check(self, row: Row) -> None:
        _number_of(self.expected(row))

    def judge(self, text: str, row: Row) -> Verdict:
        expected = _number_of(self.expected(row))
        if self.where == "only":
            numbers = [text.strip()] if _NUMBER.fullmatch(text.strip()) else []
        else:
            numbers = _NUMBER.findall(text)
        chosen = {"last": numbers[-1:], "first": numbers[:1]}.get(self.where, numbers)
        right = any(self._close(_decimal(number), expected) for number in chosen)
        reward, metrics = self.verdict(right)
        if numbers and not right and self.found is not None:
            reward = self.found
        return reward, {**metrics, "number": float(bool(numbers))}

    def _close(self, said: Decimal, expected: Decimal) -> bool:
        return _EXACT.abs(_EXACT.subtract(said, expected)) <= Decimal(repr(self.tolerance))


class Regex(Options):
    """Right when ``pattern`` is found in the reply and, if it has a group (or ``group``), what it caught is the answer.

    Python's ``re`` syntax. Without a group the answer plays no part: the pattern alone decides. A search that runs
    away is stopped: the reply is wrong, and counted as ``unjudged``.
    """

    name: Literal["regex"] = "regex"
    pattern: str
    group: int | str | None = None
    """Which group is compared with the answer; the first where the pattern has one."""
    whole: bool = False
    """The pattern has to match the whole reply, white space around it apart."""
    found: float | None = None
    """Reward, in place of ``wrong``, of a reply that matches but caught the wrong thing."""

    @model_validator(mode="after")
    def _compiles(self) -> Regex:
        try:
            pattern = regex.compile(self.pattern)
        except regex.error as error:
            raise ValueError(f"pattern is not a valid regular expression: {error}") from None
        known = [*range(pattern.groups + 1), *pattern.groupindex]
        if self.group is not None and self.group not in known:
            raise ValueError(f"group is one of the pattern's: {', '.join(map(str, known))}")
        return self

    @property
    def _compared(self) -> int | str | None:
        return self.group if self.group is not None else (1 if regex.compile(self.pattern).groups else None)

    def check(self, row: Row) -> None:
        if self._compared is not None:
            self.expected(row)

    def judge(self, text: str, row: Row) -> Verdict:
        pattern = regex.compile(self.pattern)
        search = pattern.fullmatch if self.whole else pattern.search
        unjudged, match = False, None
        try:
            # concurrent: other threads of the host go on meanwhile.
            match = search(text.strip() if self.whole else text, timeout=REGEX_SECONDS, concurrent=True)
        except TimeoutError:
            unjudged = True
        if match is None:
            right = False
        elif self._compared is None:
            right = True
        else:
            right = (match[self._compared] or "").strip() == _as_text(self.expected(row)).strip()
        reward, metrics = self.verdict(right)
        if match is not None and not right and self.found is not None:
            reward = self.found
        return reward, {**metrics, "matched": float(match is not None), "unjudged": float(unjudged)}


class Expectation(BaseModel):
    """What one field of a JSON reply has to be: the row's ``from`` field, or ``equals`` as it stands."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    from_: str | None = Field(None, alias="from")
    equals: Any = None
    weight: float = Field(1.0, gt=0)
    """Its share of the reward for fields, relative to the other fields' weights."""
    tolerance: float = Field(0.0, ge=0)
    """Largest difference between numbers that is still right."""

    @model_validator(mode="after")
    def _one_source(self) -> Expectation:
        if (self.from_ is None) == ("equals" not in self.model_fields_set):
            raise ValueError("exactly one of from (a field of the row) and equals (a value)")
        return self

    def expected(self, name: str, row: Row) -> Any:
        if self.from_ is None:
            return self.equals
        if self.from_ not in row:
            raise ValueError(f"the row has no field {self.from_!r}, which fields.{name} compares with")
        return row[self.from_]


class Json(BaseModel):
    """A reply that is a JSON object earns ``valid``; each right field its share of ``1 - valid``.

    ``fields`` maps a field of the reply to the name of the row's field that holds its value, or to ``{from, equals,
    weight, tolerance}``; absent, the reply's ``answer`` has to be the row's ``answer``.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: Literal["json"] = "json"
    fields: dict[str, Expectation] = Field(
        default_factory=lambda: {"answer": Expectation.model_validate({"from": "answer"})}, min_length=1
    )
    valid: float = Field(0.3, ge=0, le=1)
    strict: bool = False
    """The reply is the object and nothing else. Otherwise the first object in the reply counts, so that fences and
    explanations around it do no harm."""
    only: bool = False
    """Fields that are not in ``fields`` make the reply invalid."""

    @field_validator("fields", mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: {"from": field} if isinstance(field, str) else field for name, field in value.items()}
        return value

    def check(self, row: Row) -> None:
        for name, field in self.fields.items():
            field.expected(name, row)

    def judge(self, text: str, row: Row) -> Verdict:
        said = _first_object(text, self.strict)
        if said is not None and self.only and set(said) - set(self.fields):
            said = None
        metrics = {"valid": float(said is not None)}
        earned = 0.0
        for name, field in self.fields.items():
            expected = field.expected(name, row)
            right = said is not None and name in said and _same(said[name], expected, field.tolerance)
            metrics[f"right/{name}"] = float(right)
            earned += field.weight * right
        if said is None:
            return 0.0, metrics
        total = math_module.fsum(field.weight for field in self.fields.values())
        return self.valid + (1 - self.valid) * earned / total, metrics


class Math(Options):
    """Right when math-verify finds the reply's last expression equal to the answer (LaTeX or plain).

    Needs the ``math`` extra. A reply that takes too long to judge is wrong, and counted as ``unjudged``.
    """

    name: Literal["math"] = "math"
    _judge: MathJudge = PrivateAttr(default_factory=MathJudge)

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if importlib.util.find_spec("math_verify") is None:
            raise UserError(f"verifier math: needs the math extra; run: {installs('math')}")

    def judge(self, text: str, row: Row) -> Verdict:
        same = self._judge.same(text, _as_text(self.expected(row)))
        reward, metrics = self.verdict(same is True)
        return reward, {**metrics, "unjudged": float(same is None)}


VERIFIERS: dict[str, type[Exact] | type[Number] | type[Regex] | type[Json] | type[Math]] = {
    "exact": Exact,
    "number": Number,
    "regex": Regex,
    "json": Json,
    "math": Math,
}
"""Verifiers by name; a job names one, or gives its options beside ``name``."""

Verifier = Exact | Number | Regex | Json | Math


def _as_text(value: Any) -> str:
    """The answer as one would write it: strings as they are, everything else as JSON."""
    return value if isinstance(value, str) else json_module.dumps(value, ensure_ascii=False)


def _number_of(value: Any) -> Decimal:
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value.strip())
        if match is not None:
            return _decimal(match[0])
    elif isinstance(value, int) and not isinstance(value, bool):
        return Decimal(value)
    elif isinstance(value, float) and math_module.isfinite(value):
        return Decimal(repr(value))  # the number as it is written, not the nearest that a float can hold
    raise ValueError(f"the answer is {value!r}, not a number")


def _decimal(number: str) -> Decimal:
    """What ``_NUMBER`` has matched, every digit of it."""
    return Decimal(number.replace(",", "").replace(MINUS, "-"))


def _same(said: Any, expected: Any, tolerance: float) -> bool:
    """Equal as JSON: 5 and 5.0 are, 1 and true are not, nor are 5 and "5"."""
    if isinstance(said, bool) or isinstance(expected, bool):
        return said is expected
    if isinstance(said, int | float) and isinstance(expected, int | float):
        try:
            return said == expected or abs(said - expected) <= tolerance
        except OverflowError:  # an integer too big for a float, which no tolerance reaches
            return False
    if isinstance(said, list) and isinstance(expected, list):
        return len(said) == len(expected) and all(map(lambda a, b: _same(a, b, tolerance), said, expected))
    if isinstance(said, dict) and isinstance(expected, dict):
        return said.keys() == expected.keys() and all(_same(said[key], expected[key], tolerance) for key in said)
    return type(said) is type(expected) and said == expected


def _first_object(text: str, strict: bool) -> dict[str, Any] | None:
    decoder = json_module.JSONDecoder(parse_constant=no_constant)
    start = len(text) - len(text.lstrip()) if strict else text.find("{")
    while start != -1:
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            value, end = None, 0
        if isinstance(value, dict) and not (strict and text[end:].strip()):
            return value
        start = -1 if strict else text.find("{", start + 1)
    return None


def no_constant(name: str) -> NoReturn:
    """For ``parse_constant``: Python reads NaN and Infinity, which JSON does not have. Raises ValueError."""
    raise ValueError(f"{name} is not JSON")
