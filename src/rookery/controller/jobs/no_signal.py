"""The lines of a job's log about rewards that teach nothing (:func:`rookery.scheduling.health.no_signal`). Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rookery.scheduling.health import ADVICE_STEPS, no_signal, without_signal
from rookery.spec.job import JobSpec

NO_SIGNAL = "no_signal"
"""Kind of the event."""


class NoSignal:
    """Sees every committed step of a job; one line for each run of steps without a signal."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._runs: dict[str, list[Mapping[str, Any]]] = {}
        """By policy, the steps of the present run, at most one more than cause a line."""

    def add(self, policy: str, row: Mapping[str, Any]) -> str:
        """The line that the metrics of a further step of ``policy`` cause, or an empty text."""
        run = self._runs.setdefault(policy, [])
        if not without_signal(row):
            run.clear()
        elif len(run) <= ADVICE_STEPS:
            run.append(row)
        return self._line(policy) if len(run) == ADVICE_STEPS else ""

    def present(self) -> Iterator[str]:
        """The lines of the present runs that caused one."""
        return (self._line(policy) for policy, run in self._runs.items() if len(run) >= ADVICE_STEPS)

    def _line(self, policy: str) -> str:
        alarm = no_signal(self._runs[policy][:ADVICE_STEPS], self._spec.of_policy(policy).sampling.max_tokens)
        assert alarm is not None
        name = f"{policy}: " if self._spec.several_trained else ""
        return f"{name}{alarm.problem}, so {alarm.remedy}"
