"""A library with the interface of TextArena and one game."""

from __future__ import annotations

import random
from enum import Enum
from typing import Any


class ObservationType(Enum):
    PROMPT = 1
    PLAYER_ACTION = 2


class Guess:
    """The first guess counts; without a number it is invalid until the second."""

    def reset(self, num_players: int, seed: int) -> None:
        random.seed(seed)
        assert num_players == 1
        self.number, self.invalid, self.reward = random.randrange(10), False, 0.0
        self.new = [(-1, f"Guess {self.number}.", ObservationType.PROMPT)]

    def get_observation(self) -> tuple[int, list[Any]]:
        new, self.new = self.new, []
        return 0, new

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        if action.isdigit():
            self.reward = float(int(action) == self.number)
            return True, {}
        if self.invalid:
            self.reward = -1.0
            return True, {}
        self.invalid = True
        self.new = [(0, action, ObservationType.PLAYER_ACTION), (-1, "No number.", ObservationType.PROMPT)]
        return False, {}

    def close(self) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
        return {0: self.reward}, {0: {"invalid_move": self.reward < 0}}


ENV_REGISTRY = {"Guess": None, "Guess-raw": None}


def make(name: str, **kwargs: Any) -> Guess:
    assert name == "Guess-raw"
    return Guess(**kwargs)
