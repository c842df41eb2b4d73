"""Optimizer steps through workers that are lost, stale, silent or lie; what is committed is what was computed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from tests.support.peers import ADAPTER, PATIENCE, ManualClock, ScriptedWorker, Service, eventually, job_of, settle
from tests.support.room import react

from rookery import protocol
from rookery.aio import cancel_all
from rookery.clock import RandomIds
from rookery.controller.fleet.events import WorkerEvent, WorkerReady
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.services import Services
from rookery.controller.sessions.rules import SessionRules
from rookery.controller.training.dispatcher import TrainingDispatcher, TrainingFailed
from rookery.controller.training.policy_run import ForwardRequest, PolicyRun
from rookery.controller.training.policy_versions import PolicyVersions
from rookery.controller.training.slots import TRANSITIONS, SlotEvent, SlotHolder, SlotState, TrainerSlots
from rookery.controller.weights.gc import ArtifactCollector
from rookery.controller.weights.store import WeightStore
from rookery.controller.weights.tickets import Tickets
from rookery.errors import Unavailable
from rookery.settings import Settings
from rookery.simulation.fakes.trainer import FakeTrainer
from rookery.storage.artifacts import Artifacts
from rookery.storage.db import Database
from rookery.storage.models import PolicyRow, VersionRow
from rookery.storage.repositories.versions import NextVersion
from rookery.storage.store import StorageWriter, Store
from rookery.telemetry.spans import SpanRing
from rookery.tokenization.chat import Chat

MODEL = "smollm2-135m-instruct"


async def _no_chat(model: str) -> Chat:
    raise AssertionError("training needs no template")


class Room:
    """A fleet and its trainers, with nothing else around them."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.clock = ManualClock()
        self.settings = Settings(data=folder, cache=folder, **changes)
        self.artifacts = Artifacts(folder / "artifacts")
        self.tickets = Tickets(self.artifacts, self.clock, 600)
        self.fleet = Fleet(self.settings, self.clock, self.on_event)
        self.writer = StorageWriter()
        self.weights = WeightStore(self.fleet, self.artifacts, self.writer, self.clock)
        database = Database(f"sqlite:///{folder}/rookery.db")
        database.create()
        store = Store(database, self.writer)
        self.collector = ArtifactCollector(store, self.artifacts, self.weights)
        self.services = Services(
            settings=self.settings, clock=self.clock, ids=RandomIds(), store=store, artifacts=self.artifacts,
            chat=_no_chat,
        )  # fmt: skip
        self.training = TrainingDispatcher(self.services, self.fleet, self.weights, self.collector, self.tickets, {})
        self.slots = TrainerSlots(self.fleet, self.settings, self.clock, {}, SessionRules().slot_wait)
        self.workers: list[ScriptedWorker] = []
        self.leases: dict[str, int] = {}

    def on_event(self, event: WorkerEvent) -> None:
        react(event, self.fleet, self.weights, training=self.training)
        if isinstance(event, WorkerReady):
            self.slots.review()

    async def worker(self, name: str = "worker", **script: Any) -> ScriptedWorker:
        worker = ScriptedWorker(self.fleet.serve, self.tickets, name, **script)
        self.workers.append(await worker.join())
        return worker

    def run(self, policy: str = "p", trainers: int = 1) -> PolicyRun:
        async def next_lease(policy: str) -> int:
            self.leases[policy] = self.leases.get(policy, 0) + 1
            return self.leases[policy]

        row = PolicyRow(id=policy, tenant="alice", name=policy, rank=8, alpha=16.0, targets=["q"])
        versions = PolicyVersions(self.services, SpanRing(), self.collector, row)
        return PolicyRun(self.training, self.weights, next_lease, MODEL, versions, trainers)

    def holder(self, policy: str) -> SlotHolder:
        return SlotHolder(policy, "alice", policy, MODEL, self.run(policy))

    async def begun(self) -> tuple[ScriptedWorker, PolicyRun]:
        """A worker, and a policy with its first version."""
        worker, run = await self.worker(), self.run()
        await self.begin(run)
        return worker, run

    async def begin(self, run: PolicyRun) -> protocol.AdapterRef:
        return await run.create(self._write, 1, None)

    async def commit(self, run: PolicyRun, done: protocol.OperationDone) -> protocol.AdapterRef:
        assert done.manifest is not None
        return await run.commit(self._write, done.manifest)

    async def _write(self, version: NextVersion) -> VersionRow:
        """As the transaction of a commit, with no database."""
        parent, manifest = version.parent, version.manifest
        self.artifacts.verify(manifest.hash)
        return VersionRow(
            tenant="alice", policy=version.policy, version=0 if parent is None else parent + 1, parent=parent,
            manifest=manifest, hash=manifest.hash, size=1, step=version.step, created=version.time,
        )  # fmt: skip

    def content(self, ref: protocol.AdapterRef) -> str:
        return self.artifacts.path(ref.hash, ADAPTER).read_text()

    async def close(self) -> None:
        for worker in self.workers:
            await worker.die()
        self.writer.close()

    def staged(self) -> int:
        return len(list((self.artifacts.root / ".staging").iterdir()))


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    room = Room(tmp_path, worker_wait_seconds=PATIENCE)
    yield room
    await room.close()


