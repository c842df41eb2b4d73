"""A fake worker: speaks the wire protocol in this process, and computes by letting (virtual) time pass.

* It computes one thing at a time (:mod:`rookery.simulation.fakes.compute`), as a real one does; transfers overlap.
* Tokens leave at most one flush interval and one slice after they were sampled, at once when their request has ended.
* It dials in at once, and sends ``Ready`` when the base model is loaded. An adapter is pulled once;
  batches, adapters and states take their transfer time.
* When its connection ends it keeps what it sampled and dials again; the controller claims requests with ``Generate``.
* :meth:`FakeWorker.kill` ends it at once, :meth:`FakeWorker.drain` as SIGTERM does;
  :mod:`rookery.simulation.fakes.faults` makes it fail in other ways.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec

from rookery import protocol
from rookery.aio import BackgroundTasks
from rookery.protocol.connection import ConnectionClosed, introduce
from rookery.simulation.fakes.compute import FakeCompute
from rookery.simulation.fakes.connection import MemoryConnection, TicketRoutes
from rookery.simulation.fakes.faults import Faults
from rookery.simulation.fakes.text import Length
from rookery.simulation.fakes.trainer import FakeOperationResult, FakeTrainer
from rookery.simulation.fakes.training_ops import FakeTrainingOps
from rookery.spec.machine import Machine

REDIAL_SECONDS = 1.0
"""Between the end of a connection and the next attempt."""
SOURCES_SECONDS = 5.0
"""How long the answer to a request for other sources is awaited."""
HOLD_SECONDS = 60.0
"""How long a request that nobody claims is held."""


def worker_hello(machine: Machine, name: str, model: str, **fields: Any) -> protocol.Hello:
    """The first frame of a process of ``machine``; ``fields`` replace the usual ones."""
    usual: dict[str, Any] = {
        "protocol": protocol.PROTOCOL, "instance": f"{name}-process", "model_hash": "fake", "device": "fake",
        "dtype": "fake", "roles": ["rollout", "train"], "max_rows": machine.rows, "max_context": machine.context,
        "max_rank": 64,
    }  # fmt: skip
    return protocol.Hello(name=name, model=model, **usual | fields)


class FakeWorker:
    def __init__(
        self,
        dial: Callable[[], MemoryConnection],
        tickets: TicketRoutes,
        hello: protocol.Hello,
        machine: Machine,
        length: Length,
        *,
        trainer: FakeTrainer | None = None,
        faults: Faults | None = None,
    ) -> None:
        """``dial`` opens a connection to the service, or raises ``ConnectionClosed``; ``length`` draws the lengths of
        replies. The ``hello`` is that of its first connection: ``loading`` says whether the base model is still to be
        loaded, ``adapters`` are on its disk."""
        self.hello = hello
        self.machine = machine
        self.tickets = tickets
        self.faults = faults or Faults()
        self.trainer = trainer or FakeTrainer()
        self.compute = FakeCompute(
            machine,
            length,
            self.trainer,
            flush=self._flush,
            answer=self._answer,
        )
        self.engine = self.compute.engine
        self.training = FakeTrainingOps(self)
        self.pulled_bytes = 0
        """Bytes of adapters and states that it pulled."""
        self.sent = 0
        """Tokens that left on a connection."""
        self.epoch = -1
        self.connection: MemoryConnection | None = None
        """The welcomed one."""
        self.name = hello.name
        self._dial = dial
        self._loop = asyncio.get_running_loop()
        self._adapters: dict[str, asyncio.Future[bool]] = {}
        """Adapters that are here or on their way, by hash; the result is whether the pull succeeded."""
        for digest in hello.adapters:
            self._adapters[digest] = self._loop.create_future()
            self._adapters[digest].set_result(True)
        self.handed: set[str] = set()
        """Versions that are here and not committed."""
        self._sources: dict[str, asyncio.Future[list[str]]] = {}
        """By hash, the answers to requests for other sources."""
        self._pulling: dict[str, asyncio.Task[None]] = {}
        """Requests that wait for their adapter."""
        self._started = 0.0
        self._loaded = not hello.loading
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._tasks = BackgroundTasks()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self.life: asyncio.Task[None] | None = None
        """Ends with the process; raises an error of the fake itself."""
        self._computing: asyncio.Task[None] | None = None

    def _answer(self, result: FakeOperationResult) -> None:
        self.spawn(self.training.answer(result))

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process."""
        self._started = self._loop.time()
        self.life = asyncio.create_task(self._live(), name=f"worker {self.name}")

    async def kill(self) -> None:
        """As ``kill -9`` does: nothing more is sent. Raises an error that happened in the fake before."""
        assert self.life is not None
        self.crash()
        with suppress(asyncio.CancelledError):
            await self.life

    def crash(self) -> None:
        """:meth:`kill`, without waiting for its tasks to end."""
        if self._computing is not None:
            self._computing.cancel()
        if self.connection is not None:
            self.connection.cut()
        if self.life is not None:
            self.life.cancel()

    async def drain(self) -> None:
        """As SIGTERM does: the current slice ends, sampled tokens are sent, then ``Draining``. Training is dropped."""
        assert self.life is not None
        self.begin_drain()
        await self.life

    def begin_drain(self) -> None:
        """:meth:`drain`, without waiting for its end."""
        self.compute.stop()

    def freeze(self, seconds: float) -> None:
        """As SIGSTOP and SIGCONT do: nothing is sent or handled for so long."""
        self._thawed.clear()
        self._loop.call_later(seconds, self._thawed.set)

    @property
    def frozen(self) -> bool:
        return not self._thawed.is_set()

    async def _live(self) -> None:
        try:
            compute = self._computing = self.spawn(self.compute.run())
            while True:
                session = self.spawn(self._session())
                await asyncio.wait({session, compute, self._failed}, return_when=asyncio.FIRST_COMPLETED)
                if self._failed.done():
                    self._failed.result()
                if compute.done():
                    await self._leave()
                    return
                await asyncio.sleep(self.faults.delay("redial", REDIAL_SECONDS))
        finally:
            if self.connection is not None:
                self.connection.cut()
            await self._tasks.cancel()

    async def _leave(self) -> None:
        await self._flush()
        if await self.send(protocol.Draining()) and self.connection is not None:
            await self.connection.close("drained")

    # --- connection ---------------------------------------------------------------------------------------------------

    async def _session(self) -> None:
        """One connection, from hello to its end."""
        heartbeat = loading = None
        connection: MemoryConnection | None = None
        try:
            connection = self._dial()
            held = [row.request.request for row in self.engine.held()]
            hello = msgspec.structs.replace(
                self.hello, name=self.name, loading=not self._loaded, adapters=self.cached_adapters, running=held
            )
            welcome = await introduce(connection, hello, protocol.to_worker)
            previous, self.epoch, self.name = self.epoch, welcome.epoch, welcome.name
            self.connection = connection
            self.compute.flush_seconds = welcome.flush_seconds
            await self.faults.joined(self, previous)
            heartbeat = asyncio.create_task(self._heartbeat(welcome.heartbeat_seconds))
            if not self._loaded:
                loading = self.spawn(self._load())
            while True:
                message = protocol.decode(protocol.to_worker, await connection.receive())
                await self._thawed.wait()
                self._handle(message)
        except (ConnectionClosed, TimeoutError):
            await self._thawed.wait()
        finally:
            self.connection = None
            for task in (heartbeat, loading):
                if task is not None:
                    task.cancel()
            if connection is not None:
                connection.cut()
            self._disconnected()

    def _disconnected(self) -> None:
        """Hold the requests, and drop what else the connection asked for."""
        for request in self._pulling.values():
            request.cancel()
        self._pulling.clear()
        self.engine.suspend(self._loop.time())
        for digest, pull in list(self._adapters.items()):
            if not pull.done():
                pull.cancel()
                del self._adapters[digest]
        self.handed.clear()
        self._sources.clear()
        self.training.disconnected()

    async def _load(self) -> None:
        await asyncio.sleep(max(0.0, self._started + self.machine.load - self._loop.time()))
        self._loaded = True
        await self.send(protocol.Ready(**{name: getattr(self.hello, name) for name in protocol.LOADED}))

    async def _heartbeat(self, seconds: float) -> None:
        while True:
            self.engine.expire(self._loop.time() - HOLD_SECONDS)
            heartbeat = protocol.Heartbeat(
                progress=self.compute.slices, active=self.engine.active,
                waiting=self.engine.waiting + len(self._pulling), training=self.compute.pending,
                generated=self.engine.generated, decode_seconds=self.compute.decoded,
                train_seconds=self.compute.trained,
                receiving={digest: 0 for digest, pull in self._adapters.items() if not pull.done()},
                free_tokens=self.engine.free_tokens, costs=self.machine.costs,
                gauges={"worker_trained_tokens": self.trainer.trained, "pulled_from_service_bytes": self.pulled_bytes},
            )  # fmt: skip
            if not await self.send(heartbeat):
                return
            await asyncio.sleep(seconds)

    async def send(self, message: protocol.EpochMessage) -> bool:
        """Whether the message was sent: not without a connection."""
        await self._thawed.wait()
        if self.connection is None or self.connection.closed:
            return False
        message.epoch = self.epoch
        await self.connection.send(protocol.encode(message))
        return True

    def _handle(self, message: Any) -> None:
        match message:
            case protocol.Generate():
                self._generate(message)
            case protocol.Abort(resume=True):
                self.compute.release(message)
            case protocol.Abort():
                self._abort(message)
            case protocol.SwitchAdapter():
                self.spawn(self._switch(message))
            case protocol.Replicate():
                for ref in message.refs:
                    if self._has(ref.hash):
                        self.spawn(self._report_cached(ref.hash))
                    else:
                        self._pull(ref)
            case protocol.HandOver():
                self.spawn(self._receive_handed(message.ref.hash))
            case protocol.Withdraw():
                self.handed.difference_update(message.hashes)
            case protocol.Sources():
                if (answer := self._sources.pop(message.hash, None)) is not None and not answer.done():
                    answer.set_result(message.sources)
            case protocol.Retain():
                pass
            case protocol.EvictArtifacts():
                self._evict(message)
            case _:
                self.training.handle(message)

    def _evict(self, message: protocol.EvictArtifacts) -> None:
        for digest in message.hashes:
            if self._has(digest):
                del self._adapters[digest]
            self.engine.evict(digest)
        if message.policy:
            self.training.evict(message.policy)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._tasks.start(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)

    # --- requests -----------------------------------------------------------------------------------------------------

    def _generate(self, request: protocol.Generate) -> None:
        if (waiting := self._pulling.pop(request.request, None)) is not None:
            waiting.cancel()
        if request.adapter is None or self._has(request.adapter.hash):
            self._submit(request)
        else:
            self._pulling[request.request] = self.spawn(self._submit_when_pulled(request, request.adapter))

    def _submit(self, request: protocol.Generate) -> None:
        row = self.engine.submit(request)
        row.error = row.error or self.faults.request_error()
        self.compute.wake()

    async def _submit_when_pulled(self, request: protocol.Generate, ref: protocol.AdapterRef) -> None:
        pulled = await asyncio.shield(self._pull(ref))
        del self._pulling[request.request]
        if pulled:
            self._submit(request)
            return
        aborted = protocol.TokenChunk(
            request=request.request, assignment=request.assignment, offset=len(request.prefix_tokens), tokens=[],
            logprobs=[], version=0, finish="abort",
        )  # fmt: skip
        await self.send(protocol.Output(chunks=[aborted]))

    def _abort(self, abort: protocol.Abort) -> None:
        if (waiting := self._pulling.pop(abort.request, None)) is not None:
            waiting.cancel()
        self.engine.abort(abort)
        self.compute.wake()

    async def _switch(self, message: protocol.SwitchAdapter) -> None:
        if await asyncio.shield(self._pull(message.adapter)):
            self.compute.switch(message)

    async def _flush(self) -> None:
        """Send sampled tokens; without a connection they stay."""
        if self.connection is None or not (chunks := self.engine.drain(self._loop.time(), self.faults.resend_from)):
            return
        self.sent += sum(len(chunk.tokens) for chunk in chunks)
        if await self.send(protocol.Output(chunks=chunks)) and self.faults.repeats_flush():
            await self.send(protocol.Output(chunks=[chunk for chunk in chunks if not chunk.error]))

    # --- adapters -----------------------------------------------------------------------------------------------------

    @property
    def cached_adapters(self) -> list[str]:
        """Hashes of the adapters that are here."""
        return [digest for digest in self._adapters if self._has(digest)]

    def _has(self, digest: str) -> bool:
        pull = self._adapters.get(digest)
        return pull is not None and pull.done()

    def _pull(self, ref: protocol.AdapterRef) -> asyncio.Future[bool]:
        """Done when the adapter is here, or its pull failed."""
        self.adopt(ref.hash)
        pull = self._adapters.get(ref.hash)
        if pull is None:
            pull = self._adapters[ref.hash] = self.spawn(self._fetch(ref))
        return pull

    def adopt(self, digest: str) -> None:
        """Work names the version: it is committed."""
        if digest in self.handed:
            self.handed.remove(digest)
            if digest not in self._adapters:
                self._adapters[digest] = self._loop.create_future()
                self._adapters[digest].set_result(True)
                self.spawn(self._report_cached(digest))

    async def _receive_handed(self, digest: str) -> None:
        epoch = self.epoch
        await asyncio.sleep(self.faults.delay("batch", 0.0))
        if epoch == self.epoch:
            self.handed.add(digest)
            await self.send(protocol.HandedOver(hash=digest))

    def serves(self, digest: str) -> bool:
        return not self.frozen and digest in self._adapters

    async def _read(self, ref: protocol.AdapterRef) -> None:
        """Take the time of reading the adapter from one source after the other, at last from the service."""
        sources = list(ref.sources)
        while sources:
            address = sources.pop(0)
            for _ in range(2):  # the source may end in the middle of the transfer
                await asyncio.sleep(self.faults.delay("pull", self.machine.pull()) / 2)
                source = self.faults.peer(address)
                if source is None or not source.serves(ref.hash):
                    break
            else:
                return
            answer = self._sources[ref.hash] = self._loop.create_future()
            await self.send(protocol.SourcesRequest(hash=ref.hash, failed=address))
            with suppress(TimeoutError):
                async with asyncio.timeout(SOURCES_SECONDS):
                    sources = await answer
        await asyncio.sleep(self.faults.delay("pull", self.machine.pull()))

    async def _evict_oldest(self, kept: str) -> None:
        oldest = next((digest for digest in self._adapters if digest != kept and self._has(digest)), None)
        if oldest is not None:
            del self._adapters[oldest]
            await self.send(protocol.AdaptersEvicted(hashes=[oldest]))

    async def _fetch(self, ref: protocol.AdapterRef) -> bool:
        await self._read(ref)
        if self.faults.pull_fails():
            self._adapters.pop(ref.hash, None)
            await self.send(protocol.PullFailed(hash=ref.hash, error="the network is unreachable"))
            return False
        self.pulled_bytes += self.machine.adapter_bytes
        await self._report_cached(ref.hash)
        if self.faults.evicts():
            await self._evict_oldest(ref.hash)
        return True

    async def _report_cached(self, digest: str) -> None:
        await self.send(protocol.AdaptersCached(hashes=[digest]))
