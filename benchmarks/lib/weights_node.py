"""A worker of ``benchmarks.scale.weights`` without a model: the shipped connection, transfers and peer server.

SIGUSR1: serve only what is complete; SIGUSR2: serve what arrives, as shipped. Real-time signals choose an ablation of
:data:`ABLATIONS`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from rookery import protocol
from rookery.protocol.connection import Channel, ServiceEndpoint, stay_connected
from rookery.worker.transfer import peers
from rookery.worker.transfer.cache import AdapterCache, CacheEvents
from rookery.worker.transfer.client import TransferClient
from rookery.worker.transfer.http import RunningHash, TransferFailed, service_client
from rookery.worker.transfer.peers import PeerClient, PeerServer, ServingRules, listen
from rookery.worker.transfer.published import ArrivingShard, PublishedArtifacts, Reads

MODEL = "model"
HASH_OF = RunningHash.digest
PATIENCE = 600.0
RULES = ServingRules(responses=64)
"""Of a worker as shipped, but for a star, which needs as many responses."""

POLL_SECONDS = peers.POLL_SECONDS

ABLATIONS = ("as shipped", "hashed at the end", "a look each 50 ms", "blocks of 16 KiB")
"""Of the path of a block through a receiver; the number is that of the real-time signal."""


class Published(PublishedArtifacts):
    whole = False
    """Nothing is served before it is complete."""

    def shard(self, digest: str, name: str) -> ArrivingShard | None:
        return None if self.whole else super().shard(digest, name)

    def arriving(self, digest: str) -> bool:
        return not self.whole and super().arriving(digest)


class Node:
    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        self.events, self.published, self.reads = CacheEvents(), Published(), Reads()
        self.transfers = TransferClient(
            service_client(given.connect, 30.0),
            PeerClient(given.peer_seconds, self.reads, self.ask),
            AdapterCache(given.cache, 1 << 40),
            self.events,
            self.published,
            self.reads,
        )
        listening, self.address = listen(given.connect, given.address, given.port)
        assert listening is not None
        self.server = PeerServer(given.cache, listening, self.published, self.reads, RULES)
        self.waiting: dict[str, asyncio.Future[list[str]]] = {}
        self.channel: Channel[protocol.ToWorker] | None = None

    async def ask(self, digest: str, failed: str) -> list[str]:
        if self.channel is None:
            raise TransferFailed("no connection")
        waiting = self.waiting.setdefault(digest, asyncio.get_running_loop().create_future())
        await self.channel.send(protocol.SourcesRequest(hash=digest, failed=failed))
        try:
            async with asyncio.timeout(3.0):
                return await asyncio.shield(waiting)
        except TimeoutError:
            raise TransferFailed("no other sources were named") from None

    def hello(self) -> protocol.Hello:
        adapters = self.transfers.cached()
        self.events.reset(adapters)
        return protocol.Hello(
            protocol=protocol.PROTOCOL, name=self.given.name, instance=self.given.name, model=MODEL, model_hash="",
            roles=["train" if self.given.name == "trainer" else "rollout"], site=self.given.site,
            address=self.address, max_rows=1, max_context=1, max_rank=1024, device="cpu", dtype="",
            host=f"{self.given.name} on {socket.gethostname()}", adapters=adapters,
        )  # fmt: skip

    async def converse(self, channel: Channel[protocol.ToWorker]) -> None:
        assert isinstance(channel.welcome, protocol.Welcome)
        self.reads.use(channel.welcome)
        self.channel = channel
        try:
            await channel.run(self.handle, self.beat, self.report(channel))
        finally:
            self.channel = None

    def beat(self) -> protocol.Heartbeat:
        gauges = {
            "pulled_from_peers_bytes": float(self.transfers.bytes_from_peers),
            "pulled_from_service_bytes": float(self.transfers.bytes_from_service),
            "served_to_peers_bytes": float(self.server.bytes_sent),
            "rebuilt": float(self.transfers.rebuilt),
            "corrupt": float(self.transfers.corrupt),
        }
        return protocol.Heartbeat(
            progress=0, active=0, waiting=0, training=0, generated=0, decode_seconds=0.0,
            train_seconds=0.0, receiving=self.transfers.receiving, gauges=gauges,
        )  # fmt: skip

    async def report(self, channel: Channel[protocol.ToWorker]) -> None:
        while True:
            await self.events.pending.wait()
            for message in self.events.take():
                await channel.send(message)

    def handle(self, message: protocol.ToWorker) -> None:
        match message:
            case protocol.Replicate():
                self.events.report_again(ref.hash for ref in message.refs)
                for ref in message.refs:
                    self.transfers.replicate(ref)
            case protocol.Sources():
                if (waiting := self.waiting.pop(message.hash, None)) is not None and not waiting.done():
                    waiting.set_result(message.sources)
                else:
                    self.transfers.replace_sources(message.hash, message.sources)
            case protocol.EvictArtifacts():
                for digest in message.hashes:
                    self.transfers.evict(digest)

    def serve_whole(self, whole: bool) -> None:
        self.published.whole = whole
        self.change_rules(expect_seconds=PATIENCE if whole else RULES.expect_seconds)

    def ablate(self, number: int) -> None:
        RunningHash.digest = HASH_OF if number != 1 else lambda self, size: None  # type: ignore[method-assign]
        peers.POLL_SECONDS = POLL_SECONDS if number != 2 else 0.05
        self.change_rules(block_bytes=RULES.block_bytes if number != 3 else 16 << 10)

    def change_rules(self, **changes: Any) -> None:
        self.server.rules = replace(self.server.rules, **changes)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, self.serve_whole, True)
        loop.add_signal_handler(signal.SIGUSR2, self.serve_whole, False)
        for number in range(len(ABLATIONS)):
            loop.add_signal_handler(signal.SIGRTMIN + number, self.ablate, number)
        self.server.start()
        await stay_connected(
            ServiceEndpoint(self.given.connect, "/wire/worker", "token"), protocol.to_worker, hello=self.hello,
            converse=self.converse, ping_seconds=20.0, ping_timeout=60.0,
        )  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("connect", "name", "site", "address"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--port", type=int, default=7100, help="of the peer server")
    parser.add_argument("--cache", type=Path)
    parser.add_argument("--peer-seconds", type=float, default=PATIENCE)
    asyncio.run(Node(parser.parse_args()).run())
