"""The data that a sink of a job gets (figures of steps, settings as texts, traces, states), and its interface."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from rookery.storage.models import JobState
from rookery.telemetry.numbers import numbers

METRICS_AT_ONCE = 1000
"""Most figures of one request, which is what MLflow takes. Of a step's metrics the first thousand are sent."""

PARAMS = 300
"""Most params of a run."""

NAME_LENGTH, VALUE_LENGTH = 250, 500
"""Longest name, and longest value of a param or tag that every version of MLflow takes."""

SENT_PARTS = ("base_model", "policies", "algorithm", "sampling", "evaluation", "checkpoints", "stop", "seed", "shuffle")
"""The parts of a job that become params. An environment's options are not among them: they can be secret or large."""

Ask = Callable[..., Awaitable[Any]]
"""``ask(path, body, read)`` is the server's answer, or the value of ``read(answer)``, which runs in the thread of the
request: an answer of a stranger may be large. Raises :class:`UserError`."""


class RefusedBySink(Exception):
    """The text of an answer that refuses a request, as the server wrote it: credentials can be in it."""


class SinkRun(Protocol):
    """The run of one job at a sink. Every method raises :class:`UserError` where the sink fails."""

    beat_seconds: float | None
    """Longest silence that the sink takes for life; None where it takes any."""

    async def open(self, name: str, started: float, spec: Mapping[str, Any]) -> int:
        """Find or create the run. Returns the last step that it has received, -1 for none."""
        ...

    async def write(self, batch: Sequence[Figure], last: int | None = None, traces: Sequence[SinkTrace] = ()) -> None:
        """Write figures, and traces of their steps. ``last`` is the newest step in them; None for evaluations, which
        may be those that were written before."""
        ...

    async def set_state(self, state: JobState, reason: str, finished: float | None) -> None:
        """Write the job's state and the reason for it."""
        ...

    async def beat(self) -> None:
        """Report that the job continues."""
        ...


@dataclass(frozen=True)
class SinkTrace:
    """The conversation of an episode that a step trained on."""

    step: int
    number: int
    messages: list[dict[str, str]]
    about: dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A metric of one step; ``time`` is in seconds since the epoch."""

    key: str
    value: float
    step: int
    time: float


def metric_name(name: str) -> str:
    """The name as MLflow takes it: other characters than its own become ``_``, and each part of the path is named. One
    that is changed ends with a hash of the given one, so that no two names have one series."""
    parts = [part for part in re.sub(r"[^A-Za-z0-9_.:/ -]", "_", name).split("/") if part]
    sent = "/".join("_" if part in (".", "..") else part for part in parts)
    if sent and sent == name and len(sent) <= NAME_LENGTH:
        return sent
    mark = f"-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"
    return sent[: NAME_LENGTH - len(mark)].rstrip("/") + mark


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


def rows_of(batch: Sequence[Figure]) -> list[tuple[int, float, dict[str, float]]]:
    """The figures by step and time, as (step, time, values)."""
    found = groupby(batch, lambda one: (one.step, one.time))
    return [(step, time, {one.key: one.value for one in figures}) for (step, time), figures in found]
