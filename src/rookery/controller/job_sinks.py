"""Sinks that a job asks for: its stored metrics, evaluations and state are also written to a server of MLflow, trackio
or Weights & Biases.

* One task for each sink reads the database and writes what the run does not have; it keeps no rows. The run
  knows the last step that it has received, so a restarted service continues the same run.
* A job never waits for its sinks. A sink that fails is tried again with growing pauses, from the stored metrics; the
  job's log has a line about each kind of failure, and ``/metrics`` counts the failures.
* A tenant's address is reached by the rule of :mod:`rookery.environments.outbound`, with a secret of the tenant. The
  administrator may name sinks with credentials for everybody. Credentials are in no job, error or log.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import groupby
from typing import Any
from urllib.parse import quote
from weakref import WeakValueDictionary

import msgspec

from rookery.aio import Signal, cancel_all, first_of
from rookery.controller.mlflow import MlflowRun, mlflow_headers
from rookery.controller.services import Services
from rookery.controller.sink_run import METRICS_AT_ONCE, Figure, RefusedBySink, SinkRun, SinkTrace, batches, metric_name
from rookery.controller.trackio_run import TrackioRun, trackio_headers
from rookery.controller.wandb_run import WandbRun, wandb_headers
from rookery.environments.outbound import AnswerLimits, one_line, request_json
from rookery.errors import NotFound, RookeryError, UserError, count_of, short
from rookery.network import named_services, reachable, service_url
from rookery.protocol import ChatMessage
from rookery.settings import Settings
from rookery.spec.job import JobSpec, SinkSpec
from rookery.storage.models import EpisodeRow, EvaluationRow, JobRow, JobState
from rookery.storage.repositories import jobs, secrets, tenants, versions
from rookery.storage.repositories.episodes import EpisodeChoice, episodes_page
from rookery.storage.store import Store
from rookery.telemetry.numbers import numbers
from rookery.turns import outlive_request

log = logging.getLogger("rookery.controller")

REQUEST_SECONDS = 10.0
"""Longest time of a request to a sink; a service that stops waits for the request under way."""

ANSWER_BYTES = 2 << 20
"""Largest answer of a sink. MLflow answers with all metrics and parameters of a run: 400 and 240 are 260 kB."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
"""Before a sink that failed is tried again; the pause doubles from one to the other."""

LINES_OF_SINK = 5
"""Most different lines about a failing sink in the job's log, until the service restarts."""

GIVE_UP_SECONDS = 900.0
"""Time after the first failure since the end of a job, and since the start of the service, at which a sink is given
up."""

ROWS = 100
"""Steps of one read of the database."""

TRACED_MESSAGES, TRACED_CHARACTERS = 64, 4000
"""Messages of an episode that a sink gets, and characters of each."""

TIMES_KEPT = 1000
"""Sent steps whose times are remembered: a rollback goes back by fewer."""


@dataclass(frozen=True)
class SinkRules:
    """Tuned values."""

    batch_seconds: float = 1.0
    """Shortest time between two looks at a job: steps that are quicker are sent together."""
    traces_read: int = 8
    """Episodes of one read of the database: each can be megabytes."""
    trace_bytes: int = 2 << 20
    """Most bytes of the traces of a request, as JSON. Of a step's episodes, those above it are left out; the first is
    always sent."""
    of_tenant: int = 200
    """Most sinks of a tenant that are written at the same time, those of jobs that have just ended included. Full means
    wait, not fail."""
    beat_seconds: float = 60.0
    """Between two reports that a run continues, to a server that shows one as crashed that is silent for minutes."""


SINK_RULES = SinkRules()


@dataclass(frozen=True)
class NamedSink:
    """A server that the administrator named."""

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


async def missing_secrets(store: Store, tenant: str, spec: JobSpec) -> list[str]:
    """The secrets that a job's sinks name and that the tenant does not have, a line each."""
    problems = []
    for number, sink in enumerate(spec.sinks):
        if sink.secret is not None:
            try:
                await store.read(secrets.secret, tenant, sink.secret)
            except NotFound as error:
                problems.append(f"sinks.{number}.secret: {error}")
    return problems


HEADERS: Mapping[str, Callable[[str], dict[str, str]]] = {
    "mlflow": mlflow_headers,
    "trackio": trackio_headers,
    "wandb": wandb_headers,
}
"""By kind of sink: the headers of its requests with a secret."""


