"""Random inputs of tests: the same in every run of `make test`, new ones in `make fuzz` and `make nightly`."""

from __future__ import annotations

import os
import random
import sys

SEED = int(os.environ.get("ROOKERY_FUZZ_SEED") or 1)
"""Fuzz tests draw from it. `make fuzz` sets a new one and prints it; the same value repeats a run."""

MORE = int(os.environ.get("ROOKERY_FUZZ_EXAMPLES") or 0)
"""At least so many examples in every property test; above zero, the examples are new ones in each run."""

USUAL = 50
"""Examples of a property test that names no number. Fixed examples find nothing new when repeated, so they are few."""


def examples(count: int) -> int:
    """The number of examples of a property test that needs ``count`` in `make test`."""
    return max(count, MORE)


def seed_everything() -> None:
    """Seeds the global generators. Torch and numpy only where they are loaded."""
    random.seed(0)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
