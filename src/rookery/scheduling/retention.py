"""Which versions keep their artifacts: the last K, the best, and every version that is in use.

A version's score is its mean reward: in evaluations where the job has any, in training otherwise. The two are never
compared, as they are measured on different prompts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class RetentionCandidate:
    """A version whose artifact exists."""

    version: int
    """Its number; a higher one is newer."""
    score: float | None
    """Mean reward, of all candidates in evaluations or of all in training; None where it has none of that kind."""


def training_rewards(versions: Iterable[tuple[int | None, float | None]]) -> dict[int, float]:
    """Each version's reward in training, from ``(parent, mean reward of the episodes trained on)`` of every version,
    oldest first. The parent, or an earlier version, sampled those episodes; so a version's reward is known with the
    next version, and until then it is the newest one, which is always kept."""
    return {parent: reward for parent, reward in versions if parent is not None and reward is not None}


def versions_to_delete(
    versions: Sequence[RetentionCandidate], *, keep_last: int, keep_best: bool, in_use: Collection[int] = ()
) -> list[int]:
    """Versions whose artifacts may be deleted, oldest first. The newest is always kept; of equally good ones the
    newest."""
    ordered = sorted(versions, key=lambda candidate: candidate.version)
    keep = {candidate.version for candidate in ordered[-max(1, keep_last) :]} | set(in_use)
    scored = [(candidate.score, candidate.version) for candidate in ordered if candidate.score is not None]
    if keep_best and scored:
        keep.add(max(scored)[1])
    return [candidate.version for candidate in ordered if candidate.version not in keep]
