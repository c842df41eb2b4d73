r"""The boxes of a text, ``\boxed{…}``: their contents, and the text around the last one that changes its value."""

from __future__ import annotations

import re

from rookery.environments.verifiers.numbers import ENGLISH_MAGNITUDES

END = 400
"""Characters before a box, and after it, that decide about its value."""

_BETWEEN = re.compile(r"\}[\s$.)\]\\]{0,4}(?:,\s?(?:and|or)?|\s(?:and|or))[\s$(\[\\]{0,5}\Z")
"""The text between two boxes that are answers together."""
_BETWEEN_LONGEST = 20
"""Characters of it."""

_ENCLOSES = r"(?:\$|\\\$|\\[(\[,;:! ]|\\left\(?|[{(\[~*])"
_OPERAND_BEFORE = re.compile(
    r"(?:\\[dtc]?frac *(?:\{[^{}]*\})? *\{ *|\\sqrt *\{ *|\^ *\{? *|\d|(?i:\bnot|n['’]t)(?: be)?(?: equal)?(?: to)?"
    rf"(?:\s|{_ENCLOSES})*|(?:\\neq?|\\not *=|≠|!=)(?:\s|{_ENCLOSES})*)\Z"
)
"""The beginning of an expression whose part the box is, and a denial of it."""
_MINUS = re.compile(
    rf"(?:(?:\A|[\s$=:(\[])[-−–]{_ENCLOSES}{{0,4}}|[=:] ?[-−] {_ENCLOSES}{{0,4}}"
    rf"|\b(?i:minus|negative)(?:\s|{_ENCLOSES}){{1,4}}|\$ ?[-−] ?\$\s?)\Z"
)
"""The sign of the box."""
_BOX_BEFORE = re.compile(
    r"\\f?box(?:ed)? ?\{[^{}]*\}(?:\s|\$|\\[()\[\],;:! ]|\})*(?:[-+*/;&|]|\\(?:cdot|times|div|quad|qquad)(?![A-Za-z])"
    r"|\{|\\text ?\{ *(?:or|and) *\})?(?:[ \t]|\$|\\[()\[\],;:! ]|\{)*\Z"
)
"""Another box of which nothing but an operation, or nothing, separates it."""
_OPERAND_AFTER = re.compile(
    r"(?:\s|\$|\\[)\],;:! ]|[)\]}*_~])*+(?:\^(?! *\{? *\\circ)|/ ?\d|(?:\\(?:text|textrm|mathrm|mbox) ?\{ *)?"
    rf"(?i:{ENGLISH_MAGNITUDES})s?\b)|\d"
)
"""The text after a box that makes it another number: a power, a divisor, a magnitude, a digit."""


def several_boxes(text: str) -> str | None:
    r"""The contents of the last boxes of a text, with commas between them, where ``and``, ``or`` or a comma alone
    stands between one and the next; None for a text that ends in one box."""
    contents, start, end = list[str](), text.rfind(r"\boxed{"), len(text)
    while start != -1:
        contents.insert(0, last_box(text[start:end]) or "")
        earliest = max(0, start - _BETWEEN_LONGEST)
        between = _BETWEEN.search(text[earliest:start])
        if between is None:
            break
        end = earliest + between.start() + 1
        start = text.rfind(r"\boxed{", 0, end)
    return ", ".join(contents) if len(contents) > 1 and all(contents) else None


def last_box(text: str) -> str | None:
    r"""The content of the last ``\boxed`` or ``\fbox``, empty for an unfinished one, None without any."""
    found = _last(text)
    return None if found is None else found[1]


def sign_of_box(text: str) -> str | None:
    """The sign before the last box of a text that has one; None where it is denied, or a part of something else."""
    found = _last(text)
    assert found is not None
    start, _, end = found
    before, after = text[max(0, start - END) : start], text[end : end + END]
    if _OPERAND_BEFORE.search(before) or _OPERAND_AFTER.match(after) or _BOX_BEFORE.search(before):
        return None
    return "-" if _MINUS.search(before) else ""


def _last(text: str) -> tuple[int, str, int] | None:
    """The places of the last box and after it, and its content."""
    start = max(text.rfind(r"\boxed"), text.rfind(r"\fbox"))
    if start == -1:
        return None
    rest = text[start:].lstrip("\\").removeprefix("boxed").removeprefix("fbox").lstrip()
    offset = len(text) - len(rest)
    if not rest.startswith("{"):
        return start, rest[:1].strip(), offset + 1  # \boxed 5
    depth = position = 0
    while position < len(rest):
        char = rest[position]
        if char == "\\":
            position += 1
        elif char in "{}":
            depth += 1 if char == "{" else -1
            if not depth:
                return start, rest[1:position].strip(), offset + position + 1
        position += 1
    return start, "", len(text)
