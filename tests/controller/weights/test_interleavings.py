"""Publish, unpublish, pulls, readers, evictions and lost workers in random order, in virtual time."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from random import Random

import pytest
from tests.support.peers import MODEL
from tests.support.room import beat
from tests.support.weights import VirtualStore

from rookery import protocol
from rookery.controller.fleet.worker import Worker
from rookery.controller.weights.store import RETAINED
from rookery.worker.transfer.published import PublishedArtifacts

NAMES = ("a", "b", "c", "d")
SITES = ("", "far")


@dataclass(eq=False)
class Process:
    """A worker's process: what it was sent and has not handled yet, what is in its cache, from whom it reads."""

    worker: Worker
    inbox: list[protocol.Message] = field(default_factory=list)
    has: set[str] = field(default_factory=set)
    reads: dict[str, tuple[Process | None, int]] = field(default_factory=dict)
    """By hash: its source (None: the service), and the number of the artifact there: a file that is deleted and made
    again is another one, which a running reader does not see."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    published: PublishedArtifacts = field(default_factory=PublishedArtifacts)
    made: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    alive: bool = True

    def serves(self, digest: str) -> bool:
        """Whether a new reader gets it."""
        return self.alive and not self.published.withdrawn(digest) and (
            digest in self.has or self.published.arriving(digest)
        )  # fmt: skip


class Play:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.virtual = VirtualStore()
        self.store = self.virtual.store
        self.processes: dict[str, Process] = {}
        self.live: list[protocol.AdapterRef] = []
        self.gone: set[str] = set()
        self.newest: list[str] = []
        self.version = 0
        self.drained = 0
        self.join("trainer", roles=["train"])
        for name in NAMES:
            self.join(name)
        self.publish()
        self.collect()

    # --- the service's side -------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Take what was posted, and check each order."""
        for process in self.processes.values():
            for message in self.virtual.messages(process.worker):
                process.inbox.append(message)
                refs = message.refs if isinstance(message, protocol.Replicate) else ()
                for digest, sources in [(ref.hash, ref.sources) for ref in refs] + (
                    [(message.hash, message.sources)] if isinstance(message, protocol.Sources) else []
                ):
                    self.check_order(process, digest, sources)

    def check_order(self, process: Process, digest: str, sources: list[str]) -> None:
        assert digest not in self.gone or not sources, "an unpublished artifact has no new reader"
        for address in sources:
            source = self.processes[address.removeprefix("http://").removesuffix(":1")]
            assert source is not process and source.worker.state == "serving"
            assert digest in source.worker.cached | source.worker.receiving

    def publish(self) -> None:
        self.version += 1
        ref = protocol.AdapterRef(policy="p", version=self.version, hash=f"{self.version:064}", rank=4, alpha=8.0)
        self.live.append(ref)
        self.newest = [*self.newest, ref.hash][-RETAINED:]
        trainer = self.processes["trainer"]
        if trainer.alive and self.random.random() < 0.8:  # else the service alone has it
            trainer.has.add(ref.hash)
            trainer.made[ref.hash] += 1
            trainer.published.publish(ref.hash)
            self.store.on_cached(trainer.worker, protocol.AdaptersCached(epoch=1, hashes=[ref.hash]))
        self.store.publish(MODEL, ref)

    def unpublish(self) -> None:
        if len(self.live) > 1:
            ref = self.live.pop(self.random.randrange(len(self.live) - 1))
            self.gone.add(ref.hash)
            self.newest = [digest for digest in self.newest if digest != ref.hash]
            self.store.unpublish([ref.hash])

    def name(self) -> None:
        """A request names a version."""
        process, ref = self.some(), self.random.choice(self.live)
        if process.worker.state == "serving":
            named = self.store.adapter_ref(process.worker, ref)
            if ref.hash not in process.worker.cached:
                process.inbox.append(protocol.Replicate(refs=[named]))
                self.check_order(process, ref.hash, named.sources)

    # --- the workers' side --------------------------------------------------------------------------------------------

    def some(self) -> Process:
        return self.random.choice(list(self.processes.values()))

    def join(self, name: str, roles: list[str] | None = None) -> None:
        has = self.processes[name].has if name in self.processes else set()
        kind = "preemptible" if name == "d" else "reserved"
        worker = self.virtual.join(
            name, sorted(has), self.live[-1:], roles=roles or ["rollout"], kind=kind, site=SITES[name in "cd"]
        )
        self.processes[name] = Process(worker, has=set(has))

    def handle(self) -> None:
        process = self.some()
        if process.inbox and process.alive:
            self.apply(process, process.inbox.pop(0))

    def apply(self, process: Process, message: protocol.Message) -> None:
        match message:
            case protocol.Replicate(refs=refs):
                for ref in refs:
                    process.published.publish(ref.hash)
                    if ref.hash in process.has:
                        self.report(process, ref.hash)
                    else:
                        process.sources[ref.hash] = list(ref.sources)
                        process.published.begin(ref.hash)
                        self.read(process, ref.hash)
            case protocol.Sources(hash=digest, sources=sources) if digest in process.reads:
                process.sources[digest] = list(sources)
                self.read(process, digest)
            case protocol.EvictArtifacts(hashes=hashes):
                for digest in hashes:
                    process.published.unpublish(digest)
                    process.has.discard(digest)
                    assert not process.serves(digest) or process.published.arriving(digest)

    def read(self, process: Process, digest: str) -> None:
        """Begin to read from the first source that takes the reader, at last from the service."""
        for address in process.sources.get(digest, ()):
            source = self.processes[address.removeprefix("http://").removesuffix(":1")]
            if source.serves(digest):
                assert digest not in self.gone or not source.published.withdrawn(digest)
                process.reads[digest] = (source, source.made[digest])
                return
        process.reads[digest] = (None, 0)

    def arrive(self) -> None:
        """A transfer ends, if its source has all of it: one that was withdrawn or deleted meanwhile is read to its end,
        for its files were open."""
        process = self.some()
        if process.alive and process.reads:
            digest = self.random.choice(sorted(process.reads))
            source, made = process.reads[digest]
            if source is not None and not source.alive:
                self.fail(process, digest, source)
            elif source is None or digest not in source.reads or source.made[digest] > made:
                self.drained += source is not None and source.published.withdrawn(digest)
                self.complete(process, digest)

    def complete(self, process: Process, digest: str) -> None:
        del process.reads[digest]
        process.published.end(digest)
        process.made[digest] += 1
        if not process.published.withdrawn(digest):
            process.has.add(digest)
            self.report(process, digest)

    def report(self, process: Process, digest: str) -> None:
        if process.worker.state == "serving":
            self.store.on_cached(process.worker, protocol.AdaptersCached(epoch=1, hashes=[digest]))

    def fail(self, process: Process, digest: str, source: Process) -> None:
        address = source.worker.hello.address
        process.sources[digest] = [one for one in process.sources.get(digest, ()) if one != address]
        self.read(process, digest)
        if process.worker.state == "serving":
            self.store.on_sources_request(
                process.worker, protocol.SourcesRequest(epoch=1, hash=digest, failed=address)
            )  # fmt: skip

    def break_off(self) -> None:
        process = self.some()
        for digest, (source, _) in sorted(process.reads.items()):
            if source is not None and process.alive:
                self.fail(process, digest, source)
                return

    def make_room(self) -> None:
        process = self.some()
        idle = sorted(process.has - process.worker.retained - {self.live[-1].hash})
        if process.alive and idle and process.worker.state == "serving":
            process.has.discard(idle[0])
            self.store.on_evicted(process.worker, protocol.AdaptersEvicted(epoch=1, hashes=[idle[0]]))

    def heartbeat(self) -> None:
        self.virtual.clock.now += self.random.choice([0.1, 2.0, 30.0])
        for process in self.processes.values():
            if process.worker.state == "serving":
                receiving = {digest: int(self.virtual.clock.now) for digest in process.reads}
                self.store.on_heartbeat(process.worker, beat(receiving=receiving))
                self.collect()

    def lose(self) -> None:
        process = self.some()
        if process.alive:
            process.alive = False
            self.virtual.lose(process.worker)

    def rejoin(self) -> None:
        process = self.some()
        if not process.alive:
            process.has -= self.gone  # as on_worker_loaded of the controller has it deleted
            self.join(process.worker.name, list(process.worker.hello.roles))

    # --- the end ------------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        acts = [self.handle] * 6 + [self.arrive] * 5 + [self.name, self.name, self.publish, self.unpublish]
        acts += [self.break_off, self.make_room, self.heartbeat, self.lose, self.rejoin]
        for _ in range(steps):
            self.random.choice(acts)()
            self.collect()

    def settle(self) -> None:
        """Everybody is there, handles all messages, and receives all that it was sent for."""
        for process in list(self.processes.values()):
            if not process.alive:
                process.has -= self.gone
                self.join(process.worker.name, list(process.worker.hello.roles))
        for _ in range(200):
            self.collect()
            busy = False
            for process in self.processes.values():
                while process.inbox:
                    busy = True
                    self.apply(process, process.inbox.pop(0))
                for digest in sorted(process.reads):
                    busy = True
                    source, made = process.reads[digest]
                    if source is not None and not source.alive:
                        self.fail(process, digest, source)
                    elif source is None or digest not in source.reads or source.made[digest] > made:
                        self.complete(process, digest)
            if not busy:
                self.heartbeat()
                return
        raise AssertionError("it does not come to rest")

    def check(self) -> None:
        newest = self.live[-1].hash
        for process in self.processes.values():
            worker = process.worker
            assert worker.cached == process.has, worker.name
            assert not worker.receiving and not worker.orders
            assert not process.has & self.gone, "deleted everywhere"
            assert newest in process.has or "rollout" not in worker.roles
        late = self.virtual.join("late", site=SITES[0])
        for ref in self.live:
            holders = [one for one in self.processes.values() if ref.hash in one.has]
            named = self.store.adapter_ref(late, ref).sources
            near = [one for one in holders if one.worker.hello.site == SITES[0]]
            assert {*named} <= {one.worker.hello.address for one in holders}
            assert bool(named) == bool(near), "the service's copy is as near as a worker of its site"
            reserved = [one for one in holders if one.worker.hello.kind == "reserved"]
            keeps = [one for one in self.processes.values() if ref.hash in one.worker.retained]
            last = reserved if len(reserved) == 1 and ref.hash in self.newest else []
            assert keeps == last


def play(seed: int) -> int:
    one = Play(seed)
    one.run(40)
    one.settle()
    one.check()
    return one.drained


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.heavy)])
def test_no_order_of_events_gives_an_unpublished_artifact_a_new_reader(count: int) -> None:
    """Running readers come to their end, all live versions arrive, and the table agrees with the caches."""
    drained = sum(map(play, range(count)))
    assert drained > count / 100, "artifacts were withdrawn while they were read"