def refusing(worker: ScriptedWorker, error: str, category: Any) -> None:
    """From now on it answers every operation so."""

    async def refuse(op: Any) -> protocol.OperationDone:
        return protocol.OperationDone(epoch=0, op=op.op, error=error, category=category)

    worker.answer = refuse


def forward(number: int, members: int = 1) -> ForwardRequest:
    tails = [
        protocol.GroupMember(tokens=[number, i], logprobs=[-1.0] * 2, advantages=[1.0] * 2, weights=[1.0] * 2)
        for i in range(members)
    ]
    batch = protocol.encode(protocol.TrainingBatch(groups=[protocol.SharedPrefixGroup(prompt=[1], members=tails)]))
    return ForwardRequest(batch, protocol.Loss(name="aipo", params={"rho": 4.0}))


async def step(run: PolicyRun, number: int, *, commit: bool, members: int = 1) -> protocol.OperationDone:
    """One optimizer step on the gradient of one batch."""
    await run.forward(forward(number, members))
    return await run.optim_step(protocol.Adam(lr=0.1 * number), commit=commit, scale=1 / number)


async def history(room: Room, run: PolicyRun, steps: int, every: int = 1, members: int = 1) -> list[str]:
    """Take that many steps; the content of every committed version."""
    contents = [room.content(await room.begin(run))]
    for number in range(1, steps + 1):
        done = await step(run, number, commit=number % every == 0, members=members)
        if number % every == 0:
            contents.append(room.content(await room.commit(run, done)))
    return contents


async def test_steps_follow_each_other_on_one_lease(room: Room) -> None:
    worker = await room.worker()
    contents = await history(room, room.run(), 4)
    assert len(set(contents)) == 5
    assert [type(op).__name__ for op in worker.operations] == ["InitAdapter"] + ["ForwardBackward", "OptimStep"] * 4
    assert {op.lease for op in worker.operations[1:]} == {2}
    assert all(op.steps == 0 for op in worker.operations[1:])
    assert [op.parent.version for op in worker.operations[1:]] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(room.tickets.open_batch(op.batch_ticket) is None for op in worker.operations[1::2]), (
        "offers are withdrawn"
    )
    assert room.staged() == 0


async def test_metrics_of_both_operations_are_returned(room: Room) -> None:
    await room.worker()
    run = room.run()
    await room.begin(run)
    done = await run.forward(forward(1))
    assert done.metrics == {"loss:sum": 1.0, "tokens": 2.0, "entropy:sum": 2.0}
    done = await run.optim_step(protocol.Adam(lr=0.1), commit=True)
    assert done.metrics == {"grad_norm": 1.0}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("death", range(8))
