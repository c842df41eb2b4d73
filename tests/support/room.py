"""A fleet of scripted workers and the weights that they pull, with nothing else around them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.support.peers import MODEL, ManualClock, ScriptedWorker
from tests.support.rules import split

from rookery import protocol
from rookery.controller.fleet.events import (
    AdaptersChanged,
    HeartbeatReceived,
    MessageReceived,
    WorkerCatchingUp,
    WorkerDraining,
    WorkerEvent,
    WorkerGone,
    WorkerJoined,
    WorkerLoaded,
    WorkerReady,
    WorkerSuspect,
)
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.fleet.worker import Worker
from rookery.controller.rollout.scheduler import RolloutScheduler
from rookery.controller.training.dispatcher import TrainingDispatcher
from rookery.controller.weights.store import WeightStore
from rookery.controller.weights.tickets import Tickets
from rookery.settings import Settings
from rookery.simulation.clock import InlineWriter
from rookery.storage.artifacts import Artifacts


def react(
    event: WorkerEvent,
    fleet: Fleet,
    weights: WeightStore,
    *,
    in_use: Sequence[protocol.AdapterRef] = (),
    rollouts: RolloutScheduler | None = None,
    training: TrainingDispatcher | None = None,
) -> None:
    """Call those of these rooms that an event concerns, as the controller does."""
    worker = event.worker
    match event:
        case MessageReceived(message=protocol.AdaptersCached() as message):
            weights.on_cached(worker, message)
        case MessageReceived(message=protocol.AdaptersEvicted() as message):
            weights.on_evicted(worker, message)
        case MessageReceived(message=protocol.SourcesRequest() as message):
            weights.on_sources_request(worker, message)
        case MessageReceived(message=protocol.PullFailed() as message):
            weights.on_pull_failed(worker, message)
        case MessageReceived(message=protocol.Output() as message) if rollouts is not None:
            rollouts.on_output(worker, message)
        case MessageReceived(message=protocol.OperationDone() as message) if training is not None:
            training.on_done(worker, message)
        case HeartbeatReceived():
            weights.on_heartbeat(worker, event.beat)
            if rollouts is not None:
                rollouts.on_heartbeat(worker, event.beat)
        case WorkerJoined():
            weights.on_worker_joined(worker)
        case WorkerLoaded():
            weights.on_worker_loaded(worker, in_use)
            fleet.admit(worker)
        case WorkerReady() | WorkerCatchingUp() | AdaptersChanged():
            if rollouts is not None:
                rollouts.on_worker_changed(worker)
            if training is not None:
                training.on_worker_changed(worker)
        case WorkerDraining() | WorkerSuspect() | WorkerGone():
            weights.on_worker_lost(worker)
            if rollouts is not None:
                rollouts.on_worker_changed(worker)
                rollouts.on_worker_lost(worker)
            if training is not None:
                training.on_worker_lost(worker)


class Room:
    def __init__(self, folder: Path, **changes: Any) -> None:
        self.clock = ManualClock()
        usual = {"heartbeat_seconds": 2, "suspect_seconds": 10, "rejoin_seconds": 60, "stuck_seconds": 120}
        changed, self.rules = split(changes)
        self.settings = Settings.model_validate({"data": folder, "cache": folder, **usual, **changed})
        self.artifacts = Artifacts(folder / "artifacts")
        self.tickets = Tickets(self.artifacts, self.clock, 600)
        self.fleet = Fleet(self.settings, self.clock, self.on_event)
        self.weights = WeightStore(self.fleet, self.artifacts, InlineWriter(), self.clock)
        self.used: list[protocol.AdapterRef] = []
        """The versions that jobs sample from."""
        self.events: list[WorkerEvent] = []
        self.lost: list[tuple[str, str]] = []
        self.outputs: list[Worker] = []
        """The senders of tokens."""
        self.workers: list[ScriptedWorker] = []

    async def close(self) -> None:
        for worker in self.workers:
            if worker.link is not None:
                await worker.die()
        await self.weights.close()

    def on_event(self, event: WorkerEvent) -> None:
        self.events.append(event)
        if isinstance(event, WorkerDraining | WorkerSuspect):
            self.lost.append((event.worker.name, event.text or "it drains"))
        if isinstance(event, MessageReceived) and isinstance(event.message, protocol.Output):
            self.outputs.append(event.worker)
        in_use = self.used if event.worker.hello.model == MODEL else ()
        react(event, self.fleet, self.weights, in_use=in_use)

    def worker(self, name: str = "worker", **script: Any) -> ScriptedWorker:
        self.workers.append(ScriptedWorker(self.fleet.serve, self.tickets, name, **script))
        return self.workers[-1]

    def ref(self, version: int, policy: str = "p") -> protocol.AdapterRef:
        """A version whose artifact the service has."""
        staging = self.artifacts.begin()
        staging.write("adapter_model.safetensors", [f"{policy} {version}".encode()])
        return protocol.AdapterRef(policy=policy, version=version, hash=staging.commit().hash, rank=4, alpha=8.0)

    def __getitem__(self, name: str) -> Worker:
        worker = self.fleet.get(name)
        assert worker is not None
        return worker

    def states(self) -> dict[str, str]:
        return {worker.name: worker.state for worker in self.fleet.all()}

    def able(self, role: str) -> list[str]:
        return [worker.name for worker in self.fleet.serving(role, MODEL)]


def beat(**fields: Any) -> protocol.Heartbeat:
    """A heartbeat of an idle worker, but for these fields."""
    names = ("progress", "active", "waiting", "training", "generated")
    seconds = {"decode_seconds": 0.0, "train_seconds": 0.0}
    return protocol.Heartbeat(**{"epoch": 0, **dict.fromkeys(names, 0), **seconds, **fields})
