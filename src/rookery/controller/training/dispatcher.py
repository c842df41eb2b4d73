"""Sends training operations to workers: assignment of policies, retries, durable uploads.

* A policy trains on one worker at a time; when that is lost or fails for a reason that is its alone, as a full disk or
  a trajectory that its memory does not hold, the next attempt goes to another worker, if there is one. A worker whose
  memory never holds a policy's state is not asked for it again.
* An uploaded artifact is durable, and its hash checked against the worker's report, before anybody learns of it.
* An upload that no version came to name is deleted, however its step ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

import msgspec

from rookery import protocol
from rookery.clock import BusyTime
from rookery.controller.fleet.events import ReasonedEvent, WorkerEvent
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.fleet.worker import Worker
from rookery.controller.indexed import IndexedDict
from rookery.controller.services import Services
from rookery.controller.training.holders import StateHolders
from rookery.controller.weights.gc import ArtifactCollector
from rookery.controller.weights.store import WeightStore
from rookery.controller.weights.tickets import Tickets
from rookery.errors import Conflict, RookeryError, StorageFull, Unavailable, count_of, without_paths
from rookery.scheduling.trainers import EQUAL, TrainingLoad, assign_trainer, is_overloaded, select_helpers
from rookery.storage.artifacts import Staging
from rookery.telemetry.spans import TraceSpan

log = logging.getLogger("rookery.controller.training.dispatcher")

MOST_METRICS = 256
"""Metrics of one operation: they are stored with its step."""

T = TypeVar("T")


class TrainingFailed(RookeryError):
    """The operation cannot succeed: another worker would fail too."""


class _RetryElsewhere(Exception):
    """The worker is lost, or does not hold the state that the operation names."""


class _Stale(_RetryElsewhere):
    """The worker does not hold the state that the operation names. It can load it."""


class _TooSmall(_RetryElsewhere):
    """The policy's state never fits the worker's memory."""


@dataclass(eq=False)
class _InFlight:
    """An operation without an answer."""

    worker: Worker
    message: protocol.TrainingOperation
    since: float
    """When it was sent (monotonic seconds)."""
    most_logprobs: int
    """Bytes of log-probabilities that its answer may have."""
    logprobs: bytearray = field(default_factory=bytearray)
    """Bytes that came before the answer."""
    answer: asyncio.Future[protocol.OperationDone] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def op(self) -> str:
        return self.message.op


@dataclass
class _Upload:
    """An artifact that a worker uploads. Only the tenant's transfers change it, one after another, so it stays right
    when the caller is cancelled."""

    ticket: str = ""
    staging: Staging | None = None
    published: tuple[str, str] | None = None
    """The policy and the artifact's hash, once it is durable."""


class OperationSent(WorkerEvent, frozen=True):
    """A training operation was sent to the worker."""

    kind: ClassVar[str] = "operation sent"
    shown: ClassVar[bool] = False
    operation: protocol.TrainingOperation


class OperationSucceeded(WorkerEvent, frozen=True):
    """The worker has done a training operation."""

    kind: ClassVar[str] = "trained"
    operation: protocol.TrainingOperation
    done: protocol.OperationDone
    took: float = 0.0
    """Seconds from the dispatch to the answer."""

    @property
    def tenant(self) -> str:
        return "" if isinstance(self.operation, protocol.InitAdapter) else self.operation.tenant

    @property
    def policy(self) -> str:
        return self.operation.policy

    @property
    def text(self) -> str:
        metrics = self.done.metrics
        tokens = f"{count_of(metrics['tokens'], 'token')}, " if metrics.get("tokens") else ""
        return f"{type(self.operation).__name__}: {tokens}{metrics.get('seconds', 0.0):.2f} s"

    @property
    def spans(self) -> tuple[TraceSpan, ...]:
        """The computation. Before it the operation waited in the worker, which then also fetched its batch; an upload
        follows it."""
        start, computed = self.time - self.took, min(self.took, self.done.metrics.get("seconds", 0.0))
        name, owner, kind = self.worker.name, (self.tenant, "", self.policy), type(self.operation).__name__
        if self.done.manifest is not None:
            trained, rest = (start, start + computed), TraceSpan("transfer", start + computed, self.time, name, *owner)
        else:
            began = self.time - computed
            trained, rest = (began, self.time), TraceSpan("waiting", start, began, "", *owner)
        return TraceSpan("train", *trained, name, *owner, self.text), msgspec.structs.replace(rest, text=kind)


