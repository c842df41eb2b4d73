"""Metrics in TensorBoard and Weights & Biases, enabled by settings; each needs an optional extra.

The database holds the metrics; a sink only displays them. A sink that fails is logged and removed, and its job
continues. Sinks write to disks and networks in a separate thread per job, so nothing waits for them until they are
closed. A sink whose package is missing is refused before the service starts, with the command that installs it.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from rookery.errors import UserError, installs
from rookery.settings import Settings

log = logging.getLogger("rookery.telemetry")


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


def check(settings: Settings) -> None:
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
            values = dict(numbers(row))
            self._thread.submit(self._write, int(values.pop("step", 0)), values)

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


def numbers(row: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """The finite numbers of a row by name, nested mappings flattened with ``/``."""
    found: list[tuple[str, float]] = []
    for name, value in row.items():
        if isinstance(value, Mapping):
            found += numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            found.append((prefix + name, float(value)))
    return found
