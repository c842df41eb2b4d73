"""The headline curve: N tenants at once against the same jobs one after another, with environments of some latency.

``python -m benchmarks.jobs.curve [--cells …] [--latency …] [--tenants …] [--seeds …] [--discard]``; resumable. A job is
8 prompts x 8 completions x 20 tokens, 5 steps, staleness 0. Two kinds of cells:

* *solo*: jobs alone on the service, one after another, staleness 0 and 2: what baselines and the bound are made of;
* *crowd*: N tenants with keys and environments of their own submit at the same moment; before and after them the same
  service does a job alone, since machines are not equally quick at all times.

Every cell has a service of its own with one worker process, and begins with an uncounted job of one step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.jobs.curve_figures import LATENCIES, SOLO_JOBS, STALENESS, STEPS, TENANTS, figures
from benchmarks.lib.cells import Cell, Cells
from benchmarks.lib.harness import MODEL
from benchmarks.lib.service import BEAT_SECONDS, Bench, Liked, busy, completed, job, service
from benchmarks.lib.workload import COMPLETIONS, PROMPTS, REPLY_TOKENS, stories

import rookery

KINDS = ("solo", "crowd")
SEEDS = (0, 1, 2)
"""Each is a run of every cell, with jobs of other seeds; ``--seeds 0`` is the quickest whole curve."""
SEED_STRIDE = 100
"""Tenant i of run s has seed 100·s + i, at every N and latency: it is always the same job."""
STAGES = ("queue", "generation", "environment", "waiting", "train", "commit")
"""Of a metrics row's ``seconds/…``: the first three of a mean episode, the others of the step."""


@dataclass(frozen=True)
class Tenant:
    latency: float
    """Seconds that its environment takes for a verdict."""
    seed: int
    staleness: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cells", nargs="*", choices=KINDS, default=KINDS)
    parser.add_argument("--latency", nargs="*", choices=list(LATENCIES), default=list(LATENCIES))
    parser.add_argument("--tenants", nargs="*", type=int, choices=TENANTS, default=TENANTS)
    parser.add_argument("--seeds", nargs="*", type=int, default=SEEDS)
    parser.add_argument("--discard", action="store_true", help="drop the cells that are there")
    given = parser.parse_args()
    cells = Cells(figures, {"model": MODEL, "job": [PROMPTS, COMPLETIONS, REPLY_TOKENS, STEPS]}, discard=given.discard)
    for seed in given.seeds:
        if "solo" in given.cells:
            for latency in sorted({seconds for name in given.latency for seconds in LATENCIES[name]}):
                for staleness in STALENESS:
                    cells.measure(f"solo/{latency:g}/{staleness}/{seed}", partial(solo, latency, staleness, seed))
        if "crowd" in given.cells:
            for count in given.tenants:
                for name in given.latency:
                    if count > 1:  # one alone is solo
                        cells.measure(f"crowd/{name}/{count}/{seed}", partial(crowd, name, count, seed))
    cells.tell()


def solo(latency: float, staleness: int, seed: int) -> Cell:
    """A few jobs, each alone on the service."""
    with warm_service() as bench:
        runs = [
            together(bench, [Tenant(latency, SEED_STRIDE * seed + i, staleness)], f"solo{i}") for i in range(SOLO_JOBS)
        ]
    jobs = [{**run["jobs"][0], "decode": run["decode"], "train": run["train"]} for run in runs]
    return {"latency": latency, "staleness": staleness, "seed": seed, "jobs": jobs}


def crowd(name: str, count: int, seed: int) -> Cell:
    """So many tenants at once; their latencies go round those of ``name``. ``beside``: the worker's seconds for a job
    alone, before and after."""
    latencies = LATENCIES[name]
    tenants = [Tenant(latencies[i % len(latencies)], SEED_STRIDE * seed + i) for i in range(count)]
    one = [Tenant(0.0, SEED_STRIDE * seed)]
    with warm_service() as bench:
        before, found, after = (together(bench, *who) for who in ((one, "before"), (tenants, "crowd"), (one, "after")))
    beside = [alone["decode"] + alone["train"] for alone in (before, after)]
    return {"latency": name, "tenants": count, "seed": seed, "beside": beside, **found}


@contextmanager
def warm_service() -> Iterator[Bench]:
    """A service whose worker has trained a step before."""
    with service(heartbeat_seconds=BEAT_SECONDS) as bench:
        together(bench, [Tenant(0.0, 0)], "warm", steps=1)
        yield bench


def together(bench: Bench, tenants: Sequence[Tenant], name: str, steps: int = STEPS) -> Cell:
    """Jobs of different tenants, submitted at once, to their end."""
    jobs = []
    for tenant in tenants:
        spec = job(name, steps, staleness=tenant.staleness, seed=tenant.seed)
        environment = Liked(stories(PROMPTS * steps), tenant.latency)
        jobs.append((environment, {"latency": tenant.latency, "seed": tenant.seed}, spec))
    return submit(bench, jobs, name)


def submit(bench: Bench, jobs: Sequence[tuple[rookery.Environment, Cell, dict[str, Any]]], name: str) -> Cell:
    """Jobs (environment, what to record with it, specification), each of a tenant of its own, submitted at once, to
    their end. ``makespan`` is from the first submit to the last job's end, ``decode`` and ``train`` the worker's
    seconds in slices of either meanwhile; per job, ``seconds`` from the first submit to its own end and ``compute``
    what the service put on its bill."""
    with ExitStack() as stack:
        clients = []
        for i in range(len(jobs)):
            tenant = bench.client.add_tenant(f"{name}-{i}")
            clients.append(stack.enter_context(rookery.Client(bench.url, bench.client.add_key(tenant.id).key)))
        before = busy(bench)
        began = time.time()
        running = []
        for client, (environment, _, spec) in zip(clients, jobs, strict=True):
            spec["checkpoints"] = {"keep_last": 1, "keep_best": False}  # dozens of tenants share a disk
            running.append(client.train(environment=environment, **spec))
        ended = [completed(one) for one in running]
        after = busy(bench)
        return {
            "makespan": max(view.finished for view in ended) - began,
            "decode": after[0] - before[0],
            "train": after[1] - before[1],
            "jobs": [
                {**about, "seconds": view.finished - began, **record(one)}
                for (_, about, _), view, one in zip(jobs, ended, running, strict=True)
            ],
        }


def record(one: rookery.Job) -> Cell:
    """What a job tells of itself when it has ended: rewards by step, and means over its steps."""
    rows = list(one.metrics(follow=False))
    found: Cell = {"compute": one.show().cost.seconds, "rewards": [row.reward for row in rows]}
    found |= {stage: statistics.fmean(row[f"seconds/{stage}"] for row in rows) for stage in STAGES}
    found |= {name: statistics.fmean(row[name] for row in rows) for name in ("length_mean", "staleness_mean")}
    return found


if __name__ == "__main__":
    main()
