"""A tenant that floods a small worker with jobs takes its share of it and no more, in the shipped controller under
virtual time."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Callable
from contextvars import Context
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVarTuple, Unpack

import pytest

from rookery.simulation.clock import VirtualLoop
from rookery.simulation.fakes.service import MEMORY, MODEL, SimulatedService
from rookery.simulation.fakes.text import LongTailed
from rookery.simulation.profiles import load_profile
from rookery.simulation.replay import ENVIRONMENT
from rookery.tenant_loop import TenantLoop
from rookery.turns import TENANT

Ts = TypeVarTuple("Ts")

ROWS = 8
"""Half as many as requests may wait in a worker: the worst case for the order of their arrival."""

SATURATING = 4
"""Jobs of one tenant that leave no row free: what fills its fair share."""


def job(number: int, steps: int) -> dict[str, Any]:
    return {
        "name": f"job-{number}",
        "base_model": MODEL,
        "environment": {"id": ENVIRONMENT, "step_timeout": 600},
        "algorithm": {"group_size": 8, "groups_per_step": 2},
        "sampling": {"max_tokens": 200},
        "stop": {"steps": steps},
        "seed": number,
    }


class BusyLoop(VirtualLoop, TenantLoop):
    """The event loop of a service on a slow machine: each callback of a tenant takes a while."""

    CALLBACK_SECONDS = 0.01
    computed = 0.0

    def time(self) -> float:
        return super().time() + self.computed

    def processor_seconds(self) -> float:
        return self.computed

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        def slow(*given: *Ts) -> None:
            try:
                callback(*given)
            finally:
                self.computed += self.CALLBACK_SECONDS

        tenant = TENANT.get() if context is None else context.get(TENANT, "")
        return super().call_soon(slow if tenant else callback, *args, context=context)


def median_step(others: int, loop: Callable[[], asyncio.AbstractEventLoop] = VirtualLoop, rows: int = ROWS) -> float:
    """Virtual seconds of a job's median step beside so many jobs of another tenant."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder, asyncio.Runner(loop_factory=loop) as runner:
        return runner.run(_median_step(Path(folder), others, rows))


async def _median_step(folder: Path, others: int, rows: int) -> float:
    machine = load_profile("gpu-8b").reserved.model_copy(update={"rows": rows})
    tenants, settings = ["victim", "flood"], {"tenant_jobs": 1000}
    length = LongTailed(60, 0.5)
    site = SimulatedService(folder, length, context=machine.context, seed=1, tenants=tenants, settings=settings)
    controller = site.controller
    await controller.start()
    host = await site.host({f"builtin:{ENVIRONMENT}": 0.2}, prompt_tokens=100).join()
    worker = site.worker("worker", machine)
    worker.start()
    for number in range(others):
        await controller.submit("flood", job(number + 1, 1_000_000))
    await controller.context.clock.sleep(30)
    view, _ = await controller.submit("victim", job(0, 10))
    await controller.queries.wait("victim", view.id)
    times = [row["time"] for row in await controller.queries.metrics("victim", view.id)]
    await worker.kill()
    await host.leave()
    await site.close()
    return statistics.median(later - earlier for earlier, later in pairwise(times))


@pytest.mark.parametrize("flood", [30, pytest.param(150, marks=pytest.mark.heavy)])
def test_a_flood_of_jobs_costs_another_tenant_its_fair_share_and_no_more(flood: int) -> None:
    alone, fair = median_step(0), median_step(SATURATING)
    assert fair > 1.2 * alone, "the other tenant's jobs fill its share"
    assert median_step(flood) < 1.15 * fair


def test_jobs_share_the_event_loop_of_the_service_by_tenant() -> None:
    """Where it, and no worker, is what all jobs wait for."""
    alone = median_step(0, BusyLoop, rows=1024)
    assert median_step(16, BusyLoop, rows=1024) < 2 * alone
