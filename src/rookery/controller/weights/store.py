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
* :meth:`WeightStore.retain`: the newest versions of a policy stay at their last reserved holder.
* A worker that takes much longer for a version than the first one did, or that misses a version before the next one
  is published, is *slow*: until it has a version it gets no request for it. Requests go to workers that have it.
* A failed pull is checked against the service's copy. If that is intact, the fault lies between it and the worker: the
  worker becomes suspect. If not, no worker can have the artifact and none becomes suspect; the work that names it fails
  with that reason. However many workers report one artifact at a time, it is hashed once.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from rookery import protocol
from rookery.aio import BackgroundTasks
from rookery.clock import Clock
from rookery.controller.fleet.events import AdapterLoaded, AdapterPullFailed
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.fleet.worker import CONNECTED, AdapterOrder, Worker
from rookery.controller.weights.handed import HandedVersions
from rookery.errors import CorruptArtifact, NotFound, Unavailable
from rookery.scheduling.replication import (
    ELSEWHERE,
    SAME_MACHINE,
    SAME_SITE,
    SERVICE,
    Replica,
    Route,
    distance,
    hops_of,
    last_reserved,
    plan_routes,
)
from rookery.storage.artifacts import Artifacts
from rookery.storage.models import CheckpointRow, PolicyRow, VersionRow
from rookery.storage.store import Writer

log = logging.getLogger("rookery.controller.weights.store")

SLOW_FACTOR = 3.0
"""A slow worker took this many times as long as the first one …"""

SLOW_SECONDS = 0.5
"""… and this much longer: short pulls are not judged."""

MOST_CACHED = 100_000
"""Adapters that a worker may report, each with a hash of 64 characters: more than fit any cache."""

AT_ONCE = 2
"""Versions that a worker receives at a time because of an order: one may wait for a slow source while the other makes
progress."""

RETAINED = 2
"""Newest versions of a policy that the last reserved holder keeps: the present one and the one that running episodes
may still sample from."""

MOST_RETAINED = 64
"""Policies whose newest versions are retained, those that published last: a cache has other uses too."""

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


