"""The groups of a job: made, run side by side, gone on with after a restart, handed out to train on, dropped.

* A group is stored with its prompt before it runs, so a restart neither skips nor repeats one.
* A group that is too old, or came from a version whose bytes were lost, is dropped and counted, never trained on. One
  whose members mostly failed is replaced.
* A job pauses by itself for episodes that began since it was taken up. One of an earlier run may be told of a failure
  from before a person mended what caused it: its group is replaced, and that is all.
* Retention leaves a version alone while a group finishes on it. A group that does not finish on its version goes on
  with the newest, also after a restart.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from rookery import protocol
from rookery.aio import Signal, TaskGroup
from rookery.controller.fleet.env_hosts import EnvironmentFailed
from rookery.controller.jobs.batch import CompleteGroup
from rookery.controller.jobs.episode import EpisodeFailed
from rookery.controller.jobs.episode_factory import Episodes
from rookery.controller.jobs.trajectory import EpisodeResult, decode_turns, outcome_decoder
from rookery.controller.rollout.scheduler import GenerationFailed
from rookery.errors import RookeryError
from rookery.scheduling.failures import FailureRateMonitor
from rookery.scheduling.staleness import ReadyGroup, select_batch
from rookery.storage.rows import EpisodeRow, GroupRow, NewEpisode, NewGroup

log = logging.getLogger("rookery.controller.jobs.groups")


class JobPaused(RookeryError):
    """The job cannot go on usefully by itself; resuming may help once the reason is mended."""


class Groups:
    """``changed`` beats when a group ended or was dropped."""

    def __init__(self, episodes: Episodes, changed: Signal) -> None:
        self.ready: list[CompleteGroup] = []
        """Complete, not trained on yet."""
        self._episodes = episodes
        self._world = episodes.world
        self._row = episodes.row
        self._spec = episodes.spec
        self._in_flight = episodes.spec.algorithm.in_flight
        self._policy = episodes.policy
        self._progress = episodes.progress
        self._changed = changed
        self._cursor = episodes.row.cursor
        self._running: dict[asyncio.Task[None], None] = {}
        settings = episodes.world.settings
        self._failures = FailureRateMonitor(settings.server.failure_rate_window, settings.server.failure_rate_limit)
        self._untrimmed = 0
        """Episodes that ended since old ones were trimmed."""

    @property
    def in_flight(self) -> int:
        """Groups that run."""
        return len(self._running)

    # --- what an earlier run left -------------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Take up the complete groups of an earlier run."""
        world = self._world
        for group in await world.store.ready_groups(self._row.id):
            outcomes = [outcome_decoder.decode(e.trajectories) for e in group.episodes if e.state == "done"]
            self.ready.append(self._complete(group, outcomes))
        lost = self._lost
        orphans = [group for group in self.ready if any(lost & outcome.versions for outcome in group.outcomes)]
        if orphans:
            await self._drop(orphans, "its version was lost")

    @property
    def _lost(self) -> set[int]:
        """Versions that the head does not descend from: they were stepped back over."""
        policy = self._policy
        return {row.version for row in policy.history} - {row.version for row in policy.lineage}

    async def resume(self, tasks: TaskGroup) -> None:
        """Go on with the open groups of an earlier run."""
        world = self._world
        for group in await world.store.open_groups(self._row.id):
            version = self._version_of(group)
            if version is None:
                await self._drop([group], "its version was lost")
            else:
                self._start(tasks, group, version)

    def _version_of(self, group: GroupRow) -> int | None:
        """The version that a group of an earlier run goes on with: its own, or the head if it changes over. If its own
        was lost it begins on the head, unless something was sampled from a lost one: then None."""
        assert self._policy.head is not None
        if self._in_flight != "finish":
            said = [turn for episode in group.episodes for turn in decode_turns(episode.turns)]
            sampled = any(self._lost.intersection(turn.versions) for turn in said)
            return None if sampled else self._policy.head.version
        row = self._policy.version(min(e.version for e in group.episodes if e.version is not None))
        if row is not None and row.kept:
            return row.version
        sampled = any(episode.turns or episode.state != "open" for episode in group.episodes)
        return None if sampled else self._policy.head.version

    # --- new ones -----------------------------------------------------------------------------------------------------

    async def begin(self, tasks: TaskGroup, count: int) -> None:
        """Have ``count`` new groups run on the newest version."""
        version, groups = await self._make(count)
        for group in groups:
            self._start(tasks, group, version)

    async def _make(self, count: int) -> tuple[int, list[GroupRow]]:
        """The next prompts of the job's order, stored as open groups with their episodes, and the version that these
        run on: a restart goes on with the same one, and takes up what workers sampled meanwhile."""
        world, seed = self._world, self._episodes.seed
        prompts = await self._episodes.prompts(
            "train", self._cursor, count, seed=self._spec.seed, shuffle=self._spec.shuffle
        )
        assert self._policy.head is not None
        version = self._policy.head.version
        groups = []
        for ordinal, prompt in enumerate(prompts[:count], self._cursor):
            name = f"{self._row.id}-g{ordinal}"
            episodes = tuple(
                NewEpisode(id=f"{name}-{member}", member=member, seed=seed("episode", ordinal, member), version=version)
                for member in range(self._spec.algorithm.group_size)
            )
            created = world.clock.time()
            groups.append(
                NewGroup(
                    id=name,
                    ordinal=ordinal,
                    prompt=prompt,
                    seed=seed("group", ordinal),
                    created=created,
                    episodes=episodes,
                )
            )
        if not groups:
            raise EnvironmentFailed("prompts('train') gave no prompt")
        with self._policy.pinned(version):
            await world.store.add_groups(self._row.id, groups)
        self._cursor += len(groups)
        return version, [self._as_row(group) for group in groups]

    def _as_row(self, group: NewGroup) -> GroupRow:
        fresh: dict[str, Any] = {"tenant": self._row.tenant, "job": self._row.id}
        episodes = tuple(
            EpisodeRow(
                id=e.id, member=e.member, seed=e.seed, group_id=group.id, state="open", version=e.version, turns=b"",
                trajectories=b"", reward=None, metrics={}, host_instance="", error="", finished=None, **fresh,
            )
            for e in group.episodes
        )  # fmt: skip
        return GroupRow(
            id=group.id, ordinal=group.ordinal, split=group.split, prompt=group.prompt, seed=group.seed, state="open",
            consumed_by=None, min_version=None, created=group.created, finished=None, reason="", episodes=episodes,
            **fresh,
        )  # fmt: skip

    # --- running ------------------------------------------------------------------------------------------------------

    def _start(self, tasks: TaskGroup, group: GroupRow, version: int) -> None:
        pin = ExitStack()  # from now on, not from when the task first runs
        if self._in_flight == "finish":
            pin.enter_context(self._policy.pinned(version))
        task = tasks.create_task(self._run(group, self._policy.ref(version)))
        self._running[task] = None
        task.add_done_callback(self._ended)
        task.add_done_callback(lambda _: pin.close())

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        self._changed.notify()

    def cancel(self) -> None:
        """Stop those that run; they stay open, to be gone on with."""
        for task in self._running:
            task.cancel()

    async def _run(self, group: GroupRow, ref: protocol.AdapterRef) -> None:
        """All episodes of one prompt, side by side. Ends with the group ready, or failed and counted."""
        world, store = self._world, self._progress.store
        async with TaskGroup() as episodes:
            runs = [episodes.create_task(self._run_episode(group, row, ref)) for row in group.episodes]
        outcomes = [outcome for run in runs if (outcome := run.result()) is not None]
        if len(outcomes) >= 2:
            complete = self._complete(group, outcomes)
            await store(
                world.store.finish_group, group.id, "ready", world.clock.time(), min_version=complete.min_version
            )
            self.ready.append(complete)
        else:
            reason = f"{len(outcomes)} of {len(group.episodes)} episodes survived"
            self._progress.counters["groups_failed"] += 1
            await store(world.store.finish_group, group.id, "failed", world.clock.time(), reason=reason)
        verdict = self._failures.verdict
        if verdict is not None:
            raise JobPaused(verdict)

    async def _run_episode(self, group: GroupRow, row: EpisodeRow, ref: protocol.AdapterRef) -> EpisodeResult | None:
        """One episode to its end, durable; None when it failed."""
        world, progress = self._world, self._progress
        if row.state != "open":
            return outcome_decoder.decode(row.trajectories) if row.state == "done" else None
        self._untrimmed += 1
        episode = self._episodes.episode(
            id=row.id, ref=ref, prompt=group.prompt, seed=row.seed, environment_seed=group.seed, row=row,
            in_flight=self._in_flight,
        )  # fmt: skip
        try:
            outcome = await episode.run()
        except (EpisodeFailed, GenerationFailed) as error:
            self._note(group, str(error))
            progress.counters["episodes_failed"] += 1
            extra = {"tenant": row.tenant, "job": row.job, "version": ref.version, "episode": row.id}
            log.warning("episode %s failed: %s", row.id, error, extra=extra)
            await progress.store(world.store.finish_episode, row.id, "failed", world.clock.time(), error=str(error))
            episode.close()
            return None
        self._note(group, "")
        progress.counters["episodes"] += 1
        progress.counters["trajectory_splits"] += episode.splits
        await progress.store(
            world.store.finish_episode,
            row.id,
            "done",
            world.clock.time(),
            trajectories=msgspec.msgpack.encode(outcome),
            reward=outcome.reward,
            metrics=outcome.metrics,
            version=min(outcome.versions, default=ref.version),
        )
        episode.close()
        return outcome

    def _note(self, group: GroupRow, error: str) -> None:
        """How an episode of the group ended, unless it began before the job was taken up."""
        if group.ordinal >= self._row.cursor:
            self._failures.add(error)

    def _complete(self, group: GroupRow, outcomes: list[EpisodeResult]) -> CompleteGroup:
        sampled: Counter[int] = Counter()
        for outcome in outcomes:
            sampled.update(outcome.sampled)
        oldest, steps = min(sampled, default=0), Counter[int]()
        for version, count in sampled.items():
            steps[self._policy.step_of(version)] += count
        return CompleteGroup(group.id, group.ordinal, self._policy.step_of(oldest), oldest, outcomes, steps)

    # --- handed out, let go -------------------------------------------------------------------------------------------

    async def take(self, step: int, count: int) -> list[CompleteGroup]:
        """Of the ``count`` groups that ``step`` still lacks, those to train on now: the ones that would expire first;
        none while there are too few."""
        algorithm = self._spec.algorithm
        while True:
            known = {group.id: group for group in self.ready}
            batch, stale = select_batch(
                [ReadyGroup(group.id, group.ordinal, group.step, len(group.outcomes)) for group in self.ready],
                step=step,
                count=count,
                max_staleness=algorithm.max_staleness,
                enough=algorithm.micro_batch,
            )
            if not stale:
                groups = [known[group.group] for group in batch]
                self.ready = [group for group in self.ready if group not in groups]
                return groups
            await self._drop([known[group.group] for group in stale], f"too old for step {step}")

    async def _drop(self, groups: Sequence[CompleteGroup | GroupRow], reason: str) -> None:
        names = [group.id for group in groups]
        self._progress.counters["groups_dropped_stale"] += len(groups)
        await self._progress.store(self._world.store.drop_groups, names, reason, self._world.clock.time())
        self.ready = [group for group in self.ready if group.id not in names]
        self._changed.notify()

    async def trim(self) -> None:
        """Let go of the text of old episodes, now and then: at most twice as much is kept as the setting says."""
        keep = self._world.settings.server.trajectory_keep
        if self._untrimmed >= keep:
            self._untrimmed = 0
            await self._world.store.trim_episodes(self._row.id, keep)
