"""Jobs side by side in virtual time: :mod:`rookery.simulation.fakes.service` with one worker whose replies all have
their full length, so that equal requests are equal work."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.replies import full_length

from rookery import protocol
from rookery.aio import cancel_all
from rookery.controller.rollout.request import SamplingRequest
from rookery.simulation.clock import EPOCH, run
from rookery.simulation.fakes.service import MEMORY, MODEL, SimulatedService
from rookery.spec.machine import Machine

# What a two-core machine takes for the model of 135M parameters, in seconds.
DECODE_STEP, DECODE_ROW = 0.012, 0.0008
"""A decode step, and what each of its rows adds."""
TRAIN_TOKEN, TRAIN_SLICE, OPTIMIZER = 0.001, 0.05, 0.05
"""A token of a training batch; how finely training goes round the tenants (a worker packs several into one slice); an
optimizer step, or the making of an adapter."""

CONTEXT = 512
"""Tokens of the longest sequence."""


def machine(rows: int) -> Machine:
    """Nothing but decoding and training takes time."""
    return Machine(
        rows=rows,
        context=CONTEXT,
        decode=[(n, DECODE_STEP + DECODE_ROW * n) for n in (1, 64)],
        prefill_token=0,
        prefill_slice=512,
        train_token=TRAIN_TOKEN,
        train_slice=round(TRAIN_SLICE / TRAIN_TOKEN),
        optimizer=OPTIMIZER,
        adapter_bytes=0,
        state_bytes=0,
        download=1e12,
        upload=1e12,
        load=0,
        latency=0,
    )


def by_number(episode: str, turn: int) -> float:
    """The episode's number in its group: no group is without variance, so all batches are equal work."""
    return float(episode.rpartition("-")[2])


@dataclass
class Played:
    """The events, by job name."""

    commits: dict[str, list[float]]
    """Seconds at which its steps were committed."""
    computed: dict[str, float]
    """Seconds of the worker's time that went into it."""
    episodes: dict[str, list[list[Any]]]
    """The samples of its episodes, newest first: (reward, tokens)."""
    metrics: dict[str, list[dict[str, Any]]]
    """Its rows."""

    def step_seconds(self, job: str, since: float = 0.0) -> float:
        """Mean time between commits later than ``since``."""
        times = [time for time in self.commits[job] if time >= since]
        return (times[-1] - times[0]) / (len(times) - 1)

    def widest_gap(self, since: float = 0.0) -> int:
        """The most steps by which one job was ahead of another at any moment, counted from ``since`` on."""
        counts, widest = dict.fromkeys(self.commits, 0), 0
        for _, job in sorted((time, job) for job, times in self.commits.items() for time in times if time >= since):
            counts[job] += 1
            widest = max(widest, max(counts.values()) - min(counts.values()))
        return widest


def generation(number: int) -> protocol.Generate:
    """A sample of the base model, as long as those of the jobs."""
    return protocol.Generate(
        request=f"flood-{number}", adapter=None, prompt=[1, 2, 3], shared_prefix=0, max_tokens=16, temperature=1.0,
        seed=number, stop_tokens=[],
    )  # fmt: skip


def play(
    jobs: list[tuple[str, dict[str, Any]]], *, seconds: float, environments: Mapping[str, float], rows: int = 64,
    turns: int = 1, flood: tuple[str, int] = ("", 0),
) -> Played:  # fmt: skip
    """``jobs`` (tenant, job) run side by side on one worker for so many virtual seconds; ``environments`` says how long
    the ``reset`` and ``step`` of each take. A tenant may send a ``flood`` of so many generations at the start. Only the
    first job needs to run at the end."""

    async def main(folder: str) -> Played:
        flooder, count = flood
        tenants = sorted({flooder, *(tenant for tenant, _ in jobs)} - {""})
        every_step = {"flush_seconds": 0.001}
        site = SimulatedService(
            Path(folder), full_length, context=CONTEXT, seed=1, tenants=tenants, settings=every_step
        )
        controller = site.controller
        await controller.start()
        worker = site.worker("worker", machine(rows))
        worker.start()
        takes = {f"builtin:{name}": taken for name, taken in environments.items()}
        host = site.host(takes, prompt_tokens=8, turns=turns, reward=by_number)
        await host.join()
        views = [(tenant, (await controller.submit(tenant, job))[0]) for tenant, job in jobs]
        began = asyncio.get_running_loop().time()
        requests = [
            asyncio.create_task(
                controller.context.rooms.rollouts.sample(SamplingRequest(flooder, f"flood-{n}", MODEL, generation(n)))
            )
            for n in range(count)
        ]
        await asyncio.sleep(seconds)
        commits, computed, episodes, metrics = {}, {}, {}, {}
        for tenant, view in views:
            metrics[view.name] = steps = list(await controller.queries.metrics(tenant, view.id))
            commits[view.name] = [row["time"] - EPOCH - began for row in steps]
            now = await controller.queries.show(tenant, view.id)
            assert now.state == "running" or view is not views[0][1], (view.name, now.state, now.reason)
            computed[view.name] = worker.compute.by_policy[now.policies[0].id]
            ended = await controller.queries.episodes.trajectories(tenant, view.id, 1000)
            episodes[view.name] = [[row.reward, row.trajectories] for row in ended if row.state == "done"]
        await cancel_all(*requests)
        await worker.kill()
        await host.leave()
        await site.close()
        return Played(commits, computed, episodes, metrics)

    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        return run(main(folder))
