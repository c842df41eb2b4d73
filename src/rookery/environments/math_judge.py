"""math-verify in processes of its own, with a time limit.

A policy can write ``9^{9^{9^9}}``, whose exact value no machine finishes, and computing it holds Python's lock: in the
host's own process that would stop every tenant's environments. Here it ends one process, which costs a fork.

A child imports math-verify once and forks the one that judges: one line of JSON at a time, each with its limit. When a
judgement outlasts it, the child answers for it and forks another. A few children work side by side, so that honest
replies pass the others; one that nobody needs is ended. All end when their parent is gone. Needs POSIX.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from typing import Any

log = logging.getLogger("rookery.environments")

LIMIT_SECONDS = 5
"""Of processor time, so that a busy machine makes no reply wrong, for one judgement: honest ones take milliseconds, an
integral that has a closed form one to five seconds on a slow machine."""

SIDE_BY_SIDE = 4
"""Children of one judge at most, each a Python with sympy. On as many processors, of a job's 64 calls under way 44 may
run away before an honest reply behind them is later than the usual ``step_timeout`` of a minute."""

IDLE_SECONDS = 60.0
"""A child that was asked nothing for so long is ended: its job is over, or it was one of many for a moment."""

LATE = "late"
"""What a child answers when a judgement outlasted its limit."""


class MathJudge:
    """Whether two texts say the same mathematics. Thread-safe; :data:`SIDE_BY_SIDE` judgements at a time."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(SIDE_BY_SIDE)
        self._lock = threading.Lock()
        self._idle: list[_Child] = []
        """The one used last comes last, and is used next: those beyond what is needed fall idle."""
        self._watched = False
        """A timer will look at who is idle."""

    def same(self, reply: str, expected: str) -> bool | None:
        """None: it took longer than :data:`LIMIT_SECONDS`. Raises ValueError for an ``expected`` that is no maths."""
        with self._places:
            child = self._take()
            verdict = child.ask({"reply": reply, "expected": expected})
            self._put(child)  # one that raised is not used again, and ended with its last reference
        if verdict == LATE:
            log.warning("math-verify did not finish within %s s; the reply counts as wrong", LIMIT_SECONDS)
            return None
        if verdict is None:
            raise ValueError(f"math-verify reads no expression in the answer {expected!r}")
        return bool(verdict)

    def _take(self) -> _Child:
        with self._lock:
            while self._idle:
                child = self._idle.pop()
                if child.alive():
                    return child
        return _Child()

    def _put(self, child: _Child) -> None:
        with self._lock:
            self._idle.append(child)
            if not self._watched:
                self._watch()

    def _watch(self) -> None:
        timer = threading.Timer(IDLE_SECONDS, self._end_idle)
        timer.daemon = True
        timer.start()
        self._watched = True

    def _end_idle(self) -> None:
        oldest = time.monotonic() - IDLE_SECONDS
        with self._lock:
            over = [child for child in self._idle if child.used <= oldest]
            self._idle = [child for child in self._idle if child.used > oldest]
            self._watched = False
            if self._idle:
                self._watch()
        for child in over:  # nobody else has them any more
            child.end()


class _Child:
    """A process that imported math-verify and the one that it forked, a group of their own."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        self._kill = weakref.finalize(self, _kill, self._process)
        self.used = time.monotonic()

    def alive(self) -> bool:
        return self._process.poll() is None

    def ask(self, question: dict[str, str]) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            ended = self._process.wait()
            raise RuntimeError(f"the process that judges mathematics ended with {ended}; its standard error says why")
        self.used = time.monotonic()
        return json.loads(answer)

    def end(self) -> None:
        """While it is idle: both see that there is nothing more to read, the forked one first."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._kill()


def _kill(child: subprocess.Popen[str]) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # they ended just now
            os.killpg(child.pid, signal.SIGKILL)
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
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # whose parent is gone has nobody to tell
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off
    judge("1", "1")  # what is imported and built at the first use is there in every fork
    while forked := os.fork():
        _, status = os.waitpid(forked, 0)
        ended = os.waitstatus_to_exitcode(status)
        if ended != -signal.SIGPROF:
            sys.exit(f"the process that judges mathematics ended with {ended}" if ended else 0)
        print(json.dumps(LATE), flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS)  # nobody handles its signal: it ends this process at once
        verdict = judge(**json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(verdict), flush=True)


if __name__ == "__main__":
    main()
