"""A controller with everything real but its peers, and peers that speak the wire protocol as their script says.

* :class:`ScriptedWorker` samples tokens that are a function of (seed, position), so what a resumed text must be is
  known, and trains by writing down the chain of batches that a policy saw, so two histories can be compared.
* :class:`ScriptedHost` runs no code: what it answers is a function of the episode.
* :class:`ManualClock` moves when a test moves it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from sqlalchemy import create_engine, select, update
from tests.support.replies import UniformLength, reply_of
from tests.support.rules import split
from tests.support.storing import FaultyDatabase

from rookery import protocol
from rookery.clock import RandomIds
from rookery.controller.controller import Controller
from rookery.controller.options import ControllerOptions, LocalWorkers
from rookery.controller.services import Services
from rookery.controller.views import JobView
from rookery.controller.weights.tickets import Tickets
from rookery.errors import UserError
from rookery.protocol.connection import Connection, ConnectionClosed, introduce
from rookery.settings import Settings
from rookery.simulation.fakes.connection import MemoryConnection, connection_pair
from rookery.simulation.fakes.host import FakeHost, user_message
from rookery.simulation.fakes.text import TEMPLATE, byte_tokenizer, draw
from rookery.simulation.fakes.trainer import ADAPTER, CONFIG, GRADIENT, FakeTrainer, peft_config
from rookery.storage import models
from rookery.storage.artifacts import Artifacts
from rookery.storage.repositories import jobs, tenants
from rookery.storage.repositories import versions as version_rows
from rookery.storage.store import StorageWriter, Store
from rookery.tokenization.chat import Chat

MODEL = "smollm2-135m-instruct"
PATIENCE = 120.0
"""Seconds after which a test that waits for something gives up: far more than a loaded machine needs."""


def model_folder(folder: Path, context: int = 512) -> Path:
    """A tokenizer of single bytes and a ChatML template, as a model's folder holds them."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    return folder


# --- time -------------------------------------------------------------------------------------------------------------


class ManualClock:
    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.ahead = 0.0
        """Seconds by which somebody set the wall clock ahead; negative if back."""
        self.act: Callable[[], Awaitable[None]] = settle
        """Returns when everybody who can act has done so; not those who wait for a call in a thread."""
        self._sleepers: list[tuple[float, asyncio.Future[None]]] = []

    def time(self) -> float:
        return self.now + self.ahead

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.append((self.now + seconds, future))
        await future

    async def advance(self, seconds: float, steps: int = 20) -> None:
        """Time passes, in so many steps, and everybody gets to act on each."""
        for _ in range(steps):
            self.now += seconds / steps
            due = [future for when, future in self._sleepers if when <= self.now]
            self._sleepers = [sleeper for sleeper in self._sleepers if sleeper[0] > self.now]
            for future in due:
                if not future.done():
                    future.set_result(None)
            await self.act()


async def settle(rounds: int = 20) -> None:
    """Let everybody who can act do so; not those who wait for a call in a thread."""
    for _ in range(rounds):
        await asyncio.sleep(0)


async def eventually(holds: Callable[[], bool | Awaitable[bool]]) -> None:
    async with asyncio.timeout(PATIENCE):
        while True:
            result = holds()
            if result if isinstance(result, bool) else await result:
                return
            await settle(1)


# --- a worker ---------------------------------------------------------------------------------------------------------


def text_of(seed: int, max_tokens: int, shortest: int = 1) -> tuple[list[int], list[float], str]:
    """``(tokens, logprobs, finish)`` of the whole reply that this seed gives. Letters, then perhaps the stop token."""
    return reply_of(seed, max_tokens, UniformLength(shortest))


def shard(name: str, content: bytes) -> protocol.Shard:
    return protocol.Shard(name=name, size=len(content), sha256=hashlib.sha256(content).hexdigest())


class Peer:
    """One end of a connection to the controller, and the tasks of its process."""

    def __init__(self, serve: Callable[[Connection], Awaitable[None]]) -> None:
        self.serve = serve
        self.link: MemoryConnection | None = None
        self.epoch = -1
        self._tasks: list[asyncio.Task[Any]] = []

    def dial(self) -> MemoryConnection:
        ours, theirs = connection_pair()
        self._tasks = [asyncio.ensure_future(self.serve(theirs))]  # type: ignore[arg-type]
        return ours

    async def disconnect(self) -> None:
        """The connection ends, and the tasks with it."""
        assert self.link is not None
        self.link.cut()
        for task in self._tasks[1:]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


