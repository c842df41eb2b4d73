"""Ask a tool and use its answer: an environment class with two turns."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import rookery
from rookery.cli.demo import HELD_OUT, Task, run_tasks
from rookery.examples.words import CITIES, PEOPLE, assistant, user


class PhoneBook(rookery.Environment):
    """The number is only in the book, so the model has to look it up, and then to repeat it."""

    deterministic = True

    def prompts(self, split: str) -> Iterable[dict[str, str]]:
        draw = random.Random(f"phone book {split}")
        people = PEOPLE if split == "train" else PEOPLE + [city[::-1].title() for city in CITIES]
        return [{"name": draw.choice(people), "number": str(draw.randrange(1000, 10000))} for _ in range(HELD_OUT * 4)]

    async def reset(self, prompt: dict[str, str], seed: int) -> Sequence[dict[str, str]]:
        return [
            user("Number of Hugo?"),
            assistant("lookup(Hugo)"),
            user("lookup(Hugo) = 4071"),
            assistant("4071"),
            user(f"Number of {prompt['name']}?"),
        ]

    async def step(self, reply: rookery.Reply) -> rookery.Step:
        name, number, text = self.prompt["name"], self.prompt["number"], reply.text.strip()
        if reply.turn == 0:
            if text != f"lookup({name})":
                return rookery.Step(reward=0.2 if f"lookup({name})" in text else 0.0, done=True)
            return rookery.Step(messages=[user(f"lookup({name}) = {number}")], reward=0.5, metrics={"asked": 1.0})
        right = text == number
        return rookery.Step(reward=0.5 * right, done=True, metrics={"asked": 1.0, "right": float(right)})


def best_constant(prompts: list[Any]) -> float:
    """Looking up the most common name."""
    names = [prompt["name"] for prompt in prompts]
    return 0.5 * max(map(names.count, names)) / len(prompts)


TASK = Task(
    tenant="cy",
    name="phone-book",
    description="two turns with a tool: ask the book, then use its answer",
    environment=PhoneBook(),
    max_tokens=14,
    steps=8,
    best_constant=best_constant,
)

if __name__ == "__main__":
    sys.exit(run_tasks([TASK]))
