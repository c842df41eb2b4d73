"""Scores of reasoning-gym in processes of their own, with a time limit: see :mod:`rookery.environments.verifiers.pool`.

A policy can reply ``1e9999999999`` to a task that reads fractions, whose exact value no machine writes out, and some
scorers raise on what they did not expect. A reply is scored by the entry as the library made it: JSON, in which prompts
are stored, knows no tuples, and some scorers compare with them.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rookery.environments.verifiers.pool import serve

LITERAL = "literal"
"""The field of a prompt, beside the entry's own, that holds the entry as Python writes it."""


def stored(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry as a prompt, with :data:`LITERAL` where JSON alone would lose something that Python can write."""
    # default=str keeps readable what JSON cannot say (dates and the like).
    readable: dict[str, Any] = json.loads(json.dumps(entry, default=str))
    with suppress(Exception):  # it holds what is no literal, or cannot be compared
        written = repr(entry)
        if readable != entry and ast.literal_eval(written) == entry:
            readable[LITERAL] = written
    return readable


def restored(prompt: dict[str, Any]) -> dict[str, Any]:
    """The entry that was :func:`stored`; for want of :data:`LITERAL`, as JSON gave it back."""
    entry: dict[str, Any] = ast.literal_eval(prompt[LITERAL]) if LITERAL in prompt else prompt
    return entry


def create(task: str, size: int, seed: int, config: dict[str, Any]) -> Any:
    """The library's dataset. Raises ImportError where it is not installed, and whatever it makes of its arguments."""
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=size, seed=seed, **config)


def prepare() -> Callable[[str | None, dict[str, Any]], float]:
    dataset = create(**json.loads(sys.argv[2]))

    def judge(answer: str | None, prompt: dict[str, Any]) -> float:
        return float(dataset.score_answer(answer=answer, entry=restored(prompt)))

    with suppress(Exception):  # whatever it is, it says so again when it is asked
        first = stored(dataset[0])
        for answer in (first["answer"], "1"):
            judge(answer, first)
    return judge


if __name__ == "__main__":
    serve(prepare, opens_nothing=True)  # no scorer of 0.1.25 imports, opens a file or starts a thread
