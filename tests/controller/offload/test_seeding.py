"""Algorithm 1: its equations, on a closed-form model, and the shipped controller in virtual time."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rules import split
from tests.support.virtual import CONTEXT, by_number, machine

from rookery import protocol
from rookery.controller.fleet.worker import Worker
from rookery.controller.offload.pool import RemotePool
from rookery.controller.offload.seeding import Seeding
from rookery.controller.options import ControllerOptions
from rookery.protocol.connection import Outbox
from rookery.scheduling.offload import Cycle, OffloadPlanner
from rookery.simulation.clock import run
from rookery.simulation.fakes.connection import connection_pair
from rookery.simulation.fakes.service import MEMORY, MODEL, SimulatedService
from rookery.simulation.fakes.worker import FakeWorker
from rookery.spec.machine import Machine

# --- the equations ----------------------------------------------------------------------------------------------------

seconds = st.floats(0, 1e4)


def cycle(
    *, trainer_wait: float = 0.0, remote_wait: float = 0.0, instances: float = 2.0, train: float = 10.0,
    remote: float = 20.0, seeded: float = 1e9,
) -> Cycle:  # fmt: skip
    return Cycle(seeded, trainer_wait, remote_wait, train, remote, instances)


@given(
    seconds, st.floats(1, 10), seconds, seconds, seconds, st.floats(0.01, 1e4), st.floats(0.1, 50), st.integers(1, 9)
)
def test_the_published_update(
    initial: float, eta: float, trainer_wait: float, remote_wait: float, remote: float, train: float,
    instances: float, reserved: int,
) -> None:  # fmt: skip
    at = OffloadPlanner(initial=initial, eta=eta, reserved=reserved)
    assert (at.seconds, at.worthwhile, at.memory) == (initial, reserved, {})
    given = cycle(trainer_wait=trainer_wait, remote_wait=remote_wait, remote=remote, train=train, instances=instances)
    at.learn(given, available=100, reserved=reserved)
    assert at.seconds == pytest.approx(max(0.0, initial + (trainer_wait - remote_wait) / eta))
    if work := remote * instances + at.seconds * reserved:
        assert at.worthwhile == pytest.approx(work / train)
    assert 1 <= at.max_remote <= max(1, at.worthwhile + 1)
    assert at.max_remote >= at.worthwhile * (1 - 1e-6)


def test_short_seed_phase_is_corrected_from_its_real_length() -> None:
    at = OffloadPlanner(initial=50.0, eta=3.0, reserved=1)
    at.learn(cycle(seeded=8.0, remote_wait=3.0), available=9, reserved=1)
    assert at.seconds == 7.0
    at.learn(cycle(seeded=7.0, trainer_wait=3.0), available=9, reserved=1)
    assert at.seconds == 8.0, "one that was cut short was as long as it was to be"


def test_cycle_without_measurements_changes_nothing() -> None:
    at = OffloadPlanner(initial=0.0, eta=3.0, reserved=4)
    at.learn(cycle(remote=0.0), available=9, reserved=4)
    assert at.worthwhile == 4
    at.learn(cycle(train=0.0), available=9, reserved=4)
    assert at.worthwhile == 4


def test_seed_seconds_are_remembered_by_number_of_instances() -> None:
    """3 → 1 → 3: stored where the number held for a whole cycle and holds on, taken where it is known."""
    at = OffloadPlanner(initial=10.0, eta=3.0, reserved=1)
    at.learn(cycle(instances=3.0, trainer_wait=6.0, remote=100), available=3, reserved=1)
    assert at.memory == {3: 12.0}
    at.learn(cycle(instances=3.0, trainer_wait=3.0, remote=100), available=1, reserved=1)
    assert (at.seconds, at.memory) == (13.0, {3: 12.0}), "the number changes: nothing is stored, nothing known of 1"
    at.learn(cycle(instances=1.0, trainer_wait=30.0, remote=100), available=1, reserved=1)
    assert at.memory == {3: 12.0, 1: 23.0}
    at.learn(cycle(instances=1.4, trainer_wait=3.0, remote=100), available=1, reserved=1)
    assert (at.seconds, at.memory[1]) == (23.0, 23.0), "one that saw changes teaches nothing about the number"
    at.learn(cycle(instances=2.2, trainer_wait=90.0, remote=100), available=3, reserved=1)
    assert at.seconds == 12.0
    at.begin(1)
    assert at.seconds == 23.0
    at.begin(2)
    assert at.seconds == 23.0, "of 2 nothing is known"


def test_next_cycle_begins_with_the_instances_that_pay_off() -> None:
    at = OffloadPlanner(initial=0.0, eta=3.0, reserved=1)
    at.learn(cycle(instances=5.0, remote=4.0, train=10.0), available=5, reserved=1)
    assert (at.worthwhile, at.max_remote) == (2.0, 2)
    assert 5 not in at.memory, "2 are used from now on"
    at.learn(cycle(instances=2.0, remote=10.0, train=10.0), available=5, reserved=1)
    assert at.memory == {2: 0.0}


# --- a closed-form model ----------------------------------------------------------------------------------------------


def play_step(seed: float, work: float, reserved: float, remote: float, instances: int, train: float) -> Cycle:
    """One step: ``work`` is generated by a training worker of speed ``reserved`` for ``seed`` seconds and by
    ``instances`` of speed ``remote``; training takes ``train`` seconds, begins with the train phase and cannot end
    before the last response."""
    rates = reserved + remote * instances
    seeded = min(seed, work / rates)
    rest = (work - rates * seeded) / (remote * instances)
    length = max(rest, train)
    return Cycle(seeded, length - train, length - rest, train, seeded + rest, instances)


@pytest.mark.parametrize("factor", [0.2, 5.0])
@pytest.mark.parametrize(("reserved", "instances"), [(1.0, 1), (1.0, 2), (1.0, 8), (2.0, 1)])
def test_initial_value_five_times_off_converges(factor: float, reserved: float, instances: int) -> None:
    """The training worker generates at most twice as fast as all others: a few steps, as the module says."""
    work, train = 60.0 * instances, 20.0
    right = (work - train * instances) / (reserved + instances)
    at = OffloadPlanner(initial=factor * right, eta=3.0, reserved=1)
    steps = 0
    while True:
        step = play_step(at.seconds, work, reserved, 1.0, instances, train)
        length = step.seeded + max(step.remote - step.seeded, train)
        if abs(step.trainer_wait - step.remote_wait) < 0.1 * length:
            break
        at.learn(step, available=instances, reserved=1)
        steps += 1
        assert steps <= 5, at.seconds
    for _ in range(30):
        at.learn(play_step(at.seconds, work, reserved, 1.0, instances, train), available=instances, reserved=1)
    assert at.seconds == pytest.approx(right, rel=0.01)


@given(st.floats(0.1, 4.9), st.integers(1, 9), st.floats(5, 50), st.floats(0, 1000))
def test_seed_seconds_converge_within_the_stated_bounds(
    ratio: float, instances: int, train: float, initial: float
) -> None:
    """For every ratio of speeds below 2 eta - 1."""
    work = 4 * train * instances
    right = (work - train * instances) / (instances * (1 + ratio))
    at = OffloadPlanner(initial=initial, eta=3.0, reserved=1)
    for _ in range(400):
        at.learn(play_step(at.seconds, work, ratio * instances, 1.0, instances, train), available=99, reserved=1)
    assert at.seconds == pytest.approx(right, rel=0.02)


# --- the remote workers -----------------------------------------------------------------------------------------------


class Stopped:
    """A clock that a test moves."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        raise NotImplementedError


