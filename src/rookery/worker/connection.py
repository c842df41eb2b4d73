"""A worker's connection to the service: dials, registers, exchanges protocol messages, dials again.

Promises:

* It dials at once and sends heartbeats while the base model is loading; ``Ready`` follows when it is loaded.
* Every message carries the epoch of the connection that it is sent on.
* Every adapter that is cached, and every pull that fails, is reported to the controller.
* Sampled tokens are sent at most one flush interval later, and at once when their request has ended or, if it is a
  client's, has begun. Heartbeats go between the messages of a flush.
* The end of a connection loses no token: requests stay held until a controller claims them. Training operations end,
  because the controller sends those that it still wants again; states of committed versions are offloaded. What no
  controller claims within the rejoin period is deleted.
* Messages are handled in order of arrival.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import psutil

from rookery import protocol
from rookery.aio import BackgroundTasks, wait_event
from rookery.bounds import ERROR
from rookery.errors import RookeryError
from rookery.protocol.connection import Channel, ConnectionClosed, RegistrationRefused, ServiceEndpoint, stay_connected
from rookery.settings import Settings
from rookery.worker.compute import Compute
from rookery.worker.core import UNNAMED, WorkerCore
from rookery.worker.generation import FRAME_BYTES, GenerationManager
from rookery.worker.progress import ProgressWatch
from rookery.worker.training_ops import TrainingOps
from rookery.worker.transfer.cache import ADAPTERS, AdapterCache, CacheEvents
from rookery.worker.transfer.client import TransferClient
from rookery.worker.transfer.http import TransferFailed, service_client
from rookery.worker.transfer.peers import PeerClient, PeerServer
from rookery.worker.transfer.published import PublishedArtifacts, Reads

log = logging.getLogger("rookery.worker.connection")

TRANSFER_SECONDS = 30.0
"""Time that the service may be silent in a transfer before the transfer is retried: its disk may be slow, and it may
restart."""

PEER_SECONDS = 5.0
"""Time that another worker may be silent while it serves an artifact, before the rest comes from elsewhere: the service
has every artifact, so a slow source is not worth a wait."""

REPORT_SECONDS = 5.0
"""A worker that ends for a reason waits so long for a connection to report it: its log has the reason too."""


@dataclass(frozen=True)
class WorkerOptions:
    """Options of the command line. ``base`` is the service's HTTP address, or those of several, comma-separated."""

    base: str
    token: str
    model: str
    roles: list[Literal["rollout", "train"]]
    kind: Literal["reserved", "preemptible"]
    name: str
    price: float = 0.0
    address: str = ""
    """URL where other workers may read artifacts from this one; empty: it serves none."""


async def report_refusal(options: WorkerOptions, ca_file: str, max_rank: int, reason: str) -> None:
    """Tell the service that a worker with these options ends for ``reason`` before it has begun, if the service answers
    soon."""

    async def converse(channel: Channel[protocol.ToWorker]) -> None:
        await channel.send(protocol.Draining(reason=reason[:ERROR], refused=True))
        await channel.close("refused")
        raise asyncio.CancelledError

    hello = protocol.Hello(
        protocol=protocol.PROTOCOL, name=options.name, instance=uuid.uuid4().hex, model=options.model, model_hash="",
        roles=options.roles, kind=options.kind, loading=True, max_rows=0, max_context=0, max_rank=max_rank, device="",
        dtype="", pid=os.getpid(), host=socket.gethostname(),
    )  # fmt: skip
    report = asyncio.ensure_future(
        stay_connected(
            ServiceEndpoint(options.base, "/wire/worker", options.token, ca_file),
            protocol.to_worker,
            hello=lambda: hello,
            converse=converse,
            ping_seconds=REPORT_SECONDS,
            ping_timeout=REPORT_SECONDS,
        )
    )
    await asyncio.wait([report], timeout=REPORT_SECONDS)
    report.cancel()
    with contextlib.suppress(asyncio.CancelledError, RookeryError, RegistrationRefused):
        await report


async def send_done(channel: Channel[protocol.ToWorker], done: protocol.OperationDone) -> None:
    """Send the answer to an operation. Heartbeats go between its log-probabilities."""
    logprobs = memoryview(done.logprobs)
    while len(logprobs) > FRAME_BYTES:
        part, logprobs = bytes(logprobs[:FRAME_BYTES]), logprobs[FRAME_BYTES:]
        await channel.send(protocol.OperationDone(op=done.op, logprobs=part, more=True))
    await channel.send(msgspec.structs.replace(done, logprobs=bytes(logprobs)))


