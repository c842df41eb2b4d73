"""A worker's link to the service: dials in, speaks the wire protocol, dials in again.

Promises:

* It dials in at once, and beats while the base model is still on its way; when that is there it says so.
* Every frame carries the epoch of the connection that it is sent on.
* The controller is told of every adapter that comes to lie in the cache, and of those that could not be had.
* Sampled tokens leave at most one flush interval later, and at once when their request has ended.
* A connection that ends loses nothing: requests stay held for who claims them, training operations are dropped (their
  sender sends anew what it still wants), what the trainer holds stays. After the grace period it is let go.
* Frames are handled in the order in which they arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time
import uuid
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import psutil

from rookery import protocol
from rookery.aio import wait_event
from rookery.protocol.connection import Channel, ConnectionClosed, stay_connected
from rookery.settings import Settings
from rookery.worker.compute import Compute, ComputeStatus, WorkerCore
from rookery.worker.generation import GenerationManager
from rookery.worker.training_ops import TrainingOps
from rookery.worker.transfer.cache import ADAPTERS, CacheEvents
from rookery.worker.transfer.client import TransferClient
from rookery.worker.transfer.http import TransferFailed
from rookery.worker.transfer.peers import PeerServer
from rookery.worker.transfer.prefetch import Prefetcher

log = logging.getLogger("rookery.worker.connection")


@dataclass(frozen=True)
class WorkerOptions:
    """What the command line says. ``base`` is the service's HTTP address."""

    base: str
    token: str
    model: str
    roles: list[Literal["rollout", "train"]]
    kind: Literal["reserved", "preemptible"]
    name: str
    price: float = 0.0
    address: str = ""
    """Where other workers may pull adapters from this one; empty where they may not."""