async def test_lost_worker_costs_its_computation_only(tmp_path: Path, every: int, death: int) -> None:
    """Whenever the worker dies, the versions are those of an undisturbed run."""
    calm = Room(tmp_path / "calm")
    await calm.worker()
    expected = await history(calm, calm.run(), 3, every)
    rough = Room(tmp_path / "rough")
    first = await rough.worker("a")
    received = 0

    async def die(op: Any) -> None:
        nonlocal received
        received += 1
        if received == death + 1:
            assert first.link is not None
            first.link.cut()

    first.answer = die
    await rough.worker("b")
    assert await history(rough, rough.run(), 3, every) == expected
    assert rough.fleet.losses == (1 if received > death else 0)
    for room in (calm, rough):
        await room.close()


async def test_a_stale_worker_reloads(room: Room) -> None:
    worker, run = await room.begun()
    await room.commit(run, await step(run, 1, commit=True))
    worker.trainer = FakeTrainer()  # it dropped the policy: the pending step must not be built on nothing

    received: list[str] = []

    async def once(op: Any) -> protocol.OperationDone | None:
        received.append(type(op).__name__)
        if received == ["ForwardBackward"]:
            return protocol.OperationDone(epoch=0, op=op.op, error="not held here", category="stale")
        return None

    worker.answer = once
    done = await step(run, 2, commit=True)
    assert done.manifest is not None
    assert received == ["ForwardBackward", "ForwardBackward", "OptimStep"]
    assert worker.operations[-1].lease > worker.operations[-3].lease
    assert room.training.retries == 1


async def test_steps_since_the_commit_are_replayed(room: Room) -> None:
    one = await room.worker("one")
    run = room.run()
    await room.begin(run)
    await step(run, 1, commit=False)
    await step(run, 2, commit=False)
    await one.die()
    two = await room.worker("two")
    await step(run, 3, commit=True)
    assert [op.steps for op in two.operations] == [0, 0, 1, 1, 2, 2]
    assert [op.upload != "" for op in two.operations if isinstance(op, protocol.OptimStep)] == [False, False, True]


@pytest.mark.parametrize("category", ["lost", "stale"])
async def test_repeated_worker_losses_are_no_failure_of_the_job(room: Room, category: Any) -> None:
    worker, run = await room.begun()
    refusing(worker, "no luck in /srv/cache/rookery", category)  # of which tenants read no path
    last = r"training failed 4 times, the last: worker worker: no luck in \(a path of the worker\)"
    with pytest.raises(Unavailable, match=last):
        await step(run, 1, commit=True)


@pytest.mark.parametrize("kinds", [("reserved", "reserved"), ("reserved", "preemptible")])
async def test_next_attempt_goes_to_a_worker_that_has_not_failed(room: Room, kinds: tuple[Any, Any]) -> None:
    """A trajectory that is too long for the first worker's memory is trained by the other one, and so is the next."""
    (a, b), run = (
        [await room.worker(name, kind=kind) for name, kind in zip("ab", kinds, strict=True)],
        room.run(),
    )
    await room.begin(run)
    assert [len(worker.operations) for worker in (a, b)] == [1, 0]
    refusing(a, "a trajectory of 7900 tokens is longer than the 6000 that fit this worker's memory", "lost")
    await step(run, 1, commit=False)
    await step(run, 2, commit=True)
    assert [len(worker.operations) for worker in (a, b)] == [2, 4]
    assert room.training.retries == 1


async def test_error_names_the_worker_that_does_not_answer(tmp_path: Path) -> None:
    room = Room(tmp_path, request_timeout_seconds=0.2)
    worker, run = await room.begun()
    worker.training.clear()
    before = len(worker.other)
    with pytest.raises(Unavailable, match=r"the last: worker worker did not answer ForwardBackward within 0\.2 s"):
        await step(run, 1, commit=True)
    attempts = room.settings.training.retry_limit + 1
    await eventually(
        lambda: sum(isinstance(message, protocol.CancelOperation) for message in worker.other[before:]) == attempts
    )
    worker.training.set()
    assert (await step(run, 1, commit=True)).manifest is not None, "it answers again"
    await room.close()


