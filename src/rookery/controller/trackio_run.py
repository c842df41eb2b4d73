"""One run of a trackio server, by its HTTP API: rows of metrics by step, rollouts as traces, an alert at a bad end.

Every row has an id that is a function of what it holds, and the server keeps the first of equal ids. So rows that are
sent twice are there once, and the server's last step is where a restarted service continues.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

from rookery.controller.sink_run import VALUE_LENGTH, Ask, Figure, SinkTrace, params, rows_of
from rookery.errors import UserError
from rookery.storage.models import JobState

TRACES = "rollouts"
"""The name of the traces among the metrics of a step."""

ALERTS: Mapping[JobState, str] = {"failed": "error", "cancelled": "warn", "paused": "warn"}
"""States that become alerts, with their level."""


def trackio_headers(secret: str) -> dict[str, str]:
    """A server takes its write token, a Space a token of the Hub; each ignores the other's header."""
    return {"X-Trackio-Write-Token": secret, "Authorization": f"Bearer {secret}"}


class TrackioRun:
    """The run of one job in a project, which is created where it does not exist."""

    beat_seconds: float | None = None

    def __init__(self, ask: Ask, where: str, project: str, job: str) -> None:
        """``where`` names the sink in errors."""
        self._ask = ask
        self._where = where
        self._run = {"project": project, "run": job, "run_id": job}
        self._config: dict[str, Any] = {}
        self._last = -1
        """The last step that the server has received."""

    async def open(self, name: str, started: float, spec: Mapping[str, Any]) -> int:
        """Find the run. Returns the last step that it has received, -1 for none."""
        self._run["run"] = name
        created = datetime.fromtimestamp(started, UTC).isoformat()
        self._config = {"_Username": "rookery", "_Created": created, **params(spec)}
        found = await self._call("get_run_summary", **self._run)
        step = found.get("last_step") if isinstance(found, Mapping) else ""
        if step is not None and not isinstance(step, int):
            raise UserError(f"{self._where}: answers in another form than trackio's API")
        self._last = -1 if step is None else step
        return self._last

    async def write(self, batch: Sequence[Figure], last: int | None = None, traces: Sequence[SinkTrace] = ()) -> None:
        """Write a row for each step of each policy, with the ``traces`` of the step in the first one."""
        left: dict[int, list[dict[str, Any]]] = {}
        for trace in traces:
            shown = {"_type": "trackio.trace", "messages": trace.messages, "metadata": trace.about, "spans": []}
            left.setdefault(trace.step, []).append(shown)
        logs = []
        for step, time, values in rows_of(batch):
            digest = blake2b(repr((step, time, sorted(values))).encode(), digest_size=16).hexdigest()
            shown = {TRACES: left.pop(step)} if step in left else {}
            logs.append(
                {**self._run, "metrics": {**values, **shown}, "step": step, "config": self._config, "log_id": digest}
            )
        if logs:
            await self._call("bulk_log", logs=logs, hf_token=None)
        self._last = self._last if last is None else last

    async def set_state(self, state: JobState, reason: str, finished: float | None) -> None:
        """An alert where the job is paused or did not complete, one for each state after a step; trackio has no states
        of runs."""
        if state in ALERTS:
            title, text = f"job {state}", reason[:VALUE_LENGTH]
            name = blake2b(repr((state, reason, finished, self._last)).encode(), digest_size=16).hexdigest()
            alert = {**self._run, "title": title, "text": text, "level": ALERTS[state], "step": None}
            time = datetime.fromtimestamp(finished, UTC).isoformat() if finished is not None else None
            await self._call("bulk_alert", alerts=[{**alert, "timestamp": time, "alert_id": name}], hf_token=None)

    async def beat(self) -> None:
        """Trackio needs none."""

    async def _call(self, function: str, **arguments: Any) -> Any:
        answer = await self._ask(f"api/{function}", {"args": [], "kwargs": arguments})
        if not isinstance(answer, Mapping) or "data" not in answer:
            raise UserError(f"{self._where}: answers in another form than trackio's API")
        return answer["data"]
