"""What each worker was given and has not ended, and who takes the next request.

* A worker is given requests while it may be given work and its gate is open; one that catches up only for adapters
  that it holds, one that is slow to get a version not for that. What somebody waits for passes the gate, and has a room
  of its own: a share of each worker's rows.
* How many of its requests decode is known from their first tokens and from its beats, as
  :func:`rookery.scheduling.balancing.load` says.
* Nothing here costs more the more workers or requests there are; a choice looks at the different sets of adapters that
  slow workers lack.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rookery import protocol
from rookery.aio import Clock
from rookery.controller.fleet.worker import Worker
from rookery.controller.rollout.request import InflightRequest
from rookery.scheduling.balancing import BEATS, Instance, balance, load, select
from rookery.scheduling.saturation import SaturationEstimator
from rookery.scheduling.worker_index import WorkerIndex
from rookery.settings import Settings

ANY, BASE = "any", "base"
"""Lanes: of whoever takes something, of those who catch up and take the base model. Others are those of who catches up
and holds an adapter, by its hash, and those of who serves, by what they lack (:func:`_lacking`)."""


@dataclass(eq=False)
class WorkerSlots:
    """One connected worker's requests."""

    worker: Worker
    held: dict[InflightRequest, None] = field(default_factory=dict)
    """In the order in which it was given them."""
    decoding: int = 0
    ahead: int = 0
    takes: frozenset[str] = frozenset()
    """The lanes in which it stands."""
    lacks: frozenset[str] | None = None
    """Of a serving worker: what it takes no requests for."""
    gate: bool = True
    beats: deque[protocol.Heartbeat] = field(default_factory=lambda: deque(maxlen=BEATS))
    """The last ones."""
    since: float = 0.0
    """When it was given the first of those that it holds …"""
    before: float = 0.0
    """… and seconds for which it had held others."""

    @property
    def load(self) -> tuple[int, int, int]:
        """Its (pending, executing, free) requests."""
        beats = [(beat.active, beat.waiting) for beat in self.beats]
        return load(self.worker.hello.max_rows, len(self.held), self.decoding, beats)


@dataclass(frozen=True)
class Migration:
    """Requests that shall go on at another worker."""

    target: Worker
    requests: list[InflightRequest]


