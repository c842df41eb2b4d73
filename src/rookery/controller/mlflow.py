"""One run of an MLflow server, by version 2.0 of its REST API: found by the job's id, created once, written in batches.

The run's tags say which job it is of and which step it has received last, so nothing about it is stored here. A batch
that is sent twice changes nothing: its times are those of the steps, and MLflow keeps equal figures once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rookery.errors import UserError
from rookery.storage.models import JobState
from rookery.telemetry.metrics import numbers

METRICS_AT_ONCE, PARAMS_AT_ONCE = 1000, 100
"""What MLflow takes in one request. Of a step's metrics the first thousand are sent."""

PARAMS = 300
"""Most params of a run."""

NAME_LENGTH, VALUE_LENGTH = 250, 500
"""Longest name, and longest value of a param or tag that every version of MLflow takes."""

JOB_TAG, STEP_TAG, STATE_TAG, REASON_TAG = "rookery.job", "rookery.step", "rookery.state", "rookery.reason"

STATUS: Mapping[JobState, str] = {"completed": "FINISHED", "failed": "FAILED", "cancelled": "KILLED"}
"""MLflow's word for each final state; a job in another state is RUNNING."""

SENT_PARTS = ("base_model", "policies", "algorithm", "sampling", "evaluation", "checkpoints", "stop", "seed", "shuffle")
"""The parts of a job that become params. An environment's options are not among them: they can be secret or large."""

Ask = Callable[[str, Mapping[str, Any]], Awaitable[Any]]
"""``ask(path, body)`` is the server's answer. Raises :class:`UserError`."""


@dataclass(frozen=True)
class Figure:
    """A metric of one step; ``time`` is in seconds since the epoch."""

    key: str
    value: float
    step: int
    time: float


def metric_name(name: str) -> str:
    """The name as MLflow takes it: other characters than its own become ``_``, and each part of the path is named."""
    parts = [part for part in re.sub(r"[^A-Za-z0-9_.:/ -]", "_", name).split("/") if part]
    return "/".join("_" if part in (".", "..") else part for part in parts)[:NAME_LENGTH].rstrip("/") or "_"


def figures(row: Mapping[str, Any]) -> list[Figure]:
    """The metrics of a step. Of several policies, each has its own series."""
    values, policy = dict(numbers(row)), row.get("policy")
    step, time = int(values.pop("step")), values.pop("time", 0.0)
    prefix = f"{policy}/" if policy else ""
    return [Figure(metric_name(prefix + name), value, step, time) for name, value in values.items()][:METRICS_AT_ONCE]


def batches(rows: Iterable[Mapping[str, Any]]) -> Iterator[tuple[list[Figure], int]]:
    """The metrics of whole steps in as few requests as MLflow allows, each with the last step in it."""
    batch, last = list[Figure](), -1
    for row in rows:
        found = figures(row)
        if batch and len(batch) + len(found) > METRICS_AT_ONCE:
            yield batch, last
            batch = []
        batch, last = batch + found, int(row["step"])
    if last >= 0:
        yield batch, last


def params(spec: Mapping[str, Any]) -> dict[str, str]:
    """A stored job's fields by path, as texts."""
    environment = spec.get("environment", {})
    found = {"environment": str(environment.get("id") or environment.get("hosted"))}
    left = [(name, spec[name]) for name in reversed(SENT_PARTS) if name in spec]
    while left and len(found) < PARAMS:
        name, value = left.pop()
        if isinstance(value, Mapping) and value:
            left += [(f"{name}.{inner}", one) for inner, one in reversed([*value.items()])]
        elif value is not None:
            found[metric_name(name)] = (value if isinstance(value, str) else json.dumps(value))[:VALUE_LENGTH]
    return found


class MlflowRun:
    """The run of one job in an experiment, which is created where it does not exist."""

    def __init__(self, ask: Ask, where: str, experiment: str, job: str) -> None:
        """``where`` names the sink in errors."""
        self._ask = ask
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

    async def write(self, batch: Sequence[Figure], last: int | None = None) -> None:
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
