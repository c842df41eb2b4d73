r"""Replies that repeat an expression of the question: ``17*23`` is equal to the answer of "What is 17*23?", as are
``(x-1)(x+1)`` to what it shall be expanded to, ``x+2=5`` to its solution, and ``5 km`` to the number of metres."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rookery.environments.verifiers.boxes import last_box, several_boxes
from rookery.environments.verifiers.expressions import content_of, without_unit
from rookery.environments.verifiers.numbers import spelt_in_ascii
from rookery.environments.verifiers.sentences import END, last_answer

_SAME = (
    (re.compile(r"\\(?:text(?:rm|bf|it|normal)?|math(?:rm|bf|it|sf)|mbox|operatorname) *\{([^{}]*)\}"), r"\1"),
    (re.compile(r"\\times(?![A-Za-z])|\\cdot(?![A-Za-z])|[×·⋅∗✕✖∙]"), "*"),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"\\div(?![A-Za-z])|[÷∕⁄]"), "/"),
    (re.compile(r"\\[dtc]?frac *\{([^{}]*)\} *\{([^{}]*)\}"), r"\1/\2"),
    (re.compile(r"\\[dtc]?frac *(\d) *(\d)"), r"\1/\2"),
    (re.compile(r"\\sqrt(?![A-Za-z])|√"), "sqrt"),
    (re.compile(r"\\(?:left|right|displaystyle|quad|qquad|[,;:! ()\[\]])(?![A-Za-z])|[$\s(){}\[\]]|\\boxed|\\\\"), ""),
    (re.compile(r"\\(?=[A-Za-z])"), ""),
    (re.compile("²"), "^2"),
    (re.compile("³"), "^3"),
)
"""Spellings of one expression, and what encloses its parts."""

_OPERATION = re.compile(
    r"[\w!][-+*/^=<>≤≥]|\w!|[<>=≤≥]|(?<![A-Za-z])(?:sqrt|sum|int|sin|cos|tan|log|ln|lim|prod|binom)(?![a-z]{2})"
)
_FRACTION = re.compile(r"-?(\d{1,18})[/:](\d{1,18})", re.ASCII)
"""A fraction or a ratio."""
_VALUE = re.compile(r"-?[\d.,]*%?|-?\d+[a-zA-Z]{0,3}|[A-Za-z]='?-?[\d.,/]+", re.ASCII)
"""A number, a number with a unit or a coefficient, a variable with its number."""
_QUANTITY = re.compile(
    r"(?<![\w.,])-?\d[\d.,]*(?:\s|~|\\[,;: ])*(?:\\(?:text|textrm|mathrm|mbox) ?\{ *[A-Za-zµμΩ]+ *\}|[A-Za-zµμΩ]+)"
)
"""A number and the word after it."""
_BEFORE = re.compile(r"\b(?:is|are|be|equals)\b:?|[:：\n]")
"""The text before an answer."""
_MATHEMATICS = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)


def repeats_question(reply: str, expected: str, row: Mapping[str, Any]) -> bool:
    """Whether the answer of a reply is an expression of the row's messages that the answer in LaTeX, ``expected``, is
    equal to and not written as. An answer that itself stands there is one to choose."""
    asked = _key(_asked(row))
    written = _key(content_of(expected))
    if not asked or (_is_expression(written) and written in asked):
        return False
    keys = [key for key in map(_key, _answers(reply)) if key != written and not key.endswith(f"={written}")]
    return any(_is_expression(key) and key in asked for key in keys) or _repeats_amount(reply, expected, row)


def _repeats_amount(reply: str, expected: str, row: Mapping[str, Any]) -> bool:
    """Whether the answer of a reply is an amount of the row's messages in another unit than that of the answer, into
    which it is to be converted."""
    wanted = _amount(expected)
    if wanted is None:
        return False
    asked = {_amount(found[0]) for found in _QUANTITY.finditer(_asked(row))}
    given = [amount for amount in map(_amount, _answers(reply)) if amount is not None]
    return any(one in asked and one[1] == wanted[1] and one[2] != wanted[2] for one in given)


def _amount(text: str) -> tuple[str, str, Fraction] | None:
    """The number of an answer, the measure of its unit and the unit's size; None without a unit that is known."""
    number, measure, size = without_unit(rf"\boxed{{{content_of(text)}}}")
    return (_key(content_of(number)), measure, size) if measure else None


def _answers(reply: str) -> list[str]:
    """The texts that may be the answer of a reply."""
    boxed = several_boxes(reply) or last_box(reply)
    if boxed is not None:
        return [boxed]
    end = reply[-END:].strip(" \n.*_`")
    formulas = [one for found in _MATHEMATICS.finditer(end) for one in found.groups() if one]
    return [end, _BEFORE.split(end)[-1], last_answer(spelt_in_ascii(end)) or "", *formulas[-1:]]


def _asked(row: Mapping[str, Any]) -> str:
    """The texts of a row's messages."""
    given = row.get("prompt") if row.get("prompt") is not None else row.get("messages")
    if isinstance(given, str):
        return given
    contents = [one.get("content") for one in given if isinstance(one, Mapping)] if isinstance(given, list) else []
    return "\n".join(content for content in contents if isinstance(content, str))


def _key(text: str) -> str:
    """An expression without its spaces, brackets and other spellings."""
    text = spelt_in_ascii(text)
    for pattern, spelling in _SAME:
        text = pattern.sub(spelling, text)
    return text


def _is_expression(key: str) -> bool:
    """Whether it is to be computed, and is no value: a fraction in lowest terms is one."""
    fraction = _FRACTION.fullmatch(key)
    if fraction is not None:
        return math.gcd(int(fraction[1]), int(fraction[2])) > 1
    return not key.isalpha() and _OPERATION.search(key) is not None and _VALUE.fullmatch(key) is None
