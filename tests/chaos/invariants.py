"""The invariants of requests, checked from outside: from the frames on the controller's links, the calls that ask for
replies, and nothing that the controller says about itself.

The account kept here is a model of the promise, a few lines for each frame:

* **given** – a request is given to a worker with exactly the tokens received so far, and to one worker at a time.
* **tokens** – what is received is the text of its seed, position by position, under a version that it was given; the
  number received never falls and grows by what arrived from the worker that it is with, and by nothing else.
* **epochs** – a frame of an old epoch, or of a connection given up, changes nothing; epochs only grow.
* **once** – a request ends once: with its whole text, an error that its engine sent, or its caller's cancellation.
* **holders** – see :mod:`tests.chaos.holders`.
* **room** – no worker holds more than its rows and the few ahead, and what it brought along.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.events import Events
from tests.chaos.faults import LENGTH
from tests.chaos.holders import Holders
from tests.chaos.network import NetworkConnection
from tests.support.replies import reply_of

from rookery import protocol
from rookery.controller.controller import Controller
from rookery.controller.fleet.events import WorkerDraining, WorkerEvent, WorkerGone, WorkerJoined, WorkerSuspect
from rookery.controller.fleet.worker import Worker
from rookery.controller.rollout.request import GenerationFailed, SamplingRequest, SamplingResult


@dataclass(eq=False)
class Connection:
    """A worker's connection, as an onlooker knows it."""

    worker: Worker
    epoch: int
    alive: bool = True
    requests: dict[str, Account] = field(default_factory=dict)
    """With the worker now, by their assignments."""


@dataclass(eq=False)
class Account:
    """The observed state of one request."""

    id: str
    job: str
    run: int
    """The run of its job that asked last."""
    tokens: list[int]
    """Its whole text."""
    finish: str
    """How that text ends."""
    switches: bool
    """Whether it may change its version while it runs."""
    ref: protocol.AdapterRef | None
    """The version that it was asked of last. Of another one it is another text, unless it switches: an evaluation that
    begins again after a pause has the newest versions of its other policies."""
    refs: set[tuple[str, int]] = field(default_factory=set)
    """Versions that it was given."""
    received: int = 0
    """Tokens that arrived from where it was."""
    taken: int = 0
    """Tokens that the controller has shown to have."""
    holder: Connection | None = None
    name: str = ""
    """Its assignment to the holder."""
    asked: bool = False
    """Somebody waits for it."""
    failed: bool = False
    """Its engine sent an error."""
    ended: bool = False


