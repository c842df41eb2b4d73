"""One job: the training loop, as it is written in textbooks.

Keep groups in flight; take complete ones; forward and backward until the step has all of its groups; optimizer step;
commit; publish. Rollouts, the environment and training run concurrently; ``max_staleness`` bounds how far they drift
apart.

A version is committed in one transaction with the groups that it consumed: after any restart the job continues from its
last commit.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rookery import protocol
from rookery.aio import Signal, TaskGroup
from rookery.controller.jobs.evaluation import evaluate
from rookery.controller.jobs.groups import Groups
from rookery.controller.jobs.job_context import JobContext, per_token
from rookery.controller.jobs.step import (
    CompleteGroup,
    StepAccumulator,
    adam,
    describe,
    forward_backward,
    trainer_logprobs,
)
from rookery.controller.quotas import groups_at_once
from rookery.controller.training.policy_trainer import PolicyTrainer
from rookery.scheduling.job_rules import admission_budget

log = logging.getLogger("rookery.controller.jobs.job")


@dataclass
class _UncommittedStep:
    """An optimizer step that was taken and is not committed yet."""

    groups: list[CompleteGroup]
    metrics: dict[str, Any]
    logprobs: dict[str, bytes]
    """The trainer's, by episode."""


class TrainingJob:
    """A running job. :meth:`run` returns the reason why the job is complete, or raises the error that stopped it."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._controller = job.controller
        self.spec = job.spec
        self.policy = job.policy
        self.progress = job.progress
        self.step = job.row.step
        self._changed = Signal()
        self.groups = Groups(job, self._changed)
        store = job.controller.store
        trainers = job.spec.policy[1].trainers
        self._trainer = PolicyTrainer(
            job.controller.training, job.policy.row, job.spec.base_model, store.next_lease, trainers
        )
        self._next = StepAccumulator(job.spec, self.step)
        """The step whose groups are being collected."""
        self._uncommitted: list[_UncommittedStep] = []
        self._evaluated: set[int] = set()

    def rng(self) -> dict[str, Any]:
        """The state that a later run needs in addition to the counters: the seed, and the seconds of running."""
        return {"seed": self.spec.seed, "seconds": self.progress.seconds()}

    @property
    def _parent(self) -> protocol.AdapterRef:
        """The newest committed version, from which the next step is taken."""
        assert self.policy.head is not None
        return self.policy.ref(self.policy.head.version)

    async def run(self) -> str:
        """Train until a stop condition holds; returns which. Raises :class:`TooManyRequests` before a step that needs
        room for one version more, where the tenant may store no more."""
        seeding, policy = self._controller.seeding, self.policy.row.id
        algorithm = self.spec.algorithm
        seeding.join(policy, overlaps=algorithm.max_staleness > 0 or algorithm.micro_batch > 0)
        try:
            await self._begin()
            async with TaskGroup() as tasks:
                background = [
                    tasks.create_task(self._keep_in_flight(tasks)),
                    tasks.create_task(self._watch_wall_time()),
                ]
                self._evaluate_if_due(tasks)
                while (reason := self._stop_reason()) is None:
                    while groups := await self._next_groups():
                        await self._forward_backward(groups)
                    if not self._next.missing:
                        if self.policy.grows:
                            await self._controller.quotas.check_stored(self._job.row.tenant)
                        manifest = await self._optim_step()
                        if manifest is not None:
                            await self._commit(manifest)
                            await self._publish()
                        self._evaluate_if_due(tasks)
                for task in background:
                    task.cancel()
                self.groups.cancel()
            await self._end()
            return reason
        finally:
            self._trainer.forget()
            seeding.leave(policy)

    async def _begin(self) -> None:
        """Load or create the version to start from, and load the groups and evaluations of an earlier run."""
        controller, policy, source = self._controller, self.policy, self._job.warm_start
        for line in await policy.load_intact():
            await self.progress.add_event("corrupt", line)
        if policy.head is None:
            async with controller.collector.pin(source):  # the wait for a worker may be long
                manifest = await self._trainer.init(self.spec.policy[1].seed, source)
                await self._commit_version(manifest, [], [])
        assert policy.head is not None
        controller.residency.announce(self.spec.base_model, self._parent)
        self.step = policy.head.step
        self._next = StepAccumulator(self.spec, self.step)
        await self.progress.recover()
        evaluations = await controller.store.evaluations(self._job.row.tenant, self._job.row.id)
        self._evaluated = {row.version for row in evaluations}
        await self.groups.restore()

    async def _keep_in_flight(self, tasks: TaskGroup) -> None:
        """Keep groups in flight up to the staleness bound, starting with the groups of an earlier run."""
        algorithm, groups = self.spec.algorithm, self.groups
        at_once = groups_at_once(self.spec, self._controller.settings.limits)
        await groups.resume(tasks)
        while True:
            change = self._changed.next
            assert self.policy.head is not None
            ready = len(groups.ready) + len(self._next.groups)
            count = admission_budget(
                step=self.step,
                durable_step=self.policy.head.step,
                in_flight=groups.in_flight,
                ready=ready,
                per_step=algorithm.groups_per_step,
                max_staleness=algorithm.max_staleness,
            )
            if self.spec.stop.steps is not None:
                needed = (self.spec.stop.steps - self.step) * algorithm.groups_per_step
                count = min(count, needed - groups.in_flight - ready)
            count = min(count, at_once - groups.in_flight)
            if count > 0:
                await groups.begin(tasks, count)
            else:
                await change.wait()

    async def _watch_wall_time(self) -> None:
        """Wake the job when its wall time is over."""
        limit = self.spec.stop.wall_time
        while limit is not None and (remaining := limit - self.progress.seconds()) > 0:
            await self._controller.clock.sleep(remaining)
        self._changed.notify()

    async def _next_groups(self) -> list[CompleteGroup]:
        """Complete groups for the next step; none when it has all of them, or when the wall time is over."""
        began = self._controller.clock.monotonic()
        while self._next.missing:
            change = self._changed.next
            groups = await self.groups.take(self.step, self._next.missing)
            if groups or (self._out_of_time() and not self._uncommitted):
                self._next.groups.extend(groups)
                self._next.waiting_seconds += self._controller.clock.monotonic() - began
                return groups
            await change.wait()
        return []

    async def _forward_backward(self, groups: list[CompleteGroup]) -> None:
        """Add the gradient of ``groups`` to that of the next step."""
        request = forward_backward(self.spec, groups, self._job.chat.context)
        if self.policy.reference is not None:
            request = replace(request, reference=self.policy.ref(self.policy.reference))
        done = await self._timed(self._trainer.forward(self._parent, request))
        self._next.add(done.metrics)
        self._next.logprobs |= trainer_logprobs(self.spec, groups, done.logprobs, self._job.chat.context)

    async def _optim_step(self) -> protocol.Manifest | None:
        """Take the step; returns the artifact of the trained state when a commit is due."""
        step, optimizer = self._next, adam(self.spec, self.step)
        metrics = describe(step.groups, step.number)
        due = len(self._uncommitted) + 1 >= self.spec.checkpoints.commit_every
        due = due or self._stop_reason(after=metrics["reward"]) is not None
        done = await self._timed(self._trainer.optim_step(self._parent, optimizer, commit=due, scale=step.scale))
        row = {
            "step": self.step + 1,
            "time": self._controller.clock.time(),
            **metrics,
            **per_token({**step.trainer_metrics(), **done.metrics}),
            "lr": optimizer.lr,
            "seconds/waiting": step.waiting_seconds,
            "seconds/train": step.training_seconds,
            **self._controller.seeding.figures(self.policy.row.id),
            "tokens_sampled": self.progress.counters["tokens"],
            "cost": self._controller.usage.cost(self._job.row.tenant, self._job.row.id),
        }
        self._uncommitted.append(_UncommittedStep(step.groups, row, step.logprobs))
        self.step += 1
        self._next = StepAccumulator(self.spec, self.step)
        self._changed.notify()
        assert done.manifest is not None or not due
        return done.manifest if due else None

    async def _timed(self, operation: Awaitable[protocol.OperationDone]) -> protocol.OperationDone:
        """Await an operation of the trainer, and count its seconds for the next step."""
        began = self._controller.clock.monotonic()
        self.progress.training = True
        try:
            return await operation
        finally:
            self.progress.training = False
            self._next.training_seconds += self._controller.clock.monotonic() - began

    async def _commit(self, manifest: protocol.Manifest) -> None:
        """Make the steps taken so far durable as one version, with the groups that they consumed."""
        began = self._controller.clock.monotonic()
        counters, steps = self.progress.counters, self._uncommitted
        for step in steps:  # not earlier: a crash takes uncommitted steps back
            counters["zero_variance_groups"] += sum(not group.has_variance for group in step.groups)
            counters["steps_skipped"] += int(step.metrics.get("skipped", 0))
        consumed = [group.id for step in steps for group in step.groups]
        await self._commit_version(manifest, consumed, [step.metrics for step in steps])
        seconds = self._controller.clock.monotonic() - began
        for step in steps:
            step.metrics = {**step.metrics, "seconds/commit": seconds}

    async def _commit_version(
        self, manifest: protocol.Manifest, groups: list[str], metrics: list[dict[str, Any]]
    ) -> None:
        write = partial(
            self._controller.store.commit_step, job=self._job.row.id, groups=groups, metrics=metrics,
            counters=dict(self.progress.counters), rng=self.rng(),
        )  # fmt: skip
        ref = await self.policy.commit(write, lease=self._trainer.lease, manifest=manifest, step=self.step)
        self._trainer.committed(ref)

    async def _publish(self) -> None:
        """Make the committed steps visible and their version the one that new groups run on, and running ones if the
        job says so; delete versions and texts that are not kept."""
        ref, in_flight = self._parent, self.spec.algorithm.in_flight
        self._controller.residency.announce(self.spec.base_model, ref)
        if in_flight != "finish":
            self._controller.rollouts.switch(self._job.row.id, ref, recompute=in_flight == "recompute")
        for step in self._uncommitted:
            await asyncio.gather(  # in one transaction
                self._controller.store.save_train_logprobs(step.logprobs),
                self.progress.publish(step.metrics, ref.version),
            )
        self._uncommitted.clear()
        self._changed.notify()
        log.info(
            "step %d: reward %.3f", self.step, self.progress.rewards[-1],
            extra={"tenant": self._job.row.tenant, "job": self._job.row.id, "version": ref.version},
        )  # fmt: skip
        await self.policy.retire()
        await self.groups.trim()

    def _evaluate_if_due(self, tasks: TaskGroup) -> None:
        """Start the evaluations that are due, concurrently with training; also unfinished ones of an earlier run."""
        evaluation = self.spec.evaluation
        if not evaluation.prompts:
            return
        for row in self.policy.history:
            periodic = evaluation.every and row.step % evaluation.every == 0
            if row.kept and row.version not in self._evaluated and (row.version == 0 or periodic):
                self._evaluated.add(row.version)
                tasks.create_task(evaluate(self._job, row.version))

    async def _end(self) -> None:
        """Evaluate the last version."""
        self._controller.seeding.leave(self.policy.row.id)
        assert self.policy.head is not None
        if self.spec.evaluation.prompts and self.policy.head.version not in self._evaluated:
            await evaluate(self._job, self.policy.head.version)
        self.policy.reference = None
        await self.policy.retire()

    def _stop_reason(self, after: float | None = None) -> str | None:
        """The stop condition that holds, or that would hold once a step with the reward ``after`` is taken. A job does
        not end before its steps are committed."""
        stop, progress = self.spec.stop, self.progress
        step = self.step + (after is not None)
        reward = after if after is not None else progress.rewards[-1] if progress.rewards else None
        if after is None and self._uncommitted:
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
