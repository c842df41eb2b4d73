"""The fixed reply that earns most: a policy whose reward is no higher has learned nothing about the questions.

A verifier proposes replies made of the rows' own answers; each is scored on the rows as a reply of a policy would be.
The reward found is therefore one that a fixed reply does earn; that no other earns more is certain only where the
verifier says so.
"""

from __future__ import annotations

import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any

from rookery.protocol import BestConstant

PROPOSED = 3
"""Answers of a verifier that are tried: those that most rows have."""

LISTED = 100
"""Answers in a reply that lists many, where any of them counts."""

ROWS_SCORED = 2_000
"""Rows on which a proposed reply is scored, evenly spaced: a tenth of a second with a usual verifier, and a standard
error of at most 0.011 on the reward of a verifier that gives 0 or 1."""

SHOWN = 200
"""Characters of the reply that are shown."""

SECONDS = 3.0
"""Longest time for one job, for patterns that run away."""

_ATOMS = {r"\s": " ", r"\n": "\n", r"\t": "\t", "^": "", "$": "", r"\A": "", r"\Z": "", r"\b": ""}
"""The examples of parts of a pattern, for a text that matches it. Other parts have no example."""


def example(pattern: str, group: int | str | None, answer: str) -> str | None:
    """A text that a simple pattern matches with ``answer`` in its group: characters, white space, anchors and one group
    that is compared. None for other patterns. The caller scores the text: it may not match after all."""
    text, number, position = "", 0, 0
    while position < len(pattern):
        opened = re.compile(r"\((?:\?P?<(\w+)>)?(?!\?)").match(pattern, position)
        if opened is not None:
            number += 1
            if (end := _closing(pattern, position)) is None or group not in (number, opened[1]):
                return None
            text, position = text + answer, end
            continue
        atom = pattern[position : position + 2] if pattern[position] == "\\" else pattern[position]
        position += len(atom)
        if atom in _ATOMS:
            char = _ATOMS[atom]
        elif len(atom) == 2 and not atom[1].isalnum():
            char = atom[1]
        elif len(atom) == 1 and atom not in ".[](){}|*+?":
            char = atom
        else:
            return None
        many = re.compile(r"[*+?][?+]?").match(pattern, position)
        if many is not None:
            position = many.end()
            char = "" if many[0][0] in "*?" else char
        text += char
    return text


def _closing(pattern: str, start: int) -> int | None:
    """The place after the bracket that closes the group at ``start``, None for a group that holds groups."""
    position = start + 1
    while position < len(pattern):
        if pattern[position] == "\\":
            position += 1
        elif pattern[position] == "[":
            position = pattern.find("]", position + 2)
            if position == -1:
                return None
        elif pattern[position] == "(" and position > start:
            return None
        elif pattern[position] == ")":
            quantified = pattern[position + 1 : position + 2] in tuple("*+?{")
            return None if quantified else position + 1
        position += 1
    return None


def spread(rows: Sequence[Any]) -> list[Any]:
    """At most :data:`ROWS_SCORED` of the rows, evenly spaced."""
    step = max(1, -(-len(rows) // ROWS_SCORED))
    return list(rows[::step])


def most_common(values: Iterable[Any], key: Callable[[Any], Hashable], count: int = PROPOSED) -> list[Any]:
    """The most frequent values, equal when their keys are; the first of the rows where frequencies are."""
    first: dict[Hashable, Any] = {}
    counts: Counter[Hashable] = Counter()
    for value in values:
        counts[key(value)] += 1
        first.setdefault(key(value), value)
    return [first[name] for name, _ in counts.most_common(count)]


def densest(values: Iterable[Decimal], tolerance: Decimal) -> Decimal:
    """The middle of the interval of twice the tolerance that holds most values. There is at least one."""
    ordered = sorted(values)
    start = best = 0
    middle = ordered[0]
    for end, value in enumerate(ordered):
        while value - ordered[start] > 2 * tolerance:
            start += 1
        if end - start + 1 > best:
            best, middle = end - start + 1, (value + ordered[start]) / 2
    return middle


def shortened(reply: str) -> str:
    """A reply as it is shown, shortened."""
    return reply if len(reply) <= SHOWN else reply[: SHOWN - 1] + "…"


def best_of(
    replies: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    reward: Callable[[str, Mapping[str, Any]], float],
    write: Callable[[str], str],
    seconds: float = SECONDS,
) -> BestConstant | None:
    """The reply with the highest mean reward over the rows; None without a reply, a row, or enough time. ``write``
    makes the whole reply of its judged part."""
    best, until = None, time.monotonic() + seconds
    for reply in replies if rows else ():
        earned = []
        for row in rows:
            earned.append(reward(reply, row))
            if time.monotonic() > until:
                return best
        mean = statistics.fmean(earned)
        if best is None or mean > best.reward:
            best = BestConstant(reply=shortened(write(reply)), reward=mean, prompts=len(rows))
    return best
