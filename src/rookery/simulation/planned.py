"""A plan in virtual time: the shipped controller with the plan's workers, as fast as the fleet file says."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rookery.scheduling.plan.predict import PLAYS, Device, Role
from rookery.simulation.clock import run
from rookery.simulation.fakes.service import MEMORY, SimulatedService, modelled_job
from rookery.simulation.fakes.text import LongTailed
from rookery.simulation.fakes.worker import FakeWorker
from rookery.spec.fleet import JobDemand, Plan

ENVIRONMENT = "planned"

FLUSH_SECONDS = 2.0
"""Far below a round, and far above the default: each flush is an event to simulate."""

WARM_UP = 3
"""Steps of each job that are not counted: the first ones start on idle machines and without a known length."""


def simulate_plan(
    devices: Sequence[Device], demands: Sequence[JobDemand], roles: Sequence[Role], rows: Sequence[int], *,
    steps: int = 6, seed: int = 0,
) -> float:  # fmt: skip
    """Simulated seconds of a round, in which every job does one optimizer step: the mean over the rounds after
    :data:`WARM_UP` of one run, of the slowest job. All jobs have the reply lengths of the first one."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        return run(_play(devices, demands, roles, rows, steps, seed, Path(folder)))


async def _play(
    devices: Sequence[Device], demands: Sequence[JobDemand], roles: Sequence[Role], rows: Sequence[int], steps: int,
    seed: int, folder: Path,
) -> float:  # fmt: skip
    used = [(device, role, most) for device, role, most in zip(devices, roles, rows, strict=True) if role != "off"]
    machines = [device.machine.model_copy(update={"rows": most or device.machine.rows}) for device, _, most in used]
    started = [Device(device.name, machine) for (device, _, _), machine in zip(used, machines, strict=True)]
    times: list[list[float]] = []
    async with planned_service(folder, started, demands, [role for _, role, _ in used], steps, seed) as service:
        queries = service.site.controller.queries
        await asyncio.gather(*(queries.wait(tenant, job) for tenant, job in service.jobs))
        for tenant, job in service.jobs:
            view = await queries.show(tenant, job)
            if view.state != "completed":
                raise RuntimeError(f"job {view.name} is {view.state}: {view.reason}")
            times.append([row["time"] for row in await queries.metrics(tenant, job)])
    return max((of[-1] - of[WARM_UP - 1]) / steps for of in times)


@dataclass(frozen=True)
class PlannedService:
    site: SimulatedService
    workers: list[FakeWorker]
    jobs: list[tuple[str, str]]
    """(tenant, id)."""


@asynccontextmanager
async def planned_service(
    folder: Path, devices: Sequence[Device], demands: Sequence[JobDemand], roles: Sequence[Role], steps: int,
    seed: int = 0, plan: Plan | None = None,
) -> AsyncIterator[PlannedService]:  # fmt: skip
    """A simulated service with a worker for each of ``devices``, in these roles, and a job for each of ``demands``."""
    first = demands[0]
    tenants = [f"tenant-{number}" for number in range(len(demands))]
    site = SimulatedService(
        folder,
        LongTailed(first.median_tokens, first.sigma),
        context=min(device.machine.context for device in devices),
        seed=seed,
        tenants=tenants,
        settings={"flush_seconds": FLUSH_SECONDS},
        plan=plan,
    )
    await site.controller.start()
    host = site.host({f"builtin:{ENVIRONMENT}": first.environment}, prompt_tokens=first.prompt_tokens)
    await host.join()
    workers: list[FakeWorker] = []
    for device, role in zip(devices, roles, strict=True):
        kind: Literal["reserved", "preemptible"] = "preemptible" if device.machine.preemptible else "reserved"
        workers.append(site.worker(device.name, device.machine, roles=PLAYS[role], kind=kind))
    for worker in workers:
        worker.start()
    jobs = []
    for number, (tenant, demand) in enumerate(zip(tenants, demands, strict=True)):
        job = modelled_job(
            ENVIRONMENT, demand, number, seed, demand.staleness, demand.micro_batch, {"steps": steps + WARM_UP}
        )
        view, _ = await site.controller.submit(tenant, job | {"policies": {"policy": {"trainers": demand.trainers}}})
        jobs.append((tenant, view.id))
    try:
        yield PlannedService(site, workers, jobs)
    finally:
        for worker in workers:
            await worker.kill()
        await host.leave()
        await site.close()
