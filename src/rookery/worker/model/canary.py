"""The canary of a version: a fixed text whose log-probabilities the trainer writes next to the weights, so that an
engine of another kind finds out whether it computes the same version.

An engine that applied no adapter, the wrong one, another scale or another base model samples tokens that look right and
train badly. The numbers are a file of the version: they reach every engine by the way of the weights, at any staleness.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from rookery.errors import UserError

CANARY_FILE = "canary.json"

CANARY_TEXT = """The village lies in a valley between two rivers. In spring the farmers plough the fields, in summer
they bring in the hay, and in autumn they sell apples. On Sunday evening everyone meets in the square to talk."""
"""Ordinary prose: in bfloat16 the log-probabilities of likely tokens are steady, those of random ones vary."""


def canary_tokens(encode: Callable[[str], list[int]]) -> list[int]:
    """The text in the tokens of a base model."""
    return encode(CANARY_TEXT)


def write_canary(folder: Path, logprobs: Sequence[float]) -> None:
    """Write the log-probabilities at temperature 1 of every token but the first."""
    (folder / CANARY_FILE).write_text(
        json.dumps({"logprobs": [round(logprob, 4) for logprob in logprobs]}) + "\n", encoding="utf-8"
    )


def read_canary(folder: Path) -> list[float]:
    """The canaries of the version in ``folder``; empty for one that has none, such as an uploaded adapter. Raises
    ``UserError`` for a broken file."""
    path = folder / CANARY_FILE
    if not path.is_file():
        return []
    try:
        return [float(value) for value in json.loads(path.read_text(encoding="utf-8"))["logprobs"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path.name} is no canary: {error}") from None


def mean_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Mean absolute difference in nats per token."""
    return sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)
