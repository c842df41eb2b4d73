"""One run of a Weights & Biases server, by the requests that its client makes: a mutation opens it, lines are appended.

The history has a line for each row; ``step`` is the job's, and the axis of every chart. The run's summary keeps, under
:data:`KEPT`, the last step and which evaluations the history has, and changes with the lines in one request: so a
restarted service continues after the last line, and no line is there twice. A step that is taken again after a rollback
has a line for each time; the later one holds.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import islice
from typing import Any, TypeVar
from urllib.parse import quote

from rookery.controller.sink_run import (
    NAME_LENGTH,
    VALUE_LENGTH,
    Ask,
    Figure,
    RefusedBySink,
    SinkTrace,
    params,
    rows_of,
)
from rookery.errors import UserError
from rookery.storage.models import JobState
from rookery.telemetry.numbers import numbers

T = TypeVar("T")
V = TypeVar("V")

KEPT = "_rookery"
"""The key in the summary of what a restarted service needs; a leading ``_`` hides it."""

SUMMARY_METRICS, EVALUATIONS = 400, 4000
"""Most metrics in the summary, and most evaluations that it names, the newest: less than 256 kB together, so that the
service can read the summary again. An older evaluation is written again when the run is opened again."""

STEP_AXIS = [{"1": "step", "6": [3], "7": []}, {"2": "*", "5": 1, "6": [1], "7": []}]
"""``define_metric("step")`` and ``define_metric("*", step_metric="step")`` as the client writes them."""

RESUME = """query RunResumeStatus($project: String, $entity: String, $name: String!) {
  model(name: $project, entityName: $entity) {
    bucket(name: $name, missingOk: true) { summaryMetrics historyLineCount }
  }
}"""

UPSERT = """mutation UpsertBucket($name: String, $project: String, $entity: String, $displayName: String, $config: JSONString) {
  upsertBucket(input: {name: $name, modelName: $project, entityName: $entity, displayName: $displayName, config: $config}) {
    bucket { name project { name entity { name } } }
  }
}"""  # noqa: E501


def wandb_headers(secret: str) -> dict[str, str]:
    """The key is the password of the user ``api``."""
    return {"Authorization": f"Basic {base64.b64encode(f'api:{secret}'.encode()).decode()}"}


class WandbRun:
    """The run of one job in a project, which is created where it does not exist. The run's id is the job's."""

    def __init__(
        self,
        ask: Ask,
        where: str,
        project: str,
        entity: str | None,
        job: str,
        beat_seconds: float | None = None,
        most_evaluations: int = EVALUATIONS,
    ) -> None:
        """``where`` names the sink in errors; ``entity`` is a team, by default the key's. The summary keeps the digests
        of ``most_evaluations``."""
        self.beat_seconds = beat_seconds
        self._ask = ask
        self._where = where
        self._most_evaluations = most_evaluations
        self._project, self._entity, self._job = project, entity, job
        self._stream = ""
        self._lines = 0
        self._started = 0.0
        self._summary: dict[str, float] = {}
        self._state: dict[str, str] = {}
        self._seen: dict[str, None] = {}
        """Digests of the evaluations that the history has, the newest last."""
        self._last = -1
        """The last step that it has."""

    async def open(self, name: str, started: float, spec: Mapping[str, Any]) -> int:
        """Find or create the run. Returns the last step that it has received, -1 for none."""
        named = {"project": self._project, "entity": self._entity, "name": self._job}
        config: dict[str, Any] = {key: {"value": value} for key, value in params(spec).items()}
        config["_wandb"] = {"value": {"m": STEP_AXIS, "t": {}}}
        try:
            self._lines, self._last, self._summary, self._seen = await self._query(_stored, RESUME, named)
            given = {**named, "displayName": name, "config": json.dumps(config)}
            self._stream, self._started = await self._query(_stream, UPSERT, given), started
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
            raise UserError(f"{self._where}: answers in another form than Weights & Biases") from None
        return self._last

    async def write(self, batch: Sequence[Figure], last: int | None = None, traces: Sequence[SinkTrace] = ()) -> None:
        """Append a line for each row that the history does not have; ``last`` is the newest step in them."""
        lines: list[str] = []
        seen, summary = dict(self._seen), dict(self._summary)
        for step, time, values in rows_of(batch):
            digest = blake2b(repr((step, time, sorted(values))).encode(), digest_size=8).hexdigest()
            if last is None and digest in seen:
                continue
            if last is None:
                seen[digest] = None
            number = self._lines + len(lines)
            line = {**values, "step": step, "_step": number, "_timestamp": time, "_runtime": time - self._started}
            lines.append(json.dumps(line))
            for key in reversed(line):  # the first of a line are its newest
                summary.pop(key, None)
                summary[key] = line[key]
        if not lines:
            return
        step = self._last if last is None else last
        seen, summary = _newest(seen, self._most_evaluations), _newest(summary, SUMMARY_METRICS)
        await self._append(lines, summary, self._kept(step, seen))
        self._lines, self._summary, self._seen, self._last = self._lines + len(lines), summary, seen, step

    async def set_state(self, state: JobState, reason: str, finished: float | None) -> None:
        """Write the state into the summary. A job that has ended ends the run, well or not."""
        self._state = {"rookery/state": state, "rookery/reason": reason[:VALUE_LENGTH]}
        kept = self._kept(self._last, self._seen)
        ended = {} if finished is None else {"complete": True, "exitcode": int(state != "completed")}
        await self._append([], self._summary, kept, **ended)

    async def beat(self) -> None:
        """Report that the run continues."""
        await self._ask(self._stream, {})

    async def _append(self, lines: list[str], summary: dict[str, float], kept: dict[str, Any], **more: Any) -> None:
        shown = json.dumps({**summary, **self._state, KEPT: kept})
        files: dict[str, Any] = {"wandb-summary.json": {"offset": 0, "content": [shown]}}
        if lines:
            files["wandb-history.jsonl"] = {"offset": self._lines, "content": lines}
        await self._ask(self._stream, {"files": files, **more})

    def _kept(self, step: int, seen: Mapping[str, None]) -> dict[str, Any]:
        return {"step": step, "evaluations": [*seen]}

    async def _query(self, read: Callable[[dict[str, Any]], T], query: str, variables: Mapping[str, Any]) -> T:
        """The value of ``read`` for the data that a query answers; it runs in the thread of the request."""

        def read_answer(answer: Any) -> T:
            if answer.get("errors"):
                raise RefusedBySink(str(answer["errors"][0].get("message")))
            return read(answer["data"])

        found: T = await self._ask("graphql", {"query": query, "variables": variables}, read_answer)
        return found


def _stored(data: dict[str, Any]) -> tuple[int, int, dict[str, float], dict[str, None]]:
    """The parts of a run that the service wrote: the number of lines, the last step, the metrics in the summary, the
    digests of evaluations. A server can answer anything: nothing else is kept, and no more than the service writes."""
    found = (data.get("model") or {}).get("bucket") or {}
    summary = json.loads(found.get("summaryMetrics") or "{}")
    kept = summary.pop(KEPT, None) or {}
    flat = {
        name: value for name, value in summary.items() if len(name) <= NAME_LENGTH and isinstance(value, int | float)
    }
    metrics = _newest(dict(numbers(flat)), SUMMARY_METRICS)
    digests = [one for one in kept.get("evaluations", [])[-EVALUATIONS:] if re.fullmatch("[0-9a-f]{16}", one)]
    return _count(found.get("historyLineCount") or 0), _count(kept.get("step", -1)), metrics, dict.fromkeys(digests)


def _count(given: Any) -> int:
    if not -1 <= int(given) < 2**53:
        raise ValueError("a count of lines or steps")
    return int(given)


def _stream(data: dict[str, Any]) -> str:
    """The path of the requests that write a run."""
    bucket = data["upsertBucket"]["bucket"]
    project = bucket["project"]
    names = (project["entity"]["name"], project["name"], bucket["name"])
    if max(map(len, names)) > NAME_LENGTH:
        raise ValueError("a name is too long")
    return f"files/{'/'.join(quote(name, safe='') for name in names)}/file_stream"


def _newest(found: dict[str, V], most: int) -> dict[str, V]:
    """The last entries of a dictionary."""
    return dict(islice(found.items(), max(0, len(found) - most), None))