async def test_an_operation_waits_for_those_before_it_without_a_deadline(tmp_path: Path) -> None:
    """The last of six waits longer than a worker may take for one."""
    room = Room(tmp_path, request_timeout_seconds=2.0)
    worker = await room.worker()
    runs = {name: room.run(name) for name in "abc"}
    for run in runs.values():
        await room.begin(run)
    turn, left = asyncio.Lock(), asyncio.Event()

    async def slowly(op: Any) -> None:
        async with turn:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.4):
                    await left.wait()

    worker.answer = slowly
    steps = [step(runs[name], 1, commit=False) for name in "abc"]
    await asyncio.gather(*steps)
    assert room.training.retries == 0 and len(worker.operations) == 3 + 6
    await room.close()


async def test_operation_that_cannot_succeed_is_not_retried(room: Room) -> None:
    worker, run = await room.begun()
    refusing(worker, "the batch is no batch", "failed")
    with pytest.raises(TrainingFailed, match="worker worker: the batch is no batch"):
        await step(run, 1, commit=True)
    assert len(worker.operations) == 2
    assert room.staged() == 0


TOO_SMALL = "training states of rank 8 of 9 MB do not fit this worker"


async def test_a_policy_trains_on_a_worker_that_has_room_for_it(tmp_path: Path) -> None:
    """A reserved one that is too small is asked once, however few retries there are."""
    room = Room(tmp_path, worker_wait_seconds=0.2)
    small = [await room.worker(name) for name in ("a", "b", "c", "d", "e")]
    for worker in small:
        refusing(worker, TOO_SMALL, "too small")
    large = await room.worker("large", kind="preemptible")
    run = room.run()
    await room.begin(run)
    await step(run, 1, commit=True)
    assert [len(worker.operations) for worker in small] == [1] * 5 and len(large.operations) == 3
    await large.die()
    waiting = asyncio.create_task(step(run, 2, commit=True))
    with pytest.raises(Unavailable, match="large is suspect"):
        await waiting
    assert [len(worker.operations) for worker in small] == [1] * 5
    await room.close()


async def test_a_policy_that_fits_no_worker_fails(room: Room) -> None:
    for name in ("a", "b"):
        refusing(await room.worker(name), TOO_SMALL, "too small")
    with pytest.raises(TrainingFailed, match=f"worker b: {TOO_SMALL}"):
        await room.begin(room.run())
    await room.worker("large")
    assert (await room.begin(room.run())).version == 0


@pytest.mark.parametrize("sent", [0, 1, 3])
async def test_results_have_one_log_probability_per_target(room: Room, sent: int) -> None:
    worker, run = await room.begun()

    async def answer(op: Any) -> protocol.OperationDone:
        return protocol.OperationDone(epoch=0, op=op.op, logprobs=bytes(4 * sent))

    worker.answer = answer
    with pytest.raises(TrainingFailed, match=f"worker worker sent {sent} log-probabilities for 2 targets"):
        await run.forward(dataclasses.replace(forward(1), targets=2))


async def test_log_probabilities_come_in_several_messages_that_end(room: Room) -> None:
    worker, run = await room.begun()
    parts: list[bytes] = [b"oneo", b"", b"twot"]

    async def answer(op: Any) -> protocol.OperationDone:
        for part in parts:
            await worker.say(protocol.OperationDone(epoch=0, op=op.op, logprobs=part, more=True))
        return protocol.OperationDone(epoch=0, op=op.op, logprobs=b"last")

    worker.answer = answer
    entry = dataclasses.replace(forward(1), targets=3, forward_only=True)
    assert (await run.forward(entry)).logprobs == b"oneotwotlast"
    parts.pop()
    with pytest.raises(TrainingFailed, match="sent 2 log-probabilities for 3 targets"):
        await run.forward(entry)
    parts *= 4
    asking = asyncio.ensure_future(run.forward(entry))
    await eventually(lambda: room.fleet.bad_frames == 1)
    await cancel_all(asking)


