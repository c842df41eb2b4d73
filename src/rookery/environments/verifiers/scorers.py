"""The scorers of :mod:`rookery.environments.verifiers.pool`'s processes: math-verify and reasoning-gym.

Replies such as ``9^{9^{9^9}}`` or ``1e9999999999`` take for ever to evaluate exactly, and some scorers raise on
unexpected input. A reply to reasoning-gym is scored with the entry as the library made it: prompts are stored as JSON,
which has no tuples, and some scorers compare with them.
"""

from __future__ import annotations

import ast
import json
import logging
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from rookery.environments.verifiers.pool import serve

LITERAL = "literal"
"""Field of a stored prompt that holds the entry as a Python literal."""


def stored(entry: dict[str, Any]) -> dict[str, Any]:
    """The entry as a JSON prompt, with :data:`LITERAL` where JSON alone would lose something."""
    # default=str keeps dates and the like readable
    readable: dict[str, Any] = json.loads(json.dumps(entry, default=str))
    with suppress(Exception):  # not a literal, or not comparable
        written = repr(entry)
        if readable != entry and ast.literal_eval(written) == entry:
            readable[LITERAL] = written
    return readable


def restored(prompt: dict[str, Any]) -> dict[str, Any]:
    """The entry of a prompt made by :func:`stored`."""
    entry: dict[str, Any] = ast.literal_eval(prompt[LITERAL]) if LITERAL in prompt else prompt
    return entry


def create(task: str, size: int, seed: int, config: dict[str, Any]) -> Any:
    """The library's dataset. Raises ImportError where the library is missing, and its own errors for bad arguments."""
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=size, seed=seed, **config)


def prepare_reasoning_gym() -> Callable[[str | None, dict[str, Any]], float]:
    dataset = create(**json.loads(sys.argv[3]))

    def score(answer: str | None, prompt: dict[str, Any]) -> float:
        return float(dataset.score_answer(answer=answer, entry=restored(prompt)))

    with suppress(Exception):  # the same error is reported when a reply is scored
        first = stored(dataset[0])
        for answer in (first["answer"], "1"):
            score(answer, first)
    return score


def compare(reply: str, expected: str) -> bool | None:
    """None if ``expected`` has no expression. math-verify's own limits are off: the pool's limit also stops big
    integers."""
    from math_verify import parse, verify

    gold = parse(expected if "$" in expected or "\\boxed" in expected else f"${expected}$", parsing_timeout=None)
    if not gold:
        return None
    return bool(verify(gold, parse(reply, parsing_timeout=None), timeout_seconds=None))


def prepare_math() -> Callable[[str, str], bool | None]:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits are off
    compare("1", "1")
    return compare


if __name__ == "__main__":
    if sys.argv[2] == "math":
        serve(prepare_math)  # sympy imports more of itself as replies need it: it has to open files
    else:  # scorers of 0.1.25 import nothing, open no file and start no thread
        serve(prepare_reasoning_gym, opens_nothing=True)
