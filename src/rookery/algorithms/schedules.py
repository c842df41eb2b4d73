"""Learning-rate schedules: the rate at step t of T, as a multiple between ``min_ratio`` and 1 of the job's rate.

``warmup_steps`` of linear warm-up come before every one of them; T counts the steps after it. ``uba`` is the unified
budget-aware schedule (arXiv 2505.24452): with c = 1 + cos(πt/T), η = 2c / (2φ + (2 − φ)c); φ = 2 is cosine, φ → 0
constant.
"""

from __future__ import annotations

import math


def _cosine(share: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * share))


def _uba(share: float, phi: float) -> float:
    c = 1 + math.cos(math.pi * share)
    return 2 * c / (2 * phi + (2 - phi) * c)


def rate(
    name: str, step: int, *, lr: float, warmup_steps: int, total_steps: int | None, min_ratio: float, phi: float
) -> float:
    """The learning rate of the optimizer step number ``step`` (from 0). ``total_steps`` is needed by linear, cosine and
    uba; past it the rate stays at its end."""
    if step < warmup_steps:
        return lr * (step + 1) / (warmup_steps + 1)
    if name in ("constant", "warmup"):
        return lr
    if total_steps is None:
        raise ValueError(f"{name} needs total_steps")
    span = max(1, total_steps - warmup_steps)
    share = min(1.0, (step - warmup_steps) / span)
    if name == "linear":
        height = 1 - share
    elif name == "cosine":
        height = _cosine(share)
    elif name == "uba":
        height = _uba(share, phi)
    else:
        raise ValueError(f"no schedule {name!r}; known: constant, linear, cosine, warmup, uba")
    return lr * (min_ratio + (1 - min_ratio) * height)
