"""Templates of OpenAI's graders: texts with places in braces that a reply and its row fill. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from rookery.spec.values import unique_fields

TEMPLATE = 20_000
"""Characters of a grader's text."""

PLACEHOLDERS = 16
"""Places of a template: each may become as long as a reply."""

RENDERED = 4 << 20
"""Characters of a text whose places are filled: a short template can name a long reply a thousand times."""

HELD_BACK = ("messages", "prompt")
"""Fields of a row that are no ``item``: the policy reads them."""

_PLACEHOLDER = re.compile(r"\{\{((?:(?!\{\{|\}\}).)*+)\}\}", re.DOTALL)
"""Linear: no place begins within another, and the repetition gives nothing back."""

_STEP = re.compile(r"\.?([A-Za-z_][A-Za-z0-9_-]*)|\[(\d{1,6})\]")

Sample = Mapping[str, Any]

Template = Annotated[str, Field(max_length=TEMPLATE)]


def item_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a row that templates see."""
    return {name: value for name, value in row.items() if name not in HELD_BACK}


def sample_of(text: str) -> dict[str, Any]:
    """The reply as templates see it. Values that no text or message can hold, such as NaN and half of a character, are
    no JSON, and neither is an object with two values of one field."""
    try:
        parsed = json.loads(text, object_pairs_hook=unique_fields)
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        parsed = None
    return {"output_text": text, "output_json": parsed}


def paths(template: str) -> list[list[str | int]]:
    """The places of a template. Raises ``ValueError`` for one that names nothing known."""
    named = []
    if "{{" in (left := _PLACEHOLDER.sub("", template)) or "{%" in left:
        raise ValueError(
            f"the template {template[:60]!r} has a {{{{ that no }}}} closes, or a {{%; give {{{{ item.FIELD }}}},"
            " {{ sample.output_text }} or {{ sample.output_json.FIELD }}, and no statements"
        )
    for placeholder in map(str.strip, _PLACEHOLDER.findall(template)):
        steps: list[str | int] = []
        at = 0
        while at < len(placeholder):
            step = _STEP.match(placeholder, at)
            if step is None:
                break
            steps.append(step[1] if step[1] is not None else int(step[2]))
            at = step.end()
        known = steps[:1] == ["item"] or steps == ["sample", "output_text"] or steps[:2] == ["sample", "output_json"]
        if at < len(placeholder) or not known or len(steps) < 2:
            raise ValueError(
                f"the template {{{{ {placeholder[:60]} }}}} names nothing; give item.FIELD, sample.output_text or"
                " sample.output_json.FIELD"
            )
        named.append(steps)
    if len(named) > PLACEHOLDERS:
        raise ValueError(f"the template has more than {PLACEHOLDERS} places in braces; give fewer")
    return named


def rendered(template: str, sample: Sample, item: Mapping[str, Any]) -> str:
    """Raises ``ValueError`` for more than :data:`RENDERED` characters."""
    parts: list[str] = []
    end = length = 0
    for placeholder in _PLACEHOLDER.finditer(template):
        [steps] = paths(placeholder[0])
        value = found(item if steps[0] == "item" else sample, steps[1:])
        try:
            text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        except RecursionError:
            raise ValueError("a field that the grader names is nested too deeply") from None
        parts += [template[end : placeholder.start()], text]
        end, length = placeholder.end(), length + len(text)
        if length > RENDERED:
            raise ValueError(f"a text of the grader has more than {RENDERED} characters with its fields")
    return "".join([*parts, template[end:]])


def found(value: Any, steps: Sequence[str | int]) -> Any:
    """The part of JSON-like data at the end of a path; None without one."""
    for step in steps:
        if isinstance(step, int):
            value = value[step] if isinstance(value, list) and step < len(value) else None
        else:
            value = value.get(step) if isinstance(value, Mapping) else None
    return value
