"""The same work for every contender. Nothing is imported that a peer's environment might lack."""

from __future__ import annotations

import random
from collections.abc import Sequence

PROMPTS, COMPLETIONS, REPLY_TOKENS = 8, 8, 20
"""One GRPO step, as ``measurements.md`` of the design counts it."""

LIKED = 7
"""Token ids that divide by it are rewarded."""


def random_ids(count: int, length: int, vocabulary: int) -> list[list[int]]:
    """Different sequences of ``length`` token ids, always the same: for training, whose work no token changes."""
    source = random.Random(0)
    return [[source.randrange(1000, vocabulary) for _ in range(length)] for _ in range(count)]


def questions(count: int) -> list[str]:
    """Different questions of like length, such as a verifier could judge."""
    source = random.Random(1)
    return [
        f"Add {source.randint(10, 99)} and {source.randint(10, 99)}, then take away {source.randint(2, 9)}."
        ' Reply in JSON like {"answer": 5}.'
        for _ in range(count)
    ]


def reward(tokens: Sequence[int]) -> float:
    """The share of liked tokens: it differs within nearly every group, so that every group has a gradient."""
    return sum(token % LIKED == 0 for token in tokens) / max(1, len(tokens))
