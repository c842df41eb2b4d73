"""Which requests each worker has, and which worker gets the next one.

* A worker gets requests while its state allows it and its gate is open. One that is catching up gets requests only for
  adapters that it has cached; one that is slow to pull a version gets none for that version. Interactive requests pass
  the gate and may take every row, but for what others' jobs had of their shares lately.
* Of workers with a row, a rollout goes where it is decoded soonest (:func:`rookery.scheduling.balancing.handicap`).
* Rollouts go to workers without interactive requests first, then to those that keep the objectives of theirs; one that
  reports a negative slack gets those of tenants without clients there, up to their share of its rows.
* With each heartbeat of a worker that trains, its rollouts may merge into the batch of one that does not
  (:func:`rookery.scheduling.tails.merge`): never while its last trainings did not predict each other, or requests
  wait for a worker.
* The number of requests that a worker decodes follows from first tokens and from heartbeats
  (:func:`rookery.scheduling.balancing.load`).
* A tenant with fewer requests at the workers than its share of their rows does not wait for a free row: a worker gets
  its rollouts beyond its rows (:func:`rookery.scheduling.fair_slices.next_row`).
* The cost of a decision does not grow with the number of workers or requests; a choice looks at the different sets of
  adapters that slow workers miss.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rookery import protocol
from rookery.clock import BusyTime, Clock
from rookery.controller.fleet.worker import Worker
from rookery.controller.rollout.request import Assignment, InflightRequest
from rookery.controller.rollout.request_queues import RequestQueues
from rookery.controller.rollout.rules import RolloutRules
from rookery.scheduling.balancing import SHORTAGE_HEARTBEATS, WorkerLoad, balance, handicap, load, order, select
from rookery.scheduling.costs import CostTable
from rookery.scheduling.divided_rollout import DecodingWorker, moves
from rookery.scheduling.fair_slices import most_rows, shares, short_of_rows
from rookery.scheduling.pipelines import TAKING_TURNS, StagePredictor
from rookery.scheduling.queues import TokenCounters
from rookery.scheduling.saturation import SaturationEstimator
from rookery.scheduling.tails import WorkerRollouts, merge
from rookery.scheduling.worker_index import WorkerIndex

ANY, BASE, UNTRAINING = "any", "base", "untraining"
"""Tags of the indexes: ``ANY`` has every worker that accepts some request, ``BASE`` one that is catching up and accepts
requests for the base model, ``UNTRAINING`` one that does not train. One that is catching up also has the hash of each
adapter that it has cached, a serving one the tag of the adapters that it misses (:func:`_missing_tag`). Of one that is
about to miss an objective, :func:`_late_tag` replaces each."""

JOB_SECONDS = 10.0
"""For so long a tenant whose job had a rollout at a worker has its share of the rows there: a job has none while it
trains."""


CHOICES = 4
"""Workers that are asked for a row for a tenant that has its share of the first ones."""


@dataclass(eq=False)
class WorkerSlots:
    """The requests of one connected worker."""

    worker: Worker
    busy: BusyTime
    counters: TokenCounters
    """Order of the requests that wait in the worker: one that comes is put in at its tenant's counter, and tenants are
    lifted to that of the request that decoded last (start-time fair queueing; Goyal and others, 1996)."""
    requests: dict[str, InflightRequest] = field(default_factory=dict)
    """By assignment, in the order in which these were made."""
    decoding: int = 0
    reserved: int = 0
    """Requests in its reserved rows."""
    clients: Counter[str] = field(default_factory=Counter)
    """Clients' requests by tenant, in rows of either kind."""
    rollouts: Counter[str] = field(default_factory=Counter)
    """Jobs' requests by tenant."""
    given: dict[str, float] = field(default_factory=dict)
    """By tenant, when the last rollout of a job was assigned."""
    peak: tuple[int, float] = 0, -math.inf
    """The most rollouts of jobs that it had at once in the last :data:`JOB_SECONDS`, and when."""
    tags: frozenset[str] = frozenset()
    missing: frozenset[str] | None = None
    """The adapters for which a serving worker gets no requests; None: it does not serve."""
    accepts_rollouts: bool = True
    rows: int = 0
    """The number of its rows that may get rollouts."""
    heartbeats: deque[protocol.Heartbeat] = field(default_factory=lambda: deque(maxlen=SHORTAGE_HEARTBEATS))
    costs: CostTable = field(default_factory=CostTable)
    """The costs of its slices, as it reports them."""
    throughput: float = 0.0
    """The most tokens a second that it decodes, by these costs."""
    leaving: int = 0
    """The number of its requests that it was asked to return."""
    arriving: int = 0
    """The number of requests of other workers that will continue here."""
    served_at: float = -math.inf
    """When it last reported new tokens while requests waited in it."""
    trained_before: float = 0.0
    """Its training seconds when it began to train last."""
    trainings: StagePredictor = field(default_factory=StagePredictor)
    """Seconds from the beginning of a training to its end."""

    @property
    def training(self) -> bool:
        """Whether it trains, by its last heartbeat."""
        return bool(self.heartbeats) and self.heartbeats[-1].training > 0

    @property
    def train_seconds(self) -> float:
        """The predicted rest of its training; 0 while that is unknown."""
        predicted = self.trainings.predict("") if self.training else None
        spent = self.heartbeats[-1].train_seconds - self.trained_before if predicted is not None else 0.0
        return max(0.0, (predicted or 0.0) - spent)

    @property
    def load(self) -> tuple[int, int, int]:
        """Its (pending, executing, free) requests."""
        beats = [(beat.active, beat.waiting) for beat in self.heartbeats]
        held, decoding = len(self.requests) - self.leaving + self.arriving, self.decoding - self.leaving
        rows = self.worker.hello.max_rows
        return load(max(rows, min(decoding, most_rows(rows))), held, decoding, beats)

    @property
    def tenants(self) -> Counter[str]:
        """Its requests by tenant."""
        return self.clients + self.rollouts

    @property
    def decoder(self) -> DecodingWorker:
        """Its figures for :func:`rookery.scheduling.divided_rollout.moves`."""
        pending, executing, free = self.load
        return DecodingWorker(
            self.costs, executing, pending, free, self.heartbeats[-1].free_tokens if self.heartbeats else 0
        )

    @property
    def serving(self) -> bool:
        """Whether it has requests in reserved rows, or with objectives."""
        return bool(self.reserved or (self.heartbeats and self.heartbeats[-1].interactive))

    @property
    def saturated(self) -> bool:
        """Whether it is about to miss an objective, by its last heartbeat."""
        return bool(self.heartbeats) and self.heartbeats[-1].interactive > 0 and self.heartbeats[-1].slo_slack < 0