@dataclass(eq=False)
class ArtifactReferences:
    """Where an artifact is: workers in which it is complete, and those that receive it."""

    hops: float
    holders: dict[Worker, None] = field(default_factory=dict)
    transfers: dict[Worker, Transfer] = field(default_factory=dict)

    def sources(self, key: protocol.ReadKey | None, serving: Mapping[str, Worker]) -> list[Replica]:
        """The workers that hold or receive it and have this read key; ``serving``: by address, who answers there."""
        here = [_replica(worker) for worker in self.holders if worker.reads == key]
        for worker, move in self.transfers.items():
            if worker.reads == key:
                here.append(_replica(worker, _source(move, serving)))
        return here

    def serving(self) -> set[str]:
        """Addresses of the workers that others may read it from."""
        return {worker.hello.address for worker in (*self.holders, *self.transfers) if worker.serves}


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
            worker.authorized.add(ref.hash)
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
                _supersede(worker, ref, set(worker.orders))
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
                if _supersede(worker, ref, worker.orders.keys() - worker.lagging):
                    worker.slow = True
            worker.orders.update((ref.hash, AdapterOrder(ref, now)) for ref in refs)
        self._begin(receivers)

    def unpublish(self, hashes: Collection[str]) -> None:
        """No work will name these artifacts again: workers serve no new reader of them and delete them."""
        for digest in hashes:
            self._handed.withdraw(digest)
            self._table.pop(digest, None)
            self._quickest.pop(digest, None)
        self._retained.difference_update(hashes)
        for policy, versions in list(self._newest.items()):
            self._newest[policy] = [entry for entry in versions if entry[1] not in hashes]
        for worker in self._fleet.all():
            if worker.working or worker.state == "joining":
                worker.post(protocol.EvictArtifacts(hashes=list(hashes)))
                worker.cached.difference_update(hashes)
                worker.authorized.difference_update(hashes)
                worker.retained.difference_update(hashes)
                for digest in hashes:
                    _clear_order(worker, digest)
                self._begin([worker])
                self._fleet.refresh(worker)

    def retain(self, ref: protocol.AdapterRef) -> None:
        """``ref`` is the newest version of its policy: its last reserved holder keeps it until newer ones come."""
        versions = {*self._newest.pop(ref.policy, ()), (ref.version, ref.hash)}
        self._newest[ref.policy] = sorted(versions)[-RETAINED:]
        if len(self._newest) > MOST_RETAINED:
            del self._newest[next(iter(self._newest))]
        retained = {digest for versions in self._newest.values() for _, digest in versions}
        changed = retained ^ self._retained
        self._retained = retained
        for digest in sorted(changed):
            self._review(digest)

    def adapter_ref(self, worker: Worker, ref: protocol.AdapterRef) -> protocol.AdapterRef:
        """``ref`` as a message to ``worker`` names it: with sources, unless it is there. It may ask for others from now
        on."""
        worker.authorized.add(ref.hash)
        if ref.hash in worker.cached or worker.state not in CONNECTED:  # a lost one is in no table
            return ref
        entry, move = self._table.get(ref.hash), self._moving(worker, ref.hash)
        if entry is None or move is None:
            self._route(ref, [worker])
            move = self._moving(worker, ref.hash)
        elif not entry.serving().issuperset(move.sources):  # one was lost, or evicted it
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
            self.retain(ref)
        self._hold(worker, worker.cached.difference(worker.hello.loaded))
        if "rollout" in worker.roles:
            missing = [ref for ref in in_use if ref.hash not in worker.cached]
            if missing:
                worker.lagging = {ref.hash for ref in missing}
                self.replicate(missing, [worker])

    def on_worker_lost(self, worker: Worker) -> None:
        """It is not named as a source any more; who reads from it goes on while it answers, and asks for another."""
        self._handed.lost(worker)
        worker.serves = False
        if self._serving.get(worker.hello.address) is worker:
            del self._serving[worker.hello.address]
        for digest in worker.cached | worker.receiving:
            if (entry := self._table.get(digest)) is None:
                continue
            entry.transfers.pop(worker, None)
            self._remove_holder(worker, digest, entry)

    def on_cached(self, worker: Worker, message: protocol.AdaptersCached) -> None:
        if len(worker.cached) + len(message.hashes) > MOST_CACHED or any(len(digest) > 64 for digest in message.hashes):
            raise protocol.BadFrame(f"{len(message.hashes)} more adapters in its cache")
        worker.cached.update(message.hashes)
        self._hold(worker, message.hashes)
        for digest in message.hashes:
            self._on_held(worker, digest)
        self._begin([worker])
        self._fleet.refresh(worker)

    def _on_held(self, worker: Worker, digest: str) -> None:
        """An artifact is there, which perhaps an order named."""
        order = worker.orders.pop(digest, None)
        worker.lagging.discard(digest)
        if order is not None:
            seconds = self._clock.monotonic() - order.since
            quickest = self._quickest.setdefault(digest, seconds)
            worker.slow = seconds > SLOW_FACTOR * quickest + SLOW_SECONDS
            _supersede(worker, order.ref, set(worker.orders))
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
        for digest in list(worker.receiving):
            entry = self._table.get(digest)
            move = entry.transfers.get(worker) if entry is not None else None
            if entry is None or move is None:
                worker.receiving.discard(digest)
            elif digest in beat.receiving:
                move.since = now
            elif now - move.since > HEARTBEATS_UNSEEN * self._fleet.heartbeat_seconds:
                self._end_transfer(worker, digest)

    def on_sources_request(self, worker: Worker, message: protocol.SourcesRequest) -> None:
        """A source failed: name others, without those that failed this receiver before."""
        order = worker.orders.get(message.hash)
        if message.hash not in worker.authorized:  # a hash is no permission: only artifacts that its work names
            return
        entry = self._table.get(message.hash)
        if entry is None or worker in entry.holders:
            worker.post(protocol.Sources(hash=message.hash, sources=[]))
            return
        move = entry.transfers.get(worker)
        if move is None:  # it was silent for so long that its transfer counted as ended
            move = entry.transfers[worker] = Transfer([], self._clock.monotonic())
            worker.receiving.add(message.hash)
        failed = (one for one in (*entry.holders, *entry.transfers) if one.hello.address == message.failed)
        move.failed.update(one.name for one in failed)
        self._reroute(message.hash, entry, worker, move)
        worker.post(protocol.Sources(hash=message.hash, sources=move.sources))
        name = f"version {order.ref.version} of {order.ref.policy}" if order is not None else message.hash[:12]
        log.info("worker %s reads %s from %s", worker.name, name, _source(move, self._serving) or "the service")

    # --- transfers ----------------------------------------------------------------------------------------------------

    def _entry(self, ref: protocol.AdapterRef) -> ArtifactReferences:
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
            for order in [order for order in worker.orders.values() if not order.begun][: max(0, room)]:
                order.begun = True
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
        groups: dict[str, list[Worker]] = {}
        for worker in receivers:
            groups.setdefault(worker.reads.id, []).append(worker)
        for group in groups.values():
            by_name = {worker.name: worker for worker in (*entry.holders, *entry.transfers, *group)}
            routes = plan_routes(
                [_replica(worker) for worker in group],
                entry.sources(group[0].reads, self._serving),
                site=self._site,
                hops=entry.hops,
            )
            for route in routes:
                worker = by_name[route.receiver]
                ordered.append(worker)
                entry.transfers[worker] = Transfer(_addresses(route, by_name), now)
                worker.receiving.add(ref.hash)
                self._count(worker, by_name.get(route.source))
        return ordered

    def _reroute(self, digest: str, entry: ArtifactReferences, worker: Worker, move: Transfer) -> None:
        """Another source for a receiver whose source failed."""
        by_name = {one.name: one for one in (*entry.holders, *entry.transfers)}
        others = [one for one in entry.sources(worker.reads, self._serving) if one.name != worker.name]
        [route] = plan_routes([_replica(worker)], others, site=self._site, hops=entry.hops, excluded=move.failed)
        move.sources = _addresses(route, by_name)
        self._count(worker, by_name.get(route.source))

    def _count(self, worker: Worker, source: Worker | None) -> None:
        self.routed["service" if source is None else WHERE[distance(_replica(worker), _replica(source))]] += 1

    def _end_transfer(self, worker: Worker, digest: str) -> None:
        worker.receiving.discard(digest)
        if (entry := self._table.get(digest)) is not None:
            entry.transfers.pop(worker, None)

    # --- holders ------------------------------------------------------------------------------------------------------

    def _hold(self, worker: Worker, hashes: Iterable[str]) -> None:
        """These artifacts are complete at ``worker``, which others may read from unless it drains."""
        for digest in hashes:
            entry = self._table.setdefault(digest, ArtifactReferences(hops_of(1)))
            entry.transfers.pop(worker, None)
            worker.receiving.discard(digest)
            if worker not in entry.holders and worker.state in CONNECTED and worker.state != "draining":
                entry.holders[worker] = None
                self._review(digest)

    def _remove_holder(self, worker: Worker, digest: str, entry: ArtifactReferences) -> None:
        """It is not at ``worker`` any more; nothing is kept about an artifact that is nowhere."""
        if worker in entry.holders:
            del entry.holders[worker]
            self._review(digest)
        if not entry.holders and not entry.transfers:
            del self._table[digest]

    def _review(self, digest: str) -> None:
        """Have the last reserved holder of a retained artifact keep it, and nobody else."""
        entry = self._table.get(digest)
        if entry is None:
            return
        keeper = last_reserved(map(_replica, entry.holders)) if digest in self._retained else None
        for worker in entry.holders:
            keeps = worker.name == keeper
            if keeps != (digest in worker.retained) and worker.state in CONNECTED:
                (worker.retained.add if keeps else worker.retained.discard)(digest)
                worker.post(protocol.Retain(hashes=sorted(worker.retained)))

    # --- failed pulls -------------------------------------------------------------------------------------------------

    def on_pull_failed(self, worker: Worker, message: protocol.PullFailed) -> None:
        if message.hash not in worker.authorized:
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
    worker.orders.pop(digest, None)
    worker.lagging.discard(digest)


def _supersede(worker: Worker, by: protocol.AdapterRef, ordered: Iterable[str]) -> bool:
    """Cancel the ``ordered`` versions that are older than ``by`` of the same policy; whether there were any."""
    older = [
        digest
        for digest in ordered
        if (ref := worker.orders[digest].ref).policy == by.policy and ref.version < by.version
    ]
    for digest in older:
        _clear_order(worker, digest)
    return bool(older)
