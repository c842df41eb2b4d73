"""Cells such as the benchmarks' scripts store, made up for tests."""

from __future__ import annotations

from typing import Any

from benchmarks.jobs import agentic_figures
from benchmarks.jobs.agentic_figures import STEPS


def rewards(seed: int) -> list[float]:
    return [0.1 + 0.01 * seed + 0.001 * step for step in range(STEPS)]


def agentic_cells(seeds: tuple[int, ...] = (0, 1, 2), idle: float = 0.1) -> dict[str, Any]:
    """A job decodes 3 s and trains 1 s; it waits 15 tool calls at staleness 0, a third of that at staleness 2."""
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
