"""The training loop of one policy of a job, as it is written in textbooks.

Take complete groups; forward and backward until the step has all of its groups; optimizer step; commit; publish. A
version is committed in one transaction with the groups that it consumed: after any restart the policy continues from
its last commit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rookery import protocol
from rookery.aio import Signal, TaskGroup
from rookery.controller.jobs.buffer import GroupBuffer
from rookery.controller.jobs.evaluation import evaluate
from rookery.controller.jobs.job_context import JobContext, JobPolicy, per_token
from rookery.controller.jobs.step import (
    CompleteGroup,
    StepAccumulator,
    adam,
    forward_backward,
    trainer_logprobs,
)
from rookery.controller.training.policy_run import PolicyRun
from rookery.controller.training.policy_versions import CommitVersion
from rookery.errors import count_of
from rookery.scheduling.job_rules import admission_budget
from rookery.storage.models import VersionRow
from rookery.storage.repositories import jobs
from rookery.storage.repositories.versions import JobCommit, NextVersion, commit_step, save_step, unnamed

log = logging.getLogger("rookery.controller.jobs.job")


@dataclass
class _UncommittedStep:
    """An optimizer step that was taken and is not committed yet."""

    groups: list[CompleteGroup]
    metrics: dict[str, Any]
    logprobs: dict[str, bytes]
    """The trainer's, by episode."""


def commit_of(
    job: JobContext,
    rng: dict[str, Any],
    groups: Sequence[str] = (),
    metrics: Sequence[dict[str, Any]] = (),
    counted: Mapping[str, int] | None = None,
) -> CommitVersion:
    """The transaction that commits a version of a policy, with the groups that its steps consumed and the row of
    ``metrics`` of each of these steps, and adds ``counted`` to the job's counters."""
    job_step = job.committed_steps + len(metrics) if job.spec.several_trained else None

    async def write(version: NextVersion) -> VersionRow:
        def commit(counters: dict[str, int]) -> Awaitable[VersionRow]:
            of = JobCommit(
                job=job.row.id, groups=groups, metrics=metrics, rng=rng, counters=counters, job_step=job_step
            )
            return job.controller.store.write(commit_step, version, of)

        return await job.progress.count(counted or {}, commit)

    return write


async def prepare(job: JobContext, policy: JobPolicy, run: PolicyRun, rng: dict[str, Any]) -> None:
    """Load the versions of ``policy``, or create and commit the first one."""
    versions, source, collector = run.versions, policy.warm_start, job.controller.rooms.collector
    for line in await versions.load_intact():
        await job.progress.add_event("corrupt", line)
    if versions.head is None:
        async with collector.referenced(source):  # the wait for a worker may be long
            if source is not None and policy.keeps_start:
                await run.copy(commit_of(job, rng), source.hash)
            else:
                with job.progress.creating(policy.model):
                    await run.create(commit_of(job, rng), policy.about.seed, source)
        if source is not None:
            await collector.delete_unnamed(unnamed, source.hash)  # the policy named it until now
    job.controller.rooms.weights.publish(policy.model, run.parent)


