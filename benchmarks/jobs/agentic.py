"""Small agentic jobs whose tools make them wait: N tenants at once against the same jobs one after another.

``python -m benchmarks.jobs.agentic [--latency …] [--tenants …] [--seeds …] [--discard]``; resumable. A job is 1 prompt
x 8 episodes x 3 turns x 20 tokens per step, 5 steps; the tool takes ``latency`` seconds per turn. Cells, each with a
service of its own and one worker process, after an uncounted job:

* *solo*: jobs alone on the service, staleness 0 and 2;
* *crowd*: N tenants with keys and environments of their own submit at the same moment, staleness 2;
* *ablation*: eight tenants at a latency of 2 s without one part: each forward pass has one job's rows, all tenants
  pass a barrier between rollouts and training, staleness 0;
* *lanes* (only with ``--lanes``): crowds at latency 0, and a tenant alone at staleness 0, on a worker that takes turns
  and on one that trains beside decoding as planned.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from benchmarks.jobs.agentic_figures import (
    ABLATED_TENANTS,
    ABLATIONS,
    LANES,
    LANES_MOST,
    LANES_RUNS,
    LATENCIES,
    PROMPTS,
    SOLO_JOBS,
    STALENESS,
    STEPS,
    TENANTS,
    TOOL_SECONDS,
    figures,
)
from benchmarks.lib.cells import Cell, Cells
from benchmarks.lib.harness import MODEL, ResultFolders
from benchmarks.lib.service import BEAT_SECONDS, Bench, beside_seconds, busy, completed, job, service
from benchmarks.lib.workload import COMPLETIONS, REPLY_TOKENS, reward, stories

import rookery
from rookery.controller.rollout.rules import RolloutRules
from rookery.server.launcher import ServiceRules

SEED_STRIDE = 100
"""Tenant i of run s has seed 100·s + i, at every N and latency: it is always the same job."""
STAGES = ("queue", "generation", "environment", "waiting", "train", "commit")
"""Of a metrics row's ``seconds/…``: the first three of a mean episode, the others of the step."""
TURNS = 3
ONE_TENANT: dict[str, Any] = {
    "max_rows": COMPLETIONS,
    "rules": ServiceRules(rollouts=RolloutRules(tenant_turn_share=1.0)),
}
"""As many rows as one job's step has, taken by one tenant in a turn: passes are not shared."""


class Tool(rookery.Environment):
    """Three turns; after each reply a tool works for some seconds. ``barrier``, if given, holds the episodes of all
    tenants before their first and after their last turn, until all others are there."""

    def __init__(self, questions: list[str], seconds: float, barrier: Barrier | None = None) -> None:
        self.questions = questions
        self.seconds = seconds
        self.barrier = barrier

    def for_episode(self) -> rookery.Environment:
        return copy.copy(self)  # all episodes share the barrier

    def prompts(self, split: str) -> list[dict[str, str]]:
        return [{"question": text} for text in self.questions]

    async def reset(self, prompt: dict[str, str], seed: int) -> list[dict[str, str]]:
        self.liked = 0.0
        if self.barrier is not None:
            await self.barrier.wait()
        return [{"role": "user", "content": prompt["question"]}]

    async def step(self, reply: Any) -> rookery.Step:
        await asyncio.sleep(self.seconds)
        self.liked += reward(reply.tokens) / TURNS
        if reply.turn < TURNS - 1:
            return rookery.Step(messages=[{"role": "tool", "content": "Noted. Go on."}])
        if self.barrier is not None:
            await self.barrier.wait()
        return rookery.Step(reward=self.liked, done=True)


class Barrier:
    """Holds so many episodes, of environments in any thread, until the last of them arrives."""

    def __init__(self, episodes: int) -> None:
        self._barrier = threading.Barrier(episodes)

    async def wait(self) -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def arrive() -> None:
            self._barrier.wait()
            loop.call_soon_threadsafe(done.set_result, None)

        threading.Thread(target=arrive, daemon=True).start()  # a thread each: all of them wait at once
        await done


def solo(latency: float, staleness: int, seed: int) -> Cell:
    """A few jobs, each alone on the service."""
    with warm_service() as bench:
        runs = [agents(bench, [SEED_STRIDE * seed + i], latency, staleness, f"solo{i}") for i in range(SOLO_JOBS)]
    jobs = [{**run["jobs"][0], "decode": run["decode"], "train": run["train"]} for run in runs]
    return {"latency": latency, "staleness": staleness, "seed": seed, "jobs": jobs}


