"""The process that plays games of gymnasium and TextArena, in the virtual environment that has these libraries.

:mod:`rookery.environments.foreign.games` starts it, by the path of this file and isolated (``python -I``): it imports
the standard library and the game's library alone. One move is made at a time. Games draw from the random numbers of the
whole process, so each one's state of them is put back before its move.

Lines from the parent: ``{"reset": …}``, ``{"step": …}``, ``{"close": …}``. Each of the first two is answered by a line
with its episode. The process ends with its standard input, and with a game that makes no move in time.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import signal
import sys
import tempfile
from typing import Any

START_SECONDS, MOVE_SECONDS = 300, 30
"""Longest start of a library, and longest move. The alarm then ends the process."""

TEXT = 1 << 17
"""Characters of an observation."""

ACTIONS = 200
"""Most actions that a prompt lists."""

DASHES = "\u2010\u2011\u2012\u2013\u2212\ufe58\ufe63\uff0d-"
"""All signs that replies write as a minus: those of :mod:`rookery.environments.verifiers.numbers`, and the hyphen."""
NUMBER = re.compile(r"(?<![^\W_])\d+(?![^\W_])")
"""A number that is no part of a name, such as the 2 of H2O."""
COLOURED = re.compile(r"\x1b\[[0-9;]*[1-9][0-9;]*m(.*?)\x1b\[0?m", re.DOTALL)
"""A coloured part of a picture, such as the square of the player."""

OBSERVATIONS = ("Text", "Discrete", "MultiDiscrete", "MultiBinary", "Tuple", "Dict")
"""Spaces whose elements are short as JSON."""


class GameRefused(Exception):
    """The job's options are wrong; one line."""


def line(error: BaseException) -> str:
    """An error in one line."""
    words = " ".join(str(error).split())[:500]
    return words if isinstance(error, GameRefused) else f"{type(error).__name__}: {words}"


def plain(value: Any) -> Any:
    """An element of a space, of what JSON has."""
    if isinstance(value, dict):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(one) for one in value]
    return value.tolist() if hasattr(value, "tolist") else value


def check_observations(space: Any, env: str) -> None:
    """Raises :class:`GameRefused` for a space whose elements are no text."""
    kind = type(space).__name__
    if kind not in OBSERVATIONS:
        raise GameRefused(
            f"env: observations of {env} are of the space {kind}, allowed: {', '.join(OBSERVATIONS)}, or any with"
            " kwargs.render_mode: ansi"
        )
    parts = getattr(space, "spaces", ())  # of Tuple and Dict
    for part in parts.values() if isinstance(parts, dict) else parts:
        check_observations(part, env)


class Gymnasium:
    """One episode."""

    def __init__(self, given: dict[str, Any]) -> None:
        library = importlib.import_module("gymnasium")
        self.env = library.make(given["env"], **given["kwargs"])
        self.picture = getattr(self.env, "render_mode", None) == "ansi"
        if not self.picture:
            check_observations(self.env.observation_space, given["env"])
        self.instructions = given["instructions"]
        self.steps, self.invalid = 0, False
        space = self.env.action_space
        kind = type(space).__name__
        if kind not in ("Text", "Discrete"):
            raise GameRefused(f"env: actions of {given['env']} are of the space {kind}, allowed: Text, Discrete")
        count = int(space.n) if kind == "Discrete" else 0
        if count > ACTIONS:
            raise GameRefused(f"env: {given['env']} has {count} actions, allowed: at most {ACTIONS}")
        if given["actions"] and len(given["actions"]) != count:
            raise GameRefused(
                f"actions: given {len(given['actions'])}, allowed: {count}, one for each of {given['env']}"
            )
        self.first = int(space.start) if count else 0
        self.numbered = not given["actions"]
        self.actions = given["actions"] or [str(self.first + number) for number in range(count)]
        names = "|".join(re.escape(name) for name in sorted(self.actions, key=len, reverse=True))
        # no part of another word, nor of a number: 1 is in neither -1 nor 0.1
        part = rf"[\w{DASHES}]"
        self.pattern = re.compile(rf"(?<!{part})(?<!\d[.,])(?:{names})(?!{part})(?![.,]\d)", re.IGNORECASE)
        self.numbers = {name.casefold(): self.first + number for number, name in enumerate(self.actions)}
        self.choices = f"Reply with one of: {', '.join(self.actions)}." if self.actions else ""

    def reset(self, seed: int) -> str:
        observation, _ = self.env.reset(seed=seed)
        return "\n\n".join(filter(None, (self.instructions, self.shown(observation), self.choices)))

    def step(self, reply: str) -> tuple[str, float, bool]:
        self.steps += 1
        action = self.action(reply)
        if action is None:
            self.invalid = True
            return self.choices or f"That is no action. An action is of {self.env.action_space}.", 0.0, False
        observation, reward, terminated, truncated, _ = self.env.step(action)
        done = bool(terminated or truncated)
        return "" if done else self.shown(observation), float(reward), done

    def action(self, reply: str) -> int | str | None:
        """The action in a reply, the last one where it names several; None where there is none, or where actions are
        numbers and the last number is none."""
        if not self.actions:
            text = reply.strip()
            return text if self.env.action_space.contains(text) else None
        found = [*self.pattern.finditer(reply)]
        if not found:
            return None
        if self.numbered and NUMBER.search(reply, found[-1].end()):  # 12 of "1 or 12" is none
            return None
        return self.numbers[found[-1][0].casefold()]

    def shown(self, observation: Any) -> str:
        if self.picture:
            return COLOURED.sub(r"[\1]", str(self.env.render())).strip("\n")
        value = plain(observation)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def close(self) -> None:
        self.env.close()