class PolicyLoop:
    """:meth:`train` returns the reason why the policy trains no more."""

    def __init__(self, job: JobContext, policy: JobPolicy, changed: Signal, rng: Callable[[], dict[str, Any]]) -> None:
        """``changed`` is notified when a step was taken or committed. ``rng()``: the state that a later run of the job
        needs in addition to its counters."""
        assert policy.versions is not None
        self._job = job
        self._controller = job.controller
        self._changed = changed
        self._rng = rng
        self.policy = policy
        self.spec = policy.spec
        self.versions = policy.versions
        self.buffer = GroupBuffer(job, policy, changed)
        self.step = 0
        self._evaluated: set[int] = set()
        self._run = job.policy_run(policy)
        self._next = self._begin_step()
        """The step whose groups are being collected."""
        self._step_began = 0.0
        """When the last step was taken."""
        self._uncommitted: list[_UncommittedStep] = []
        self._reward: float | None = None
        """The mean reward of the last published step, where its steps have one."""
        self.over = False
        """It trains no more."""

    @property
    def needs_trainer(self) -> bool:
        """Whether a worker trains it, or will."""
        return not self.over

    async def begin(self) -> None:
        """Load or create the version to start from."""
        await prepare(self._job, self.policy, self._run, self._rng())
        assert self.versions.head is not None
        self.step = self.versions.head.step
        self._next = self._begin_step()

    def recover(self, evaluated: set[int], reward: float | None) -> None:
        """Take up the evaluated versions of an earlier run, and the reward of its last committed step."""
        self._evaluated, self._reward = evaluated, reward

    def budget(self, in_flight: int) -> int:
        """How many groups may start now, where so many are in flight."""
        algorithm, ready = self.spec.algorithm, len(self.buffer.ready) + len(self._next.groups)
        assert self.versions.head is not None
        count = admission_budget(
            step=self.step,
            durable_step=self.versions.head.step,
            in_flight=in_flight,
            ready=ready,
            per_step=algorithm.groups_per_step,
            max_staleness=algorithm.max_staleness,
        )
        if self.spec.stop.steps is not None:
            needed = (self.spec.stop.steps - self.step) * algorithm.groups_per_step
            count = min(count, needed - in_flight - ready)
        return count

    # --- the loop -----------------------------------------------------------------------------------------------------

    async def train(self, tasks: TaskGroup) -> str:
        """Train until a stop condition holds, and commit the steps taken; returns which. Evaluations are started in
        ``tasks``. Raises :class:`TooManyRequests` before a step, where the tenant's rows of the database are as many
        bytes as allowed, or the step needs room for one version more and the tenant may store no more."""
        await self._evaluate_if_due(tasks)
        self._step_began = self._controller.clock.monotonic()
        while (reason := self._stop_reason()) is None:
            if await self._collect():
                await self._check_stored()
                manifest = await self._optim_step()
                if manifest is not None:
                    await self._commit(manifest)
                    await self._publish()
                await self._evaluate_if_due(tasks)
        if self._uncommitted:  # the condition holds since their last step
            await self._check_stored()
            with self._job.progress.training():
                manifest = await self._run.export()
            await self._commit(manifest)
            await self._publish()
        self.over = True
        if self._job.spec.several_trained:
            await self.buffer.close()
        self._changed.notify()
        return reason

    async def _check_stored(self) -> None:
        quotas, tenant = self._controller.rooms.quotas, self._job.row.tenant
        await quotas.check_database(tenant)
        if self.versions.grows:
            await quotas.check_stored(tenant)

    def _begin_step(self) -> StepAccumulator:
        return StepAccumulator(self.spec, self.step)

    async def _collect(self) -> bool:
        """Add the gradient of the next step; False where the wall time was over before it was complete."""
        while groups := await self._next_groups():
            await self._forward_backward(groups)
        return not self._next.missing

    async def _next_groups(self) -> list[CompleteGroup]:
        """Complete groups for the next step; none when it has all of them, or when the wall time is over."""
        began = self._controller.clock.monotonic()
        while self._next.missing:
            change = self._changed.next
            groups = await self.buffer.take(self.step, self._next.missing)
            if groups or self._out_of_time():
                self._next.groups.extend(groups)
                self._next.waiting_seconds += self._controller.clock.monotonic() - began
                return groups
            await change.wait()
        return []

    async def _forward_backward(self, groups: list[CompleteGroup]) -> None:
        """Add the gradient of ``groups`` to that of the next step."""
        # of an episode of several policies, they would be those of some of its tokens
        alone = not self._job.spec.several_policies
        threads, context = self._controller.threads, self.policy.chat.context  # a batch may have millions of tokens
        request = await threads(forward_backward, self.spec, groups, context, logprobs=alone)
        request = replace(request, reference=self.versions.reference)
        done = await self._timed(self._run.forward(request))
        self._next.add(done.metrics)
        if request.logprobs:
            self._next.logprobs |= await threads(trainer_logprobs, self.spec, groups, done.logprobs, context)

    async def _optim_step(self) -> protocol.Manifest | None:
        """Take the step; returns the artifact of the trained state when a commit is due."""
        step, optimizer, job = self._next, adam(self.spec, self.step), self._job
        metrics = step.describe()
        due = len(self._uncommitted) + 1 >= self.spec.checkpoints.commit_every
        due = due or self._stop_reason(after=metrics.get("reward"), taken=1) is not None
        done = await self._timed(self._run.optim_step(optimizer, commit=due, scale=step.scale))
        row = {
            "step": self.step + 1,
            "time": self._controller.clock.time(),
            **metrics,
            **per_token({**step.trainer_metrics(), **done.metrics}),
            "lr": optimizer.lr,
            "seconds/waiting": step.waiting_seconds,
            "seconds/train": step.training_seconds,
            **self._controller.rooms.seeding.figures(self.versions.row.id),
            **({} if self.spec.algorithm.on_rows else {"tokens_sampled": job.progress.counters["tokens"]}),
            "cost": self._controller.rooms.usage.cost(job.row.tenant, job.row.id),
        }
        self._count_step(step)
        self._uncommitted.append(_UncommittedStep(step.groups, row, step.logprobs))
        self.step += 1
        self._next = self._begin_step()
        self._changed.notify()
        assert done.manifest is not None or not due
        return done.manifest if due else None

    def _count_step(self, step: StepAccumulator) -> None:
        """Report a step's times to the pool of rollout workers."""
        now = self._controller.clock.monotonic()
        if self.spec.algorithm.off_policy:
            self._controller.rooms.models.pool.step(
                self.policy.model, waited=step.waiting_seconds, seconds=now - self._step_began,
                consumed=sum(len(group.episodes) for group in step.groups),
            )  # fmt: skip
        self._step_began = now

    async def _timed(self, operation: Awaitable[protocol.OperationDone]) -> protocol.OperationDone:
        """Await an operation of the trainer, and count its seconds for the next step."""
        began = self._controller.clock.monotonic()
        try:
            with self._job.progress.training():
                return await operation
        finally:
            self._next.training_seconds += self._controller.clock.monotonic() - began

    async def _commit(self, manifest: protocol.Manifest) -> None:
        """Make the steps taken so far durable as one version, with the groups that they consumed."""
        began = self._controller.clock.monotonic()
        progress, steps = self._job.progress, self._uncommitted
        groups = [group for step in steps for group in step.groups]
        found = {
            "zero_variance_groups": sum(not group.has_variance for group in groups),
            "steps_skipped": sum(int(step.metrics.get("skipped", 0)) for step in steps),
        }
        counted = progress.of_policy(self.policy.name, found)
        async with progress.committing:
            if self._job.spec.several_trained:
                for number, step in enumerate(steps, progress.committed + 1):
                    step.metrics |= {"step": number, "policy": self.policy.name, "policy_step": step.metrics["step"]}
            rows = [step.metrics for step in steps]
            write = commit_of(self._job, self._rng(), [group.id for group in groups], rows, counted)
            await self._run.commit(write, manifest)
            progress.committed += len(steps)
        seconds = self._controller.clock.monotonic() - began
        for step in steps:  # each has its share of the one commit
            step.metrics = {**step.metrics, "seconds/commit": seconds / len(steps)}

    async def _publish(self) -> None:
        """Make the committed steps visible and their version the one that new groups run on, and running ones if the
        job says so; delete versions and texts that are not kept."""
        row, progress, last = self._job.row, self._job.progress, self._uncommitted[-1].metrics
        ref = self._run.publish(row.id, self.spec.algorithm.in_flight, self._controller.rooms.rollouts.switch)
        store, taken = self._controller.store, self._uncommitted
        await asyncio.gather(  # in one transaction, and before followers read the first of them
            *(store.write(jobs.save_train_logprobs, step.logprobs) for step in taken),
            *(store.write(save_step, row.id, ref.version, step.metrics) for step in taken),
        )
        for step in taken:
            await progress.publish(step.metrics, ref.version)
            self._reward = step.metrics.get("reward")
        self._uncommitted.clear()
        self._changed.notify()
        shown = f"loss {last['loss']:.3f}" if self._reward is None else f"reward {self._reward:.3f}"
        log.info(
            "%sstep %d: %s", self._job.whose(self.policy), self.step, shown,
            extra={"tenant": row.tenant, "job": row.id, "version": ref.version},
        )  # fmt: skip
        await self.versions.retire()

    # --- evaluation and end -------------------------------------------------------------------------------------------

    async def _evaluate_if_due(self, tasks: TaskGroup) -> None:
        """Start the evaluations that are due, concurrently with training; also unfinished ones of an earlier run."""
        evaluation = self.spec.evaluation
        if not evaluation.prompts:
            return
        for row in self.versions.history:
            periodic = evaluation.every and row.step % evaluation.every == 0
            if row.kept and row.version not in self._evaluated and (row.version == 0 or periodic):
                self._evaluated.add(row.version)
                tasks.create_task(evaluate(self._job, self.policy, row.version))

    async def end(self) -> None:
        """Evaluate the last version."""
        await self._evaluate_last()
        self.versions.release_reference()
        await self.versions.retire()

    async def _evaluate_last(self) -> None:
        assert self.versions.head is not None
        if self.spec.evaluation.prompts and self.versions.head.version not in self._evaluated:
            await evaluate(self._job, self.policy, self.versions.head.version)

    def forget(self) -> None:
        """It trains no more, or not for now: workers need its training state no more."""
        self._run.forget()

    def _stop_reason(self, after: float | None = None, taken: int = 0) -> str | None:
        """The stop condition that holds, or that would hold once ``taken`` = 1 step more, with the reward ``after``, is
        taken."""
        stop, progress = self.spec.stop, self._job.progress
        step = self.step + taken
        reward = after if taken else self._reward
        if stop.steps is not None and step >= stop.steps:
            return count_of(step, "step")
        if stop.reward is not None and reward is not None and reward >= stop.reward:
            return f"reward {reward:.3f} reached {stop.reward:g}"
        if self._out_of_time():
            return f"wall time {progress.seconds():.0f} s reached {stop.wall_time:.0f} s"
        if stop.tokens is not None and progress.counters["tokens"] >= stop.tokens:
            return f"{count_of(progress.counters['tokens'], 'token')} reached {stop.tokens}"
        return None

    def _out_of_time(self) -> bool:
        limit = self.spec.stop.wall_time
        return limit is not None and self._job.progress.seconds() >= limit
