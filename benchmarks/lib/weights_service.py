"""The service of ``benchmarks.scale.weights``, a process of its own: the shipped fleet, store of weights and signatures
behind a WebSocket and two HTTP routes. An arm replaces the decision :func:`plan_routes`, and nothing else."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI, Header, Response, WebSocket
from fastapi.responses import FileResponse

from rookery import protocol
from rookery.clock import SystemClock
from rookery.controller.fleet import events
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.weights import store as store_module
from rookery.controller.weights.store import WeightStore
from rookery.controller.weights.tickets import ReadKeys
from rookery.scheduling.replication import Replica, Route, plan_routes
from rookery.server.routes.gateway import WebSocketConnection
from rookery.settings import Settings
from rookery.simulation.clock import InlineWriter
from rookery.storage.artifacts import Artifacts

KEY = "the hash of a key of the role worker"
TRAINER = "trainer"


def star(receivers: Sequence[Replica], holders: Any, **_: Any) -> list[Route]:
    """Everybody reads from the trainer."""
    return [Route(one.name, (TRAINER,)) for one in receivers]


def tree(receivers: Sequence[Replica], holders: Any, **_: Any) -> list[Route]:
    """A binary tree under the trainer."""
    names = [TRAINER, *(one.name for one in receivers)]
    return [Route(name, (names[(number - 1) // 2],)) for number, name in enumerate(names) if number]


def one_place(receivers: Sequence[Replica], holders: Any, **more: Any) -> list[Route]:
    """The shipped decision without sites, in the order in which workers come."""
    everywhere = [one._replace(site="", machine="") for one in receivers]
    return plan_routes(everywhere, [one._replace(site="", machine="") for one in holders], **more)


def no_seed(receivers: Sequence[Replica], holders: Any, **more: Any) -> list[Route]:
    """The shipped decision, but a receiver outside of the trainer's site reads from there, not from its neighbours."""
    [trainer] = [one for one in holders if one.name == TRAINER]
    near = [one for one in receivers if one.site == trainer.site]
    far = [one for one in receivers if one.site != trainer.site]
    return plan_routes(near, [trainer], **more) + [Route(one.name, (TRAINER,)) for one in far]


ARMS = {"ours": plan_routes, "star": star, "tree": tree, "no topology": one_place, "no seed per site": no_seed}


def application(artifacts: Artifacts) -> FastAPI:
    clock = SystemClock()
    arrived: dict[str, dict[str, float]] = {}

    def on_event(event: events.WorkerEvent) -> None:
        worker = event.worker
        match event:
            case events.MessageReceived(message=protocol.AdaptersCached() as message):
                for digest in message.hashes:
                    arrived.setdefault(digest, {})[worker.name] = time.time()
                weights.on_cached(worker, message)
            case events.MessageReceived(message=protocol.AdaptersEvicted() as message):
                weights.on_evicted(worker, message)
            case events.MessageReceived(message=protocol.SourcesRequest() as message):
                weights.on_sources_request(worker, message)
            case events.MessageReceived(message=protocol.PullFailed() as message):
                weights.on_pull_failed(worker, message)
            case events.HeartbeatReceived():
                weights.on_heartbeat(worker, event.beat)
            case events.WorkerJoined():
                weights.on_worker_joined(worker)
            case events.WorkerLoaded():
                weights.on_worker_loaded(worker, in_use)
                fleet.admit(worker)
            case events.WorkerDraining() | events.WorkerSuspect() | events.WorkerGone():
                weights.on_worker_lost(worker)

    settings = Settings.load({}, heartbeat_seconds=0.5)
    fleet = Fleet(settings, clock, on_event)
    reads = ReadKeys(fleet.signing_time)
    reads.add(KEY)
    weights = WeightStore(fleet, artifacts, InlineWriter(), clock, site="s0")
    in_use: list[protocol.AdapterRef] = []

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> Any:
        yield
        await weights.close()

    app = FastAPI(lifespan=lifespan)

    @app.websocket("/wire/worker")
    async def connect(socket: WebSocket) -> None:
        await socket.accept()
        socket.state.connection = _Welcomed()
        await fleet.serve(WebSocketConnection(socket, protocol.MAX_FRAME), reads.add(KEY))

    @app.get("/wire/artifacts/{digest}")
    async def manifest(digest: str, x_rookery_read: str = Header("")) -> Response:
        if reads.reader(x_rookery_read, digest) is None:
            return Response(status_code=404)
        return Response(msgspec.json.encode(artifacts.open(digest)))

    @app.get("/wire/artifacts/{digest}/{name}")
    async def shard(digest: str, name: str, x_rookery_read: str = Header("")) -> Response:
        if reads.reader(x_rookery_read, digest) is None:
            return Response(status_code=404)
        return FileResponse(artifacts.root / digest / name)

    @app.post("/replicate/{digest}")
    async def replicate(digest: str, receivers: str, arm: str = "ours", policy: str = "", version: int = 1) -> float:
        """Workers receive the artifact, a whole model; the time at which that was decided."""
        store_module.plan_routes = ARMS[arm]
        ref = protocol.AdapterRef(policy=policy or digest, version=version, hash=digest, rank=0, alpha=1.0)
        in_use[:] = [ref]
        weights.retain(ref)
        weights.routed.clear()
        begun = time.time()
        named = set(receivers.split(","))
        weights.replicate([ref], [worker for worker in fleet.all() if worker.name in named])
        return begun

    @app.post("/evict/{digest}")
    async def evict(digest: str) -> None:
        in_use[:] = [ref for ref in in_use if ref.hash != digest]
        weights.unpublish([digest])

    @app.get("/state/{digest}")
    async def state(digest: str) -> dict[str, Any]:
        working = [worker.name for worker in fleet.all() if worker.working]
        received = {worker.name: sum(worker.beat.receiving.values()) for worker in fleet.all() if worker.beat}
        pulled = {worker.name: dict(worker.beat.gauges) for worker in fleet.all() if worker.beat}
        return {
            "working": working, "arrived": arrived.get(digest, {}), "receiving": received, "routed": weights.routed,
            "pulled": pulled,
        }  # fmt: skip

    return app


class _Welcomed:
    """A connection without bounds."""

    def welcomed(self, most: int) -> None:
        return


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--artifacts", type=Path)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, default=7077)
    given = parser.parse_args()
    app = application(Artifacts(given.artifacts))
    uvicorn.run(app, host=given.host, port=given.port, log_level="warning", ws="websockets-sansio")
