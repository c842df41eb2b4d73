"""Tasks of the reasoning-gym library, by name. Needs the ``reasoning-gym`` extra.

An entry is stored whole as the episode's prompt and scored from there: some tasks give different entries in different
processes for one seed, so nothing is ever made again from its number.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rookery.environments.base import Environment, Message, Reply, Split, Step
from rookery.errors import UserError, installs


class ReasoningGymOptions(BaseModel):
    """Options of ``{id: reasoning-gym}``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    task: str
    """A dataset's name in reasoning-gym."""
    config: dict[str, Any] = Field(default_factory=dict)
    """Passed on to the task."""
    size: int = Field(512, ge=1, le=100_000)
    eval_size: int = Field(64, ge=0, le=100_000)
    seed: int = Field(0, ge=0)
    suffix: str = "\nReply with the answer only."
    """Put after every question."""
    tag: str | None = Field(None, pattern=r"^\w+$")
    """Only the text inside the reply's last ``<tag>…</tag>`` is the answer; the whole reply when absent."""


NOT_INSTALLED = f"environment reasoning-gym: not installed; run: {installs('reasoning-gym')}"


def require_library() -> None:
    """Raises :class:`UserError` where the library is not installed; runs nothing of it."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(NOT_INSTALLED)


class ReasoningGym(Environment):
    """One question, one reply, the library's own score in [0, 1]."""

    deterministic = True

    def __init__(self, options: ReasoningGymOptions) -> None:
        try:
            import reasoning_gym
        except ImportError:
            raise UserError(NOT_INSTALLED) from None
        self._options = options
        try:
            self._dataset = reasoning_gym.create_dataset(
                options.task, size=options.size + options.eval_size, seed=options.seed, **options.config
            )
        except (ValueError, TypeError, AssertionError) as error:
            raise UserError(f"environment.task: {options.task}: {' '.join(str(error).split())}") from None

    def prompts(self, split: Split) -> Iterable[Any]:
        size, whole = self._options.size, self._options.size + self._options.eval_size
        # Entry i is drawn from seed + i, so the next seed would give the same entries over again: the eval entries are
        # those after the training entries. default=str keeps readable what JSON cannot say (dates and the like).
        numbers = range(size) if split == "train" else range(size, whole)
        return (json.loads(json.dumps(self._dataset[number], default=str)) for number in numbers)

    def reset(self, prompt: Any, seed: int) -> Sequence[Message]:
        return [{"role": "user", "content": prompt["question"] + self._options.suffix}]

    def step(self, reply: Reply) -> Step:
        answer: str | None = reply.text.strip()
        if self._options.tag is not None:
            found = re.findall(rf"<{self._options.tag}>(.*?)</{self._options.tag}>", reply.text, re.DOTALL)
            answer = found[-1].strip() if found else None
        score = float(self._dataset.score_answer(answer=answer, entry=self.prompt))
        return Step(reward=score, done=True, metrics={"right": float(score >= 1.0)})

    def for_episode(self) -> Environment:
        return copy.copy(self)
