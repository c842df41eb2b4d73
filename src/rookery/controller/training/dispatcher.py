"""Training workers: which one trains a policy, and what it is asked and answers.

* A policy trains on one worker at a time; when that is lost, or holds something else than an operation names, the next
  attempt is another's.
* What a worker uploaded is durable, and what it said it is, before anybody hears of it.
* What was uploaded and no version came to name goes again, however its step ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from rookery import protocol
from rookery.aio import Clock, IdGenerator
from rookery.controller.fleet.fleet import Fleet, Worker
from rookery.controller.training.assignments import PolicyAssignments
from rookery.controller.weights.tickets import Tickets
from rookery.errors import Conflict, RookeryError, StorageFull, Unavailable
from rookery.scheduling.placement import assign_trainer, is_overloaded
from rookery.settings import Settings
from rookery.storage.artifacts import Staging
from rookery.storage.writer import Writer

log = logging.getLogger("rookery.controller.training.dispatcher")

T = TypeVar("T")
Operation = protocol.ForwardBackward | protocol.OptimStep | protocol.InitAdapter


class TrainingFailed(RookeryError):
    """An operation that no other worker would do better."""


class _TryElsewhere(Exception):
    """The worker is gone, or does not hold what the operation names."""


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


@dataclass
class _Upload:
    """An artifact on its way in. Only the writer thread changes it, so it stays right when the caller is cancelled."""

    ticket: str = ""
    staging: Staging | None = None
    brought: tuple[str, str] | None = None
    """The policy and the artifact's hash, once that is durable."""


