"""Timelines of runs that tests compare: as the service had them in memory, and as it stored them."""

from __future__ import annotations

from typing import Any

import pytest

STORED_SECONDS = 2e-6
"""Times are stored in microseconds; and a float of this century is off by a quarter of one."""

Starts = list[tuple[str, float]]
"""Kind and start of each span, in order."""


def starts_of_run(found: Any, id: str) -> Starts:
    """Of a timeline's spans, those of one run."""
    return sorted((span.kind, span.start) for span in found.spans if span.job == id)


def check_same(found: Starts, expected: Starts) -> None:
    """Two timelines have the same spans."""
    assert [kind for kind, _ in found] == [kind for kind, _ in expected]
    starts = [start for _, start in expected]
    assert [start for _, start in found] == pytest.approx(starts, rel=0, abs=STORED_SECONDS)
