"""math-verify in a process of its own, with a time limit.

A policy can write ``9^{9^{9^9}}``, whose exact value no machine finishes, and computing it holds Python's lock: in the
host's own process that would stop every tenant's environments. Here it ends one child, which the next call replaces.

The child judges one line of JSON at a time and ends itself when a judgement outlasts its limit or its parent is gone.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import subprocess
import sys
import threading
import weakref

log = logging.getLogger("rookery.environments")

LIMIT_SECONDS = 5
"""For one judgement: honest ones take milliseconds, an integral that has a closed form about one second."""


class MathJudge:
    """Whether two texts say the same mathematics. Thread-safe; one judgement at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def same(self, reply: str, expected: str) -> bool | None:
        """None: it took longer than :data:`LIMIT_SECONDS`. Raises ValueError for an ``expected`` that is no maths."""
        with self._lock:
            child = self._running()
            assert child.stdin is not None and child.stdout is not None
            try:
                child.stdin.write(json.dumps({"reply": reply, "expected": expected}) + "\n")
                child.stdin.flush()
                answer = child.stdout.readline()
            except BrokenPipeError:
                answer = ""
            if not answer:
                self._gave_up(child)
                return None
        verdict = json.loads(answer)
        if verdict is None:
            raise ValueError(f"math-verify reads no expression in the answer {expected!r}")
        return bool(verdict)

    def _gave_up(self, child: subprocess.Popen[str]) -> None:
        self._child = None
        ended = child.wait()
        if not hasattr(signal, "SIGALRM") or ended != -signal.SIGALRM:
            raise RuntimeError(f"the process that judges mathematics ended with {ended}; its standard error says why")
        log.warning("math-verify did not finish within %s s; the reply counts as wrong", LIMIT_SECONDS)

    def _running(self) -> subprocess.Popen[str]:
        if self._child is None or self._child.poll() is not None:
            self._child = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                encoding="utf-8",
            )
            weakref.finalize(self, _end, self._child)
        return self._child


def _end(child: subprocess.Popen[str]) -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):  # a line that was never read is still in the buffer
                pipe.close()


def judge(reply: str, expected: str) -> bool | None:
    """None where ``expected`` holds no expression. math-verify's own limits are off: ours also stops big integers."""
    from math_verify import parse, verify

    gold = parse(expected if "$" in expected or "\\boxed" in expected else f"${expected}$", parsing_timeout=None)
    if not gold:
        return None
    return bool(verify(gold, parse(reply, parsing_timeout=None), timeout_seconds=None))


def main() -> None:
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off
    import math_verify  # noqa: F401 (before the first limit runs)

    for line in sys.stdin:
        if hasattr(signal, "alarm"):
            signal.alarm(LIMIT_SECONDS)  # nobody handles it, so it ends this process whatever Python is doing
        verdict = judge(**json.loads(line))
        if hasattr(signal, "alarm"):
            signal.alarm(0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