def someone(number: int, kind: str) -> Worker:
    hello = protocol.Hello(
        protocol=protocol.PROTOCOL, name=f"w{number}", instance=f"i{number}", model=MODEL, model_hash="",
        roles=["rollout"], kind=kind, max_rows=1, max_context=1, max_rank=1, device="", dtype="",
    )  # fmt: skip
    return Worker(hello, Outbox(connection_pair()[0], number, Stopped()), 0.0, 0.0, "serving")


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.booleans()), st.tuples(st.just("drop"), st.integers(0, 99)),
            st.tuples(st.just("limit"), st.one_of(st.none(), st.integers(1, 5))),
        ),
        max_size=30,
    )
)  # fmt: skip
def test_pool_uses_the_first_workers_and_sums_their_time(events: list[tuple[str, Any]]) -> None:
    async def main() -> None:
        clock = Stopped()
        remotes = RemotePool(clock, lambda worker: clock.now / 2)
        there: list[Worker] = []
        most, spent = None, 0.0
        for number, (what, value) in enumerate(events):
            if what == "add":
                there.append(someone(number, "preemptible" if value else "reserved"))
                remotes.add(there[-1])
            elif what == "drop" and there:
                remotes.remove(there.pop(value % len(there)))
            elif what == "limit":
                most = value
                remotes.limit(value)
            stay = sum(worker.hello.kind == "reserved" for worker in there)
            may = [worker for worker in there if worker.hello.kind == "preemptible"]
            used = may if most is None else may[: max(0, most - stay)]
            assert [worker for worker in there if remotes.standby(worker)] == [w for w in may if w not in used]
            assert (remotes.used, len(remotes)) == (len(used) + stay, len(there))
            clock.now += 1.0
            spent += remotes.used
            assert remotes.totals().used == pytest.approx(spent)
            assert remotes.totals().busy == pytest.approx(spent / 2)

    asyncio.run(main())


