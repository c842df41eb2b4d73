"""The compute thread: owns torch, the base model, its engine and its trainer; other threads use it by calls.

Promises:

* Only this thread touches engine, trainer, adapters and tensors. :meth:`Compute.call` runs a function in it, between
  two slices, or, if it changes no training state, between two layers of a training slice.
* Engine and trainer alternate in bounded slices and, while both have work, get the shares of their tenants
  (:mod:`rookery.scheduling.worker_time`), equal ones for a tenant alone; time spent idle gives no credit. Time of
  interactive requests counts for neither. A training slice that would break one's objective waits, as does its rest
  between two layers, where the trainer allows it; rollouts wait with it, for as long as the shares allow. So does the
  rest of one, while it is the engine's turn, for a tenant that only has rollouts.
* Without work the thread sleeps until the next call.
* Tokens and results wait in an outbox; ``on_output`` is called, in this thread, when the outbox stops being empty.
* An exception in a call is raised to its caller. An exception in a slice ends the thread: ``failure`` holds it, and the
  outbox stays readable.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch

from rookery import protocol
from rookery.settings import Settings
from rookery.worker.core import WorkerCore, load_core
from rookery.worker.trainer.base import TrainerResult

T = TypeVar("T")


INNERMOST_CALLS = 4
"""Of a slice that does not end, in the log."""

IDLE = protocol.Heartbeat(
    epoch=0, progress=0, active=0, waiting=0, training=0, generated=0, decode_seconds=0.0, train_seconds=0.0,
)  # fmt: skip


@dataclass(frozen=True)
class ComputeStatus:
    """State of the compute thread, consistent and taken between two slices. New work is in it before the slice that
    computes it, so a stuck slice shows as work without progress."""

    beat: protocol.Heartbeat = IDLE
    """As far as this thread knows it."""
    adapters: frozenset[str] = frozenset()
    """Hashes of the adapters in memory."""


class Steppable(Protocol):
    """The engine or the trainer."""

    def step(self) -> bool:
        """Run one bounded slice; False if there was nothing to do."""
        ...


class TimeSlice:
    """Time used by the engine or the trainer. ``clock`` orders the two: seconds divided by their shares, where equal
    ones are 1. ``seconds`` is reported, ``present`` is of the present slice."""

    def __init__(self, steppable: Steppable, busy: Callable[[], bool]) -> None:
        self.steppable = steppable
        self.busy = busy
        self.clock = 0.0
        self.share = 1.0
        self.seconds = self.present = 0.0
        self.idle = True

    def charge(self, seconds: float) -> None:
        self.clock += seconds / self.share


Touches = Literal["engine", "queue", "states"]
"""What a call needs: the engine only; or it reads training states, and adds operations to the trainer's queue; or it
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
    ) -> None:
        """``prepare()`` returns the base model's folder and creates it if needed; it runs in the thread, and its
        exception ends the thread as :attr:`failure`. ``trains``: whether the worker has that role."""
        self._prepare = prepare
        self._trains = trains
        self._settings = settings
        self._on_output = on_output
        self._changed = threading.Condition()
        self._calls: list[Call] = []
        self._slices: list[TimeSlice] = []
        """The engine's and the trainer's."""
        self._charged = 0.0
        """Until then time is charged to one of them."""
        self._stopping = False
        self._chunks: list[protocol.TokenChunk] = []
        self._results: list[TrainerResult] = []
        self.status = ComputeStatus()
        self.failure: BaseException | None = None
        self.ready: Future[WorkerCore] = Future()
        """The loaded core. Other threads may read its device, dtype and engine limits; all else needs a call."""
        self.ended: Future[None] = Future()
        """Done when the thread has ended, for whatever reason."""
        self._thread = threading.Thread(target=self._main, name="compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the present slice; see :attr:`ended`."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def call(self, function: Callable[[WorkerCore], T], *, touches: Touches = "states") -> Future[T]:
        """Run ``function`` between two slices, or within one where what it ``touches`` allows that. Calls keep their
        order, but those of the engine may come before others. Calls after the thread's end are cancelled."""
        future: Future[T] = Future()
        with self._changed:
            if self.ended.done():
                future.cancel()
            else:
                self._calls.append((future, function, touches))
                self._changed.notify()
        return future

    async def describe(self, seconds: float) -> str:
        """What the thread's work waits for; where it does not answer within these ``seconds``, the lines of code in
        which its slice is."""
        answer = asyncio.wrap_future(self.call(_describe, touches="engine"))
        await asyncio.wait({answer}, timeout=seconds)
        if answer.done() and not answer.cancelled():
            return answer.result()
        answer.cancel()
        frame = sys._current_frames().get(self._thread.ident or 0)
        calls = [f"{Path(call.filename).name}:{call.lineno} {call.name}" for call in traceback.extract_stack(frame)]
        return f"a slice has not ended, it is in {' < '.join(reversed(calls[-INNERMOST_CALLS:]))}"

    def take(self) -> tuple[list[protocol.TokenChunk], list[TrainerResult]]:
        """Empty the outbox."""
        with self._changed:
            chunks, self._chunks = self._chunks, []
            results, self._results = self._results, []
        return chunks, results

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            if self._settings.worker.threads:
                torch.set_num_threads(self._settings.worker.threads)
            core = load_core(self._prepare(), self._settings, self._between_layers, trains=self._trains)
            self.ready.set_result(core)
            try:
                self._run(core)
            finally:
                core.engine.close()
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
        self._slices = [engine, TimeSlice(core.trainer, lambda: core.trainer.pending > 0)]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._stopping or any(s.busy() for s in self._slices))
                if self._stopping:
                    return
                calls, self._calls = self._calls, []
            self._answer(core, calls)
            core.gate.training_waits = False
            self._divide(core)
            chosen = next_slice(self._slices, core.gate.allows_training)
            if chosen is not None and not self._step(core, chosen):  # it gives its turn to the other
                for other in self._slices:
                    if other is not chosen and other.busy():
                        self._step(core, other)

    def _answer(self, core: WorkerCore, calls: list[Call]) -> None:
        for future, function, _ in calls:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(core))
                except Exception as error:  # raised to the caller
                    future.set_exception(error)
        if calls:
            self._publish(core, stepped=False)

    def _divide(self, core: WorkerCore) -> None:
        """The shares of engine and trainer. A tenant whose rollouts all wait for rows uses no time."""
        having_rows = [tenant for tenant, rows in core.engine.tenants().items() if rows]
        for part, share in zip(self._slices, core.time.divide(having_rows, core.trainer.tenants()), strict=True):
            part.share = len(self._slices) * share

    def _step(self, core: WorkerCore, chosen: TimeSlice) -> bool:
        self._charged, chosen.present = time.perf_counter(), 0.0
        stepped = chosen.steppable.step()
        self._charge(core, chosen)
        if chosen is self._slices[1]:
            core.gate.costs.record("train", 1, chosen.present)
        self._publish(core, stepped=stepped)
        return stepped

    def _charge(self, core: WorkerCore, used: TimeSlice) -> None:
        """The time since the last call is that of ``used``."""
        spent = time.perf_counter() - self._charged
        self._charged += spent
        engine, trainer = self._slices
        if core.gate.training_waits:  # rollouts make room for training: the time is training's
            trainer.charge(spent)
        elif used is engine:  # each of its tenants waits for all of it
            own = spent * core.gate.rollout_share
            engine.charge(own)
            tenants = [tenant for tenant, tokens in core.engine.tenant_tokens().items() if tokens]
            core.time.charge(own, core.time.weights_within(tenants))
        else:
            trainer.charge(spent)
            core.time.charge(spent, core.trainer.tenant_tokens())
        used.seconds += spent
        used.present += spent

    def _between_layers(self) -> None:
        """Within a training slice: answer what may run there, and let the engine step while a request's
        objective does not allow the rest of the slice, or it is the engine's turn and a tenant has work only there."""
        core, (engine, trainer) = self.ready.result(), self._slices
        self._charge(core, trainer)
        stepped = True
        while stepped and not self._stopping:
            with self._changed:
                calls, self._calls = within_slice(self._calls)
            self._answer(core, calls)
            if not engine.busy():
                break
            self._divide(core)
            trainers_turn = next_slice(self._slices) is trainer
            if not core.gate.allows_training(trainer.present):
                core.gate.training_waits = trainers_turn
            elif trainers_turn or not core.time.only_in_engine:
                break
            stepped = self._step(core, engine)
        core.gate.training_waits = False
        self._charged = time.perf_counter()

    def _publish(self, core: WorkerCore, *, stepped: bool) -> None:
        """Update status and outbox: after every slice, and after calls so that a stuck slice shows its work."""
        decode, train = self._slices
        chunks, results = core.engine.drain(), core.trainer.drain()
        adapters = frozenset(core.engine.adapters())
        beat = protocol.Heartbeat(
            epoch=0, progress=self.status.beat.progress + stepped, active=core.engine.active,
            waiting=core.engine.waiting, training=core.trainer.pending, generated=core.engine.generated,
            decode_seconds=decode.seconds, train_seconds=train.seconds,
            memory_parts={part: (use.used, use.budget) for part, use in core.memory().items()},
            interactive=len(core.gate.tracked), slo_slack=core.gate.least_slack(),
            free_tokens=core.engine.free_tokens, costs=core.gate.costs.curves,
            gauges={
                **core.engine.gauges(), **core.trainer.gauges(), **core.gate.gauges(),
                "adapters_in_memory": len(adapters),
            },
        )  # fmt: skip
        self.status = ComputeStatus(beat, adapters)
        if chunks or results:
            with self._changed:
                was_empty = not (self._chunks or self._results)
                self._chunks += chunks
                self._results += results
            if was_empty:
                self._on_output()


