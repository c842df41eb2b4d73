"""Texts compared as a person compares them: by the characters that are visible.

Two texts are equal when their visible forms (:func:`visible`) are: composed and decomposed letters are the same
(Unicode NFC), any run of white space, also no-break, thin and ideographic spaces and line ends, is one space, the
hyphens of Unicode are that of ASCII, and characters without a shape are left out. Nothing else is changed: letter case,
punctuation and full-width forms count. An answer that is a JSON number has no spelling: a reply is equal to it when it
is a number of the same value (12.0 and "12").
"""

from __future__ import annotations

import json
import math
import unicodedata
from decimal import Decimal
from typing import Any

SHAPELESS = dict.fromkeys(
    [
        0xAD,
        0x34F,
        0x61C,
        0x180E,
        0x200B,
        0x200E,
        0x200F,
        *range(0x202A, 0x202F),
        *range(0x2060, 0x2065),
        *range(0x2066, 0x206A),
        *range(0xFE00, 0xFE10),
        0xFEFF,
    ]
)
"""Soft hyphen, zero-width spaces and joins without a meaning, marks of the writing direction, selectors of a variant of
the character before, such as a coloured one: a table for ``translate`` that deletes them. The joiners U+200C and U+200D
stay: they change letters and emoji."""

HYPHENS = "\N{HYPHEN}\N{NON-BREAKING HYPHEN}"
"""Characters that look like the hyphen of ASCII."""
_SEEN = {**SHAPELESS, **dict.fromkeys(map(ord, HYPHENS), "-")}


def visible(text: str) -> str:
    """The text as a reader sees it, without surrounding white space."""
    return " ".join(composed(text.translate(_SEEN)).split())


def composed(text: str) -> str:
    """The text with composed letters (NFC), and nothing else changed."""
    return unicodedata.normalize("NFC", text)


def is_blank(text: str) -> bool:
    """Whether a reader sees nothing of a text. Looks no further than its first visible character."""
    return all(char.isspace() or ord(char) in SHAPELESS for char in text)


def folded(text: str) -> str:
    """The visible form without a difference between capital and small letters."""
    return visible(visible(text).casefold())


def spaced(text: str) -> str:
    """The text composed (NFC), without shapeless characters, every horizontal space and every hyphen as a plain one.
    Line ends stay: for patterns, which may speak of lines."""
    chars = composed(text.translate(_SEEN))
    return "".join(" " if ord(char) > 0x7F and unicodedata.category(char) == "Zs" else char for char in chars)


def decimal_of(value: Any) -> Decimal | None:
    """The value of a JSON number as it is written, not that of the nearest float; None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return Decimal(value)
    if isinstance(value, float) and math.isfinite(value):
        return Decimal(repr(value))
    return None


def text_or_number(value: Any, field: str) -> str | Decimal:
    """An answer that a reply can be equal to. Raises ValueError for any other, with ``field``, where the row has it."""
    if isinstance(value, str):
        if visible(value):
            return value
        raise ValueError(f"{field} is {described(value)}, which an empty reply equals; write the text of a right reply")
    number = decimal_of(value)
    if number is None:
        raise ValueError(
            f"{field} is {described(value)}, neither a text nor a number; write the text of a right reply, in quotes"
        )
    return number


def described(value: Any) -> str:
    """A value as JSON, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
