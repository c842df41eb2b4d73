"""One job: groups of episodes in flight, and the training loop of each of its policies
(:mod:`rookery.controller.jobs.policy_loop`; on rows :mod:`rookery.controller.jobs.row_loop`, without groups). Rollouts,
the environment and training run concurrently;
``max_staleness`` bounds how far they drift apart.
"""

from __future__ import annotations

from typing import Any

from rookery.aio import Signal, TaskGroup
from rookery.controller.jobs.groups import Groups
from rookery.controller.jobs.job_context import JobContext, JobPolicy
from rookery.controller.jobs.policy_loop import PolicyLoop, prepare
from rookery.controller.jobs.row_loop import RowLoop
from rookery.controller.quotas import groups_at_once
from rookery.controller.training.policy_versions import PolicyVersions
from rookery.errors import count_of
from rookery.storage.repositories import versions as version_rows

OPERATIONS_PER_STEP = 2
"""Forward-backward and the optimizer's."""


class TrainingJob:
    """A running job. :meth:`run` returns the reason why the job is complete, or raises the error that stopped it."""

    def __init__(self, job: JobContext) -> None:
        self._job = job
        self._controller = job.controller
        self.spec = job.spec
        self.policies = job.policies
        self.progress = job.progress
        self.recovered = False
        """Whether it has taken up what its earlier runs committed: its steps and rewards are known from then on."""
        self._changed = Signal()
        loop = RowLoop if job.spec.algorithm.on_rows else PolicyLoop
        self.loops: list[PolicyLoop] = [loop(job, policy, self._changed, self.rng) for policy in job.trained]
        self.groups = Groups(job, [loop.buffer for loop in self.loops], self._changed)

    @property
    def step(self) -> int:
        """Optimizer steps of all policies."""
        return sum(loop.step for loop in self.loops)

    def steps_left(self) -> int | None:
        """Steps of each policy until all have their number of steps: the policies step at the same time. None where
        one has no such number."""
        left = [
            None if loop.spec.stop.steps is None else loop.spec.stop.steps - loop.step
            for loop in self.loops
            if not loop.over
        ]
        return None if None in left else max((number for number in left if number is not None), default=0)

    def versions(self, model: str | None = None) -> list[PolicyVersions]:
        """The versions of all policies that have their own, with ``model`` of those on that base model."""
        return [
            policy.versions
            for policy in self.policies.values()
            if policy.versions is not None and policy.about.follows is None and model in (None, policy.model)
        ]

    def rng(self) -> dict[str, Any]:
        """The state that a later run needs in addition to the counters: the seed, and the seconds of running."""
        return {"seed": self.spec.seed, "seconds": self.progress.seconds()}

    def waits_for(self) -> str:
        """The present bottleneck: a worker, the trainer, the engine or the environment; empty if none."""
        spec, progress, rooms = self.spec, self.progress, self._controller.rooms
        trains = {*self._trained_models, *progress.new_models}
        for model in spec.base_models:
            roles = [*([] if spec.algorithm.on_rows else ["rollout"]), *(["train"] if model in trains else [])]
            if not all(rooms.fleet.serving(role, model) for role in roles):
                wanted = " and ".join("training" if role == "train" else role for role in roles)
                return "worker: " + rooms.fleet.missing(wanted, model)
        if progress.computing:
            return "trainer" + self._sharing()
        position = rooms.rollouts.position(self._job.row.tenant, self._job.row.id)
        if engine := progress.stages["engine"]:
            queue = f", {position} ahead in the queue" if position else ""
            return f"engine ({count_of(engine, 'reply')}{queue})"
        if environment := progress.stages["environment"]:
            return f"environment ({count_of(environment, 'episode')})"
        return ""

    @property
    def _trained_models(self) -> set[str]:
        """The base models of the policies that need a trainer."""
        return {loop.policy.model for loop in self.loops if loop.needs_trainer}

    def _sharing(self) -> str:
        """The number of operations that share the trainer, where there are others than this job's."""
        fleet = self._controller.rooms.fleet
        trainers = [worker for model in self._trained_models for worker in fleet.serving("train", model)]
        operations = sum(worker.beat.training for worker in trainers if worker.beat is not None)
        return f" ({count_of(operations, 'operation')} take turns)" if operations > OPERATIONS_PER_STEP else ""

    async def run(self) -> str:
        """Train every policy until a stop condition of its holds; returns which."""
        seeding = self._controller.rooms.seeding
        for loop in self.loops:
            algorithm = loop.spec.algorithm
            if not algorithm.on_rows:  # else it has no rollouts
                seeding.join(loop.versions.row.id, overlaps=algorithm.overlaps)
        try:
            await self._begin()
            async with TaskGroup() as tasks:
                background = [
                    tasks.create_task(self._keep_in_flight(tasks)),
                    tasks.create_task(self._watch_wall_time()),
                ]
                training = [tasks.create_task(self._train(loop, tasks)) for loop in self.loops]
                reasons = [await one for one in training]
                for task in background:
                    task.cancel()
                self.groups.cancel()
            for loop in self.loops:
                await loop.end()
            for loop in self.loops:
                loop.versions.release()
                await loop.versions.retire()
            await self.groups.trim()
            return (
                reasons[0]
                if len(reasons) == 1
                else "; ".join(
                    f"{loop.policy.name}: {reason}" for loop, reason in zip(self.loops, reasons, strict=True)
                )
            )
        finally:
            for loop in self.loops:
                loop.forget()
                seeding.leave(loop.versions.row.id)

    async def _train(self, loop: PolicyLoop, tasks: TaskGroup) -> str:
        """Train one policy until a stop condition of its holds; returns which. Then no worker keeps its training state,
        or waits for its next step, however long the others train."""
        reason = await loop.train(tasks)
        self._controller.rooms.seeding.leave(loop.versions.row.id)
        if not loop.needs_trainer:
            loop.forget()
        return reason

    async def _begin(self) -> None:
        """Load or create the versions to start from, and load the groups and evaluations of an earlier run."""
        store, job = self._controller.store, self._job.row
        for policy in self.policies.values():
            if policy.versions is not None and not policy.about.train and policy.about.follows is None:
                await self._prepare_frozen(policy)
        for loop in self.loops:
            await loop.begin()
            for line in await loop.versions.verify_followed():
                await self.progress.add_event("corrupt", line)
        rewards = await self.progress.recover()
        evaluated = await store.read(version_rows.evaluated, job.tenant, job.id)
        for loop in self.loops:
            row = loop.versions.row
            loop.recover({version for policy, version in evaluated if policy == row.id}, rewards.get(row.name))
        self.recovered = True
        await self.groups.restore()

    async def _prepare_frozen(self, policy: JobPolicy) -> None:
        """Have the only version of a policy that does not train."""
        run = self._job.policy_run(policy)
        await prepare(self._job, policy, run, self.rng())
        run.forget()

    async def _keep_in_flight(self, tasks: TaskGroup) -> None:
        """Keep groups in flight up to the staleness bound of every policy, starting with the groups of an earlier
        run."""
        groups = self.groups
        at_once = groups_at_once(self.spec, self._controller.settings.limits)
        await groups.resume(tasks)
        while True:
            change = self._changed.next
            budgets = [loop.budget(groups.in_flight) for loop in self.loops if not loop.over]
            count = min([*budgets, at_once - groups.in_flight])
            if count > 0 and budgets:
                await groups.begin(tasks, count)
            else:
                await change.wait()

    async def _watch_wall_time(self) -> None:
        """Wake the job when its wall time is over."""
        limit = self.spec.stop.wall_time
        while limit is not None and (remaining := limit - self.progress.seconds()) > 0:
            await self._controller.clock.sleep(remaining)
        self._changed.notify()