# --- the shipped controller in virtual time ---------------------------------------------------------------------------

FLUSH = 0.02


def job(**algorithm: Any) -> dict[str, Any]:
    return {
        "name": "job", "base_model": MODEL, "environment": {"id": "fast"}, "stop": {"steps": 1000},
        "algorithm": {"group_size": 4, "groups_per_step": 8, "micro_batch": 4, **algorithm},
        "sampling": {"max_tokens": 400},
    }  # fmt: skip


def length(seed: int, most: int) -> int:
    """From 60 to 89 tokens."""
    return 60 + seed % 30


class Idle(Seeding):
    """Plain co-located training: nothing is gated, whoever is there."""

    def _review(self, trainer: Any) -> None:
        """Nobody has cycles."""


@dataclass
class SimulatedFleet:
    """A reserved worker that trains and generates, and preemptible ones; 32 episodes a step, 8 rows each."""

    site: SimulatedService
    machine: Machine
    preemptible: list[FakeWorker] = field(default_factory=list)
    started: int = 0
    job: str = ""

    async def rent(self, count: int) -> None:
        """So many preemptible workers are there from now on; the last ones vanish first."""
        while len(self.preemptible) > count:
            await self.preemptible.pop().kill()
        while len(self.preemptible) < count:
            self.preemptible.append(self.site.worker(f"spot-{self.started}", self.machine, kind="preemptible"))
            self.preemptible[-1].start()
            self.started += 1

    async def rows(self) -> list[dict[str, Any]]:
        return list(await self.site.controller.queries.metrics("alice", self.job))

    async def reach(self, step: int, job: str = "") -> list[dict[str, Any]]:
        """The rows as soon as so many steps are taken."""
        rows = []
        async for row in self.site.controller.queries.follow("alice", job or self.job):
            rows.append(row)
            if len(rows) == step:
                break
        return rows

    def learned(self) -> OffloadPlanner:
        return self.site.controller.context.rooms.seeding.planners["reserved"]


def step_seconds(rows: list[dict[str, Any]], since: int = 3) -> float:
    return (rows[-1]["time"] - rows[since - 1]["time"]) / (len(rows) - since)


def gap(row: dict[str, Any]) -> float:
    return abs(row["seconds/trainer_wait"] - row["seconds/remote_wait"])


def play(
    act: Callable[[SimulatedFleet], Coroutine[Any, Any, Any]], *, preemptible: int, seeding: type[Seeding] = Seeding,
    train_token: float = 0.0006, initial: float = 2.0, spec: dict[str, Any] | None = None, **more: Any,
) -> Any:  # fmt: skip
    """The answers of ``act`` for a job that runs from the start."""

    async def main(folder: str) -> Any:
        chosen, rules = split({"flush_seconds": FLUSH, "seed_initial_seconds": initial, **more})
        site = SimulatedService(
            Path(folder),
            length,
            context=CONTEXT,
            seed=1,
            tenants=["alice"],
            settings=chosen,
            options=ControllerOptions(seeding=seeding, rollout_rules=rules.rollouts),
        )
        world = SimulatedFleet(site, machine(8).model_copy(update={"train_token": train_token}))
        await site.controller.start()
        reserved = site.worker("reserved", world.machine)
        reserved.start()
        await world.rent(preemptible)
        submitted = spec or job()
        speakers = {"builtin:fast": list(submitted.get("policies", []))}
        host = site.host({"builtin:fast": 0.01}, prompt_tokens=20, reward=by_number, speakers=speakers)
        await host.join()
        await asyncio.sleep(0.5)
        view, _ = await site.controller.submit("alice", submitted)
        world.job = view.id
        result = await act(world)
        await world.rent(0)
        await reserved.kill()
        await host.leave()
        await site.close()
        return result

    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        return run(main(folder))


