"""A server of the real OpenEnv library: count down to zero. Arguments: port, most sessions."""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Take(Action):
    number: int


class Left(Observation):
    left: int = 0
    seed: int = 0


class Countdown(Environment[Take, Left, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, start: int = 3, **more: Any) -> Left:
        self.left, self.seed = start, seed or 0
        return Left(left=start, seed=self.seed, done=False, reward=None)

    def step(self, action: Take, **more: Any) -> Left:
        if action.number == 99:
            raise RuntimeError("no such move")
        self.left -= action.number
        return Left(left=self.left, seed=self.seed, done=self.left <= 0, reward=1.0 if self.left == 0 else None)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    app = create_fastapi_app(Countdown, Take, Left, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
