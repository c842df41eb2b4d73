"""The log of an environment that fails again and again: one traceback per place, then counts."""

from __future__ import annotations

import logging
import traceback
from collections import Counter

from rookery.errors import short

LINES = 1000
"""Places of failures that are remembered; after more of them, all are new again."""


class FailureLog:
    """Logs failures of users' code. One that fails at the same place as an earlier one of its job is counted, and
    reported when the count reaches a power of ten."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def report(self, what: str, job: str, error: BaseException) -> None:
        """``what`` failed with ``error``: the first time at this place with its traceback."""
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        if len(self._counts) >= LINES:
            self._counts.clear()
        self._counts[job, type(error).__name__, where] += 1
        count = self._counts[job, type(error).__name__, where]
        if count == 1:
            self._log.warning("%s failed", what, exc_info=error, extra={"job": job})
        elif set(str(count)) == {"1", "0"} and str(count).count("1") == 1:
            text = " ".join(short(f"{type(error).__name__}: {error}").split())
            line = "%s failed; %d failures at %s so far, the first one's traceback is above (%s)"
            self._log.warning(line, what, count, where or "this place", text, extra={"job": job})