class ScriptedWorker(Peer):
    """A worker whose progress a test controls. ``chunk`` tokens are sent at a time, one frame each, requests in turn;
    operations run at once on a :class:`~rookery.simulation.fakes.trainer.FakeTrainer`."""

    def __init__(
        self,
        serve: Callable[[Connection], Awaitable[None]],
        tickets: Tickets,
        name: str = "worker",
        *,
        roles: Sequence[str] = ("rollout", "train"),
        instance: str | None = None,
        chunk: int = 3,
        max_rows: int = 64,
        shortest: int = 1,
        **hello: Any,
    ) -> None:
        """``hello`` are more fields of its Hello."""
        super().__init__(serve)
        self.tickets, self.name = tickets, name
        self.instance = instance or f"{name}-process"
        self.roles, self.chunk, self.max_rows, self.shortest = list(roles), chunk, max_rows, shortest
        self.hello = hello
        self.adapters: set[str] = set()
        """Hashes of the adapters in its cache; they stay there when it dies."""
        self.pulling = asyncio.Event()
        """While clear, no prefetched adapter arrives."""
        self.pulling.set()
        self.active: dict[str, tuple[protocol.Generate, int]] = {}
        self.generates: list[protocol.Generate] = []
        self.assignments: dict[str, str] = {}
        """By request, the last one that it was given."""
        self.operations: list[Any] = []
        self.batches: dict[str, protocol.TrainingBatch] = {}
        self.other: list[Any] = []
        self.sampled: Counter[tuple[str, int]] = Counter()
        """(request, position) of every token that was sent on a live connection."""
        self.chunks_left: int | None = None
        """Chunks until the process dies in the middle of a reply."""
        self.generating = asyncio.Event()
        self.generating.set()
        self.training = asyncio.Event()
        self.training.set()
        self.answer: Callable[[Any], Awaitable[protocol.OperationDone | None]] | None = None
        """Answers an operation instead of the trainer; None from it lets the trainer answer."""
        self.trainer = FakeTrainer()
        self.refuses = ""
        """Why it cannot generate; empty if it can."""
        self._work = asyncio.Event()

    # --- its connection -----------------------------------------------------------------------------------------------

    async def join(self, running: Sequence[str] = ()) -> ScriptedWorker:
        self.link = self.dial()
        hello = protocol.Hello(
            protocol=protocol.PROTOCOL, name=self.name, instance=self.instance, model=MODEL,
            model_hash="m", roles=self.roles, max_rows=self.max_rows, max_context=512, max_rank=64, device="cpu",
            dtype="float32", adapters=sorted(self.adapters), running=list(running),
        )  # fmt: skip
        welcome = await introduce(self.link, msgspec.structs.replace(hello, **self.hello), protocol.to_worker)
        self.epoch, self.name = welcome.epoch, welcome.name
        self._tasks += [asyncio.create_task(self._read()), asyncio.create_task(self._generate())]
        return self

    async def die(self) -> None:
        """As ``kill -9`` does: the connection ends, whatever it was doing."""
        await self.disconnect()
        self.active.clear()
        self.trainer = FakeTrainer()

    async def say(self, message: protocol.EpochMessage, epoch: int | None = None) -> None:
        message.epoch = self.epoch if epoch is None else epoch
        if isinstance(message, protocol.Output):
            chunks = [(chunk, chunk.assignment or self.assignments.get(chunk.request, "")) for chunk in message.chunks]
            message = protocol.Output(
                epoch=message.epoch, chunks=[msgspec.structs.replace(chunk, assignment=name) for chunk, name in chunks]
            )
        assert self.link is not None
        await self.link.send(protocol.encode(message))

    def _return(self, request: str, assignment: str, at: int, error: str = "") -> None:
        """It does not generate the request from this token on."""
        end = protocol.TokenChunk(
            request=request, assignment=assignment, offset=at, tokens=[], logprobs=[], version=0, finish="abort",
            error=error,
        )  # fmt: skip
        self._tasks.append(asyncio.create_task(self.say(protocol.Output(epoch=0, chunks=[end]))))

    async def _read(self) -> None:
        assert self.link is not None
        with contextlib.suppress(ConnectionClosed):
            while True:
                self._handle(protocol.decode(protocol.to_worker, await self.link.receive()))

    def _handle(self, message: Any) -> None:
        match message:
            case protocol.Generate():
                self.generates.append(message)
                self.assignments[message.request] = message.assignment
                if self.refuses:
                    self._return(message.request, message.assignment, len(message.prefix_tokens), self.refuses)
                    return
                self.active[message.request] = (message, len(message.prefix_tokens))
                self._work.set()
                return
            case protocol.Abort():
                generate, at = self.active.pop(message.request, (None, 0))
                if message.resume and generate is not None:
                    self._return(message.request, message.assignment, at)
                return
            case protocol.ForwardBackward() | protocol.OptimStep() | protocol.InitAdapter():
                self.operations.append(message)
                self._tasks.append(asyncio.create_task(self._train(message)))
                return
            case protocol.SwitchAdapter():
                if message.request in self.active:
                    generate, at = self.active[message.request]
                    changed = msgspec.structs.replace(generate, adapter=message.adapter)
                    self.active[message.request] = (changed, at)
            case protocol.Replicate():
                self._tasks.append(asyncio.create_task(self._pull(message)))
            case protocol.VersionCommitted():
                self._load(message.policy, message.lease, message.ref)
        self.other.append(message)

    async def _pull(self, message: protocol.Replicate) -> None:
        for ref in message.refs:
            await self.pulling.wait()
            self.adapters.add(ref.hash)
            with contextlib.suppress(ConnectionClosed):
                await self.say(protocol.AdaptersCached(epoch=0, hashes=[ref.hash]))

    # --- sampling -----------------------------------------------------------------------------------------------------

    def next_chunk(self, request: str) -> protocol.TokenChunk:
        generate, at = self.active[request]
        tokens, logprobs, finish = text_of(generate.seed, generate.max_tokens, self.shortest)
        given = generate.prefix_tokens
        assert given == tokens[: len(given)], "the prefix is not what was sampled"
        end = min(at + self.chunk, len(tokens))
        over = end == len(tokens)
        self.active[request] = (generate, end)
        if over:
            del self.active[request]
        adapter = generate.adapter
        return protocol.TokenChunk(
            request=request, assignment=generate.assignment, offset=at, tokens=tokens[at:end],
            logprobs=logprobs[at:end], version=adapter.version if adapter else 0,
            policy=adapter.policy if adapter else "",
            finish=finish if over else "",
        )  # fmt: skip

    async def _generate(self) -> None:
        with contextlib.suppress(ConnectionClosed):
            while True:
                await self._work.wait()
                self._work.clear()
                while self.active:
                    for request in list(self.active):
                        await self.generating.wait()
                        if request not in self.active:
                            continue
                        if self.chunks_left == 0:
                            assert self.link is not None
                            self.link.cut()
                            return
                        chunk = self.next_chunk(request)
                        await self.say(protocol.Output(epoch=0, chunks=[chunk]))
                        if self.chunks_left is not None:
                            self.chunks_left -= 1
                        self.sampled.update((request, chunk.offset + i) for i in range(len(chunk.tokens)))
                        await settle(1)

    # --- training -----------------------------------------------------------------------------------------------------

    def _read_file(self, ref: protocol.AdapterRef, name: str = ADAPTER) -> bytes:
        return self.tickets.artifacts.path(ref.hash, name).read_bytes()

    def _load(self, policy: str, lease: int, ref: protocol.AdapterRef) -> None:
        self.trainer.load(policy, lease, ref.hash, {name: self._read_file(ref, name) for name in (ADAPTER, CONFIG)})

    async def _train(self, op: Any) -> None:
        await self.training.wait()
        done = await self.answer(op) if self.answer is not None else None
        with contextlib.suppress(ConnectionClosed):
            await self.say(done or self.operate(op))

    def operate(self, op: Any) -> protocol.OperationDone:
        """Run an operation, its upload included."""
        if isinstance(op, protocol.InitAdapter):
            source = self._read_file(op.source) if op.source is not None else None
            result = self.trainer.init_adapter(op, source)
        else:
            batch, gradients = None, []
            if isinstance(op, protocol.ForwardBackward):
                gradients = [self._read_file(ref, GRADIENT) for ref in op.gradients]
                content = self.tickets.open_batch(op.batch_ticket)
                assert content is not None
                batch = self.batches[op.op] = protocol.decode(protocol.batches, content)
            if not self.trainer.holds(op) and self.trainer.may_load(op):
                self._load(op.policy, op.lease, op.parent)
            result = self.trainer.apply(op, batch, gradients)
        if result.upload is None:
            return result.reply
        return msgspec.structs.replace(result.reply, manifest=self.write(op.upload, result.upload))

    def upload(self, op: Any, content: str) -> protocol.OperationDone:
        """Write an artifact with this content in place of the trainer's, and reply so."""
        if isinstance(op, protocol.InitAdapter):
            config = peft_config(op.rank, op.alpha, op.targets)
        else:
            config = self.tickets.artifacts.path(op.parent.hash, CONFIG).read_bytes()
        manifest = self.write(op.upload, {ADAPTER: content.encode(), CONFIG: config})
        return protocol.OperationDone(epoch=0, op=op.op, metrics={"grad_norm": 1.0}, manifest=manifest)

    def write(self, ticket: str, files: dict[str, bytes]) -> protocol.Manifest:
        """Upload files under a commit's ticket."""
        staging = self.tickets.staging(ticket)
        assert staging is not None
        return protocol.manifest_of([staging.write(name, [content]) for name, content in files.items()])


