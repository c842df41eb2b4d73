"""MARLaaS's curve in virtual time: small agentic jobs of 1 to 256 tenants on one GPU-like worker.

``python -m benchmarks.scale.tenants``; resumable. The shipped controller, a modelled worker with the cost table of one
GPU of ``gpu-8b`` (assumed, nobody measured it). A job is that of ``benchmarks.jobs.agentic``: 1 prompt x 8 episodes x 3
turns x 20 tokens per step, 5 steps; a tool takes some seconds per turn. *Saturation* is the number of tenants that fill
the worker: predicted by T/C from a job alone and the cost table, C with full batches; in the simulation the most jobs
per second of any crowd times T (Little's law).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.jobs.agentic_figures import LEAST_EFFICIENCY, PROMPTS, SATURATION_ERROR, STEPS
from benchmarks.lib.cells import Cell, Cells, table
from benchmarks.lib.harness import Result, options
from benchmarks.lib.workload import COMPLETIONS, REPLY_TOKENS

from rookery.simulation.clock import run
from rookery.simulation.fakes.service import MEMORY, MODEL, SimulatedService
from rookery.simulation.profiles import load_profile
from rookery.simulation.replay import ENVIRONMENT

TENANTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LATENCIES = (0.0, 2.0, 8.0)
"""Seconds of the tool per turn."""
TURNS, TEXT_TOKENS = 3, 20
"""``TEXT_TOKENS``: of a message of the environment."""
SEED = 1
COMMAND = "python -m benchmarks.scale.tenants"
MACHINE = load_profile("gpu-8b").spot


def crowd(latency: float, count: int, staleness: int = 2) -> Cell:
    """So many tenants, a job each, submitted at once, to the end of the last."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        return run(_crowd(Path(folder), latency, count, staleness))


async def _crowd(folder: Path, latency: float, count: int, staleness: int) -> Cell:
    tenants = [f"tenant-{number}" for number in range(count)]
    site = SimulatedService(
        folder, lambda seed, most: most, context=MACHINE.context, seed=SEED, tenants=tenants,
        settings={"suspect_seconds": 1e6, "stuck_seconds": 1e6},
    )  # fmt: skip
    controller = site.controller
    await controller.start()
    host = site.host({f"builtin:{ENVIRONMENT}": latency}, prompt_tokens=TEXT_TOKENS, turns=TURNS)
    worker = site.worker("worker", MACHINE)
    worker.start()
    await host.join()
    await asyncio.sleep(MACHINE.load + 1)
    loop = asyncio.get_running_loop()
    began, spent = loop.time(), (worker.compute.decoded, worker.compute.trained)
    jobs = [(tenant, (await controller.submit(tenant, _job(number, latency, staleness)))[0].id) for number, tenant in
            enumerate(tenants)]  # fmt: skip
    await asyncio.gather(*(controller.queries.wait(tenant, job) for tenant, job in jobs))
    makespan = loop.time() - began
    states = {(await controller.queries.show(tenant, job)).state for tenant, job in jobs}
    assert states == {"completed"}, states
    found = {
        "makespan": makespan,
        "decode": worker.compute.decoded - spent[0],
        "train": worker.compute.trained - spent[1],
        "prefilled": worker.engine.prefilled,
        "tokens": worker.engine.generated,
    }
    await worker.kill()
    await host.leave()
    await site.close()
    return found


def _job(number: int, latency: float, staleness: int) -> dict[str, Any]:
    return {
        "name": "agent",
        "base_model": MODEL,
        "environment": {"id": ENVIRONMENT, "step_timeout": 60 + 2 * latency},
        "algorithm": {"group_size": COMPLETIONS, "groups_per_step": PROMPTS, "max_staleness": staleness},
        "sampling": {"max_tokens": REPLY_TOKENS},
        "stop": {"steps": STEPS},
        "seed": number,
    }


