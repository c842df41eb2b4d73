"""The connected workers, their messages and their health.

* A worker's frames count only under the epoch of its present connection.
* A lost connection, a bad frame, missed heartbeats, compute without progress, a frame that it does not read or an
  adapter that it alone cannot pull make a worker *suspect* (states: :mod:`~rookery.controller.fleet.worker`): all its
  work moves to others at once. If its process reconnects it gets a new epoch and keeps its adapters; after a grace
  period it is *gone*, and removed from the list after another one.
* Nothing waits for a worker: messages to one that does not read wait in its own outbox, no longer than missed
  heartbeats would be tolerated, and every loss is an event.
* All that others must know of a worker is an event (:mod:`~rookery.controller.fleet.events`).
* The cost of a frame does not grow with the number of workers; joining and leaving cost one pass over the others.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from rookery import protocol
from rookery.aio import BackgroundTasks
from rookery.clock import Clock
from rookery.controller.fleet.events import (
    AdaptersChanged,
    HeartbeatReceived,
    MessageReceived,
    RolesChanged,
    WorkerCatchingUp,
    WorkerDraining,
    WorkerEvent,
    WorkerFailed,
    WorkerGone,
    WorkerJoined,
    WorkerLoaded,
    WorkerReady,
    WorkerStalled,
    WorkerSuspect,
)
from rookery.controller.fleet.worker import CONNECTED, TRANSITIONS, Event
from rookery.controller.fleet.worker import Worker as Worker
from rookery.errors import next_state, without_paths
from rookery.protocol.connection import Connection, Outbox, RegistrationRefused, check_protocol, serve_peer
from rookery.settings import Settings
from rookery.telemetry.spans import TraceSpan
from rookery.tokenization.registry import canonical

log = logging.getLogger("rookery.controller.fleet.fleet")

MOST_ROWS = 1 << 16
"""Of a worker: one that says it has any number of rows would get all requests."""


class ModelFailure(NamedTuple):
    """The last worker of a base model does not work."""

    reason: str
    """For tenants."""
    worker: str
    """Its name; empty where all that one process started have failed."""


class Fleet:
    """Registers workers, reports their messages and losses as events, watches their health."""

    def __init__(self, settings: Settings, clock: Clock, on_event: Callable[[WorkerEvent], None]) -> None:
        """``on_event`` gets every event, in the event loop, and must return at once."""
        self.emit = on_event
        """Reports an event, also of the rooms above."""
        self._settings = settings
        self._clock = clock
        self._workers: dict[str, Worker] = {}
        self._able: dict[tuple[str, str], list[Worker]] = {}
        """By role and model. A list is replaced, never changed."""
        self._fewest_rows: dict[str, int] = {}
        """By model, of the workers that generate with it now."""
        self._closing = BackgroundTasks()
        self.epoch = int(clock.time() * 1000)
        self._signing_offset = clock.time() - clock.monotonic()
        self.failures: dict[str, ModelFailure] = {}
        """By base model, until a worker has loaded it."""
        self.ignored_frames = 0
        self.bad_frames = 0
        self.losses = 0

    # --- workers ----------------------------------------------------------------------------------------------------

    def serving(self, role: str, model: str) -> Sequence[Worker]:
        """The workers that :meth:`have the role <Worker.has_role>` now. The list itself never changes."""
        return self._able.get((role, model), [])

    def trainers(self, model: str, besides: Collection[Worker] = ()) -> Sequence[Worker]:
        """The workers other than ``besides`` that get policies to train: the reserved ones, or all where none is
        reserved."""
        able = [worker for worker in self.serving("train", model) if worker not in besides]
        return [worker for worker in able if worker.hello.kind == "reserved"] or able

    def longest_text(self, model: str) -> int:
        """Tokens of the longest text, prompt included, that a worker generates with ``model`` now; 0 without one."""
        return max((worker.hello.max_context for worker in self.serving("rollout", model)), default=0)

    def fewest_rows(self, model: str) -> int:
        """Rows of the smallest worker that generates with ``model`` now; 0 without one."""
        return self._fewest_rows.get(model, 0)

    @property
    def heartbeat_seconds(self) -> float:
        """Between two heartbeats of a worker."""
        return self._settings.worker.heartbeat_seconds

    def signing_time(self) -> float:
        """The seconds in which signatures count: those of the wall clock, as it was when the service started. Whoever
        sets it later does not part the workers that are connected from those that join, or from the service."""
        return self._signing_offset + self._clock.monotonic()

    def all(self) -> list[Worker]:
        return list(self._workers.values())

    def get(self, name: str) -> Worker | None:
        """The worker's latest connection."""
        return self._workers.get(name)

    def expects(self, role: str, model: str, *, besides: str = "") -> bool:
        """Whether a worker, of another name than ``besides``, has the role or may soon: it loads the model, or may
        reconnect."""
        return any(worker.name != besides for worker in self.expected(role, model))

    def expected(self, role: str, model: str) -> list[Worker]:
        """The workers that have the role or may soon."""
        there = (worker for worker in self._workers.values() if worker.state not in ("draining", "gone"))
        return [worker for worker in there if role in worker.roles and worker.hello.model == model]

    def failure(self, model: str) -> str:
        """Why no worker will train ``model``; empty while one trains it, or may come."""
        known = self.failures.get(model)
        return known.reason if known is not None and not self._trained(model, known.worker) else ""

    def fail(self, model: str, reason: str, worker: str = "") -> str:
        """The process of this ``worker`` of ``model``, or without a name those of all that were started, ended for this
        ``reason``; :meth:`failure` then. Where others train the model, the reason is not kept for a later moment in
        which they are away."""
        if not self._trained(model, worker):
            reason = f"the worker of {model} does not work: {without_paths(reason, keep=model)}"
            self.failures[model] = ModelFailure(reason, worker)
        return self.failure(model)

    def _trained(self, model: str, worker: str) -> bool:
        """Whether another worker than ``worker`` trains ``model``, or may soon; without a name, whether one does."""
        return self.expects("train", model, besides=worker) if worker else bool(self.serving("train", model))

    def missing(self, role: str, model: str) -> str:
        """Why no worker serves ``model`` for ``role`` now, with the state of each candidate."""
        of_model = [worker for worker in self._workers.values() if worker.hello.model == model]
        others = [f"{worker.name} is {worker.state}" for worker in of_model]
        others += filter(None, [self.failure(model)])
        return f"no worker serves {model} for {role}" + (f" ({', '.join(others)})" if others else "")

    def open_spans(self) -> Iterator[TraceSpan]:
        """The times for which the workers that serve have done so."""
        time, now = self._clock.time(), self._clock.monotonic()
        for worker in self._workers.values():
            if worker.serving_since and worker.state not in ("suspect", "gone"):
                yield TraceSpan("connected", time - now + worker.serving_since, time, worker.name)

    def refresh(self, worker: Worker) -> None:
        """Its cached or missing adapters have changed."""
        if worker.state == "catching up" and not worker.lagging:
            self._serve(worker)
        elif worker.working:
            self.emit(AdaptersChanged(self._clock.time(), worker))

    def admit(self, worker: Worker) -> None:
        """Its base model is loaded, and ``worker.lagging`` says what it must pull before it serves."""
        if worker.lagging:
            self._transition(worker, "lagging")
            log.info("worker %s pulls %d versions in use", worker.name, len(worker.lagging), extra=_extra(worker))
            self.emit(WorkerCatchingUp(self._clock.time(), worker, len(worker.lagging)))
        else:
            self._serve(worker)

    def _load(self, worker: Worker) -> None:
        """Its base model is loaded."""
        self.failures.pop(worker.hello.model, None)
        self.emit(WorkerLoaded(self._clock.time(), worker))

    def _serve(self, worker: Worker) -> None:
        self._transition(worker, "ready")
        roles = ", ".join(worker.roles) or "no role: its plan does not need it"
        log.info("worker %s serves %s (%s)", worker.name, worker.hello.model, roles, extra=_extra(worker))
        worker.serving_since = worker.serving_since or self._clock.monotonic()
        self.emit(WorkerReady(self._clock.time(), worker))

    def _transition(self, worker: Worker, event: Event) -> bool:
        """Whether the event changed its state."""
        state = next_state(TRANSITIONS, worker.state, event, f"worker {worker.name}")
        if state == worker.state:
            return False
        worker.state = state
        worker.since = self._clock.monotonic()
        self._file(worker)
        return True

    def set_roles(self, worker: Worker, roles: frozenset[str] | None) -> None:
        """``worker`` plays these of its roles from now on; None: all of them. Running requests continue."""
        if roles == worker.planned_roles:
            return
        worker.planned_roles = roles
        self._file(worker)
        self.emit(RolesChanged(self._clock.time(), worker))

    def _file(self, worker: Worker) -> None:
        """Under the roles that it has now."""
        for role in worker.hello.roles:
            key = (role, worker.hello.model)
            others = [other for other in self._able.get(key, ()) if other is not worker]
            able = self._able[key] = [*others, worker] if worker.has_role(*key) else others
            if role == "rollout":
                self._fewest_rows[worker.hello.model] = min((one.hello.max_rows for one in able), default=0)

    # --- a connection -----------------------------------------------------------------------------------------------

    async def serve(self, connection: Connection, reads: protocol.ReadKey | None = None) -> None:
        """Serve one worker until its connection ends. ``reads`` is the read key of its API key."""
        await serve_peer(
            connection,
            protocol.from_worker,
            register=partial(self._register, reads or protocol.read_key("")),
            deliver=self._deliver,
            bad_frame=self._bad_frame,
            closed=self._closed,
        )

    async def _register(self, reads: protocol.ReadKey, hello: Any, connection: Connection) -> Worker:
        if isinstance(hello, protocol.Hello):
            hello.model = canonical(hello.model)  # jobs have that name, however a worker's command spells it
        try:
            self._check(hello)
        except RegistrationRefused as refusal:
            if isinstance(hello, protocol.Hello) and hello.name not in self._workers:
                outbox, now = Outbox(connection, 0, self._clock), self._clock.monotonic()
                refused = Worker(hello, outbox, now, now, state="gone", status_message=f"refused: {refusal}")
                self._workers[hello.name] = refused
                log.error("worker %s is refused: %s", hello.name, refusal, extra=_extra(refused))
            raise
        name = hello.name
        known = self._workers.get(name)
        if known is not None and known.hello.instance != hello.instance and known.state in CONNECTED:
            name = f"{name}-{hello.instance[:6]}"  # two processes chose one name: both may work
            hello.name = name
            known = self._workers.get(name)
        if known is not None and known.state in CONNECTED:
            self._disconnect(known, "it reconnected")
        self.epoch += 1
        now = self._clock.monotonic()
        worker = self._workers[name] = Worker(
            hello,
            Outbox(connection, self.epoch, self._clock),
            since=now,
            last_progress=now,
            active_requests=set(hello.running),
            cached={*hello.adapters, *hello.loaded},
            reads=reads,
        )
        self.emit(WorkerJoined(self._clock.time(), worker))
        worker.post(
            protocol.Welcome(
                name=name,
                epoch=worker.epoch,
                heartbeat_seconds=self._settings.worker.heartbeat_seconds,
                flush_seconds=self._settings.worker.flush_seconds,
                reads=reads,
                time=self.signing_time(),
                resume_seconds=self._settings.worker.resume_seconds,
            )
        )
        if hello.loading:
            log.info("worker %s loads %s", name, hello.model, extra=_extra(worker))
        else:
            self._load(worker)
        return worker

    def _check(self, hello: Any) -> None:
        """Raises :class:`RegistrationRefused`."""
        check_protocol(hello, protocol.Hello)
        if not 0 <= hello.price < math.inf:
            raise RegistrationRefused(f"invalid price {hello.price} per hour: must be 0 or more")
        if hello.max_rank < (allowed := self._settings.engine.max_rank):
            raise RegistrationRefused(
                f"its adapters have at most rank {hello.max_rank}, jobs here up to {allowed}: start it with"
                f" ROOKERY_MAX_RANK={allowed}, or the service with ROOKERY_MAX_RANK={hello.max_rank}"
            )
        if hello.max_rows > MOST_ROWS:
            raise RegistrationRefused(f"invalid number of rows {hello.max_rows}: must be 0 to {MOST_ROWS}")

    def _deliver(self, worker: Worker, message: Any, seconds: float) -> None:
        if isinstance(message, protocol.Hello) or message.epoch != worker.epoch or worker.state in ("suspect", "gone"):
            self.ignored_frames += 1
            return
        now = worker.outbox.last_frame = self._clock.monotonic()
        worker.decoding = seconds
        match message:
            case protocol.Heartbeat():
                if worker.beat is None or message.progress != worker.beat.progress or not message.busy:
                    worker.last_progress = now
                if message.stalled and not (worker.beat is not None and worker.beat.stalled):
                    log.warning("worker %s makes no progress: %s", worker.name, message.stalled, extra=_extra(worker))
                    self.emit(WorkerStalled(self._clock.time(), worker, message.stalled))
                worker.beat = message
                worker.generated.append((now, message.generated))
                self.emit(HeartbeatReceived(self._clock.time(), worker, message))
            case protocol.Ready() if worker.state == "joining":
                for name in protocol.LOADED:
                    setattr(worker.hello, name, getattr(message, name))
                self._load(worker)
            case protocol.Ready():
                raise protocol.BadFrame("a second Ready")
            case protocol.Draining():
                worker.status_message = message.reason or worker.status_message
                if self._transition(worker, "drain"):
                    self.emit(WorkerDraining(self._clock.time(), worker))
                if message.reason:
                    log.error("worker %s ends: %s", worker.name, message.reason, extra=_extra(worker))
                    last = message.refused and not self.expects("train", worker.hello.model)
                    self.emit(WorkerFailed(self._clock.time(), worker, message.reason, last))
            case _:
                self.emit(MessageReceived(self._clock.time(), worker, message))

    # --- health -----------------------------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Check every worker's health, until cancelled."""
        while True:
            await self._clock.sleep(self._settings.worker.heartbeat_seconds / 2)
            now, grace = self._clock.monotonic(), self._settings.worker.rejoin_seconds
            for worker in list(self._workers.values()):
                if worker.state in CONNECTED:
                    if reason := self._health_problem(worker, now):
                        self.suspect(worker, reason)
                elif now - worker.since > grace and worker.state == "gone":
                    del self._workers[worker.name]
                elif now - worker.since > grace:
                    self._transition(worker, "expire")
                    log.info("worker %s is gone", worker.name, extra=_extra(worker))
                    self.emit(WorkerGone(self._clock.time(), worker, f"it did not reconnect within {grace:g} s"))

    def _health_problem(self, worker: Worker, now: float) -> str:
        """Why it must be considered lost; empty for a healthy worker."""
        if problem := worker.outbox.problem(self._settings.worker.suspect_seconds):
            return problem
        if now - worker.last_progress > self._settings.worker.stuck_seconds:
            return f"no compute progress for {now - worker.last_progress:.0f} s"
        return ""

    def suspect(self, worker: Worker, reason: str) -> None:
        """Abandon this connection: the worker's work moves to others, and its process must reconnect."""
        self._disconnect(worker, reason)
        self._closing.start(worker.connection.close(reason))  # a hanging connection may hang in closing too

    def _bad_frame(self, worker: Worker | None, error: protocol.BadFrame) -> None:
        self.bad_frames += 1
        name = worker.name if worker is not None else "?"
        log.warning("worker %s sent a bad frame: %s", name, error, extra={"worker": name})

    async def _closed(self, worker: Worker, connection: Connection) -> None:
        self._disconnect(worker, "its connection closed")

    def _disconnect(self, worker: Worker, reason: str) -> None:
        if not self._transition(worker, "lost"):
            return
        served = self._clock.monotonic() - worker.serving_since if worker.serving_since else 0.0
        if worker.state == "suspect":
            worker.status_message = reason
            self.losses += 1
            log.warning("worker %s is suspect: %s", worker.name, reason, extra=_extra(worker))
            self.emit(WorkerSuspect(self._clock.time(), worker, reason, served))
        else:
            self.emit(WorkerGone(self._clock.time(), worker, f"it drained: {reason}", served))


def _extra(worker: Worker) -> dict[str, str]:
    return {"worker": worker.name}
