"""A contender in a process of its own, for the whole of a comparison: it loads once, then runs when it is told to.

The parent writes one JSON object per line, the child answers each with one. So contenders that need different
environments take turns within one run, and what the machine does meanwhile happens to all of them. Only the standard
library is used: a peer's environment has no Rookery.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 900.0
"""A contender that has not answered by then is reported as failed."""


class ContenderFailed(Exception):
    """It ended, or could not be started; the message is its last words."""


class Contender:
    """The parent's end."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> None:
        self.name = name
        self._log = Path(os.environ.get("TMPDIR", "/tmp")) / f"rookery-bench-{os.getpid()}-{name.replace(' ', '-')}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **(environment or {})},
            )
        self.about: dict[str, Any] = self._answer()

    def run(self, **task: Any) -> dict[str, Any]:
        """What it measured. Raises :class:`ContenderFailed`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise ContenderFailed(self._last_words()) from None
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.unlink(missing_ok=True)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print what they like
                answer: dict[str, Any] = json.loads(line)
                if "failed" in answer:
                    raise ContenderFailed(str(answer["failed"]))
                return answer
        self._process.wait()
        raise ContenderFailed(self._last_words())

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else f"exit code {self._process.poll()}"


def serve(about: dict[str, Any], run: Callable[..., dict[str, Any]]) -> None:
    """The child's end: ``about`` names versions; ``run(**task)`` is called for each line."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not come between the answers
    print(json.dumps(about), file=out, flush=True)
    for line in sys.stdin:
        try:
            answer = run(**json.loads(line))
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        print(json.dumps(answer), file=out, flush=True)