class ServiceConnection:
    """Belongs to the I/O thread."""

    def __init__(
        self,
        options: WorkerOptions,
        settings: Settings,
        compute: Compute,
        listening: socket.socket | None,
        watch: ProgressWatch,
    ) -> None:
        """Artifacts are served to other workers on ``listening``."""
        self._options = options
        self._settings = settings
        self._compute = compute
        self._watch = watch
        self._core: WorkerCore | None = None
        self._model_hash = ""
        self._loaded = asyncio.Event()
        self._ready_announced = False
        self._name = options.name
        self._instance = uuid.uuid4().hex
        self._channel: Channel[protocol.ToWorker] | None = None
        self._connected = asyncio.Event()
        self._disconnected = time.monotonic()
        """When the last connection ended."""
        self._output = asyncio.Event()
        self._urgent_output = asyncio.Event()
        self._sources_requests: dict[str, asyncio.Future[list[str]]] = {}
        self._cache_events = CacheEvents()
        self._published, self._reads = PublishedArtifacts(), Reads()
        self._peer_server: PeerServer | None = None
        if listening is not None:
            self._peer_server = PeerServer(settings.cache / ADAPTERS, listening, self._published, self._reads)
        self._transfers = TransferClient(
            service_client(options.base, TRANSFER_SECONDS, settings.trusted),
            PeerClient(PEER_SECONDS, self._reads, self._request_sources),
            AdapterCache(settings.cache / ADAPTERS, settings.worker.adapter_cache_bytes),
            self._cache_events,
            self._published,
            self._reads,
            abandoned=lambda digest: self._evict_adapters([digest]),
        )
        self._generation = GenerationManager(compute, self._transfers, self._on_output)
        self._training = TrainingOps(compute, self._transfers, self._send_answer, self._announce)
        self._receiving = BackgroundTasks()

    def on_loaded(self, core: WorkerCore, model_hash: str) -> None:
        """The base model is loaded."""
        self._core, self._model_hash = core, model_hash
        self._loaded.set()

    def collect(self) -> None:
        """Take tokens and results from the compute thread."""
        chunks, results = self._compute.take()
        self._generation.collect(chunks)
        self._training.collect(results)

    async def drain(self, seconds: float, reason: str = "", *, refused: bool = False) -> None:
        """Computation has ended: send remaining tokens and results, whose uploads may take so many seconds, then
        ``Draining``, and close. A ``reason`` is also sent by a worker that is still dialling, if the service answers
        soon."""
        self.collect()
        if reason:
            await wait_event(self._connected, REPORT_SECONDS)
        if self._channel is not None:
            await self._flush()
            await self._training.drain(seconds)
        if self._channel is not None:
            with contextlib.suppress(ConnectionClosed):
                await self._channel.send(protocol.Draining(reason=reason[:ERROR], refused=refused))
                await self._channel.close("drained")

    async def close(self) -> None:
        await self._receiving.cancel()
        self._transfers.withdraw_all()
        await self._transfers.close()
        if self._peer_server is not None:
            await self._peer_server.stop()

    # --- the connection ---------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Stay connected until cancelled. Raises :class:`~rookery.protocol.connection.RegistrationRefused`."""
        if self._peer_server is not None:
            self._peer_server.start()
        await stay_connected(
            ServiceEndpoint(self._options.base, "/wire/worker", self._options.token, self._settings.trusted),
            protocol.to_worker,
            hello=self._hello,
            converse=self._converse,
            ping_seconds=self._settings.worker.heartbeat_seconds,
            ping_timeout=self._settings.worker.suspect_seconds,
        )

    async def _converse(self, channel: Channel[protocol.ToWorker]) -> None:
        """One connection, from its welcome to its end."""
        assert isinstance(channel.welcome, protocol.Welcome)
        self._channel = channel
        self._reads.use(channel.welcome)
        self._connected.set()
        self._transfers.use(channel.base)
        self._name = channel.welcome.name
        log.info("connected as %s, epoch %d", self._name, channel.epoch)
        keeps = channel.welcome.resume_seconds
        unclaimed = asyncio.get_running_loop().call_later(keeps, self._generation.abort_unclaimed)
        flush = self._send_output(channel.welcome.flush_seconds)
        try:
            await channel.run(self._handle, self._heartbeat, flush, self._report(channel))
        finally:
            self._channel = None
            self._connected.clear()
            unclaimed.cancel()
            for future in self._sources_requests.values():
                if not future.done():
                    future.set_exception(TransferFailed("the connection was lost while other sources were requested"))
            self._sources_requests.clear()
            self._disconnected = time.monotonic()
            self._generation.on_disconnect(self._disconnected)
            self._training.on_disconnect()
            await self._receiving.cancel()
            self._evict_adapters(self._transfers.withdraw_all())

    async def housekeeping(self) -> None:
        """Delete requests and training states that no controller has claimed within the rejoin period."""
        while True:
            await asyncio.sleep(self._settings.worker.rejoin_seconds / 2)
            before = time.monotonic() - self._settings.worker.rejoin_seconds
            self._generation.expire(before)
            if self._channel is None and self._disconnected < before:
                self._training.clear_offloaded()

    # --- incoming ---------------------------------------------------------------------------------------------------

    def _handle(self, message: protocol.ToWorker) -> None:
        match message:
            case protocol.Generate():
                self._generation.generate(message)
            case protocol.Abort():
                self._generation.abort(message)
            case protocol.SwitchAdapter():
                self._generation.switch(message)
            case protocol.Sources():
                if (waiting := self._sources_requests.pop(message.hash, None)) is not None and not waiting.done():
                    waiting.set_result(message.sources)
                else:
                    self._transfers.replace_sources(message.hash, message.sources)
            case protocol.Replicate():
                self._cache_events.report_again(ref.hash for ref in message.refs)
                for ref in message.refs:
                    self._transfers.replicate(ref)
            case protocol.HandOver():
                self._receiving.start(self._receive(message))
            case protocol.Withdraw():
                self._evict_adapters(self._transfers.withdraw(message.hashes))
            case protocol.Retain():
                self._transfers.retain(message.hashes)
            case protocol.ForwardBackward() | protocol.OptimStep() | protocol.InitAdapter():
                self._training.start(message)
            case protocol.VersionCommitted():
                self._training.mark_committed(message)
            case protocol.CancelOperation():
                self._training.cancel(message.op)
            case protocol.EvictArtifacts():
                self._evict(message)

    def _evict(self, message: protocol.EvictArtifacts) -> None:
        for digest in message.hashes:
            self._transfers.evict(digest)
        digests, policy = message.hashes, message.policy
        self._evict_adapters(digests, policy)
        self._compute.post(
            "the deletion of offloaded states", lambda core: core.discard_offloaded(digests), policy=policy
        )
        if message.policy:
            self._training.evict(message.policy, offload=message.offload)

    def _evict_adapters(self, digests: list[str], policy: str = "") -> None:
        if digests:
            self._compute.post(
                "the eviction of adapters", lambda core: core.evict_adapters(digests), touches="engine", policy=policy
            )

    async def _receive(self, message: protocol.HandOver) -> None:
        """Have another worker's version ready before it is committed; if that fails, it is pulled after that."""
        ref = message.ref
        try:
            folder = await self._transfers.receive_handed(ref.hash, message.folder)
        except (TransferFailed, OSError) as error:
            log.info("a version of %s was not handed over: %s", ref.policy, error)
        else:
            self._prepare(ref, folder)

    async def _announce(self, op: str, ref: protocol.AdapterRef, folder: Path) -> None:
        """A version that this worker's trainer has made, and not uploaded yet."""
        if (channel := self._channel) is None:
            return
        with contextlib.suppress(ConnectionClosed):
            await channel.send(protocol.VersionStaged(op=op, hash=ref.hash, folder=folder.name))
        if "rollout" in self._options.roles:
            self._prepare(ref, folder)

    def _prepare(self, ref: protocol.AdapterRef, folder: Path) -> None:
        """Load the version ahead. If that fails, its first request loads it."""
        self._compute.post(
            "the preparation of a version", lambda core: core.prepare(ref, folder), touches="engine",
            policy=ref.policy, version=ref.version,
        )  # fmt: skip

    # --- outgoing ---------------------------------------------------------------------------------------------------

    def _hello(self) -> protocol.Hello:
        core = self._core
        self._ready_announced = core is not None
        adapters = sorted(self._transfers.cached())
        loaded = sorted(self._compute.status.adapters.difference(adapters))
        self._cache_events.reset(adapters)
        return protocol.Hello(
            protocol=protocol.PROTOCOL,
            name=self._name,
            instance=self._instance,
            model=self._options.model,
            **self._loaded_fields(),
            roles=self._options.roles,
            kind=self._options.kind,
            price=self._options.price,
            address=self._options.address,
            site=self._settings.worker.site,
            loading=core is None,
            max_rows=self._settings.engine.max_rows,
            max_rank=self._settings.engine.max_rank,
            pid=os.getpid(),
            host=socket.gethostname(),
            cache=self._transfers.cache_identity,
            adapters=adapters,
            loaded=loaded,
            running=self._generation.running(),
        )

    def _loaded_fields(self) -> dict[str, Any]:
        """The fields :data:`~rookery.protocol.LOADED`; empty ones while the base model loads."""
        core = self._core
        return {
            "model_hash": self._model_hash,
            "max_context": core.engine.longest_text if core is not None else 0,
            **asdict(core.implementation if core is not None else UNNAMED),
        }

    def _on_output(self, urgent: bool) -> None:
        self._output.set()
        if urgent:
            self._urgent_output.set()

    async def _send_output(self, flush_seconds: float) -> None:
        """Send tokens no later than the flush interval after they were sampled, and at once when a request ended."""
        while True:
            await self._output.wait()
            await wait_event(self._urgent_output, flush_seconds)
            await self._flush()

    async def _flush(self) -> None:
        self._output.clear()
        self._urgent_output.clear()
        with contextlib.suppress(ConnectionClosed):  # they stay held until a controller claims them
            while (channel := self._channel) is not None and (chunks := self._generation.take(time.monotonic())):
                await channel.send(protocol.Output(chunks=chunks))

    async def _report(self, channel: Channel[protocol.ToWorker]) -> None:
        """Report that the base model is loaded, and adapters as they are cached or fail to arrive."""
        if not self._ready_announced:
            await self._loaded.wait()
            log.info("serving %s", self._options.model)
            await channel.send(protocol.Ready(**self._loaded_fields()))
        while True:
            await self._cache_events.pending.wait()
            await self._send_cache_events(channel)

    async def _send_cache_events(self, channel: Channel[protocol.ToWorker]) -> None:
        for message in self._cache_events.take():
            await channel.send(message)

    def _heartbeat(self) -> protocol.Heartbeat:
        beat, transfers = self._compute.status.beat, self._transfers
        budget = self._core.budget if self._core is not None else None
        return msgspec.structs.replace(
            beat,
            progress=progress(
                beat, transfers.bytes_from_service + transfers.bytes_from_peers + self._generation.prepared
            ),
            waiting=beat.waiting + self._generation.waiting(),
            receiving=transfers.receiving,
            stalled=self._watch.stalled,
            gauges={
                **beat.gauges,
                "worker_memory_bytes": psutil.Process().memory_info().rss,
                "worker_memory_budget_bytes": budget.total if budget is not None else 0,
                "pulled_from_peers_bytes": transfers.bytes_from_peers,
                "rebuilt_files": transfers.rebuilt,
                "pulled_from_service_bytes": transfers.bytes_from_service,
                "served_to_peers_bytes": self._peer_server.bytes_sent if self._peer_server is not None else 0,
                "worker_stalls": self._watch.stalls,
                "worker_failed_posts": self._compute.failed_posts,
            },
        )

    async def _send_answer(self, done: protocol.OperationDone) -> None:
        if (channel := self._channel) is not None:
            with contextlib.suppress(ConnectionClosed):  # the controller sends again what it still wants
                await self._send_cache_events(channel)  # an adapter that it publishes next is known to be cached here
                done.error = done.error[:ERROR]
                await send_done(channel, done)

    async def _request_sources(self, digest: str, failed: str) -> list[str]:
        """Other sources of an artifact than ``failed``. Raises :class:`TransferFailed`."""
        if (channel := self._channel) is None:
            raise TransferFailed(f"artifact {digest[:12]}: no connection to ask for other sources")
        waiting = self._sources_requests.setdefault(digest, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(PEER_SECONDS):
                await channel.send(protocol.SourcesRequest(hash=digest, failed=failed))
                return await asyncio.shield(waiting)
        except (TimeoutError, ConnectionClosed):
            self._sources_requests.pop(digest, None)
            raise TransferFailed(f"artifact {digest[:12]}: no other sources were named") from None


def progress(beat: protocol.Heartbeat, prepared: int) -> int:
    """The ``progress`` of a heartbeat: finished slices, and ``prepared`` while nothing computes: bytes of adapters and
    grammars for requests that wait for them. A stuck slice must not look alive because of them."""
    return beat.progress if beat.busy else beat.progress + prepared
