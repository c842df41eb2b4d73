"""math-verify in separate processes with a time limit (:mod:`rookery.environments.verifiers.pool`): the exact value of
a reply such as ``9^{9^{9^9}}`` cannot be computed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rookery.environments.verifiers.pool import VerifierPool, VerifierTimeout, serve

log = logging.getLogger("rookery.environments")


class MathComparer:
    """Compares two mathematical texts. Thread-safe."""

    def __init__(self) -> None:
        self._pool = VerifierPool(__name__)

    def same(self, reply: str, expected: str) -> bool | None:
        """Whether both are equal; None if the limit was exceeded. Raises ValueError if ``expected`` has no
        expression."""
        try:
            verdict = self._pool.score({"reply": reply, "expected": expected})
        except VerifierTimeout as error:
            log.warning("math-verify: %s; the reply counts as wrong", error)
            return None
        if verdict is None:
            raise ValueError(f"math-verify finds no expression in the answer {expected!r}")
        return bool(verdict)


def compare(reply: str, expected: str) -> bool | None:
    """None if ``expected`` has no expression. math-verify's own limits are off: the pool's limit also stops big
    integers."""
    from math_verify import parse, verify

    gold = parse(expected if "$" in expected or "\\boxed" in expected else f"${expected}$", parsing_timeout=None)
    if not gold:
        return None
    return bool(verify(gold, parse(reply, parsing_timeout=None), timeout_seconds=None))


def prepare() -> Callable[[str, str], bool | None]:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own limits are off
    compare("1", "1")
    return compare


if __name__ == "__main__":
    serve(prepare)  # sympy imports more of itself as replies need it: it has to open files
