"""Sinks that a job asks for: its stored metrics, evaluations and state are also written to an MLflow server.

* One task for each sink reads the database and writes what the run does not have; it keeps no rows of its own. The run
  knows the last step that it has received, so a restarted service continues the same run.
* A job never waits for its sinks. A sink that fails is tried again with growing pauses, from the stored metrics; the
  job's log has one line about it, and ``/metrics`` counts the failures.
* A tenant's address is reached by the rule of :mod:`rookery.environments.outbound`, without credentials. Sinks with
  credentials are named by the administrator; the credentials are in no job, error or log.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from rookery.aio import Signal, cancel_all
from rookery.controller.mlflow import METRICS_AT_ONCE, Figure, MlflowRun, batches, metric_name
from rookery.controller.services import Services
from rookery.environments.outbound import request_json
from rookery.errors import NotFound, RookeryError, UserError, short
from rookery.network import named_services, reachable, service_url
from rookery.settings import Settings
from rookery.spec.job import JobSpec, SinkSpec
from rookery.storage.models import EvaluationRow, JobRow, JobState
from rookery.storage.repositories import jobs, tenants, versions
from rookery.storage.store import Writer
from rookery.telemetry.metrics import numbers
from rookery.turns import TENANT

log = logging.getLogger("rookery.controller")

REQUEST_SECONDS = 10.0
"""Longest time of a request to a sink; a service that stops waits for the request under way."""

BATCH_SECONDS = 1.0
"""Shortest time between two looks at a job: steps that are quicker are sent together."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
"""Before a sink that failed is tried again; the pause doubles from one to the other."""

GIVE_UP_SECONDS = 900.0
"""Time after the end of a job at which a sink that fails is given up."""

ROWS = 100
"""Steps of one read of the database."""

SINKS_OF_TENANT = 200
"""Most sinks of a tenant that are written at the same time, those of jobs that have just ended included."""


@dataclass(frozen=True)
class NamedSink:
    """An MLflow server that the administrator named."""

    url: str
    variable: str = ""
    """The environment variable with its credentials; empty for none."""


def parse_sinks(text: str) -> dict[str, NamedSink]:
    """The servers of the setting ``sinks``, by name. Raises :class:`UserError`."""
    named = named_services(text, "setting ROOKERY_SINKS", "NAME=URL [VARIABLE]", "the credentials")
    return {name: NamedSink(*words) for name, words in named.items()}


def sink_problems(spec: JobSpec, settings: Settings) -> list[str]:
    """The sinks of a job that cannot be reached by the rules, a line each. Blocks."""
    problems = []
    for number in range(len(spec.sinks)):
        try:
            Endpoint(spec.sinks[number], f"sinks.{number}", settings).check()
        except UserError as error:
            problems.append(str(error))
    return problems


