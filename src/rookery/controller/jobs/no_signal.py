"""Steps from which nothing is learned because no reward differs from the others of its group. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rookery.spec.job import JobSpec

NO_SIGNAL_STEPS = 3
"""Steps in a row without a signal before their job's owner is informed: one or two happen by chance in small steps."""


def without_signal(row: Mapping[str, Any]) -> bool:
    """Whether all rewards were equal within each group of a step; ``row`` has the step's metrics."""
    return row.get("zero_variance_share") == 1.0


def no_signal_line(rows: Sequence[Mapping[str, Any]], spec: JobSpec, policy: str = "") -> str:
    """The message for the owner of a job after the steps ``rows``, all without a signal: the figures, and the usual
    reasons. Of several policies that train, ``policy`` is the one that took the steps, which have its numbers."""
    first, last = (row.get("policy_step", row["step"]) for row in (rows[0], rows[-1]))
    rewards = [row["reward"] for row in rows]
    low, high = min(rewards), max(rewards)
    earned = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
    longest, most = max(row["length_max"] for row in rows), spec.sampling.max_tokens
    return (
        f"{policy}{': ' if policy else ''}steps {first} to {last}: all rewards were equal within every group"
        f" (mean reward {earned}), so the rewards teach nothing. The usual reasons: (1) the verifier does not find the"
        f" answer: the replies have another form, or end before it (longest: {longest:.0f} tokens,"
        f" sampling.max_tokens: {most});"
        " read some with rookery jobs episodes. (2) The prompts are too hard or too easy for the model: give other"
        " prompts, or partial credit. (3) The replies of a group hardly differ: raise sampling.temperature or"
        " algorithm.group_size"
    )
