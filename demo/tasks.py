"""The demo's four tasks. They differ in kind: rows in a file, a user's own class, a tool over two turns, a slow world.

Each shows the model one worked example and pays for the form first, then for the content, so that a group of eight
attempts nearly always has better and worse ones. No task can be solved by one constant answer; :func:`constant` says
what the best constant answer earns, and the demo compares with it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rookery

HELD_OUT = 64
"""Held-out prompts of each task, the same before and after."""

PEOPLE = (
    "Maria John Anna Peter Lucy Omar Nina Paul Rosa Kenji Ivan Elsa Mina Carl Dora Emil Faye Gita Hans Igor Jana Karl"
    " Lena Milo Nora Otto Pia Ravi Sara Theo Uma Vera Walt Yara Zoe"
).split()
CITIES = (
    "Paris Rome Cairo Oslo Delhi Tokyo Madrid Berlin Dublin Athens Lisbon Vienna Prague Boston Denver Turin Quito Seoul"
    " Perth Bonn Bern Riga Kyiv Lyon"
).split()
WORDS = (
    "apple river stone garden window silver monkey bridge candle forest pencil rocket island butter castle"
    " dragon planet guitar tunnel velvet anchor basket button camera carpet cheese circle coffee copper desert"
    " dinner doctor engine farmer feather finger flower hammer honey jacket jungle kitten ladder lemon letter"
    " market meadow mirror mountain needle ocean orange paper parrot pepper pillow pocket potato rabbit ribbon"
    " saddle salmon school shadow signal spider spring summer sugar sunset temple thunder ticket tiger tomato"
    " tower turtle valley violin wagon walnut water whale winter wizard wolf yellow zebra"
).split()


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


def write_contacts(path: Path) -> None:
    """The first task's rows: who moved where, to be written as JSON; the last 64 are held out."""
    pairs = random.Random(7).sample(list(itertools.product(PEOPLE, CITIES)), 400)
    with path.open("w", encoding="utf-8") as file:
        for name, city in pairs:
            example = [user("Hugo moved to Lima. As JSON:"), assistant('{"name": "Hugo", "city": "Lima"}')]
            messages = [*example, user(f"{name} moved to {city}. As JSON:")]
            file.write(json.dumps({"messages": messages, "name": name, "city": city}) + "\n")


class Shopping(rookery.Environment):
    """Single turn: write a wish as a line of a shopping list."""

    deterministic = True

    def prompts(self, split: str) -> Iterable[dict[str, Any]]:
        wishes = random.Random(5).sample(list(itertools.product(WORDS, range(2, 10))), HELD_OUT * 5)
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


class PhoneBook(rookery.Environment):
    """Two turns: the number is only in the book, so the model has to ask for it, and then to use what it was told."""

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
        name, number, said = self.prompt["name"], self.prompt["number"], reply.text.strip()
        if reply.turn == 0:
            if said != f"lookup({name})":
                return rookery.Step(reward=0.2 if f"lookup({name})" in said else 0.0, done=True)
            return rookery.Step(messages=[user(f"lookup({name}) = {number}")], reward=0.5, metrics={"asked": 1.0})
        right = said == number
        return rookery.Step(reward=0.5 * right, done=True, metrics={"asked": 1.0, "right": float(right)})


class SlowClerk(rookery.Environment):
    """Single turn, but the world takes 1 to 2 seconds to answer: a clerk who files people under city and name."""

    deterministic = True

    def prompts(self, split: str) -> Iterable[list[str]]:
        pairs = random.Random(11).sample(list(itertools.product(PEOPLE, CITIES)), HELD_OUT * 5)
        return pairs[:HELD_OUT] if split == "eval" else pairs[HELD_OUT:]

    async def reset(self, prompt: list[str], seed: int) -> Sequence[dict[str, str]]:
        self.delay = 1 + random.Random(seed).random()
        name, city = prompt
        return [user("File: Hugo of Lima"), assistant("lima/hugo"), user(f"File: {name} of {city}")]

    async def step(self, reply: rookery.Reply) -> rookery.Step:
        await asyncio.sleep(self.delay)
        name, city = (part.lower() for part in self.prompt)
        said = reply.text.strip()
        form = re.fullmatch(r"([a-z]+)/([a-z]+)", said) is not None
        right = said == f"{city}/{name}"
        parts = form * (said.startswith(f"{city}/") + said.endswith(f"/{name}"))
        return rookery.Step(reward=0.2 * form + 0.4 * parts, done=True, metrics={"right": float(right)})


@dataclass(frozen=True)
class Task:
    """One tenant's job. ``constant`` is the best mean reward that one constant reply earns on held-out prompts."""

    tenant: str
    name: str
    what: str
    environment: dict[str, Any] | rookery.Environment
    max_tokens: int
    steps: int
    constant: Callable[[list[Any]], float]


def _json_constant(prompts: list[Any]) -> float:
    """Valid JSON with the most common name and city."""
    names, cities = [row["name"] for row in prompts], [row["city"] for row in prompts]
    right = max(map(names.count, names)) + max(map(cities.count, cities))
    return 0.3 + 0.35 * right / len(prompts)


def _shopping_constant(prompts: list[Any]) -> float:
    """The right form with the most common thing and number."""
    things, numbers = [prompt["thing"] for prompt in prompts], [prompt["number"] for prompt in prompts]
    right = max(map(things.count, things)) + max(map(numbers.count, numbers))
    return 0.2 + 0.4 * right / len(prompts)


def _book_constant(prompts: list[Any]) -> float:
    names = [prompt["name"] for prompt in prompts]
    return 0.5 * max(map(names.count, names)) / len(prompts)


def _clerk_constant(prompts: list[Any]) -> float:
    """The right form with the most common city and name."""
    names, cities = [name for name, _ in prompts], [city for _, city in prompts]
    return 0.2 + 0.4 * (max(map(names.count, names)) + max(map(cities.count, cities))) / len(prompts)


def tasks(folder: Path) -> list[Task]:
    """The four, with the file of the first one written to ``folder``."""
    contacts = folder / "contacts.jsonl"
    write_contacts(contacts)
    rows = {
        "id": "jsonl",
        "path": str(contacts),
        "eval_last": HELD_OUT,
        "verifier": {
            "name": "json",
            "strict": True,
            "only": True,
            "fields": {"name": "name", "city": "city"},
        },
    }
    return [
        Task("ada", "contacts", "a JSONL file and a named verifier: write a sentence as strict JSON", rows,
             24, 10, _json_constant),
        Task("bo", "shopping", "a class of your own, one turn: a wish becomes a line of a list", Shopping(),
             12, 8, _shopping_constant),
        Task("cy", "phone-book", "two turns with a tool: ask the book, then use what it says", PhoneBook(),
             14, 8, _book_constant),
        Task("dee", "slow-clerk", "a world that takes 1 to 2 s to answer: file people under city/name", SlowClerk(),
             12, 12, _clerk_constant),
    ]  # fmt: skip