class Endpoint:
    """Where a job's sink is, and how it is asked."""

    def __init__(self, spec: SinkSpec, where: str, settings: Settings, secret: str = "") -> None:
        """``secret`` is the text of the tenant's. Raises :class:`UserError` for a name that the administrator did not
        give."""
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
        secret = os.environ.get(variable, "").strip() if variable else secret
        self._headers = HEADERS[spec.kind](secret) if secret else {}
        self._confidential = bool(secret) or spec.secret is not None
        self._hidden = _forms(secret, *(value.rpartition(" ")[2] for value in self._headers.values()))

    def check(self) -> None:
        """Raises :class:`UserError` for an address that may not be reached."""
        reachable(self.url, self.where, self.allowed, self._confidential)

    def ask(self, path: str, body: Mapping[str, Any], read: Callable[[Any], Any] = lambda answer: answer) -> Any:
        """The value of ``read`` for the answer to a request. Blocks; raises :class:`UserError`, without the
        credentials."""
        answer = request_json(
            f"{self.url}/{path}", self.where, body, self._headers, allowed=self.allowed,
            most=AnswerLimits(REQUEST_SECONDS, ANSWER_BYTES), confidential=self._confidential, redact=self._redact,
        )  # fmt: skip
        try:
            return read(answer)
        except RefusedBySink as refused:
            raise UserError(f"{self.where}: {one_line(str(refused), self._redact)}") from None

    def _redact(self, text: str) -> str:
        for one in self._hidden:
            text = text.replace(one, "…")
        return text


def _forms(secret: str, *encoded: str) -> list[str]:
    """The texts that reveal a secret: itself, the password in it, its ``encoded`` headers, and each of these as JSON,
    Python, URLs and HTML write it. The longest is first: a shorter one can be a part of it."""
    found = {secret, secret.partition(":")[2], *encoded}
    for one in [*found]:
        found |= {json.dumps(one)[1:-1], repr(one)[1:-1], quote(one), quote(one, safe=""), escape(one)}
    return sorted(filter(None, found), key=len, reverse=True)


class _StoredEpisode(msgspec.Struct):
    """The parts of a stored episode's result that a sink shows."""

    turns: list[ChatMessage]
    finish: str


_stored_episode = msgspec.msgpack.Decoder(_StoredEpisode)