class OperationMoved(ReasonedEvent, frozen=True):
    """The worker did not do a training operation: another one gets it."""

    kind: ClassVar[str] = "training moved"
    moved: str
    """The policy."""

    @property
    def policy(self) -> str:
        return self.moved

    @property
    def spans(self) -> tuple[TraceSpan, ...]:
        name, text = self.worker.name, f"training: {self.reason}"
        return (TraceSpan("migration", self.time, self.time, name, policy=self.moved, text=text),)


class TrainingDispatcher:
    """Sends operations to training workers and matches their answers."""

    def __init__(
        self,
        services: Services,
        fleet: Fleet,
        weights: WeightStore,
        collector: ArtifactCollector,
        tickets: Tickets,
        tenant_shares: Mapping[str, float],
        speeds: Mapping[str, float] = EQUAL,
    ) -> None:
        """``tenant_shares``: those of tenants that have another one than 1. ``speeds``: how quickly workers train, by
        name, where it is known; others count as 1."""
        self.tenant_shares = tenant_shares
        self._speeds = speeds
        self.retries = 0
        """Operations that moved to another worker."""
        self._fleet = fleet
        self._weights = weights
        self._collector = collector
        self._tickets = tickets
        self._settings, self._clock, self._ids = services.settings, services.clock, services.ids
        self._transfer = services.store.transfer
        self._operations: IndexedDict[str, _InFlight] = IndexedDict(worker=lambda one: one.worker)
        """By the operation's id, those without an answer."""
        self._staged: dict[str, str] = {}
        """By operation that is not durable yet: the hash of the version that its worker has written."""
        self._holders = StateHolders()
        self._too_small: defaultdict[str, dict[Worker, str]] = defaultdict(dict)
        """By policy, the workers whose memory never holds its state, with their errors."""
        self._serving: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """By base model: set when a worker begins to train it."""
        self._busy: dict[Worker, BusyTime] = {}
        self._training_load = TrainingLoad()

    def in_flight(self, worker: Worker) -> int:
        """The number of its operations without an answer."""
        return self._operations.count(worker=worker)

    def open_spans(self) -> Iterator[TraceSpan]:
        """The operations without an answer."""
        time, now = self._clock.time(), self._clock.monotonic()
        for one in self._operations.values():
            tenant = "" if isinstance(one.message, protocol.InitAdapter) else one.message.tenant
            text, policy = type(one.message).__name__, one.message.policy
            yield TraceSpan("train", time - now + one.since, time, one.worker.name, tenant, "", policy, text)

    def busy_seconds(self, worker: Worker) -> float:
        """Seconds with at least one operation in flight, on this connection."""
        busy = self._busy.get(worker)
        return busy.seconds if busy is not None else 0.0

    # --- assignment ---------------------------------------------------------------------------------------------------

    async def worker_for(self, policy: str, model: str, failed: Collection[Worker] = ()) -> Worker:
        """The worker that trains ``policy``: its present one, else the one that would end first among the reserved
        workers, or among all where none is reserved; one of ``failed`` if there is no other. Waits for one; raises
        :class:`Unavailable` after ``worker_wait_seconds``, and :class:`TrainingFailed` where all that are there, or may
        reconnect, are too small."""
        deadline = self._clock.monotonic() + self._settings.server.worker_wait_seconds
        while True:
            held = self._holders.training(policy)
            if held is not None and held.has_role("train", model):
                return held
            small = self._too_small.get(policy, {})
            others = self._fleet.trainers(model, {*small, *failed}) or self._fleet.trainers(model, small)
            offloaded, load = self._holders.offloaded(policy), self._load(others)
            back = offloaded.name if offloaded is not None else None
            name = assign_trainer(load, self._load_of(policy), back, self._speeds)
            if name is not None:
                worker = self._fleet.get(name)
                assert worker is not None
                if held is not None:  # a plan took its role: it keeps no state for another time
                    self.evict_policy(policy)
                self._holders.apply(policy, "assign", worker)
                return worker
            if small and all(worker in small for worker in self._fleet.expected("train", model)):
                raise TrainingFailed(next(reversed(small.values())))
            self._serving[model].clear()
            try:
                async with asyncio.timeout(deadline - self._clock.monotonic()):
                    await self._serving[model].wait()
            except TimeoutError:
                raise Unavailable(self._fleet.missing("train", model)) from None

    def rebalance(self, policy: str, model: str) -> None:
        """``policy`` has nothing uncommitted: move it if its worker has more load than others, or may be given none
        now. Otherwise policies that arrived while one worker was there would stay there, as after each restart,
        and those whose reserved worker was away for a moment would stay on a preemptible one."""
        small = self._too_small.get(policy, {})
        held, load = self._holders.training(policy), self._load(self._fleet.trainers(model, small))
        if held is None or not load:
            return
        if held.name not in load or is_overloaded(load, held.name, self._load_of(policy), self._speeds):
            self.evict_policy(policy)

    def helpers(self, policy: str, worker: Worker, model: str, count: int) -> list[Worker]:
        """At most ``count`` training workers for ``policy`` in addition to ``worker``, preemptible ones too: the loss
        of one costs its share of a batch."""
        besides = {worker, *self._too_small.get(policy, {})}
        others = {other.name: other for other in self._fleet.serving("train", model) if other not in besides}
        share = self._load_of(policy) / (count + 1)
        return [others[name] for name in select_helpers(self._load(others.values()), count, share, self._speeds)]

    def evict_policy(self, policy: str, *, offload: bool = False) -> None:
        """The policy's worker deletes its trainer state, or with ``offload`` keeps it in main memory: the policy
        returns to that worker if it can."""
        worker = self._holders.training(policy)
        serves = worker is not None and worker.state == "serving"
        if worker is not None or not offload:
            self._holders.apply(policy, "offload" if offload and serves else "evict")
        if worker is not None and serves:
            worker.post(protocol.EvictArtifacts(policy=policy, offload=offload))

    def forget_policy(self, policy: str) -> None:
        """:meth:`evict_policy`: it does not train again."""
        self.evict_policy(policy)
        self._training_load.forget(policy)
        self._too_small.pop(policy, None)

    def _load(self, workers: Iterable[Worker]) -> dict[str, float]:
        """The load of the policies that each of ``workers`` trains."""
        load = dict.fromkeys(workers, 0.0)
        for policy, value in self._training_load.of(self._holders, self._clock.monotonic()).items():
            if (worker := self._holders.training(policy)) in load:
                load[worker] += value
        return {worker.name: value for worker, value in load.items()}

    def _load_of(self, policy: str) -> float:
        return self._training_load.of([*self._holders, policy], self._clock.monotonic())[policy]

    # --- operations ---------------------------------------------------------------------------------------------------

    def new_op(self) -> str:
        return self._ids.new("op")

    @contextmanager
    def published_batch(self, content: bytes) -> Iterator[str]:
        """The ticket with which a worker fetches an encoded batch within."""
        ticket = self._tickets.publish_batch(content)
        try:
            yield ticket
        finally:
            self._tickets.retract_batch(ticket)

    async def retrying(self, policy: str, model: str, attempt: Callable[[Worker], Awaitable[T]]) -> T:
        """``attempt`` on the policy's worker, and on another one when that is lost, up to ``retry_limit`` times more.
        Raises :class:`Unavailable` then, and where the place of the artifacts is away: neither is a fault of the
        job. Workers that are too small do not count."""
        left, failed = self._settings.training.retry_limit + 1, set[Worker]()
        while left:
            worker = await self.worker_for(policy, model, failed)
            try:
                return await attempt(worker)
            except _RetryElsewhere as problem:
                reason = str(problem)
                left -= not isinstance(problem, _TooSmall)
                if not isinstance(problem, _Stale):
                    failed.add(worker)
                self._count_retry(worker, policy, reason)
                self.evict_policy(policy)
                extra = {"policy": policy, "worker": worker.name}
                log.warning("training of %s moves to another worker: %s", policy, reason, extra=extra)
                await self._transfer(self._tickets.artifacts.check)  # without their place, every worker would fail
        raise Unavailable(
            f"training failed {count_of(self._settings.training.retry_limit + 1, 'time')}, the last: {reason}"
        )

    async def call(
        self, worker: Worker, message: protocol.TrainingOperation, targets: int | None = None
    ) -> protocol.OperationDone:
        """The worker's answer, with the log-probabilities of so many ``targets`` where they were asked for. Raises
        :class:`TrainingFailed`; within :meth:`retrying`, other failures are retried."""
        most = protocol.MAX_FRAME if targets is None else protocol.LOGPROB_BYTES * targets
        one = self._operations[message.op] = _InFlight(worker, message, self._clock.monotonic(), most)
        try:
            if worker.state != "serving":
                raise _RetryElsewhere(f"worker {worker.name} is {worker.state}")
            worker.post(message)
            with self._counted(worker):
                self._fleet.emit(OperationSent(self._clock.time(), worker, message))
                done = await self._answer(one)
        except asyncio.CancelledError:
            worker.post(protocol.CancelOperation(op=message.op))
            raise
        except TimeoutError:
            worker.post(protocol.CancelOperation(op=message.op))
            kind, seconds = type(message).__name__, self._settings.worker.request_timeout_seconds
            raise _RetryElsewhere(f"worker {worker.name} did not answer {kind} within {seconds:g} s") from None
        finally:
            if one.answer.done() and not one.answer.cancelled():
                one.answer.exception()  # of a worker that was lost in the moment of a cancellation, which comes first
            del self._operations[message.op]
        if done.category in ("stale", "lost"):
            problem = _Stale if done.category == "stale" else _RetryElsewhere
            raise problem(f"worker {worker.name}: {done.error}")
        if done.category == "too small":
            reason = self._too_small[message.policy][worker] = f"worker {worker.name}: {done.error}"
            raise _TooSmall(reason)
        if done.error:
            raise TrainingFailed(f"worker {worker.name}: {done.error}")
        if targets is not None and len(done.logprobs) != protocol.LOGPROB_BYTES * targets:
            sent = len(done.logprobs) // protocol.LOGPROB_BYTES
            raise TrainingFailed(
                f"worker {worker.name} sent {sent} log-probabilities for {count_of(targets, 'target')}"
            )
        if worker is self._holders.training(message.policy) and (seconds := done.metrics.get("seconds", 0.0)):
            work = seconds * self._speeds.get(worker.name, 1.0)
            self._training_load.add(message.policy, work, self._clock.monotonic())
        took = self._clock.monotonic() - one.since
        self._fleet.emit(OperationSucceeded(self._clock.time(), worker, message, done, took))
        return done

    async def _answer(self, one: _InFlight) -> protocol.OperationDone:
        """The answer to an operation that was sent last. Raises ``TimeoutError`` when in all of
        ``request_timeout_seconds`` neither it was answered nor one that was sent before: it may wait for these."""
        before = self._ops_at(one.worker) - {one.op}
        while not (await asyncio.wait({one.answer}, timeout=self._settings.worker.request_timeout_seconds))[0]:
            left = before & self._ops_at(one.worker)
            if left == before:
                raise TimeoutError
            before = left
        return one.answer.result()

    def _ops_at(self, worker: Worker) -> set[str]:
        """The ids of the worker's operations without an answer."""
        return {one.op for one in self._operations.of(worker=worker)}

    def _count_retry(self, worker: Worker, policy: str, reason: str) -> None:
        self.retries += 1
        self._fleet.emit(OperationMoved(self._clock.time(), worker, reason, policy))

    @contextmanager
    def _counted(self, worker: Worker) -> Iterator[None]:
        """An operation is in flight there."""
        busy = self._busy.setdefault(worker, BusyTime(self._clock))
        busy.add(1)
        try:
            yield
        finally:
            busy.add(-1)

    # --- uploads ------------------------------------------------------------------------------------------------------

    async def uploading(self, worker: Worker, message: protocol.TrainingOperation) -> protocol.OperationDone:
        """Call an operation that uploads an artifact, under a ticket that is added to ``message``. On return the
        artifact is durable, equals the worker's report, and is kept until :meth:`with_ticket` ends or
        :meth:`discard`. Raises :class:`~rookery.errors.StorageFull` where the disk was full."""
        upload = _Upload()
        try:
            await self._transfer(self._open, upload)
            done = await self.call(worker, msgspec.structs.replace(message, upload=upload.ticket))
            self._tickets.collect(upload.ticket)
            try:
                manifest = await self._transfer(self._publish, message.policy, upload)
            except Conflict:
                raise _RetryElsewhere(f"worker {worker.name} uploaded nothing") from None
            if done.manifest is None or manifest.hash != done.manifest.hash:
                raise _RetryElsewhere(f"worker {worker.name} uploaded other bytes than it reported")
        except BaseException as error:
            if (staged := self._staged.get(message.op)) is not None:
                self._weights.withdraw(staged)
            full = await self._transfer(self._abandon, upload)  # it is carried out, whatever ends this wait
            if full is not None and isinstance(error, TrainingFailed | _RetryElsewhere):
                raise full from None  # no fault of the worker's
            raise
        finally:
            self._staged.pop(message.op, None)
        return msgspec.structs.replace(done, manifest=manifest)

    async def export_gradient(self, worker: Worker, message: protocol.ForwardBackward) -> protocol.OperationDone | None:
        """:meth:`uploading` a share's gradient, which :meth:`discard` deletes; None where the worker did not complete
        it: the policy's worker computes the share, and reports what no worker can do."""
        try:
            return await self.uploading(worker, message)
        except (_RetryElsewhere, TrainingFailed) as problem:
            self._count_retry(worker, message.policy, str(problem))
            extra = {"policy": message.policy, "worker": worker.name}
            log.warning("a share of %s's batch moves to its worker: %s", message.policy, problem, extra=extra)
            return None

    async def discard(self, policy: str, digest: str) -> None:
        """Delete an artifact of :meth:`uploading` that no version will name."""
        await self._collector.drop(policy, digest)
        self._weights.unpublish([digest])

    @asynccontextmanager
    async def with_ticket(self, policy: str, digest: str) -> AsyncIterator[None]:
        """Within, a version of ``policy`` comes to name an artifact of :meth:`uploading`. Await nothing between the
        two: a cancellation there would leave the artifact for good."""
        async with self._collector.naming(policy, digest):
            try:
                yield
            except BaseException:
                self._weights.withdraw(digest)
                raise

    # In the tenant's line of transfers, where these keep their order:

    def _open(self, upload: _Upload) -> None:
        upload.ticket = self._tickets.upload()
        upload.staging = self._tickets.staging(upload.ticket)

    def _publish(self, policy: str, upload: _Upload) -> protocol.Manifest:
        assert upload.staging is not None
        manifest = self._collector.commit(upload.staging)
        upload.published = (policy, manifest.hash)
        return manifest

    def _abandon(self, upload: _Upload) -> StorageFull | Unavailable | None:
        """Delete all of it. Returns the error of a full disk, or of another shortage, if it met one."""
        if upload.staging is None:
            return None
        self._tickets.collect(upload.ticket)
        upload.staging.abandon()
        if upload.published is not None:
            self._collector.drop_unwritten(*upload.published)
        return upload.staging.full

    # --- events -------------------------------------------------------------------------------------------------------

    def on_staged(self, worker: Worker, message: protocol.VersionStaged) -> None:
        """An operation has written its version, and uploads it now."""
        one = self._operations.get(message.op)
        if one is None or one.worker is not worker:
            return
        operation = one.message
        if not isinstance(operation, protocol.OptimStep | protocol.InitAdapter):
            return
        self._staged[message.op] = message.hash
        self._weights.hand_over(worker, protocol.made_version(operation, message.hash), message.folder)

    def on_done(self, worker: Worker, message: protocol.OperationDone) -> None:
        counted = [message.metrics.get(name, 0.0) for name in ("tokens", "seconds")]
        if len(message.metrics) > MOST_METRICS or not all(0 <= value < math.inf for value in counted):
            raise protocol.BadFrame(f"operation {message.op}: {len(message.metrics)} metrics, tokens/seconds {counted}")
        one = self._operations.get(message.op)
        if one is None or one.worker is not worker or one.answer.done():
            return
        most = one.most_logprobs
        if message.more and len(one.logprobs) > most:
            raise protocol.BadFrame(f"operation {message.op}: more than {most} bytes of log-probabilities")
        one.logprobs += message.logprobs
        if not message.more:
            error = without_paths(message.error, keep=worker.hello.model)
            one.answer.set_result(msgspec.structs.replace(message, logprobs=bytes(one.logprobs), error=error))

    def on_worker_changed(self, worker: Worker) -> None:
        if worker.has_role("train", worker.hello.model):
            self._serving[worker.hello.model].set()

    def on_worker_lost(self, worker: Worker) -> None:
        for one in self._operations.of(worker=worker):
            if not one.answer.done():
                one.answer.set_exception(_RetryElsewhere(f"worker {worker.name} was lost"))
        self._holders.lose(worker)
        for small in self._too_small.values():
            small.pop(worker, None)
        self._busy.pop(worker, None)
