"""The compute thread: owns torch, the base model, its engine and its trainer; everybody else talks to it by calls.

Promises:

* Only this thread touches engine, trainer, adapters and tensors. ``call`` runs a function in it, between two slices.
* Engine and trainer take turns in bounded slices, each getting the same share of time while both have work; one that
  was idle is owed nothing for it.
* Idle, it sleeps until it is called.
* What slices bring forth (tokens, finished operations) waits in an outbox; ``wake`` is called, from this thread, when
  something lands in an empty one.
* An exception in a call belongs to the caller. One in a slice belongs to nobody: the thread ends, ``failure`` keeps it,
  and the outbox stays readable.
"""

from __future__ import annotations

import logging
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
from rookery.tokenization.chat import Chat
from rookery.worker import device
from rookery.worker.engine.base import Engine
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.model.batch_invariance import disable_amx_if_unsafe
from rookery.worker.model.config import DecoderConfig
from rookery.worker.model.decoder import SITES, Decoder
from rookery.worker.model.lora import LoraManager
from rookery.worker.trainer.base import Trainer, TrainerResult
from rookery.worker.trainer.native.trainer import NativeTrainer

log = logging.getLogger("rookery.worker")

T = TypeVar("T")


@dataclass(frozen=True)
class ComputeStatus:
    """What a heartbeat tells of the compute thread; a consistent picture taken between two slices. What calls brought
    is in it before the slice that computes it: one that hangs is seen by work without progress."""

    progress: int = 0
    active: int = 0
    waiting: int = 0
    training: int = 0
    generated: int = 0
    trained: int = 0
    decode_seconds: float = 0.0
    train_seconds: float = 0.0
    adapters: frozenset[str] = frozenset()
    """Hashes of the adapters in memory."""


class Steppable(Protocol):
    """The engine or the trainer as the turn-taking sees it."""

    def step(self) -> bool:
        """One bounded slice; False when there was nothing to do."""
        ...


class TimeSlice:
    """One of the parts and the time it has had. ``clock`` orders the parts; ``seconds`` is what is reported."""

    def __init__(self, part: Steppable, busy: Callable[[], bool]) -> None:
        self.part = part
        self.busy = busy
        self.clock = 0.0
        self.seconds = 0.0
        self.idle = True


def _spares_tiles(config: DecoderConfig, max_rank: int) -> bool:
    """See ``settle_tiles``."""
    shapes = [[config.site_shape(part) for part in parts] for parts in SITES.values()]
    base = [(parts[0][0], sum(outputs for _, outputs in parts)) for parts in shapes]
    return disable_amx_if_unsafe(torch.get_num_threads(), base, max(map(len, shapes)) * max_rank)


class WorkerCore:
    """What the compute thread owns."""

    def __init__(self, folder: Path, settings: Settings, model: str) -> None:
        self.model = model
        where = device.choose(settings.worker.device)
        if where.type == "cpu" and _spares_tiles(DecoderConfig.read(folder), settings.engine.max_rank):
            log.warning(
                "no tile instructions: texts of this model would depend on batches with %d threads and ranks up to %d",
                torch.get_num_threads(),
                settings.engine.max_rank,
            )
        self.decoder = Decoder.load(folder, device=where, pack=settings.engine.pack_weights)
        config = self.decoder.config
        self.engine: Engine = NativeEngine(
            self.decoder,
            LoraManager(config, self.decoder.dtype, self.decoder.device, settings.engine.max_rank),
            Chat.load(folder).decode,
            max_rows=settings.engine.max_rows,
            kv_budget_bytes=device.cache_bytes(settings.engine.kv_bytes, where),
        )
        self.trainer: Trainer = NativeTrainer(
            self.decoder,
            max_rank=settings.engine.max_rank,
            slice_tokens=settings.training.gpu_slice_tokens if where.type == "cuda" else settings.training.slice_tokens,
            base_model=model,
            trainer_state_cache_bytes=settings.training.trainer_state_cache_bytes,
        )
        self._most_resident = settings.engine.resident_adapters
        self._used: dict[str, None] = {}  # resident hashes, the one not asked for longest first

    def submit(self, generate: protocol.Generate, folder: Path | None) -> bool:
        """Hand a request to the engine; False if its adapter is neither in memory nor in ``folder``. Raises what makes
        the request impossible."""
        if generate.adapter is not None and not self._have(generate.adapter, folder):
            return False
        self.engine.submit(generate)
        self._trim()
        return True

    def switch(self, request: str, ref: protocol.AdapterRef, folder: Path | None, *, recompute: bool) -> bool:
        """Have a request go on with ``ref``; False if that is neither in memory nor in ``folder``. One that is over is
        left as it is."""
        if not self._have(ref, folder):
            return False
        self.engine.switch_adapter(request, ref, recompute=recompute)
        self._trim()
        return True

    def _have(self, ref: protocol.AdapterRef, folder: Path | None) -> bool:
        """Whether an adapter is in memory now, read from ``folder`` if need be."""
        if not self.engine.has_adapter(ref.hash):
            if folder is None:
                return False
            self.engine.add_adapter(ref.hash, folder)
        self._used.pop(ref.hash, None)
        self._used[ref.hash] = None
        return True

    def _trim(self) -> None:
        """At most so many adapters stay in memory besides those that requests run with."""
        while len(self._used) > self._most_resident:
            self._evict(next(iter(self._used)))

    def _evict(self, digest: str) -> None:
        """The adapter leaves memory, at once or when the last request that uses it ends."""
        self.engine.evict_adapter(digest)
        self._used.pop(digest, None)

    def discard(self, *digests: str) -> None:
        """Nothing will name these versions again: evict their adapters and their offloaded training states."""
        for digest in digests:
            self._evict(digest)
            self.trainer.discard_offloaded(digest)