def test_preemptible_workers_shorten_the_step_and_no_token_is_lost() -> None:
    """Groups complete; what was handed off goes on where it was: every token was received once."""

    async def steps(world: SimulatedFleet) -> tuple[float, list[dict[str, Any]], dict[str, float]]:
        view = await world.site.controller.queries.wait("alice", world.job)
        assert (view.state, view.step) == ("completed", 7), view.reason
        ended = await world.site.controller.queries.episodes.trajectories("alice", world.job, 1000)
        assert {row.state for row in ended} == {"done"}
        texts = [trajectory for row in ended for trajectory in row.trajectories or ()]
        assert len(texts) == 7 * 32
        assert sum(len(text.tokens) for text in texts) == view.tokens
        assert all(set(text.versions) == {row.version} for row in ended for text in row.trajectories or ()), "strict"
        rows = await world.rows()
        return step_seconds(rows), rows, dict(world.site.controller.queries.health().totals)

    spec = {**job(), "stop": {"steps": 7}}
    (alone, plain, _), (one, _, moved), (three, rows, _) = (
        play(steps, preemptible=count, spec=spec) for count in (0, 1, 3)
    )
    assert "remote_workers" not in plain[-1]
    assert moved["requests_requeued_offloaded"] > 0
    assert moved["requests_requeued_lost"] == 0
    assert one < 0.65 * alone
    assert three < 0.80 * one
    assert rows[-1]["remote_workers"] == pytest.approx(3)


@pytest.mark.parametrize(("initial", "steps"), [(0.2, 5), (5.0, 12)])
def test_wait_gap_closes(initial: float, steps: int) -> None:
    """T_seed begins five times too small or too large (it settles near 1): the mean gap of three steps in a row is
    below 10% of the step within so many steps. Training and generating overlap in the seed phase too, so what is too
    long costs little and is corrected slowly."""

    async def act(world: SimulatedFleet) -> list[dict[str, Any]]:
        return await world.reach(steps + 3)

    rows = play(act, preemptible=1, initial=initial)
    assert gap(rows[0]) > 0.1 * step_seconds(rows)
    assert sum(map(gap, rows[-3:])) / 3 < 0.1 * step_seconds(rows)


@pytest.mark.parametrize("middle", [True, False])
def test_three_one_three_instances_restore_the_seed_seconds(middle: bool) -> None:
    """Whether they come back in the middle of a step or between two."""

    async def act(world: SimulatedFleet) -> None:
        await world.reach(7)
        await world.rent(1)
        await world.reach(12)
        if middle:
            await asyncio.sleep(1.0)
        learned = world.learned()
        remembered = learned.memory[3]
        assert learned.seconds > remembered + 0.3, "one worker needs more seeding"
        await world.rent(3)
        back = len(await world.rows())
        rows = await world.reach(back + 2)
        if middle:
            assert 1 < rows[back]["remote_workers"] < 2.9
        first = rows[back + middle]
        assert first["remote_workers"] == pytest.approx(3)
        assert first["seconds/seed"] == pytest.approx(remembered), "they are seconds of the clock that ends the phase"

    play(act, preemptible=3, train_token=0.0003)


def test_unprofitable_workers_stand_by_with_a_note() -> None:
    """Training takes so long that two workers do all the generating meanwhile."""

    async def act(world: SimulatedFleet) -> None:
        await world.reach(4)
        most = world.learned().max_remote
        assert most == 2
        gauges = world.site.controller.queries.health().gauges
        assert (gauges["remote_workers_used"], gauges["remote_workers_unused"]) == (2, 3)
        notes = {row.name: row.note for row in world.site.controller.queries.workers()}
        for number in range(5):
            left = "standby: in addition to 2 others it would not pay off now" if number >= most else ""
            assert notes[f"spot-{number}"] == left
        generated = [worker.engine.generated for worker in world.preemptible]
        await asyncio.sleep(0.3)
        assert world.site.controller.context.rooms.rollouts.waiting() > 0, "there would be something to do for one more"
        await world.rent(6)
        await world.reach(6)
        assert [worker.engine.generated for worker in world.preemptible[2:]] == [*generated[2:], 0]
        await world.preemptible.pop(0).kill()
        await world.reach(8)
        assert world.preemptible[1].engine.generated > generated[2], "the next one takes its place"
        await world.site.controller.cancel("alice", world.job)
        assert not any(row.note for row in world.site.controller.queries.workers())
        assert not world.site.controller.context.rooms.rollouts.closed

    play(act, preemptible=5, train_token=0.0013, dispatch_ahead=0)