class TextArena:
    """One episode of a game for one player."""

    def __init__(self, given: dict[str, Any]) -> None:
        library = importlib.import_module("textarena")
        registered = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
        raw = f"{given['env']}-raw"  # its observations are new messages, not the whole conversation
        self.env = library.make(raw if raw in registered else given["env"], **given["kwargs"])
        self.own = library.ObservationType.PLAYER_ACTION
        self.steps, self.invalid = 0, False

    def reset(self, seed: int) -> str:
        self.env.reset(num_players=1, seed=seed)
        return self.shown()

    def step(self, reply: str) -> tuple[str, float, bool]:
        self.steps += 1
        done, _ = self.env.step(reply)
        if not done:
            return self.shown(), 0.0, False
        rewards, info = self.env.close()
        self.invalid = bool((info or {}).get(0, {}).get("invalid_move"))
        return "", float((rewards or {}).get(0, 0.0)), True

    def shown(self) -> str:
        _, observation = self.env.get_observation()
        if isinstance(observation, str):
            return observation
        return "\n\n".join(str(text) for _, text, kind in observation if kind != self.own)

    def close(self) -> None:
        """A game holds nothing: its ``close`` is the end's reward."""


LIBRARIES: dict[str, Any] = {"gymnasium": Gymnasium, "textarena": TextArena}


class PlayedGame:
    """A game with its random numbers."""

    def __init__(self, given: dict[str, Any], seed: int) -> None:
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed)
        self.game = LIBRARIES[given["library"]](given)
        self.text = self.bounded(self.game.reset(seed))
        self.keep()

    def keep(self) -> None:
        self.state = random.getstate()
        self.array_state = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None

    def step(self, reply: str) -> dict[str, Any]:
        random.setstate(self.state)
        if self.array_state is not None:
            sys.modules["numpy"].random.set_state(self.array_state)
        text, reward, done = self.game.step(reply)
        self.keep()
        metrics = {"invalid": float(self.game.invalid), "steps": float(self.game.steps)}
        return {"text": self.bounded(text), "reward": reward, "done": done, "metrics": metrics}

    @staticmethod
    def bounded(text: str) -> str:
        if len(text) > TEXT:
            raise GameRefused(f"characters of an observation: {len(text)}, allowed: at most {TEXT}")
        return text


def answer(message: dict[str, Any], given: dict[str, Any], episodes: dict[str, PlayedGame]) -> dict[str, Any] | None:
    """The line for a line of the parent; None for the end of an episode."""
    if "close" in message:
        episode = episodes.pop(message["close"], None)
        if episode is not None:
            episode.game.close()
        return None
    if "reset" in message:
        made = episodes[message["reset"]] = PlayedGame(given, message["seed"])
        return {"text": made.text}
    return episodes[message["step"]].step(message["text"])


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no message
    given = json.loads(sys.argv[1])

    def send(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    with tempfile.TemporaryDirectory(prefix="rookery-games-") as folder:
        os.chdir(folder)
        signal.alarm(START_SECONDS)
        try:
            PlayedGame(given, given["seed"]).game.close()
        except Exception as error:  # of the library or the game: the parent says it
            send({"refused": line(error) if isinstance(error, GameRefused) else f"env: {line(error)}"})
            return
        signal.alarm(0)
        send({"ready": True})
        episodes: dict[str, PlayedGame] = {}
        for text in sys.stdin:
            message = json.loads(text)
            signal.alarm(MOVE_SECONDS)
            try:
                reply = answer(message, given, episodes)
            except Exception as error:
                reply = {"error": f"{given['library']}: {given['env']}: {line(error)}"}
            signal.alarm(0)
            if reply is not None:
                send({"episode": message.get("reset") or message.get("step"), **reply})


if __name__ == "__main__":
    main()
