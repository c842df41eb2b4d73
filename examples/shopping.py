"""Write a wish as a line of a shopping list: an environment class with one turn."""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import rookery
from rookery.cli.demo import HELD_OUT, Task, run_tasks
from rookery.examples.words import THINGS, assistant, user


class Shopping(rookery.Environment):
    """``I want 4 of apple.`` becomes ``apple: 4``."""

    deterministic = True

    def prompts(self, split: str) -> Iterable[dict[str, Any]]:
        wishes = random.Random(5).sample(list(itertools.product(THINGS, range(2, 10))), HELD_OUT * 5)
        part = wishes[:HELD_OUT] if split == "eval" else wishes[HELD_OUT:]
        return [{"thing": thing, "number": number} for thing, number in part]

    async def reset(self, prompt: dict[str, Any], seed: int) -> Sequence[dict[str, str]]:
        wish = f"I want {prompt['number']} of {prompt['thing']}."
        return [user("I want 3 of cloud."), assistant("cloud: 3"), user(wish)]

    async def step(self, reply: rookery.Reply) -> rookery.Step:
        thing, number = self.prompt["thing"], self.prompt["number"]
        line = re.fullmatch(r"([a-z]+): ([0-9]+)", reply.text.strip())
        parts = (line[1] == thing) + (line[2] == str(number)) if line else 0
        reward = 0.2 + 0.4 * parts if line else 0.0
        return rookery.Step(reward=reward, done=True, metrics={"right": float(parts == 2)})


def best_constant(prompts: list[Any]) -> float:
    """The right form with the most common thing and number."""
    things, numbers = [prompt["thing"] for prompt in prompts], [prompt["number"] for prompt in prompts]
    right = max(map(things.count, things)) + max(map(numbers.count, numbers))
    return 0.2 + 0.4 * right / len(prompts)


TASK = Task(
    tenant="bo",
    name="shopping",
    description="an environment class, one turn: a wish becomes a line of a list",
    environment=Shopping(),
    max_tokens=12,
    steps=8,
    best_constant=best_constant,
)

if __name__ == "__main__":
    sys.exit(run_tasks([TASK]))
