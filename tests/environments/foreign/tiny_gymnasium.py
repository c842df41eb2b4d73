"""A library with the interface of gymnasium and games that show one behaviour each."""

from __future__ import annotations

import random
import signal
from typing import Any


class Discrete:
    def __init__(self, n: int) -> None:
        self.n, self.start = n, 0


class Box:
    pass


class Text:
    def contains(self, text: str) -> bool:
        return text.isalpha()


class Count:
    """Counts from a drawn number up or down; each step draws another one, which is shown."""

    action_space: Any = Discrete(2)
    observation_space: Any = Discrete(100)
    render_mode: str | None = None

    def __init__(self, render_mode: str | None = None, goal: int = 3) -> None:
        self.render_mode, self.goal = render_mode, goal

    def reset(self, *, seed: int) -> tuple[Any, dict[str, Any]]:
        self.steps, self.drawn = 0, random.randrange(100)
        return self.drawn, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.drawn = random.randrange(100)
        return self.drawn, float(action), self.steps == self.goal, False, {}

    def render(self) -> str:
        return f"\x1b[41m{self.drawn}\x1b[0m|\n"

    def close(self) -> None:
        pass


class Echo(Count):
    action_space = Text()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return action, float(action == "yes"), False, action == "yes", {}


class Pixels(Count):
    observation_space = Box()


class Exits(Count):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action:
            signal.raise_signal(signal.SIGALRM)  # as after a move that takes too long
        raise RuntimeError("no such\nmove")


class Long(Count):
    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return "x" * 1_000_000, 0.0, False, False, {}


GAMES: dict[str, type[Count]] = {"Count": Count, "Echo": Echo, "Pixels": Pixels, "Exits": Exits, "Long": Long}


def make(name: str, **kwargs: Any) -> Count:
    print("a library may print")
    return GAMES[name](**kwargs)
