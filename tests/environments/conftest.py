"""Fixtures of the tests of environments."""

from __future__ import annotations

import pytest


@pytest.fixture
def no_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which no program is found."""
    monkeypatch.setenv("PATH", "")