@pytest.mark.parametrize("lie", ["nothing uploaded", "other bytes", "no manifest"])
async def test_a_commit_must_equal_the_upload(room: Room, lie: str) -> None:
    liar = await room.worker("a")
    run = room.run()
    await room.begin(run)

    async def answer(op: Any) -> protocol.OperationDone | None:
        if not isinstance(op, protocol.OptimStep):
            return None
        if lie == "nothing uploaded":
            return protocol.OperationDone(epoch=0, op=op.op, manifest=protocol.manifest_of([]))
        done = liar.upload(op, "something")
        done.manifest = protocol.manifest_of([]) if lie == "other bytes" else None
        return done

    liar.answer = answer
    with pytest.raises(Unavailable, match="worker a uploaded"):
        await step(run, 1, commit=True)
    assert not room.collector.references


@pytest.mark.parametrize(
    "false", [{"tokens": math.nan}, {"tokens": -1e12}, {"seconds": math.inf}, {f"m{n}": 1.0 for n in range(300)}]
)
async def test_false_counts_cost_the_worker_its_connection(room: Room, false: dict[str, float]) -> None:
    """They would be charged to the tenant and stored with its steps. Another worker takes the step."""
    liar = await room.worker("liar")

    async def lie(op: Any) -> protocol.OperationDone:
        done = liar.operate(op)
        return msgspec.structs.replace(done, metrics={**done.metrics, **false})

    run = room.run()
    await room.begin(run)
    liar.answer = lie
    taking = asyncio.ensure_future(step(run, 1, commit=True))
    await eventually(lambda: room.fleet.bad_frames == 1)
    honest = await room.worker("honest")
    done = await taking
    assert done.manifest is not None and not done.metrics.keys() & (false.keys() - {"tokens", "seconds"})
    assert len(honest.operations) == 2


async def test_late_answers_are_ignored(room: Room) -> None:
    worker, run = await room.begun()
    worker.training.clear()
    stepping = asyncio.create_task(step(run, 1, commit=True))
    await eventually(lambda: len(worker.operations) == 2)
    await worker.say(protocol.OperationDone(epoch=0, op="another", metrics={"grad_norm": 9.0}))
    await worker.say(protocol.OperationDone(epoch=0, op=worker.operations[1].op, error="old"), epoch=worker.epoch - 1)
    await settle()
    assert not stepping.done()
    worker.training.set()
    done = await stepping
    await worker.say(protocol.OperationDone(epoch=0, op=worker.operations[1].op, error="again", category="failed"))
    await settle()
    assert (await room.commit(run, done)).version == 1


async def test_cancelled_step_is_cancelled_at_the_worker(room: Room) -> None:
    worker, run = await room.begun()
    worker.training.clear()
    stepping = asyncio.create_task(step(run, 1, commit=True))
    await eventually(lambda: len(worker.operations) == 2)
    await cancel_all(stepping)
    run.forget()
    await eventually(lambda: len(worker.other) == 2)
    assert isinstance(worker.other[0], protocol.CancelOperation)
    assert worker.other[0].op == worker.operations[1].op
    assert worker.other[1] == protocol.EvictArtifacts(policy="p")


async def test_error_reports_that_no_trainer_came_in_time(tmp_path: Path) -> None:
    room = Room(tmp_path, worker_wait_seconds=0.2)
    await room.worker("rolls", roles=["rollout"])
    with pytest.raises(Unavailable, match=f"no worker serves {MODEL} for train"):
        await room.begin(room.run())
    await room.close()


async def test_waiting_policy_gets_a_trainer_that_joins(room: Room) -> None:
    beginning = asyncio.create_task(room.begin(room.run()))
    await settle()
    await room.worker()
    assert (await beginning).version == 0


