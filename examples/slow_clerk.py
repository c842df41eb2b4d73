"""File people under city and name: an environment that takes 1 to 2 seconds for each step."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import rookery
from rookery.cli.demo import HELD_OUT, Task, run_tasks
from rookery.examples.words import CITIES, PEOPLE, assistant, user


class SlowClerk(rookery.Environment):
    """``File: Maria of Paris`` becomes ``paris/maria``."""

    deterministic = True

    def prompts(self, split: str) -> Iterable[list[str]]:
        pairs = random.Random(11).sample([[*pair] for pair in itertools.product(PEOPLE, CITIES)], HELD_OUT * 5)
        return pairs[:HELD_OUT] if split == "eval" else pairs[HELD_OUT:]

    async def reset(self, prompt: list[str], seed: int) -> Sequence[dict[str, str]]:
        self.delay = 1 + random.Random(seed).random()
        name, city = prompt
        return [user("File: Hugo of Lima"), assistant("lima/hugo"), user(f"File: {name} of {city}")]

    async def step(self, reply: rookery.Reply) -> rookery.Step:
        await asyncio.sleep(self.delay)
        name, city = (part.lower() for part in self.prompt)
        text = reply.text.strip()
        form = re.fullmatch(r"([a-z]+)/([a-z]+)", text) is not None
        right = text == f"{city}/{name}"
        parts = form * (text.startswith(f"{city}/") + text.endswith(f"/{name}"))
        return rookery.Step(reward=0.2 * form + 0.4 * parts, done=True, metrics={"right": float(right)})


def best_constant(prompts: list[Any]) -> float:
    """The right form with the most common city and name."""
    names, cities = [name for name, _ in prompts], [city for _, city in prompts]
    return 0.2 + 0.4 * (max(map(names.count, names)) + max(map(cities.count, cities))) / len(prompts)


TASK = Task(
    tenant="dee",
    name="slow-clerk",
    description="an environment that takes 1 to 2 s per step: file people under city/name",
    environment=SlowClerk(),
    max_tokens=12,
    steps=12,
    best_constant=best_constant,
)

if __name__ == "__main__":
    sys.exit(run_tasks([TASK]))
