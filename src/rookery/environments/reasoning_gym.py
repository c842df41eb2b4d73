"""The built-in ``reasoning-gym``: tasks of the reasoning-gym library, by name. Needs the ``reasoning-gym`` extra.

An entry is stored whole as the episode's prompt and scored from there, because some tasks give different entries in
different processes for one seed. Replies are scored in separate processes
(:mod:`rookery.environments.verifiers.pool`). Tasks whose scorer runs replies as code are refused.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field, field_validator

from rookery.bounds import INTEGER, SETTINGS, JsonSize, Name, Text
from rookery.environments.base import Environment, Message, Reply, Split, Step
from rookery.environments.verifiers import pool
from rookery.environments.verifiers.parts import ReplyPart
from rookery.environments.verifiers.pool import LIMIT_SECONDS, VerifierError, VerifierPool, VerifierTimeout
from rookery.errors import UserError, installs

log = logging.getLogger("rookery.environments")

REPLIES_ARE_CODE = {
    "binary_matrix": "eval",
    "countdown": "sympy's parse_expr",
    "intermediate_integration": "sympy's parse_expr",
    "n_queens": "eval",
    "polynomial_multiplication": "sympy's parse_expr",
    "puzzle24": "sympy's parse_expr",
    "simple_integration": "sympy's parse_expr",
    "spiral_matrix": "eval",
    "string_insertion": "eval",
    "composite": "other tasks",
}
"""Tasks of reasoning-gym 0.1.25 whose scorers run the reply as Python code (``composite`` passes replies to other
tasks). They are refused: a separate process with limits does not contain code that has the rights of the service's
user."""


class ReasoningGymOptions(ReplyPart):
    """Options of ``{id: reasoning-gym}``: one question, one reply, the library's own score in [0, 1]. Metrics: `right`,
    the share of replies with a full score; `unjudged`, the share that could not be scored and earn 0."""

    task: Name
    """A dataset's name in reasoning-gym, such as `spell_backward`."""
    config: Annotated[dict[str, Any], JsonSize(SETTINGS)] = Field(default_factory=dict)
    """Options of the task."""
    size: int = Field(512, ge=1, le=100_000)
    """Number of training questions. Those that are held-out questions too are left out, and counted in the job's
    events."""
    eval_size: int = Field(64, ge=0, le=100_000)
    """Number of held-out questions: those after the training questions."""
    seed: int = Field(0, ge=0, le=INTEGER)
    """Draws the questions."""
    suffix: Text = "\nReply with the answer only."
    """Text after every question."""

    @field_validator("task")
    @classmethod
    def _reads_replies(cls, task: str) -> str:
        if task in REPLIES_ARE_CODE:
            raise ValueError(
                f"a task that only reads replies; this one runs them as Python code, by {REPLIES_ARE_CODE[task]}, with"
                " the service's rights; host an environment of your own for it"
            )
        return task


NOT_INSTALLED = f"environment reasoning-gym: not installed; run: {installs('reasoning-gym')}"


def require_library() -> None:
    """Raises :class:`UserError` where the library is not installed; runs nothing of it."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(NOT_INSTALLED)


class ReasoningGym(Environment):
    """An environment over one task's entries."""

    deterministic = True

    def __init__(self, options: ReasoningGymOptions, limit: float = LIMIT_SECONDS) -> None:
        """``limit`` is the processor time of one score in seconds."""
        self._options = options
        self._left_out = 0
        """Training questions that are held-out ones too, once all were drawn."""
        arguments: dict[str, Any] = {
            "task": options.task,
            "size": options.size + options.eval_size,
            "seed": options.seed,
            "config": options.config,
        }
        try:
            self._dataset = pool.create(**arguments)
        except ImportError:
            raise UserError(NOT_INSTALLED) from None
        except (ValueError, TypeError, AssertionError) as error:
            raise UserError(f"environment.task: {options.task}: {' '.join(str(error).split())}") from None
        self._pool = VerifierPool("reasoning-gym", json.dumps(arguments), limit=limit)

    def prompts(self, split: Split) -> Iterable[Any]:
        size, whole = self._options.size, self._options.size + self._options.eval_size
        # Entry i is drawn from seed + i, so another seed would repeat entries: eval entries follow the training
        # entries. Small tasks draw the same question again: it is held out, and no training question.
        held_out = [pool.stored(self._dataset[number]) for number in range(size, whole)]
        return held_out if split == "eval" else self._training(held_out)

    def _training(self, held_out: Sequence[dict[str, Any]]) -> Iterator[Any]:
        known, left_out = {entry["question"] for entry in held_out}, 0
        for number in range(self._options.size):
            entry = pool.stored(self._dataset[number])
            if entry["question"] in known:
                left_out += 1
            else:
                yield entry
        self._left_out = left_out
        if left_out == self._options.size:
            raise UserError(
                f"environment.task: {self._options.task}: every training question is a held-out one too; give a smaller"
                " eval_size, or a config with more different questions"
            )

    def note(self, split: Split) -> str:
        """What the job's owner should know about a split that was read, in one line; empty for nothing."""
        if split == "eval" or not self._left_out:
            return ""
        return (
            f"{self._left_out} of {self._options.size} training questions are held-out questions too, and are left out"
        )

    def reset(self, prompt: Any, seed: int) -> Sequence[Message]:
        return [{"role": "user", "content": prompt["question"] + self._options.suffix}]

    def step(self, reply: Reply) -> Step:
        part = self._options.part(reply.text, reply.raw, reply.special)
        answer = None if part is None else part.strip()
        score, unjudged = 0.0, False
        try:
            score = self._pool.score({"answer": answer, "prompt": self.prompt})
        except (VerifierTimeout, VerifierError) as error:
            log.warning("reasoning-gym's %s: %s; the reply scores 0", self._options.task, error)
            unjudged = True
        return Step(reward=score, done=True, metrics={"right": float(score >= 1.0), "unjudged": float(unjudged)})

    def for_episode(self) -> Environment:
        return copy.copy(self)