async def test_policies_are_spread_over_the_trainers(room: Room) -> None:
    workers = [await room.worker(name) for name in ("a", "b")]
    for policy in ("p", "q", "r", "s"):
        await room.begin(run := room.run(policy))
        await step(run, 1, commit=False)
    taken = [{op.policy for op in worker.operations} for worker in workers]
    assert [len(policies) for policies in taken] == [2, 2]
    assert not taken[0] & taken[1], "a policy stays where it is"


async def test_policy_returns_to_the_worker_with_its_offloaded_state(room: Room) -> None:
    """However often it is told to rest; not once its state may go."""
    workers = [await room.worker(name) for name in ("a", "b")]
    for policy in ("p", "q"):
        await room.begin(run := room.run(policy))
        await step(run, 1, commit=False)
    by_name = {worker.name: worker.operations[0].policy for worker in workers}
    later = by_name["b"]
    assert (await room.training.worker_for(later, MODEL)).name == "b"
    for _ in range(2):
        room.training.evict_policy(later, offload=True)
    room.training.evict_policy(by_name["a"])
    assert (await room.training.worker_for(later, MODEL)).name == "b"
    room.training.evict_policy(later, offload=True)
    room.training.evict_policy(later)
    assert (await room.training.worker_for(later, MODEL)).name == "a"


async def test_abandoned_worker_evicts_the_policy(room: Room) -> None:
    worker, run = await room.begun()
    await step(run, 1, commit=False)
    refusing(worker, "it is gone", "lost")
    with pytest.raises(Unavailable, match="it is gone"):
        await step(run, 2, commit=False)
    forgotten = [message for message in worker.other if isinstance(message, protocol.EvictArtifacts)]
    assert forgotten and set(map(repr, forgotten)) == {repr(protocol.EvictArtifacts(policy="p"))}


async def test_worker_that_lost_its_role_evicts_the_policy(room: Room) -> None:
    worker, run = await room.begun()
    await step(run, 1, commit=False)
    other = await room.worker("other")
    held = room.fleet.get("worker")
    assert held is not None
    room.fleet.set_roles(held, frozenset({"rollout"}))
    await step(run, 2, commit=False)
    assert [type(op).__name__ for op in other.operations] == ["ForwardBackward", "OptimStep"] * 2
    await eventually(lambda: protocol.EvictArtifacts(policy="p") in worker.other)


async def test_a_batch_carries_one_prompt_for_its_group(service: Service) -> None:
    """The trainer's input from a job: prompts once, the behaviour's log-probs, advantages that sum to nothing."""
    worker = await service.worker().join()
    await service.host(turns=2).join()
    view, _ = await service.controller.submit(
        "alice", job_of(algorithm__group_size=4, algorithm__kl_weight=0.1, stop__steps=1, sampling__temperature=0.7)
    )
    await service.ends(view.id)
    (batch,) = worker.batches.values()
    assert len(batch.groups) == 2
    for unit in batch.groups:
        assert len(unit.members) == 4
        assert sum(member.advantages[0] for member in unit.members) == pytest.approx(0)
        for member in unit.members:
            assert len({len(member.tokens), len(member.logprobs), len(member.advantages), len(member.weights)}) == 1
            own = [i for i, weight in enumerate(member.weights) if weight]
            assert own[0] == 0
            assert len(own) < len(member.tokens), "the environment's turn carries no loss"
            assert sum(member.weights) == pytest.approx(1)
    (forward,) = [op for op in worker.operations if isinstance(op, protocol.ForwardBackward)]
    (optimise,) = [op for op in worker.operations if isinstance(op, protocol.OptimStep)]
    assert optimise.scale == pytest.approx(1 / 8), "each of eight trajectories weighs the same"
    assert (forward.temperature, forward.kl_weight, forward.tenant) == (0.7, 0.1, "alice")
    assert forward.loss == protocol.Loss(name="aipo", params={"rho": 4.0})
    sampled = {tuple(g.prompt) for g in worker.generates if g.request.endswith(".0")}
    assert {tuple(unit.prompt) for unit in batch.groups} == sampled
    json.dumps(view.spec)


