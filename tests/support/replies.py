"""Whole replies of the fake engine, for tests that know what a text must be; and lengths of replies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from rookery.simulation.fakes.text import Length, draw, logprobs_of, tokens_of


class Group(NamedTuple):
    """A complete group, as far as :func:`rookery.scheduling.job_rules.select_batch` looks at it."""

    name: str
    ordinal: int
    step: int
    responses: int = 1


@dataclass(frozen=True)
class UniformLength:
    """Lengths are uniform from ``shortest`` to ``spread`` times the limit more; those beyond the limit are cut."""

    shortest: int = 1
    spread: float = 1.0

    def __call__(self, seed: int, max_tokens: int) -> int:
        return min(self.shortest + draw("length", seed) % max(1, int(max_tokens * self.spread)), max_tokens)


def full_length(seed: int, max_tokens: int) -> int:
    """Every reply has its full length: equal requests are equal work."""
    return max_tokens


@lru_cache(maxsize=1 << 14)
def reply_of(seed: int, max_tokens: int, length: Length) -> tuple[list[int], list[float], Literal["stop", "length"]]:
    """(tokens, log-probabilities, finish) of the whole reply to a seed."""
    count = length(seed, max_tokens)
    finish: Literal["stop", "length"] = "stop" if count < max_tokens else "length"
    return tokens_of(seed, 0, count, count, max_tokens), logprobs_of(seed, 0, count), finish
