"""A contender in a process of its own, for the whole of a comparison: it loads once, then runs when it is told to.

The parent writes one JSON object per line, the child (``child.py``) answers each with one. So contenders that need
different environments take turns within one run, and what the machine does meanwhile happens to all of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

from benchmarks.lib.harness import ROOT

from rookery.cluster.base import preloaded
from rookery.settings import Settings

PATIENCE_SECONDS = 900.0
"""A contender that has not answered by then is ended, and reported as failed. TRL's five steps at its slowest
micro-batch take a third of it."""


class ContenderFailed(Exception):
    """It ended, or could not be started; the message is its last words."""


class Contender:
    """The parent's end. Its process has the allocator that a worker would have, whoever it is: vLLM's manual, too,
    asks for it."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> None:
        self.name = name
        self._log = Path(os.environ.get("TMPDIR", "/tmp")) / f"rookery-bench-{os.getpid()}-{name.replace(' ', '-')}.log"
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=preloaded(
                    {**os.environ, "PYTHONPATH": path, **(environment or {})}, Settings.load().worker.allocator
                ),
            )
        self.about: dict[str, Any] = self._answer()

    def run(self, **task: Any) -> dict[str, Any]:
        """Its figures. Raises :class:`ContenderFailed`."""
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
        late = threading.Event()

        def give_up() -> None:
            late.set()
            self._process.kill()

        patience = threading.Timer(PATIENCE_SECONDS, give_up)
        patience.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):  # libraries print what they like
                    answer: dict[str, Any] = json.loads(line)
                    if "failed" in answer:
                        raise ContenderFailed(str(answer["failed"]))
                    return answer
        finally:
            patience.cancel()
        self._process.wait()
        raise ContenderFailed(f"no answer in {PATIENCE_SECONDS:.0f} s" if late.is_set() else self._last_words())

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else f"exit code {self._process.poll()}"
