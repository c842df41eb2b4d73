"""The built-in ``reasoning-gym``: tasks of the reasoning-gym library, by name. Needs the ``reasoning-gym`` extra.

An entry is stored whole as the episode's prompt and scored from there, because some tasks give different entries in
different processes for one seed. Replies are scored in separate processes
(:mod:`rookery.environments.verifiers.pool`); those of tasks whose scorer runs the reply as code, in a sandbox.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import logging
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from rookery.bounds import INTEGER, SETTINGS, JsonSize, Name, Text
from rookery.environments.base import Environment, MadePrompts, Message, Reply, Split, Step
from rookery.environments.datasets import STREAM_AFTER
from rookery.environments.sandbox.sandbox import Program, ProgramLimits, Sandbox
from rookery.environments.verifiers import pool
from rookery.environments.verifiers.parts import ReplyPart
from rookery.environments.verifiers.pool import LIMIT_SECONDS, VerifierError, VerifierPool, VerifierTimeout
from rookery.errors import UserError, count_of, installs

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
tasks). A separate process with limits does not contain code that has the rights of the service's user."""

CODE_LIMITS = ProgramLimits(seconds=LIMIT_SECONDS, memory=512 << 20)
"""Limits of such a score: sympy's take up to five seconds on a slow machine."""

_CODE_SCORER = """
import ast, json
from reasoning_gym import create_dataset
arguments = json.loads({arguments!r})
if arguments["task"] == "composite":
    from reasoning_gym.composite import DatasetSpec
    arguments["config"]["datasets"] = [DatasetSpec(**part) for part in arguments["config"].get("datasets", ())]
dataset = create_dataset(arguments["task"], size=arguments["size"], seed=arguments["seed"], **arguments["config"])

def score(answer, prompt):
    entry = ast.literal_eval(prompt[{literal!r}]) if {literal!r} in prompt else prompt
    return float(dataset.score_answer(answer=answer, entry=entry))
"""


class ReasoningGymOptions(ReplyPart):
    """Options of ``{id: reasoning-gym}``: one question, one reply, the library's own score in [0, 1]. Metrics: `right`,
    the share of replies with a full score; `unjudged`, the share that could not be scored and earn 0."""

    task: Name
    """A dataset's name in reasoning-gym, such as `spell_backward`."""
    config: Annotated[dict[str, Any], JsonSize(SETTINGS)] = Field(default_factory=dict)
    """Options of the task."""
    size: int = Field(512, ge=1, le=100_000)
    """Number of training questions. Those that are held-out questions too are left out, and counted in the job's
    events; of more than 10,000, each is replaced by the next question that is not held out."""
    eval_size: int = Field(64, ge=0, le=100_000)
    """Number of held-out questions: those after the training questions."""
    seed: int = Field(0, ge=0, le=INTEGER)
    """Draws the questions."""
    suffix: Text = "\nReply with the answer only."
    """Text after every question."""


NOT_INSTALLED = f"environment reasoning-gym: not installed; run: {installs('reasoning-gym')}"


def require_library() -> None:
    """Raises :class:`UserError` where the library is not installed; runs nothing of it."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise UserError(NOT_INSTALLED)


class _Questions(MadePrompts):
    """The first ``size`` entries of a dataset, without those whose question is held out. Each is drawn when it is asked
    for: 100,000 take minutes for many tasks, and hundreds of megabytes."""

    def __init__(self, task: str, dataset: Any, size: int, held_out: Collection[str]) -> None:
        self._task = task
        self._dataset = dataset
        self._size = size
        self._held_out = held_out

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        first = range(self._size)[index]
        for number in range(first, first + self._size):
            entry = pool.stored(self._dataset[number % self._size])
            if entry["question"] not in self._held_out:
                return entry
        raise _all_held_out(self._task)


def _all_held_out(task: str) -> UserError:
    return UserError(
        f"environment.task: {task}: every training question is a held-out one too; give a smaller eval_size, or a"
        " config with more different questions"
    )


class ReasoningGym(Environment):
    """An environment over one task's entries."""

    deterministic = True

    def __init__(self, options: ReasoningGymOptions, limit: float = LIMIT_SECONDS, listed: int = STREAM_AFTER) -> None:
        """``limit`` is the processor time of one score in seconds. More than ``listed`` training questions are drawn
        when they are asked for."""
        self._options = options
        self._listed = listed
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
        asked = json.dumps(arguments)
        self._pool = VerifierPool("reasoning-gym", asked, limit=limit)
        self._sandbox: Sandbox | None = None
        if options.task in REPLIES_ARE_CODE:
            prelude = _CODE_SCORER.format(arguments=asked, literal=pool.LITERAL)
            self._sandbox = Sandbox(prelude=prelude, paths=_packages())

    def prompts(self, split: Split) -> Iterable[Any]:
        size, whole = self._options.size, self._options.size + self._options.eval_size
        # Entry i is drawn from seed + i, so another seed would repeat entries: eval entries follow the training
        # entries. Small tasks draw the same question again: it is held out, and no training question.
        held_out = [pool.stored(self._dataset[number]) for number in range(size, whole)]
        if split == "eval":
            return held_out
        known = {entry["question"] for entry in held_out}
        if size > self._listed:
            return _Questions(self._options.task, self._dataset, size, known)
        return self._training(known)

    def _training(self, known: Collection[str]) -> Iterator[Any]:
        left_out = 0
        for number in range(self._options.size):
            entry = pool.stored(self._dataset[number])
            if entry["question"] in known:
                left_out += 1
            else:
                yield entry
        self._left_out = left_out
        if left_out == self._options.size:
            raise _all_held_out(self._options.task)

    def note(self, split: Split) -> str:
        """A notice about a split for the job's owner, in one line; empty for none."""
        if split == "eval" or not self._left_out:
            return ""
        training = count_of(self._options.size, "training question")
        return f"{self._left_out} of {training} are held-out questions too, and are left out"

    def reset(self, prompt: Any, seed: int) -> Sequence[Message]:
        return [{"role": "user", "content": prompt["question"] + self._options.suffix}]

    def step(self, reply: Reply) -> Step:
        part = self._options.part(reply.text, reply.raw, reply.special)
        score, unjudged = 0.0, False
        try:
            score = self._score(part.strip()) if part is not None else 0.0
        except (VerifierTimeout, VerifierError) as error:
            log.warning("reasoning-gym's %s: %s; the reply scores 0", self._options.task, error)
            unjudged = True
        return Step(reward=score, done=True, metrics={"right": float(score >= 1.0), "unjudged": float(unjudged)})

    def _score(self, answer: str) -> float:
        if self._sandbox is None:
            return float(self._pool.score({"answer": answer, "prompt": self.prompt}))
        result = self._sandbox.run(Program("", call="score", arguments=[answer, self.prompt]), CODE_LIMITS)
        if result.status == "time":
            raise VerifierTimeout(result.last_line)
        if result.status != "ok" or not isinstance(result.value, int | float) or not math.isfinite(result.value):
            raise VerifierError(result.last_line)
        return float(result.value)

    def for_episode(self) -> Environment:
        return copy.copy(self)


def _packages() -> list[str]:
    """The folder of the library, and those of what it needs."""
    library = importlib.util.find_spec("reasoning_gym")
    libraries = [str(Path(folder).parent) for folder in (library and library.submodule_search_locations) or ()]
    others = [path for path in sys.path if Path(path).is_dir() and Path(path).name.endswith("-packages")]
    return [*dict.fromkeys([*libraries, *others])]
