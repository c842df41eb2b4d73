"""Detection of jobs whose episodes fail so often that continuing wastes resources.

The monitor remembers how the last episodes ended. It asks for a pause when more than a given share of them failed, and
names the most common error, which is what the job's owner has to repair. Before the window is half full it never asks,
so that a single bad start does not stop a job.
"""

from __future__ import annotations

from collections import deque


class FailureRateMonitor:
    """A sliding window over the ends of a job's episodes, oldest dropped first."""

    def __init__(self, window: int, share: float) -> None:
        """``window``: episodes that are remembered; ``share``: the largest tolerable share of failures, from 0 to 1."""
        self._errors: deque[str] = deque(maxlen=window)
        """One entry per episode, oldest first; empty for an episode that succeeded."""
        self._window = window
        self._share = share

    def add(self, error: str) -> None:
        """Record the end of an episode.

        ``error`` is one line, empty for an episode that succeeded.
        """
        self._errors.append(error)

    @property
    def pause_reason(self) -> str | None:
        """Why the job should pause, with the most common recent error; None while it should continue.

        Of several equally common errors the first in alphabetical order is named, so that the same failures always give
        the same text.
        """
        errors = [error for error in self._errors if error]
        total = len(self._errors)
        if total < self._window // 2 or len(errors) <= self._share * total:
            return None
        common = max(sorted(set(errors)), key=errors.count)
        return f"{len(errors)} of the last {total} episodes failed, most with: {common}"