class JobSinks:
    """The tasks that write to the sinks of jobs."""

    def __init__(
        self,
        services: Services,
        signal: Callable[[str], Signal],
        totals: Counter[str],
        rules: SinkRules = SINK_RULES,
    ) -> None:
        """``signal(job)`` tells of changes; ``totals`` counts failed attempts as
        ``sink_failures``."""
        self._rules = rules
        self._services = services
        self._signal = signal
        self._tasks: dict[tuple[str, str, int], asyncio.Task[None]] = {}
        self._totals = totals
        self._rooms: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By tenant; its tasks hold it."""

    async def start(self) -> None:
        """Write to the sinks of jobs that have not ended, and to those that did not get all of a job before the last
        stop."""
        since = self._services.clock.time() - GIVE_UP_SECONDS
        for row in await self._services.store.read(jobs.jobs_with_open_sinks, since):
            self.follow(row)

    def follow(self, row: JobRow) -> None:
        """Write to the sinks of the job until it has ended."""
        for number, given in enumerate(row.spec.get("sinks", ())):
            key = (row.tenant, row.id, number)
            if key in self._tasks:
                continue
            room = self._rooms.setdefault(row.tenant, asyncio.Semaphore(self._rules.of_tenant))
            work = self._follow_in_turn(room, row, number, SinkSpec.model_validate(given))
            task = self._tasks[key] = asyncio.create_task(work, name=f"sink {number} of {row.id}")
            task.add_done_callback(partial(self._ended, key))

    async def stop(self) -> None:
        """The next start continues from the stored metrics."""
        await cancel_all(*self._tasks.values())

    def _ended(self, key: tuple[str, str, int], task: asyncio.Task[None]) -> None:
        del self._tasks[key]

    async def _follow_in_turn(self, room: asyncio.Semaphore, row: JobRow, number: int, spec: SinkSpec) -> None:
        outlive_request(row.tenant)
        store = self._services.store
        with suppress(RookeryError):  # without it, only a sink of a job that ended just before a stop is known
            await store.write(jobs.open_sink, row.id, number)
        if room.locked():
            others = f"{count_of(self._rules.of_tenant, 'other sink of yours is', 'other sinks of yours are')} written"
            await self._add_event(row, f"sinks.{number}: waits: {others}; the metrics are sent later")
        async with room:
            await self._follow(row, number, spec)
        with suppress(RookeryError):  # it is written once more
            await store.write(jobs.close_sink, row.id, number)

    async def _follow(self, row: JobRow, number: int, spec: SinkSpec) -> None:
        clock, signal = self._services.clock, self._signal(row.id)
        sending, pause = _Sending(self._services, row, number, spec, self._rules), FIRST_PAUSE
        reported: set[str] = set()
        failing: float | None = None
        """Since when it fails after the end of the job."""
        while True:
            change = signal.next
            try:
                if await sending.catch_up():
                    return
                pause, failing = FIRST_PAUSE, None
                await sending.beat_until(change)
            except NotFound:  # the job is deleted
                return
            except Exception as error:
                self._totals["sink_failures"] += 1
                line = str(error) if isinstance(error, RookeryError) else type(error).__name__
                if line not in reported and len(reported) < LINES_OF_SINK:
                    reported.add(line)
                    log.warning("job %s: %s", row.id, line, extra={"tenant": row.tenant, "job": row.id})
                    await self._add_event(row, f"{line}; the job goes on, and the metrics are sent later")
                if sending.ended is not None and failing is None:
                    failing = clock.monotonic()
                if failing is not None and clock.monotonic() - failing > GIVE_UP_SECONDS:
                    await self._add_event(row, f"{line}; given up, the metrics stay in the service")
                    return
                await clock.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            await clock.sleep(self._rules.batch_seconds)

    async def _add_event(self, row: JobRow, line: str) -> None:
        with suppress(RookeryError):
            await self._services.store.write(
                tenants.add_event, row.tenant, row.id, self._services.clock.time(), "sink", line
            )


class _Sending:
    """How far one sink of a job has been written."""

    def __init__(self, services: Services, row: JobRow, number: int, spec: SinkSpec, rules: SinkRules) -> None:
        self._services, self._rules = services, rules
        self._row, self._where, self._spec = row, f"sinks.{number}", spec
        self._run: SinkRun | None = None
        self._secret = ""
        """The one that the run uses."""
        self._traces = (4 if spec.traces is None else spec.traces) if spec.kind == "trackio" else 0
        self._sent = -1
        self._times: deque[tuple[int, float]] = deque(maxlen=TIMES_KEPT)
        """The last sent steps with the times of their rows."""
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
            secret = await self._stored_secret()
            run = self._run if self._run is not None and secret == self._secret else await self._open(row, secret)
            self._sent = await self._last_intact()
            while rows := await store.read(versions.steps, tenant, job, self._sent, ROWS):
                for batch, last in batches(rows):
                    async for part, traces in self._traced(batch):
                        end = part[-1].step if part and part[-1] is not batch[-1] else last
                        await run.write(part, end, traces)
                        self._sent = end
                        self._times.extend(dict.fromkeys((one.step, one.time) for one in part))
            if row.spec["evaluation"]["prompts"]:
                await self._write_evaluations(run)
            if (row.state, row.reason) != self._state:
                await run.set_state(row.state, row.reason, row.finished)
                self._state = (row.state, row.reason)
        except BaseException:
            self._run = None  # it may have been deleted: the next attempt looks for it
            raise
        return row.finished is not None

    async def beat_until(self, change: asyncio.Event) -> None:
        """Return when the job or its secret has changed; until then report at times that it runs, where the sink wants
        that."""
        run = self._run
        if run is None or run.beat_seconds is None:
            await change.wait()
            return
        while not change.is_set():
            async with first_of(change.wait(), self._services.clock.sleep(run.beat_seconds)):
                pass
            if await self._stored_secret() != self._secret:
                return
            if not change.is_set():
                await run.beat()

    async def _stored_secret(self) -> str:
        """The tenant's secret for this sink now; empty where it names none. Raises :class:`UserError`."""
        if self._spec.secret is None:
            return ""
        try:
            return await self._services.store.read(secrets.secret, self._row.tenant, self._spec.secret)
        except NotFound as error:
            raise UserError(f"{self._where}.secret: {error}") from None

    async def _open(self, row: JobRow, secret: str) -> SinkRun:
        spec, settings = self._spec, self._services.settings
        self._secret = secret
        endpoint = Endpoint(spec, self._where, settings, secret)
        ask, where = partial(self._services.threads.senders, endpoint.ask), endpoint.where
        run: SinkRun
        match spec.kind:
            case "mlflow":
                run = MlflowRun(ask, where, spec.experiment, row.id)
            case "trackio":
                run = TrackioRun(ask, where, spec.experiment, row.id)
            case "wandb":
                run = WandbRun(ask, where, spec.experiment, spec.entity, row.id, self._rules.beat_seconds)
        self._sent = await run.open(row.name, row.created, row.spec)
        self._evaluated, self._state, self._run = set(), None, run
        self._times.clear()
        return run

    async def _last_intact(self) -> int:
        """The last step that the sink has as it is stored: after a rollback, the job takes later steps again, at other
        times. Of a run that was just opened only the step is known."""
        store, tenant, job = self._services.store, self._row.tenant, self._row.id
        while self._times:
            step, time = self._times[-1]
            rows = await store.read(versions.steps, tenant, job, step - 1, 1)
            if rows and (rows[0]["step"], rows[0].get("time", 0.0)) == (step, time):
                return step
            self._times.pop()
            self._sent = step - 1
        return min(self._sent, await store.read(versions.last_step, tenant, job))

    async def _traced(self, batch: Sequence[Figure]) -> AsyncIterator[tuple[list[Figure], list[SinkTrace]]]:
        """The batch in parts of whole steps, each with its traces: a part ends where they would be too many bytes."""
        part, traces, size = list[Figure](), list[SinkTrace](), 0
        for step, of_step in groupby(batch, lambda figure: figure.step):
            found, more = await self._traces_of(step)
            if part and size + more > self._rules.trace_bytes:
                yield part, traces
                part, traces, size = [], [], 0
            part, traces, size = [*part, *of_step], traces + found, size + more
        yield part, traces

    async def _traces_of(self, step: int) -> tuple[list[SinkTrace], int]:
        """The first episodes of a step whose texts are kept, where the sink takes traces, and their bytes."""
        found, size, left, cursor = list[SinkTrace](), 0, self._traces, None
        while left > 0:
            chosen = EpisodeChoice(step=step, limit=min(left, self._rules.traces_read), before=cursor)
            page = await self._services.store.read(episodes_page, self._row.tenant, self._row.id, chosen)
            ended = [episode for _, episode in page.episodes]
            for trace, more in await self._services.threads(_traces, step, len(found), ended):
                if found and size + more > self._rules.trace_bytes:
                    return found, size
                found.append(trace)
                size += more
            left, cursor = left - len(ended), page.next
            if cursor is None:
                break
        return found, size

    async def _write_evaluations(self, run: SinkRun) -> None:
        """Write the evaluations at the steps of their versions."""
        store, tenant, job = self._services.store, self._row.tenant, self._row.id
        if await store.read(versions.evaluated, tenant, job) <= self._evaluated:
            return
        found = await store.read(versions.evaluations, tenant, job, answers=False)
        new = [one for one in found if one.prompts and (one.policy, one.version) not in self._evaluated]
        names = {policy.id: policy.name for policy in await store.read(jobs.policies, tenant, job)}
        steps = dict[tuple[str, int], int]()
        for policy in sorted({one.policy for one in new}):
            of_policy = [one.version for one in new if one.policy == policy]
            rows = await store.read(versions.steps_of_versions, tenant, job, names[policy], of_policy)
            steps |= {(policy, 0): 0} | {(policy, version): row["step"] for version, row in rows.items()}
        several = sum(about.get("train", True) for about in self._row.spec["policies"].values()) > 1
        for one in new:
            step = steps.get((one.policy, one.version))
            if step is None:  # the job was rolled back from it
                continue
            if step > max(self._sent, 0):  # the sink's last step says which steps it has
                continue
            await run.write(_evaluation(one, f"{names[one.policy]}/" if several else "", step))
            self._evaluated.add((one.policy, one.version))


def _evaluation(row: EvaluationRow, prefix: str, step: int) -> list[Figure]:
    values = {"mean": row.mean, "stderr": row.error, "prompts": row.prompts, **row.results}
    return [
        Figure(metric_name(f"{prefix}evaluation/{name}"), value, step, row.created) for name, value in numbers(values)
    ][:METRICS_AT_ONCE]


def _traces(step: int, first: int, episodes: Sequence[EpisodeRow]) -> list[tuple[SinkTrace, int]]:
    """The traces of episodes, numbered from ``first``, each with its bytes as JSON."""
    found = []
    for number, episode in enumerate((one for one in episodes if one.trajectories), first):
        result = _stored_episode.decode(episode.trajectories)
        messages = [{"role": turn.role, "content": turn.content[:TRACED_CHARACTERS]} for turn in result.turns]
        about = {"episode": episode.id, "reward": episode.reward, "version": episode.version, "finish": result.finish}
        trace = SinkTrace(step, number, messages[:TRACED_MESSAGES], about)
        found.append((trace, len(json.dumps([trace.messages, about]))))
    return found