# --- an environment host ----------------------------------------------------------------------------------------------

HANG = object()
"""A script's answer for no reply at all."""


class ScriptedHost(FakeHost):
    """Environments whose prompts are numbers and whose rewards depend on the reply. It keeps its episodes and answers
    repeated calls from memory, as hosts do, across the connections of one instance."""

    def __init__(
        self,
        serve: Callable[[Connection, str], Awaitable[None]],
        *,
        owner: str = "alice",
        instance: str = "host-1",
        environments: dict[str, bool] | None = None,
        turns: int = 1,
        script: Callable[[protocol.Reset | protocol.StepEpisode], Any] | None = None,
    ) -> None:
        """``environments`` maps names to whether they are deterministic; ``script`` may answer a call with a dict of
        the fields of its ``Observation``, with :data:`HANG`, or with None for the usual."""
        self._owner = owner
        self.peer = Peer(partial(serve, owner=owner))
        super().__init__(
            self.peer.dial, environments=environments or {"task": False}, observe=self.play,
            instance=instance,
        )  # fmt: skip
        self.turns, self.script = turns, script
        self.executed: Counter[tuple[str, int]] = Counter()
        self.asked: list[protocol.GetPrompts] = []
        self.calls = 0
        self.closed: list[str] = []
        self.answering = asyncio.Event()
        self.answering.set()

    @property
    def link(self) -> MemoryConnection | None:
        return self.connection

    @property
    def serve(self) -> Any:
        return self.peer.serve

    @serve.setter
    def serve(self, serve: Any) -> None:
        self.peer.serve = partial(serve, owner=self._owner)

    async def handle(self, connection: MemoryConnection, message: Any) -> None:
        await self.answering.wait()
        match message:
            case protocol.CloseEpisode():
                self.closed.append(message.episode)
            case protocol.GetPrompts():
                self.asked.append(message)
            case protocol.Reset() | protocol.StepEpisode():
                self.calls += 1
        await super().handle(connection, message)

    def play(self, message: protocol.Reset | protocol.StepEpisode) -> dict[str, Any] | None:
        turn = message.turn if isinstance(message, protocol.StepEpisode) else -1
        self.executed[(message.episode, turn)] += 1
        scripted = self.script(message) if self.script is not None else None
        return None if scripted is HANG else scripted or self.usual(message)

    def usual(self, message: protocol.Reset | protocol.StepEpisode) -> dict[str, Any]:
        if isinstance(message, protocol.Reset):
            return {"messages": [user_message(f"{message.prompt.decode()} {message.seed % 7}")]}
        done = message.turn + 1 >= self.turns
        messages = [] if done else [user_message(f"go on {message.turn}")]
        reward = float(draw("reward", message.text, message.turn) % 5)
        return {"messages": messages, "reward": reward, "done": done, "metrics": {"odd": reward % 2}}


