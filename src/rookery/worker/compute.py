"""The compute thread: owns torch, the base model, its engine and its trainer; other threads use it by calls.

Promises:

* Only this thread touches engine, trainer, adapters and tensors. :meth:`Compute.call` runs a function in it, between
  two slices.
* Engine and trainer alternate in bounded slices and get equal time while both have work; time spent idle gives no
  credit. Time of interactive requests counts for neither. A training slice that would break one's objective waits;
  rollouts wait with it, for as long as equal shares allow.
* Without work the thread sleeps until the next call.
* Tokens and results wait in an outbox; ``on_output`` is called, in this thread, when the outbox stops being empty.
* An exception in a call is raised to its caller. An exception in a slice ends the thread: ``failure`` holds it, and the
  outbox stays readable.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from rookery import protocol
from rookery.settings import Settings
from rookery.worker.core import WorkerCore, load_core
from rookery.worker.trainer.base import TrainerResult

T = TypeVar("T")


IDLE = protocol.Heartbeat(
    epoch=0, progress=0, active=0, waiting=0, training=0, adapters=0, generated=0, trained=0, decode_seconds=0.0,
    train_seconds=0.0, memory_bytes=0,
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
    """Time used by the engine or the trainer. ``clock`` orders the two; ``seconds`` is reported."""

    def __init__(self, steppable: Steppable, busy: Callable[[], bool]) -> None:
        self.steppable = steppable
        self.busy = busy
        self.clock = 0.0
        self.seconds = 0.0
        self.idle = True


class Compute:
    """The thread. Methods are for other threads."""

    def __init__(
        self,
        prepare: Callable[[], Path],
        settings: Settings,
        model: str,
        on_output: Callable[[], object],
        *,
        trains: bool = True,
    ) -> None:
        """``prepare()`` returns the base model's folder and creates it if needed; it runs in the thread, and its
        exception ends the thread as :attr:`failure`. ``trains``: whether the worker has that role."""
        self._prepare = prepare
        self._trains = trains
        self._model = model
        self._settings = settings
        self._on_output = on_output
        self._changed = threading.Condition()
        self._calls: list[tuple[Future[Any], Callable[[WorkerCore], Any]]] = []
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

    def call(self, function: Callable[[WorkerCore], T]) -> Future[T]:
        """Run ``function`` between two slices; calls keep their order. Calls after the thread's end are cancelled."""
        future: Future[T] = Future()
        with self._changed:
            if self.ended.done():
                future.cancel()
            else:
                self._calls.append((future, function))
                self._changed.notify()
        return future

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
            core = load_core(self._prepare(), self._settings, self._model, trains=self._trains)
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
                for future, _ in self._calls:
                    future.cancel()
            self._on_output()

    def _run(self, core: WorkerCore) -> None:
        slices = [
            TimeSlice(core.engine, lambda: core.engine.active + core.engine.waiting > 0),
            TimeSlice(core.trainer, lambda: core.trainer.pending > 0),
        ]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._stopping or any(s.busy() for s in slices))
                if self._stopping:
                    return
                calls, self._calls = self._calls, []
            for future, function in calls:
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(function(core))
                    except Exception as error:  # raised to the caller
                        future.set_exception(error)
            if calls:
                self._publish(core, slices, stepped=False)
            core.gate.training_waits = False
            chosen = next_slice(slices, core.gate.allows_training)
            if chosen is not None:
                began = time.perf_counter()
                stepped = chosen.steppable.step()
                spent = time.perf_counter() - began
                if chosen is slices[1]:
                    core.gate.on_training(spent)
                if core.gate.training_waits:  # rollouts make room for training: the time is training's
                    slices[1].clock += spent
                else:
                    chosen.clock += spent * (core.gate.rollout_share if chosen is slices[0] else 1)
                chosen.seconds += spent
                self._publish(core, slices, stepped)

    def _publish(self, core: WorkerCore, slices: list[TimeSlice], stepped: bool) -> None:
        """Update status and outbox: after every slice, and after calls so that a stuck slice shows its work."""
        decode, train = slices
        chunks, results = core.engine.drain(), core.trainer.drain()
        adapters = frozenset(core.engine.adapters())
        beat = protocol.Heartbeat(
            epoch=0, progress=self.status.beat.progress + stepped, active=core.engine.active,
            waiting=core.engine.waiting, training=core.trainer.pending, generated=core.engine.generated,
            draft_tokens=core.engine.draft_tokens, accepted_tokens=core.engine.accepted_tokens,
            engine_gap=core.engine.gap, trained=core.trainer.trained, decode_seconds=decode.seconds,
            train_seconds=train.seconds, adapters=len(adapters), memory_bytes=0,
            memory_parts={part: (use.used, use.budget) for part, use in core.memory().items()},
            interactive=len(core.gate.tracked), slo_slack=core.gate.least_slack(), slo_met=core.gate.met,
            slo_ended=core.gate.ended, cache_cuts=core.gate.cache_cuts, free_tokens=core.engine.free_tokens,
            costs=core.gate.costs.curves,
        )  # fmt: skip
        self.status = ComputeStatus(beat, adapters)
        if chunks or results:
            with self._changed:
                was_empty = not (self._chunks or self._results)
                self._chunks += chunks
                self._results += results
            if was_empty:
                self._on_output()


def next_slice(slices: list[TimeSlice], allows_training: Callable[[], bool] = lambda: True) -> TimeSlice | None:
    """The busy one of engine and trainer that has used the least time; None if none is busy. One that was idle starts
    level with those that worked. The trainer's turn is the engine's while ``allows_training`` is False: the trainer
    stays the next."""
    busy = [s for s in slices if s.busy()]
    level = min((s.clock for s in busy if not s.idle), default=0.0)
    for s in slices:
        if s in busy and s.idle:
            s.clock = level
        s.idle = s not in busy
    chosen = min(busy, key=lambda s: s.clock, default=None)
    engine, trainer = slices
    return engine if chosen is trainer and engine in busy and not allows_training() else chosen