@pytest.mark.parametrize("spec", [job(), job(max_staleness=2, micro_batch=0)], ids=["strict", "asynchronous"])
def test_without_remote_workers_nothing_changes(spec: dict[str, Any]) -> None:
    """To the frame and the microsecond."""

    async def act(world: SimulatedFleet) -> str:
        await world.reach(4)
        return world.site.log.digest()

    assert play(act, preemptible=0, spec=spec) == play(act, preemptible=0, spec=spec, seeding=Idle)


def test_job_that_cannot_overlap_is_not_seeded() -> None:
    """There is nothing to overlap: its training worker generates to the end."""

    async def act(world: SimulatedFleet) -> str:
        rows = await world.reach(4)
        assert "seconds/seed" not in rows[-1]
        return world.site.log.digest()

    assert play(act, preemptible=2, spec=job(micro_batch=0)) == play(
        act, preemptible=2, spec=job(micro_batch=0), seeding=Idle
    )


def test_training_worker_generates_again_without_remote_workers() -> None:
    async def act(world: SimulatedFleet) -> None:
        rows = await world.reach(3)
        for _ in range(200):  # into a train phase
            if world.site.controller.context.rooms.rollouts.closed:
                break
            await asyncio.sleep(0.05)
        assert {worker.name for worker in world.site.controller.context.rooms.rollouts.closed} == {"reserved"}
        await world.rent(0)
        assert not world.site.controller.context.rooms.rollouts.closed
        rows = await world.reach(6)
        assert "remote_workers" not in rows[-1]
        assert world.learned().memory, "what was learned stays"

    play(act, preemptible=2)


def test_two_strict_jobs_are_seeded_together() -> None:
    """One trains while the other generates, though neither trains in portions; both go on."""

    async def act(world: SimulatedFleet) -> None:
        controller = world.site.controller
        view, _ = await controller.submit("alice", {**job(micro_batch=0), "name": "other"})
        for name in (world.job, view.id):
            rows = await world.reach(6, name)
            assert rows[-1]["remote_workers"] == pytest.approx(2)
            assert rows[-1]["seconds/trainer_wait"] >= 0

    play(act, preemptible=2, spec=job(micro_batch=0))


def test_a_policy_that_has_stopped_keeps_no_worker_from_generating() -> None:
    """The other one trains on, strictly, and alone: there is nothing to overlap."""

    async def act(world: SimulatedFleet) -> None:
        rows = await world.reach(7)
        assert [row["policy_step"] for row in rows if row["policy"] == "solver"] == [1, 2]
        assert any("remote_workers" in row for row in rows[:4])
        assert not any("remote_workers" in row for row in rows[5:])
        assert not world.site.controller.context.rooms.rollouts.closed

    policies = {"solver": {"stop": {"steps": 2}}, "verifier": {}}
    play(act, preemptible=2, spec={**job(micro_batch=0), "policies": policies})


def test_the_reserved_worker_trains() -> None:
    """A preemptible one plays both roles too, and its name comes first."""

    async def main(folder: str) -> None:
        site = SimulatedService(Path(folder), length, context=CONTEXT, seed=1, tenants=["alice"])
        await site.controller.start()
        workers = [site.worker("a", machine(8), kind="preemptible"), site.worker("b", machine(8))]
        for worker in workers:
            worker.start()
        host = site.host({"builtin:fast": 0.01}, prompt_tokens=20, reward=by_number)
        await host.join()
        await asyncio.sleep(0.5)
        view, _ = await site.controller.submit("alice", {**job(), "stop": {"steps": 2}})
        await site.controller.queries.wait("alice", view.id)
        assert [worker.compute.trained > 0 for worker in workers] == [False, True]
        for worker in workers:
            await worker.kill()
        await host.leave()
        await site.close()

    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        run(main(folder))
