"""Which versions keep their artifacts: the last K, the best, and every version that something still uses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RetentionCandidate:
    version: int
    score: float | None
    """Mean reward, of all candidates in evaluations or of all in training; None where it has none of that kind."""


def earned(trained: Iterable[tuple[int | None, float | None]]) -> dict[int, float]:
    """Each version's reward in training, from what is known of every version, oldest first: its parent, and the mean
    reward of the episodes that it was trained on. It is the parent that sampled them, or one before it; how the version
    itself does is known with the next one, and by then it has been the newest, which always stays."""
    return {parent: reward for parent, reward in trained if parent is not None and reward is not None}


def retire(
    versions: Sequence[RetentionCandidate], *, keep_last: int, keep_best: bool, in_use: Collection[int] = ()
) -> list[int]:
    """Versions whose artifacts may go, oldest first. The newest always stays; a tie for the best keeps the newest."""
    ordered = sorted(versions, key=lambda candidate: candidate.version)
    keep = {candidate.version for candidate in ordered[-max(1, keep_last) :]} | set(in_use)
    scored = [(candidate.score, candidate.version) for candidate in ordered if candidate.score is not None]
    if keep_best and scored:
        keep.add(max(scored)[1])
    return [candidate.version for candidate in ordered if candidate.version not in keep]
