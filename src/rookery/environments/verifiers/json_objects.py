"""JSON objects in prose: in the reply of a policy, in the answer of a judge."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

_OBJECT = re.compile(r"\{\s*[\"}]")
_BRACES = re.compile(r"[{}]")
_OUTSIDE_STRINGS = re.compile(r'"(?:[^"\\]|\\(?:.|\Z))*+(?:"|\Z)|[{}]', re.DOTALL)


def objects(text: str, decoder: json.JSONDecoder, most: int) -> Iterator[tuple[dict[str, Any], int, int]]:
    """The JSON objects of a text that are within no other one, each with the places of its begin and its end. An object
    that is cut off, or is not JSON, counts as a whole: no object within it is one of the text's. ``most`` places where
    an object may begin are tried: each may cost a pass over the text."""
    end = tried = 0
    while tried < most and (begins := _OBJECT.search(text, end)) is not None:
        tried, start = tried + 1, begins.start()
        try:
            value, end = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            end = _closed(text, start)
            continue
        yield value, start, end


def _closed(text: str, start: int) -> int:
    """The place after the bracket that closes an object which is no JSON; the text's end where it is cut off. Its
    mistake may be a quotation mark: brackets within strings count where those outside of strings do not match."""
    for braces in (_OUTSIDE_STRINGS, _BRACES):
        depth = 0
        for found in braces.finditer(text, start):
            depth += {"{": 1, "}": -1}.get(found[0], 0)
            if not depth:
                return found.end()
    return len(text)