def full_cost(alone: Cell) -> float:
    """The worker's seconds for a job whose decode steps have all rows, by the cost table."""
    decode = alone["tokens"] * MACHINE.decode_step(MACHINE.rows) / MACHINE.rows
    return float(alone["train"] + decode + alone["prefilled"] * MACHINE.prefill_token)


def figures(cells: Mapping[str, Cell]) -> Result:
    result = Result("tenants", "Small agentic jobs of 1 to 256 tenants, GPU-like worker", COMMAND, simulated=True)
    points: list[dict[str, float]] = []
    lines = []
    for latency in LATENCIES:
        solo = [cells.get(f"{latency:g}/1/{staleness}") for staleness in (0, 2)]
        if (sync := solo[0]) is None or (later := solo[1]) is None:
            continue
        curve = []
        for count in TENANTS:
            if (cell := cells.get(f"{latency:g}/{count}/2")) is None:
                continue
            makespan, compute = cell["makespan"], cell["decode"] + cell["train"]
            least = max(count * full_cost(later), later["makespan"])
            curve.append({
                "latency": latency, "tenants": count, "makespan": makespan, "bound": least,
                "efficiency": least / makespan, "busy": compute / makespan,
                "busy_gain": compute / makespan / ((sync["decode"] + sync["train"]) / sync["makespan"]),
                "saved_async": 1 - makespan / (count * later["makespan"]),
                "saved": 1 - makespan / (count * sync["makespan"]), "rate": cell["tokens"] / makespan,
            })  # fmt: skip
        points += curve
        predicted = later["makespan"] / full_cost(later)
        reached = max(point["tenants"] / point["makespan"] for point in curve) * later["makespan"]
        lines.append([latency, sync["makespan"], later["makespan"], full_cost(later), predicted, reached])
        if curve[-1]["tenants"] != TENANTS[-1]:
            continue
        where, last = f"latency {latency:g} s", curve[-1]
        within = abs(predicted / reached - 1) <= SATURATION_ERROR
        shown = f"{predicted:.1f} predicted, {reached:.1f} simulated"
        result.judge(f"{where}: saturation predicted within {SATURATION_ERROR:.0%}", shown, within)
        target = (
            f"{where}, {TENANTS[-1]} tenants: cost table with full batches, of the makespan >= {LEAST_EFFICIENCY:.0%}"
        )
        result.judge(target, f"{last['efficiency']:.0%}", last["efficiency"] >= LEAST_EFFICIENCY)
        for name, what in (("saved_async", "same staleness (2)"), ("saved", "staleness 0")):
            share = last[name]
            result.judge(
                f"{where}, {TENANTS[-1]} tenants: less time than one after another, {what}", f"{share:.0%}", share > 0
            )
    if points:
        head = ["latency, s", "tenants", "makespan, s", "bound, s", "bound / makespan", "busy", "busy over one alone",
                "time saved over one after another, same staleness", "over staleness 0", "tokens/s"]  # fmt: skip
        rows = [list(point.values()) for point in points]
        alone = ["latency, s", "alone, staleness 0, s", "alone, staleness 2, s", "C with full batches, s"]
        alone += ["saturation predicted", "simulated"]
        result.data["tables"] = [
            table("Makespan by tenants and latency (GPU-like, assumed)", head, rows),
            table("Tenants that fill the worker", alone, lines),
        ]
    result.data["points"] = points
    return result


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--discard", action="store_true", help="drop the pieces that are there")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    cells = Cells(figures, {"job": [PROMPTS, COMPLETIONS, TURNS, REPLY_TOKENS, STEPS]}, discard=given.discard)
    for latency in LATENCIES:
        cells.measure(f"{latency:g}/1/0", partial(crowd, latency, 1, 0))
    for count, latency in itertools.product(TENANTS, LATENCIES):
        cells.measure(f"{latency:g}/{count}/2", partial(crowd, latency, count))
    cells.tell()


if __name__ == "__main__":
    main()
