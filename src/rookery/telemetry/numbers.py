"""The numbers of a row of metrics, as other programs take them, and those of an evaluation, as people read them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rookery.errors import count_of

RENEWED = "renewed"
"""Key in a step's row, no metric: when steps before it were deleted."""

NONE = "–"
"""Stands for a number that there is not."""


def numbers(row: Mapping[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """The finite numbers of a row by name, nested mappings flattened with ``/``; not :data:`RENEWED`."""
    found: list[tuple[str, float]] = []
    for name, value in row.items():
        if isinstance(value, Mapping):
            found += numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value) and name != RENEWED:
            found.append((prefix + name, float(value)))
    return found


def figure(value: object, form: str = ".3f") -> str:
    """A number in this form, as people read it; a dash for what is none: null, NaN, an infinity."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return format(value, form) if number else NONE


def evaluation_cells(evaluation: Mapping[str, Any]) -> dict[str, str]:
    """The results of an evaluation by their names: the mean reward on prompts, or on rows the held-out loss."""
    count = str(evaluation["prompts"])
    if (loss := evaluation.get("loss")) is not None:
        return {"loss": f"{loss:.4f}", "accuracy": figure(evaluation.get("accuracy")), "held-out rows": count}
    spread = "" if evaluation.get("stderr") is None else f" ± {evaluation['stderr']:.3f}"
    constant, mean = (evaluation.get("constant") or {}).get("reward"), evaluation["mean"]
    return {
        "mean reward": "all failed" if mean is None else f"{mean:.3f}{spread}",
        "held-out prompts": count,
        "best constant reply": figure(constant),
    }


def evaluation_text(evaluation: Mapping[str, Any]) -> str:
    """The figures of :func:`evaluation_cells` as a sentence."""
    cells = evaluation_cells(evaluation)
    if evaluation["mean"] is None:
        return "every held-out episode failed"
    if "loss" not in cells:
        return f"{cells['mean reward']} on {count_of(evaluation['prompts'], 'held-out prompt')}"
    accuracy = evaluation.get("accuracy")
    right = "" if accuracy is None else f", the chosen reply preferred in {accuracy:.0%}"
    return f"loss {cells['loss']}{right} on {count_of(evaluation['prompts'], 'held-out row')}"
