"""Seeding: training workers generate at the beginning of each cycle, then leave that to remote workers and train.

* A training worker has cycles while a running job's policy trains there that can train while its rollouts run (in
  portions, on older versions, or beside another policy), and while remote workers serve its base model: those that do
  not train, and are preemptible or do rollouts only. Without them nothing here does anything.
* A cycle begins when the one before ends. Its first phase, the seed phase, lasts until T_seed seconds after the first
  token that was generated for one of the worker's policies; what the worker has not finished then goes on elsewhere, as
  far as others have free rows for it. In the train phase it is given no rollouts, except what somebody waits for.
* A cycle ends when an optimizer step is answered and the worker has nothing else to train, or the step is the second
  one of its policy in this cycle. With one on-policy job that is the paper's step.
* T_seed and the number of remote workers that pay off are :mod:`rookery.scheduling.offload`'s. All is in memory: a
  restarted service learns anew, from the first cycle on.
* Times are measured from a cycle's first token on. *trainer_wait* is the train phase's time without an operation under
  way at the training worker: its jobs then wait for rollouts. *remote_wait* is the mean time for which the remote
  workers in use had no request: there was none for them, or they would have been given it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rookery import protocol
from rookery.aio import Clock, Signal
from rookery.controller.fleet.fleet import Fleet, Worker
from rookery.controller.offload.cycle import CycleSample, CycleTimer
from rookery.controller.offload.pool import RemotePool
from rookery.controller.rollout.request import SamplingRequest
from rookery.controller.rollout.scheduler import RolloutScheduler
from rookery.controller.training.dispatcher import Operation, TrainingDispatcher
from rookery.scheduling.offload import Seeding as Algorithm
from rookery.settings import Settings

log = logging.getLogger("rookery.controller.offload.seeding")


@dataclass(eq=False)
class _Trainer:
    """A training worker, and the policies of jobs that train there."""

    worker: Worker
    algorithm: Algorithm
    policies: set[str] = field(default_factory=set)
    cycle: CycleTimer | None = None
    """None while it has none: it generates whenever it can."""
    figures: dict[str, float] = field(default_factory=dict)
    """Of its last whole cycle."""

    @property
    def model(self) -> str:
        return self.worker.hello.model


class Seeding:
    algorithm = Algorithm
    """What learns how long a training worker seeds."""

    def __init__(
        self, fleet: Fleet, rollouts: RolloutScheduler, training: TrainingDispatcher, settings: Settings, clock: Clock
    ) -> None:
        self._fleet = fleet
        self._rollouts = rollouts
        self._training = training
        self._settings = settings
        self._clock = clock
        self._jobs: dict[str, bool] = {}
        """Policies of running jobs, and whether they can train while their rollouts run."""
        self._trainers: dict[Worker, _Trainer] = {}
        self._places: dict[str, _Trainer] = {}
        """Where a policy trains."""
        self._learned: dict[str, Algorithm] = {}
        """By the worker's name: it may dial in anew."""
        self._remotes: defaultdict[str, RemotePool] = defaultdict(lambda: RemotePool(clock, rollouts.pool.busy_seconds))
        """By base model."""
        self._unopened = 0
        """Cycles without a token so far."""
        self._gated: set[Worker] = set()
        self._due = Signal()
        """Beats when a cycle has got its first token."""
        self.waits = {"trainer": 0.0, "remote": 0.0}
        """Seconds, of all cycles so far."""
        rollouts.gate = lambda worker: worker not in self._gated
        rollouts.on_sampled(self._sampled)
        training.on_operation(self._operation)
        fleet.on_joined(self._joined)
        fleet.on_state(self._seen)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def join(self, policy: str, *, overlaps: bool) -> None:
        """A job runs that trains ``policy``; ``overlaps``: it can train while its rollouts run."""
        self._jobs[policy] = overlaps

    def leave(self, policy: str) -> None:
        """It trains no more; it may have said so before."""
        self._jobs.pop(policy, None)
        self._move(policy, None)

    def figures(self, policy: str) -> dict[str, float]:
        """Of the last cycle of the worker that trains ``policy``, as a step's row shows them; empty without one."""
        place = self._places.get(policy)
        return dict(place.figures) if place is not None and place.cycle is not None else {}

    def gauges(self) -> dict[str, float]:
        """The longest T_seed of the training workers that have cycles; remote workers in use and left out."""
        cycling = [trainer for trainer in self._trainers.values() if trainer.cycle is not None]
        return {
            "seed_seconds": max((trainer.algorithm.seconds for trainer in cycling), default=0.0),
            "remote_workers_used": sum(remotes.used for remotes in self._remotes.values()),
            "remote_workers_unused": sum(len(remotes) - remotes.used for remotes in self._remotes.values()),
        }

    def worthwhile(self, model: str) -> int | None:
        """How many remote workers of a base model pay off at present; None where that is not known: all may."""
        return max((trainer.algorithm.most for trainer in self._cycling(model)), default=None)

    # --- who trains, and who does not ---------------------------------------------------------------------------------

    def _joined(self, worker: Worker) -> None:
        """It dialled in: where it would be left out it begins so."""
        if _remote(worker) and self._remotes[worker.hello.model].full:
            self._gated.add(worker)

    def _seen(self, worker: Worker) -> None:
        """Its state has changed."""
        trainer = self._trainers.get(worker)
        if trainer is not None and not worker.working:
            for policy in sorted(trainer.policies):
                self._move(policy, None)
        self._place(worker)
        if not worker.working:
            self._gated.discard(worker)
        if worker.state == "gone":
            self._learned.pop(worker.name, None)

    def _place(self, worker: Worker) -> None:
        """Whether it is a remote worker now."""
        remotes = self._remotes[worker.hello.model]
        before = len(remotes)
        remote = _remote(worker) and worker.state == "serving" and worker not in self._trainers
        if remote and worker not in remotes:
            self._tell(remotes, remotes.add(worker))
        elif not remote and worker in remotes:
            self._tell(remotes, remotes.drop(worker))
        if bool(before) != bool(remotes):
            for trainer in self._trainers.values():
                if trainer.model == worker.hello.model:
                    self._review(trainer)

    def _move(self, policy: str, worker: Worker | None) -> None:
        """``policy`` trains at ``worker`` from now on."""
        before = self._places.pop(policy, None)
        if before is not None:
            before.policies.discard(policy)
            if before.policies:
                self._review(before)
            else:
                self._stop(before)
                del self._trainers[before.worker]
                self._place(before.worker)
        if worker is not None:
            trainer = self._trainers.get(worker)
            if trainer is None:
                trainer = self._trainers[worker] = _Trainer(worker, self._algorithm(worker))
                self._place(worker)
            trainer.policies.add(policy)
            self._places[policy] = trainer
            self._review(trainer)

    def _algorithm(self, worker: Worker) -> Algorithm:
        if worker.name not in self._learned:
            settings, reserved = self._settings, 1 + len(self._cycling(worker.hello.model))
            self._learned[worker.name] = self.algorithm(
                initial=settings.offload.seed_initial_seconds, eta=settings.offload.seed_eta, reserved=reserved
            )
        return self._learned[worker.name]

    def _review(self, trainer: _Trainer) -> None:
        """Whether it has cycles now."""
        overlaps = len(trainer.policies) > 1 or any(self._jobs[policy] for policy in trainer.policies)
        cycles = overlaps and len(self._remotes[trainer.model]) > 0 and "rollout" in trainer.worker.hello.roles
        if cycles and trainer.cycle is None:
            self._begin(trainer)
            self._limit(trainer.model)
        elif not cycles:
            self._stop(trainer)

    def _cycling(self, model: str) -> list[_Trainer]:
        """Training workers that have cycles."""
        return [t for t in self._trainers.values() if t.model == model and t.cycle is not None]

    def _limit(self, model: str) -> None:
        """Use as many remote workers as pay off; all where nobody has cycles."""
        remotes = self._remotes[model]
        self._tell(remotes, remotes.limit(self.worthwhile(model)))

    def _tell(self, remotes: RemotePool, changed: Iterable[Worker]) -> None:
        """Give rollouts to those in use, and to no others; say why."""
        for worker in changed:
            spare = remotes.standby(worker)
            note = f"not used: beside {remotes.used} others it would not pay off at present" if spare else ""
            if note and not worker.status_message:
                log.info("worker %s is %s", worker.name, note, extra={"worker": worker.name})
            worker.status_message = note
            self._gate(worker, spare)

    def _gate(self, worker: Worker, closed: bool) -> None:
        if closed != (worker in self._gated):
            (self._gated.add if closed else self._gated.discard)(worker)
            self._rollouts.dispatch(worker)

    # --- cycles -------------------------------------------------------------------------------------------------------

    def _begin(self, trainer: _Trainer) -> None:
        """The next cycle."""
        trainer.cycle = CycleTimer()
        self._unopened += 1
        self._gate(trainer.worker, trainer.algorithm.seconds == 0)

    def _sampled(self, worker: Worker, request: SamplingRequest, tokens: int) -> None:
        if not self._unopened or request.adapter is None:
            return
        trainer = self._places.get(request.adapter.policy)
        if trainer is not None and (cycle := trainer.cycle) is not None and cycle.began is None:
            self._unopened -= 1
            cycle.began = self._read(trainer)
            trainer.algorithm.begin(self._remotes[trainer.model].used)
            self._due.notify()

    async def watch(self) -> None:
        """End seed phases in time, for ever."""
        while True:
            change, left = self._due.next, []
            for trainer in list(self._trainers.values()):
                cycle = trainer.cycle
                if cycle is not None and cycle.began is not None and cycle.trains is None:
                    seconds = cycle.began.now + trainer.algorithm.seconds - self._clock.monotonic()
                    if seconds > 0:
                        left.append(seconds)
                        self._gate(trainer.worker, False)
                    else:
                        self._train(trainer, cycle)
            await self._wait(change, min(left, default=None))

    async def _wait(self, change: asyncio.Event, seconds: float | None) -> None:
        """Until that is set, or so long."""
        waiting: list[asyncio.Future[Any]] = [asyncio.ensure_future(change.wait())]
        if seconds is not None:
            waiting.append(asyncio.ensure_future(self._clock.sleep(seconds)))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waiting:
                one.cancel()

    def _train(self, trainer: _Trainer, cycle: CycleTimer) -> None:
        """The seed phase is over."""
        cycle.trains = self._read(trainer)
        self._gate(trainer.worker, True)
        self._hand_off(trainer)

    def _hand_off(self, trainer: _Trainer) -> None:
        """What it generates still goes on elsewhere, as far as it would begin there at once."""
        worker, rollouts = trainer.worker, self._rollouts
        if not rollouts.pool.outstanding(worker):
            return
        others = [other for other in self._fleet.serving("rollout", trainer.model) if other not in self._gated]
        free = sum(max(0, other.hello.max_rows - rollouts.pool.outstanding(other)) for other in others)
        if free:
            rollouts.migrate(worker, free)

    def _operation(self, worker: Worker, message: Operation, done: protocol.OperationDone | None) -> None:
        """Something is to be trained, or was."""
        policy = message.policy
        if policy not in self._jobs:
            return
        place = self._places.get(policy)
        if place is None or place.worker is not worker:
            self._move(policy, worker)
        trainer = self._places[policy]
        if (cycle := trainer.cycle) is None:
            return
        if done is None and cycle.trains is not None:
            self._hand_off(trainer)
        elif done is not None and isinstance(message, protocol.OptimStep):
            again = policy in cycle.stepped
            cycle.stepped.add(policy)
            if again or not self._training.under_way(worker):
                self._end(trainer, cycle)

    def _end(self, trainer: _Trainer, cycle: CycleTimer) -> None:
        """A cycle is over; learn from it, begin the next."""
        measured = cycle.end(self._read(trainer))
        if measured is not None:
            self.waits["trainer"] += measured.trainer_wait
            self.waits["remote"] += measured.remote_wait
            trainer.figures = {
                "seconds/seed": measured.seeded,
                "seconds/trainer_wait": measured.trainer_wait,
                "seconds/remote_wait": measured.remote_wait,
                "remote_workers": measured.instances,
            }
            available, reserved = len(self._remotes[trainer.model]), len(self._cycling(trainer.model))
            trainer.algorithm.learn(measured, available=available, reserved=reserved)
            self._limit(trainer.model)
        self._unopened -= cycle.began is None
        self._begin(trainer)

    def _read(self, trainer: _Trainer) -> CycleSample:
        trained, remotes = self._training.busy(trainer.worker), self._remotes[trainer.model]
        return CycleSample(self._clock.monotonic(), trained, remotes.totals())

    def _stop(self, trainer: _Trainer) -> None:
        """No cycles any more: it generates whenever it can."""
        if trainer.cycle is not None:
            self._unopened -= trainer.cycle.began is None
            trainer.cycle = None
            self._gate(trainer.worker, False)
            self._limit(trainer.model)


def _remote(worker: Worker) -> bool:
    """Whether it generates and need not train."""
    hello = worker.hello
    return "rollout" in hello.roles and (hello.kind == "preemptible" or "train" not in hello.roles)