class Endpoint:
    """Where a job's sink is, and how it is asked."""

    def __init__(self, spec: SinkSpec, where: str, settings: Settings) -> None:
        """Raises :class:`UserError` for a name that the administrator did not give."""
        self.where, self.allowed, variable = f"{where}.url", settings.server.reachable_hosts, ""
        if spec.server is not None:
            self.where, self.allowed, named = f"{where}.server", "*", parse_sinks(settings.server.sinks)
            if spec.server not in named:
                known = f"there are {', '.join(sorted(named))}" if named else "there are none"
                raise UserError(
                    f"{self.where}: given {short(repr(spec.server))}, but {known}; the administrator names servers in"
                    " ROOKERY_SINKS"
                )
            self.url, variable = named[spec.server].url, named[spec.server].variable
        else:
            self.url = service_url(spec.url or "", self.where)
        secret = os.environ.get(variable, "").strip() if variable else ""
        encoded = base64.b64encode(secret.encode()).decode()
        self._secrets = [one for one in (secret, encoded) if one]
        basic = ":" in secret
        self._headers = {"Authorization": f"Basic {encoded}" if basic else f"Bearer {secret}"} if secret else {}

    def check(self) -> None:
        """Raises :class:`UserError` for an address that may not be reached."""
        reachable(self.url, self.where, self.allowed)

    def ask(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer to a request. Blocks; raises :class:`UserError`, without the credentials."""
        url = f"{self.url}/api/2.0/mlflow/{path}"
        try:
            return request_json(url, self.where, body, self._headers, allowed=self.allowed, seconds=REQUEST_SECONDS)
        except UserError as error:
            line = str(error)
            for secret in self._secrets:
                line = line.replace(secret, "…")
            raise UserError(line) from None


class JobSinks:
    """The tasks that write to the sinks of jobs."""

    def __init__(
        self, services: Services, signal: Callable[[str], Signal], senders: Writer, totals: Counter[str]
    ) -> None:
        """``signal(job)`` tells of changes; ``senders`` runs the requests; ``totals`` counts failed attempts as
        ``sink_failures``."""
        self._services = services
        self._signal = signal
        self._senders = senders
        self._tasks: dict[tuple[str, str, int], asyncio.Task[None]] = {}
        self._totals = totals

    async def start(self) -> None:
        """Write to the sinks of jobs that have not ended, and of those that ended just before the last stop."""
        since = self._services.clock.time() - GIVE_UP_SECONDS
        for row in await self._services.store.read(jobs.unfinished_or_ended_since, since):
            self.follow(row)

    def follow(self, row: JobRow) -> None:
        """Write to the sinks of the job until it has ended."""
        for number, given in enumerate(row.spec.get("sinks", ())):
            key = (row.tenant, row.id, number)
            busy = sum(tenant == row.tenant for tenant, _, _ in self._tasks)
            if key in self._tasks:
                continue
            work = self._follow(row, number, SinkSpec.model_validate(given))
            if busy >= SINKS_OF_TENANT:
                work.close()
                work = self._add_event(row, f"sinks.{number}: not written: {busy} other sinks of yours are at work")
            task = self._tasks[key] = asyncio.create_task(work, name=f"sink {number} of {row.id}")
            task.add_done_callback(partial(self._ended, key))

    async def stop(self) -> None:
        """The next start continues from the stored metrics."""
        await cancel_all(*self._tasks.values())

    def _ended(self, key: tuple[str, str, int], task: asyncio.Task[None]) -> None:
        del self._tasks[key]

    async def _follow(self, row: JobRow, number: int, spec: SinkSpec) -> None:
        TENANT.set(row.tenant)
        clock, signal = self._services.clock, self._signal(row.id)
        sending, pause, reported = _Sending(self._services, self._senders, row, number, spec), FIRST_PAUSE, False
        while True:
            change = signal.next
            try:
                if await sending.catch_up():
                    return
                pause = FIRST_PAUSE
            except NotFound:  # the job is deleted
                return
            except Exception as error:
                self._totals["sink_failures"] += 1
                line = str(error) if isinstance(error, RookeryError) else type(error).__name__
                if not reported:
                    reported = True
                    log.warning("job %s: %s", row.id, line, extra={"tenant": row.tenant, "job": row.id})
                    await self._add_event(row, f"{line}; the job goes on, and the metrics are sent later")
                if sending.ended is not None and clock.time() - sending.ended > GIVE_UP_SECONDS:
                    await self._add_event(row, f"{line}; given up, the metrics stay in the service")
                    return
                await clock.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            await change.wait()
            await clock.sleep(BATCH_SECONDS)

    async def _add_event(self, row: JobRow, line: str) -> None:
        with suppress(RookeryError):
            await self._services.store.write(
                tenants.add_event, row.tenant, row.id, self._services.clock.time(), "sink", line
            )


class _Sending:
    """How far one sink of a job has been written."""

    def __init__(self, services: Services, senders: Writer, row: JobRow, number: int, spec: SinkSpec) -> None:
        self._services, self._senders = services, senders
        self._row, self._where, self._spec = row, f"sinks.{number}", spec
        self._run: MlflowRun | None = None
        self._sent = -1
        self._evaluated: set[tuple[str, int]] = set()
        self._state: tuple[JobState, str] | None = None
        self.ended: float | None = None
        """When the job ended."""

    async def catch_up(self) -> bool:
        """Write all that is stored; whether the job has ended. Raises :class:`UserError` where the sink fails."""
        store, tenant, job = self._services.store, self._row.tenant, self._row.id
        row = await store.read(jobs.get_job, tenant, job)
        self.ended = row.finished
        try:
            run = self._run or await self._open(row)
            self._sent = min(self._sent, await store.read(versions.last_step, tenant, job))  # it may have gone back
            while rows := await store.read(versions.steps, tenant, job, self._sent, ROWS):
                for batch, last in batches(rows):
                    await run.write(batch, last)
                    self._sent = last
            if row.spec["evaluation"]["prompts"]:
                await self._write_evaluations(run)
            if (row.state, row.reason) != self._state:
                await run.set_state(row.state, row.reason, row.finished)
                self._state = (row.state, row.reason)
        except BaseException:
            self._run = None  # it may have been deleted: the next attempt looks for it
            raise
        return row.finished is not None

    async def _open(self, row: JobRow) -> MlflowRun:
        endpoint = Endpoint(self._spec, self._where, self._services.settings)
        run = MlflowRun(partial(self._senders, endpoint.ask), endpoint.where, self._spec.experiment, row.id)
        self._sent = await run.open(row.name, row.created, row.spec)
        self._evaluated, self._state, self._run = set(), None, run
        return run

    async def _write_evaluations(self, run: MlflowRun) -> None:
        """Write the evaluations at the steps of their versions."""
        store, tenant, job = self._services.store, self._row.tenant, self._row.id
        found = await store.read(versions.evaluations, tenant, job)
        new = [one for one in found if (one.policy, one.version) not in self._evaluated]
        if not new:
            return
        names = {policy.id: policy.name for policy in await store.read(jobs.policies, tenant, job)}
        steps = {
            (policy, version.version): version.step
            for policy in sorted({one.policy for one in new})
            for version in await store.read(versions.versions, tenant, policy)
        }
        for one in new:
            prefix = f"{names[one.policy]}/" if len(names) > 1 else ""
            await run.write(_evaluation(one, prefix, steps.get((one.policy, one.version), one.version)))
            self._evaluated.add((one.policy, one.version))


def _evaluation(row: EvaluationRow, prefix: str, step: int) -> list[Figure]:
    values = {"mean": row.mean, "stderr": row.stderr, "prompts": row.prompts, **row.results}
    return [
        Figure(metric_name(f"{prefix}evaluation/{name}"), value, step, row.created) for name, value in numbers(values)
    ][:METRICS_AT_ONCE]
