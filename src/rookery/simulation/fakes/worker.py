"""A modelled worker: speaks the wire protocol in this process, and computes by letting virtual time pass.

* It computes one thing at a time (:mod:`rookery.simulation.fakes.compute`), as a real one does; transfers overlap.
* Tokens leave at most one flush interval and one slice after they were sampled, at once when their request has ended.
* It dials in at once, and says that it is ready when the base model is loaded. An adapter is pulled once, ahead of need
  where the controller asks for that; batches, adapters and states take their bytes' time on the way.
* :meth:`ModelledWorker.kill` ends it in the middle of whatever it does; :meth:`ModelledWorker.drain` as SIGTERM does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import msgspec

from rookery import protocol
from rookery.controller.weights.tickets import Tickets
from rookery.protocol.connection import Connection, ConnectionClosed
from rookery.simulation.fakes.compute import FakeCompute
from rookery.simulation.fakes.connection import MemoryConnection, connection_pair
from rookery.simulation.fakes.text import Length
from rookery.simulation.fakes.trainer import ADAPTER, CONFIG, Answer, stale, write
from rookery.simulation.profiles import Machine

REDIAL_SECONDS = 1.0
"""After a link ended a worker dials in again."""

MODEL_HASH, DEVICE = "modelled", "modelled"
"""What a modelled worker says that it holds, and computes on."""

Serve = Callable[[Connection], Awaitable[None]]


@dataclass(frozen=True)
class Identity:
    """What a worker says of itself."""

    name: str
    instance: str
    """Drawn once per process."""
    model: str
    token: str
    roles: Sequence[Literal["rollout", "train"]] = ("rollout", "train")
    kind: Literal["reserved", "preemptible"] = "reserved"
    price: float = 0.0
    """Per hour."""


class FakeWorker:
    def __init__(
        self,
        serve: Serve,
        tickets: Tickets,
        identity: Identity,
        machine: Machine,
        length: Length,
        *,
        link: Callable[[], tuple[MemoryConnection, Connection]] = connection_pair,
    ) -> None:
        """``serve`` takes the other end of each link that ``link`` makes (ours, theirs); ``tickets`` are the service's,
        which stand for its HTTP face; ``length`` is what the model's replies are like."""
        self.identity = identity
        self.machine = machine
        self.compute = FakeCompute(
            machine, length, flush=self._flush, answer=lambda done: self._spawn(self._answer(done))
        )
        self.engine, self.trainer = self.compute.engine, self.compute.trainer
        self.pulled = 0
        """Bytes of adapters and states that it fetched."""
        self.sent = 0
        """Tokens that left while the link was up."""
        self.epoch = -1
        self._serve = serve
        self._tickets = tickets
        self._make_link = link
        self._link: MemoryConnection | None = None
        self._loop = asyncio.get_running_loop()
        self._granted: dict[str, asyncio.Future[protocol.TicketGrant]] = {}
        self._adapters: dict[str, asyncio.Task[None]] = {}
        """Those that are here or on their way, by hash."""
        self._begins: dict[str, asyncio.Task[None]] = {}
        """Requests that wait for their adapter."""
        self._chains: dict[str, tuple[asyncio.Queue[Any], asyncio.Task[None]]] = {}
        """Each policy's operations in order, and who sees to them."""
        self._cancelled: set[str] = set()
        self._broken: set[str] = set()
        self._started = 0.0
        self._loaded = False
        self._tasks: dict[asyncio.Task[None], None] = {}
        """In the order in which they began."""
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self._life: asyncio.Task[None] | None = None
        self._computing: asyncio.Task[None] | None = None

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The machine starts."""
        self._started = self._loop.time()
        self._life = asyncio.create_task(self._live(), name=f"worker {self.identity.name}")

    async def kill(self) -> None:
        """As ``kill -9`` does: nothing more is sent, whatever it was doing. Raises what went wrong in it before."""
        assert self._life is not None
        if self._computing is not None:
            self._computing.cancel()
        if self._link is not None:
            self._link.cut()
        self._life.cancel()
        with suppress(asyncio.CancelledError):
            await self._life

    async def drain(self) -> None:
        """As SIGTERM does: the slice at work ends, what was sampled is sent, then ``Bye``. What was being trained is
        given up."""
        assert self._life is not None
        self.compute.stop()
        await self._life

    async def _live(self) -> None:
        try:
            compute = self._computing = self._spawn(self.compute.run())
            while True:
                talk = self._spawn(self._converse())
                await asyncio.wait({talk, compute, self._failed}, return_when=asyncio.FIRST_COMPLETED)
                if self._failed.done():
                    self._failed.result()
                if compute.done():
                    await self._say_goodbye()
                    return
                await asyncio.sleep(REDIAL_SECONDS)
        finally:
            if self._link is not None:
                self._link.cut()
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _say_goodbye(self) -> None:
        with suppress(ConnectionClosed):
            await self._flush()
            await self._say(protocol.Draining(epoch=0))

    async def _converse(self) -> None:
        """One connection, from hello to its end, which ends requests and operations too."""
        ours, theirs = self._make_link()
        serving = asyncio.ensure_future(self._serve(theirs))
        beats = loading = None
        try:
            await ours.send(protocol.encode(self._hello()))
            welcome = protocol.decode(protocol.to_worker, await ours.receive())
            if not isinstance(welcome, protocol.Welcome):
                raise PermissionError(f"worker {self.identity.name} was not welcomed: {welcome}")
            self._link, self.epoch = ours, welcome.epoch
            self.compute.flush_seconds = welcome.flush_seconds
            beats = asyncio.create_task(self._beat(welcome.heartbeat_seconds))
            if not self._loaded:
                loading = self._spawn(self._load())
            while True:
                self._handle(protocol.decode(protocol.to_worker, await ours.receive()))
        except ConnectionClosed:
            pass
        finally:
            self._link = None
            for task in (beats, loading):
                if task is not None:
                    task.cancel()
            ours.cut()
            self._drop()
            await asyncio.gather(serving, return_exceptions=True)

    def _drop(self) -> None:
        """The link is over: what it asked for is not wanted any more. What is here stays."""
        for request in [*self.engine.running(), *self._begins]:
            self._abort(request)
        for digest, pull in list(self._adapters.items()):
            if not pull.done():
                pull.cancel()
                del self._adapters[digest]
        self._granted.clear()
        for policy, (_, runner) in self._chains.items():
            runner.cancel()
            self._broken.add(policy)
        self._chains.clear()
        self.trainer.clear()

    def _hello(self) -> protocol.Hello:
        mine, machine = self.identity, self.machine
        return protocol.Hello(
            protocol=protocol.PROTOCOL, token=mine.token, name=mine.name, instance=mine.instance, model=mine.model,
            model_hash=MODEL_HASH, roles=list(mine.roles), kind=mine.kind, price=mine.price, max_rows=self.engine.rows,
            max_context=machine.context, max_rank=64, device=DEVICE, dtype=DEVICE, loading=not self._loaded,
            adapters=[digest for digest, pull in self._adapters.items() if pull.done()],
        )  # fmt: skip

    async def _load(self) -> None:
        await asyncio.sleep(max(0.0, self._started + self.machine.load - self._loop.time()))
        self._loaded = True
        ready = protocol.Ready(
            epoch=0, model_hash=MODEL_HASH, max_context=self.machine.context, device=DEVICE, dtype=DEVICE
        )
        with suppress(ConnectionClosed):
            await self._say(ready)

    async def _beat(self, seconds: float) -> None:
        with suppress(ConnectionClosed):
            while True:
                await self._say(
                    protocol.Heartbeat(
                        epoch=0, progress=self.compute.slices, active=self.engine.active,
                        waiting=self.engine.waiting + len(self._begins), training=self.trainer.pending,
                        adapters=len(self._adapters), generated=self.engine.generated, trained=self.trainer.trained,
                        decode_seconds=self.compute.decoded,
                        train_seconds=self.compute.trained, memory_bytes=0,
                        pulled_from_service=self.pulled,
                    )
                )  # fmt: skip
                await asyncio.sleep(seconds)

    async def _say(self, message: protocol.Message) -> None:
        """Raises :class:`LinkClosed`."""
        if self._link is None:
            raise ConnectionClosed("no link")
        message.epoch = self.epoch  # type: ignore[attr-defined]
        await self._link.send(protocol.encode(message))

    def _handle(self, message: Any) -> None:
        match message:
            case protocol.Generate():
                self._generate(message)
            case protocol.Abort():
                self._abort(message.request)
            case protocol.SwitchAdapter():
                self._spawn(self._switch(message))
            case protocol.PrefetchAdapters():
                for ref in message.refs:
                    if self._here(ref.hash):
                        self._spawn(self._tell_held(ref.hash))
                    else:
                        self._pulled(ref)
            case protocol.TicketGrant():
                if (waiting := self._granted.pop(message.hash, None)) is not None:
                    waiting.set_result(message)
            case protocol.ForwardBackward() | protocol.OptimStep() | protocol.VersionCommitted():
                self._chain(message)
            case protocol.InitAdapter():
                self.trainer.submit(message)
                self.compute.poke()
            case protocol.CancelOperation():
                if not self.trainer.cancel(message.op):
                    self._cancelled.add(message.op)
            case protocol.EvictArtifacts():
                for digest in message.hashes:
                    if (pull := self._adapters.pop(digest, None)) is not None:
                        pull.cancel()
                    self.engine.forget(digest)
                if message.policy:
                    self.trainer.forget(message.policy)
                    self._broken.discard(message.policy)
                    if (chain := self._chains.pop(message.policy, None)) is not None:
                        chain[1].cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None and not self._failed.done():
            self._failed.set_exception(error)

    # --- rollouts -----------------------------------------------------------------------------------------------------

    def _generate(self, order: protocol.Generate) -> None:
        self._abort(order.request)
        if order.adapter is None or self._here(order.adapter.hash):
            self.engine.submit(order)
            self.compute.poke()
        else:
            self._begins[order.request] = self._spawn(self._begin(order))

    async def _begin(self, order: protocol.Generate) -> None:
        assert order.adapter is not None
        await asyncio.shield(self._pulled(order.adapter))
        del self._begins[order.request]
        self.engine.submit(order)
        self.compute.poke()

    def _abort(self, request: str) -> None:
        if (begin := self._begins.pop(request, None)) is not None:
            begin.cancel()
        self.engine.abort(request)
        self.compute.poke()

    async def _switch(self, message: protocol.SwitchAdapter) -> None:
        await asyncio.shield(self._pulled(message.adapter))
        self.compute.switch(message)

    def _here(self, digest: str) -> bool:
        pull = self._adapters.get(digest)
        return pull is not None and pull.done()

    def _pulled(self, ref: protocol.AdapterRef) -> asyncio.Task[None]:
        """Done when the adapter is here."""
        pull = self._adapters.get(ref.hash)
        if pull is None:
            pull = self._adapters[ref.hash] = self._spawn(self._pull(ref))
        return pull

    async def _pull(self, ref: protocol.AdapterRef) -> None:
        await self._readable(ref)
        await asyncio.sleep(self.machine.pull())
        self.pulled += self.machine.adapter_bytes
        await self._tell_held(ref.hash)

    async def _tell_held(self, digest: str) -> None:
        with suppress(ConnectionClosed):
            await self._say(protocol.AdaptersCached(epoch=0, hashes=[digest]))

    async def _readable(self, ref: protocol.AdapterRef) -> None:
        """There is a ticket that opens the artifact: the one that came with it, or a new one."""
        if not self._tickets.reads(ref.ticket, ref.hash):
            waiting = self._granted.setdefault(ref.hash, self._loop.create_future())
            with suppress(ConnectionClosed):
                await self._say(protocol.TicketRequest(epoch=0, hash=ref.hash))
            await asyncio.shield(waiting)

    # --- training -----------------------------------------------------------------------------------------------------

    def _chain(self, message: protocol.ForwardBackward | protocol.OptimStep | protocol.VersionCommitted) -> None:
        """A policy's operations keep their order; policies do not wait for each other."""
        if message.policy not in self._chains:
            queue: asyncio.Queue[Any] = asyncio.Queue()
            self._chains[message.policy] = queue, self._spawn(self._operate(queue))
        self._chains[message.policy][0].put_nowait(message)

    async def _operate(self, queue: asyncio.Queue[Any]) -> None:
        while True:
            message = await queue.get()
            if isinstance(message, protocol.VersionCommitted):
                self.trainer.committed(message)
            else:
                await self._bring(message)

    async def _bring(self, op: protocol.ForwardBackward | protocol.OptimStep) -> None:
        """Bring what the operation needs, and give it to the trainer."""
        batch = b""
        if isinstance(op, protocol.ForwardBackward):
            if op.zero_grad:
                self._broken.discard(op.policy)
            batch = self._tickets.open_batch(op.batch_ticket) or b""
            await asyncio.sleep(self.machine.latency + len(batch) / self.machine.download)
        if op.op in self._cancelled:
            self._cancelled.remove(op.op)
            self._broken.add(op.policy)
        elif op.policy in self._broken:
            await self._answer(Answer(stale(op, "a part of this step did not arrive")))
        elif self.trainer.holds(op):
            self._submit(op, batch)
        elif op.steps or isinstance(op, protocol.OptimStep):
            self._broken.add(op.policy)
            await self._answer(Answer(stale(op, f"policy {op.policy} is not held here at that state")))
        else:
            await self._readable(op.parent)
            await asyncio.sleep(self.machine.pull(state=True))
            self.pulled += self.machine.adapter_bytes + self.machine.state_bytes
            read = partial(self._tickets.artifacts.path, op.parent.hash)
            files = {name: read(name).read_bytes() for name in (ADAPTER, CONFIG)}
            self.trainer.load(op.policy, op.lease, op.parent, files)
            self._submit(op, batch)

    def _submit(self, op: protocol.ForwardBackward | protocol.OptimStep, batch: bytes) -> None:
        self.trainer.submit(op, batch)
        self.compute.poke()

    async def _answer(self, answer: Answer) -> None:
        done = answer.done
        if answer.upload is not None:
            await asyncio.sleep(self.machine.push())
            staging = self._tickets.staging(answer.ticket)
            if staging is None:
                return  # given up meanwhile
            done = msgspec.structs.replace(done, manifest=write(staging, answer.upload))
        with suppress(ConnectionClosed):
            await self._say(done)

    async def _flush(self) -> None:
        """Send what was sampled; while there is no link it stays."""
        if self._link is not None and (chunks := self.engine.drain()):
            self.sent += sum(len(chunk.tokens) for chunk in chunks)
            with suppress(ConnectionClosed):
                await self._say(protocol.Output(epoch=0, chunks=chunks))
