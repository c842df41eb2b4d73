"""The built-ins ``gymnasium`` and ``textarena``: games of these libraries, whose turns are texts.

:mod:`rookery.environments.foreign.games_process` plays them, in the virtual environment that the administrator names.
A prompt is a seed: all episodes of a group start alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, field_validator

from rookery.bounds import SETTINGS, GivenModel, JsonSize, Name, Text
from rookery.environments.base import Environment, Message, Reply, Split, SplitSizes, Step
from rookery.environments.foreign.pool import LibraryProcesses
from rookery.environments.foreign.process import (
    Installed,
    LibraryFailed,
    LibraryProcess,
    parse_installed,
)
from rookery.environments.verifiers.parts import spoken
from rookery.errors import UserError

PROCESS = Path(__file__).with_name("games_process.py")

LIBRARIES = ("gymnasium", "textarena")

SEEDS = 2**31
"""Seeds are below it, as numpy's were."""

STARTS, ACTIONS = 100_000, 200
"""Most starts of a split, and most actions that a prompt lists."""

DEPTH = 8
"""Most levels of an argument."""

_NAME = re.compile(r"[\w -]{0,200}")

_installed: Installed | None = None


def parse_games(text: str) -> Installed | None:
    """The setting ``games``. Raises :class:`UserError`."""
    installed = parse_installed(text, "ROOKERY_GAMES", "LIBRARY/GAME", "gymnasium or textarena")
    for name in installed.names if installed is not None else ():
        library, _, game = name.partition("/")
        if library not in LIBRARIES or not game:
            raise UserError(
                f"setting ROOKERY_GAMES: given {name!r}, allowed: gymnasium/GAME or textarena/GAME, such as"
                " gymnasium/FrozenLake-v1"
            )
    return installed


def set_games(text: str) -> None:
    """Set the packages that jobs may use. Called once when a process starts."""
    global _installed
    _installed = parse_games(text)


def require_games() -> Installed:
    """Raises :class:`UserError` where the administrator named none."""
    if _installed is None:
        raise UserError(
            f"environment.id: {' and '.join(LIBRARIES)} are not set up; the administrator names an interpreter and"
            " games in ROOKERY_GAMES"
        )
    return _installed


def check_argument(value: Any, depth: int = 0) -> None:
    """Raises ``ValueError`` for an argument that could name a file, a function or an address: only names, numbers and
    lists and objects of these are taken."""
    if depth > DEPTH:
        raise ValueError(f"at most {DEPTH} levels of lists and objects")
    match value:
        case bool() | int() | float() | None:
            return
        case str() if _NAME.fullmatch(value):
            return
        case list():
            for one in value:
                check_argument(one, depth + 1)
        case dict():
            for one in (*value, *value.values()):
                check_argument(one, depth + 1)
        case _:
            raise ValueError("texts of letters, digits, blanks, _ and -, numbers, and lists and objects of these")


class GameOptions(GivenModel):
    """Options that both libraries have."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    library: ClassVar[str]

    env: Name
    """A game of `ROOKERY_GAMES`, without the library's name."""
    kwargs: Annotated[dict[Name, Any], JsonSize(SETTINGS)] = Field(default_factory=dict)
    """Arguments of the library's `make`: names, numbers, and lists and objects of these."""
    size: int = Field(512, ge=1, le=STARTS)
    """Number of training prompts: the game's starts from as many seeds."""
    eval_size: int = Field(64, ge=0, le=STARTS)
    """Number of held-out prompts: the seeds after those."""
    seed: int = Field(0, ge=0, lt=SEEDS)
    """The first seed."""

    @field_validator("env")
    @classmethod
    def _is_named(cls, value: str) -> str:
        names = [name.partition("/") for name in require_games().names]
        allowed = [game for library, _, game in names if library == cls.library]
        if value not in allowed:
            raise ValueError(f"one of the administrator's: {', '.join(allowed) or 'none of this library'}")
        return value

    @field_validator("kwargs")
    @classmethod
    def _are_plain(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_argument(value)
        if value.get("render_mode") not in (None, "ansi"):
            raise ValueError("render_mode: ansi, the text of each state")
        return value

    def sizes(self) -> SplitSizes:
        """The sizes of the splits."""
        return SplitSizes(self.size, self.eval_size, held_out_by="environment.eval_size")

    def seeds(self, split: Split) -> list[int]:
        first, count = (self.seed, self.size) if split == "train" else (self.seed + self.size, self.eval_size)
        return [number % SEEDS for number in range(first, first + count)]


class GymnasiumOptions(GameOptions):
    """Options of ``{id: gymnasium}``: a game of gymnasium that the administrator has installed, with actions of the
    space `Text` or `Discrete`. The policy reads the observation, or with `kwargs: {render_mode: ansi}` the picture, and
    replies with an action. Rewards of the steps add up. Metrics: `invalid`, the share of episodes with a reply that is
    no action, and `steps`. See [Games](environments.md#games)."""

    library: ClassVar[str] = "gymnasium"

    actions: list[Name] = Field(default_factory=list, max_length=ACTIONS)
    """Names of the actions of a space `Discrete`, in its order. When absent, their numbers."""
    instructions: Text = ""
    """Text before the first observation, such as the rules."""

    @field_validator("actions")
    @classmethod
    def _differ(cls, value: list[str]) -> list[str]:
        folded = {" ".join(name.casefold().split()) for name in value}
        if len(folded) < len(value) or "" in folded:
            raise ValueError("names that differ, also without regard to case, and are not empty")
        return value


class TextArenaOptions(GameOptions):
    """Options of ``{id: textarena}``: a game of TextArena for one player that the administrator has installed. The
    policy reads the game's messages; its whole reply is the move. The reward is the game's, at its end. Metrics:
    `invalid`, the share of episodes that an invalid move ended, and `steps`. See [Games](environments.md#games)."""

    library: ClassVar[str] = "textarena"


class Game(Environment):
    """One episode of a game."""

    def __init__(self, options: GameOptions) -> None:
        """Starts the process and makes the game once. Blocks; raises :class:`UserError`."""
        self._options = options
        given = {"library": options.library, **options.model_dump(mode="json")}
        self._processes = LibraryProcesses(options.library, require_games().python, PROCESS, given)
        self._process: LibraryProcess | None = None
        self._inbox: asyncio.Queue[dict[str, Any]] | None = None
        self._name = ""

    def prompts(self, split: Split) -> Iterable[Any]:
        return self._options.seeds(split)

    async def reset(self, prompt: Any, seed: int) -> Sequence[Message]:
        self._process = await self._processes.join()
        self._name = self._processes.next_name()
        self._inbox = self._process.listen(self._name)
        answer = await self._ask({"reset": self._name, "seed": prompt})
        return [{"role": "user", "content": answer["text"]}]

    async def step(self, reply: Reply) -> Step:
        text = spoken(reply.text, reply.raw, reply.special) or ""
        answer = await self._ask({"step": self._name, "text": text})
        messages = [] if answer["done"] else [{"role": "user", "content": answer["text"]}]
        return Step(messages, answer["reward"], answer["done"], answer["metrics"])

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.forget(self._name)
            with contextlib.suppress(LibraryFailed):
                process.send({"close": self._name})
            self._processes.leave(process)

    def for_episode(self) -> Environment:
        return copy.copy(self)  # the process is shared

    async def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process is not None and self._inbox is not None
        self._process.send(message)
        answer = await self._inbox.get()
        if "error" in answer:
            raise LibraryFailed(answer["error"])
        return answer
