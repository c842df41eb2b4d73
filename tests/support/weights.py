"""The store of weights with workers that are records, in virtual time: no connection, no thread, no file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, cast

from tests.support.peers import MODEL, ManualClock
from tests.support.room import beat

from rookery import protocol
from rookery.controller.fleet.worker import Worker
from rookery.controller.weights.store import WeightStore

BEAT_SECONDS = 2.0


class Sent:
    """The messages to one worker, in order."""

    epoch = 1

    def __init__(self) -> None:
        self.messages: list[protocol.Message] = []

    def post(self, message: protocol.Message) -> None:
        self.messages.append(message)

    def take(self) -> list[protocol.Message]:
        taken, self.messages = self.messages, []
        return taken


class Records:
    """A fleet whose workers serve as soon as they are added."""

    heartbeat_seconds = BEAT_SECONDS

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.epoch = 0

    def serving(self, role: str, model: str) -> Sequence[Worker]:
        return [worker for worker in self.workers.values() if worker.has_role(role, model)]

    def all(self) -> list[Worker]:
        return list(self.workers.values())

    def get(self, name: str) -> Worker | None:
        return self.workers.get(name)

    def refresh(self, worker: Worker) -> None:
        if worker.state == "catching up" and not worker.lagging:
            worker.state = "serving"

    def emit(self, event: Any) -> None:
        pass


class VirtualStore:
    """:class:`WeightStore` and the workers that it sends messages to."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.fleet = Records()
        self.store = WeightStore(cast(Any, self.fleet), cast(Any, None), cast(Any, None), self.clock)

    def join(
        self, name: str, adapters: Iterable[str] = (), in_use: Sequence[protocol.AdapterRef] = (), **fields: Any
    ) -> Worker:
        """A connection of a worker with these artifacts in its cache."""
        self.fleet.epoch += 1
        usual = {"roles": ["rollout"], "address": f"http://{name}:1", "instance": f"{name} {self.fleet.epoch}"}
        names = {"name": name, "host": name, "model": MODEL, "model_hash": "", "device": "cpu", "dtype": ""}
        numbers = {"protocol": protocol.PROTOCOL, "max_rows": 1, "max_context": 1, "max_rank": 1024}
        hello = protocol.Hello(**{**names, **numbers, **usual, "adapters": list(adapters), **fields})
        now = self.clock.now
        worker = Worker(hello, cast(Any, Sent()), now, now, state="serving", cached=set(hello.adapters))
        self.fleet.workers[name] = worker
        self.store.on_worker_joined(worker)
        self.store.on_worker_loaded(worker, in_use)
        return worker

    def lose(self, worker: Worker) -> None:
        worker.state = "suspect"
        self.store.on_worker_lost(worker)

    def messages(self, worker: Worker) -> list[protocol.Message]:
        """The ones sent since the last call."""
        return cast(Sent, worker.outbox).take()


class Links(VirtualStore):
    """Transfers as fluids: each worker has a downlink and an uplink, which its readers share; readers follow a source
    that itself receives."""

    def __init__(self, size: int, down: dict[str, float], up: dict[str, float], between: float = 1e9) -> None:
        """The bytes of an artifact, and bytes per second by worker; ``up`` is as ``down`` where it has none;
        ``between``: those of the link between sites, which all transfers over it share."""
        super().__init__()
        self.between = between
        self.size, self.down, self.up = size, down, {**down, **up}
        self.reads: dict[tuple[str, str], str] = {}
        """By worker and hash, the address that it reads from."""
        self.here: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.replaced = 0
        """Times that a worker was sent to another source."""

    def publish(
        self, ref: protocol.AdapterRef, step: float = 0.1, late: Sequence[str] = (), after: float = 0.0
    ) -> dict[str, float]:
        """Seconds after which each receiver has it. Workers ``late`` join ``after`` seconds later, and have it so many
        seconds after that."""
        taken, steps, late = dict[str, float](), 0, [*late]
        began = dict.fromkeys(self.fleet.workers, self.clock.now)
        for name in ("trainer", ""):
            self.here[name, ref.hash] = self.size
        self.store.publish(MODEL, ref)
        while late or len(taken) < len(self.fleet.workers) - 1:
            steps += 1
            self.clock.now += step
            if late and steps * step >= after:
                for name in late:
                    self.join(name, in_use=[ref])
                    began[name] = self.clock.now
                late.clear()
            self._deliver()
            self._flow(ref.hash, step)
            for number, worker in enumerate(self.fleet.all()):
                have = self.here[worker.name, ref.hash]
                if worker.name != "trainer" and worker.name not in taken and have >= self.size:
                    taken[worker.name] = self.clock.now - began[worker.name]
                    self.reads.pop((worker.name, ref.hash), None)
                    self.store.on_cached(worker, protocol.AdaptersCached(epoch=1, hashes=[ref.hash]))
                if steps % round(BEAT_SECONDS / step) == number % round(BEAT_SECONDS / step):
                    receiving = {digest: int(self.here[name, digest]) for name, digest in self.reads
                                 if name == worker.name}  # fmt: skip
                    self.store.on_heartbeat(worker, beat(receiving=receiving))
            assert steps < 100_000, "somebody waits for ever"
        return taken

    def _deliver(self) -> None:
        for worker in self.fleet.all():
            for message in self.messages(worker):
                match message:
                    case protocol.Replicate(refs=refs):
                        for ref in refs:
                            self.reads[worker.name, ref.hash] = next(iter(ref.sources), "")
                    case protocol.Sources(hash=digest, sources=sources):
                        self.replaced += 1
                        if (worker.name, digest) in self.reads:
                            self.reads[worker.name, digest] = next(iter(sources), "")

    def _flow(self, digest: str, step: float) -> None:
        source = {name: address.removeprefix("http://").removesuffix(":1")
                  for (name, of), address in self.reads.items() if of == digest}  # fmt: skip
        readers: defaultdict[str, list[str]] = defaultdict(list)
        for name, at in source.items():
            readers[at].append(name)
        before = {name: self.here[name, digest] for name in {*source, *source.values()}}
        moving = {name for name, at in source.items() if before[name] < before[at]}
        crossing = [name for name in moving if self._site(name) != self._site(source[name])]
        most = {name: min(self.down[name], self.between / len(crossing) if name in crossing else 1e9) * step
                for name in moving}  # fmt: skip
        for at, names in readers.items():
            names = sorted(moving.intersection(names), key=lambda name: most[name])
            left = self.up.get(at, 1e9) * step
            for place, name in enumerate(names):
                part = min(left / (len(names) - place), most[name], before[at] - before[name])
                self.here[name, digest] += part
                left -= part

    def _site(self, name: str) -> str:
        return self.fleet.workers[name].hello.site if name else ""