class Requests:
    """The accounts of one controller's life; what outlives it is in ``lasting``."""

    def __init__(self, controller: Controller, events: Events, lasting: Lasting) -> None:
        self._events = events
        self._lasting = lasting
        self._ahead = controller.context.rooms.rollouts.rules.dispatch_ahead
        self._accounts: dict[str, Account] = {}
        self._touched: list[Account] = []
        self._before: tuple[Connection, tuple[Any, ...]] | None = None
        """Whose late frame came, and how things stood."""
        self._over = False
        self._holders = Holders(events)
        context = controller.context
        self._fleet, self._rollouts = context.rooms.fleet, context.rooms.rollouts
        self._sample = context.rooms.rollouts.sample
        setattr(context.rooms.rollouts, "sample", self.sample)  # noqa: B010 (a method for an instance)

    def on_event(self, event: WorkerEvent) -> None:
        """Before the reactions of the others."""
        match event:
            case WorkerJoined():
                self._on_joined(event.worker)
            case WorkerDraining() | WorkerSuspect() | WorkerGone():
                self._on_lost(event.worker, event.text)

    def end(self) -> None:
        """The controller is dead: nothing that its remains do means anything."""
        self._over = True

    def left(self) -> list[str]:
        """Requests that somebody waits for."""
        return [account.id for account in self._accounts.values() if account.asked]

    # --- callers ------------------------------------------------------------------------------------------------------

    async def sample(
        self, request: SamplingRequest, on_tokens: Callable[[SamplingResult], None] | None = None
    ) -> SamplingResult:
        """As the shipped one, watched."""
        if self._over:
            return await self._sample(request, on_tokens)
        account = self._begin(request)

        def seen(reply: SamplingResult) -> None:
            self._grown(account, reply)
            if on_tokens is not None:
                on_tokens(reply)

        try:
            reply = await self._sample(request, seen)
        except BaseException as error:
            account.asked = False
            if account.holder is not None:
                account.holder.requests.pop(account.name, None)
                account.holder = None
            if isinstance(error, GenerationFailed) and not account.failed and not self._over:
                self._events.fail("once", f"{account.id} failed, its engine sent no error: {error}", account.id)
            account.ended = isinstance(error, GenerationFailed)
            raise
        self._end(account, reply)
        return reply

    def _begin(self, request: SamplingRequest) -> Account:
        run = self._lasting.runs.get(request.job, 0)
        account = self._accounts.get(request.id)
        if request.id in self._lasting.durable:
            self._events.fail("once", f"{request.id} is sampled again, its reply is stored", request.id)
        if account is not None and account.asked:
            self._events.fail("once", f"{request.id} is asked for twice at once", request.id)
        if account is not None and account.ended and account.run == run:
            self._events.fail("once", f"{request.id} is sampled again after its end", request.id)
        if account is None or account.ended or not (account.switches or account.ref == request.adapter):
            tokens, _, finish = reply_of(request.generate.seed, request.generate.max_tokens, LENGTH)
            account = Account(
                request.id, request.job, run, tokens, finish, request.generate.in_flight != "finish", request.adapter
            )
            self._accounts[request.id] = account
        account.run, account.asked = run, True
        if request.adapter is not None:
            account.refs.add((request.adapter.policy, request.adapter.version))
        self._events.note("asked", request.id)
        return account

    def _grown(self, account: Account, reply: SamplingResult) -> None:
        known, count = account.taken, len(reply.tokens)
        if self._over:
            return
        if count <= known:
            self._events.fail("tokens", f"{account.id} had {known} tokens and has {count}", account.id)
        elif reply.tokens[known:] != account.tokens[known:count]:
            self._events.fail("tokens", f"{account.id}: tokens from {known} on are not its seed's", account.id)
        elif not count == len(reply.logprobs) == len(reply.versions):
            self._events.fail("tokens", f"{account.id}: its lists have different lengths", account.id)
        else:
            versions = {version for _, version in account.refs}
            wrong = {version for version in reply.versions[known:] if version not in versions}
            if account.switches:  # a worker may have begun it under an older one, for the controller before this one
                wrong = {version for version in wrong if version > max(versions)}
            if wrong:
                self._events.fail("tokens", f"{account.id}: tokens of versions {wrong}, given {versions}", account.id)
        account.taken = count

    def _end(self, account: Account, reply: SamplingResult) -> None:
        account.asked = False
        if self._over:
            return
        self._events.note("ended", account.id, len(reply.tokens))
        if account.ended:
            self._events.fail("once", f"{account.id} ended twice", account.id)
        if reply.tokens != account.tokens or reply.finish != account.finish:
            have, want = len(reply.tokens), len(account.tokens)
            self._events.fail("tokens", f"{account.id} ended with {have} tokens of {want}, {reply.finish}", account.id)
        account.ended = True

    # --- frames to workers --------------------------------------------------------------------------------------------

    def _on_joined(self, worker: Worker) -> None:
        connection = Connection(worker, worker.epoch)
        assert isinstance(worker.connection, NetworkConnection)
        worker.connection.owner = connection
        if worker.epoch <= self._lasting.epoch:
            self._events.fail("epochs", f"{worker.name} got {worker.epoch} after {self._lasting.epoch}", worker.name)
        self._lasting.epoch = worker.epoch
        if not self._over:
            self._holders.joined(worker)
        post = worker.post

        def posted(message: protocol.Message) -> None:
            if not self._over:
                self._posted(connection, message)
            post(message)

        setattr(worker, "post", posted)  # noqa: B010 (a method for an instance)
        self._events.note("joined", worker.name, worker.epoch - self._lasting.first_epoch)

    def _posted(self, connection: Connection, message: protocol.Message) -> None:
        named = self._lasting.named
        self._holders.posted(connection.worker, message)
        match message:
            case protocol.Generate():
                self._given(connection, message)
            case protocol.Abort(resume=False):
                account = connection.requests.pop(message.assignment, None)
                if account is not None:
                    account.holder = None
            case protocol.SwitchAdapter():
                account = connection.requests[message.assignment]
                account.refs.add((message.adapter.policy, message.adapter.version))
                named(message.adapter, "Switch")
            case protocol.ForwardBackward() | protocol.OptimStep() | protocol.InitAdapter():
                if "train" not in connection.worker.hello.roles:
                    name = connection.worker.name
                    self._events.fail("jobs", f"{name} does not train and was sent {type(message).__name__}", name)
                if not isinstance(message, protocol.InitAdapter):
                    named(message.parent, type(message).__name__)
            case protocol.VersionCommitted():
                named(message.ref, "Committed")
            case protocol.Replicate():
                for ref in message.refs:
                    named(ref, "Hold")

    def _given(self, connection: Connection, message: protocol.Generate) -> None:
        account, name = self._accounts[message.request], connection.worker.name
        if message.assignment in self._lasting.assignments:
            self._events.fail("once", f"{account.id} got the assignment {message.assignment} again", account.id)
        self._lasting.assignments.add(message.assignment)
        self._events.note("given", account.id, name, len(message.prefix_tokens))
        if not account.asked or account.failed:
            self._events.fail("once", f"{account.id} is given to {name}, nobody waits for it", account.id)
        if account.holder is not None:
            other = account.holder.worker.name
            self._events.fail("given", f"{account.id} is given to {name}, it is with {other}", account.id)
        if not connection.alive:
            self._events.fail("given", f"{account.id} is given to {name}, which was lost", account.id)
        if message.prefix_tokens != account.tokens[: account.received]:
            have = account.received
            what = f"{account.id} is given to {name} with {len(message.prefix_tokens)} tokens, {have} were received"
            self._events.fail("given", what, account.id)
        if message.adapter is not None:
            account.refs.add((message.adapter.policy, message.adapter.version))
            self._lasting.named(message.adapter, "Generate")
        account.holder, account.name = connection, message.assignment
        connection.requests[message.assignment] = account
        claims = connection.worker.hello.running
        beyond = connection.worker.hello.max_rows * 3 // 2  # of tenants that have fewer rows than their share
        if len(connection.requests) > beyond + self._ahead + len(claims):
            self._events.fail("room", f"{name} holds {len(connection.requests)} requests", name)

    def _on_lost(self, worker: Worker, reason: str) -> None:
        connection = worker.connection.owner if isinstance(worker.connection, NetworkConnection) else None
        if connection is None or self._over or not connection.alive:
            return
        connection.alive = False
        self._holders.lost(worker)
        for account in connection.requests.values():
            account.holder = None
        self._events.note("lost", worker.name, len(connection.requests), reason)
        connection.requests.clear()

    # --- frames from workers ------------------------------------------------------------------------------------------

    def arrived(self, link: NetworkConnection, frame: bytes) -> None:
        connection: Connection | None = link.owner
        if connection is None or self._over:
            return
        try:
            message: Any = protocol.decode(protocol.from_worker, frame)
        except protocol.BadFrame:
            message = None
        if message is None:
            self._events.note("garbage", connection.worker.name)
        elif message.epoch != connection.epoch or not connection.alive:
            self._before = (connection, self._state(connection))
            self._events.note("late", type(message).__name__, connection.worker.name)
        elif isinstance(message, protocol.Output):
            self._output(connection, message)
        else:
            self._holders.arrived(connection.worker, message)

    def handled(self, link: NetworkConnection) -> None:
        if self._before is not None:
            (connection, before), self._before = self._before, None
            if link.owner is connection and self._state(connection) != before:
                name = connection.worker.name
                what = f"a late frame of {name} made {self._state(connection)} of {before}"
                self._events.fail("epochs", what, name)
        for account in self._touched:
            if account.taken != account.received and account.asked:
                what = f"{account.id} has {account.taken} tokens, {account.received} were received"
                self._events.fail("tokens", what, account.id)
        self._touched.clear()

    def _state(self, connection: Connection) -> tuple[Any, ...]:
        worker = connection.worker
        received = (
            worker.outbox.last_frame if worker.state in ("suspect", "gone") else 0.0
        )  # one that drains is received still
        return (self._rollouts.sampled_tokens, self._rollouts.migrated, self._fleet.losses, worker.state, received)

    def _output(self, connection: Connection, message: protocol.Output) -> None:
        self._events.note("output", connection.worker.name, *[(c.offset, len(c.tokens)) for c in message.chunks])
        for chunk in message.chunks:
            account = connection.requests.get(chunk.assignment)
            if account is None:
                continue
            account.failed |= bool(chunk.error)
            if chunk.finish != "error":
                account.received = max(account.received, chunk.offset + len(chunk.tokens))
                self._touched.append(account)
            if chunk.finish:
                del connection.requests[chunk.assignment]
                account.holder = None


@dataclass
class Lasting:
    """The observer's state across the controller's lives."""

    named: Callable[[protocol.AdapterRef, str], None]
    """Checks a version that a frame of the named kind tells a worker of."""
    runs: dict[str, int] = field(default_factory=dict)
    """How often each job was taken up."""
    assignments: set[str] = field(default_factory=set)
    """All that were given: none is given twice."""
    durable: set[str] = field(default_factory=set)
    """Requests whose reply is stored."""
    epoch: int = 0
    first_epoch: int = 0
