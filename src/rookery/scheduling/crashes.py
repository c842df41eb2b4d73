"""Which jobs may have ended the service, and when they start again: pure functions of the evidence that it left.

A job is a suspect if the service ended while it worked on the job's start, or if its memory grew since then. One
suspect alone is the cause as far as is known: it starts after a growing delay, and after some such crashes waits for a
person. Of several suspects nobody is known to be the cause: they start in groups, one after another, so that the next
crash narrows them down. All other jobs start at once. A restart of the machine makes nobody a suspect, unless the lives
before it were short again and again: a cluster may start the service on another machine after each crash.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

GROWTH_BYTES = 512 << 20
"""A service that has grown by so much since a job began to start may have ended because of that job. One start takes a
few megabytes; the largest dataset that a service accepts, parsed, is above this."""

SHORT_SECONDS, SHORT_LIVES = 60.0, 3
"""After so many lives in a row that were this short, on any machines, jobs are suspects that began in the last seconds
although nothing else speaks against them: something ends the service again and again."""

GROUPS, GROUP_SECONDS = 4, 5.0
"""Several suspects start in so many groups, so long apart: a hundred jobs are all started after fifteen seconds, and
the cause among them is found after four crashes."""

DELAYS = (2.0, 10.0, 60.0, 300.0, 600.0)
"""Seconds that a job waits after one crash that it caused, two in a row, and so on."""


@dataclass(frozen=True)
class Starting:
    """A job that has begun to start and has trained no step since."""

    since: float
    """The moment in seconds of the run's clock, which nobody sets."""
    memory: int
    """The service's, in bytes, at that time."""
    assembling: bool = True
    """The service works on its start: its data, model and environment."""


@dataclass(frozen=True)
class LastRun:
    """The record that a service left which did not end in order."""

    boot: str
    """The machine's start in which it ran."""
    began: float
    """The beginning in seconds of its clock."""
    now: float
    """The last time at which it was alive."""
    memory: int
    short: int = 0
    """Lives before this one that were short, in a row."""
    jobs: dict[str, Starting] = field(default_factory=dict)

    @property
    def short_lives(self) -> int:
        """Lives that were short, in a row up to this one; 0 where this one was not."""
        return self.short + 1 if self.now - self.began < SHORT_SECONDS else 0


def suspects(last: LastRun, boot: str) -> set[str]:
    """The jobs that may have ended the service. ``boot``: the machine's present start."""
    if last.boot != boot and last.short_lives < SHORT_LIVES:
        return set()
    assembling = {job for job, start in last.jobs.items() if start.assembling}
    grown = {job for job, start in last.jobs.items() if last.memory - start.memory >= GROWTH_BYTES}
    if grown:
        return grown & assembling or grown
    if assembling or last.short_lives < SHORT_LIVES:
        return assembling
    recent = {job for job, start in last.jobs.items() if last.now - start.since <= GROUP_SECONDS}
    return recent or set(last.jobs)


def delays(jobs: Sequence[str], crashes: int = 0) -> dict[str, float]:
    """Seconds after which each of the suspects starts. ``crashes``: those in a row that the only one has caused."""
    if len(jobs) == 1:
        return {jobs[0]: DELAYS[min(max(crashes, 1), len(DELAYS)) - 1]}
    size = -(-len(jobs) // GROUPS)
    return {job: number // size * GROUP_SECONDS for number, job in enumerate(jobs)}


def in_order(jobs: Collection[str], found: Collection[str]) -> list[str]:
    """The jobs among ``jobs`` that were ``found``, in their order."""
    return [job for job in jobs if job in found]
