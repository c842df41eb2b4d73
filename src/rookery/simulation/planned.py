"""A plan in virtual time: the shipped controller with the plan's workers, as fast as the fleet file says."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from rookery.scheduling.plan.predict import Demand, Device, Role
from rookery.simulation.clock import run
from rookery.simulation.fakes.service import MEMORY, MODEL, SimulatedService
from rookery.simulation.fakes.text import LongTailed

ENVIRONMENT = "planned"

FLUSH_SECONDS = 2.0
"""Far below a round, and far above the default: each flush is an event to simulate."""

WARM_UP = 3
"""Steps of each job that are not counted: the first ones start on idle machines and without a known length."""


def simulate_plan(
    devices: Sequence[Device], demands: Sequence[Demand], roles: Sequence[Role], rows: Sequence[int], *,
    steps: int = 6, seed: int = 0,
) -> float:  # fmt: skip
    """Simulated seconds of a round, in which every job does one optimizer step: the mean over the rounds after
    :data:`WARM_UP` of one run, of the slowest job. All jobs have the reply lengths of the first one."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        return run(_play(devices, demands, roles, rows, steps, seed, Path(folder)))


async def _play(
    devices: Sequence[Device], demands: Sequence[Demand], roles: Sequence[Role], rows: Sequence[int], steps: int,
    seed: int, folder: Path,
) -> float:  # fmt: skip
    first = demands[0]
    tenants = [f"tenant-{number}" for number in range(len(demands))]
    site = SimulatedService(
        folder,
        LongTailed(first.median_tokens, first.sigma),
        context=min(device.machine.context for device in devices),
        seed=seed,
        tenants=tenants,
        settings={"flush_seconds": FLUSH_SECONDS},
    )
    await site.controller.start()
    host = site.host({f"builtin:{ENVIRONMENT}": first.environment}, prompt_tokens=first.prompt_tokens)
    await host.join()
    workers = []
    for device, role, most in zip(devices, roles, rows, strict=True):
        if role == "off":
            continue
        machine = device.machine.model_copy(update={"rows": most or device.machine.rows})
        plays: list[Literal["rollout", "train"]] = ["rollout", "train"] if role == "both" else [role]
        kind: Literal["reserved", "preemptible"] = "preemptible" if device.machine.preemptible else "reserved"
        workers.append(site.worker(device.name, machine, roles=plays, kind=kind))
    for worker in workers:
        worker.start()
    jobs = []
    for number, (tenant, demand) in enumerate(zip(tenants, demands, strict=True)):
        view, _ = await site.controller.submit(tenant, _job(demand, number, steps, seed))
        jobs.append((tenant, view.id))
    await asyncio.gather(*(site.controller.queries.wait(tenant, job) for tenant, job in jobs))
    times: list[list[float]] = []
    for tenant, job in jobs:
        view = await site.controller.queries.show(tenant, job)
        if view.state != "completed":
            raise RuntimeError(f"job {view.name} is {view.state}: {view.reason}")
        times.append([row["time"] for row in await site.controller.queries.metrics(tenant, job)])
    for worker in workers:
        await worker.kill()
    await host.leave()
    await site.close()
    return max((of[-1] - of[WARM_UP - 1]) / steps for of in times)


def _job(demand: Demand, number: int, steps: int, seed: int) -> dict[str, Any]:
    return {
        "name": f"job-{number}",
        "base_model": MODEL,
        "environment": {"id": ENVIRONMENT, "step_timeout": max(60.0, 2 * demand.environment)},
        "algorithm": {
            "group_size": demand.group_size,
            "groups_per_step": demand.groups,
            "max_staleness": demand.staleness,
            "micro_batch": demand.micro_batch,
        },
        "policies": {"policy": {"trainers": demand.trainers}},
        "sampling": {"max_tokens": demand.max_tokens},
        "stop": {"steps": steps + WARM_UP},
        "seed": seed * 1000 + number,
    }
