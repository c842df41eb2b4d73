"""The jobs of this process: those with a task, and those that wait.

A tenant may have a thousand waiting jobs, and options of 64 kB in each. As objects, empty lists in them would take
twenty times their text, so a waiting job is a text (:class:`WaitingJob`)."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from rookery import protocol
from rookery.aio import Signal
from rookery.controller.indexed import IndexedDict
from rookery.controller.jobs.job import TrainingJob
from rookery.controller.jobs.runner import JobRunner
from rookery.controller.quotas import tokens_in_memory
from rookery.spec.job import stored_base_models
from rookery.storage.models import JobRow

STEPS_UNKNOWN = 100
"""Steps that a job without a number of steps is taken to have left: some hours of most jobs."""


@dataclass(frozen=True, eq=False)
class WaitingJob:
    """A queued job that waits until its tenant may run one more."""

    id: str
    tenant: str
    models: frozenset[str]
    """The base models that it needs."""
    tokens: int
    """The most tokens that it may hold when it runs."""
    _rest: JobRow
    _spec: str

    @classmethod
    def of(cls, row: JobRow) -> WaitingJob:
        models, tokens = frozenset(stored_base_models(row.spec)), tokens_in_memory(row.spec)
        return cls(row.id, row.tenant, models, tokens, replace(row, spec={}), json.dumps(row.spec))

    @property
    def row(self) -> JobRow:
        """The job as it was stored when it began to wait."""
        return replace(self._rest, spec=json.loads(self._spec))


class JobRegistry:
    """The jobs of this process: their tasks, counts, and the signals that wake their followers."""

    def __init__(self) -> None:
        self.runners: IndexedDict[str, JobRunner] = IndexedDict(tenant=lambda runner: runner.row.tenant)
        """By the job's id, while it has a task."""
        self.waiting: IndexedDict[str, WaitingJob] = IndexedDict(tenant=lambda job: job.tenant)
        """Jobs that wait until their tenant may run one more, the first to come first."""
        self.totals: Counter[str] = Counter()
        """Counters of the jobs whose tasks have ended, and of all steps."""
        self.states: Counter[str] = Counter()
        """How many jobs are in which state."""
        self._signals: WeakValueDictionary[str, Signal] = WeakValueDictionary()

    def running(self) -> list[TrainingJob]:
        """The jobs that are assembled and run."""
        return [runner.job for runner in self.runners.values() if runner.job is not None]

    def steps_left(self) -> int:
        """The most optimizer steps that a running job has still to do; one that ends by other conditions counts as
        :data:`STEPS_UNKNOWN`, and so does a service without jobs."""
        left = (job.steps_left() for job in self.running())
        return max((STEPS_UNKNOWN if steps is None else steps for steps in left), default=STEPS_UNKNOWN)

    def tenants(self) -> set[str]:
        """The tenants whose jobs have a task."""
        return set(self.runners.groups("tenant"))

    def models(self, tenant: str | None = None) -> set[str]:
        """The base models of the jobs that have a task, of one tenant or of all."""
        runners = self.runners.values() if tenant is None else self.runners.of(tenant=tenant)
        return {model for runner in runners for model in stored_base_models(runner.row.spec)}

    def versions_in_use(self, model: str) -> list[protocol.AdapterRef]:
        """The versions that running jobs of a base model sample from."""
        return [ref for job in self.running() for versions in job.versions(model) for ref in versions.in_use()]

    def using(self, ref: protocol.AdapterRef | None) -> contextlib.AbstractContextManager[object]:
        """Within, the retention of a running job keeps the version."""
        known = (versions for job in self.running() for versions in job.versions())
        versions = next((one for one in known if ref is not None and one.row.id == ref.policy), None)
        if ref is None or versions is None or versions.version(ref.version) is None:
            return contextlib.nullcontext()
        return versions.using(ref.version)

    def signal(self, job: str) -> Signal:
        """Notified when the job's state or metrics changed. Kept while somebody holds it."""
        return self._signals.setdefault(job, Signal())

    def notify(self, job: str) -> None:
        signal = self._signals.get(job)
        if signal is not None:
            signal.notify()