class Compute:
    """The thread. Methods are for other threads."""

    def __init__(self, prepare: Callable[[], Path], settings: Settings, model: str, wake: Callable[[], object]) -> None:
        """``prepare`` answers the base model's folder, made if need be; it runs in the thread, and what it raises ends
        the thread as :attr:`failure`."""
        self._prepare = prepare
        self._model = model
        self._settings = settings
        self._wake = wake
        self._changed = threading.Condition()
        self._calls: list[tuple[Future[Any], Callable[[WorkerCore], Any]]] = []
        self._stopping = False
        self._chunks: list[protocol.TokenChunk] = []
        self._finished: list[TrainerResult] = []
        self.status = ComputeStatus()
        self.failure: BaseException | None = None
        self.ready: Future[WorkerCore] = Future()
        """The loaded core; its config and dtype may be read by anybody, the rest by calls."""
        self.over: Future[None] = Future()
        """Done when the thread has ended, for whatever reason."""
        self._thread = threading.Thread(target=self._main, name="compute", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the present slice; ``over`` tells when."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def call(self, function: Callable[[WorkerCore], T]) -> Future[T]:
        """Run ``function`` between two slices; calls keep their order. Calls after the thread's end are cancelled."""
        future: Future[T] = Future()
        with self._changed:
            if self.over.done():
                future.cancel()
            else:
                self._calls.append((future, function))
                self._changed.notify()
        return future

    def take(self) -> tuple[list[protocol.TokenChunk], list[TrainerResult]]:
        """Empty the outbox."""
        with self._changed:
            chunks, self._chunks = self._chunks, []
            finished, self._finished = self._finished, []
        return chunks, finished

    # --- in the thread ----------------------------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            if self._settings.worker.threads:
                torch.set_num_threads(self._settings.worker.threads)
            core = WorkerCore(self._prepare(), self._settings, self._model)
            self.ready.set_result(core)
            self._run(core)
        except BaseException as error:
            self.failure = error
            if not self.ready.done():
                self.ready.set_exception(error)
        finally:
            with self._changed:
                self.over.set_result(None)
                for future, _ in self._calls:
                    future.cancel()
            self._wake()

    def _run(self, core: WorkerCore) -> None:
        turns = [
            TimeSlice(core.engine, lambda: core.engine.active + core.engine.waiting > 0),
            TimeSlice(core.trainer, lambda: core.trainer.pending > 0),
        ]
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._calls or self._stopping or any(turn.busy() for turn in turns))
                if self._stopping:
                    return
                calls, self._calls = self._calls, []
            for future, function in calls:
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(function(core))
                    except Exception as error:  # belongs to the caller
                        future.set_exception(error)
            if calls:
                self._publish(core, turns, stepped=False)
            turn = next_turn(turns)
            if turn is not None:
                began = time.perf_counter()
                stepped = turn.part.step()
                spent = time.perf_counter() - began
                turn.clock += spent
                turn.seconds += spent
                self._publish(core, turns, stepped)

    def _publish(self, core: WorkerCore, turns: list[TimeSlice], stepped: bool) -> None:
        """After every slice, and after calls before the next one: if that hangs, what it hangs with is known."""
        decode, train = turns
        chunks, finished = core.engine.drain(), core.trainer.drain()
        self.status = ComputeStatus(
            progress=self.status.progress + stepped,
            active=core.engine.active,
            waiting=core.engine.waiting,
            training=core.trainer.pending,
            generated=core.engine.generated,
            trained=core.trainer.trained,
            decode_seconds=decode.seconds,
            train_seconds=train.seconds,
            adapters=frozenset(core.engine.adapters()),
        )
        if chunks or finished:
            with self._changed:
                first = not (self._chunks or self._finished)
                self._chunks += chunks
                self._finished += finished
            if first:
                self._wake()


def next_turn(turns: list[TimeSlice]) -> TimeSlice | None:
    """The busy part that has had least time. One that comes back from idleness starts level with those that worked."""
    busy = [turn for turn in turns if turn.busy()]
    level = min((turn.clock for turn in busy if not turn.idle), default=0.0)
    for turn in turns:
        if turn in busy and turn.idle:
            turn.clock = level
        turn.idle = turn not in busy
    return min(busy, key=lambda turn: turn.clock, default=None)
