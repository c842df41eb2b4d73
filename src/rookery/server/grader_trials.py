"""Trials of graders by a client: Python in the service's sandbox, models by the service or by an administrator's judge.

Tenants take turns, one trial at a time each.
"""

from __future__ import annotations

from rookery.environments.judges import parse_judges
from rookery.environments.models import Ask
from rookery.environments.sandbox.sandbox import Isolation, Program, Sandbox
from rookery.environments.verifiers.graders import OneGrader, single
from rookery.environments.verifiers.running_graders import FUNCTION, PYTHON_LIMITS, GraderTools, PythonGrader
from rookery.turns import TenantThreads

TRIALS = 4
"""Tenants whose graders are tried at the same time, less one."""

TAKES_TWO = f"""
import inspect
assert not inspect.iscoroutinefunction({FUNCTION}), "it is async"
inspect.signature({FUNCTION}).bind(None, None)
"""
"""A check of a source in the sandbox."""


class GraderTrials:
    """For one event loop; blocking methods run in ``threads``."""

    def __init__(self, isolation: Isolation, judges: str) -> None:
        """``isolation`` and ``judges`` are the settings of the service."""
        self._sandbox = Sandbox(isolation, confinements=TRIALS - 1)
        self.judges = parse_judges(judges)
        self.threads = TenantThreads(TRIALS, "grader")

    def tools(self, ask: Ask) -> GraderTools:
        """For one trial."""
        return GraderTools(self._sandbox, ask)

    def check(self, grader: OneGrader) -> None:
        """Raises ``ValueError`` for a Python grader whose source does not define its function. Blocks."""
        for part in single(grader):
            if isinstance(part, PythonGrader):
                ran = self._sandbox.run(Program(part.source, path="grader.py", asserts=[TAKES_TWO]), PYTHON_LIMITS)
                if ran.status != "ok":
                    raise ValueError(f"it does not define {FUNCTION}(sample, item): {ran.last_line}")

    def close(self) -> None:
        """End the sandbox; a trial that runs fails."""
        self._sandbox.close()
        self.threads.close()
