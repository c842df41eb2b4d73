"""Rules in the life of a job: how many groups may be in flight, which train next, which are too old; which versions
keep their artifacts; when so many episodes fail that the job pauses.

A version's *step* is the number of optimizer steps behind it; a group's staleness is the job's step minus the step of
the version that sampled its oldest token. With ``max_staleness`` k, groups are started only while
``(step + 1 + k) · groups_per_step`` exceeds the groups already consumed or in flight (AReaL's admission rule): a group
that starts now is then trained at most k steps later, if groups complete in order. Groups that do not are dropped by
:func:`select_batch`.

A version's score is its mean reward: in evaluations where the job has any, in training otherwise. The two are never
compared, as they are measured on different prompts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

from rookery.errors import count_of


def admission_budget(
    *, step: int, durable_step: int, in_flight: int, ready: int, per_step: int, max_staleness: int
) -> int:
    """How many groups may start now on a version of step ``durable_step`` in a job at ``step``: all groups in flight,
    ready and new must fit the steps up to ``durable_step + max_staleness``."""
    steps_left = durable_step + max_staleness + 1 - step
    return max(0, steps_left * per_step - in_flight - ready)


class ReadyGroup(Protocol):
    """A complete group in the buffer."""

    @property
    def ordinal(self) -> int: ...

    @property
    def step(self) -> int:
        """Step of the oldest version among its tokens."""
        ...

    @property
    def responses(self) -> int:
        """Episodes in it."""
        ...


Ready = TypeVar("Ready", bound=ReadyGroup)


def select_batch(
    ready: Sequence[Ready], *, step: int, count: int, max_staleness: int, enough: int = 0, fifo: bool = False
) -> tuple[list[Ready], list[Ready]]:
    """``(batch, stale)`` for a step at ``step``. ``batch``: of ``ready``, in order of arrival, the groups that would
    expire first, with ``fifo`` those that arrived first, ``count`` of them, or fewer if they have ``enough`` responses
    together (0: never fewer), or none. ``stale``: groups that are too old."""
    stale = [group for group in ready if step - group.step > max_staleness]
    fresh = [group for group in ready if step - group.step <= max_staleness]
    if not fifo:
        fresh.sort(key=lambda group: (group.step, group.ordinal))
    batch = fresh[:count]
    suffices = len(batch) == count or 0 < enough <= sum(group.responses for group in batch)
    return (batch if suffices else []), stale


def followed_version(line: Iterable[tuple[int, int, bool]], every: int) -> int | None:
    """The version with which a policy replies that follows another one and takes its newest version each ``every``
    optimizer steps: the first since a multiple of ``every`` steps was reached. ``line``: ``(version, step, kept)`` of
    the head and its ancestors, newest first; a version that is not kept is left out. None without a version."""
    found, period = None, None
    for version, step, kept in line:
        if period is None:
            period = step // every
        if step // every != period:
            break
        if kept:
            found = version
    return found


def training_rewards(versions: Iterable[tuple[int | None, float | None]]) -> dict[int, float]:
    """Each version's reward in training, from ``(parent, mean reward of the episodes trained on)`` of every version,
    oldest first. The parent, or an earlier version, sampled those episodes; so a version's reward is known with the
    next version, and until then it is the newest one, which is always kept."""
    return {parent: reward for parent, reward in versions if parent is not None and reward is not None}


def versions_to_delete(
    scores: Mapping[int, float | None], *, keep_last: int, keep_best: bool, in_use: Collection[int] = ()
) -> list[int]:
    """The versions that may be deleted, of those whose artifacts exist, oldest first. The newest is always kept; of
    equally good ones the newest. ``scores``: by version, a higher one being newer, its mean reward, of all in
    evaluations or of all in training; None where it has none of that kind."""
    ordered = sorted(scores)
    keep = {*ordered[-max(1, keep_last) :], *in_use}
    scored = [(score, version) for version, score in scores.items() if score is not None]
    if keep_best and scored:
        keep.add(max(scored)[1])
    return [version for version in ordered if version not in keep]


class FailureRateMonitor:
    """A sliding window over the ends of a job's episodes, oldest dropped first. It asks for a pause when more than a
    given share of them failed, and names the most common error, which is what the job's owner has to repair; before the
    window is half full it never asks, so that a single bad start does not stop a job."""

    def __init__(self, window: int, share: float) -> None:
        """``window``: episodes that are remembered; ``share``: the largest tolerable share of failures, from 0 to 1."""
        self._errors: deque[str] = deque(maxlen=window)
        """One entry per episode, oldest first; empty for an episode that succeeded."""
        self._window = window
        self._share = share

    def add(self, error: str) -> None:
        """Record the end of an episode.

        ``error`` is one line, empty for an episode that succeeded.
        """
        self._errors.append(error)

    @property
    def pause_reason(self) -> str | None:
        """Why the job should pause, with the most common recent error; None while it should continue.

        Of several equally common errors the first in alphabetical order is named, so that the same failures always give
        the same text.
        """
        errors = [error for error in self._errors if error]
        total = len(self._errors)
        if total < self._window // 2 or len(errors) <= self._share * total:
            return None
        common = max(sorted(set(errors)), key=errors.count)
        return f"{len(errors)} of the last {count_of(total, 'episode')} failed, most with: {common}"
