"""The compute thread: owns torch, the base model, its engine and its trainer; other threads use it by calls.

Promises:

* Only this thread touches engine, trainer, adapters and tensors, but for the time in which it lends the engine.
  :meth:`Compute.call` runs a function in the thread that owns what it needs, between two slices, or, if it changes no
  training state, between two layers of a training slice. :meth:`Compute.post` does so for a caller that does not wait.
* Two modes. In *turns*, engine and trainer alternate in bounded slices on all cores and, while both have work, get the
  shares of their tenants (:mod:`rookery.scheduling.worker_time`), equal ones for a tenant alone; time spent idle gives
  no credit. *Beside*, a second thread, the engine lane, runs the engine's slices on some cores while this one runs the
  trainer's on the others. The time of both counts by their parts of the cores, of a GPU by halves while both compute;
  where one of them falls behind its share by :data:`BEHIND_SECONDS`, turns bring it level.
* Each mutable thing has one owner at a time. The trainer and its states, gradients and queue belong to this thread
  always. The engine, with its requests, KV cache, adapters, gate and cost tables, belongs to the lane from
  :meth:`Compute._start_lane` until :meth:`Compute._recall` has waited for the end of the lane's slice. Base weights are
  read-only. Status, outbox, calls and the clocks of the two have the lock, tenants' time has a separate one.
* While a worker holds requests with objectives, or held some lately, it works in turns, so that their gate counts
  slices as they are, and none waits for a slice on half of the cores; costs of slices beside each other are kept apart.
  Time of interactive requests counts for neither, but for that of tenants whose clients used more than their share
  while others have work: it counts as rollouts'. A training slice that would break one's objective waits, as does its
  rest between two layers, where the trainer allows it; rollouts wait with it, for as long as the shares allow. So does
  the rest of one, in turns, while it is the engine's turn, for a tenant that only has rollouts.
* The time for which the process is stopped (:mod:`rookery.worker.running_time`) is no slice's.
* Text, log-probabilities and gradients are the same bits in both modes, on the CPUs where lanes are possible
  (:mod:`rookery.worker.teams`). On a GPU the lane has a separate stream, which has not been measured.
* Without work the threads sleep until the next call.
* Tokens and results wait in an outbox; ``on_output`` is called, in the thread that fills it, when the outbox stops
  being empty.
* An exception in a call is raised to the task that awaits it; one in a posted function is logged and counted. An
  exception in a slice, or one in a call that breaks the worker, ends both threads: ``failure`` holds it, and the outbox
  stays readable. One of the engine within a training slice is never taken for one of the training operation.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import compress
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from rookery import protocol
from rookery.errors import count_of
from rookery.scheduling.pipelines import NO_WORK, TAKING_TURNS, LaneChoice
from rookery.scheduling.worker_time import TimeSlice, divide_slices, next_slice
from rookery.settings import Settings
from rookery.worker import teams
from rookery.worker.compute_status import ComputeStatus, Half, beat_of, engine_half, trainer_half
from rookery.worker.core import NO_TRAINING, WorkerCore, load_core
from rookery.worker.device import own_stream
from rookery.worker.failures import WorkerBroken
from rookery.worker.lane_plan import LanePlan, lane_threads, parts_of, splits, trainer_threads
from rookery.worker.running_time import running_time
from rookery.worker.trainer.operation_queue import TrainerResult
from rookery.worker.transfer.http import is_plain, one_line

log = logging.getLogger("rookery.worker.compute")

T = TypeVar("T")


INNERMOST_CALLS = 4
"""Calls of a slice that does not end, in the log: the innermost ones."""

CLIENTS = "a client's request is in the engine"
"""A reason for turns where the planner decides: durations of clients' requests are not predicted."""
CROWDED = "threads wait for cores, which other programs or a quota take"

STUCK_SECONDS = 5.0
"""Beside each other, one lane's slices count as progress only while the other's present slice, or layer, is not older:
else a lane that is stuck would hide behind one that is not."""

TRAINED = "worker_trained_tokens"
"""The trainer's gauge of tokens."""

BEHIND_SECONDS = 1.0
"""Beside each other, engine or trainer may fall behind its share by so much before turns bring it level: about one
training slice, below which turns themselves are no closer."""


