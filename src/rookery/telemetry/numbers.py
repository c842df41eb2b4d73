"""The numbers of a row of metrics, as other programs take them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def numbers(row: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """The finite numbers of a row by name, nested mappings flattened with ``/``."""
    found: list[tuple[str, float]] = []
    for name, value in row.items():
        if isinstance(value, Mapping):
            found += numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value):
            found.append((prefix + name, float(value)))
    return found
