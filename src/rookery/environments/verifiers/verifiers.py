"""Named verifiers: the reward of a reply, given the row's answer.

Each is a pure function (reply text, row, options) → (reward, metrics) with the same result in every process. Metrics
are shares in [0, 1]. No reply makes a verifier raise: an unreadable one scores ``wrong``. A row that lacks a field that
the verifier needs raises ValueError.
"""

from __future__ import annotations

import decimal
import importlib.util
import json as json_module
import logging
import math as math_module
import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Annotated, Any, Literal, NoReturn

import regex
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from rookery.bounds import METRICS, NAME, Integer, Name, SmallJson
from rookery.environments.verifiers.pool import VerifierPool, VerifierTimeout
from rookery.errors import UserError, installs

log = logging.getLogger("rookery.environments")

Row = Mapping[str, Any]
Score = tuple[float, dict[str, float]]
ScoreFunction = Callable[[str, Row], Score]

REGEX_SECONDS = 1.0
"""Longest search for a pattern in one reply; an honest one takes microseconds."""

PATTERN = 10_000
"""Characters of a regular expression."""

MINUS = "\N{MINUS SIGN}"
"""Typographic minus sign of negative numbers."""

_NUMBER = re.compile(
    rf"(?:(?<![\w)])[-+{MINUS}])?"
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<![\w.])\.\d+)(?:[eE][-+]?\d{1,3})?"
)

_EXACT = decimal.Context(prec=50, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX, traps=[])
"""Differences of numbers of any size, rounded but never to zero."""


class VerifierOptions(BaseModel):
    """Options of all verifiers except ``json``. Their metric is `right`, the share of right replies."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    answer: Name = "answer"
    """The row's field that holds the answer."""
    right: float = 1.0
    """Reward of a right reply."""
    wrong: float = 0.0
    """Reward of any other reply."""

    def expected(self, row: Row) -> Any:
        if self.answer not in row:
            raise ValueError(f"the row has no field {self.answer!r}; it has {', '.join(map(repr, row)) or 'none'}")
        return row[self.answer]

    def check(self, row: Row) -> None:
        """Raises ValueError if ``row`` lacks what the verifier needs."""
        self.expected(row)

    def score_of(self, right: bool) -> Score:
        return (self.right if right else self.wrong), {"right": float(right)}


class Exact(VerifierOptions):
    """Right when the reply equals the answer, ignoring surrounding white space."""

    name: Literal["exact"] = "exact"
    ignore_case: bool = False
    """Compare without regard to case."""

    def score(self, text: str, row: Row) -> Score:
        given, expected = text.strip(), _as_text(self.expected(row)).strip()
        if self.ignore_case:
            given, expected = given.casefold(), expected.casefold()
        return self.score_of(given == expected)


class Number(VerifierOptions):
    """Right when the number in the reply equals the answer. Thousands may be separated by commas. Further metric:
    `number`, the share of replies with a number."""

    name: Literal["number"] = "number"
    where: Literal["last", "first", "any", "only"] = "last"
    """Which number of the reply counts. With `any`, a reply that lists many numbers scores by luck; with `only`, the
    reply is the number and nothing else."""
    tolerance: float = Field(0.0, ge=0)
    """Largest absolute difference that counts as right."""
    found: float | None = None
    """Reward, instead of `wrong`, of a reply with a wrong number."""

    def check(self, row: Row) -> None:
        _number_of(self.expected(row))

    def score(self, text: str, row: Row) -> Score:
        expected = _number_of(self.expected(row))
        if self.where == "only":
            numbers = [text.strip()] if _NUMBER.fullmatch(text.strip()) else []
        else:
            numbers = _NUMBER.findall(text)
        chosen = {"last": numbers[-1:], "first": numbers[:1]}.get(self.where, numbers)
        right = any(self._close(_decimal(number), expected) for number in chosen)
        reward, metrics = self.score_of(right)
        if numbers and not right and self.found is not None:
            reward = self.found
        return reward, {**metrics, "number": float(bool(numbers))}

    def _close(self, given: Decimal, expected: Decimal) -> bool:
        return _EXACT.abs(_EXACT.subtract(given, expected)) <= Decimal(repr(self.tolerance))


class Regex(VerifierOptions):
    """Right when the pattern is found in the reply and, if it has a group, the group's text equals the answer. Without
    a group the pattern alone decides. Further metrics: `matched`, and `unjudged` for a search that was stopped after a
    second."""

    name: Literal["regex"] = "regex"
    pattern: Annotated[str, Field(max_length=PATTERN)]
    """A regular expression in Python's syntax."""
    group: Integer | Name | None = None
    """Number or name of the group that is compared with the answer; the first group when absent."""
    whole: bool = False
    """The pattern must match the whole reply, ignoring surrounding white space."""
    found: float | None = None
    """Reward, instead of `wrong`, of a reply that matches with the wrong text in the group."""

    @model_validator(mode="after")
    def _compiles(self) -> Regex:
        try:
            pattern = regex.compile(self.pattern)
        except (regex.error, RecursionError, OverflowError) as error:
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

    def score(self, text: str, row: Row) -> Score:
        pattern = regex.compile(self.pattern)
        search = pattern.fullmatch if self.whole else pattern.search
        unjudged, match = False, None
        try:
            # concurrent: releases the lock for other threads of the host
            match = search(text.strip() if self.whole else text, timeout=REGEX_SECONDS, concurrent=True)
        except TimeoutError:
            unjudged = True
        if match is None:
            right = False
        elif self._compared is None:
            right = True
        else:
            right = (match[self._compared] or "").strip() == _as_text(self.expected(row)).strip()
        reward, metrics = self.score_of(right)
        if match is not None and not right and self.found is not None:
            reward = self.found
        return reward, {**metrics, "matched": float(match is not None), "unjudged": float(unjudged)}