class WorkerPool:
    def __init__(self, settings: Settings, clock: Clock) -> None:
        self._clock = clock
        self._theta = settings.engine.dispatch_ahead
        self._share = settings.engine.interactive_share
        self._desks: dict[str, WorkerSlots] = {}
        self._common: defaultdict[str, WorkerIndex] = defaultdict(WorkerIndex)
        self._express: defaultdict[str, WorkerIndex] = defaultdict(WorkerIndex)
        self._lacks: defaultdict[str, Counter[frozenset[str]]] = defaultdict(Counter)
        """By model: what serving workers lack, and how many of them lack just that."""
        self._plateaus: defaultdict[tuple[str, str, str], SaturationEstimator] = defaultdict(SaturationEstimator)

    def workers(self) -> list[Worker]:
        return [desk.worker for desk in self._desks.values()]

    # --- workers ------------------------------------------------------------------------------------------------------

    def add(self, worker: Worker, gate: bool) -> None:
        """It may be given work, or no more; or what it takes has changed, or its gate."""
        desk = self._of(worker)
        works = worker.has_role("rollout", worker.hello.model)
        if desk is None:
            if not works:
                return
            assert worker.name not in self._desks, "who had the name before is lost"
            desk = self._desks[worker.name] = WorkerSlots(worker)
        if not works:
            desk.takes = frozenset()
        elif worker.state == "serving":
            desk.takes = frozenset({ANY, _lacking(worker.missing_adapter)})
        else:
            desk.takes = frozenset({ANY, BASE, *worker.cached})
        lacks = worker.missing_adapter if worker.state == "serving" else None
        self._count(desk, lacks)
        desk.gate = gate
        self._put(desk, True)

    def remove(self, worker: Worker) -> list[InflightRequest]:
        """It is lost; answers what it had, the first given first."""
        desk = self._of(worker)
        if desk is None:
            return []
        del self._desks[worker.name]
        self._count(desk, None)
        for boards in (self._common, self._express):
            boards[worker.hello.model].drop(worker.name)
        return list(desk.held)

    def on_heartbeat(self, worker: Worker, beat: protocol.Heartbeat) -> None:
        """It said how it is."""
        desk = self._of(worker)
        if desk is None:
            return
        if desk.beats:
            before = desk.beats[-1]
            seconds = beat.decode_seconds - before.decode_seconds
            self._plateau(worker).add(before.active, beat.active, beat.generated - before.generated, seconds)
        desk.beats.append(beat)
        self._put(desk)

    # --- their requests -----------------------------------------------------------------------------------------------

    def held(self, worker: Worker) -> list[InflightRequest]:
        """What it was given and has not ended, the first given first."""
        desk = self._of(worker)
        return list(desk.held) if desk is not None else []

    def outstanding(self, worker: Worker) -> int:
        desk = self._of(worker)
        return len(desk.held) if desk is not None else 0

    def executing(self, worker: Worker) -> int:
        desk = self._of(worker)
        return desk.load[1] if desk is not None else 0

    def busy(self, worker: Worker) -> float:
        """Seconds for which it has held at least one request, on this connection."""
        desk = self._of(worker)
        if desk is None:
            return 0.0
        return desk.before + (self._clock.monotonic() - desk.since if desk.held else 0.0)

    def assign(self, live: InflightRequest, worker: Worker, ahead: bool) -> None:
        desk = self._desks[worker.name]
        if not desk.held:
            desk.since = self._clock.monotonic()
        live.worker, live.ahead, live.decoding = worker, ahead, False
        desk.held[live] = None
        desk.ahead += ahead
        self._put(desk, ahead)

    def decodes(self, live: InflightRequest) -> None:
        """A token of it came."""
        if not live.decoding and live.worker is not None:
            desk = self._desks[live.worker.name]
            live.decoding = True
            desk.decoding += 1
            self._put(desk)

    def release(self, live: InflightRequest) -> None:
        """Its worker has it no more."""
        desk = self._of(live.worker) if live.worker is not None else None
        live.worker = None
        if desk is not None:
            del desk.held[live]
            if not desk.held:
                desk.before += self._clock.monotonic() - desk.since
            desk.decoding -= live.decoding
            desk.ahead -= live.ahead
            self._put(desk, live.ahead)

    # --- decisions ----------------------------------------------------------------------------------------------------

    def has_capacity(self, model: str, ahead: bool) -> bool:
        """Whether some worker would take some request."""
        return self._select(model, ahead, (ANY,)) is not None

    def choose(self, live: InflightRequest, ahead: bool) -> Worker | None:
        """The worker for a request in the common room, or in that of those who go ahead."""
        return self._select(live.request.model, ahead, self._lanes(live))

    def find_migration(self, model: str) -> Migration | None:
        """Requests that another worker would begin at once, by :func:`rookery.scheduling.balancing.balance`; of the
        pending ones the last given, of the executing ones those with the fewest tokens."""
        board = self._common.get(model)
        if board is None or (move := balance(board.fullest(), board.first((ANY,)))) is None:
            return None
        held = self._desks[move.source].held
        able = [live for live in reversed(held) if not live.ahead and not live.done.done()]
        if move.executing:
            able.sort(key=lambda live: len(live.reply.tokens))
        else:
            able = [live for live in able if not live.decoding]
        for number, live in enumerate(able):
            move = balance(board.fullest(), board.first(self._lanes(live)))
            if move is not None:
                target = self._desks[move.target].worker
                going = [live for live in able[number:] if target.accepts(live.request.adapter)]
                return Migration(target, going[: move.count])
        return None

    def _select(self, model: str, ahead: bool, lanes: Sequence[str]) -> Worker | None:
        board = (self._express if ahead else self._common).get(model)
        name = select(board.first(lanes), 0 if ahead else self._theta) if board is not None else None
        return self._desks[name].worker if name is not None else None

    def _lanes(self, live: InflightRequest) -> list[str]:
        """Those whose workers take the request."""
        adapter = live.request.adapter
        needs = adapter.hash if adapter is not None else BASE
        return [needs, *(_lacking(lacks) for lacks in self._lacks.get(live.request.model, ()) if needs not in lacks)]

    def _count(self, desk: WorkerSlots, lacks: frozenset[str] | None) -> None:
        counts = self._lacks[desk.worker.hello.model]
        if desk.lacks is not None:
            counts[desk.lacks] -= 1
            if not counts[desk.lacks]:
                del counts[desk.lacks]
        if lacks is not None:
            counts[lacks] += 1
        desk.lacks = lacks

    def _put(self, desk: WorkerSlots, express: bool = False) -> None:
        """What is known of the worker has changed; with ``express`` also in the room of those who go ahead."""
        worker = desk.worker
        pending, executing, free = desk.load
        here = Instance(worker.name, pending, executing, free, self._plateau(worker).flat)
        self._common[worker.hello.model].put(here, desk.takes if desk.gate else frozenset())
        if express:
            rows = math.ceil(worker.hello.max_rows * self._share)
            ahead = Instance(worker.name, 0, desk.ahead, max(0, rows - desk.ahead))
            self._express[worker.hello.model].put(ahead, desk.takes)

    def _plateau(self, worker: Worker) -> SaturationEstimator:
        hello = worker.hello
        return self._plateaus[hello.model, hello.device, hello.kind]

    def _of(self, worker: Worker) -> WorkerSlots | None:
        desk = self._desks.get(worker.name)
        return desk if desk is not None and desk.worker is worker else None


def _lacking(hashes: Iterable[str]) -> str:
    """The lane of those who serve and lack just these adapters."""
    return " ".join(["lacks", *sorted(hashes)])
