"""The number of rollout workers of a base model: counted from the steps of jobs, and passed to the cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.controller.jobs.test_policies import submit
from tests.scheduling.test_plan import machine
from tests.support.peers import MODEL, ManualClock, Service
from tests.support.small_model import save_small_model
from tests.support.waiting import until

import rookery
from rookery.controller.rollout.elastic import ElasticPool
from rookery.scheduling.plan.predict import Role, devices_of
from rookery.server.launcher import EmbeddedService
from rookery.settings import Settings
from rookery.simulation.clock import run
from rookery.simulation.planned import planned_service
from rookery.spec.fleet import FleetSpec, JobDemand

RIGHT = 4


class Workers:
    """A fleet of workers that are busy for a given share of the time."""

    def __init__(self, clock: ManualClock, busy: float) -> None:
        self.clock, self.busy, self.names, self.worked = clock, busy, ["w1", "w2"], 0.0

    def serving(self, role: str, model: str) -> list[Any]:
        return [type("W", (), {"name": name})() for name in self.names] if model == MODEL else []

    def busy_seconds(self, worker: Any) -> float:
        return self.worked


def pool(folder: Path, busy: float = 1.0, **settings: Any) -> tuple[ElasticPool, Workers, list[tuple[str, int]]]:
    clock, asked = ManualClock(), list[tuple[str, int]]()
    workers = Workers(clock, busy)
    values = Settings(data=folder, cache=folder, **settings)

    def ask(model: str, count: int, _: Sequence[str]) -> None:
        asked.append((model, count))

    found = ElasticPool(values, 2, clock, workers, workers.busy_seconds, ask)  # type: ignore[arg-type]
    return found, workers, asked


def steps(found: ElasticPool, workers: Workers, wait: float, count: int = 2) -> None:
    for _ in range(count):
        found.entered(MODEL, 8)
        workers.clock.now += 10.0
        workers.worked += 10.0 * workers.busy
        found.step(MODEL, waited=10 * wait, seconds=10.0, consumed=8)


def test_trainers_that_wait_ask_for_workers_within_the_bounds(tmp_path: Path) -> None:
    found, workers, asked = pool(tmp_path, scale_max=3)
    steps(found, workers, 0.5, count=1)
    assert found.wanted(MODEL) is None and asked == [], "the window is not complete"
    steps(found, workers, 0.5, count=1)
    assert found.wanted(MODEL) == 3 and asked == [(MODEL, 3)]


def test_a_window_begins_again_when_the_workers_change(tmp_path: Path) -> None:
    found, workers, asked = pool(tmp_path, scale_max=9)
    steps(found, workers, 0.5, count=1)
    workers.names.append("w3")
    steps(found, workers, 0.0, count=1)
    assert asked == []
    steps(found, workers, 0.0, count=1)
    assert asked == [(MODEL, 3)], "the wait of two workers does not count"


def test_idle_workers_are_released_and_all_when_no_job_runs(tmp_path: Path) -> None:
    found, workers, asked = pool(tmp_path, busy=0.3, scale_max=9)
    steps(found, workers, 0.0)
    assert asked == [(MODEL, 1)]
    found.keep({MODEL})
    assert asked == [(MODEL, 1)]
    found.keep(())
    assert asked == [(MODEL, 1), (MODEL, 1)] and found.wanted(MODEL) is None


def test_a_fixed_number_is_shown_and_not_acted_on(tmp_path: Path) -> None:
    found, workers, asked = pool(tmp_path)
    steps(found, workers, 0.5)
    assert found.wanted(MODEL) == 4 and asked == []


def test_a_shown_number_stays_where_workers_have_requests_for_about_half_of_the_time(tmp_path: Path) -> None:
    found, workers, _ = pool(tmp_path)
    shown = set()
    for busy in (0.6, 0.6, 0.45, 0.55, 0.49, 0.51, 0.45, 0.55):
        workers.busy = busy
        steps(found, workers, 0.9, count=1)
        shown.add(found.wanted(MODEL))
    assert shown == {None, 3}


async def test_an_asynchronous_job_is_counted_and_a_synchronous_one_is_not(tmp_path: Path) -> None:
    for staleness in (0, 1):
        service = Service(tmp_path / str(staleness), scale_window=1)
        await service.start()
        await service.join()
        job = await submit(service, policies={"main": {}}, algorithm__max_staleness=staleness)
        shown = []

        async def look(op: Any, service: Service = service, shown: list[Any] = shown) -> None:
            shown.extend(service.controller.queries.pools())

        service.peers[0].answer = look
        await service.ends(job)
        assert {(row.model, row.workers, row.least, row.most) for row in shown} == {(MODEL, 1, None, None)}
        assert any(row.wanted is not None for row in shown) == bool(staleness)
        await service.close()


@pytest.mark.heavy
@pytest.mark.parametrize("first", [2, 8])
def test_the_shipped_controller_finds_the_right_number_from_half_and_from_double(tmp_path: Path, first: int) -> None:
    """In virtual time: four workers generate as fast as the trainer trains. The cluster is the test."""
    demand = JobDemand(
        name="a", group_size=4, groups_per_step=4, prompt_tokens=16, median_tokens=40, sigma=0.3, max_tokens=96,
        staleness=1,
    )  # fmt: skip
    decode = [(1, 0.1)]
    rolling = machine("r", count=first, rows=1, prefill_token=0.0, load=1.0).model_copy(update={"decode": decode})
    seconds = demand.episodes * demand.mean_tokens * 0.1
    trainer = machine("t", train_token=seconds / RIGHT / demand.train_tokens, optimizer=0.0)
    devices = devices_of(FleetSpec(machines=[trainer, rolling]))
    roles: list[Role] = ["train", *["rollout" for _ in range(first)]]  # type: ignore[list-item]
    sizes = [first]

    async def play() -> None:
        async with planned_service(tmp_path, devices, [demand], roles, 200) as service:
            queries, ((tenant, id),), there = service.site.controller.queries, service.jobs, service.workers[1:]
            while (await queries.show(tenant, id)).step < 30:
                await asyncio.sleep(1.0)
                pool = next(iter(queries.pools()), None)
                if pool is None or pool.wanted in (None, len(there)) or pool.workers != len(there):
                    continue
                while len(there) > pool.wanted:
                    await there.pop().kill()
                while len(there) < pool.wanted:
                    there.append(service.site.worker(f"more-{len(sizes)}-{len(there)}", rolling, roles=["rollout"]))
                    service.workers.append(there[-1])
                    there[-1].start()
                sizes.append(pool.wanted)

    run(play())
    moves = [after - before for before, after in pairwise(sizes)]
    assert sum(a * b < 0 for a, b in pairwise(moves)) <= 1, sizes
    assert RIGHT <= sizes[-1] <= RIGHT + 1, sizes


class Letters(rookery.Environment):
    """Rewards many different letters."""

    deterministic = True

    def prompts(self, split: str) -> list[int]:
        return list(range(64))

    def reset(self, prompt: Any, seed: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"say {prompt}"}]

    def step(self, reply: rookery.Reply) -> rookery.Step:
        return rookery.Step(done=True, reward=len(set(reply.text)) / 8)


@pytest.mark.heavy
@pytest.mark.timeout(500)
def test_real_workers_join_while_trainers_wait_and_leave_after_the_job(tmp_path: Path) -> None:
    model = save_small_model(tmp_path / "model")
    folders = {"data": tmp_path / "data", "cache": tmp_path / "cache"}
    scale = {"scale_max": 3, "heartbeat_seconds": 0.5}
    settings = Settings.load({}, port=0, models=str(model), workers=1, **scale, **folders)
    sizes: list[int] = []

    def look(client: rookery.Client) -> tuple[int, int | None]:
        found = next((pool for pool in client.pools() if pool.model == str(model)), None)
        if found is None:
            return 0, None
        if not sizes or sizes[-1] != found.workers:
            sizes.append(found.workers)
        return found.workers, found.wanted

    # A few long replies: their steps cost nearly as much as steps of many, so that the trainer waits on any machine.
    replies = {"group_size": 2, "groups_per_step": 2, "max_staleness": 1}
    with EmbeddedService(settings) as service, rookery.Client(service.url, service.key) as client:
        job = client.train(
            base_model=str(model),
            environment={"hosted": Letters()},
            policies={"main": {"rank": 4}},
            algorithm=replies,
            sampling={"max_tokens": 400},
            stop={"steps": 10_000},
        )
        until(lambda: look(client) in ((2, 2), (3, 3)), patience=240)  # how many suit the load depends on the machine
        job.cancel()
        until(lambda: look(client)[0] == 1)
        moves = [after - before for before, after in pairwise(sizes)]
        assert sum(a * b < 0 for a, b in pairwise(moves)) <= 1, sizes
