"""When a job's episodes fail so often that going on wastes everybody's time."""

from __future__ import annotations

from collections import deque


class FailureRateMonitor:
    """Remembers how the last ``window`` episodes ended."""

    def __init__(self, window: int, share: float) -> None:
        self._ends: deque[str] = deque(maxlen=window)
        self._share = share

    def add(self, error: str) -> None:
        """Note one end; ``error`` is empty for a good one."""
        self._ends.append(error)

    @property
    def pause_reason(self) -> str | None:
        """Why the job should pause: the most common recent error; None while it should go on. A window that is not half
        full gives no verdict, so that one bad start does not stop a job."""
        errors = [error for error in self._ends if error]
        half = (self._ends.maxlen or 0) // 2
        if len(self._ends) < half or len(errors) <= self._share * len(self._ends):
            return None
        common = max(sorted(set(errors)), key=errors.count)
        return f"{len(errors)} of the last {len(self._ends)} episodes failed, most with: {common}"
