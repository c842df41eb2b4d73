"""The store of weights by reference: which worker holds which artifact, and who receives it from whom.

The service keeps references, workers the bytes. The table is soft: workers bring it when they register, and report what
arrives and leaves. Decisions are those of :mod:`rookery.scheduling.replication`; this room carries them out.

* :meth:`WeightStore.hand_over`: a trainer has written a version that is not committed. Workers of its machine take it
  over (:mod:`rookery.controller.weights.handed`); they have it when the commit lands (:meth:`WeightStore.settle`), and
  pull nothing.
* :meth:`WeightStore.publish`: a version is durable and in use, so all rollout workers of its model receive it.
* :meth:`WeightStore.replicate`: workers receive versions, few at a time each, in order of their orders. A newer version
  of a policy replaces an older one whose transfer has not begun. A worker that receives is a source at once.
* :meth:`WeightStore.unpublish`: no work will name an artifact again. It gets no new reader, running ones end, and it is
  deleted.
* :meth:`WeightStore.retain`: the last reserved holder of the newest versions of a policy evicts them last. The durable
  copy is there if it does, or is lost.
* A worker that takes much longer for a version than the first one did, since its source has it whole, or that misses a
  version before the next one is published, is *slow*: until it has a version it gets no request for it, and others read
  it from elsewhere. Requests go to workers that have it. A receiver that holds up its readers is left by them while it
  receives.
* A failed pull is checked against the service's copy. If that is intact, the fault lies between it and the worker: the
  worker becomes suspect. If not, no worker can have the artifact and none becomes suspect; the work that names it fails
  with that reason. However many workers report one artifact at a time, it is hashed once.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from cachetools import LRUCache

from rookery import protocol
from rookery.aio import BackgroundTasks
from rookery.clock import Clock
from rookery.controller.fleet.events import AdapterLoaded, AdapterPullFailed
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.fleet.worker import CONNECTED, AdapterOrder, Worker
from rookery.controller.weights.handed import HandedVersions
from rookery.errors import CorruptArtifact, NotFound, Unavailable, count_of
from rookery.scheduling.replication import (
    ELSEWHERE,
    FAR_BELOW,
    SAME_MACHINE,
    SAME_SITE,
    SERVICE,
    Pace,
    Replica,
    Route,
    SourceRates,
    distance,
    hops_of,
    plan_routes,
)
from rookery.storage.artifacts import Artifacts
from rookery.storage.models import CheckpointRow, PolicyRow, VersionRow
from rookery.storage.store import Writer

log = logging.getLogger("rookery.controller.weights.store")

SLOW_FACTOR = 3.0
"""A slow worker took this many times as long as the first one, and :data:`SLOW_SECONDS` longer."""

SLOW_SECONDS = 0.5
"""A pull that is less than this longer than the first one is not judged: it is short."""

MOST_CACHED = 100_000
"""Adapters that a worker may report, each with a hash of 64 characters: more than fit any cache."""

AT_ONCE = 2
"""Versions that a worker receives at a time because of an order: one may wait for a slow source while the other makes
progress."""

RETAINED = 2
"""Newest versions of a policy that the last reserved holder evicts last: the present one and the one that running
episodes may still sample from."""

MOST_RETAINED = 64
"""Policies whose newest versions are retained, those that published last: a cache has other uses too."""

MOST_UNPUBLISHED = 4096
"""Unpublished artifacts that are known: it matters while a report is on its way."""

WHERE = {SAME_MACHINE: "machine", SAME_SITE: "site", ELSEWHERE: "elsewhere"}

HEARTBEATS_UNSEEN = 5
"""A transfer that its receiver has not mentioned for so many heartbeats has ended without a report."""


@dataclass(eq=False)
class Transfer:
    """An artifact on its way to a worker."""

    sources: list[str]
    """Addresses, as the receiver has them. It reads from the first one; empty: from the service."""
    since: float
    """Monotonic time when the receiver last was seen to receive it."""
    ordered: bool = False
    """Whether an order asked for it, not a request."""
    failed: set[str] = field(default_factory=set)
    """Names of sources that failed."""
    pace: Pace = field(default_factory=Pace)
    left: bool = False
    """Whether its readers were sent elsewhere, which is done once."""


@dataclass(eq=False)
class ArtifactReferences:
    """Where an artifact is: workers in which it is complete, and those that receive it. A receiver's heartbeat takes as
    long however many others there are."""

    hops: float
    holders: dict[Worker, float] = field(default_factory=dict)
    """Monotonic times since when."""
    reserved: dict[Worker, None] = field(default_factory=dict)
    """The holders that are reserved."""
    keeper: Worker | None = None
    """The holder that was asked to retain it."""
    transfers: dict[Worker, Transfer] = field(default_factory=dict)
    """Changed by :meth:`begin`, :meth:`redirect`, :meth:`leave` and :meth:`end` alone."""
    left: dict[str | tuple[str, str], dict[str, float]] = field(default_factory=dict)
    """By address of a source that has it whole, or by the sites of a source and its receiver if they differ: names of
    receivers that their readers left, and their rates."""
    _readers: defaultdict[str, dict[Worker, None]] = field(default_factory=lambda: defaultdict(dict))
    """By the address that they read from first."""
    _staying: Counter[str] = field(default_factory=Counter)
    """By site, the transfers whose readers were not sent elsewhere."""

    @property
    def last_reserved(self) -> Worker | None:
        """The worker that evicts its copy of a retained artifact last: the only reserved one."""
        return next(iter(self.reserved)) if len(self.reserved) == 1 else None

    def hold(self, worker: Worker, now: float) -> None:
        """It is complete there."""
        self.holders[worker] = now
        if worker.hello.kind == "reserved":
            self.reserved[worker] = None

    def lose(self, worker: Worker) -> None:
        """It is not there any more."""
        del self.holders[worker]
        self.reserved.pop(worker, None)

    def sources(self, key: protocol.ReadKey | None, serving: Mapping[str, Worker]) -> list[Replica]:
        """The workers that hold or receive it and have this read key; ``serving``: by address, who answers there."""
        here = [_replica(worker) for worker in self.holders if worker.reads == key]
        for worker, move in self.transfers.items():
            if worker.reads == key:
                here.append(_replica(worker, _source(move, serving)))
        return here

    def begin(self, worker: Worker, move: Transfer) -> None:
        """It is on its way to ``worker``, by this transfer instead of an earlier one."""
        self.end(worker)
        self.transfers[worker] = move
        self._staying[worker.hello.site] += not move.left
        self._read(worker, move)

    def redirect(self, worker: Worker, move: Transfer, sources: list[str]) -> None:
        """``worker`` reads from other sources."""
        self._unread(worker, move)
        move.sources, move.pace = sources, Pace()
        self._read(worker, move)

    def leave(self, worker: Worker, move: Transfer) -> None:
        """The readers of ``worker`` are sent elsewhere."""
        self._staying[worker.hello.site] -= not move.left
        move.left = True

    def end(self, worker: Worker) -> Transfer | None:
        """It is not on its way to ``worker`` any more; the transfer that ended."""
        if (move := self.transfers.pop(worker, None)) is not None:
            self._staying[worker.hello.site] -= not move.left
            self._unread(worker, move)
        return move

    def readers(self, worker: Worker) -> list[Worker]:
        """The receivers that read from ``worker``."""
        return [*self._readers.get(worker.hello.address, ())]

    def all_left(self, site: str) -> bool:
        """Whether the readers of all receivers at a site were sent elsewhere."""
        return not self._staying[site]

    def _read(self, worker: Worker, move: Transfer) -> None:
        if move.sources:
            self._readers[move.sources[0]][worker] = None

    def _unread(self, worker: Worker, move: Transfer) -> None:
        if move.sources and (readers := self._readers.get(move.sources[0])) is not None:
            readers.pop(worker, None)
            if not readers:
                del self._readers[move.sources[0]]

    def served_by(self, worker: Worker | None) -> bool:
        """Whether others may read it from this worker."""
        return worker is not None and worker.serves and (worker in self.holders or worker in self.transfers)


def adapter_ref(policy: PolicyRow, row: VersionRow | CheckpointRow) -> protocol.AdapterRef:
    """The reference to a stored version of ``policy``, whose rank and alpha all of its versions share."""
    return protocol.AdapterRef(
        policy=policy.id, version=row.version, hash=row.hash, rank=policy.rank, alpha=policy.alpha
    )


class WeightStore:
    """Keeps ``cached``, ``orders``, ``lagging``, ``slow`` and ``retained`` of every :class:`Worker`."""

    def __init__(self, fleet: Fleet, artifacts: Artifacts, writer: Writer, clock: Clock, site: str = "") -> None:
        """``site``: where the service runs, whose copy of an artifact is a source too."""
        self.failed_pulls = 0
        """Pulls of artifacts that a worker reported as failed."""
        self.routed: Counter[str] = Counter()
        """Transfers by where they read from: ``machine``, ``site``, ``elsewhere`` or ``service``; ``handed``: none was
        needed."""
        self._fleet = fleet
        self._artifacts = artifacts
        self._writer = writer
        self._clock = clock
        self._site = site
        self._table: dict[str, ArtifactReferences] = {}
        self._handed = HandedVersions()
        self._newest: dict[str, list[tuple[int, str]]] = {}
        """By policy, that which published last at the end: (version, hash) of its newest versions, oldest first."""
        self._retained: set[str] = set()
        """The hashes in ``_newest``."""
        self._serving: dict[str, Worker] = {}
        """By address, the worker that answers there."""
        self._quickest: dict[str, float] = {}
        """By hash: seconds from the order to the first worker's report."""
        self._unpublished: LRUCache[str, None] = LRUCache(MOST_UNPUBLISHED)
        """Artifacts that workers were sent to delete; a report that one arrived may still be on its way."""
        self._rates = SourceRates()
        self._failures: dict[str, list[tuple[Worker, str]]] = {}
        """By hash, while the service's copy is being checked: the workers that failed to pull it, and their errors."""
        self._checks = BackgroundTasks()

    async def close(self) -> None:
        await self._checks.cancel()

    # --- versions that are not committed yet --------------------------------------------------------------------------

    def hand_over(self, trainer: Worker, ref: protocol.AdapterRef, folder: str) -> None:
        """``trainer`` has written ``ref``, whose number is not known yet, to a private folder of its cache, and uploads
        it now."""
        model = trainer.hello.model
        self._handed.begin(trainer, ref, folder, self._fleet.serving("rollout", model))

    def on_handed_over(self, worker: Worker, message: protocol.HandedOver) -> None:
        self._handed.received(worker, message.hash)

    def withdraw(self, digest: str) -> None:
        """An artifact of :meth:`hand_over` is not committed."""
        self._handed.withdraw(digest)

    def settle(self, ref: protocol.AdapterRef) -> None:
        """``ref`` is committed, and perhaps never published: whoever was handed it has it."""
        for worker in self._handed.commit(ref):
            worker.named_hashes.add(ref.hash)
            worker.cached.add(ref.hash)
            worker.post(protocol.Replicate(refs=[ref]))
            self._entry(ref)
            self._hold(worker, [ref.hash])
            self._on_held(worker, ref.hash)
            self.routed["handed"] += 1

    # --- publish, replicate, unpublish, retain ------------------------------------------------------------------------

    def publish(self, model: str, ref: protocol.AdapterRef) -> None:
        """``ref`` is durable: rollout workers of ``model`` receive it. Returns at once."""
        self.settle(ref)
        self.retain(ref)
        receivers = list[Worker]()
        for worker in self._fleet.serving("rollout", model):
            if ref.hash in worker.cached:
                _supersede(worker, ref)
            else:
                receivers.append(worker)
        self.replicate([ref], receivers)
        for worker in receivers:
            self._fleet.refresh(worker)

    def replicate(self, refs: Sequence[protocol.AdapterRef], receivers: Sequence[Worker]) -> None:
        """Each of ``receivers`` receives ``refs``, and reports each when it is complete."""
        now = self._clock.monotonic()
        for worker in receivers:
            for ref in refs:
                if _supersede(worker, ref, worker.lagging):
                    worker.slow = True
            for ref in refs:
                worker.orders.add(AdapterOrder(ref, now, now))
        self._begin(receivers)

    def unpublish(self, hashes: Collection[str]) -> None:
        """No work will name these artifacts again: workers serve no new reader of them and delete them."""
        for digest in hashes:
            self._handed.withdraw(digest)
            self._table.pop(digest, None)
            self._quickest.pop(digest, None)
            self._unpublished[digest] = None
        self._retained.difference_update(hashes)
        left = {policy: [one for one in of_it if one[1] not in hashes] for policy, of_it in self._newest.items()}
        self._newest = {policy: versions for policy, versions in left.items() if versions}
        for worker in self._fleet.all():
            if worker.working or worker.state == "joining":
                worker.post(protocol.EvictArtifacts(hashes=list(hashes)))
                worker.cached.difference_update(hashes)
                worker.named_hashes.difference_update(hashes)
                worker.retained.difference_update(hashes)
                for digest in hashes:
                    _clear_order(worker, digest)
                self._begin([worker])
                self._fleet.refresh(worker)

    def retain(self, ref: protocol.AdapterRef) -> None:
        """``ref`` is its policy's newest version: until newer ones come, its last reserved holder evicts it last."""
        self._newest[ref.policy] = self._newest.pop(ref.policy, [])
        self._remember([ref])

    def _remember(self, refs: Iterable[protocol.AdapterRef]) -> None:
        """``refs`` are in use; a policy of theirs that is not known published before all others."""
        earlier: dict[str, list[tuple[int, str]]] = {}
        for ref in refs:
            self._unpublished.pop(ref.hash, None)
            known = self._newest if ref.policy in self._newest else earlier
            versions = {*known.get(ref.policy, ()), (ref.version, ref.hash)}
            known[ref.policy] = sorted(versions)[-RETAINED:]
        self._newest = dict([*earlier.items(), *self._newest.items()][-MOST_RETAINED:])
        retained = {digest for versions in self._newest.values() for _, digest in versions}
        changed = retained ^ self._retained
        self._retained = retained
        self._review(sorted(changed))

    def adapter_ref(self, worker: Worker, ref: protocol.AdapterRef) -> protocol.AdapterRef:
        """``ref`` as a message to ``worker`` names it: with sources, unless it is there. It may ask for others from now
        on."""
        worker.named_hashes.add(ref.hash)
        if ref.hash in worker.cached or worker.state not in CONNECTED:  # a lost one is in no table
            return ref
        entry, move = self._table.get(ref.hash), self._moving(worker, ref.hash)
        if entry is None or move is None:
            self._route(ref, [worker])
            move = self._moving(worker, ref.hash)
        elif not all(entry.served_by(self._serving.get(one)) for one in move.sources):  # one was lost, or evicted it
            self._reroute(ref.hash, entry, worker, move)
        sources = move.sources if move is not None else []
        return msgspec.structs.replace(ref, sources=sources, base=self._base(worker, ref) if sources else "")

    def _base(self, worker: Worker, ref: protocol.AdapterRef) -> str:
        """The version before ``ref``, if it is a whole model and the worker has that version: its source may have it
        too. A LoRA changes in nearly every word."""
        earlier = (digest for version, digest in reversed(self._newest.get(ref.policy, ())) if version < ref.version)
        return next((digest for digest in earlier if digest in worker.cached), "") if not ref.rank else ""

    # --- events -------------------------------------------------------------------------------------------------------

    def on_worker_joined(self, worker: Worker) -> None:
        """It answers at its address from now on: an earlier process there, whose end is not known yet, is no source any
        more, and whoever reads from that address reads from this one."""
        if address := worker.hello.address:
            if (earlier := self._serving.get(address)) is not None:
                earlier.serves = False
            self._serving[address] = worker
            worker.serves = True

    def on_worker_loaded(self, worker: Worker, in_use: Sequence[protocol.AdapterRef]) -> None:
        """``in_use``: the versions of its base model that running jobs sample from."""
        for ref in in_use:
            self._entry(ref)
        self._remember(in_use)
        self._hold(worker, worker.cached.difference(worker.hello.loaded))
        if "rollout" in worker.roles:
            missing = [ref for ref in in_use if ref.hash not in worker.cached]
            if missing:
                worker.lagging = {ref.hash for ref in missing}
                self.replicate(missing, [worker])

    def on_worker_lost(self, worker: Worker) -> None:
        """It is not named as a source any more; its readers continue while it answers, then ask for another."""
        self._handed.lost(worker)
        worker.serves = False
        if self._serving.get(worker.hello.address) is worker:
            del self._serving[worker.hello.address]
        for digest in worker.cached | worker.receiving:
            if (entry := self._table.get(digest)) is None:
                continue
            entry.end(worker)
            self._remove_holder(worker, digest, entry)

    def on_cached(self, worker: Worker, message: protocol.AdaptersCached) -> None:
        if len(worker.cached) + len(message.hashes) > MOST_CACHED or any(len(digest) > 64 for digest in message.hashes):
            raise protocol.BadFrame(f"{count_of(len(message.hashes), 'more adapter')} in its cache")
        hashes = [digest for digest in message.hashes if digest not in self._unpublished]
        worker.cached.update(hashes)
        self._hold(worker, hashes)
        for digest in hashes:
            self._on_held(worker, digest)
        self._begin([worker])
        self._fleet.refresh(worker)

    def _on_held(self, worker: Worker, digest: str) -> None:
        """An artifact is there, which perhaps an order named."""
        order = worker.orders.remove(digest)
        worker.lagging.discard(digest)
        if order is not None:
            seconds = self._clock.monotonic() - order.since
            quickest = self._quickest.setdefault(digest, seconds)
            worker.slow = self._clock.monotonic() - order.able > SLOW_FACTOR * quickest + SLOW_SECONDS
            _supersede(worker, order.ref)
            self._fleet.emit(AdapterLoaded(self._clock.time(), worker, order.ref, seconds))

    def on_evicted(self, worker: Worker, message: protocol.AdaptersEvicted) -> None:
        worker.cached.difference_update(message.hashes)
        for digest in message.hashes:
            if (entry := self._table.get(digest)) is not None:
                self._remove_holder(worker, digest, entry)
        self._fleet.refresh(worker)

    def on_heartbeat(self, worker: Worker, beat: protocol.Heartbeat) -> None:
        """Take over its transfers from a heartbeat; a transfer that it does not mention has ended."""
        now = self._clock.monotonic()
        for digest in sorted(worker.receiving):
            entry = self._table.get(digest)
            move = entry.transfers.get(worker) if entry is not None else None
            if entry is None or move is None:
                worker.receiving.discard(digest)
            elif digest in beat.receiving:
                move.since = now
                move.pace.see(now, beat.receiving[digest])
                self._judge(digest, entry, worker, move)
            elif now - move.since > HEARTBEATS_UNSEEN * self._fleet.heartbeat_seconds:
                self._end_transfer(worker, digest)

    def on_sources_request(self, worker: Worker, message: protocol.SourcesRequest) -> None:
        """A source failed: name others, without those that failed this receiver before."""
        order = worker.orders.get(message.hash)
        if message.hash not in worker.named_hashes:  # a hash is no permission: only artifacts that its work names
            return
        entry = self._table.get(message.hash)
        if entry is None or worker in entry.holders:
            worker.post(protocol.Sources(hash=message.hash, sources=[]))
            return
        move = entry.transfers.get(worker)
        if move is None:  # it was silent for so long that its transfer counted as ended
            move = Transfer([], self._clock.monotonic())
            entry.begin(worker, move)
            worker.receiving.add(message.hash)
        failed = [one for one in (*entry.holders, *entry.transfers) if one.hello.address == message.failed]
        if (serving := self._serving.get(message.failed)) is not None:  # a new process there, which loads its model
            failed.append(serving)
        move.failed.update(one.name for one in failed)
        self._reroute(message.hash, entry, worker, move)
        worker.post(protocol.Sources(hash=message.hash, sources=move.sources))
        name = f"version {order.ref.version} of {order.ref.policy}" if order is not None else message.hash[:12]
        log.info("worker %s reads %s from %s", worker.name, name, _source(move, self._serving) or "the service")

    # --- transfers ----------------------------------------------------------------------------------------------------

    def _entry(self, ref: protocol.AdapterRef) -> ArtifactReferences:
        self._unpublished.pop(ref.hash, None)
        entry = self._table.setdefault(ref.hash, ArtifactReferences(0.0))
        entry.hops = hops_of(ref.rank)
        return entry

    def _moving(self, worker: Worker, digest: str) -> Transfer | None:
        entry = self._table.get(digest)
        return entry.transfers.get(worker) if entry is not None else None

    def _begin(self, workers: Iterable[Worker]) -> None:
        """Begin transfers of what these workers are to receive, as far as each has room for one more. All that read one
        artifact are one decision."""
        begun: dict[str, tuple[protocol.AdapterRef, list[Worker]]] = {}
        for worker in workers:
            if worker.state not in CONNECTED:
                continue
            moves = [self._moving(worker, digest) for digest in worker.receiving]
            room = AT_ONCE - sum(move is not None and move.ordered for move in moves)
            for order in worker.orders.begin(room):
                begun.setdefault(order.ref.hash, (order.ref, []))[1].append(worker)
        orders: dict[Worker, list[protocol.AdapterRef]] = {}
        for ref, receivers in begun.values():
            routed = self._route(ref, [worker for worker in receivers if self._moving(worker, ref.hash) is None])
            for worker in dict.fromkeys([*routed, *receivers]):
                orders.setdefault(worker, []).append(self.adapter_ref(worker, ref))
                if (move := self._moving(worker, ref.hash)) is not None:
                    move.ordered = True
        for worker, refs in orders.items():
            worker.post(protocol.Replicate(refs=refs))

    def _route(self, ref: protocol.AdapterRef, receivers: Sequence[Worker]) -> list[Worker]:
        """Decide from whom each of ``receivers`` receives ``ref``. They are returned in an order in which none comes
        before its source, so that the source has its order first."""
        entry, now, ordered = self._entry(ref), self._clock.monotonic(), list[Worker]()
        left = {worker.name for worker, move in entry.transfers.items() if move.left}
        groups: dict[str, list[Worker]] = {}
        for worker in receivers:
            groups.setdefault(worker.reads.id, []).append(worker)
        for group in groups.values():
            by_name = {worker.name: worker for worker in (*entry.holders, *entry.transfers, *group)}
            sources = entry.sources(group[0].reads, self._serving)
            routes = plan_routes(
                [_replica(worker) for worker in group],
                [one._replace(slow=one.slow or one.name in left) for one in sources],
                site=self._site,
                hops=entry.hops,
            )
            for route in routes:
                worker = by_name[route.receiver]
                ordered.append(worker)
                entry.begin(worker, Transfer(_addresses(route, by_name), now))
                worker.receiving.add(ref.hash)
                self._count(worker, by_name.get(route.source))
        return ordered

    def _reroute(
        self, digest: str, entry: ArtifactReferences, worker: Worker, move: Transfer, besides: Collection[str] = ()
    ) -> None:
        """Another source, other than ``besides``, for a receiver whose source failed, or is left."""
        by_name = {one.name: one for one in (*entry.holders, *entry.transfers)}
        others = [one for one in entry.sources(worker.reads, self._serving) if one.name != worker.name]
        [route] = plan_routes(
            [_replica(worker)], others, site=self._site, hops=entry.hops, excluded={*move.failed, *besides}
        )
        entry.redirect(worker, move, _addresses(route, by_name))
        if (order := worker.orders.get(digest)) is not None:
            order.able = self._clock.monotonic()
        self._count(worker, by_name.get(route.source))

    def _judge(self, digest: str, entry: ArtifactReferences, worker: Worker, move: Transfer) -> None:
        """If ``worker`` receives far more slowly than others could, its readers leave it, and it reads behind them."""
        address = move.sources[0] if move.sources else SERVICE
        source = self._serving.get(address)
        upstream = entry.transfers.get(source) if source is not None else None
        rate, above = move.pace.rate, upstream.pace.rate if upstream is not None else None
        if rate is None or (upstream is not None and above is None) or (address and source is None):
            return
        link = (source.hello.site if source is not None else self._site, worker.hello.site)
        key = address if link[0] == link[1] else link
        left = entry.left.get(key, {}) if upstream is None else {}
        for name, its in left.items():
            if FAR_BELOW * its < rate and (other := self._fleet.get(name)) is not None:
                self._mark_slow(other)
        all_left = bool(left) and entry.all_left(link[1])
        if not self._rates.holds_up(link, rate, above, left.values(), all_left) or move.left:
            return
        if not (readers := entry.readers(worker)):
            return
        entry.leave(worker, move)
        if upstream is None:
            entry.left.setdefault(key, {})[worker.name] = rate
        else:
            self._mark_slow(worker)
        for reader in readers:
            self._reroute(digest, entry, reader, entry.transfers[reader], besides=[worker.name])
        if source is not None:
            self._reroute(digest, entry, worker, move, besides=[source.name])
        for one in [*readers, worker] if source is not None else readers:
            one.post(protocol.Sources(hash=digest, sources=entry.transfers[one].sources))
        log.info("worker %s receives %s at %.0f kB/s: its readers leave it", worker.name, digest[:12], rate / 1e3)

    def _mark_slow(self, worker: Worker) -> None:
        if not worker.slow:
            worker.slow = True
            self._fleet.refresh(worker)

    def _count(self, worker: Worker, source: Worker | None) -> None:
        self.routed["service" if source is None else WHERE[distance(_replica(worker), _replica(source))]] += 1

    def _end_transfer(self, worker: Worker, digest: str) -> None:
        worker.receiving.discard(digest)
        if (entry := self._table.get(digest)) is not None:
            entry.end(worker)

    # --- holders ------------------------------------------------------------------------------------------------------

    def _hold(self, worker: Worker, hashes: Iterable[str]) -> None:
        """These artifacts are complete at ``worker``, which others may read from unless it drains."""
        new = []
        for digest in hashes:
            entry = self._table.setdefault(digest, ArtifactReferences(hops_of(1)))
            move, order = entry.end(worker), worker.orders.get(digest)
            if move is not None and move.sources and not move.left and order is not None:
                order.able = max(order.able, entry.holders.get(self._serving.get(move.sources[0], worker), 0.0))
            worker.receiving.discard(digest)
            if worker not in entry.holders and worker.state in CONNECTED and worker.state != "draining":
                entry.hold(worker, self._clock.monotonic())
                new.append(digest)
        self._review(new, worker)

    def _remove_holder(self, worker: Worker, digest: str, entry: ArtifactReferences) -> None:
        """It is not at ``worker`` any more; nothing is kept about an artifact that is nowhere."""
        if worker in entry.holders:
            entry.lose(worker)
            self._review([digest])
        if not entry.holders and not entry.transfers:
            del self._table[digest]

    def _review(self, hashes: Iterable[str], *joined: Worker) -> None:
        """Have the last reserved holder of a retained artifact evict it last, and nobody else; ``joined``: new holders
        of these artifacts. A worker gets one message however many they are."""
        changed: dict[Worker, None] = {}
        for digest in hashes:
            entry = self._table.get(digest)
            if entry is None:
                continue
            before, entry.keeper = entry.keeper, entry.last_reserved if digest in self._retained else None
            for worker in dict.fromkeys((before, entry.keeper, *joined)):
                if worker is None or worker not in entry.holders:
                    continue
                keeps = worker is entry.keeper
                if keeps != (digest in worker.retained) and worker.state in CONNECTED:
                    (worker.retained.add if keeps else worker.retained.discard)(digest)
                    changed[worker] = None
        for worker in changed:
            worker.post(protocol.Retain(hashes=sorted(worker.retained)))

    # --- failed pulls -------------------------------------------------------------------------------------------------

    def on_pull_failed(self, worker: Worker, message: protocol.PullFailed) -> None:
        if message.hash not in worker.named_hashes:
            return  # not named by its work: perhaps requested on an earlier connection
        self.failed_pulls += 1
        self._end_transfer(worker, message.hash)
        self._fleet.emit(AdapterPullFailed(self._clock.time(), worker, message.hash, message.error))
        failures = self._failures.setdefault(message.hash, [])
        failures.append((worker, message.error))
        if len(failures) == 1:
            self._checks.start(self._check_copy(message.hash))

    async def _check_copy(self, digest: str) -> None:
        """Hash the service's copy and decide about the workers that could not pull it."""
        fault = ""
        try:
            await self._writer(self._artifacts.verify, digest)
        except (CorruptArtifact, NotFound, Unavailable, OSError) as error:
            fault = str(error)
        finally:
            failures = self._failures.pop(digest)
        for worker, reason in failures:
            if fault:
                log.error("worker %s failed to pull artifact %s: %s", worker.name, digest[:12], fault,
                          extra={"worker": worker.name})  # fmt: skip
                _clear_order(worker, digest)
                self._begin([worker])
                self._fleet.refresh(worker)
            else:
                self._fleet.suspect(worker, f"it cannot pull artifact {digest[:12]}, which the service has: {reason}")


