"""One job: the algorithm, as it is written in textbooks.

Keep groups in flight; take a batch of complete ones; forward, backward, optimizer step; commit; publish. Rollouts, the
environment and training go on side by side; ``max_staleness`` bounds how far they drift apart.

* A group is stored with its prompt before it runs, so a restart neither skips nor repeats one.
* A group that is too old, or came from a version whose bytes were lost, is dropped and counted, never trained on. One
  whose members mostly failed is replaced.
* What a version consumed is committed with it in one transaction.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import msgspec

from rookery import wire
from rookery.algorithms.schedules import rate
from rookery.controller.batch import CompleteGroup, build, describe
from rookery.controller.episode import Episode, EpisodeFailed, Phases
from rookery.controller.evaluation import evaluate
from rookery.controller.hosts import EnvironmentFailed
from rookery.controller.policy import Policy
from rookery.controller.pulse import Pulse
from rookery.controller.rollouts import GenerationFailed
from rookery.controller.training import Step, Trainee
from rookery.controller.trajectory import Outcome, SaidTurn, derive, outcome_decoder, turns_decoder
from rookery.controller.world import World
from rookery.errors import RookeryError
from rookery.scheduling.failing import FailureWindow
from rookery.scheduling.staleness import Ready, admissible, choose
from rookery.spec import JobSpec
from rookery.storage.rows import EpisodeRow, GroupRow, JobRow, NewEpisode, NewGroup, PolicyRow
from rookery.telemetry.metrics import MetricsLog
from rookery.text.chat import Chat

log = logging.getLogger("rookery.controller.job")

RATE_SECONDS = 30.0
"""Window of the shown tokens per second: long enough to span a training step."""

SHOWN_REWARDS = 64
"""Steps kept for the sparkline."""


class JobPaused(RookeryError):
    """The job cannot go on usefully by itself; resuming may help once the reason is mended."""


@dataclass
class _Taken:
    """An optimizer step that was taken and is not committed yet."""

    groups: list[CompleteGroup]
    metrics: dict[str, Any]


class Job:
    """A running job. :meth:`run` ends with the reason why the job is complete, or raises what stopped it."""

    def __init__(
        self,
        world: World,
        row: JobRow,
        spec: JobSpec,
        policy: PolicyRow,
        *,
        owner: str,
        options: dict[str, Any],
        chat: Chat,
        warm_start: wire.AdapterRef | None,
        metrics: MetricsLog,
    ) -> None:
        self.world = world
        self.row = row
        self.spec = spec
        self.owner = owner
        self.options = options
        self.chat = chat
        self.policy = Policy(world, policy, spec.checkpoints)
        self.phases = Phases()
        self.step = row.step
        self.counters: Counter[str] = Counter(row.counters)
        self.ready: list[CompleteGroup] = []
        self.training = False
        self.staleness: float | None = None
        self._warm_start = warm_start
        self._metrics = metrics
        self._trainee = Trainee(
            world.training,
            tenant=row.tenant,
            policy=policy.id,
            model=spec.base_model,
            next_lease=lambda: world.ledger(world.database.next_lease, policy.id),
        )
        self._cursor = row.cursor
        self._taken: list[_Taken] = []
        self._changed = Pulse()
        self._groups: set[asyncio.Task[None]] = set()
        self._failures = FailureWindow(world.settings.failing_window, world.settings.failing_share)
        self._began = world.clock.monotonic()
        self._spent = float(row.rng.get("seconds", 0.0))
        self._sampled: deque[tuple[float, int]] = deque()
        self._evaluated: set[int] = set()
        self._untrimmed = 0
        """Episodes that ended since old ones were trimmed."""
        self.rewards: deque[float] = deque(maxlen=SHOWN_REWARDS)

    # --- the algorithm ------------------------------------------------------------------------------------------------

    async def run(self) -> str:
        """Train until a stop condition holds; answers which."""
        try:
            await self._begin()
            async with asyncio.TaskGroup() as tasks:
                beside = [tasks.create_task(self._collect(tasks)), tasks.create_task(self._alarm())]
                self._evaluate_if_due(tasks)
                while (reason := self._stop_reason()) is None:
                    if groups := await self._next_batch():
                        await self._train(groups)
                        self._evaluate_if_due(tasks)
                for task in (*beside, *self._groups):
                    task.cancel()
            await self._end()
            return reason
        finally:
            self._trainee.forget()

    async def _begin(self) -> None:
        """Find or make the version to start from, and what an earlier run left."""
        world = self.world
        for line in await self.policy.load():
            await self.say("corrupt", line)
        if self.policy.head is None:
            manifest = await self._trainee.init(self._init_adapter, self._warm_start)
            await self._commit_version(manifest, [], 0, {})
        assert self.policy.head is not None
        self.step = self.policy.head.step
        for metrics in await world.ledger(self._recover_metrics):
            self.rewards.append(metrics["reward"])
        self._evaluated = {
            row.version for row in await world.ledger(world.database.evaluations, self.row.tenant, self.row.id)
        }
        for group in await world.ledger(world.database.ready_groups, self.row.id):
            outcomes = [outcome_decoder.decode(e.trajectories) for e in group.episodes if e.state == "done"]
            self.ready.append(self._complete(group, outcomes))
        lost = {version.version for version in self.policy.history if version.lost}
        orphans = [group for group in self.ready if any(lost & outcome.versions for outcome in group.outcomes)]
        if orphans:
            await self._drop(orphans, "its version was lost")

    def _recover_metrics(self) -> list[dict[str, Any]]:
        """The rows of the committed steps, and only those: a crash may have come between a commit and its row."""
        self._metrics.truncate_after(self.step)
        rows = self._metrics.read()
        last = rows[-1]["step"] if rows else 0
        for version in self.policy.history:
            if version.step > last and not version.lost:
                rows.append({**version.metrics, "version": version.version})
                self._metrics.append(rows[-1])
        return rows

    async def _collect(self, tasks: asyncio.TaskGroup) -> None:
        """Keep groups in flight up to the staleness bound, those of an earlier run first."""
        world, algorithm = self.world, self.spec.algorithm
        for group in await world.ledger(world.database.open_groups, self.row.id):
            version = self._version_of(group)
            if version is None:
                await self._drop([group], "its version was lost")
            else:
                self._start(tasks, group, version)
        while True:
            change = self._changed.next
            assert self.policy.head is not None
            count = admissible(
                step=self.step + self.training,
                durable_step=self.policy.head.step,
                in_flight=self.in_flight,
                ready=len(self.ready),
                per_step=algorithm.groups_per_step,
                max_staleness=algorithm.max_staleness,
            )
            if self.spec.stop.steps is not None:
                left = (self.spec.stop.steps - self.step - self.training) * algorithm.groups_per_step
                count = min(count, left - self.in_flight - len(self.ready))
            if count <= 0:
                await change.wait()
                continue
            version, groups = await self._new_groups(count)
            for group in groups:
                self._start(tasks, group, version)

    async def _alarm(self) -> None:
        """Have the wall time noticed by a job that waits."""
        limit = self.spec.stop.wall_time
        while limit is not None and (left := limit - self.seconds()) > 0:
            await self.world.clock.sleep(left)
        self._changed.beat()

    async def _next_batch(self) -> list[CompleteGroup]:
        """The groups of the next step: those that would expire first; none when the wall time is over."""
        algorithm = self.spec.algorithm
        while True:
            change = self._changed.next
            known = {group.id: group for group in self.ready}
            batch, stale = choose(
                [Ready(group.id, group.ordinal, group.step) for group in self.ready],
                step=self.step,
                count=algorithm.groups_per_step,
                max_staleness=algorithm.max_staleness,
            )
            if stale:
                await self._drop([known[group.group] for group in stale], f"too old for step {self.step}")
                continue
            if batch:
                groups = [known[group.group] for group in batch]
                self.ready = [group for group in self.ready if group not in groups]
                return groups
            if self._out_of_time() and not self._taken:
                return []
            await change.wait()

    async def _train(self, groups: list[CompleteGroup]) -> None:
        """One optimizer step on ``groups``, and the commit when it is due."""
        assert self.policy.head is not None
        self.training = True
        try:
            began = self.world.clock.monotonic()
            figures = describe(groups, self.step)
            due = len(self._taken) + 1 >= self.spec.checkpoints.commit_every
            due = due or self._stop_reason(after=figures["reward"]) is not None
            batch = wire.encode(build(self.spec, groups))
            adam = self._adam()
            loss = wire.Loss(name=self.spec.algorithm.loss.name, params=self.spec.algorithm.loss.params)
            step = Step(batch, loss, self.spec.sampling.temperature, self.spec.algorithm.kl_weight, adam)
            done = await self._trainee.step(self.policy.ref(self.policy.head.version), step, commit=due)
            trained = self.world.clock.monotonic()
            metrics = {
                "step": self.step + 1,
                "time": self.world.clock.time(),
                **figures,
                **_per_token(done.metrics),
                "lr": adam.lr,
                "seconds/train": trained - began,
                "tokens_sampled": self.counters["tokens"],
            }
            self._taken.append(_Taken(groups, metrics))
            self.step += 1
            self.training = False
            if due:
                assert done.manifest is not None
                consumed = [group.id for taken in self._taken for group in taken.groups]
                for taken in self._taken:  # not before: a crash takes steps back that were not committed
                    self.counters["groups_no_variance"] += sum(len(set(group.rewards)) == 1 for group in taken.groups)
                    self.counters["steps_skipped"] += int(taken.metrics.get("skipped", 0))
                await self._commit_version(done.manifest, consumed, self.step, metrics)
                self._publish(self.world.clock.monotonic() - trained)
                await self.policy.retire()
                await self._trim()
        finally:
            self.training = False
            self._changed.beat()

    async def _commit_version(
        self, manifest: wire.Manifest, groups: list[str], step: int, metrics: dict[str, Any]
    ) -> None:
        """Make the trained state the policy's next version, durably, with what it consumed."""
        ref = await self.policy.commit(
            lease=self._trainee.lease,
            manifest=manifest,
            groups=groups,
            step=step,
            counters=dict(self.counters),
            rng={"seed": self.spec.seed, "seconds": self.seconds()},
            metrics=metrics,
        )
        self._trainee.committed(ref)

    def _publish(self, commit_seconds: float) -> None:
        """The committed steps become visible: their metrics are written, the next groups run on the new version."""
        assert self.policy.head is not None
        for taken in self._taken:
            row = {**taken.metrics, "version": self.policy.head.version, "seconds/commit": commit_seconds}
            self._metrics.append(row)
            self.rewards.append(row["reward"])
            self.staleness = row["staleness_mean"]
            self.world.measured(self.row.id, row)
        self._taken.clear()
        self._changed.beat()
        log.info(
            "step %d: reward %.3f", self.step, self.rewards[-1],
            extra={"tenant": self.row.tenant, "job": self.row.id, "version": self.policy.head.version},
        )  # fmt: skip

    async def _trim(self) -> None:
        """Let go of the text of old episodes, now and then: at most twice as much is kept as the setting says."""
        keep = self.world.settings.trajectory_keep
        if self._untrimmed >= keep:
            self._untrimmed = 0
            await self.world.ledger(self.world.database.trim_episodes, self.row.id, keep)

    async def _end(self) -> None:
        """The last version is evaluated."""
        assert self.policy.head is not None
        if self.spec.evaluation.prompts and self.policy.head.version not in self._evaluated:
            await evaluate(self, self.policy.head.version)
        await self.policy.retire()

    def _stop_reason(self, after: float | None = None) -> str | None:
        """Which stop condition holds; ``after``: whether one would, once a step with this reward is taken. Steps that
        are not committed yet are committed before the job ends."""
        stop = self.spec.stop
        step = self.step + (after is not None)
        reward = after if after is not None else self.rewards[-1] if self.rewards else None
        if after is None and self._taken:
            return None
        if stop.steps is not None and step >= stop.steps:
            return f"{step} steps"
        if stop.reward is not None and reward is not None and reward >= stop.reward:
            return f"reward {reward:.3f} reached {stop.reward:g}"
        if self._out_of_time():
            return f"wall time {self.seconds():.0f} s reached {stop.wall_time:.0f} s"
        if stop.tokens is not None and self.counters["tokens"] >= stop.tokens:
            return f"{self.counters['tokens']} tokens reached {stop.tokens}"
        return None

    def _out_of_time(self) -> bool:
        limit = self.spec.stop.wall_time
        return limit is not None and self.seconds() >= limit

    # --- groups -------------------------------------------------------------------------------------------------------

    async def _new_groups(self, count: int) -> tuple[int, list[GroupRow]]:
        """The next prompts of the job's order, stored as open groups with their episodes, and the version that these
        run on: a restart goes on with the same one, and takes up what workers sampled meanwhile."""
        world, environment = self.world, self.spec.environment
        message = wire.GetPrompts(
            call="",
            job=self.row.id,
            environment=environment.name,
            options=self.options,
            split="train",
            start=self._cursor,
            count=count,
            seed=self.spec.seed,
            shuffle=self.spec.shuffle,
        )
        answer = await world.hosts.prompts(
            self.owner,
            environment.name,
            message,
            timeout=environment.step_timeout,
            return_timeout=environment.return_timeout,
        )
        assert self.policy.head is not None
        version = self.policy.head.version
        groups = []
        for ordinal, prompt in enumerate(answer.prompts[:count], self._cursor):
            name = f"{self.row.id}-g{ordinal}"
            episodes = tuple(
                NewEpisode(
                    id=f"{name}-{member}", member=member, seed=self.seed("episode", ordinal, member), version=version
                )
                for member in range(self.spec.algorithm.group_size)
            )
            seed = self.seed("group", ordinal)
            created = world.clock.time()
            groups.append(
                NewGroup(id=name, ordinal=ordinal, prompt=prompt, seed=seed, created=created, episodes=episodes)
            )
        if not groups:
            raise EnvironmentFailed("prompts('train') gave no prompt")
        with self.policy.pinned(version):
            await world.ledger(world.database.add_groups, self.row.id, groups)
        self._cursor += len(groups)
        return version, [self._as_row(group) for group in groups]

    def _as_row(self, group: NewGroup) -> GroupRow:
        fresh: dict[str, Any] = {"tenant": self.row.tenant, "job": self.row.id}
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

    def _start(self, tasks: asyncio.TaskGroup, group: GroupRow, version: int) -> None:
        pin = ExitStack()  # from now on, not from when the task first runs
        task = tasks.create_task(self._run_group(group, pin.enter_context(self.policy.pinned(version))))
        self._groups.add(task)
        task.add_done_callback(self._ended)
        task.add_done_callback(lambda _: pin.close())

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._groups.discard(task)
        self._changed.beat()

    @property
    def in_flight(self) -> int:
        """Groups that run."""
        return len(self._groups)

    async def _run_group(self, group: GroupRow, ref: wire.AdapterRef) -> None:
        """All episodes of one prompt, side by side. Ends with the group ready, or failed and counted."""
        world = self.world
        async with asyncio.TaskGroup() as episodes:
            runs = [episodes.create_task(self._run_episode(group, row, ref)) for row in group.episodes]
        outcomes = [outcome for run in runs if (outcome := run.result()) is not None]
        if len(outcomes) >= 2:
            complete = self._complete(group, outcomes)
            await self._store(
                world.database.finish_group, group.id, "ready", world.clock.time(), min_version=complete.min_version
            )
            self.ready.append(complete)
        else:
            reason = f"{len(outcomes)} of {len(group.episodes)} episodes survived"
            self.counters["groups_failed"] += 1
            await self._store(world.database.finish_group, group.id, "failed", world.clock.time(), reason=reason)
        verdict = self._failures.verdict
        if verdict is not None:
            raise JobPaused(verdict)

    async def _run_episode(self, group: GroupRow, row: EpisodeRow, ref: wire.AdapterRef) -> Outcome | None:
        """One episode to its end, durable; None when it failed."""
        world = self.world
        if row.state != "open":
            return outcome_decoder.decode(row.trajectories) if row.state == "done" else None
        self._untrimmed += 1
        episode = self.episode(
            id=row.id, ref=ref, prompt=group.prompt, seed=row.seed, environment_seed=group.seed, row=row
        )
        try:
            outcome = await episode.run()
        except (EpisodeFailed, GenerationFailed) as error:
            self._failures.add(str(error))
            self.counters["episodes_failed"] += 1
            log.warning("episode %s failed: %s", row.id, error, extra={"tenant": row.tenant, "job": row.job})
            await self._store(world.database.finish_episode, row.id, "failed", world.clock.time(), error=str(error))
            episode.close()
            return None
        self._failures.add("")
        self.counters["episodes"] += 1
        self.counters["splits"] += episode.splits
        await self._store(
            world.database.finish_episode,
            row.id,
            "done",
            world.clock.time(),
            trajectories=msgspec.msgpack.encode(outcome),
            reward=outcome.reward,
            metrics=outcome.metrics,
            version=ref.version,
        )
        episode.close()
        return outcome

    def episode(
        self,
        *,
        id: str,
        ref: wire.AdapterRef,
        prompt: bytes,
        seed: int,
        environment_seed: int,
        row: EpisodeRow | None = None,
    ) -> Episode:
        """An episode of this job; with ``row`` its turns are stored there and those stored before are taken up."""
        world = self.world

        async def save(said: list[SaidTurn], instance: str) -> None:
            self._count_tokens(len(said[-1].tokens))
            if row is not None:
                turns = msgspec.msgpack.encode(said)
                await self._store(world.database.save_turns, id, turns, version=ref.version, host_instance=instance)

        return Episode(
            id=id,
            tenant=self.row.tenant,
            owner=self.owner,
            job=self.row.id,
            spec=self.spec,
            options=self.options,
            model=self.spec.base_model,
            chat=self.chat,
            adapter=ref,
            prompt=prompt,
            seed=seed,
            environment_seed=environment_seed,
            hosts=world.hosts,
            rollouts=world.rollouts,
            phases=self.phases,
            save=save,
            said=turns_decoder.decode(row.turns) if row is not None and row.turns else [],
            instance=row.host_instance if row is not None else "",
            resumable=row is not None,
        )

    def _complete(self, group: GroupRow, outcomes: list[Outcome]) -> CompleteGroup:
        oldest = min((version for outcome in outcomes for version in outcome.versions), default=0)
        return CompleteGroup(group.id, group.ordinal, self.policy.step_of(oldest), oldest, outcomes)

    def _version_of(self, group: GroupRow) -> int | None:
        """The version that a group of an earlier run goes on with. Where its own was lost it begins on the head, unless
        something was sampled from the lost one: then None."""
        assert self.policy.head is not None
        row = self.policy.version(min(e.version for e in group.episodes if e.version is not None))
        if row is not None and row.kept:
            return row.version
        sampled = any(episode.turns or episode.state != "open" for episode in group.episodes)
        return None if sampled else self.policy.head.version

    async def _drop(self, groups: Sequence[CompleteGroup | GroupRow], reason: str) -> None:
        names = [group.id for group in groups]
        self.counters["groups_dropped_stale"] += len(groups)
        await self._store(self.world.database.drop_groups, names, reason, self.world.clock.time())
        self.ready = [group for group in self.ready if group.id not in names]
        self._changed.beat()

    async def _store(self, write: Callable[..., Any], *values: Any, **named: Any) -> None:
        """Write to the database, and in the same transaction what this job has counted, this write's part included."""
        await self.world.ledger(write, *values, **named, counters=dict(self.counters))

    # --- around it ----------------------------------------------------------------------------------------------------

    def _evaluate_if_due(self, tasks: asyncio.TaskGroup) -> None:
        """Begin the evaluations that are due, beside the training; also those that an earlier run did not finish."""
        evaluation = self.spec.evaluation
        if not evaluation.prompts:
            return
        for row in self.policy.history:
            periodic = evaluation.every and row.step % evaluation.every == 0
            if row.kept and row.version not in self._evaluated and (row.version == 0 or periodic):
                self._evaluated.add(row.version)
                tasks.create_task(evaluate(self, row.version))

    def _init_adapter(self, op: str, commit: str, source: wire.AdapterRef | None) -> wire.InitAdapter:
        _, policy = self.spec.policy
        return wire.InitAdapter(
            op=op,
            policy=self.policy.row.id,
            rank=policy.rank,
            alpha=policy.scale_alpha,
            targets=list(policy.targets),
            seed=policy.seed,
            commit=commit,
            source=source,
        )

    def _adam(self) -> wire.Adam:
        optimizer = self.spec.policy[1].optimizer
        schedule = optimizer.schedule
        return wire.Adam(
            lr=rate(
                schedule.name,
                self.step,
                lr=optimizer.lr,
                warmup_steps=schedule.warmup_steps,
                total_steps=schedule.total_steps or self.spec.stop.steps,
                min_ratio=schedule.min_ratio,
                phi=schedule.phi,
            ),
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            clip=optimizer.grad_clip,
        )

    def seed(self, *parts: object) -> int:
        """A seed of this job's; the same after any restart."""
        return derive(self.spec.seed, *parts)

    def seconds(self) -> float:
        """How long the job has run, over all restarts."""
        return self._spent + self.world.clock.monotonic() - self._began

    def _count_tokens(self, count: int) -> None:
        self.counters["tokens"] += count
        self._sampled.append((self.world.clock.monotonic(), count))

    def tokens_per_second(self) -> float:
        now = self.world.clock.monotonic()
        while self._sampled and now - self._sampled[0][0] > RATE_SECONDS:
            self._sampled.popleft()
        return sum(count for _, count in self._sampled) / min(RATE_SECONDS, max(1.0, now - self._began))

    def waits_for(self) -> str:
        """What keeps the job from being further right now."""
        model = self.spec.base_model
        if not self.world.fleet.serving("train", model) or not self.world.fleet.serving("rollout", model):
            return "worker: " + self.world.fleet.missing("rollout and training", model)
        if self.training:
            return "trainer"
        position = self.world.rollouts.position(self.row.tenant, self.row.id)
        if self.phases.engine:
            queue = f", {position} before it in the queue" if position else ""
            return f"engine ({self.phases.engine} replies{queue})"
        if self.phases.environment:
            return f"environment ({self.phases.environment} episodes)"
        return ""

    async def say(self, kind: str, text: str) -> None:
        """A line in the job's own log."""
        world = self.world
        await world.ledger(world.database.add_event, self.row.tenant, self.row.id, world.clock.time(), kind, text)


def _per_token(metrics: dict[str, float]) -> dict[str, float]:
    """Trainer metrics as shown: sums over loss tokens become means."""
    tokens = max(1.0, metrics.get("tokens", 0.0))
    names = {
        "entropy:sum": "entropy",
        "kl:sum": "kl",
        "ratio:sum": "ratio",
        "clipped:sum": "clipped_share",
        "logp_diff:sum": "logp_diff_mean",
        "logp_diff:max": "logp_diff_max",
        "loss:sum": "loss",
    }
    row = {}
    for name, value in metrics.items():
        shown = names.get(name, name)
        row[shown] = value / tokens if name.endswith(":sum") and name != "loss:sum" else value
    return row