class TrainingDispatcher:
    """Sends operations to training workers and matches their answers."""

    def __init__(
        self, fleet: Fleet, tickets: Tickets, settings: Settings, clock: Clock, ids: IdGenerator, writer: Writer
    ) -> None:
        self._fleet = fleet
        self._tickets = tickets
        self._settings = settings
        self._clock = clock
        self._ids = ids
        self._writer = writer
        self._waiting: dict[Worker, dict[str, asyncio.Future[protocol.OperationDone]]] = {}
        """By worker, what it was asked and has not answered."""
        self._leases = PolicyAssignments()
        self._aside = PolicyAssignments()
        self._serves: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """By base model: set when a worker begins to train it."""
        self._on_trained: list[Callable[[Worker, str, str, float, float], None]] = []
        self._on_operation: list[Callable[[Worker, Operation, protocol.OperationDone | None], None]] = []
        self._work: dict[Worker, _Work] = {}
        self.pinned: Counter[str] = Counter()
        """Artifacts that are durable and that a version is about to name. Equal content is one artifact, so retention
        must not delete one that another job just brought."""
        self._on_stray: list[Callable[[str, str], None]] = []
        self.retries = 0
        fleet.handle(protocol.OperationDone, self._answered)
        fleet.on_state(self._seen)
        fleet.on_lost(lambda worker, reason: self._lost(worker))

    def on_trained(self, callback: Callable[[Worker, str, str, float, float], None]) -> None:
        """Called with the worker, the tenant, the policy, and what the worker says of an operation that it carried
        out: tokens that carried the loss, seconds of computing."""
        self._on_trained.append(callback)

    def on_operation(self, callback: Callable[[Worker, Operation, protocol.OperationDone | None], None]) -> None:
        """Called when a worker was given an operation, without an answer, and again with its answer if that is good."""
        self._on_operation.append(callback)

    def on_stray(self, callback: Callable[[str, str], None]) -> None:
        """Called in the writer thread with a policy and an artifact uploaded for it, when no version came to name
        that as far as is known."""
        self._on_stray.append(callback)

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
        deadline = self._clock.monotonic() + self._settings.server.worker_wait_seconds
        while True:
            held = self._leases.get(policy)
            if held is not None and held.has_role("train", model):
                return held
            aside, load = self._aside.get(policy), self._load(model)
            name = assign_trainer(load, aside.name if aside is not None else None)
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
        return {worker.name: self._leases.count(worker) for worker in self._fleet.trainers(model)}

    def rebalance(self, policy: str, model: str) -> None:
        """``policy`` has nothing uncommitted: it may as well train elsewhere, where its worker has more policies than
        others, or is one that is given none now. Else those that came while one worker was there would crowd it for
        ever, as after each restart, and those whose reserved worker was away for a moment would stay on one that may
        vanish."""
        held, load = self._leases.get(policy), self._load(model)
        if held is not None and load and (held.name not in load or is_overloaded(load, held.name)):
            self.forget_policy(policy)

    async def call(self, worker: Worker, message: Operation) -> protocol.OperationDone:
        """The worker's answer. Raises what tells whether another worker can help."""
        future: asyncio.Future[protocol.OperationDone] = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(worker, {})
        waiting[message.op] = future
        try:
            if worker.state != "serving":
                raise _TryElsewhere(f"worker {worker.name} is {worker.state}")
            worker.post(message)
            with self._works(worker):
                self._tell(worker, message, None)
                async with asyncio.timeout(self._settings.worker.request_timeout_seconds):
                    done = await future
        except asyncio.CancelledError:
            worker.post(protocol.CancelOperation(op=message.op))
            raise
        except TimeoutError:
            worker.post(protocol.CancelOperation(op=message.op))
            what, seconds = type(message).__name__, self._settings.worker.request_timeout_seconds
            raise _TryElsewhere(f"worker {worker.name} did not answer {what} within {seconds:g} s") from None
        finally:
            del waiting[message.op]
            if not waiting:
                self._waiting.pop(worker, None)
        if done.category in ("stale", "lost"):
            raise _TryElsewhere(f"worker {worker.name}: {done.error}")
        if done.error:
            raise TrainingFailed(f"worker {worker.name}: {done.error}")
        if not isinstance(message, protocol.InitAdapter):
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

    def _tell(self, worker: Worker, message: Operation, done: protocol.OperationDone | None) -> None:
        for told in self._on_operation:
            told(worker, message, done)

    async def retrying(self, policy: str, model: str, attempt: Callable[[Worker], Awaitable[T]]) -> T:
        """``attempt`` on the policy's worker, and on another one when that one is lost, a few times. Raises
        :class:`Unavailable` then: that workers vanish is no fault of the job's."""
        for _ in range(self._settings.training.retry_limit + 1):
            worker = await self.worker_for(policy, model)
            try:
                return await attempt(worker)
            except _TryElsewhere as problem:
                reason = str(problem)
                self.retries += 1
                self.forget_policy(policy)
                extra = {"policy": policy, "worker": worker.name}
                log.warning("training of %s goes on elsewhere: %s", policy, reason, extra=extra)
        raise Unavailable(f"training failed {self._settings.training.retry_limit + 1} times, the last: {reason}")

    async def uploading(
        self, worker: Worker, make: Callable[[str], protocol.OptimStep | protocol.InitAdapter]
    ) -> protocol.OperationDone:
        """Call an operation that uploads an artifact; it is durable, and what the worker said it is, on return. Raises
        :class:`~rookery.errors.StorageFull` where the upload found no room."""
        upload = _Upload()
        try:
            await self._writer(self._open, upload)
            message = make(upload.ticket)
            done = await self.call(worker, message)
            self._tickets.collect(upload.ticket)
            try:
                manifest = await self._writer(self._publish, message.policy, upload)
            except Conflict:
                raise _TryElsewhere(f"worker {worker.name} uploaded nothing") from None
            if done.manifest is None or manifest.hash != done.manifest.hash:
                raise _TryElsewhere(f"worker {worker.name} uploaded other bytes than it said")
        except BaseException as error:
            full = await self._writer(self._give_up, upload)  # it is carried out, whatever ends this wait
            if full is not None and isinstance(error, TrainingFailed | _TryElsewhere):
                raise full from None  # no fault of the worker's
            raise
        return msgspec.structs.replace(done, manifest=manifest)

    @asynccontextmanager
    async def with_ticket(self, policy: str, digest: str) -> AsyncIterator[None]:
        """Within, a version of ``policy`` comes to name what :meth:`uploading` brought. Nothing may be awaited between
        the two, or a cancellation there would leave it for ever."""
        try:
            yield
        except BaseException:  # also of a commit that went through, and nobody heard of it
            await self._writer(self._drop, policy, digest)
            raise
        await self._writer(self._settle, digest)

    # --- in the writer thread: nothing comes between the lines of these------------------------------------------------

    def _open(self, upload: _Upload) -> None:
        upload.ticket = self._tickets.upload()
        upload.staging = self._tickets.staging(upload.ticket)

    def _publish(self, policy: str, upload: _Upload) -> protocol.Manifest:
        assert upload.staging is not None
        manifest = upload.staging.commit()
        self.pinned[manifest.hash] += 1
        upload.brought = (policy, manifest.hash)
        return manifest

    def _give_up(self, upload: _Upload) -> StorageFull | None:
        """Nothing stays of it. Answers whether it met a full disk."""
        if upload.staging is None:
            return None
        self._tickets.collect(upload.ticket)
        upload.staging.abandon()
        if upload.brought is not None:
            self._drop(*upload.brought)
        return upload.staging.full

    def _drop(self, policy: str, digest: str) -> None:
        self._settle(digest)
        for told in self._on_stray:
            told(policy, digest)

    def _settle(self, digest: str) -> None:
        """It is not about to be named any more."""
        self.pinned[digest] -= 1
        if not self.pinned[digest]:
            del self.pinned[digest]

    # --- its worker ---------------------------------------------------------------------------------------------------

    def forget_policy(self, policy: str, *, aside: bool = False) -> None:
        """The policy's trainer state may go. ``aside``: it may come back, and better to where its state still is."""
        worker = self._leases.pop(policy)
        if not aside:
            self._aside.pop(policy)
        if worker is not None and worker.state == "serving":
            worker.post(protocol.EvictArtifacts(policy=policy, offload=aside))
            if aside:
                self._aside.put(policy, worker)

    def new_op(self) -> str:
        return self._ids.new("op")

    def publish_batch(self, content: bytes) -> str:
        return self._tickets.publish_batch(content)

    def retract_batch(self, ticket: str) -> None:
        self._tickets.retract_batch(ticket)

    def pin(self, worker: Worker, ref: protocol.AdapterRef) -> protocol.AdapterRef:
        """``ref`` with a ticket for ``worker``."""
        return self._fleet.adapter_ref(worker, ref)

    def committed(self, worker: Worker, message: protocol.VersionCommitted) -> None:
        worker.post(message)

    def _answered(self, worker: Worker, message: protocol.OperationDone) -> None:
        future = self._waiting.get(worker, {}).get(message.op)
        if future is not None and not future.done():
            future.set_result(message)

    def _seen(self, worker: Worker) -> None:
        if worker.has_role("train", worker.hello.model):
            self._serves[worker.hello.model].set()

    def _lost(self, worker: Worker) -> None:
        for future in self._waiting.get(worker, {}).values():
            if not future.done():
                future.set_exception(_TryElsewhere(f"worker {worker.name} was lost"))
        self._leases.leave(worker)
        self._aside.leave(worker)
        self._work.pop(worker, None)
