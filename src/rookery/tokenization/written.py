"""Whether a chat template writes all of a message.

Some templates leave out thoughts, the text next to a call, or all calls but the first. Nothing of a message that is
learned, or that a learned one follows, may be missing: such a conversation is refused. White space does not count, nor
do the marks of thoughts, which templates write in their way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

THOUGHTS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel>thought", "<channel|>"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<thought>", "</thought>"),
    ("<longcat_think>", "</longcat_think>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("◁think▷", "◁/think▷"),
)
"""The marks at the beginning and the end of thoughts in the texts of models."""

THOUGHT_MARKS = re.compile("(" + "|".join(re.escape(mark) for pair in THOUGHTS for mark in pair) + ")")

THOUGHT_BEGIN = re.compile("|".join([*(re.escape(begin) for begin, _ in THOUGHTS), r"<\|channel\|>analysis"]))
THOUGHT_END = re.compile(
    "|".join([
        *(re.escape(end) for _, end in THOUGHTS),
        r"<\|channel\|>final\b[^<]{0,80}(?:<\|constrain\|>[^<]{0,80})?<\|message\|>",
    ])
)  # fmt: skip
"""The marks in replies, also those of gpt-oss, whose template gets thoughts in a field of the message."""

_CONTROL = re.compile(
    r"<\|[^<>|\s-]{1,40}\|>|<｜[^<>｜\s-]{1,40}｜>|<(?:start|end)_of_turn>|<\|turn>|<turn\|>"
    r"|\[/?(?:INST|SYSTEM_PROMPT)\]|</?s>|<[be]os>"
)
"""Marks that chat templates of all families write around messages."""


def controls(text: str) -> list[str]:
    """The different marks in a text with which some template writes turns, apart from those of thoughts."""
    found = dict.fromkeys(_CONTROL.findall(text)) if "<" in text or "[" in text else {}
    return [mark for mark in found if not THOUGHT_MARKS.fullmatch(mark)]


SHOWN = 40
"""Characters of a text that is missing, in the line that names it."""


def missing(squeezed: str, message: Mapping[str, Any], *, thoughts: bool = True) -> str:
    """The first part of a message that a text :func:`without_space` lacks, as a reader is to see it; empty
    where it has all. Without ``thoughts`` those may be absent."""
    pieces = THOUGHT_MARKS.split(message.get("content") or "")[::2]
    for number, piece in enumerate(pieces if thoughts else pieces[-1:], 1):
        if not _occurs(piece, squeezed):
            kind = "the thought" if thoughts and number < len(pieces) else "the text"
            return f"{kind} {_shown(piece)}"
    for number, call in enumerate(message.get("tool_calls") or (), 1):
        function = call["function"]
        for part in (function["name"], *_texts(function["arguments"])):
            if not _occurs(part, squeezed):
                return f"{_shown(part)} of call {number}"
    return ""


def _shown(text: str) -> str:
    return json.dumps(text if len(text) <= SHOWN else f"{text[:SHOWN]}…", ensure_ascii=False)


def _texts(value: Any) -> Iterator[str]:
    """The names, texts and numbers in JSON-like data."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield str(name)
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield json.dumps(value)


def without_space(text: str) -> str:
    return "".join(text.split())


def _occurs(part: str, squeezed: str) -> bool:
    """Whether a text stands in another one without its white space: as it is, or as JSON or Python write it."""
    return without_space(part) in squeezed or any(
        without_space(written[1:-1]) in squeezed
        for written in (json.dumps(part, ensure_ascii=False), json.dumps(part), repr(part))
    )
