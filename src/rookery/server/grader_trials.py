"""Trials of graders by a client: Python in the service's sandbox, models by the service or by an administrator's judge.

Tenants take turns, one trial at a time each.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from typing import Any

from rookery.environments.judges import parse_judges
from rookery.environments.models import Ask, ModelAnswer
from rookery.environments.sandbox.sandbox import Isolation, Program, Sandbox
from rookery.environments.verifiers.graders import OneGrader, single
from rookery.environments.verifiers.running_graders import (
    FUNCTION,
    PYTHON_LIMITS,
    GraderTools,
    ModelSilent,
    PythonGrader,
)
from rookery.turns import TenantThreads

TRIALS = 17
"""Tenants whose graders are tried at the same time, less one: most trials wait for models."""

ANSWER_SECONDS = 120.0
"""Longest wait for a judgement by a model of the service: its tenant's next trial waits for this one."""

TAKES_TWO = f"""
import inspect
assert not inspect.iscoroutinefunction({FUNCTION}), "it is async"
inspect.signature({FUNCTION}).bind(None, None)
"""
"""A check of a source in the sandbox."""


class GraderTrials:
    """The trials of graders in one event loop; blocking methods run in ``threads``."""

    def __init__(self, isolation: Isolation, judges: str, answer_seconds: float = ANSWER_SECONDS) -> None:
        """``isolation`` and ``judges`` are the settings of the service."""
        self._answer_seconds = answer_seconds
        self._sandbox = Sandbox(isolation, confinements=1)
        self.judges = parse_judges(judges)
        self.threads = TenantThreads(TRIALS, "grader")
        self._answers: set[Future[ModelAnswer]] = set()
        """Of models, for which trials wait."""
        self._closed = False

    def tools(self, ask: Ask) -> GraderTools:
        """The tools of one trial."""
        return GraderTools(self._sandbox, ask)

    def check(self, grader: OneGrader) -> None:
        """Raises ``ValueError`` for a Python grader whose source does not define its function. Blocks."""
        for part in single(grader):
            if isinstance(part, PythonGrader):
                ran = self._sandbox.run(Program(part.source, path="grader.py", asserts=[TAKES_TWO]), PYTHON_LIMITS)
                if ran.status != "ok":
                    raise ValueError(f"it does not define {FUNCTION}(sample, item): {ran.last_line}")

    def answer(self, asked: Coroutine[Any, Any, ModelAnswer], loop: asyncio.AbstractEventLoop) -> ModelAnswer:
        """The answer of a model of the service, in ``loop``. Blocks; raises :class:`ModelSilent` where it does not."""
        answer = asyncio.run_coroutine_threadsafe(asked, loop)
        self._answers.add(answer)
        try:
            if self._closed:
                raise CancelledError
            return answer.result(timeout=self._answer_seconds)
        except TimeoutError:
            raise ModelSilent(f"the model does not answer within {self._answer_seconds:.0f} s") from None
        except CancelledError:
            raise ModelSilent("the service stops") from None
        finally:
            answer.cancel()
            self._answers.discard(answer)

    async def close(self) -> None:
        """End the sandbox and the questions to models; a trial that runs fails. The loop stays free for the threads,
        which may wait for it."""
        self._closed = True
        for answer in [*self._answers]:
            answer.cancel()
        await asyncio.to_thread(self._sandbox.close)
        await asyncio.to_thread(self.threads.close)