async def test_policies_spread_over_training_workers_that_join_later(room: Room) -> None:
    """All began where one worker was: at their next steps they go where fewer are, one reload each, and stay."""
    first = await room.worker("first")
    names = ("p", "q", "r", "s")
    runs = [room.run(name) for name in names]
    for run in runs:
        await room.begin(run)
    second = await room.worker("second")
    for number in (1, 2, 3):
        for run in runs:
            await room.commit(run, await step(run, number, commit=True))
    steps = {worker.name: [op.policy for op in worker.operations if isinstance(op, protocol.OptimStep)]
             for worker in (first, second)}  # fmt: skip
    assert steps == {"first": ["r", "s"] * 3, "second": ["p", "q"] * 3}
    assert set(room.leases.values()) == {2}, "nobody moves twice"


async def test_policy_returns_to_the_reserved_worker(room: Room) -> None:
    """Once it has nothing uncommitted; one that may vanish trains it only while no other can."""
    stays = await room.worker("stays")
    spot = await room.worker("spot", kind="preemptible")
    run = room.run()
    await room.begin(run)
    await stays.die()
    await step(run, 1, commit=False)
    await stays.join()
    for number in (2, 3, 4):
        await room.commit(run, await step(run, number, commit=True))
    steps = {
        worker.name: sum(isinstance(op, protocol.OptimStep) for op in worker.operations) for worker in (stays, spot)
    }
    assert steps == {"stays": 2, "spot": 2}
    await eventually(lambda: protocol.EvictArtifacts(policy="p") in spot.other)


async def test_slots_are_those_of_workers_that_get_policies(tmp_path: Path) -> None:
    """Fewer than there were, once a worker that stays is there: who has begun no gradient queues for its next one."""
    room = Room(tmp_path, trainer_slots=1)
    slots, one, two = room.slots, room.holder("one"), room.holder("two")
    one.run.restore_logged(forward(1))
    for name in ("spot", "another"):
        await room.worker(name, kind="preemptible")
    for each in (one, two):
        await asyncio.wait_for(slots.acquire(each), PATIENCE)
    await room.worker("stays")
    await asyncio.wait_for(slots.acquire(one), PATIENCE)
    assert (one.state, two.state) == ("busy", "busy")
    one.run.drop_gradient()
    coming = asyncio.create_task(slots.acquire(one))
    await settle()
    assert not coming.done() and (one.state, two.state) == ("waiting", "busy")
    assert slots.reason(one) == f"all training slots for {MODEL} (1) are in use; 0 others wait before this one"
    slots.idle(two)
    await asyncio.wait_for(coming, PATIENCE)
    assert (one.state, two.state) == ("busy", "out")
    await room.close()


async def test_a_cancelled_operation_passes_the_slot_that_it_was_given_on(tmp_path: Path) -> None:
    room = Room(tmp_path, trainer_slots=1)
    one, two, three = (room.holder(name) for name in ("one", "two", "three"))
    await room.slots.acquire(one)
    waits = [asyncio.create_task(room.slots.acquire(each)) for each in (two, three)]
    await settle()
    room.slots.release(one)
    assert (two.state, three.state) == ("busy", "waiting")
    waits[0].cancel()  # in the moment in which it has the slot
    await asyncio.wait_for(waits[1], PATIENCE)
    assert (two.state, three.state) == ("out", "busy")
    await room.close()


@pytest.mark.parametrize("event", get_args(SlotEvent))
@pytest.mark.parametrize("state", get_args(SlotState))
def test_a_policy_has_no_other_events_of_its_slot_than_those_of_the_table(state: SlotState, event: SlotEvent) -> None:
    holder = SlotHolder("one", "alice", "session", MODEL, run=None, state=state)  # type: ignore[arg-type]
    if (state, event) in TRANSITIONS:
        holder.apply(event)
        assert holder.state == TRANSITIONS[state, event]
    else:
        with pytest.raises(RuntimeError, match=f"policy one is {state}, which has no event '{event}'"):
            holder.apply(event)