def crowd(
    latency: float,
    count: int,
    seed: int,
    staleness: int = STALENESS[-1],
    *,
    barrier: Barrier | None = None,
    **more: Any,
) -> Cell:
    """So many tenants at once."""
    seeds = [SEED_STRIDE * seed + i for i in range(count)]
    with warm_service(**more) as bench:
        before = beside_seconds(bench)
        found = agents(bench, seeds, latency, staleness, "crowd", barrier=barrier)
        found["beside"] = beside_seconds(bench) - before
    return {"latency": latency, "tenants": count, "seed": seed, **found}


def ablation(arm: str, seed: int) -> Cell:
    """A crowd without one part."""
    count = ABLATED_TENANTS
    if arm == "one tenant per pass":
        return crowd(TOOL_SECONDS, count, seed, **ONE_TENANT)
    # At a barrier all tenants are at the same step: groups in advance would wait for ever.
    barrier = Barrier(count * COMPLETIONS) if arm == "global barrier" else None
    return crowd(TOOL_SECONDS, count, seed, staleness=0, barrier=barrier)


@contextmanager
def warm_service(**more: Any) -> Iterator[Bench]:
    """A service whose worker has trained a step before."""
    with service(heartbeat_seconds=BEAT_SECONDS, **more) as bench:
        agents(bench, [0], 0.0, 0, "warm", steps=1)
        yield bench


def agents(
    bench: Bench,
    seeds: list[int],
    latency: float,
    staleness: int,
    name: str,
    *,
    steps: int = STEPS,
    barrier: Barrier | None = None,
) -> Cell:
    """A tenant for each of ``seeds``, all at once; :func:`submit` has the figures."""
    questions = stories(PROMPTS * steps)
    specs = []
    for seed in seeds:
        spec = job(name, steps, staleness=staleness, seed=seed, groups_per_step=PROMPTS)
        specs.append((Tool(questions, latency, barrier), {"latency": latency, "seed": seed}, spec))
    return submit(bench, specs, name)


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
    """The results of an ended job: rewards by step, and means over its steps."""
    rows = list(one.metrics(follow=False))
    found: Cell = {"compute": one.show().cost.seconds, "rewards": [row.reward for row in rows]}
    found |= {stage: statistics.fmean(row[f"seconds/{stage}"] for row in rows) for stage in STAGES}
    found |= {name: statistics.fmean(row[name] for row in rows) for name in ("length_mean", "staleness_mean")}
    return found


MEASURES: Mapping[str, Callable[..., Cell]] = {"solo": solo, "crowd": crowd, "ablation": ablation}
"""Measures a cell of each kind."""


def main(
    arguments: Sequence[str] | None = None,
    measures: Mapping[str, Callable[..., Cell]] = MEASURES,
    folders: ResultFolders | None = None,
) -> None:
    """Measure the cells that are missing in ``folders``, or in the repository's results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--latency", nargs="*", type=float, choices=LATENCIES, default=LATENCIES)
    parser.add_argument("--tenants", nargs="*", type=int, choices=TENANTS, default=TENANTS)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0], help="each is a run of all cells (default: 0)")
    parser.add_argument("--lanes", action="store_true", help="also turns and lanes at latency 0")
    parser.add_argument("--discard", action="store_true", help="drop the cells that are there")
    given = parser.parse_args(arguments)
    plan = {"model": MODEL, "job": [PROMPTS, COMPLETIONS, TURNS, REPLY_TOKENS, STEPS]}
    cells = Cells(figures, plan, discard=given.discard, folders=folders)
    for seed in given.seeds:
        for latency in given.latency:
            for staleness in STALENESS:
                run = partial(measures["solo"], latency, staleness, seed)
                cells.measure(f"solo/{latency:g}/{staleness}/{seed}", run)
            for count in given.tenants:
                cells.measure(f"crowd/{latency:g}/{count}/{seed}", partial(measures["crowd"], latency, count, seed))
        for count in LANES_MOST if given.lanes else ():
            runs, staleness = LANES_RUNS.get(count, 1), STALENESS[-1] if count > 1 else 0
            for number in range(runs * seed, runs * (seed + 1)):
                for lanes in LANES if number % 2 else reversed(LANES):
                    run = partial(measures["crowd"], 0.0, count, seed, staleness, lanes=lanes)
                    cells.measure(f"lanes/{lanes}/{count}/{number}", run)
        if TOOL_SECONDS in given.latency and ABLATED_TENANTS in given.tenants:
            for arm in ABLATIONS:
                cells.measure(f"ablation/{arm}/{seed}", partial(measures["ablation"], arm, seed))
    cells.tell()


if __name__ == "__main__":
    main()
