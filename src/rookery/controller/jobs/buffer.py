"""The complete groups that one policy of a job has not trained on yet.

A group is of use to a policy for which at least two of its episodes have a reply to train on. One that is too old for
the policy's next step, or was sampled by a version whose bytes were lost, is dropped and counted, never trained on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rookery.aio import Signal
from rookery.controller.jobs.job_context import JobContext, JobPolicy
from rookery.controller.jobs.step import CompleteGroup
from rookery.controller.jobs.trajectory import EpisodeResult
from rookery.scheduling.job_rules import select_batch
from rookery.storage.models import GroupRow
from rookery.storage.repositories import jobs

LEAST_EPISODES = 2
"""Episodes of a group that is trained on: an advantage compares rewards."""


class GroupBuffer:
    """``changed`` is notified when a group was dropped."""

    def __init__(self, job: JobContext, policy: JobPolicy, changed: Signal) -> None:
        assert policy.versions is not None
        self.ready: list[CompleteGroup] = []
        """The groups that it has, in order of arrival."""
        self.closed = False
        """The policy takes no more groups."""
        self.silent = 0
        """The newest groups in a row that were too small for the policy."""
        self.policy = policy
        self._job = job
        self._versions = policy.versions
        self._changed = changed

    @property
    def id(self) -> str:
        """The policy's id."""
        return self._versions.row.id

    def complete(self, group: GroupRow, episodes: Mapping[str, EpisodeResult]) -> CompleteGroup | None:
        """The policy's part of a group, of which ``episodes`` survived, by their ids; None if that is too small to
        train on."""
        parts = [(name, episode.of(self.policy.name)) for name, episode in episodes.items()]
        trained = [(name, part) for name, part in parts if part is not None and part.num_action_tokens]
        names, spoken = [name for name, _ in trained], [part for _, part in trained]
        if len(spoken) < LEAST_EPISODES:
            return None
        versions, steps, sampled = self._versions, Counter[int](), Counter[int]()
        for episode in spoken:
            sampled.update(episode.sampled)
        for version, count in sampled.items():
            steps[versions.step_of(version)] += count
        oldest = min(sampled, default=0)
        return CompleteGroup(group.id, group.ordinal, versions.step_of(oldest), oldest, spoken, steps, names)

    async def add(self, part: CompleteGroup) -> None:
        """Take the policy's part of a stored group."""
        self.ready.append(part)
        if self.policy.spec.algorithm.off_policy:
            self._job.controller.rooms.models.pool.entered(self.policy.model, len(part.episodes))
        if self.closed:
            await self.close()

    async def close(self) -> None:
        """The policy trains no more: its groups wait for the others only."""
        self.closed = True
        if self.ready:
            await self._remove(self.ready, "its policy trains no more")

    async def restore(self, groups: Iterable[tuple[GroupRow, Mapping[str, EpisodeResult]]]) -> None:
        """Take the complete groups of an earlier run."""
        for group, episodes in groups:
            waits = not group.uses or group.uses.get(self.id, "") is None
            complete = self.complete(group, episodes) if waits else None
            if complete is not None:
                self.ready.append(complete)
        lost = self._versions.lost()
        orphans = [group for group in self.ready if any(lost & episode.versions for episode in group.episodes)]
        if orphans:
            await self._drop(orphans, "its version was lost")

    async def take(self, step: int, count: int) -> list[CompleteGroup]:
        """The groups to train on now, of the ``count`` that ``step`` still lacks: the groups that would expire first;
        none while there are too few."""
        algorithm = self.policy.spec.algorithm
        while True:
            batch, stale = select_batch(
                self.ready,
                step=step,
                count=count,
                max_staleness=algorithm.max_staleness,
                enough=algorithm.micro_batch,
                fifo=algorithm.buffer == "fifo",
            )
            if not stale:
                taken = {group.id for group in batch}
                self.ready = [group for group in self.ready if group.id not in taken]
                return batch
            await self._drop(stale, f"too old for step {step}")

    async def _drop(self, groups: Sequence[CompleteGroup], reason: str) -> None:
        progress = self._job.progress
        progress.counters.update(progress.of_policy(self.policy.name, {"groups_dropped_stale": len(groups)}))
        await self._remove(groups, reason)

    async def _remove(self, groups: Sequence[CompleteGroup], reason: str) -> None:
        names, progress, controller = [group.id for group in groups], self._job.progress, self._job.controller
        policy = self.id if self._job.spec.several_trained else ""
        await progress.store(jobs.drop_groups, names, reason, controller.clock.time(), policy=policy)
        self.ready = [group for group in self.ready if group.id not in names]
        self._changed.notify()
