"""One job: the algorithm, as it is written in textbooks.

Keep groups in flight; take complete ones; forward, backward, until the step has all of its groups; optimizer step;
commit; publish. Rollouts, the environment and training go on side by side; ``max_staleness`` bounds how far they drift
apart.

What a version consumed is committed with it in one transaction: after any restart the job stands at its last commit.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable
from dataclasses import dataclass
from functools import partial
from typing import Any

from rookery import protocol
from rookery.aio import Signal, TaskGroup
from rookery.controller.context import ControllerContext
from rookery.controller.jobs.batch import CompleteGroup
from rookery.controller.jobs.episode_factory import Episodes
from rookery.controller.jobs.evaluation import evaluate
from rookery.controller.jobs.groups import Groups
from rookery.controller.jobs.progress import Progress, per_token
from rookery.controller.jobs.recipe import adam, first_adapter, forward_backward
from rookery.controller.jobs.step import StepAccumulator
from rookery.controller.training.policy_trainer import PolicyTrainer
from rookery.controller.training.policy_versions import EARLIER, PolicyVersions
from rookery.scheduling.staleness import admission_budget
from rookery.spec.job import JobSpec
from rookery.storage.rows import JobRow, PolicyRow
from rookery.telemetry.metrics import MetricsLog
from rookery.tokenization.chat import Chat

log = logging.getLogger("rookery.controller.jobs.job")


@dataclass
class _Taken:
    """An optimizer step that was taken and is not committed yet."""

    groups: list[CompleteGroup]
    metrics: dict[str, Any]


class Job:
    """A running job. :meth:`run` ends with the reason why the job is complete, or raises what stopped it."""

    def __init__(
        self,
        world: ControllerContext,
        row: JobRow,
        spec: JobSpec,
        policy: PolicyRow,
        *,
        owner: str,
        options: dict[str, Any],
        chat: Chat,
        warm_start: protocol.AdapterRef | None,
        metrics: MetricsLog,
    ) -> None:
        """``owner`` is whose environment hosts may run the episodes; ``options`` are the environment's, datasets
        resolved; a policy without a version begins from ``warm_start``, if given."""
        self.world = world
        self.row = row
        self.spec = spec
        self.step = row.step
        self.policy = PolicyVersions(world, policy, spec.checkpoints)
        self.progress = Progress(world, row, spec, metrics)
        self._changed = Signal()
        self._episodes = Episodes(world, row, spec, self.policy, self.progress, owner=owner, options=options, chat=chat)
        self.groups = Groups(self._episodes, self._changed)
        self._warm_start = warm_start
        self._trainee = PolicyTrainer(
            world.training,
            tenant=row.tenant,
            policy=policy.id,
            model=spec.base_model,
            next_lease=lambda: world.store.next_lease(policy.id),
        )
        self._open = StepAccumulator(spec, row.step)
        self._taken: list[_Taken] = []
        self._evaluated: set[int] = set()

    def rng(self) -> dict[str, Any]:
        """What a later run goes on with, beside the counters: the seed, and how long the job has run."""
        return {"seed": self.spec.seed, "seconds": self.progress.seconds()}

    async def run(self) -> str:
        """Train until a stop condition holds; answers which."""
        seeding, policy = self.world.seeding, self.policy.row.id
        algorithm = self.spec.algorithm
        seeding.join(policy, overlaps=algorithm.max_staleness > 0 or algorithm.micro_batch > 0)
        try:
            await self._begin()
            async with TaskGroup() as tasks:
                beside = [tasks.create_task(self._keep_in_flight(tasks)), tasks.create_task(self._alarm())]
                self._evaluate_if_due(tasks)
                while (reason := self._stop_reason()) is None:
                    while groups := await self._next_groups():
                        await self._forward_backward(groups)
                    if not self._open.missing:
                        manifest = await self._optim_step()
                        if manifest is not None:
                            await self._commit(manifest)
                            await self._publish()
                        self._evaluate_if_due(tasks)
                for task in beside:
                    task.cancel()
                self.groups.cancel()
            await self._end()
            return reason
        finally:
            self._trainee.forget()
            seeding.leave(policy)

    async def _begin(self) -> None:
        """Find or make the version to start from, and what an earlier run left."""
        world = self.world
        for line in await self.policy.load_intact():
            await self.progress.say("corrupt", line)
        if self.policy.head is None:
            first, source = partial(first_adapter, self.spec, self.policy.row.id), self._warm_start
            async with world.collector.reading(
                source
            ):  # it may wait for long, and the source's job let it go meanwhile
                manifest = await self._trainee.init(first, source)
                await self._commit_version(manifest, [], {})
        assert self.policy.head is not None
        self.world.fleet.announce(self.spec.base_model, self.policy.ref(self.policy.head.version))
        self.step = self.policy.head.step
        self._open = StepAccumulator(self.spec, self.step)
        await self.progress.recover(self.step, self.policy.lineage)
        self._evaluated = {row.version for row in await world.store.evaluations(self.row.tenant, self.row.id)}
        await self.groups.restore()

    async def _keep_in_flight(self, tasks: TaskGroup) -> None:
        """Keep groups in flight up to the staleness bound, those of an earlier run first."""
        algorithm, groups = self.spec.algorithm, self.groups
        await groups.resume(tasks)
        while True:
            change = self._changed.next
            assert self.policy.head is not None
            ready = len(groups.ready) + len(self._open.groups)
            count = admission_budget(
                step=self.step,
                durable_step=self.policy.head.step,
                in_flight=groups.in_flight,
                ready=ready,
                per_step=algorithm.groups_per_step,
                max_staleness=algorithm.max_staleness,
            )
            if self.spec.stop.steps is not None:
                left = (self.spec.stop.steps - self.step) * algorithm.groups_per_step
                count = min(count, left - groups.in_flight - ready)
            if count > 0:
                await groups.begin(tasks, count)
            else:
                await change.wait()

    async def _alarm(self) -> None:
        """Have the wall time noticed by a job that waits."""
        limit = self.spec.stop.wall_time
        while limit is not None and (left := limit - self.progress.seconds()) > 0:
            await self.world.clock.sleep(left)
        self._changed.notify()

    async def _next_groups(self) -> list[CompleteGroup]:
        """Complete groups for the open step; none when it has all of them, or when the wall time is over."""
        began = self.world.clock.monotonic()
        while self._open.missing:
            change = self._changed.next
            groups = await self.groups.take(self.step, self._open.missing)
            if groups or (self._out_of_time() and not self._taken):
                self._open.take(groups)
                self._open.waited += self.world.clock.monotonic() - began
                return groups
            await change.wait()
        return []

    async def _forward_backward(self, groups: list[CompleteGroup]) -> None:
        """Add what ``groups`` give to the open step's gradient."""
        assert self.policy.head is not None
        parent = self.policy.ref(self.policy.head.version)
        done = await self._trains(self._trainee.forward(parent, forward_backward(self.spec, groups)))
        self._open.add(done.metrics)

    async def _optim_step(self) -> protocol.Manifest | None:
        """Take the open step; the trained state's artifact when a commit is due."""
        assert self.policy.head is not None
        clock, progress, step = self.world.clock, self.progress, self._open
        figures, optimizer = step.figures(), adam(self.spec, self.step)
        due = len(self._taken) + 1 >= self.spec.checkpoints.commit_every
        due = due or self._stop_reason(after=figures["reward"]) is not None
        parent = self.policy.ref(self.policy.head.version)
        done = await self._trains(self._trainee.optim_step(parent, optimizer, commit=due, scale=step.scale))
        metrics = {
            "step": self.step + 1,
            "time": clock.time(),
            **figures,
            **per_token({**step.sums(), **done.metrics}),
            "lr": optimizer.lr,
            "seconds/waiting": step.waited,
            "seconds/train": step.trained,
            **self.world.seeding.figures(self.policy.row.id),
            "tokens_sampled": progress.counters["tokens"],
            "cost": self.world.billing.cost(self.row.tenant, self.row.id),
        }
        self._taken.append(_Taken(step.groups, metrics))
        self.step += 1
        self._open = StepAccumulator(self.spec, self.step)
        self._changed.notify()
        assert done.manifest is not None or not due
        return done.manifest if due else None

    async def _trains(self, operation: Awaitable[protocol.OperationDone]) -> protocol.OperationDone:
        """``operation`` of the open step's training."""
        began = self.world.clock.monotonic()
        self.progress.training = True
        try:
            return await operation
        finally:
            self.progress.training = False
            self._open.trained += self.world.clock.monotonic() - began

    async def _commit(self, manifest: protocol.Manifest) -> None:
        """The steps taken so far become durable as one version, with all that they consumed."""
        began = self.world.clock.monotonic()
        counters = self.progress.counters
        for taken in self._taken:  # not before: a crash takes steps back that were not committed
            counters["zero_variance_groups"] += sum(len(set(group.rewards)) == 1 for group in taken.groups)
            counters["steps_skipped"] += int(taken.metrics.get("skipped", 0))
        consumed = [group.id for taken in self._taken for group in taken.groups]
        *earlier, last = (taken.metrics for taken in self._taken)
        await self._commit_version(manifest, consumed, {**last, EARLIER: earlier} if earlier else last)
        seconds = self.world.clock.monotonic() - began
        for taken in self._taken:
            taken.metrics = {**taken.metrics, "seconds/commit": seconds}

    async def _commit_version(self, manifest: protocol.Manifest, groups: list[str], metrics: dict[str, Any]) -> None:
        world, counters = self.world, dict(self.progress.counters)
        write = partial(world.store.commit_step, job=self.row.id, groups=groups, counters=counters, rng=self.rng())
        ref = await self.policy.commit(
            write, lease=self._trainee.lease, manifest=manifest, step=self.step, metrics=metrics
        )
        self._trainee.committed(ref)

    async def _publish(self) -> None:
        """The committed steps become visible, the next groups run on the new version, and so do those under way if the
        job says so; what is not needed any more goes."""
        assert self.policy.head is not None
        version = self.policy.head.version
        ref, in_flight = self.policy.ref(version), self.spec.algorithm.in_flight
        self.world.fleet.announce(self.spec.base_model, ref)
        if in_flight != "finish":
            self.world.rollouts.switch(self.row.id, ref, recompute=in_flight == "recompute")
        for taken in self._taken:
            await self.progress.show({**taken.metrics, "version": version})
        self._taken.clear()
        self._changed.notify()
        log.info(
            "step %d: reward %.3f", self.step, self.progress.rewards[-1],
            extra={"tenant": self.row.tenant, "job": self.row.id, "version": version},
        )  # fmt: skip
        await self.policy.retire()
        await self.groups.trim()

    def _evaluate_if_due(self, tasks: TaskGroup) -> None:
        """Begin the evaluations that are due, beside the training; also those that an earlier run did not finish."""
        evaluation = self.spec.evaluation
        if not evaluation.prompts:
            return
        for row in self.policy.history:
            periodic = evaluation.every and row.step % evaluation.every == 0
            if row.kept and row.version not in self._evaluated and (row.version == 0 or periodic):
                self._evaluated.add(row.version)
                tasks.create_task(evaluate(self._episodes, row.version))

    async def _end(self) -> None:
        """The last version is evaluated."""
        self.world.seeding.leave(self.policy.row.id)
        assert self.policy.head is not None
        if self.spec.evaluation.prompts and self.policy.head.version not in self._evaluated:
            await evaluate(self._episodes, self.policy.head.version)
        await self.policy.retire()

    def _stop_reason(self, after: float | None = None) -> str | None:
        """Which stop condition holds; ``after``: whether one would, once a step with this reward is taken. Steps that
        are not committed yet are committed before the job ends."""
        stop, progress = self.spec.stop, self.progress
        step = self.step + (after is not None)
        reward = after if after is not None else progress.rewards[-1] if progress.rewards else None
        if after is None and self._taken:
            return None
        if stop.steps is not None and step >= stop.steps:
            return f"{step} steps"
        if stop.reward is not None and reward is not None and reward >= stop.reward:
            return f"reward {reward:.3f} reached {stop.reward:g}"
        if self._out_of_time():
            return f"wall time {progress.seconds():.0f} s reached {stop.wall_time:.0f} s"
        if stop.tokens is not None and progress.counters["tokens"] >= stop.tokens:
            return f"{progress.counters['tokens']} tokens reached {stop.tokens}"
        return None

    def _out_of_time(self) -> bool:
        limit = self.spec.stop.wall_time
        return limit is not None and self.progress.seconds() >= limit
