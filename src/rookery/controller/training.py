"""Training: a policy's optimizer steps on whichever training worker holds its lease.

* A policy trains on one worker at a time, under a lease number that only grows; an answer under an older one is ignored
  and its commit refused by the database.
* Every operation names its parent version and the steps since: a worker that holds something else says so and reloads.
* What was taken since the last commit is kept here until the commit, so that a lost worker costs its computation and
  nothing else: the next worker loads the parent and replays it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

from rookery import wire
from rookery.controller.fleet import Fleet, Worker
from rookery.controller.leases import Leases
from rookery.controller.ports import Clock, Ids, Ledger
from rookery.controller.tickets import Tickets
from rookery.errors import Conflict, RookeryError, Unavailable
from rookery.scheduling.routing import crowded, lease
from rookery.settings import Settings
from rookery.storage.artifacts import Staging

log = logging.getLogger("rookery.controller.training")


T = TypeVar("T")
Operation = wire.ForwardBackward | wire.OptimStep | wire.InitAdapter


class TrainingFailed(RookeryError):
    """An operation that no other worker would do better."""


class _TryElsewhere(Exception):
    """The worker is gone, or does not hold what the operation names."""


@dataclass(frozen=True)
class Forward:
    """A gradient to add, or (``forward_only``) log-probabilities to tell."""

    batch: bytes
    """An encoded :class:`rookery.wire.Batch`."""
    loss: wire.Loss
    temperature: float = 1.0
    kl_weight: float = 0.0
    forward_only: bool = False
    logprobs: bool = False
    """Answer with the log-probabilities too."""


@dataclass(frozen=True)
class Optimise:
    """A step on ``scale`` times the gradient added since the last one."""

    adam: wire.Adam
    scale: float = 1.0


NOTHING = Forward(wire.encode(wire.Batch()), wire.Loss(name="cross_entropy"))
"""Adds a gradient of zero: what a step without one before it is taken on."""


@dataclass
class _Work:
    """Operations under way at one worker, and since when there were any."""

    operations: int = 0
    _since: float = 0.0
    _before: float = 0.0

    def add(self, change: int, now: float) -> None:
        if not self.operations:
            self._since = now
        self.operations += change
        if not self.operations:
            self._before += now - self._since

    def seconds(self, now: float) -> float:
        return self._before + (now - self._since if self.operations else 0.0)


class Training:
    """Sends operations to training workers and matches their answers."""

    def __init__(
        self, fleet: Fleet, tickets: Tickets, settings: Settings, clock: Clock, ids: Ids, ledger: Ledger
    ) -> None:
        self._fleet = fleet
        self._tickets = tickets
        self._settings = settings
        self._clock = clock
        self._ids = ids
        self._ledger = ledger
        self._waiting: dict[Worker, dict[str, asyncio.Future[wire.Done]]] = {}
        """By worker, what it was asked and has not answered."""
        self._leases = Leases()
        self._aside = Leases()
        self._serves: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """By base model: set when a worker begins to train it."""
        self._on_trained: list[Callable[[Worker, str, str, float, float], None]] = []
        self._on_operation: list[Callable[[Worker, Operation, wire.Done | None], None]] = []
        self._work: dict[Worker, _Work] = {}
        self.unnamed: Counter[str] = Counter()
        """Artifacts that are durable and that a version is about to name. Equal content is one artifact, so retention
        must not delete one that another job just brought."""
        self.retries = 0
        fleet.handle(wire.Done, self._answered)
        fleet.on_state(self._seen)
        fleet.on_lost(lambda worker, reason: self._lost(worker))

    def on_trained(self, callback: Callable[[Worker, str, str, float, float], None]) -> None:
        """Called with the worker, the tenant, the policy, and what the worker says of an operation that it carried
        out: tokens that carried the loss, seconds of computing."""
        self._on_trained.append(callback)

    def on_operation(self, callback: Callable[[Worker, Operation, wire.Done | None], None]) -> None:
        """Called when a worker was given an operation, without an answer, and again with its answer if that is good."""
        self._on_operation.append(callback)

    def under_way(self, worker: Worker) -> int:
        """Operations that it was given and that are not over."""
        work = self._work.get(worker)
        return work.operations if work is not None else 0

    def busy(self, worker: Worker) -> float:
        """Seconds for which it has had at least one operation under way, on this connection."""
        work = self._work.get(worker)
        return work.seconds(self._clock.monotonic()) if work is not None else 0.0

    async def worker_for(self, policy: str, model: str) -> Worker:
        """The worker that trains ``policy``: the one that does already, else of the reserved ones, or where there are
        none of all, the one with the fewest policies. Waits for one; raises :class:`Unavailable` when none came in
        time."""
        deadline = self._clock.monotonic() + self._settings.worker_wait_seconds
        while True:
            held = self._leases.get(policy)
            if held is not None and held.plays("train", model):
                return held
            aside, load = self._aside.get(policy), self._load(model)
            name = lease(load, aside.name if aside is not None else None)
            if name is not None:
                worker = self._fleet.named(name)
                assert worker is not None
                self._aside.pop(policy)
                self._leases.put(policy, worker)
                return worker
            self._serves[model].clear()
            try:
                async with asyncio.timeout(deadline - self._clock.monotonic()):
                    await self._serves[model].wait()
            except TimeoutError:
                raise Unavailable(self._fleet.missing("train", model)) from None

    def _load(self, model: str) -> dict[str, int]:
        """How many policies each worker holds that may be given one."""
        able = self._fleet.serving("train", model)
        stay = [worker for worker in able if worker.hello.kind == "reserved"]
        return {worker.name: self._leases.count(worker) for worker in stay or able}

    def level(self, policy: str, model: str) -> None:
        """``policy`` has nothing uncommitted: it may as well train elsewhere, where its worker has more policies than
        others. Else those that came while one worker was there would crowd it for ever, as after each restart."""
        held = self._leases.get(policy)
        if held is not None and crowded(self._load(model), held.name):
            self.forget(policy)

    async def call(self, worker: Worker, message: Operation) -> wire.Done:
        """The worker's answer. Raises what tells whether another worker can help."""
        future: asyncio.Future[wire.Done] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(worker, {})
        waiting[message.op] = future
        try:
            if worker.state != "serving":
                raise _TryElsewhere(f"worker {worker.name} is {worker.state}")
            worker.post(message)
            with self._works(worker):
                self._tell(worker, message, None)
                async with asyncio.timeout(self._settings.silence_seconds):
                    done = await future
        except asyncio.CancelledError:
            worker.post(wire.Cancel(op=message.op))
            raise
        except TimeoutError:
            worker.post(wire.Cancel(op=message.op))
            what, seconds = type(message).__name__, self._settings.silence_seconds
            raise _TryElsewhere(f"worker {worker.name} did not answer {what} within {seconds:g} s") from None
        finally:
            del waiting[message.op]
            if not waiting:
                self._waiting.pop(worker, None)
        if done.category in ("stale", "lost"):
            raise _TryElsewhere(f"worker {worker.name}: {done.error}")
        if done.error:
            raise TrainingFailed(f"worker {worker.name}: {done.error}")
        if not isinstance(message, wire.InitAdapter):
            tokens, seconds = done.metrics.get("tokens", 0.0), done.metrics.get("seconds", 0.0)
            for told in self._on_trained:
                told(worker, message.tenant, message.policy, tokens, seconds)
        self._tell(worker, message, done)
        return done

    @contextmanager
    def _works(self, worker: Worker) -> Iterator[None]:
        """An operation is under way there."""
        work = self._work.setdefault(worker, _Work())
        work.add(1, self._clock.monotonic())
        try:
            yield
        finally:
            work.add(-1, self._clock.monotonic())

    def _tell(self, worker: Worker, message: Operation, done: wire.Done | None) -> None:
        for told in self._on_operation:
            told(worker, message, done)

    async def retrying(self, policy: str, model: str, attempt: Callable[[Worker], Awaitable[T]]) -> T:
        """``attempt`` on the policy's worker, and on another one when that one is lost, a few times. Raises
        :class:`Unavailable` then: that workers vanish is no fault of the job's."""
        for _ in range(self._settings.retry_limit + 1):
            worker = await self.worker_for(policy, model)
            try:
                return await attempt(worker)
            except _TryElsewhere as problem:
                reason = str(problem)
                self.retries += 1
                self.release(policy)
                extra = {"policy": policy, "worker": worker.name}
                log.warning("training of %s goes on elsewhere: %s", policy, reason, extra=extra)
        raise Unavailable(f"training failed {self._settings.retry_limit + 1} times, the last: {reason}")

    async def uploading(self, worker: Worker, make: Callable[[str], wire.OptimStep | wire.InitAdapter]) -> wire.Done:
        """Call an operation that uploads an artifact; it is durable, and what the worker said it is, on return. Raises
        :class:`~rookery.errors.StorageFull` where the upload found no room."""
        ticket = await self._ledger(self._tickets.upload)
        try:
            done = await self.call(worker, make(ticket))
        except BaseException as error:
            staging = self._tickets.collect(ticket)
            if staging is not None:
                await asyncio.shield(self._ledger(staging.abandon))
                if staging.full is not None and isinstance(error, TrainingFailed | _TryElsewhere):
                    raise staging.full from None  # no fault of the worker's
            raise
        staging = self._tickets.collect(ticket)
        assert staging is not None
        try:
            manifest = await self._ledger(self._publish, staging)
        except Conflict:
            raise _TryElsewhere(f"worker {worker.name} uploaded nothing") from None
        if done.manifest is None or manifest.hash != done.manifest.hash:
            await self._ledger(self.named_now, manifest.hash)
            raise _TryElsewhere(f"worker {worker.name} uploaded other bytes than it said")
        return msgspec.structs.replace(done, manifest=manifest)

    def _publish(self, staging: Staging) -> wire.Manifest:
        """Runs in the ledger, as do its end and retention: nothing comes between its two lines."""
        manifest = staging.commit()
        self.unnamed[manifest.hash] += 1
        return manifest

    def named_now(self, digest: str) -> None:
        """A version names the artifact, or none ever will. Runs in the ledger."""
        self.unnamed[digest] -= 1
        if not self.unnamed[digest]:
            del self.unnamed[digest]

    def release(self, policy: str) -> None:
        self._leases.pop(policy)

    def forget(self, policy: str, *, aside: bool = False) -> None:
        """The policy's trainer state may go. ``aside``: it may come back, and better to where its state still is."""
        worker = self._leases.pop(policy)
        if worker is not None and worker.state == "serving":
            worker.post(wire.Forget(policy=policy, aside=aside))
            if aside:
                self._aside.put(policy, worker)

    def new_op(self) -> str:
        return self._ids.new("op")

    def offer(self, content: bytes) -> str:
        return self._tickets.offer(content)

    def withdraw(self, ticket: str) -> None:
        self._tickets.withdraw(ticket)

    def named(self, worker: Worker, ref: wire.AdapterRef) -> wire.AdapterRef:
        """``ref`` with a ticket for ``worker``."""
        return self._fleet.refer(worker, ref)

    def committed(self, worker: Worker, message: wire.Committed) -> None:
        worker.post(message)

    def _answered(self, worker: Worker, message: wire.Done) -> None:
        future = self._waiting.get(worker, {}).get(message.op)
        if future is not None and not future.done():
            future.set_result(message)

    def _seen(self, worker: Worker) -> None:
        if worker.plays("train", worker.hello.model):
            self._serves[worker.hello.model].set()

    def _lost(self, worker: Worker) -> None:
        for future in self._waiting.get(worker, {}).values():
            if not future.done():
                future.set_exception(_TryElsewhere(f"worker {worker.name} was lost"))
        self._leases.leave(worker)
        self._aside.leave(worker)
        self._work.pop(worker, None)


