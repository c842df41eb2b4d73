"""``metrics.jsonl`` of a job, an export for scripts: one JSON object per committed optimizer step, in order.

* The database holds the metrics; the file is rewritten from it whenever the job is resumed, and grows by a line per
  step. A process that is killed leaves at most the last line torn or missing, until then.
* Every line is strict JSON: a number that is not finite is written as null.
* Only the controller writes.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rookery.errors import disk_errors

FILE = "metrics.jsonl"

_DISK = "the disk of the metrics"


class MetricsExport:
    """The file in ``folder``, which is created if it is missing. Methods raise :class:`~rookery.errors.StorageFull`."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def append(self, row: Mapping[str, Any]) -> None:
        """Write one row after the others."""
        with disk_errors(_DISK):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab") as file:
                file.write(_line(row))

    def rewrite(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace the content atomically. Without rows no file is created."""
        content = b"".join(map(_line, rows))
        if not content and not self.path.exists():
            return
        new = self.path.with_suffix(".new")
        with disk_errors(_DISK):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with new.open("wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        new.replace(self.path)


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(finite(row), allow_nan=False, separators=(",", ":")).encode() + b"\n"


def finite(value: Any) -> Any:
    """``value`` with None for every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return value
