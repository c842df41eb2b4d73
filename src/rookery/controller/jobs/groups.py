"""The groups of a job: created, run concurrently, resumed after a restart, put into the policies' buffers.

* A group is stored with its prompt before it runs, so a restart neither skips nor repeats a prompt.
* A group of which fewer than two members survive is replaced.
* Only failures of episodes that began in this run can pause the job. An episode of an earlier run may report a failure
  from before its cause was repaired: its group is replaced, nothing more.
* Retention keeps a version while a group finishes on it. Where ``in_flight`` says so, a group continues with the newest
  version of each policy that trains, also after a restart; policies that follow one finish on their version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from rookery import protocol
from rookery.aio import Signal, TaskGroup
from rookery.controller.fleet.env_hosts import EnvironmentFailed
from rookery.controller.jobs.buffer import LEAST_EPISODES, GroupBuffer
from rookery.controller.jobs.episode import Episode, EpisodeFailed, StoredEpisode
from rookery.controller.jobs.job_context import JobContext
from rookery.controller.jobs.trajectory import EpisodeResult, decode_result, decode_turns, derive_seed
from rookery.controller.rollout.request import GenerationFailed
from rookery.errors import RookeryError, count_of
from rookery.scheduling.job_rules import FailureRateMonitor
from rookery.storage.models import EpisodeRow, GroupRow
from rookery.storage.repositories import jobs

log = logging.getLogger("rookery.controller.jobs.groups")

FAILURE_RATE_LIMIT = 0.5
"""A job pauses when more than this share of its recent episodes failed: most of its work is then for nothing."""

SILENT_GROUPS = 64
"""Groups in a row from which a policy cannot learn before the job pauses: an environment names it in some groups, or
never."""

Refs = Mapping[str, protocol.AdapterRef | None]
"""A version of each policy of a job; None is the base model."""


class JobPaused(RookeryError):
    """The job cannot make progress; resuming may help once the reason is repaired."""


class Groups:
    """The groups of one job; ``changed`` is notified when a group ended."""

    def __init__(self, job: JobContext, buffers: Sequence[GroupBuffer], changed: Signal) -> None:
        """``buffers``: those of the policies that train."""
        self._job = job
        self._buffers = buffers
        self._store = job.controller.store
        self._clock = job.controller.clock
        self._in_flight = job.spec.algorithm.in_flight
        self._progress = job.progress
        self._changed = changed
        self._cursor = job.row.cursor
        self._running: dict[asyncio.Task[None], None] = {}
        settings = job.controller.settings.server
        self._failures = FailureRateMonitor(settings.failure_rate_window, FAILURE_RATE_LIMIT)
        self._untrimmed = 0
        """Episodes that ended since old ones were trimmed."""

    @property
    def in_flight(self) -> int:
        """Groups that run."""
        return len(self._running)

    # --- groups of an earlier run -------------------------------------------------------------------------------------

    async def restore(self) -> None:
        """Load the complete groups of an earlier run."""
        first = self._job.first.name
        groups = [
            (group, {e.id: decode_result(e.trajectories, first) for e in group.episodes if e.state == "done"})
            for group in await self._store.read(jobs.ready_groups, self._job.row.id)
        ]
        for buffer in self._buffers:
            await buffer.restore(groups)

    async def resume(self, tasks: TaskGroup) -> None:
        """Run the open groups of an earlier run."""
        for group in await self._store.read(jobs.open_groups, self._job.row.id):
            versions = {name: self._resume_version(group, name, head) for name, head in self._job.newest().items()}
            known = {name: version for name, version in versions.items() if version is not None}
            if lost := versions.keys() - known.keys():
                await self._drop(group, lost)
            else:
                self._start(tasks, group, known)

    def _resume_version(self, group: GroupRow, name: str, head: int) -> int | None:
        """The version of a policy with which a group of an earlier run continues: its own, or the ``head`` if it may
        change. If its own was lost it begins on the head, unless tokens of a lost version were sampled: then None."""
        policy, first = self._job.policies[name], self._job.first.name
        versions = policy.versions
        assert versions is not None
        if self._in_flight != "finish" and policy.about.train:
            turns = [turn for episode in group.episodes for turn in decode_turns(episode.turns, first)]
            mine = [turn for turn in turns if turn.policy == name]
            return None if any(versions.lost().intersection(turn.versions) for turn in mine) else head
        began = [e.version if name == first else e.versions.get(name) for e in group.episodes]
        row = versions.version(min((version for version in began if version is not None), default=head))
        if row is not None and row.kept:
            return row.version
        sampled = any(episode.turns or episode.state != "open" for episode in group.episodes)
        return None if sampled else head

    # --- new groups ---------------------------------------------------------------------------------------------------

    async def begin(self, tasks: TaskGroup, count: int) -> None:
        """Start ``count`` new groups on the newest versions."""
        versions, groups = await self._create(count)
        for group in groups:
            self._start(tasks, group, versions)
        await self.trim()

    async def _create(self, count: int) -> tuple[dict[str, int], list[GroupRow]]:
        """The next prompts in the job's order, stored as open groups with their episodes and the versions that they run
        on: after a restart they continue with the same versions and take up the tokens that workers sampled."""
        spec, job = self._job.spec, self._job.row.id
        answer = await self._job.controller.rooms.hosts.split(
            self._job.environment, "train", self._cursor, count, seed=spec.seed, shuffle=spec.shuffle
        )
        prompts = answer.prompts
        if answer.note and self._cursor == 0:
            await self._progress.add_event("warning", answer.note)
        if not prompts:
            raise EnvironmentFailed("prompts('train') gave no prompt")
        versions = self._job.newest()
        others = dict(versions)
        version = others.pop(self._job.first.name, 0)
        owner: dict[str, Any] = {"tenant": self._job.row.tenant, "job": job}
        groups = []
        for ordinal, prompt in enumerate(prompts[:count], self._cursor):
            name = f"{job}-g{ordinal}"
            seeds = [derive_seed(spec.seed, "episode", ordinal, member) for member in range(spec.algorithm.group_size)]
            episodes = tuple(
                EpisodeRow(
                    id=f"{name}-{member}",
                    group_id=name,
                    member=member,
                    seed=seed,
                    version=version,
                    versions=others,
                    **owner,
                )
                for member, seed in enumerate(seeds)
            )
            group = GroupRow(
                id=name, ordinal=ordinal, prompt=prompt, seed=derive_seed(spec.seed, "group", ordinal),
                created=self._clock.time(), episodes=episodes, **owner,
            )  # fmt: skip
            groups.append(group)
        with self._job.using(versions):
            await self._store.write(jobs.add_groups, job, groups)
        self._cursor += len(groups)
        return versions, groups

    # --- running ------------------------------------------------------------------------------------------------------

    def _start(self, tasks: TaskGroup, group: GroupRow, versions: Mapping[str, int]) -> None:
        use = ExitStack()  # entered now, not when the task first runs
        stay = {
            name: version
            for name, version in versions.items()
            if self._in_flight == "finish" or not self._job.policies[name].about.train
        }
        use.enter_context(self._job.using(stay))
        task = tasks.create_task(self._run(group, self._job.refs(versions)))
        self._running[task] = None
        task.add_done_callback(self._ended)
        task.add_done_callback(lambda _: use.close())

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.pop(task, None)
        self._changed.notify()

    def cancel(self) -> None:
        """Stop the running groups; they stay open, to be resumed."""
        for task in self._running:
            task.cancel()

    async def _run(self, group: GroupRow, refs: Refs) -> None:
        """Run all episodes of one prompt concurrently. Ends with the group ready, or failed and counted."""
        write = self._progress.store
        async with TaskGroup() as tasks:
            runs = [tasks.create_task(self._run_episode(group, row, refs)) for row in group.episodes]
        ended = {row.id: run.result() for row, run in zip(group.episodes, runs, strict=True)}
        episodes = {name: result for name, result in ended.items() if result is not None}
        found = [(buffer, buffer.complete(group, episodes)) for buffer in self._buffers if not buffer.closed]
        parts = [(buffer, part) for buffer, part in found if part is not None]
        if len(episodes) >= LEAST_EPISODES:
            scored = self._job.scored.name
            oldest = next((part.min_version for buffer, part in parts if buffer.policy.name == scored), None)
            policies = [buffer.id for buffer, _ in parts] if self._job.spec.several_trained else []
            await write(
                jobs.finish_group, group.id, "ready" if parts else "dropped", self._clock.time(), min_version=oldest,
                policies=policies, reason="" if parts else "no policy that trains has two episodes in it",
            )  # fmt: skip
            for buffer, part in found:
                buffer.silent = 0 if part is not None else buffer.silent + 1
            for buffer, part in parts:
                await buffer.add(part)
        else:
            reason = f"{len(episodes)} of {count_of(len(group.episodes), 'episode')} survived"
            self._progress.counters["groups_failed"] += 1
            await write(jobs.finish_group, group.id, "failed", self._clock.time(), reason=reason)
        if (reason_to_pause := self._failures.pause_reason) is not None:
            raise JobPaused(reason_to_pause)
        for buffer in self._buffers:
            if buffer.silent >= SILENT_GROUPS and not buffer.closed:
                most = self._job.spec.environment.max_turns
                cut = sum(result.finish == "max_turns" for result in episodes.values())
                longer = f"give environment.max_turns more than {most}, after which {cut} of the last episodes ended; "
                raise JobPaused(
                    f"the policy {buffer.policy.name} had fewer than {LEAST_EPISODES} episodes with a reply to train on"
                    f" in each of the last {count_of(buffer.silent, 'group')}; {longer if cut else ''}name it in a Step"
                    " of the environment, sample it as it is trained, or give it train: false"
                )

    async def _run_episode(self, group: GroupRow, row: EpisodeRow, refs: Refs) -> EpisodeResult | None:
        """Run one episode and store its end; None when it failed."""
        if row.state != "open":
            return decode_result(row.trajectories, self._job.first.name) if row.state == "done" else None
        self._untrimmed += 1
        record = StoredEpisode(row, self._progress)
        episode = Episode(self._job, row.id, refs, group.prompt, row.seed, group.seed, self._in_flight, record)
        try:
            return await self._end_episode(group, row, episode)
        finally:
            episode.leave()

    async def _end_episode(self, group: GroupRow, row: EpisodeRow, episode: Episode) -> EpisodeResult | None:
        """Run it, and store its end."""
        progress = self._progress
        try:
            result = await episode.run()
        except (EpisodeFailed, GenerationFailed) as error:
            self._record_end(group, str(error))
            progress.counters["episodes_failed"] += 1
            extra = {"tenant": row.tenant, "job": row.job, "version": row.version, "episode": row.id}
            log.warning("episode %s failed: %s", row.id, error, extra=extra)
            await progress.store(jobs.fail_episode, row.id, self._clock.time(), str(error))
            episode.end(str(error))
            return None
        self._record_end(group, "")
        part, scored = result.of(self._job.first.name), result.of(self._job.scored.name)
        progress.counters["episodes"] += 1
        progress.counters["trajectory_splits"] += episode.splits
        await progress.store(
            jobs.finish_episode,
            row.id,
            self._clock.time(),
            trajectories=msgspec.msgpack.encode(result),
            reward=scored.reward if scored is not None else result.reward,
            metrics=result.metrics,
            version=min(part.versions, default=row.version) if part is not None else row.version,
        )
        episode.end()
        return result

    def _record_end(self, group: GroupRow, error: str) -> None:
        """Count the end of an episode for the failure rate, unless its group is of an earlier run."""
        if group.ordinal >= self._job.row.cursor:
            self._failures.add(error)

    async def _drop(self, group: GroupRow, policies: Collection[str]) -> None:
        """Drop an open group, which a lost version of each of ``policies`` began."""
        for name in policies:
            self._progress.counters.update(self._progress.of_policy(name, {"groups_dropped_stale": 1}))
        await self._progress.store(jobs.drop_groups, [group.id], "its version was lost", self._clock.time())
        self._changed.notify()

    async def trim(self) -> None:
        """Delete the text of old episodes, once as many as the setting says have ended: at most twice that is kept."""
        keep = self._job.controller.settings.server.trajectory_keep
        if self._untrimmed >= keep:
            self._untrimmed = 0
            await self._store.write(jobs.trim_episodes, self._job.row.id, keep)
