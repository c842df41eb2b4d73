"""One run of an MLflow server, by version 2.0 of its REST API: found by the job's id, created once, written in batches.

The run's tags say which job it is of and which step it has received last, so nothing about it is stored here. A batch
that is sent twice changes nothing: its times are those of the steps, and MLflow keeps equal figures once.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from rookery.controller.sink_run import VALUE_LENGTH, Ask, Figure, SinkTrace, params
from rookery.errors import UserError
from rookery.storage.models import JobState

PARAMS_AT_ONCE = 100
"""The limit of one request to MLflow."""

PATH = "api/2.0/mlflow/"

JOB_TAG, STEP_TAG, STATE_TAG, REASON_TAG = "rookery.job", "rookery.step", "rookery.state", "rookery.reason"

STATUS: Mapping[JobState, str] = {"completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
"""MLflow's word for each final state; a job in another state is RUNNING."""


def mlflow_headers(secret: str) -> dict[str, str]:
    """The headers for a token, or for USER:PASSWORD."""
    if ":" in secret:
        return {"Authorization": f"Basic {base64.b64encode(secret.encode()).decode()}"}
    return {"Authorization": f"Bearer {secret}"}


class MlflowRun:
    """The run of one job in an experiment, which is created where it does not exist."""

    beat_seconds: float | None = None

    def __init__(self, ask: Ask, where: str, experiment: str, job: str) -> None:
        """``where`` names the sink in errors."""
        self._send = ask
        self._where = where
        self._experiment = experiment
        self._job = job
        self._run = ""

    async def open(self, name: str, started: float, spec: Mapping[str, Any]) -> int:
        """Find or create the run. Returns the last step that it has received, -1 for none."""
        try:
            experiment = await self._experiment_id()
            tag = f"tags.`{JOB_TAG}` = '{self._job}'"
            body = {"experiment_ids": [experiment], "filter": tag, "max_results": 1}
            found = (await self._ask("runs/search", body)).get("runs") or []
            if found:
                run = found[0]
            else:
                tags = _pairs({JOB_TAG: self._job, "mlflow.source.name": "rookery"})
                body = {"experiment_id": experiment, "run_name": name, "start_time": _ms(started), "tags": tags}
                run = (await self._ask("runs/create", body))["run"]
            run_id = str(run["info"]["run_id"])
            known = {tag["key"]: tag["value"] for tag in run["data"].get("tags", [])}
            step = int(known.get(STEP_TAG, -1))
        except (LookupError, TypeError, ValueError, AttributeError):
            raise UserError(f"{self._where}: answers in another form than MLflow's REST API 2.0") from None
        given = _pairs(params(spec))
        for start in range(0, len(given), PARAMS_AT_ONCE):
            await self._ask("runs/log-batch", {"run_id": run_id, "params": given[start : start + PARAMS_AT_ONCE]})
        self._run = run_id
        return step

    async def write(self, batch: Sequence[Figure], last: int | None = None, traces: Sequence[SinkTrace] = ()) -> None:
        """Write metrics; ``last`` is the newest step in them."""
        metrics = [{"key": one.key, "value": one.value, "step": one.step, "timestamp": _ms(one.time)} for one in batch]
        tags = {} if last is None else {STEP_TAG: str(last)}
        await self._ask("runs/log-batch", {"run_id": self._run, "metrics": metrics, "tags": _pairs(tags)})

    async def set_state(self, state: JobState, reason: str, finished: float | None) -> None:
        """Write the job's state and the reason for it."""
        tags = _pairs({STATE_TAG: state, REASON_TAG: reason[:VALUE_LENGTH]})
        await self._ask("runs/log-batch", {"run_id": self._run, "tags": tags})
        ended = {} if finished is None else {"end_time": _ms(finished)}
        await self._ask("runs/update", {"run_id": self._run, "status": STATUS.get(state, "RUNNING"), **ended})

    async def beat(self) -> None:
        """MLflow needs none."""

    async def _ask(self, path: str, body: Mapping[str, Any]) -> Any:
        return await self._send(PATH + path, body)

    async def _experiment_id(self) -> str:
        wanted = {"filter": f"name = '{self._experiment}'", "max_results": 1}
        found = (await self._ask("experiments/search", wanted)).get("experiments") or []
        if found:
            return str(found[0]["experiment_id"])
        try:
            return str((await self._ask("experiments/create", {"name": self._experiment}))["experiment_id"])
        except UserError:  # another job may have created it just now
            found = (await self._ask("experiments/search", wanted)).get("experiments") or []
            if not found:
                raise
            return str(found[0]["experiment_id"])


def _pairs(values: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in values.items()]


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
