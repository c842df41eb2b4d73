"""Token ids of prompts as numbers that all prompts share: a prompt that waits takes 8 bytes a token, not 36."""

from __future__ import annotations

import threading
from collections.abc import Sequence

MOST_IDS = 1 << 20
"""Larger ids are no vocabulary's: nothing is kept for them."""

_known: list[int] = []
"""The numbers from 0 to the largest id so far."""

_growing = threading.Lock()


def shared_ids(tokens: Sequence[int]) -> list[int]:
    """A list of ``tokens`` whose numbers are those of all such lists."""
    if not tokens or min(tokens) < 0 or (most := max(tokens)) >= MOST_IDS:
        return list(tokens)
    if most >= len(_known):
        with _growing:
            _known.extend(range(len(_known), most + 1))
    return [_known[token] for token in tokens]