class ServiceConnection:
    """Belongs to the I/O thread."""

    def __init__(self, options: WorkerOptions, settings: Settings, compute: Compute, lender: PeerServer | None) -> None:
        """``lender`` hands out what the controller says, where this worker offers an address."""
        self._options = options
        self._lender = lender
        self._core: WorkerCore | None = None
        self._model_hash = ""
        self._loaded = asyncio.Event()
        self._news = CacheEvents()
        self._settings = settings
        self._compute = compute
        self._name = options.name
        self._instance = uuid.uuid4().hex
        self._channel: Channel[protocol.ToWorker] | None = None
        self._disconnected = time.monotonic()
        """When the last connection ended."""
        self._output = asyncio.Event()
        self._urgent = asyncio.Event()
        self._granted: dict[str, asyncio.Future[str]] = {}
        self._transfers = TransferClient(
            options.base,
            settings.cache / ADAPTERS,
            settings.worker.adapter_cache_bytes,
            self._want,
            self._news,
            timeout_seconds=settings.worker.transfer_seconds,
            peer_seconds=settings.worker.peer_seconds,
        )
        self._ahead = Prefetcher(self._transfers)
        self._requests = GenerationManager(compute, self._transfers, self._has_output)
        self._operations = TrainingOps(compute, self._transfers, self._answer)

    def loaded(self, core: WorkerCore, model_hash: str) -> None:
        """The base model is there."""
        self._core, self._model_hash = core, model_hash
        self._loaded.set()

    def collect(self) -> None:
        """Take what computing brought forth."""
        chunks, finished = self._compute.take()
        self._requests.collect(chunks)
        self._operations.collect(finished)

    async def finish(self) -> None:
        """Computing is over: send what there is to send, and say goodbye."""
        self.collect()
        if self._channel is not None:
            await self._flush()
            await self._operations.drain(self._settings.worker.drain_seconds)
        if self._channel is not None:
            with contextlib.suppress(ConnectionClosed):
                await self._channel.send(protocol.Draining(epoch=self._channel.epoch))
                await self._channel.close("drained")

    async def close(self) -> None:
        await self._transfers.close()

    # --- the connection ---------------------------------------------------------------------------------------------

    async def serve(self) -> None:
        """Stay connected until cancelled. Raises :class:`~rookery.protocol.connection.RegistrationRefused`."""
        await stay_connected(
            self._options.base,
            "/wire/worker",
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
        self._name = channel.welcome.name
        log.info("connected as %s, epoch %d", self._name, channel.epoch)
        claims = asyncio.get_running_loop().call_later(self._settings.worker.resume_seconds, self._requests.release)
        flush = self._send_output(channel.welcome.flush_seconds)
        try:
            await channel.run(self._handle, partial(self._heartbeat, channel.epoch), flush, self._report(channel))
        finally:
            self._channel = None
            claims.cancel()
            for future in self._granted.values():
                future.set_exception(TransferFailed("the connection was lost while a new ticket was requested"))
            self._granted.clear()
            self._disconnected = time.monotonic()
            self._requests.unclaim(self._disconnected)
            self._operations.on_disconnect()
            self._ahead.clear()

    def _hello(self) -> protocol.Hello:
        core = self._core
        self._ready_announced = core is not None
        adapters = sorted({*self._compute.status.adapters, *self._transfers.cached()})
        self._news.reset(adapters)
        return protocol.Hello(
            protocol=protocol.PROTOCOL,
            token=self._options.token,
            name=self._name,
            instance=self._instance,
            model=self._options.model,
            model_hash=self._model_hash,
            roles=self._options.roles,
            kind=self._options.kind,
            price=self._options.price,
            address=self._options.address,
            loading=core is None,
            max_rows=self._settings.engine.max_rows,
            max_context=core.decoder.config.context if core is not None else 0,
            max_rank=self._settings.engine.max_rank,
            device=_device(core),
            dtype=_dtype(core),
            pid=os.getpid(),
            host=socket.gethostname(),
            adapters=adapters,
            running=self._requests.running(),
        )

    def _handle(self, message: protocol.ToWorker) -> None:
        match message:
            case protocol.Generate():
                self._requests.generate(message)
            case protocol.Abort():
                self._requests.abort(message.request)
            case protocol.SwitchAdapter():
                self._requests.switch(message)
            case protocol.TicketGrant():
                self._transfers.set_ticket(message.hash, message.ticket, message.peers)
                if (waiting := self._granted.pop(message.hash, None)) is not None and not waiting.done():
                    waiting.set_result(message.ticket)
            case protocol.PrefetchAdapters():
                self._news.report_again(ref.hash for ref in message.refs)
                self._ahead.prefetch(message.refs)
            case protocol.ServeArtifact():
                if self._lender is not None:
                    self._lender.serve(message.hash, message.ticket, message.seconds)
            case protocol.ForwardBackward() | protocol.OptimStep() | protocol.InitAdapter():
                self._operations.start(message)
            case protocol.VersionCommitted():
                self._operations.mark_committed(message)
            case protocol.CancelOperation():
                self._operations.cancel(message.op)
            case protocol.EvictArtifacts():
                for digest in message.hashes:
                    self._forget(digest)
                self._compute.call(lambda core: core.discard(*message.hashes))
                if message.policy:
                    self._operations.evict(message.policy, offload=message.offload)

    def _forget(self, digest: str) -> None:
        self._ahead.discard(digest)
        self._transfers.evict(digest)
        if self._lender is not None:
            self._lender.revoke(digest)

    # --- outgoing ---------------------------------------------------------------------------------------------------

    def _has_output(self, urgent: bool) -> None:
        self._output.set()
        if urgent:
            self._urgent.set()

    async def _send_output(self, flush_seconds: float) -> None:
        """Send tokens no later than the flush interval after they were sampled, and at once when a request ended."""
        while True:
            await self._output.wait()
            await wait_event(self._urgent, flush_seconds)
            await self._flush()

    async def _flush(self) -> None:
        self._output.clear()
        self._urgent.clear()
        if (channel := self._channel) is not None and (chunks := self._requests.take(time.monotonic())):
            with contextlib.suppress(ConnectionClosed):  # they stay held until a controller resumes them
                await channel.send(protocol.Output(epoch=channel.epoch, chunks=chunks))

    async def _report(self, channel: Channel[protocol.ToWorker]) -> None:
        """Report that the base model is loaded, and adapters as they are cached or fail to arrive."""
        if not self._ready_announced:
            await self._loaded.wait()
            assert self._core is not None
            log.info("serving %s", self._options.model)
            await channel.send(
                protocol.Ready(
                    epoch=channel.epoch,
                    model_hash=self._model_hash,
                    max_context=self._core.decoder.config.context,
                    device=_device(self._core),
                    dtype=_dtype(self._core),
                )
            )
        while True:
            await self._news.pending.wait()
            await self._send_news(channel)

    async def _send_news(self, channel: Channel[protocol.ToWorker]) -> None:
        for message in self._news.take(channel.epoch):
            await channel.send(message)

    def _heartbeat(self, epoch: int) -> protocol.Heartbeat:
        status = self._compute.status
        return protocol.Heartbeat(
            epoch=epoch,
            progress=progress(status, self._transfers.bytes_from_service + self._transfers.bytes_from_peers),
            active=status.active,
            waiting=status.waiting + self._requests.waiting(),
            training=status.training,
            adapters=len(status.adapters),
            generated=status.generated,
            trained=status.trained,
            decode_seconds=status.decode_seconds,
            train_seconds=status.train_seconds,
            memory_bytes=psutil.Process().memory_info().rss,
            pulled_from_peers=self._transfers.bytes_from_peers,
            pulled_from_service=self._transfers.bytes_from_service,
        )

    async def _answer(self, op: str, **fields: Any) -> None:
        if (channel := self._channel) is not None:
            with contextlib.suppress(ConnectionClosed):  # the controller sends again what it still wants
                await self._send_news(channel)  # an adapter that it publishes next is known to be cached here
                await channel.send(protocol.OperationDone(epoch=channel.epoch, op=op, **fields))

    async def _want(self, digest: str) -> str:
        """A new ticket for an artifact."""
        if (channel := self._channel) is None:
            raise TransferFailed(f"artifact {digest[:12]}: the ticket has expired and there is no connection")
        waiting = self._granted.setdefault(digest, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(self._settings.worker.transfer_seconds):
                await channel.send(protocol.TicketRequest(epoch=channel.epoch, hash=digest))
                return await asyncio.shield(waiting)
        except (TimeoutError, ConnectionClosed):
            self._granted.pop(digest, None)
            raise TransferFailed(f"artifact {digest[:12]}: no new ticket came") from None

    async def housekeeping(self) -> None:
        """Let go, after the grace period, of what nobody claims."""
        while True:
            await asyncio.sleep(self._settings.worker.rejoin_seconds / 2)
            before = time.monotonic() - self._settings.worker.rejoin_seconds
            self._requests.expire(before)
            if self._channel is None and self._disconnected < before:
                self._operations.clear_offloaded()


def _device(core: WorkerCore | None) -> str:
    return str(core.decoder.device) if core is not None else ""


def _dtype(core: WorkerCore | None) -> str:
    return str(core.decoder.dtype).removeprefix("torch.") if core is not None else ""


def progress(status: ComputeStatus, pulled: int) -> int:
    """What a beat tells: slices, and the bytes ``pulled`` where nothing computes. Who only waits for adapters gets on
    with their bytes; a slice that hangs must not look alive because of them."""
    computes = status.active + status.waiting + status.training
    return status.progress if computes else status.progress + pulled