class Trainee:
    """One policy in training: its lease and what was taken since its last commit."""

    def __init__(
        self, training: Training, *, tenant: str, policy: str, model: str, next_lease: Callable[[], Awaitable[int]]
    ) -> None:
        self._training = training
        self._tenant = tenant
        self._policy = policy
        self._model = model
        self._next_lease = next_lease
        self._worker: Worker | None = None
        self._log: list[Forward | Optimise] = []
        self._taken = 0
        """How much of ``_log`` the present worker has taken …"""
        self._applied = 0
        """… and how many of the steps therein changed its state: one that is not a number is skipped."""
        self.lease = 0

    async def init(
        self,
        make: Callable[[str, str, wire.AdapterRef | None], wire.InitAdapter],
        source: wire.AdapterRef | None,
    ) -> wire.Manifest:
        """Version 0, durable as an artifact. ``make`` gets the operation's id, the upload ticket and the ``source`` to
        start from with a ticket to read it."""

        async def attempt(worker: Worker) -> wire.Done:
            readable = self._training.named(worker, source) if source is not None else None
            return await self._training.uploading(
                worker, lambda upload: make(self._training.new_op(), upload, readable)
            )

        done = await self._training.retrying(self._policy, self._model, attempt)
        assert done.manifest is not None
        self.lease = await self._next_lease()
        return done.manifest

    async def forward(self, parent: wire.AdapterRef, forward: Forward) -> wire.Done:
        """Add to the gradient of the next step from ``parent`` and what was taken since."""
        if not forward.forward_only:
            return (await self._take([forward], parent))[-1]

        async def attempt(worker: Worker) -> wire.Done:
            await self._catch_up(worker, parent)
            return await self._held(self._forward(worker, parent, forward, fresh=False))

        return await self._training.retrying(self._policy, self._model, attempt)

    async def optimise(
        self, parent: wire.AdapterRef, adam: wire.Adam, *, commit: bool, scale: float = 1.0
    ) -> wire.Done:
        """Step on ``scale`` times the gradient since the last step; without any, on zero. With ``commit`` the answer's
        manifest is durable."""
        entries: list[Forward | Optimise] = [] if self.begun else [NOTHING]
        return (await self._take([*entries, Optimise(adam, scale)], parent, commit=commit))[-1]

    async def commit(self, parent: wire.AdapterRef) -> wire.Done:
        """Make the state after the steps taken so far durable; a gradient begun since stays."""

        async def attempt(worker: Worker) -> wire.Done:
            await self._catch_up(worker, parent)
            return await self._held(self._training.uploading(worker, partial(self._optim, parent, worker, None)))

        return await self._training.retrying(self._policy, self._model, attempt)

    def recall(self, entry: Forward | Optimise) -> None:
        """What an earlier process took since the commit that is to be the parent: it is replayed before anything
        else."""
        if isinstance(entry, Optimise) and not self.begun:
            self._log.append(NOTHING)
        self._log.append(entry)

    def drop_gradient(self) -> None:
        """What was added since the last step is as if it had never been."""
        if self.begun:
            del self._log[self._stepped :]
            self._leave()

    def drop_step(self) -> None:
        """Neither was the last step, whose commit did not succeed."""
        self.drop_gradient()
        del self._log[-1:]
        self.drop_gradient()
        self._leave()

    @property
    def uncommitted(self) -> int:
        """Steps since the last commit."""
        return sum(isinstance(entry, Optimise) for entry in self._log)

    @property
    def begun(self) -> bool:
        """Whether there is a gradient that no step was taken on yet."""
        return self._stepped < len(self._log)

    def committed(self, ref: wire.AdapterRef) -> None:
        """``ref`` is durable in the database: the next step begins from it."""
        gone = self._stepped
        del self._log[:gone]
        self._taken = max(0, self._taken - gone)
        self._applied = 0
        if self._worker is not None:
            self._worker.named.add(ref.hash)
            message = wire.Committed(policy=self._policy, lease=self.lease, ref=ref)
            self._training.committed(self._worker, message)

    def rest(self) -> None:
        """Let the worker's place go to somebody else: the next operation loads the parent again, and replays."""
        self._leave()
        self._training.forget(self._policy, aside=True)

    def forget(self) -> None:
        """The policy goes on from another state, or not at all."""
        self._log.clear()
        self._leave()
        self._training.forget(self._policy)

    @property
    def _stepped(self) -> int:
        """Entries of the log up to its last step."""
        return max((at + 1 for at, entry in enumerate(self._log) if isinstance(entry, Optimise)), default=0)

    def _leave(self) -> None:
        self._worker = None
        self._taken = self._applied = 0

    async def _held(self, operation: Awaitable[wire.Done]) -> wire.Done:
        """``operation``, which changes nothing in the worker; whether that holds what it did is not known where it is
        given up."""
        try:
            return await operation
        except TrainingFailed:
            raise
        except BaseException:
            self._leave()
            raise

    async def _take(
        self, entries: Sequence[Forward | Optimise], parent: wire.AdapterRef, *, commit: bool = False
    ) -> list[wire.Done]:
        """Add ``entries`` to the log and have the worker take them; their answers. What fails is not in the log."""
        known = len(self._log)
        if not known:
            self._training.level(self._policy, self._model)
        self._log.extend(entries)

        async def attempt(worker: Worker) -> list[wire.Done]:
            return await self._catch_up(worker, parent, commit=commit)

        try:
            done = await self._training.retrying(self._policy, self._model, attempt)
        except (TrainingFailed, Unavailable):
            del self._log[known:]
            raise
        return done[-len(entries) :]

    async def _catch_up(self, worker: Worker, parent: wire.AdapterRef, *, commit: bool = False) -> list[wire.Done]:
        """Have ``worker`` take what it lacks of the log; the answers so far of this worker to the newest entries."""
        if worker is not self._worker:
            self._leave()
            self.lease = await self._next_lease()
            self._worker = worker
        answers = []
        try:
            while self._taken < len(self._log):
                at = self._taken
                entry = self._log[at]
                if isinstance(entry, Forward):
                    fresh = at == 0 or isinstance(self._log[at - 1], Optimise)
                    done = await self._forward(worker, parent, entry, fresh=fresh)
                elif commit and at + 1 == len(self._log):
                    done = await self._training.uploading(worker, partial(self._optim, parent, worker, entry))
                else:
                    done = await self._training.call(worker, self._optim(parent, worker, entry, ""))
                self._taken += 1
                if isinstance(entry, Optimise):
                    self._applied += not done.metrics.get("skipped")
                answers.append(done)
        except BaseException:
            self._leave()  # what the worker holds now is not known: load the parent and replay
            raise
        return answers

    async def _forward(self, worker: Worker, parent: wire.AdapterRef, entry: Forward, *, fresh: bool) -> wire.Done:
        ticket = self._training.offer(entry.batch)
        try:
            return await self._training.call(
                worker,
                wire.ForwardBackward(
                    op=self._training.new_op(),
                    tenant=self._tenant,
                    policy=self._policy,
                    lease=self.lease,
                    parent=self._training.named(worker, parent),
                    steps=self._applied,
                    batch_ticket=ticket,
                    loss=entry.loss,
                    temperature=entry.temperature,
                    kl_weight=entry.kl_weight,
                    forward_only=entry.forward_only,
                    fresh=fresh,
                    logprobs=entry.logprobs,
                ),
            )
        finally:
            self._training.withdraw(ticket)

    def _optim(self, parent: wire.AdapterRef, worker: Worker, entry: Optimise | None, upload: str) -> wire.OptimStep:
        return wire.OptimStep(
            op=self._training.new_op(),
            tenant=self._tenant,
            policy=self._policy,
            lease=self.lease,
            parent=self._training.named(worker, parent),
            steps=self._applied,
            adam=entry.adam if entry is not None else None,
            scale=entry.scale if entry is not None else 1.0,
            commit=upload,
        )