def _replica(worker: Worker, source: str | None = None) -> Replica:
    hello = worker.hello
    reserved = hello.kind == "reserved"
    return Replica(
        worker.name,
        hello.host,
        hello.site,
        serves=worker.serves,
        reserved=reserved,
        source=source,
        address=hello.address,
        slow=worker.slow,
    )


def _source(move: Transfer, serving: Mapping[str, Worker]) -> str:
    """The name of the worker that a receiver reads from, or its address where nobody answers any more; empty: the
    service."""
    address = move.sources[0] if move.sources else SERVICE
    return serving[address].name if address in serving else address


def _addresses(route: Route, by_name: dict[str, Worker]) -> list[str]:
    return [by_name[name].hello.address for name in route.sources if name != SERVICE]


def _clear_order(worker: Worker, digest: str) -> None:
    """The worker need not receive this artifact any more."""
    worker.orders.remove(digest)
    worker.lagging.discard(digest)


def _supersede(worker: Worker, by: protocol.AdapterRef, kept: Collection[str] = ()) -> bool:
    """Cancel the ordered versions that are older than ``by`` of the same policy, except those ``kept``; whether there
    were any."""
    older = [digest for digest in worker.orders.older(by) if digest not in kept]
    for digest in older:
        _clear_order(worker, digest)
    return bool(older)
