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


def stories(count: int) -> list[str]:
    """Different requests of like length whose replies no model of this size ends within ``REPLY_TOKENS`` tokens: every
    reply is as long as every other, so that all steps are the same work."""
    source = random.Random(2)
    kinds = "brave quiet clever lazy tiny giant happy lonely golden silver curious stubborn".split()
    heroes = "fox owl bear whale horse rabbit robot baker sailor painter gardener wizard".split()
    places = "forest desert village castle harbour island mountain library market garden".split()
    return [
        f"Tell me a long story about a {source.choice(kinds)} {source.choice(heroes)} in a {source.choice(places)}."
        for _ in range(count)
    ]


def lists(count: int) -> list[str]:
    """Different requests for the same shape of JSON."""
    source = random.Random(3)
    things = "fruits tools cars toys books birds shoes lamps games cakes chairs boats".split()
    return [
        f'List {source.randint(4, 9)} {source.choice(things)} of a shop as JSON. Each has "name", "color", "price" and'
        ' "stock", like [{"name": "x", "color": "red", "price": 3, "stock": 12}]. Reply with JSON only.'
        for _ in range(count)
    ]


def sums(count: int) -> list[str]:
    """Different chains of additions, each step like the one before."""
    source = random.Random(4)
    return [
        f"Add the numbers from {(start := source.randint(2, 60))} to {start + 9} one after another. Write every step on"
        f" a line of its own, like {start} + {start + 1} = {2 * start + 1}."
        for _ in range(count)
    ]


def reward(tokens: Sequence[int]) -> float:
    """The share of liked tokens: it differs within nearly every group, so that every group has a gradient."""
    return sum(token % LIKED == 0 for token in tokens) / max(1, len(tokens))
