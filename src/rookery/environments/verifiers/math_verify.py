"""math-verify in processes of its own, with a time limit: see :mod:`rookery.environments.verifiers.pool`.

A policy can write ``9^{9^{9^9}}``, whose exact value no machine finishes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rookery.environments.verifiers.pool import VerifierPool, VerifierTimeout, serve

log = logging.getLogger("rookery.environments")


class MathJudge:
    """Whether two texts say the same mathematics. Thread-safe."""

    def __init__(self) -> None:
        self._judges = VerifierPool(__name__)

    def same(self, reply: str, expected: str) -> bool | None:
        """None: it took longer than the limit. Raises ValueError for an ``expected`` that is no maths."""
        try:
            verdict = self._judges.ask({"reply": reply, "expected": expected})
        except VerifierTimeout as late:
            log.warning("math-verify: %s; the reply counts as wrong", late)
            return None
        if verdict is None:
            raise ValueError(f"math-verify reads no expression in the answer {expected!r}")
        return bool(verdict)


def judge(reply: str, expected: str) -> bool | None:
    """None where ``expected`` holds no expression. math-verify's own limits are off: ours also stops big integers."""
    from math_verify import parse, verify

    gold = parse(expected if "$" in expected or "\\boxed" in expected else f"${expected}$", parsing_timeout=None)
    if not gold:
        return None
    return bool(verify(gold, parse(reply, parsing_timeout=None), timeout_seconds=None))


def prepare() -> Callable[[str, str], bool | None]:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off
    judge("1", "1")
    return judge


if __name__ == "__main__":
    serve(prepare)  # sympy imports more of itself as replies need it: it has to open files