# --- a controller with all that is real around it ---------------------------------------------------------------------


class Crash(Exception):
    """The process of this writer is dead."""


class MortalWriter:
    """The shipped writer (or another), until the process dies: then nothing more is written by it."""

    def __init__(self, calls_left: int | None = None, after: bool = True, writer: Any = None) -> None:
        self._writer = writer or StorageWriter()
        self.calls = self.done = 0
        self.under_way = 0
        """Calls that were submitted and are not answered yet."""
        self.calls_left = calls_left
        self.after = after
        """Whether the last call is still carried out."""
        self.died = asyncio.Event()

    async def __call__(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        self.under_way += 1
        try:
            return await self._run(call, *arguments, **named)
        finally:
            self.under_way -= 1

    async def behind(self) -> None:
        """Return when the calls that are under way have run. This one counts for nothing."""
        await self._writer(lambda: None)

    async def _run(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self.died.is_set():
            raise Crash
        self.calls += 1
        if self.calls_left is not None and self.calls > self.calls_left:
            self.died.set()
            if not self.after:
                raise Crash
            await self._writer(call, *arguments, **named)
            raise Crash
        result = await self._writer(call, *arguments, **named)
        if self.died.is_set():
            raise Crash
        self.done += 1
        return result

    def close(self) -> None:
        self.died.set()
        self._writer.close()


ENDS = ("completed", "failed", "cancelled", "paused")
"""States of a job that has ended or is paused."""

CHAIN = 8
"""Calls of the writer that follow each other, each when the one before is answered, for which a step of the clock
waits. What a job does for ever has no last one."""

IDLE_TURNS = 200
"""Turns of the event loop after which a job is looked at, also where nothing was written."""


class Service:
    """The surviving parts (database, artifacts, folders) and the controller that runs on them now."""

    def __init__(
        self, folder: Path, clock: Any = None, writer: Callable[[], Any] = StorageWriter, **settings: Any
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.clock = clock or ManualClock()
        if isinstance(self.clock, ManualClock):
            self.clock.act = self._act
        self.make_writer = writer
        # tests crash the service again and again
        usual = {"worker_wait_seconds": 30.0, "reconnect_seconds": 0.0, "start_crashes": 1000}
        changed, self.rules = split(usual | settings)
        self.settings = Settings(data=folder, cache=folder / "cache", **changed)
        self.database = FaultyDatabase(f"sqlite:///{folder}/rookery.db")
        self.database.create()
        for tenant in {"alice", "bob"} - {row.id for row in self.database.read(tenants.list_tenants)}:
            self.database.write(tenants.create_tenant, tenant, tenant.title(), 1.0)
        self.artifacts = Artifacts(folder / "artifacts")
        self.chat = Chat.load(model_folder(folder / "model"))
        self.chats: dict[str, Chat] = {}
        """The templates of base models that have another one than ``chat``."""
        self.no_model = ""
        """Why base models cannot be prepared."""
        self.provided: list[str] = []
        self.released: list[str] = []
        """Base models for which workers were asked for, or ended."""
        self.lives = 0
        self.peers: list[Any] = []
        self.writer: MortalWriter
        self.controller: Controller

    async def start(self, calls_left: int | None = None, after: bool = True) -> Controller:
        """A new process on the same data."""

        async def chat(model: str) -> Chat:
            if self.no_model:
                raise UserError(self.no_model)
            return self.chats.get(model, self.chat)

        self.lives += 1
        self.writer = MortalWriter(calls_left, after, self.make_writer())
        self.controller = Controller(
            Services(
                settings=self.settings,
                clock=self.clock,
                ids=RandomIds(Random(self.lives)),
                store=Store(self.database, self.writer),
                artifacts=self.artifacts,
                chat=chat,
            ),
            check_environment=lambda id, options: None,
            jobs_folder=self.folder / "jobs",
            options=ControllerOptions(
                workers=LocalWorkers(provide=self.provided.append, release=self.released.append),
                rollout_rules=self.rules.rollouts,
                session_rules=self.rules.sessions,
                orphan_keep_seconds=0.0,
            ),
        )
        with contextlib.suppress(Crash):
            await self.controller.start()
        return self.controller

    async def crash(self) -> None:
        """``kill -9`` of the controller: nothing it would still do has an effect."""
        self.writer.died.set()
        record = self.controller.record.path
        left = record.read_bytes()
        await self.close()
        record.write_bytes(left)

    async def close(self) -> None:
        for peer in self.peers:
            if peer.link is not None:
                await (peer.die() if isinstance(peer, ScriptedWorker) else peer.leave())
        self.peers.clear()
        await self.controller.stop()
        self.writer.close()

    def worker(self, name: str = "worker", **script: Any) -> ScriptedWorker:
        peer = ScriptedWorker(self.controller.serve_worker, self.controller.tickets, name, **script)
        self.peers.append(peer)
        return peer

    def host(self, **script: Any) -> ScriptedHost:
        peer = ScriptedHost(self.controller.serve_host, **script)
        self.peers.append(peer)
        return peer

    async def join(self, **script: Any) -> tuple[ScriptedWorker, ScriptedHost]:
        """A worker, and a host with this script."""
        return await self.worker().join(), await self.host(**script).join()  # type: ignore[return-value]

    def reconnect(self, host: ScriptedHost) -> ScriptedHost:
        """The same process will dial the present controller."""
        host.serve = self.controller.serve_host
        self.peers.append(host)
        return host

    async def ends(self, job: str, state: str = "completed", tenant: str = "alice") -> JobView:
        """The job once it is in ``state``; fails as soon as it ended otherwise. It looks at the job's row when the
        writer has done a call: a view of the job takes a dozen calls of the writer, which the job would wait for."""
        idle = True
        async with asyncio.timeout(PATIENCE):
            while True:
                done = self.writer.done
                if idle or self.database.read(jobs.get_job, tenant, job).state in (state, *ENDS):
                    view = await self.controller.queries.show(tenant, job)
                    if view.state == state:
                        return view
                    assert view.state not in ENDS, (view.state, view.reason)
                    done = self.writer.done
                idle = not await self._written(done)

    async def _act(self) -> None:
        """Everybody acts, also those who wait for a call of the writer's thread: what they do in a step of the clock
        does not depend on how quick that is."""
        await settle()
        for _ in range(CHAIN):
            if not self.writer.under_way or self.writer.died.is_set():
                return
            await self.writer.behind()
            await settle()

    async def _written(self, done: int) -> bool:
        """Everybody acts, until the writer, which had done so many calls, has done another one; False if it does
        none for many turns."""
        for _ in range(IDLE_TURNS):
            await settle(1)
            if self.writer.done != done:
                return True
        return False

    async def pass_until(self, holds: Callable[[], object]) -> None:
        """Time passes, beat by beat, until something holds."""

        async def beat() -> bool:
            await self.clock.advance(self.settings.worker.heartbeat_seconds, steps=1)
            return bool(holds())

        await eventually(beat)

    # --- between a crash and the next start ---------------------------------------------------------------------------

    def corrupt(self, digest: str) -> None:
        """The artifact's weights are as many bytes as they were, and others."""
        path = self.artifacts.path(digest, ADAPTER)
        path.write_bytes(b"x" * path.stat().st_size)

    def stop_at(self, job: str, steps: int, tenant: str = "alice") -> None:
        """The job, the only one there is, ends after so many steps."""
        row = self.database.read(jobs.get_job, tenant, job)
        spec = {**row.spec, "stop": {**row.spec["stop"], "steps": steps}}
        with self.database.writing() as connection:
            connection.execute(update(models.JobRow).values(spec=spec))

    # --- what must hold of a finished history -------------------------------------------------------------------------

    def check_history(self, job: str, tenant: str = "alice") -> list[Any]:
        """Versions are a gapless chain, no group is in two of them, no ordinal is missing. Answers the versions."""
        policy = self.database.read(jobs.policies, tenant, job)[0]
        versions = self.database.read(version_rows.versions, tenant, policy.id)
        assert [v.version for v in versions] == list(range(len(versions)))
        step = {None: -1}
        for version in versions:
            assert version.lost or version.parent is None or version.step > step[version.parent]
            step[version.version] = version.step
        for kept in versions:
            if kept.kept:
                self.artifacts.verify(kept.hash)
        rows = self.groups(job)
        assert [row["ordinal"] for row in rows] == list(range(len(rows)))
        assert self.database.read(jobs.get_job, tenant, job).cursor == len(rows)
        assert len({row["prompt"] for row in rows}) == len(rows)
        return versions

    def groups(self, job: str) -> list[dict[str, Any]]:
        engine = create_engine(f"sqlite:///{self.folder}/rookery.db")
        try:
            with engine.begin() as connection:
                query = select(models.GroupRow).where(models.GroupRow.job == job).order_by(models.GroupRow.ordinal)
                return [dict(row._mapping) for row in connection.execute(query)]
        finally:
            engine.dispose()


def job_of(**changes: Any) -> dict[str, Any]:
    """A small job; ``algorithm__group_size=4`` changes a field inside."""
    job: dict[str, Any] = {
        "name": "test",
        "base_model": MODEL,
        "environment": {"hosted": "task"},
        "algorithm": {"group_size": 2, "groups_per_step": 2},
        "sampling": {"max_tokens": 8},
        "stop": {"steps": 2},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        found = job
        for name in parents:
            found = found.setdefault(name, {})
        found[last] = value
    return job


def members(worker: ScriptedWorker) -> Iterator[tuple[list[int], protocol.GroupMember]]:
    """Every trajectory that the worker was given to train on, with its prompt."""
    for batch in worker.batches.values():
        for unit in batch.groups:
            for member in unit.members:
                yield unit.prompt, member