@dataclass(eq=False)
class Lane:
    """The engine lane, from the moment in which it gets the engine until that is recalled. It is there while engine and
    trainer compute beside each other, and in turns there is none. Its fields have the lock."""

    threads: int
    """Threads with which it computes."""
    parts: tuple[float, float]
    """The parts of the device with which the lane and the trainer compute."""
    thread: threading.Thread = field(init=False)
    began: float = field(default_factory=running_time)
    computes: bool = True
    """Whether it computes now, rather than waits for work."""
    recalled: bool = False


Touches = Literal["engine", "queue", "states"]
"""The needs of a call: the engine only; or it reads training states, and adds operations to the trainer's queue; or it
creates, replaces or deletes training states or operations, which a training slice may be using."""

Call = tuple[Future[Any], Callable[[WorkerCore], Any], Touches]
"""A function that waits to be run in the thread."""


class Compute:
    """The thread. Methods are for other threads."""

    def __init__(
        self,
        prepare: Callable[[], Path],
        settings: Settings,
        on_output: Callable[[], object],
        *,
        trains: bool = True,
        load: Callable[..., WorkerCore] = load_core,
        behind_seconds: float = BEHIND_SECONDS,
        plan: Callable[..., LanePlan] = LanePlan,
    ) -> None:
        """``prepare()`` returns the base model's folder and creates it if needed; it runs in the thread, and its
        exception ends the thread as :attr:`failure`. ``trains``: whether the worker has that role. ``load`` makes the
        engine and the trainer of that folder, with the arguments of :func:`~rookery.worker.core.load_core`; ``plan``
        makes the planner of lanes."""
        self._prepare = prepare
        self._load, self._make_plan = load, plan
        self._behind_seconds = behind_seconds
        self._trains = trains
        self._settings = settings
        self._on_output = on_output
        self._changed = threading.Condition()
        self._calls: list[Call] = []
        self._slices: list[TimeSlice] = []
        """The engine's and the trainer's."""
        self._halves = Half(), Half()
        self._stopping = False
        self.lanes = settings.worker.lanes
        """Its mode, which may change at any time."""
        self._lane: Lane | None = None
        """While it owns the engine. The fields below have the lock."""
        self._clients = False
        """Whether the engine holds requests with objectives, or expects some, as its owner published it."""
        self._crowded = False
        """Whether other programs want the cores."""
        self._plan: LanePlan | None = None
        self._beside_seconds = 0.0
        self._late: TimeSlice | None = None
        """Engine or trainer, while turns bring it level with its share."""
        self._engine_failure: BaseException | None = None
        """Of a slice of its lane, or of one between two layers of a training slice."""
        self._chunks: list[protocol.TokenChunk] = []
        self._results: list[TrainerResult] = []
        self.threads = 0
        self.failed_posts = 0
        """Functions of :meth:`post` that raised an exception."""
        self.status = ComputeStatus()
        self.failure: BaseException | None = None
        self.ready: Future[WorkerCore] = Future()
        """The loaded core. Other threads may read its device, dtype and engine limits; all else needs a call."""
        self.ended: Future[None] = Future()
        """Done when the thread has ended, for whatever reason."""
        self._thread = threading.Thread(target=self._main, name="compute", daemon=True)

    def start(self) -> None:
        running_time.watch()
        self._thread.start()

    def stop(self) -> None:
        """End after the present slice; see :attr:`ended`."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def crowd(self, crowded: bool) -> None:
        """Other programs want the cores, or no longer: while they do, the planner chooses turns and does not learn."""
        self._crowded = crowded

    async def call(self, function: Callable[[WorkerCore], T], *, touches: Touches = "states") -> T:
        """The result of ``function``, which runs between two slices, or within one where what it ``touches`` allows
        that. Calls keep their order, but those of the engine may come before others. A call that the thread's end
        leaves unanswered is cancelled."""
        return await asyncio.wrap_future(self._submit(function, touches))

    def post(
        self, name: str, function: Callable[[WorkerCore], object], *, touches: Touches = "states", **concerns: object
    ) -> None:
        """Run ``function`` in the order of :meth:`call`; nobody waits for it. An exception is logged as a failure of
        ``name``, with the fields of the log that it ``concerns`` (tenant, policy, request …), and counted."""

        def ended(future: Future[object]) -> None:
            if future.cancelled() or (error := future.exception()) is None:
                return
            with self._changed:
                self.failed_posts += 1
            trace = None if is_plain(error) else error
            log.warning("%s failed: %s", name, one_line(error), exc_info=trace, extra=concerns)

        self._submit(function, touches).add_done_callback(ended)

    def _submit(self, function: Callable[[WorkerCore], T], touches: Touches) -> Future[T]:
        future: Future[T] = Future()
        with self._changed:
            if self.ended.done():
                future.cancel()
            else:
                self._calls.append((future, function, touches))
                self._changed.notify_all()
        return future

    async def describe(self, seconds: float) -> str:
        """The reason why the thread's work waits; where it does not answer within these ``seconds``, the lines of code
        of its slice."""
        answer = asyncio.ensure_future(self.call(lambda core: core.engine.describe(), touches="engine"))
        await asyncio.wait({answer}, timeout=seconds)
        trainer, story = self._slices[1] if self._slices else None, ""
        if answer.done() and not answer.cancelled():
            queued = count_of(self.status.beat.training, "training operation is", "training operations are")
            story = f"{answer.result()}; {queued} queued"
            if self._lane is None or trainer is None or not _stuck(trainer):
                return story
            story += "; beside it, "
        else:
            answer.cancel()
        lane, idents = self._lane, [self._thread.ident]
        if lane is not None and not story:
            idents.insert(0, lane.thread.ident)
        frames = " and in ".join(_innermost(ident) for ident in idents)
        return f"{story}a slice has not ended, it is in {frames}"

    def take(self) -> tuple[list[protocol.TokenChunk], list[TrainerResult]]:
        """Empty the outbox."""
        with self._changed:
            chunks, self._chunks = self._chunks, []
            results, self._results = self._results, []
        return chunks, results

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            self.threads = teams.reserve(self._settings.worker.threads)
            core = self._load(self._prepare(), self._settings, self._between_layers, trains=self._trains)
            self.ready.set_result(core)
            try:
                self._run(core)
            finally:
                self._recall(core)
                core.engine.close()
            if self._engine_failure is not None:
                raise self._engine_failure
        except BaseException as error:
            self.failure = error
            if not self.ready.done():
                self.ready.set_exception(error)
        finally:
            with self._changed:
                self.ended.set_result(None)
                for future, *_ in self._calls:
                    future.cancel()
            self._on_output()

    def _run(self, core: WorkerCore) -> None:
        engine = TimeSlice(core.engine, lambda: core.engine.active + core.engine.waiting > 0)
        trainer = TimeSlice(core.queue, lambda: core.queue.pending > 0)
        self._slices = [engine, trainer]
        if self.lanes == "auto" and core.slowdowns is not None:
            depth = self._settings.worker.plan_depth
            modes = splits(self.threads, core.implementation.device)
            self._plan = self._make_plan(modes, core.slowdowns, core.gate.costs, depth)
        while True:
            if self._lane is not None and not trainer.busy():
                self._recall(core)
                self._publish(core, stepped=False)
            with self._changed:
                self._changed.wait_for(
                    lambda: self._calls or self._stopping or self._engine_failure or engine.busy() or trainer.busy()
                )
                if self._stopping:
                    return
                calls = self._take_calls()
            self._answer(core, calls)
            if trainer.busy() and self._runs_beside(core):
                self._step(core, trainer)
                continue
            self._recall(core)
            if self._engine_failure is not None:
                return
            core.gate.training_waits = False
            self._divide(core)
            chosen = next_slice(self._slices, core.gate.allows_training)
            if chosen is not None and not self._step(core, chosen):  # it gives its turn to the other
                for other in self._slices:
                    if other is not chosen and other.busy():
                        self._step(core, other)

    def _take_calls(self, *, within: bool = False, lane: bool = False) -> list[Call]:
        """The calls that the calling thread may run now: the ``lane``, or this one, ``within`` a slice or between
        two. With the lock."""
        able = within_slice(self._calls)[0] if within else list(self._calls)
        if lane or self._lane is not None:
            able = [call for call in able if (call[2] == "engine") == lane]
        taken = set(map(id, able))
        self._calls = [call for call in self._calls if id(call) not in taken]
        return able

    def _answer(self, core: WorkerCore, calls: list[Call], *, lane: bool = False) -> None:
        broken: WorkerBroken | None = None
        for future, function, _ in calls:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(core))
                except Exception as error:  # raised to the caller, or logged
                    future.set_exception(error)
                    broken = error if isinstance(error, WorkerBroken) else broken
        if broken is not None:
            raise broken
        if calls:
            self._publish(core, stepped=False, lane=lane)

    def _divide(self, core: WorkerCore) -> None:
        """The shares of engine and trainer. A tenant whose rollouts all wait for rows uses no time."""
        rows = self._halves[0].rows
        having_rows = [name for name in rows if rows[name]] if self._lane is not None else core.engine.sharing()
        core.gate.trained = core.queue.tenants()
        divide_slices(self._slices, core.time, having_rows, core.gate.trained)

    def _step(self, core: WorkerCore, chosen: TimeSlice, *, lane: bool = False) -> bool:
        threads, trained = self._lane_threads, core.queue.gauges().get(TRAINED, 0.0) if not lane else 0.0
        chosen.charged = chosen.began = running_time()
        chosen.present, chosen.full = 0.0, True
        stepped = chosen.steppable.step()
        self._charge(core, chosen)
        if chosen is self._slices[1]:
            if not threads and self._lane is None:
                core.gate.costs.record("train", 1, chosen.present)
            trained = core.queue.gauges().get(TRAINED, 0.0) - trained
        if stepped:
            whole = chosen.full and threads == self._lane_threads
            self._observe(core, chosen, trained, threads if whole else None)
        chosen.began = None
        self._publish(core, stepped=stepped, lane=lane)
        return stepped

    def _observe(self, core: WorkerCore, used: TimeSlice, trained: float, threads: int | None) -> None:
        """The planner learns of a slice beside a lane of so many ``threads``; None: for a part of the time, or on cores
        that other programs want."""
        if self._plan is None:
            return
        with self._changed:
            if used is self._slices[1]:
                rows = sum(self._halves[0].rows.values())
                self._plan.on_trainer(used.present, core.queue.tenant_tokens(), trained, threads, rows)
            else:
                kind, size, seconds = core.gate.last
                tokens = core.engine.tenant_tokens() if core.engine.tenants() else {}  # the planner knows no clients
                self._plan.on_engine(kind, size, seconds, threads, tokens)

    def _charge(self, core: WorkerCore, used: TimeSlice) -> None:
        """The time since the last call is that of ``used``."""
        now = running_time()
        spent, used.charged = now - used.charged, now
        engine, trainer = self._slices
        lane = self._lane
        own = spent * (lane.parts[used is trainer] if lane is not None else 1.0)
        with self._changed:
            if core.gate.training_waits:  # rollouts make room for training: the time is training's
                trainer.charge(own)
            elif used is engine:  # each of its tenants waits for all of it
                own *= core.gate.rollout_share
                engine.charge(own)
                tenants = [tenant for tenant, tokens in core.engine.tenant_tokens().items() if tokens]
                core.time.charge(own, core.time.weights_within(tenants))
            else:
                trainer.charge(own)
                core.time.charge(own, core.queue.tenant_tokens())
        used.seconds += spent
        used.present += spent
        used.full &= not self._crowded and (lane is None or lane.computes)

    def _between_layers(self) -> None:
        """Within a training slice: answer what may run there, and let the engine step while a request's objective does
        not allow the rest of the slice, or it is the engine's turn and a tenant has work only there; or lend it to the
        lane."""
        core, (engine, trainer) = self.ready.result(), self._slices
        self._charge(core, trainer)
        trainer.began = trainer.charged
        if self._runs_beside(core):
            with self._changed:
                calls = self._take_calls(within=True)
            self._answer(core, calls)
            return
        self._recall(core)
        stepped = self._engine_failure is None
        while stepped and not self._stopping:
            with self._changed:
                calls = self._take_calls(within=True)
            self._answer(core, calls)
            if not engine.busy():
                break
            self._divide(core)
            trainers_turn = next_slice(self._slices) is trainer
            if not core.gate.allows_training(trainer.present):
                core.gate.training_waits = trainers_turn
            elif trainers_turn or not core.time.only_in_engine:
                break
            try:
                stepped = self._step(core, engine)
            except BaseException as error:  # the trainer would take it for one of its pass
                self._engine_failure, stepped = error, False
        core.gate.training_waits = False
        trainer.charged = trainer.began = running_time()

    # --- the engine lane --------------------------------------------------------------------------------------------

    @property
    def _lane_threads(self) -> int:
        """Threads with which the lane computes; 0 in turns."""
        return self._lane.threads if self._lane is not None else 0

    def _engine_threads(self, core: WorkerCore) -> int:
        """How many threads an engine lane computes with; 0: engine and trainer take turns. This is the only place that
        decides it."""
        if self.lanes == "turns" or core.why_turns():
            return 0
        if self.lanes == "beside" or self._plan is None:
            return lane_threads(self.threads)
        if self._crowded:
            return 0
        with self._changed:
            work = self._plan.due(self._rows(core), core.queue.tenants())
        return self._plan.choose(work).threads

    def _runs_beside(self, core: WorkerCore) -> bool:
        """Whether the trainer's slice, or its next layer, runs beside the engine's; then the engine is lent, if it has
        work."""
        expected = core.gate.expects_clients if self._lane is None else self._clients
        if expected or self._stopping or self._engine_failure is not None:
            return False
        threads = self._engine_threads(core)
        if self._lane is None:
            with self._changed:
                work = self._engine_has_work()
            if not threads or not work or self._behind(core):
                return False
        elif threads != self._lane_threads or self._behind(core):
            return False
        computes = self._lane is None or self._lane.computes
        trainers = trainer_threads(self.threads, threads, computes=computes)
        parts = parts_of(core.implementation.device, self.threads, threads, computes=computes)
        if self._lane is None:
            self._start_lane(core, threads, parts)
        else:
            self._lane.parts = parts
        teams.use(trainers)
        return True

    def _engine_has_work(self) -> bool:
        """Whether there is a slice of the engine, or a call for its owner. With the lock."""
        return self._slices[0].busy() or any(call[2] == "engine" for call in self._calls)

    def _behind(self, core: WorkerCore) -> bool:
        """Whether engine or trainer is behind its share, so that turns bring it level. Where both work for the same
        tenants, none of these pays for another's work."""
        with self._changed:
            self._divide(core)
            next_slice(self._slices)  # one that was idle is level
            engine, trainer = self._slices
            lead = trainer.clock - engine.clock
            if core.time.same_tenants or not engine.busy():
                engine.clock = trainer.clock = max(engine.clock, trainer.clock)
                self._late = None
            elif abs(lead) > self._behind_seconds:
                self._late = engine if lead > 0 else trainer
            elif self._late is not None and (lead > 0) != (self._late is engine):
                self._late = None
        return self._late is not None

    def _rows(self, core: WorkerCore) -> Mapping[str, int]:
        """The rows of each tenant in the engine, as this thread may see them."""
        return self._halves[0].rows if self._lane is not None else core.engine.tenants()

    def _start_lane(self, core: WorkerCore, threads: int, parts: tuple[float, float]) -> None:
        """The engine belongs to a lane of so many threads, until :meth:`_recall`."""
        core.gate.training_waits, core.gate.beside = False, True
        if core.implementation.device.startswith("cuda"):
            torch.cuda.synchronize()  # the lane's stream may read what this thread's stream wrote
        lane = Lane(threads, parts)
        lane.thread = threading.Thread(target=self._run_lane, args=(core, lane), name="engine", daemon=True)
        self._lane = lane  # whole: other threads read it
        lane.thread.start()

    def _recall(self, core: WorkerCore) -> None:
        """The engine belongs to the compute thread again, which computes with all cores; nothing if it is not lent."""
        if (lane := self._lane) is None:
            return
        with self._changed:
            lane.recalled = True
            self._changed.notify_all()
        lane.thread.join()  # its team ends with it
        core.gate.beside = False
        self._beside_seconds += running_time() - lane.began
        if core.implementation.device.startswith("cuda"):
            torch.cuda.synchronize()
        with self._changed:
            self._lane = None
        teams.use(self.threads)

    def _run_lane(self, core: WorkerCore, lane: Lane) -> None:
        """The engine's slices, until it is recalled."""
        engine = self._slices[0]
        try:
            teams.use(lane.threads)
            with own_stream(torch.device(core.implementation.device)):
                while True:
                    with self._changed:
                        lane.computes = self._engine_has_work()
                        self._changed.wait_for(lambda: lane.recalled or self._engine_has_work())
                        if lane.recalled:
                            return
                        lane.computes = True
                        calls = self._take_calls(lane=True)
                    self._answer(core, calls, lane=True)
                    if engine.busy():
                        self._step(core, engine, lane=True)
        except BaseException as error:
            with self._changed:
                self._engine_failure = error
                self._changed.notify_all()

    def _describe_lanes(self, core: WorkerCore) -> str:
        """For the operator: the mode, and why."""
        if core.no_lanes == NO_TRAINING:
            return ""
        if self._lane is None:
            return f"turns: {self._why_turns(core)}"
        on_gpu = core.implementation.device.startswith("cuda")
        lanes = "two streams" if on_gpu else f"{self._lane_threads} of {count_of(self.threads, 'thread')} generate"
        if gain := self._predicted_gain():
            return f"beside: {lanes}, {gain:.0%} of the time saved by prediction"
        choice = self._choice()
        return f"beside: {lanes}, {choice.why}" if choice is not None and choice.active else f"beside: {lanes}"

    def _choice(self) -> LaneChoice | None:
        """The planner's, where it decides."""
        return self._plan.choice if self._plan is not None and self.lanes == "auto" else None

    def _predicted_gain(self) -> float:
        """The gain of the lanes that run; 0 where nothing was predicted."""
        choice = self._choice() if self._lane is not None else None
        return choice.gain if choice is not None and choice.active else 0.0

    def _slowdowns(self) -> tuple[float, float]:
        if self._plan is None or self._lane is None:
            return TAKING_TURNS
        return self._plan.slowdowns(sum(self._halves[0].rows.values()), self._lane_threads)

    def _why_turns(self, core: WorkerCore) -> str:
        """The reason why engine and trainer take turns; for this thread, while the engine is not lent."""
        choice = self._choice()
        if core.no_lanes or self.lanes == "turns":
            return core.no_lanes or "as set"
        if refused := core.why_turns():
            return refused
        if self._crowded and choice is not None:
            return CROWDED
        if self._clients:
            return "requests have objectives"
        if not all(part.busy() for part in self._slices):
            return NO_WORK
        if choice is not None and not self._halves[0].rows:
            return CLIENTS
        if self._late is not None:
            return "one of both catches up with its share"
        return NO_WORK if choice is None or choice.active else choice.why

    # --- status -----------------------------------------------------------------------------------------------------

    def _publish(self, core: WorkerCore, *, stepped: bool, lane: bool = False) -> None:
        """Update status and outbox: after every slice, and after calls so that a stuck slice shows its work. Each
        thread publishes what it owns."""
        decode, train = self._slices
        of_engine: Half | None = None
        of_trainer: Half | None = None
        chunks: list[protocol.TokenChunk] = []
        results: list[TrainerResult] = []
        if lane or self._lane is None:
            self._clients = core.gate.expects_clients
            chunks, of_engine = core.engine.drain(), engine_half(core, decode)
        if not lane:
            gauges = {
                "lanes_beside": float(self._lane is not None),
                "lanes_beside_seconds": self._beside_seconds,
                "lanes_predicted_gain": self._predicted_gain(),
            }
            results, of_trainer = core.queue.drain(), trainer_half(core, train, gauges)
        with self._changed:
            if self._plan is not None and of_trainer is not None:
                self._plan.end_stages("trainer", core.queue.tenants())
            if self._plan is not None and of_engine is not None and (of_engine.rows or not decode.busy()):
                self._plan.end_stages("engine", of_engine.rows)  # without rows, clients may be there
            engine, trainer = self._halves = of_engine or self._halves[0], of_trainer or self._halves[1]
            counts = stepped and not (self._lane is not None and _stuck(train if lane else decode))
            beat = beat_of(
                engine, trainer, progress=self.status.beat.progress + counts, lanes=self._describe_lanes(core),
                slowdowns=self._slowdowns(),
            )  # fmt: skip
            self.status = ComputeStatus(beat, engine.adapters)
            was_empty = not (self._chunks or self._results)
            self._chunks += chunks
            self._results += results
        if was_empty and (chunks or results):
            self._on_output()


def _stuck(used: TimeSlice) -> bool:
    began = used.began
    return began is not None and running_time() - began > STUCK_SECONDS


def _innermost(ident: int | None) -> str:
    """The lines of code in which a thread is."""
    calls = traceback.extract_stack(sys._current_frames().get(ident or 0))
    named = [f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in calls]
    return " < ".join(reversed(named[-INNERMOST_CALLS:]))


def within_slice(calls: list[Call]) -> tuple[list[Call], list[Call]]:
    """The calls that may run within a training slice, and the others: operations and commits do not overtake what may
    change the states that they name."""
    first = next((at for at, (*_, touches) in enumerate(calls) if touches == "states"), len(calls))
    able = [touches == "engine" or at < first for at, (*_, touches) in enumerate(calls)]
    return list(compress(calls, able)), list(compress(calls, (not one for one in able)))
