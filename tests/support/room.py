"""A fleet of scripted workers and the weights that they pull, with nothing else around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.peers import MODEL, ManualClock, ScriptedWorker

from rookery import protocol
from rookery.controller.fleet.fleet import Fleet, FleetListener
from rookery.controller.fleet.worker import Worker
from rookery.controller.weights.distribution import AdapterResidency
from rookery.controller.weights.peer_directory import PeerDirectory
from rookery.controller.weights.tickets import Tickets
from rookery.settings import Settings
from rookery.simulation.clock import InlineWriter
from rookery.storage.artifacts import Artifacts


class Room(FleetListener):
    def __init__(self, folder: Path, **changes: Any) -> None:
        self.clock = ManualClock()
        usual = {"heartbeat_seconds": 2, "suspect_seconds": 10, "rejoin_seconds": 60, "stuck_seconds": 120}
        self.settings = Settings.model_validate({"data": folder, "cache": folder, **usual, **changes})
        self.artifacts = Artifacts(folder / "artifacts")
        self.tickets = Tickets(self.artifacts, self.clock, 600)
        self.fleet = Fleet(self.settings, self.clock)
        peers = PeerDirectory(self.tickets, self.clock, self.settings.server.ticket_seconds)
        self.residency = AdapterResidency(self.fleet, peers, self.artifacts, InlineWriter(), self.clock)
        self.used: list[protocol.AdapterRef] = []
        """The versions that jobs sample from."""
        self.residency.in_use = lambda model: [ref for ref in self.used if model == MODEL]
        self.lost: list[tuple[str, str]] = []
        self.outputs: list[Worker] = []
        """The senders of tokens."""
        self.workers: list[ScriptedWorker] = []
        self.fleet.listeners.append(self)
        self.fleet.route(protocol.Output, lambda worker, message: self.outputs.append(worker))
        self.fleet.route(protocol.OperationDone, lambda worker, message: None)

    async def close(self) -> None:
        for worker in self.workers:
            if worker.link is not None:
                await worker.die()
        await self.residency.close()

    def on_worker_lost(self, worker: Worker, reason: str) -> None:
        self.lost.append((worker.name, reason))

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
    names = ("progress", "active", "waiting", "training", "adapters", "generated", "trained", "memory_bytes")
    seconds = {"decode_seconds": 0.0, "train_seconds": 0.0}
    return protocol.Heartbeat(**{"epoch": 0, **dict.fromkeys(names, 0), **seconds, **fields})
