"""Cells such as the benchmarks' scripts store, made up for tests."""

from __future__ import annotations

from typing import Any

from benchmarks.jobs import agentic_figures
from benchmarks.jobs.asynchrony_figures import (
    CORES,
    PLACES,
    ROWS,
    SAMPLES,
    STALENESS,
    UNITS,
    choices,
    costs_key,
    job_key,
    phases,
)
from benchmarks.jobs.asynchrony_theory import apart, shared
from benchmarks.jobs.curve_figures import LATENCIES, SOLO_JOBS, STEPS, TENANTS

SOLO_SECONDS, SOLO_COMPUTE = 15.0, 12.0
CROWD_COMPUTE = 13.0
"""Of a job in a crowd: more than alone."""


def solo_job(latency: float, staleness: int, seed: int) -> dict[str, Any]:
    """Without lag every second of latency is waited for in every step."""
    waited = STEPS * latency if staleness == 0 else 0.0
    return {
        "latency": latency, "seed": seed, "seconds": SOLO_SECONDS + waited, "decode": SOLO_COMPUTE / 3,
        "train": 2 * SOLO_COMPUTE / 3, "rewards": rewards(seed), "queue": 0.1,
    }  # fmt: skip


def rewards(seed: int) -> list[float]:
    return [0.1 + 0.01 * seed + 0.001 * step for step in range(STEPS)]


def curve_cells(seeds: tuple[int, ...] = (0, 1, 2), idle: float = 0.1) -> dict[str, Any]:
    """Of a worker that wastes the share ``idle`` of what the bound asks for."""
    cells: dict[str, Any] = {}
    for seed in seeds:
        for latency in (0.0, 1.0, 4.0):
            for staleness in STALENESS:
                jobs = [solo_job(latency, staleness, 100 * seed + i) for i in range(SOLO_JOBS)]
                cells[f"solo/{latency:g}/{staleness}/{seed}"] = {
                    "latency": latency, "staleness": staleness, "seed": seed, "jobs": jobs,
                }  # fmt: skip
        for name, latencies in LATENCIES.items():
            for count in TENANTS[1:]:
                mine = [latencies[i % len(latencies)] for i in range(count)]
                longest = max(SOLO_SECONDS + STEPS * latency for latency in mine)
                cells[f"crowd/{name}/{count}/{seed}"] = {
                    "latency": name, "tenants": count, "seed": seed,
                    "makespan": max(count * SOLO_COMPUTE, longest) / (1 - idle),
                    "beside": [SOLO_COMPUTE - 1, SOLO_COMPUTE + 1],
                    "decode": count * CROWD_COMPUTE / 3, "train": 2 * count * CROWD_COMPUTE / 3,
                    "jobs": [solo_job(latency, 0, 100 * seed + i) for i, latency in enumerate(mine)],
                }  # fmt: skip
    return cells


def agentic_cells(seeds: tuple[int, ...] = (0, 1, 2), idle: float = 0.1) -> dict[str, Any]:
    """A job computes 4 s; it waits 15 tool calls at staleness 0 and a third of that at staleness 2."""
    cells: dict[str, Any] = {}
    for seed in seeds:
        for latency in agentic_figures.LATENCIES:
            waits = {0: 15 * latency, 2: 5 * latency}
            for staleness, waited in waits.items():
                job = {"decode": 3.0, "train": 1.0, "seconds": 4 + waited, "seed": 100 * seed, "rewards": rewards(seed)}
                about = {"latency": latency, "staleness": staleness, "seed": seed}
                cells[f"solo/{latency:g}/{staleness}/{seed}"] = {**about, "jobs": [job]}
            for count in agentic_figures.TENANTS:
                makespan = max(4.0 * count, 4 + waits[2]) / (1 - idle)
                job = {"seconds": makespan, "rewards": rewards(seed), "length_mean": 60.0}
                jobs = [{"seed": 100 * seed + i, **job} for i in range(count)]
                cells[f"crowd/{latency:g}/{count}/{seed}"] = {
                    "latency": latency, "tenants": count, "seed": seed, "makespan": makespan,
                    "decode": 3.0 * count, "train": 1.0 * count, "jobs": jobs,
                }  # fmt: skip
        for arm in agentic_figures.ABLATIONS:
            cells[f"ablation/{arm}/{seed}"] = {"seed": seed, "makespan": 200.0, "jobs": []}
    return cells


def lag_run(loss: str, lag: int, seed: int, *means: float, state: str = "completed") -> dict[str, Any]:
    """A run whose held-out rewards were ``means``, four steps apart."""
    count = 4 * len(means)
    steps = [{"step": step + 1, "reward": 0.5, "staleness_mean": float(min(step, lag))} for step in range(count)]
    return {
        "loss": loss, "lag": lag, "seed": seed, "state": state, "reason": "", "skipped": 0, "dropped": 0,
        "steps": steps,
        "evaluations": [{"step": 4 * i, "mean": mean, "error": 0.01, "prompts": 64} for i, mean in enumerate(means)],
    }  # fmt: skip


def asynchrony_cells() -> dict[str, Any]:
    """Generation falls with the rows, training hardly with the units; one core does half of what two do; every job is
    as its formula has it."""
    cells: dict[str, Any] = {}
    for cores in CORES:
        for repeat in range(3):
            cells[costs_key(cores, repeat)] = {
                "cores": cores,
                "generation": {
                    str(n): {"seconds": (1.0 + 8.0 / n) * 2 / cores, "bytes": n * 1.5e6} for n in ROWS
                },
                "training": {
                    str(n): {"seconds": (2.0 + 0.2 / n) * 2 / cores, "peak": 9e8 + n * 1e8} for n in UNITS
                },
            }  # fmt: skip
    for place in PLACES:
        chosen = choices(cells, place)
        both = phases(cells, place.cores)
        assert both is not None
        generation, training = SAMPLES * both[0].seconds[chosen.generation], SAMPLES * both[1].seconds[chosen.training]
        predict = shared if place.layout == "shared" else apart
        for lag in STALENESS:
            for repeat in range(3):
                cells[job_key(place, lag, repeat)] = {
                    "place": place.key, "staleness": lag, "rows": chosen.generation, "units": chosen.training // 8,
                    "length_mean": 20.0, "decode": generation, "train": training,
                    "step": predict(generation, training, 0.25 + place.latency, lag) * (1 + 0.001 * repeat),
                }  # fmt: skip
    return cells
