"""Metrics for other programs: Prometheus' text format, TensorBoard and Weights & Biases by setting, strict JSON.

* The controller counts, and the database holds a job's metrics; nothing is stored here.
* :meth:`ServiceMetrics.render` formats a service's current values together with the memory and CPU time of the process.
  Labels are states, never a tenant, a job or a text, so a scrape reveals nothing about any tenant.
* Sinks (TensorBoard, Weights & Biases) need an optional extra each; one whose package is missing is refused before the
  service starts, with the command that installs it. A sink that fails is logged and removed, and its job continues.
  Sinks write to disks and networks in a separate thread per job, so nothing waits for them until they are closed.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rookery.errors import UserError, installs
from rookery.settings import Settings
from rookery.telemetry.numbers import numbers

log = logging.getLogger("rookery.telemetry")

CONTENT_TYPE = CONTENT_TYPE_LATEST


@dataclass(frozen=True, kw_only=True, eq=False)
class ServiceMetrics(Collector):
    """The values of one scrape. Totals never decrease while the service runs."""

    jobs: Mapping[str, int] = field(default_factory=dict)
    """Jobs by state."""
    workers: Mapping[str, int] = field(default_factory=dict)
    """Workers by state."""
    totals: Mapping[str, int | float] = field(default_factory=dict)
    """By name: steps, sampled_tokens, trained_tokens, groups_dropped_stale, episodes_failed, worker_losses, …"""
    gauges: Mapping[str, int | float] = field(default_factory=dict)
    """By name: requests_waiting, requests_running, environment_hosts, …"""
    help: Mapping[str, str] = field(default_factory=dict)
    """Help texts of gauges; others are described by their names."""

    def collect(self) -> Iterator[Metric]:
        for name, states in (("jobs", self.jobs), ("workers", self.workers)):
            family = GaugeMetricFamily(f"rookery_{name}", f"{name.capitalize()} by state", labels=["state"])
            for state, count in states.items():
                family.add_metric([state], count)
            yield family
        for name, value in self.totals.items():
            yield CounterMetricFamily(f"rookery_{name}", f"{_readable(name)} since the service started", value=value)
        for name, value in self.gauges.items():
            text = self.help.get(name, f"{_readable(name)} now")
            yield GaugeMetricFamily(f"rookery_{name}", text, value=value)

    def render(self) -> bytes:
        """The response to a scrape of ``/metrics``, of type :data:`CONTENT_TYPE`: the values, and this process's."""
        registry = CollectorRegistry()
        registry.register(self)
        ProcessCollector(registry=registry)
        return generate_latest(registry)


def _readable(name: str) -> str:
    return name.replace("_", " ").capitalize()


class Sink(Protocol):
    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Events in ``folder``, written with the ``tensorboard`` package alone (torch is not needed)."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of ``project`` named after the job; its id is the job's, so that a restarted service continues it."""

    def __init__(self, project: str, folder: Path, job: str, name: str) -> None:
        import wandb

        self._run = wandb.init(project=project, id=job, name=name, dir=str(folder), resume="allow", reinit="create_new")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def check_sinks(settings: Settings) -> None:
    """Raises :class:`UserError` if a setting enables a sink whose package is not installed."""
    for enabled, setting, package in (
        (settings.server.tensorboard, "ROOKERY_TENSORBOARD", "tensorboard"),
        (bool(settings.server.wandb_project), "ROOKERY_WANDB_PROJECT", "wandb"),
    ):
        if enabled and importlib.util.find_spec(package) is None:
            raise UserError(f"{setting} needs the package {package}: {installs(package)}, or unset it")


class Sinks:
    """All sinks of one job. They receive the numbers of metrics rows, nested ones as ``a/b``."""

    def __init__(self, settings: Settings, folder: Path, job: str, name: str, extra: Sequence[Sink] = ()) -> None:
        """The sinks that ``settings`` enable, with files in ``folder``, and ``extra`` ones."""
        self._log_fields = {"job": job}
        self._sinks: list[Sink] = list(extra)
        self._thread = ThreadPoolExecutor(1, "sinks")  # the thread starts with the first task
        openers: list[Callable[[], Sink]] = []
        if settings.server.tensorboard:
            openers.append(lambda: TensorBoard(folder / "tensorboard"))
        if settings.server.wandb_project:
            openers.append(lambda: WeightsAndBiases(settings.server.wandb_project, folder, job, name))
        for opener in openers:
            self._thread.submit(self._open, opener)
        self.active = bool(openers or extra)
        """Whether there is any sink."""

    def write(self, row: Mapping[str, Any]) -> None:
        """Queue a row; returns at once."""
        if self.active:
            values, policy = dict(numbers(row)), row.get("policy")
            step = int(values.pop("step", 0))
            if policy:  # of several: each has its own series
                values = {f"{policy}/{name}": value for name, value in values.items()}
            self._thread.submit(self._write, step, values)

    def close(self) -> None:
        """Returns when everything is written and closed."""
        if self.active:
            self._thread.submit(self._close)
        self._thread.shutdown()

    def _write(self, step: int, values: dict[str, float]) -> None:
        for sink in list(self._sinks):
            try:
                sink.write(step, values)
            except Exception:
                log.exception("%s failed; this job continues without it", type(sink).__name__, extra=self._log_fields)
                self._sinks.remove(sink)

    def _close(self) -> None:
        for sink in self._sinks:
            try:
                sink.close()
            except Exception:
                log.exception("%s could not be closed", type(sink).__name__, extra=self._log_fields)
        self._sinks.clear()

    def _open(self, opener: Callable[[], Sink]) -> None:
        try:
            self._sinks.append(opener())
        except Exception:
            log.exception("a metrics sink could not be opened; this job continues without it", extra=self._log_fields)


def finite(value: Any) -> Any:
    """``value`` with None for every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value