def _describe(core: WorkerCore) -> str:
    return f"{core.engine.describe()}; {core.trainer.pending} training operations are queued"


def within_slice(calls: list[Call]) -> tuple[list[Call], list[Call]]:
    """Those that may run within a training slice, and the others: operations and commits do not overtake what may
    change the states that they name."""
    first = next((at for at, (*_, touches) in enumerate(calls) if touches == "states"), len(calls))
    able = [touches == "engine" or at < first for at, (*_, touches) in enumerate(calls)]
    return list(compress(calls, able)), list(compress(calls, (not one for one in able)))


def next_slice(slices: list[TimeSlice], allows_training: Callable[[], bool] = lambda: True) -> TimeSlice | None:
    """The busy one of engine and trainer that has used the least of its share; None if none is busy. One that was idle
    starts level with those that worked. The trainer's turn is the engine's while ``allows_training`` is False: the
    trainer stays the next."""
    busy = [s for s in slices if s.busy()]
    level = min((s.clock for s in busy if not s.idle), default=0.0)
    for s in slices:
        if s in busy and s.idle:
            s.clock = level
        s.idle = s not in busy
    chosen = min(busy, key=lambda s: s.clock, default=None)
    engine, trainer = slices
    return engine if chosen is trainer and engine in busy and not allows_training() else chosen
