"""A plan in virtual time: the shipped controller with the plan's workers, as fast as the fleet file says."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rookery.controller.options import ControllerOptions
from rookery.errors import UserError
from rookery.folders import temporary_folder
from rookery.scheduling.plan.predict import PLAYS, Device, Role, devices_of, role_of
from rookery.simulation.clock import run
from rookery.simulation.fakes.service import MEMORY, SimulatedService, modelled_job
from rookery.simulation.fakes.text import LongTailed
from rookery.simulation.fakes.worker import FakeWorker
from rookery.spec.fleet import FleetMachine, FleetSpec, JobDemand, Plan

ENVIRONMENT = "planned"

FLUSH_SECONDS = 2.0
"""Far below a round, and far above the default: each flush is an event to simulate."""

WARM_UP = 3
"""Steps of each job that are not counted: the first ones start on idle machines and without a known length."""


def simulate_plan(plan: Plan, *, steps: int = 6, seed: int = 0) -> float:
    """Simulated seconds of a round, in which every policy does one optimizer step: the mean over the rounds after
    :data:`WARM_UP` of one run, of the slowest policy. All jobs have the reply lengths of the first one. Raises
    :class:`UserError` where a job fails."""
    with temporary_folder(at=MEMORY) as folder:
        return run(_play(plan, steps, seed, Path(folder)))


async def _play(plan: Plan, steps: int, seed: int, folder: Path) -> float:
    plan = plan.model_copy(update={"model": ""})  # simulated workers have another one
    machines = {device.name: _linked(plan.fleet, device.machine) for device in devices_of(plan.fleet)}
    started = [
        Device(
            worker.name,
            machines[worker.name].model_copy(update={"rows": worker.max_rows, "train_slice": worker.slice_tokens}),
        )
        for worker in plan.workers
    ]
    roles = [role_of(worker.roles) for worker in plan.workers]
    times: list[list[float]] = []
    async with planned_service(folder, started, plan.jobs, roles, steps, seed, plan) as service:
        queries = service.site.controller.queries  # nobody mends a fault here
        views = await asyncio.gather(*(queries.wait(tenant, job, until_fault=True) for tenant, job in service.jobs))
        for (tenant, job), view in zip(service.jobs, views, strict=True):
            if view.state != "completed":
                raise UserError(f"the plan cannot be simulated: job {view.name} is {view.state}: {view.reason}")
            of: defaultdict[str, list[float]] = defaultdict(list)
            for row in await queries.metrics(tenant, job):
                of[row.get("policy", "")].append(row["time"])
            times.extend(of.values())
    return max((of[-1] - of[WARM_UP - 1]) / steps for of in times)


def _linked(fleet: FleetSpec, machine: FleetMachine) -> FleetMachine:
    """The machine with its transfers to and from the service over the link between their sites."""
    latency, download = fleet.over_link(machine, fleet.service, machine.download)
    _, upload = fleet.over_link(machine, fleet.service, machine.upload)
    return machine.model_copy(update={"latency": latency, "download": download, "upload": upload})


@dataclass(frozen=True)
class PlannedService:
    site: SimulatedService
    workers: list[FakeWorker]
    jobs: list[tuple[str, str]]
    """(tenant, id)."""


def _policies(demands: Sequence[JobDemand]) -> dict[str, Any]:
    """The policies of a job: those that train, then those that only reply."""
    trained = {f"policy-{i + 1}": {"trainers": demand.trainers} for i, demand in enumerate(demands)}
    frozen = {f"frozen-{i + 1}": {"train": False, "base": True} for i in range(demands[0].turns - len(demands))}
    return trained | frozen


@asynccontextmanager
async def planned_service(
    folder: Path, devices: Sequence[Device], demands: Sequence[JobDemand], roles: Sequence[Role], steps: int,
    seed: int = 0, plan: Plan | None = None,
) -> AsyncIterator[PlannedService]:  # fmt: skip
    """A simulated service with a worker for each of ``devices``, in these roles, and a job for each of ``demands``."""
    first = demands[0]
    members, left = list[Sequence[JobDemand]](), demands
    while left:  # the policies of a job follow each other
        members.append(left[: left[0].policies])
        left = left[left[0].policies :]
    tenants = [f"tenant-{number}" for number in range(len(members))]
    environments = [f"{ENVIRONMENT}-{number}" for number in range(len(members))]
    policies = [_policies(of) for of in members]
    site = SimulatedService(
        folder,
        LongTailed(first.median_tokens, first.sigma),
        context=min(d.machine.context for d, role in zip(devices, roles, strict=True) if "rollout" in PLAYS[role]),
        seed=seed,
        tenants=tenants,
        settings={"flush_seconds": FLUSH_SECONDS},
        options=ControllerOptions(plan=plan),
    )
    await site.controller.start()
    host = site.host(
        {f"builtin:{name}": first.environment for name in environments},
        prompt_tokens=first.prompt_tokens,
        speakers={f"builtin:{name}": list(of) for name, of in zip(environments, policies, strict=True) if len(of) > 1},
    )
    await host.join()
    workers: list[FakeWorker] = []
    for device, role in zip(devices, roles, strict=True):
        kind: Literal["reserved", "preemptible"] = "preemptible" if device.machine.preemptible else "reserved"
        workers.append(site.worker(device.name, device.machine, roles=PLAYS[role], kind=kind))
    for worker in workers:
        worker.start()
    jobs = []
    for number, (tenant, of) in enumerate(zip(tenants, members, strict=True)):
        demand = of[0]
        job = modelled_job(
            environments[number], demand, number, seed, demand.staleness, demand.micro_batch,
            {"steps": steps + WARM_UP},
        )  # fmt: skip
        view, _ = await site.controller.submit(tenant, job | {"policies": policies[number]})
        jobs.append((tenant, view.id))
    try:
        yield PlannedService(site, workers, jobs)
    finally:
        for worker in workers:
            await worker.kill()
        await host.leave()
        await site.close()
