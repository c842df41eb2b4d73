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


class Echo(rookery.Environment):
    """Single turn: say a word three times, and nothing else."""

    deterministic = True

    def prompts(self, split: str) -> Iterable[str]:
        return WORDS[:HELD_OUT] if split == "eval" else WORDS[HELD_OUT:] + [name.lower() for name in PEOPLE + CITIES]

    async def reset(self, prompt: str, seed: int) -> Sequence[dict[str, str]]:
        return [user("Three times: cloud"), assistant("cloud cloud cloud"), user(f"Three times: {prompt}")]

    async def step(self, reply: rookery.Reply) -> rookery.Step:
        right = reply.text.strip().lower() == " ".join([self.prompt] * 3)
        said = min(3, reply.text.lower().split().count(self.prompt))
        return rookery.Step(reward=1.0 if right else 0.1 * said, done=True, metrics={"right": float(right)})


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
    """Single turn, but the world takes 1 to 2 seconds to answer each reply: which of two numbers is larger?"""

    deterministic = True

    def prompts(self, split: str) -> Iterable[list[int]]:
        draw = random.Random(f"slow clerk {split}")
        return [draw.sample(range(10, 100), 2) for _ in range(HELD_OUT * 4)]

    async def reset(self, prompt: list[int], seed: int) -> Sequence[dict[str, str]]:
        self.delay = 1 + random.Random(seed).random()
        a, b = prompt
        return [user("Larger: 31 or 17?"), assistant("31"), user(f"Larger: {a} or {b}?")]

    async def step(self, reply: rookery.Reply) -> rookery.Step:
        await asyncio.sleep(self.delay)
        said = reply.text.strip()
        reward = 1.0 if said == str(max(self.prompt)) else 0.3 if said == str(min(self.prompt)) else 0.0
        return rookery.Step(reward=reward, done=True, metrics={"right": float(reward == 1.0)})


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


def _echo_constant(prompts: list[Any]) -> float:
    return 1 / len(prompts)


def _book_constant(prompts: list[Any]) -> float:
    names = [prompt["name"] for prompt in prompts]
    return 0.5 * max(map(names.count, names)) / len(prompts)


def _clerk_constant(prompts: list[Any]) -> float:
    """The number that is most often the larger one, or the smaller one."""
    earned = [
        sum(1.0 if number == max(pair) else 0.3 if number == min(pair) else 0.0 for pair in prompts)
        for number in range(10, 100)
    ]
    return max(earned) / len(prompts)


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
        Task("bo", "echo", "a class of your own, one turn: say a word three times, nothing else", Echo(),
             16, 10, _echo_constant),
        Task("cy", "phone-book", "two turns with a tool: ask the book, then use what it says", PhoneBook(),
             14, 10, _book_constant),
        Task("dee", "slow-clerk", "a world that takes 1 to 2 s to answer: which number is larger?", SlowClerk(),
             8, 10, _clerk_constant),
    ]  # fmt: skip
