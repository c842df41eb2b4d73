"""``metrics.jsonl`` of one job: one JSON object per optimizer step, in order of steps.

Promises:

* A row that :meth:`MetricsLog.append` returned from has left this process: a killed process keeps it.
* A line torn by a crash is never shown, and is cut off before the next row is written.
* Every line is strict JSON: a number that is not finite is written as null.
* Only one process appends (the controller); any number may read.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from rookery.errors import disk_errors

log = logging.getLogger("rookery.telemetry")

FILE = "metrics.jsonl"

_DISK = "the disk of the metrics"

BLOCK = 1 << 16
"""Bytes that are read at once: what a list of jobs shows of one fits in one or two."""


class MetricsLog:
    """The metrics file in ``folder`` (made when the first row comes). Every row has an integer ``step``."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE

    def append(self, row: dict[str, Any]) -> None:
        """Write one row behind the others. ``row["step"]`` is an int; other values are JSON, non-finite numbers become
        null. Raises ValueError for a row without a step, :class:`StorageFull`, OSError where the disk refuses."""
        if not isinstance(row.get("step"), int):
            raise ValueError(f"a metrics row needs an integer step, given {row.get('step')!r}")
        line = json.dumps(_finite(row), allow_nan=False, separators=(",", ":")).encode() + b"\n"
        with disk_errors(_DISK):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a+b") as file:
                self._cut_torn_line(file)
                file.write(line)

    def read(self, after: int = -1) -> list[dict[str, Any]]:
        """Rows of steps greater than ``after``, oldest first; none where there is no file yet. No more of the file is
        read than holds them."""
        return [row for row, _ in self._back(lambda row, found: row["step"] <= after)]

    def newest(self, count: int) -> list[dict[str, Any]]:
        """The last ``count`` rows, oldest first, reading no more than holds them."""
        return [row for row, _ in self._back(lambda row, found: found >= count)]

    def truncate_after(self, step: int) -> None:
        """Drop every row of a step greater than ``step``, as recovery does with rows of steps that were never
        committed. What is kept is written aside and renamed, so a crash leaves the one or the other file. Raises
        :class:`StorageFull`."""
        if not self.path.exists():
            return
        kept = [line for row, line in self._back() if row["step"] <= step]
        aside = self.path.with_suffix(".new")
        with disk_errors(_DISK), aside.open("wb") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self.path)

    def _back(
        self, enough: Callable[[dict[str, Any], int], bool] = lambda row, found: False
    ) -> list[tuple[dict[str, Any], bytes]]:
        """Whole rows with their lines, oldest first, of the end of the file: read backwards up to the row for which
        ``enough(row, rows behind it)`` holds, which is not among them."""
        rows: list[tuple[dict[str, Any], bytes]] = []
        try:
            with self.path.open("rb") as file:
                for line in _lines_back(file):
                    row = _row(line)
                    if row is None:
                        log.debug("%s: a torn line of %d bytes is left out", self.path, len(line))
                    elif enough(row, len(rows)):
                        break
                    else:
                        rows.append((row, line))
        except FileNotFoundError:
            pass
        return rows[::-1]

    def _cut_torn_line(self, file: BinaryIO) -> None:
        if file.seek(0, os.SEEK_END) == 0:
            return
        file.seek(-1, os.SEEK_END)
        if file.read(1) == b"\n":
            return
        file.seek(0)
        content = file.read()
        whole = content.rfind(b"\n") + 1
        log.warning("%s: cutting off %d bytes of a line that a crash left unfinished", self.path, len(content) - whole)
        file.truncate(whole)


def _lines_back(file: BinaryIO) -> Iterator[bytes]:
    """The lines of a file with their ends, the last one first. What stands behind the last line's end is one too."""
    at = file.seek(0, os.SEEK_END)
    rest = b""
    while at:
        size = min(BLOCK, at)
        at -= size
        file.seek(at)
        content = file.read(size) + rest
        if not content:  # cut off meanwhile, with a line that was never whole
            return
        first, *lines = content.splitlines(keepends=True)
        yield from reversed(lines)
        rest = first
    if rest:
        yield rest


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
