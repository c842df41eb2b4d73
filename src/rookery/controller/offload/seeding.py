"""Seeding (RLBoost): training workers generate at the beginning of each cycle, then leave generation to remote workers
and train.

* A training worker has cycles while it trains the policy of a running job that can train while its rollouts run (in
  portions, on older versions, or interleaved with another policy), and while remote workers serve its base model: those
  that do not train, and are preemptible or generate only. Otherwise this module changes nothing.
* A cycle begins when the one before ends. Its seed phase lasts until T_seed seconds after the first token that was
  generated for one of the worker's policies; its unfinished requests then move to other workers, as far as these have
  free rows. In the train phase the worker gets interactive requests only.
* A cycle ends when an optimizer step is answered and the worker has nothing else to train, or the step is the second
  one of its policy in this cycle. With one on-policy job a cycle is the paper's step.
* :mod:`rookery.scheduling.offload` computes T_seed and the number of remote workers that pay off. All state is in
  memory: a restarted service learns again from the first cycle.
* Times are measured from a cycle's first token. *trainer_wait* is the time of the train phase without an operation in
  flight at the training worker: its jobs then wait for rollouts. *remote_wait* is the mean time for which the remote
  workers in use had no request.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from rookery import protocol
from rookery.aio import Signal, first_of
from rookery.clock import Clock
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.fleet.worker import Worker
from rookery.controller.offload.pool import RemotePool, UsageTotals
from rookery.controller.rollout.request import SamplingRequest
from rookery.controller.rollout.scheduler import RolloutScheduler
from rookery.controller.training.dispatcher import TrainingDispatcher
from rookery.errors import count_of, next_state
from rookery.scheduling.offload import Cycle, OffloadPlanner
from rookery.settings import Settings

log = logging.getLogger("rookery.controller.offload.seeding")

ETA = 3.0
"""Divisor of a cycle's difference of waits in the update of T_seed (3 in the authors' code). A smaller value learns
faster and oscillates where training workers generate much faster than remote ones."""


@dataclass(frozen=True, slots=True)
class CycleSample:
    """Readings at one moment, in seconds: the clock, the training worker's busy time, the remote workers' usage."""

    now: float
    trained: float
    remotes: UsageTotals


Phase = Literal[
    "waiting",  # for its first token
    "seeding",  # the worker generates
    "training",  # the worker trains, until the policies have stepped
]
PhaseEvent = Literal["first token", "time over"]

PHASES: dict[tuple[Phase, PhaseEvent], Phase] = {
    ("waiting", "first token"): "seeding",
    ("seeding", "time over"): "training",
}
"""The phase of a cycle that follows each event."""


@dataclass
class CycleTimer:
    """Measures one cycle of a training worker."""

    phase: Phase = "waiting"
    samples: dict[Phase, CycleSample] = field(default_factory=dict)
    """At the begin of each phase but the first."""
    stepped: set[str] = field(default_factory=set)
    """Policies that took an optimizer step in it."""

    def advance(self, event: PhaseEvent, sample: CycleSample) -> None:
        """Raises ``RuntimeError`` for an event that its phase does not have."""
        self.phase = next_state(PHASES, self.phase, event, "a cycle")
        self.samples[self.phase] = sample

    def seed_left(self, seconds: float, now: float) -> float:
        """The rest of a seed phase that takes ``seconds``."""
        return self.samples["seeding"].now + seconds - now

    def end(self, now: CycleSample) -> Cycle | None:
        """The finished cycle; None where no token was generated, or no remote worker was there."""
        if self.phase == "waiting":
            return None
        began, trains = self.samples["seeding"], self.samples.get("training", now)
        if now.now <= began.now:
            return None
        used, busy = now.remotes.used - began.remotes.used, now.remotes.busy - began.remotes.busy
        if used <= 0:
            return None
        instances = used / (now.now - began.now)
        return Cycle(
            seeded=trains.now - began.now,
            trainer_wait=max(0.0, now.now - trains.now - (now.trained - trains.trained)),
            remote_wait=max(0.0, used - busy) / instances,
            train=now.trained - began.trained,
            remote=busy / instances,
            instances=instances,
        )


@dataclass(eq=False)
class _Trainer:
    """A training worker, and the policies of jobs that train there."""

    worker: Worker
    planner: OffloadPlanner
    policies: set[str] = field(default_factory=set)
    cycle: CycleTimer | None = None
    """None while it has no cycles: it generates whenever it can."""
    figures: dict[str, float] = field(default_factory=dict)
    """Metrics of its last complete cycle."""

    @property
    def model(self) -> str:
        return self.worker.hello.model


class Seeding:
    """Opens and closes workers for rollouts, by cycle."""

    planner = OffloadPlanner
    """The class that learns how long a training worker seeds."""

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
        self._trainer_of: dict[str, _Trainer] = {}
        """By policy."""
        self.planners: dict[str, OffloadPlanner] = {}
        """By the worker's name: it may reconnect."""
        self._remotes: defaultdict[str, RemotePool] = defaultdict(lambda: RemotePool(clock, rollouts.pool.busy_seconds))
        """By base model."""
        self._due = Signal()
        """Notified when a cycle has got its first token."""
        self.waits = {"trainer": 0.0, "remote": 0.0}
        """Seconds, of all cycles so far."""

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def join(self, policy: str, *, overlaps: bool) -> None:
        """A job runs that trains ``policy``; ``overlaps``: it can train while its rollouts run."""
        self._jobs[policy] = overlaps

    def leave(self, policy: str) -> None:
        """The job has ended or was paused; calling it twice is fine."""
        self._jobs.pop(policy, None)
        self._move(policy, None)

    def figures(self, policy: str) -> dict[str, float]:
        """Metrics of the last cycle of the worker that trains ``policy``; empty without one."""
        trainer = self._trainer_of.get(policy)
        return dict(trainer.figures) if trainer is not None and trainer.cycle is not None else {}

    def gauges(self) -> dict[str, float]:
        """The longest T_seed of the training workers with cycles; remote workers in use and on standby."""
        cycling = [trainer for trainer in self._trainers.values() if trainer.cycle is not None]
        return {
            "seed_seconds": max((trainer.planner.seconds for trainer in cycling), default=0.0),
            "remote_workers_used": sum(remotes.used for remotes in self._remotes.values()),
            "remote_workers_unused": sum(len(remotes) - remotes.used for remotes in self._remotes.values()),
        }

    def worthwhile(self, model: str) -> int | None:
        """How many remote workers of a base model pay off now; None where no worker has cycles: all may."""
        return max((trainer.planner.max_remote for trainer in self._cycling(model)), default=None)

    # --- training workers and remote workers --------------------------------------------------------------------------

    def on_worker_joined(self, worker: Worker) -> None:
        if _remote(worker) and self._remotes[worker.hello.model].full:
            self._rollouts.closed.add(worker)  # it would stand by: it gets no request in between

    def on_worker_changed(self, worker: Worker) -> None:
        trainer = self._trainers.get(worker)
        if trainer is not None and not (worker.working and "train" in worker.roles):
            for policy in sorted(trainer.policies):
                self._move(policy, None)
        self._update_pool(worker)
        if not worker.working:
            self._rollouts.closed.discard(worker)
        if worker.state == "gone":
            self.planners.pop(worker.name, None)

    def _update_pool(self, worker: Worker) -> None:
        """Add it to the pool of remote workers, or remove it."""
        remotes = self._remotes[worker.hello.model]
        before = len(remotes)
        remote = _remote(worker) and worker.state == "serving" and worker not in self._trainers
        if remote and worker not in remotes:
            self._apply_pool(remotes, remotes.add(worker))
        elif not remote and worker in remotes:
            self._apply_pool(remotes, remotes.remove(worker))
        if bool(before) != bool(remotes):
            for trainer in self._trainers.values():
                if trainer.model == worker.hello.model:
                    self._review(trainer)

    def _move(self, policy: str, worker: Worker | None) -> None:
        """``policy`` trains at ``worker`` from now on; None: nowhere."""
        before = self._trainer_of.pop(policy, None)
        if before is not None:
            before.policies.discard(policy)
            if before.policies:
                self._review(before)
            else:
                self._stop(before)
                del self._trainers[before.worker]
                self._update_pool(before.worker)
        if worker is not None:
            trainer = self._trainers.get(worker)
            if trainer is None:
                trainer = self._trainers[worker] = _Trainer(worker, self._planner(worker))
                self._update_pool(worker)
            trainer.policies.add(policy)
            self._trainer_of[policy] = trainer
            self._review(trainer)

    def _planner(self, worker: Worker) -> OffloadPlanner:
        if worker.name not in self.planners:
            settings, reserved = self._settings, 1 + len(self._cycling(worker.hello.model))
            self.planners[worker.name] = self.planner(
                initial=settings.offload.seed_initial_seconds, eta=ETA, reserved=reserved
            )
        return self.planners[worker.name]

    def _review(self, trainer: _Trainer) -> None:
        """Begin or end its cycles."""
        overlaps = len(trainer.policies) > 1 or any(self._jobs[policy] for policy in trainer.policies)
        cycles = overlaps and len(self._remotes[trainer.model]) > 0 and "rollout" in trainer.worker.roles
        if cycles and trainer.cycle is None:
            self._begin(trainer)
            self._limit(trainer.model)
        elif not cycles:
            self._stop(trainer)

    def _cycling(self, model: str) -> list[_Trainer]:
        """Training workers with cycles."""
        return [t for t in self._trainers.values() if t.model == model and t.cycle is not None]

    def _limit(self, model: str) -> None:
        """Use as many remote workers as pay off; all where no worker has cycles."""
        remotes = self._remotes[model]
        self._apply_pool(remotes, remotes.limit(self.worthwhile(model)))

    def _apply_pool(self, remotes: RemotePool, changed: Iterable[Worker]) -> None:
        """Open the remote workers in use, close those on standby, and note the reason in their status."""
        for worker in changed:
            standby = remotes.standby(worker)
            note = (
                f"standby: in addition to {count_of(remotes.used, 'other')} it would not pay off now" if standby else ""
            )
            if note and not worker.status_message:
                log.info("worker %s is %s", worker.name, note, extra={"worker": worker.name})
            worker.status_message = note
            self._set_closed(worker, standby)

    def _set_closed(self, worker: Worker, closed: bool) -> None:
        held = self._rollouts.closed
        if closed != (worker in held):
            (held.add if closed else held.discard)(worker)
            self._rollouts.on_closed_changed(worker)

    # --- cycles -------------------------------------------------------------------------------------------------------

    def _begin(self, trainer: _Trainer) -> None:
        """Begin the next cycle."""
        trainer.cycle = CycleTimer()
        self._set_closed(trainer.worker, trainer.planner.seconds == 0)

    def on_tokens(self, request: SamplingRequest) -> None:
        if request.adapter is None:
            return
        trainer = self._trainer_of.get(request.adapter.policy)
        if trainer is not None and (cycle := trainer.cycle) is not None and cycle.phase == "waiting":
            cycle.advance("first token", self._sample(trainer))
            trainer.planner.begin(self._remotes[trainer.model].used)
            self._due.notify()

    async def watch(self) -> None:
        """End seed phases in time, until cancelled."""
        while True:
            change, left = self._due.next, []
            for trainer in list(self._trainers.values()):
                cycle = trainer.cycle
                if cycle is not None and cycle.phase == "seeding":
                    seconds = cycle.seed_left(trainer.planner.seconds, self._clock.monotonic())
                    if seconds > 0:
                        left.append(seconds)
                        self._set_closed(trainer.worker, False)
                    else:
                        self._train(trainer, cycle)
            timers = [self._clock.sleep(min(left))] if left else []
            async with first_of(change.wait(), *timers):
                pass

    def _train(self, trainer: _Trainer, cycle: CycleTimer) -> None:
        """End the seed phase."""
        cycle.advance("time over", self._sample(trainer))
        self._set_closed(trainer.worker, True)
        self._migrate(trainer)

    def _migrate(self, trainer: _Trainer) -> None:
        """Move its running requests to other workers, as far as those have free rows."""
        worker, rollouts = trainer.worker, self._rollouts
        if not rollouts.pool.outstanding(worker):
            return
        others = [other for other in self._fleet.serving("rollout", trainer.model) if other not in rollouts.closed]
        free = sum(max(0, other.hello.max_rows - rollouts.pool.outstanding(other)) for other in others)
        if free:
            rollouts.migrate(worker, free)

    def on_operation(
        self, worker: Worker, operation: protocol.TrainingOperation, done: protocol.OperationDone | None
    ) -> None:
        policy = operation.policy
        if policy not in self._jobs or (isinstance(operation, protocol.ForwardBackward) and operation.is_share):
            return  # a share that another worker computes
        trainer = self._trainer_of.get(policy)
        if trainer is None or trainer.worker is not worker:
            self._move(policy, worker)
        trainer = self._trainer_of[policy]
        if (cycle := trainer.cycle) is None:
            return
        if done is None and cycle.phase == "training":
            self._migrate(trainer)
        elif done is not None and isinstance(operation, protocol.OptimStep):
            again = policy in cycle.stepped
            cycle.stepped.add(policy)
            if again or not self._training.in_flight(worker):
                self._end(trainer, cycle)

    def _end(self, trainer: _Trainer, cycle: CycleTimer) -> None:
        """End a cycle: learn from it and begin the next."""
        measured = cycle.end(self._sample(trainer))
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
            trainer.planner.learn(measured, available=available, reserved=reserved)
            self._limit(trainer.model)
        self._begin(trainer)

    def _sample(self, trainer: _Trainer) -> CycleSample:
        trained, remotes = self._training.busy_seconds(trainer.worker), self._remotes[trainer.model]
        return CycleSample(self._clock.monotonic(), trained, remotes.totals())

    def _stop(self, trainer: _Trainer) -> None:
        """End its cycles: it generates whenever it can."""
        if trainer.cycle is not None:
            trainer.cycle = None
            self._set_closed(trainer.worker, False)
            self._limit(trainer.model)


def _remote(worker: Worker) -> bool:
    """Whether it generates and need not train: it is preemptible, or has no training role."""
    roles = worker.roles
    return "rollout" in roles and (worker.hello.kind == "preemptible" or "train" not in roles)