class Expectation(BaseModel):
    """The expected value of one field of a JSON reply. Give exactly one of `from` and `equals`. Values are compared as
    JSON: 5 and 5.0 are equal, 5 and "5" are not."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    from_: Name | None = Field(None, alias="from")
    """The row's field that holds the value."""
    equals: SmallJson = None
    """The value itself."""
    weight: float = Field(1.0, gt=0)
    """Share of the reward, relative to the other fields' weights."""
    tolerance: float = Field(0.0, ge=0)
    """Largest difference between numbers that counts as right."""

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
    """A reply that is a JSON object earns `valid`; each right field earns its share of 1 − `valid`. Metrics: `valid`,
    and `right/<field>` for each field."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    name: Literal["json"] = "json"
    fields: dict[Annotated[str, Field(max_length=NAME - len("right/"))], Expectation] = Field(
        default_factory=lambda: {"answer": Expectation.model_validate({"from": "answer"})},
        min_length=1,
        max_length=METRICS // 2,
    )
    """Expected value of each field of the reply: the name of a row's field, or [an expectation](#json-fields)."""
    valid: float = Field(0.3, ge=0, le=1)
    """Reward of any valid reply. An invalid one earns 0."""
    strict: bool = False
    """The reply is the object and nothing else. Otherwise the first object in the reply counts."""
    only: bool = False
    """A field that is not in `fields` makes the reply invalid."""

    @field_validator("fields", mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: {"from": field} if isinstance(field, str) else field for name, field in value.items()}
        return value

    def check(self, row: Row) -> None:
        for name, field in self.fields.items():
            field.expected(name, row)

    def score(self, text: str, row: Row) -> Score:
        given = _first_object(text, self.strict)
        if given is not None and self.only and set(given) - set(self.fields):
            given = None
        metrics = {"valid": float(given is not None)}
        earned = 0.0
        for name, field in self.fields.items():
            expected = field.expected(name, row)
            right = given is not None and name in given and _same(given[name], expected, field.tolerance)
            metrics[f"right/{name}"] = float(right)
            earned += field.weight * right
        if given is None:
            return 0.0, metrics
        total = math_module.fsum(field.weight for field in self.fields.values())
        return self.valid + (1 - self.valid) * earned / total, metrics


class Math(VerifierOptions):
    """Right when math-verify finds the reply's last expression equal to the answer, in LaTeX or plain text. Needs the
    `math` extra. A comparison that takes more than 5 seconds of processor time is wrong and counted as `unjudged`. It
    has the common options only."""

    name: Literal["math"] = "math"
    _pool: VerifierPool = PrivateAttr(default_factory=lambda: VerifierPool("math"))

    def model_post_init(self, context: Any) -> None:
        super().model_post_init(context)
        if importlib.util.find_spec("math_verify") is None:
            raise UserError(f"verifier math: needs the math extra; run: {installs('math')}")

    def score(self, text: str, row: Row) -> Score:
        expected, same, unjudged = _as_text(self.expected(row)), False, False
        try:
            same = self._pool.score({"reply": text, "expected": expected})
        except VerifierTimeout as error:
            log.warning("math-verify: %s; the reply counts as wrong", error)
            unjudged = True
        if same is None:
            raise ValueError(f"math-verify finds no expression in the answer {expected!r}")
        reward, metrics = self.score_of(same)
        return reward, {**metrics, "unjudged": float(unjudged)}


VERIFIERS: dict[str, type[Exact] | type[Number] | type[Regex] | type[Json] | type[Math]] = {
    "exact": Exact,
    "number": Number,
    "regex": Regex,
    "json": Json,
    "math": Math,
}
"""Verifiers by name; a job gives a name, or a mapping with ``name`` and options."""

Verifier = Exact | Number | Regex | Json | Math


def _as_text(value: Any) -> str:
    """The answer as text: strings unchanged, everything else as JSON."""
    return value if isinstance(value, str) else json_module.dumps(value, ensure_ascii=False)


def _number_of(value: Any) -> Decimal:
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value.strip())
        if match is not None:
            return _decimal(match[0])
    elif isinstance(value, int) and not isinstance(value, bool):
        return Decimal(value)
    elif isinstance(value, float) and math_module.isfinite(value):
        return Decimal(repr(value))  # the number as written, not the nearest float
    raise ValueError(f"the answer is {value!r}, not a number")


def _decimal(number: str) -> Decimal:
    """The exact value of a match of ``_NUMBER``."""
    return Decimal(number.replace(",", "").replace(MINUS, "-"))


def _same(given: Any, expected: Any, tolerance: float) -> bool:
    """Equal as JSON: 5 and 5.0 are, 1 and true are not, nor are 5 and "5"."""
    if isinstance(given, bool) or isinstance(expected, bool):
        return given is expected
    if isinstance(given, int | float) and isinstance(expected, int | float):
        try:
            return given == expected or abs(given - expected) <= tolerance
        except OverflowError:  # an integer too big for a float
            return False
    if isinstance(given, list) and isinstance(expected, list):
        return len(given) == len(expected) and all(map(lambda a, b: _same(a, b, tolerance), given, expected))
    if isinstance(given, dict) and isinstance(expected, dict):
        return given.keys() == expected.keys() and all(_same(given[key], expected[key], tolerance) for key in given)
    return type(given) is type(expected) and given == expected


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
    """``parse_constant`` hook that refuses NaN and Infinity, which JSON does not have. Raises ValueError."""
    raise ValueError(f"{name} is not JSON")