@dataclass(frozen=True)
class Migration:
    """Requests to be moved to another worker."""

    target: Worker
    requests: list[InflightRequest]
    reason: str = "balanced"


class WorkerPool:
    def __init__(self, rules: RolloutRules, clock: Clock, tenant_shares: Mapping[str, float]) -> None:
        self._tenant_shares = tenant_shares
        self._clock = clock
        self._turn_share = rules.tenant_turn_share
        self._dispatch_ahead = rules.dispatch_ahead
        self._chunk = rules.rollout_chunk_tokens or math.inf
        self._slots: dict[str, WorkerSlots] = {}
        """By the worker's name."""
        self._common: defaultdict[str, WorkerIndex] = defaultdict(WorkerIndex)
        self._reserved: defaultdict[str, WorkerIndex] = defaultdict(WorkerIndex)
        self._missing: defaultdict[str, Counter[frozenset[str]]] = defaultdict(Counter)
        """By model: the sets of adapters that serving workers miss, and how many workers miss each."""
        self._quickest: dict[str, WorkerSlots] = {}
        """By model: the worker of the highest throughput, as far as heartbeats have reported since one was lost."""
        self._numbers = itertools.count(1)
        """The numbers of assignments."""
        self._held: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """By model: the requests of each tenant at its workers."""
        self._rows: Counter[str] = Counter()
        """By model: the rows of the workers that may get rollouts."""
        self._saturation: defaultdict[tuple[str, str, str], SaturationEstimator] = defaultdict(SaturationEstimator)
        self._merges = rules.merge_tails

    def workers(self) -> list[Worker]:
        return [slots.worker for slots in self._slots.values()]

    # --- workers ------------------------------------------------------------------------------------------------------

    def update(self, worker: Worker, gate_open: bool) -> None:
        """The worker's state, the adapters that it has or misses, or its gate has changed."""
        slots = self._find(worker)
        works = worker.has_role("rollout", worker.hello.model)
        if slots is None:
            if not works:
                return
            assert worker.name not in self._slots, "the earlier worker of this name was removed"
            slots = self._slots[worker.name] = self._new(worker)
        if not works:
            slots.tags = frozenset()
        elif worker.state == "serving":
            slots.tags = frozenset({ANY, _missing_tag(worker.missing_adapters)})
        else:
            slots.tags = frozenset({ANY, BASE, *worker.cached})
        self._count_missing(slots, worker.missing_adapters if worker.state == "serving" else None)
        slots.accepts_rollouts = gate_open
        self._count_rows(slots, worker.hello.max_rows if gate_open and works else 0)
        self._reindex(slots, reserved=True)

    def remove(self, worker: Worker) -> list[InflightRequest]:
        """It is lost. Returns its requests, in the order of their assignment."""
        slots = self._find(worker)
        if slots is None:
            return []
        del self._slots[worker.name]
        self._count_rows(slots, 0)
        for inflight in slots.requests.values():
            self._count_held(inflight, -1)
        if self._quickest.get(worker.hello.model) is slots:
            del self._quickest[worker.hello.model]
        self._count_missing(slots, None)
        for index in (self._common, self._reserved):
            index[worker.hello.model].remove(worker.name)
        return list(slots.requests.values())

    def on_heartbeat(self, worker: Worker, beat: protocol.Heartbeat) -> None:
        slots = self._find(worker)
        if slots is None:
            return
        if slots.heartbeats:
            last = slots.heartbeats[-1]
            seconds = beat.decode_seconds - last.decode_seconds
            if beat.waiting and beat.generated > last.generated:
                slots.served_at = self._clock.monotonic()
            self._saturation_of(worker).add(last.active, beat.active, beat.generated - last.generated, seconds)
            if slots.training and not beat.training:
                slots.trainings.record("", beat.train_seconds - slots.trained_before)
        if beat.training and not slots.training:
            slots.trained_before = slots.heartbeats[-1].train_seconds if slots.heartbeats else beat.train_seconds
        slots.heartbeats.append(beat)
        slots.costs = CostTable.of(beat.costs)
        slots.throughput = slots.costs.throughput("decode")
        if slots.throughput > self._quickest.setdefault(worker.hello.model, slots).throughput:
            self._quickest[worker.hello.model] = slots
        self._reindex(slots)

    # --- their requests -----------------------------------------------------------------------------------------------

    def slots(self, worker: Worker) -> WorkerSlots:
        """The worker's slots; empty ones for a worker that was never given requests or was lost."""
        return self._find(worker) or self._new(worker)

    def _new(self, worker: Worker) -> WorkerSlots:
        return WorkerSlots(worker, BusyTime(self._clock), TokenCounters(self._tenant_shares))

    def outstanding(self, worker: Worker) -> int:
        """Requests that it was given and has not ended."""
        return len(self.slots(worker).requests)

    def busy_seconds(self, worker: Worker) -> float:
        """Seconds for which it has had at least one request, on this connection."""
        return self.slots(worker).busy.seconds

    def assign(self, inflight: InflightRequest, worker: Worker, *, reserved: bool, resumed: bool) -> Assignment:
        """The request's stay at the worker begins: the one place that makes an assignment."""
        slots, now = self._slots[worker.name], self._clock.monotonic()
        slots.busy.add(1)
        tenant = inflight.request.tenant
        slots.counters.lift(tenant)
        tokens = max(1.0, inflight.expected)
        turn = tokens * max(1, int(worker.hello.max_rows * self._turn_share))
        order = slots.counters[tenant] // turn * turn  # requests of a turn stay together
        slots.counters.charge(tenant, tokens)
        slots.reserved += reserved
        if inflight.request.generate.client:
            slots.clients[tenant] += 1
        else:
            slots.rollouts[tenant] += 1
            slots.given[tenant] = now
            if (count := slots.rollouts.total()) >= slots.peak[0] or now - slots.peak[1] > JOB_SECONDS:
                slots.peak = count, now
        self._count_held(inflight, 1)
        name = f"{worker.epoch}.{next(self._numbers)}"  # an epoch is never used twice, also not by another controller
        inflight.assignment = assignment = Assignment(
            worker, name, reserved, order, now, resumed, since=now, queued_at=inflight.queued_at
        )
        assignment.chunk_end = len(inflight.result.tokens) + self._chunk
        slots.requests[name] = inflight
        self._reindex(slots, reserved)
        return assignment

    def find(self, worker: Worker, assignment: str) -> InflightRequest | None:
        """The request that the worker has under this assignment."""
        slots = self._slots.get(worker.name)
        return slots.requests.get(assignment) if slots is not None and slots.worker is worker else None

    def begin(self, inflight: InflightRequest) -> None:
        """The first token of the request's assignment has arrived: the worker decodes it."""
        assignment = inflight.assignment
        assignment.decoding_since = self._clock.monotonic()
        slots = self._slots[assignment.worker.name]
        slots.counters.reach(assignment.order)
        slots.decoding += 1
        self._reindex(slots)

    def last_activity(self, inflight: InflightRequest) -> float:
        """When the request's worker last worked for it: sent its tokens, or, while it waits for a row or memory there,
        computed those of others."""
        assignment = inflight.assignment
        if inflight.state != "assigned":
            return assignment.last_activity
        return max(assignment.last_activity, self.slots(assignment.worker).served_at)

    def release(self, inflight: InflightRequest) -> None:
        """The request's stay at its worker, if that is not lost, ends: the one place that drops an assignment."""
        assignment = inflight.assignment
        if assignment.target is not None:
            self._count_expected(assignment, -1)
        del inflight.assignment
        slots = self._find(assignment.worker)
        if slots is not None:
            del slots.requests[assignment.name]
            self._count_held(inflight, -1)
            slots.busy.add(-1)
            slots.decoding -= assignment.decoding_since is not None
            slots.reserved -= assignment.reserved
            (slots.clients if inflight.request.generate.client else slots.rollouts)[inflight.request.tenant] -= 1
            self._reindex(slots, assignment.reserved)

    # --- decisions ----------------------------------------------------------------------------------------------------

    def has_capacity(self, model: str, reserved: bool) -> bool:
        """Whether some worker may accept some request."""
        return self._select(model, reserved, (ANY,) if reserved else (ANY, _late_tag(ANY))) is not None

    def choose(self, inflight: InflightRequest, reserved: bool, waiting: Collection[str]) -> Worker | None:
        """The worker for a request, in a common row or in a reserved one. ``waiting``: tenants whose rollouts wait for
        a worker. Beyond their share, a tenant's clients leave others' jobs as many rows as these had at once lately;
        where objectives are not kept, rollouts of tenants without clients there get their share."""
        model, tenant, tags = inflight.request.model, inflight.request.tenant, self._tags_for(inflight)
        if inflight.request.generate.client:
            workers = self._in_order(model, reserved, tags, inflight.refused)
            return next((one for one in workers if self._fits_client(self._slots[one.name], tenant, waiting)), None)
        if (worker := self._select(model, reserved, tags, inflight.refused)) is not None:
            return worker
        late = self._in_order(model, False, [*map(_late_tag, tags)], inflight.refused)
        return next((one for one in late if self._fits_late(self._slots[one.name], tenant)), None)

    def short(self, model: str, waiting: Collection[str]) -> set[str]:
        """The tenants, of these whose rollouts wait, that have fewer requests at workers than their share of rows."""
        return short_of_rows(waiting, self._held[model], self._tenant_shares, self._rows[model])

    def beyond(self, model: str, short: Collection[str], waiting: Collection[str]) -> set[str]:
        """The tenants, of those that are ``short``, whose rollouts some worker gets beyond its rows; ``waiting`` as for
        :meth:`choose`."""
        workers = self._in_order(model, False, (ANY,), (), math.inf) if short else ()
        return set(short) & {tenant for one in workers for tenant in self._short_at(self._slots[one.name], waiting)}

    def choose_beyond(self, inflight: InflightRequest, waiting: Collection[str]) -> Worker | None:
        """The worker that gets a rollout beyond its rows, of a tenant that has less than its share of them."""
        model, tenant, tags = inflight.request.model, inflight.request.tenant, self._tags_for(inflight)
        workers, able = self._in_order(model, False, tags, inflight.refused, math.inf), {*waiting, tenant}
        return next((one for one in workers if tenant in self._short_at(self._slots[one.name], able)), None)

    def _in_order(
        self,
        model: str,
        reserved: bool,
        tags: Collection[str],
        refused: Collection[str],
        ahead: float | None = None,
    ) -> Iterator[Worker]:
        """The workers with room, the best first, of which a tenant may have its share; at most :data:`CHOICES`."""
        passed = set(refused)
        for _ in range(CHOICES):
            worker = self._select(model, reserved, tags, passed, ahead)
            if worker is None:
                return
            yield worker
            passed.add(worker.name)

    def has_able(self, inflight: InflightRequest) -> bool:
        """Whether some worker works that has not refused the request."""
        index = self._reserved.get(inflight.request.model)
        return index is not None and bool(index.first((ANY,), inflight.refused))

    def _fits_client(self, slots: WorkerSlots, tenant: str, waiting: Collection[str]) -> bool:
        """Whether a client's request may begin: within the tenant's share, or in a row that others' jobs leave."""
        since = self._clock.monotonic() - JOB_SECONDS
        others = {*waiting, *(other for other, given in slots.given.items() if given > since)} - {tenant}
        share = self._rows_of(tenant, others, slots.worker)
        kept = min(slots.worker.hello.max_rows - share, slots.peak[0]) - slots.rollouts.total()
        return not others or slots.clients[tenant] < share or slots.load[2] > max(0, kept)

    def _fits_late(self, slots: WorkerSlots, tenant: str) -> bool:
        """Whether a rollout may begin where objectives of other tenants' clients are not kept."""
        clients = +slots.clients
        if not clients or tenant in clients:
            return False
        return slots.rollouts[tenant] < self._rows_of(tenant, slots.tenants, slots.worker)

    def _short_at(self, slots: WorkerSlots, waiting: Collection[str]) -> set[str]:
        """The tenants, of these that wait, whose rollouts the worker gets beyond its rows and its queue."""
        rows, held = slots.worker.hello.max_rows, slots.tenants
        if held.total() + slots.arriving >= most_rows(rows) + self._dispatch_ahead:
            return set()
        return short_of_rows(waiting, held, self._tenant_shares, rows)

    def _rows_of(self, tenant: str, others: Collection[str], worker: Worker) -> int:
        """The tenant's share of the worker's rows, where these tenants want some; at least one."""
        return shares({*others, tenant}, self._tenant_shares, worker.hello.max_rows)[tenant]

    def find_division(self, inflight: InflightRequest, queues: RequestQueues) -> Worker | None:
        """The worker where a decoding request, at the end of a chunk, should continue under the same version; None
        where it should stay. A worker that lacks its adapter is no target."""
        assignment, request, tokens = inflight.assignment, inflight.request, len(inflight.result.tokens)
        if tokens < assignment.chunk_end or assignment.reserved:
            return None
        assignment.chunk_end = tokens + self._chunk
        index, source = self._common[request.model], assignment.worker
        first = min(index.first(self._tags_for(inflight), inflight.refused), key=order, default=None)
        if first is None or first.name == source.name:
            return None
        target = self._slots[first.name]
        if target.training:  # the request would get half of the time
            return None
        if request.adapter is not None and request.adapter.hash not in target.worker.cached:
            return None
        left = queues.remaining(inflight, int(self._chunk))
        if not moves(self._slots[source.name].decoder, target.decoder, len(request.generate.prompt) + tokens, left):
            return None
        return target.worker

    def expect(self, inflight: InflightRequest, target: Worker) -> None:
        """Keep room for the request at its next worker, until :meth:`release`."""
        inflight.assignment.target = target
        self._count_expected(inflight.assignment, 1)

    def _count_expected(self, assignment: Assignment, count: int) -> None:
        """So many requests more, or less, leave the assignment's worker for its target."""
        for worker, leaving in ((assignment.worker, count), (assignment.target, 0)):
            if worker is not None and (slots := self._find(worker)) is not None:
                slots.leaving += leaving
                slots.arriving += count - leaving
                self._reindex(slots)

    def find_migration(self, model: str) -> Migration | None:
        """Requests that another worker would begin at once, by :func:`rookery.scheduling.balancing.balance`; of the
        pending ones the last assigned, of the executing ones those with the fewest tokens."""
        index = self._common.get(model)
        if index is None or (move := balance(index.fullest(), index.first((ANY,)))) is None:
            return None
        requests = self._slots[move.source].requests.values()
        able = [inflight for inflight in reversed(requests) if not inflight.assignment.reserved]
        if move.executing:
            able.sort(key=lambda inflight: len(inflight.result.tokens))
        else:
            able = [inflight for inflight in able if inflight.state == "assigned"]
        for number, inflight in enumerate(able):
            move = balance(index.fullest(), index.first(self._tags_for(inflight), inflight.refused))
            if move is not None:
                target = self._slots[move.target].worker
                accepted = [other for other in able[number:] if other.suits(target)]
                return Migration(target, accepted[: move.count])
        return None

    def find_merge(self, worker: Worker, queues: RequestQueues) -> Migration | None:
        """All rollouts of a worker that trains, which another worker's batch is to take, by
        :func:`rookery.scheduling.tails.merge`; None while requests wait for a worker."""
        slots, index = self.slots(worker), self._common.get(worker.hello.model)
        if not self._merges or index is None or not slots.train_seconds or queues.models[worker.hello.model]:
            return None
        moved, others = list(slots.requests.values()), index.first((UNTRAINING,))
        if not moved or not others or slots.serving or slots.leaving:
            return None
        taker = self._slots[others[0].name]
        move = merge(self._tail(slots, queues), self._tail(taker, queues), taker.costs)
        if move is None or not all(inflight.suits(taker.worker) for inflight in moved):
            return None
        return Migration(taker.worker, moved, "merged")

    def _tail(self, slots: WorkerSlots, queues: RequestQueues) -> WorkerRollouts:
        tokens = sum(len(held.request.generate.prompt) + len(held.result.tokens) for held in slots.requests.values())
        left = [queues.remaining(held, 1) for held in slots.requests.values()]
        name, slow = slots.worker.name, slots.heartbeats[-1].slowdowns if slots.heartbeats else TAKING_TURNS
        return WorkerRollouts(name, slots.decoder, max(left, default=0), tokens, slots.train_seconds, slow)

    def _select(
        self,
        model: str,
        reserved: bool,
        tags: Iterable[str],
        without: Collection[str] = (),
        ahead: float | None = None,
    ) -> Worker | None:
        """The best worker with room that has one of ``tags``, except those named in ``without``. ``ahead``: requests
        that may wait in a worker; None for as many as the rules allow."""
        index = (self._reserved if reserved else self._common).get(model)
        if index is None:
            return None
        theta = 0 if reserved else self._dispatch_ahead if ahead is None else ahead
        name = select(index.first(tags, without), theta)
        return self._slots[name].worker if name is not None else None

    def _tags_for(self, inflight: InflightRequest) -> list[str]:
        """The tags whose workers accept the request."""
        adapter = inflight.request.adapter
        needs = adapter.hash if adapter is not None else BASE
        missing = self._missing.get(inflight.request.model, ())
        return [needs, *(_missing_tag(hashes) for hashes in missing if needs not in hashes)]

    # --- the index ----------------------------------------------------------------------------------------------------

    def _count_rows(self, slots: WorkerSlots, rows: int) -> None:
        """So many rows of the worker may get rollouts from now."""
        self._rows[slots.worker.hello.model] += rows - slots.rows
        slots.rows = rows

    def _count_held(self, inflight: InflightRequest, change: int) -> None:
        """The tenant has one request more, or less, at workers."""
        held, tenant = self._held[inflight.request.model], inflight.request.tenant
        held[tenant] += change
        if not held[tenant]:
            del held[tenant]

    def _count_missing(self, slots: WorkerSlots, missing: frozenset[str] | None) -> None:
        """The worker misses these adapters from now; None: it does not serve."""
        counts = self._missing[slots.worker.hello.model]
        if slots.missing is not None:
            counts[slots.missing] -= 1
            if not counts[slots.missing]:
                del counts[slots.missing]
        if missing is not None:
            counts[missing] += 1
        slots.missing = missing

    def _reindex(self, slots: WorkerSlots, reserved: bool = False) -> None:
        """The worker's figures have changed; with ``reserved`` also those of its reserved rows."""
        worker = slots.worker
        pending, executing, free = slots.load
        rows = self._saturation_of(worker).saturated_rows
        quickest, slower = self._quickest.get(worker.hello.model, slots), 0
        if quickest is not slots:
            slower = handicap(slots.costs, quickest.costs, pending + executing)
        common = WorkerLoad(worker.name, pending, executing, free, rows, slots.serving, slower)
        tags = slots.tags if slots.training or not slots.tags else slots.tags | {UNTRAINING}
        if slots.saturated:
            tags = frozenset(map(_late_tag, tags))
        self._common[worker.hello.model].put(common, tags if slots.accepts_rollouts else frozenset())
        if reserved:
            figures = WorkerLoad(worker.name, 0, slots.reserved, max(0, worker.hello.max_rows - slots.reserved))
            self._reserved[worker.hello.model].put(figures, slots.tags)

    def _saturation_of(self, worker: Worker) -> SaturationEstimator:
        hello = worker.hello
        return self._saturation[hello.model, hello.device, hello.kind]

    def _find(self, worker: Worker) -> WorkerSlots | None:
        slots = self._slots.get(worker.name)
        return slots if slots is not None and slots.worker is worker else None


def _late_tag(tag: str) -> str:
    """The tag of workers that are about to miss an objective, and would have ``tag`` otherwise."""
    return f"late {tag}"


def _missing_tag(hashes: Iterable[str]) -> str:
    """The tag of serving workers that miss exactly these adapters."""
    return " ".join(["missing", *sorted(hashes)])