# --- several trainers of one policy -----------------------------------------------------------------------------------


async def undivided(folder: Path, steps: int, every: int, members: int) -> list[str]:
    """The versions of one trainer."""
    room = Room(folder)
    await room.worker()
    versions = await history(room, room.run(), steps, every, members)
    await room.workers[0].die()
    room.writer.close()
    return versions


async def test_batch_is_divided_among_trainers(room: Room, tmp_path: Path) -> None:
    """Each step's gradient is that of the whole batch, and nothing of the shares stays."""
    workers = [await room.worker(name) for name in ("a", "b", "c")]
    divided = await history(room, room.run(trainers=3), 3, 1, 6)
    assert divided == await undivided(tmp_path / "one", 3, 1, 6)
    first, *others = [
        [op for op in worker.operations if not isinstance(op, protocol.InitAdapter)] for worker in workers
    ]
    assert [len(op.gradients) for op in first if isinstance(op, protocol.ForwardBackward)] == [0, 2] * 3
    for shares in others:
        assert [(op.operations, bool(op.upload), op.steps) for op in shares] == [(0, True, 0)] * 3
    assert room.staged() == 0 and room.training.retries == 0
    assert len(room.artifacts.hashes()) == len(divided), "versions only"


async def test_uncommitted_steps_and_small_batches_are_not_divided(room: Room, tmp_path: Path) -> None:
    workers = [await room.worker(name) for name in ("a", "b")]
    assert await history(room, room.run(trainers=4), 4, 2, 2) == await undivided(tmp_path / "one", 4, 2, 2)
    assert len(workers[1].operations) == 2, "of the first step after each commit"
    await room.begin(run := room.run("q", trainers=4))
    await step(run, 1, commit=True)
    assert {op.policy for op in workers[0].operations} == {"p"}, "one trajectory has one share"


@pytest.mark.parametrize("reserved", [True, False])
@pytest.mark.parametrize("death", range(7))
async def test_lost_trainer_of_a_share_costs_its_share_only(tmp_path: Path, death: int, reserved: bool) -> None:
    """Whenever one of three trainers dies, the versions are those of one undisturbed trainer."""
    room = Room(tmp_path / "several")
    kind = "reserved" if reserved else "preemptible"
    workers = [await room.worker(name, kind=kind if name != "a" else "reserved") for name in ("a", "b", "c")]
    victim, received = workers[death % 2], 0

    async def die(op: Any) -> None:
        nonlocal received
        received += 1
        if received == death // 2 + (2 if victim is workers[0] else 1):  # not the one that makes version 0
            assert victim.link is not None
            victim.link.cut()

    victim.answer = die
    assert await history(room, room.run(trainers=3), 3, 1, 6) == await undivided(tmp_path / "one", 3, 1, 6)
    assert room.fleet.losses == room.training.retries == 1
    await eventually(lambda: room.staged() == 0)  # threads remove it
    assert len(room.artifacts.hashes()) == 4, "versions only"
    await room.close()


@pytest.mark.parametrize("category", ["too small", "failed"])
async def test_a_helper_that_cannot_compute_its_share_ends_no_job(room: Room, tmp_path: Path, category: Any) -> None:
    helper = [await room.worker(name) for name in ("a", "b")][1]
    refusing(helper, TOO_SMALL, category)
    assert await history(room, room.run(trainers=2), 3, 1, 6) == await undivided(tmp_path / "one", 3, 1, 6)
    assert len(helper.operations) == (1 if category == "too small" else 3)


async def test_cancelled_step_leaves_nothing_of_its_shares(room: Room) -> None:
    a, b = [await room.worker(name) for name in ("a", "b")]
    run = room.run(trainers=2)
    await room.begin(run)
    a.training.clear()
    stepping = asyncio.create_task(step(run, 1, commit=True, members=4))
    await eventually(lambda: len(b.operations) == 1 and len(a.operations) == 2)
    await cancel_all(stepping)
    assert room.staged() == 0 and room.artifacts.hashes() == {run.parent.hash}
