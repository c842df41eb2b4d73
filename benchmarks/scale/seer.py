"""Seer's division and context-aware order in virtual time: the shipped scheduler with modelled workers.

``python -m benchmarks.scale.seer``; resumable. A synchronous step of 64 groups x 8 on 8 workers with eight
rows each and memory for about twelve texts; a third curve has twice the rows in the same memory. Lengths are
log-normal, correlated within a group. Arms: whole groups (each at one worker, as in
veRL), requests (placed one by one), divided (chunks move by ``scheduling.balancing``), context (with
``scheduling.rollout_order``), oracle (longest first, by true lengths). Every arm of a seed has the same lengths. Two
curves of a decode step: like a GPU's (assumed) and this machine's (of ``serving_simulation``).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import statistics
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.lib.cells import Cell, Cells, table
from benchmarks.lib.harness import Result, options
from benchmarks.lib.intervals import bootstrap
from benchmarks.scale.serving_simulation import DECODE, PREFILL_TOKEN

from rookery import protocol
from rookery.aio import BackgroundTasks
from rookery.controller.fleet.events import (
    AdaptersChanged,
    HeartbeatReceived,
    MessageReceived,
    WorkerDraining,
    WorkerEvent,
    WorkerLoaded,
    WorkerReady,
    WorkerSuspect,
)
from rookery.controller.fleet.fleet import Fleet
from rookery.controller.fleet.worker import Worker
from rookery.controller.rollout import placement
from rookery.controller.rollout.placement import Migration, WorkerPool
from rookery.controller.rollout.request import InflightRequest, SamplingRequest
from rookery.controller.rollout.rules import RolloutRules
from rookery.controller.rollout.scheduler import RolloutScheduler
from rookery.controller.weights.store import WeightStore
from rookery.controller.weights.tickets import Tickets
from rookery.scheduling.divided_rollout import DecodingWorker
from rookery.scheduling.rollout_order import RolloutOrder
from rookery.scheduling.speculation import StepCosts, draft_budget
from rookery.settings import Settings
from rookery.simulation.clock import InlineWriter, VirtualClock, run
from rookery.simulation.fakes.connection import connection_pair
from rookery.simulation.fakes.service import MEMORY, MODEL
from rookery.simulation.fakes.worker import FakeWorker, worker_hello
from rookery.spec.machine import Machine
from rookery.storage.artifacts import Artifacts

GROUPS, SIZE, WORKERS, CACHE = 64, 8, 8, 4096
PROMPT, MEDIAN, LIMIT, CHUNK = 64, 200, 1024, 64
"""Tokens."""
SEEDS = 20
CHUNKS = (16, 64, 256, 1024, 4096)
SIGMAS = (0.5, 1.5)
ARMS = ("whole groups", "requests", "divided", "context", "oracle")
GPU = ([(1, 0.0085), (16, 0.0095), (48, 0.0115)], 4e-5)
CURVES = {
    "GPU-like": (*GPU, 8),
    "this machine": (sorted(DECODE.items()), PREFILL_TOKEN, 8),
    "GPU-like, short of memory": (*GPU, 16),
}
"""Seconds of a decode step by rows, and of a prompt token; rows of a worker."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
GAMMAS = (0, 1, 2, 4, 8)
ALPHAS = (0.2, 0.5, 0.8)
COMMAND = "python -m benchmarks.scale.seer"


@dataclass(frozen=True)
class Load:
    sigma: float = 1.0
    rho: float = 0.9
    seed: int = 0
    wrong: bool = False
    """The probe of the first group ends at once, its siblings are as long as may be."""

    def lengths(self) -> list[int]:
        """Of each member of each group, in turn."""
        source, found = random.Random(f"{self.seed} {self.sigma} {self.rho}"), []
        for group in range(GROUPS):
            common = source.gauss(0, 1)
            for member in range(SIZE):
                z = math.sqrt(self.rho) * common + math.sqrt(1 - self.rho) * source.gauss(0, 1)
                length = min(LIMIT, max(1, round(MEDIAN * math.exp(self.sigma * z))))
                found.append((LIMIT if member else 2) if self.wrong and not group else length)
        return found


class OneWorkerPerGroup(WorkerPool):
    """All members of a group are at the worker of its first, and stay there."""

    homes: dict[str, Worker]

    def choose(self, inflight: InflightRequest, reserved: bool, waiting: Collection[str]) -> Worker | None:
        found = super().choose(inflight, reserved, waiting)
        return self.homes.setdefault(inflight.request.generate.group, found) if found is not None else None

    def find_migration(self, model: str) -> Migration | None:
        return None


class LongestFirst(RolloutOrder[InflightRequest]):
    lengths: list[int]

    def next(self) -> InflightRequest:
        return next(iter(self._first), None) or max(self._others, key=lambda one: self.lengths[_number(one)])


def _number(inflight: InflightRequest) -> int:
    return inflight.request.generate.seed


@contextmanager
def patched(where: Any, name: str, value: Any) -> Iterator[None]:
    shipped = getattr(where, name)
    setattr(where, name, value)
    try:
        yield
    finally:
        setattr(where, name, shipped)


def always(source: DecodingWorker, target: DecodingWorker, tokens: int, left: int) -> bool:
    """A chunk goes to the emptier worker, whatever its prefill costs."""
    return target.free > 0 and not target.pending and source.executing > target.executing + 1


def simulate(arm: str, curve: str, load: Load, chunk: int = CHUNK) -> Cell:
    """A step, until its last text ends."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        return run(_step(arm, curve, load, chunk, Path(folder)))


async def _step(arm: str, curve: str, load: Load, chunk: int, folder: Path) -> Cell:
    decode, prefill, rows = CURVES[curve]
    machine = Machine(
        rows=rows, cache_tokens=CACHE, context=PROMPT + LIMIT, decode=decode, prefill_token=prefill, prefill_slice=512,
        train_token=0.0, train_slice=512, optimizer=0.0, adapter_bytes=0, state_bytes=0, download=1e9, upload=1e9,
        load=0.0, latency=0.0,
    )  # fmt: skip
    lengths, step = load.lengths(), machine.decode_step(rows)
    settings = Settings.load(
        {}, data=folder, cache=folder, flush_seconds=16 * step, heartbeat_seconds=32 * step, suspect_seconds=1e6,
        stuck_seconds=1e6, request_timeout_seconds=1e6,
    )  # fmt: skip
    rules = RolloutRules(
        rollout_chunk_tokens=0 if arm in ("whole groups", "requests") else chunk,
        context_order=arm == "context",
        dispatch_ahead=10**6 if arm == "whole groups" else 0,
    )
    clock = VirtualClock()
    tickets = Tickets(Artifacts(folder / "artifacts"), clock, 600)

    def on_event(event: WorkerEvent) -> None:
        match event:
            case MessageReceived(message=protocol.Output() as output):
                rollouts.on_output(event.worker, output)
            case HeartbeatReceived():
                rollouts.on_heartbeat(event.worker, event.beat)
            case WorkerLoaded():
                fleet.admit(event.worker)
            case WorkerReady() | AdaptersChanged():
                rollouts.on_worker_changed(event.worker)
            case WorkerSuspect() | WorkerDraining():
                rollouts.on_worker_lost(event.worker)

    fleet = Fleet(settings, clock, on_event)
    weights = WeightStore(fleet, tickets.artifacts, InlineWriter(), clock)
    rollouts, tasks = RolloutScheduler(fleet, weights, settings, clock, rules=rules), BackgroundTasks()
    if arm == "whole groups":
        rollouts.pool = OneWorkerPerGroup(rules, clock, {})
        rollouts.pool.homes = {}
    if arm == "oracle":
        order = rollouts.queues.orders["job"] = LongestFirst()
        order.lengths = lengths
        rollouts.queues.remaining = lambda one, least: lengths[_number(one)] - len(one.result.tokens)  # type: ignore[method-assign,assignment]

    def dial() -> Any:
        ours, theirs = connection_pair()
        tasks.start(fleet.serve(theirs))
        return ours

    def length(seed: int, most: int) -> int:
        return lengths[seed]

    workers = [
        FakeWorker(dial, tickets, worker_hello(machine, f"w{n}", MODEL), machine, length) for n in range(WORKERS)
    ]
    for worker in workers:
        worker.start()
    await asyncio.sleep(step)
    ends, begun = [0.0] * len(lengths), clock.monotonic()

    async def sample(number: int) -> tuple[float, list[int]]:
        generate = protocol.Generate(
            request=f"job-{number}", adapter=None, prompt=[number // SIZE] * PROMPT, shared_prefix=PROMPT,
            max_tokens=LIMIT, temperature=1.0, seed=number, stop_tokens=[], group=f"g{number // SIZE}",
        )  # fmt: skip
        result = await rollouts.sample(SamplingRequest("tenant", "job", MODEL, generate, synchronous=True))
        ends[number] = clock.monotonic() - begun
        return result.queue_seconds, result.tokens

    results = await asyncio.gather(*map(sample, range(len(lengths))))
    tokens = sum(lengths)
    assert [len(text) for _, text in results] == lengths
    found = {
        "makespan": max(ends),
        "tail": max(ends) - sorted(ends)[int(0.9 * len(ends))],
        "longest_wait": max(seconds for seconds, _ in results),
        "moves": dict(rollouts.requeues),
        "preempted": sum(worker.engine.preempted for worker in workers),
        "prefilled": sum(worker.engine.prefilled for worker in workers) / tokens,
        "regenerated": sum(worker.engine.generated for worker in workers) - tokens,
        "digest": hash(tuple(tuple(text) for _, text in results)),
        "active": bool(rollouts.queues.active_orders()),
    }
    for worker in workers:
        await worker.kill()
    await tasks.cancel()
    return found


def cell(arm: str, curve: str, chunk: int = CHUNK, **load: Any) -> Cell:
    """All seeds."""
    with patched(placement, "moves", always if arm == "always" else placement.moves):
        return {"seeds": [simulate(arm, curve, Load(**load, seed=seed), chunk) for seed in range(SEEDS)]}


def plan() -> dict[str, Callable[[], Cell]]:
    work: dict[str, Callable[[], Cell]] = {}
    for curve, arm in itertools.product(CURVES, ARMS):
        work[f"ladder/{curve}/{arm}"] = partial(cell, arm, curve)
    for arm in ("divided", "context"):
        work[f"null/rho 0/{arm}"] = partial(cell, arm, "GPU-like", rho=0.0)
        work[f"starvation/{arm}"] = partial(cell, arm, "GPU-like", wrong=True)
    for arm in ("requests", "divided", "context", "oracle"):
        work[f"null/sigma 0/{arm}"] = partial(cell, arm, "GPU-like", sigma=0.0)
    for sigma, arm in itertools.product(SIGMAS, ("whole groups", "divided", "context", "oracle")):
        work[f"sigma/{sigma:g}/{arm}"] = partial(cell, arm, "GPU-like", sigma=sigma)
    for curve, chunk, arm in itertools.product(list(CURVES)[:2], CHUNKS, ("divided", "always")):
        work[f"chunks/{curve}/{chunk}/{arm}"] = partial(cell, arm, curve, chunk)
    return work


# --- figures ----------------------------------------------------------------------------------------------------------


def this_machine(positions: int) -> float:
    """Seconds of a decode step, in proportion beyond the largest that was measured."""
    most = max(DECODE)
    return float(np.interp(positions, list(DECODE), list(DECODE.values()))) * max(1.0, positions / most)


def gpu_like(positions: int) -> float:
    """Milliseconds: flat until about two hundred positions."""
    return 20.0 + 0.1 * max(0, positions - 200)


def drafts() -> list[list[Any]]:
    """By curve and rows: the least tokens per second over the best fixed length's, of the budget and of each length."""
    found: list[list[Any]] = []
    for seconds, rows in itertools.product((gpu_like, this_machine), BATCHES):
        least, costs = [9.0] * (1 + len(GAMMAS)), StepCosts()
        for positions in range(rows, 9 * rows + 1, max(1, rows // 4)):
            costs.observe(rows, positions, seconds(positions))
        for alpha in ALPHAS:
            along = [alpha ** (k + 1) for k in range(max(GAMMAS))]
            ways = [draft_budget([along] * rows, costs), *([gamma] * rows for gamma in GAMMAS)]
            speeds = [(rows + sum(sum(along[:n]) for n in way)) / seconds(rows + sum(way)) for way in ways]
            least = [min(old, speed / max(speeds[1:])) for old, speed in zip(least, speeds, strict=True)]
        found.append([seconds.__name__, rows, *least])
    return found


class Ratios:
    """Ratios of cells, seed by seed."""

    def __init__(self, cells: Mapping[str, Cell]) -> None:
        self.cells = cells

    def all(self, key: str, name: str) -> list[float]:
        return [float(seed[name]) for seed in self.cells[key]["seeds"]]

    def median(self, key: str, name: str) -> float:
        return statistics.median(self.all(key, name))

    def of(self, first: str, second: str, name: str = "makespan") -> tuple[float, float, float]:
        """Median and 95% interval of first over second."""
        pairs = zip(self.all(first, name), self.all(second, name), strict=True)
        return bootstrap([a / b if b else 1.0 for a, b in pairs])

    def closed(self, prefix: str, name: str) -> float:
        """The share of the gap between the medians of divided and oracle that context closes."""
        divided, context, oracle = (self.median(prefix + arm, name) for arm in ("divided", "context", "oracle"))
        return (divided - context) / (divided - oracle) if divided > oracle else 1.0


def shown(interval: tuple[float, float, float]) -> str:
    return "{:.3f} ({:.3f} to {:.3f})".format(*interval)


def figures(cells: Mapping[str, Cell]) -> Result:
    result = Result("seer", "Division and context-aware order of a synchronous step", COMMAND, simulated=True)
    ratios, tables = Ratios(cells), result.data.setdefault("tables", [])
    for curve in CURVES:
        if all(f"ladder/{curve}/{arm}" in cells for arm in ARMS):
            _ladder(result, ratios, curve)
    for name, first, second, within in (
        ("rho 0: context against divided", "null/rho 0/context", "null/rho 0/divided", 0.02),
        ("sigma 0: context against requests", "null/sigma 0/context", "null/sigma 0/requests", 0.02),
        ("sigma 0: divided against requests", "null/sigma 0/divided", "null/sigma 0/requests", 0.02),
        ("one group of wrong estimate: context against divided", "starvation/context", "starvation/divided", 0.1),
    ):
        if first in cells and second in cells:
            ratio, active = ratios.of(first, second), sum(seed["active"] for seed in cells[first]["seeds"])
            waits = [f"{ratios.median(key, 'longest_wait'):.1f}" for key in (first, second)]
            why = f"longest wait {waits[0]} s against {waits[1]} s"
            why += f"; order active at the end in {active} of {SEEDS}" if first.endswith("context") else ""
            result.judge(f"{name}: makespan <= {1 + within:.2f}", shown(ratio), ratio[2] <= 1 + within, why)
    lines: list[list[Any]] = []
    for sigma in SIGMAS:
        keys = [f"sigma/{sigma:g}/{arm}" for arm in ("divided", "context", "oracle")]
        if (base := f"sigma/{sigma:g}/whole groups") in cells and all(key in cells for key in keys):
            lines.append([sigma, *(shown(ratios.of(base, key)) for key in keys)])
    if lines:
        head = ["sigma", *(f"{arm}: throughput / whole groups" for arm in ("divided", "context", "oracle"))]
        tables.append(table("Other spreads of lengths, GPU-like", head, lines))
    lines = []
    for curve, chunk in itertools.product(CURVES, CHUNKS):
        keys, base = [f"chunks/{curve}/{chunk}/{arm}" for arm in ("divided", "always")], f"ladder/{curve}/requests"
        if all(key in cells for key in (*keys, base)):
            columns = [(shown(ratios.of(base, key)), ratios.median(key, "prefilled")) for key in keys]
            lines.append([curve, chunk, *itertools.chain(*columns)])
            if chunk == CHUNKS[0]:
                (throughput, prefilled), undivided = columns[1], ratios.median(base, "prefilled")
                cost = f"{throughput} x, with {prefilled / undivided:.2f} x the prefilled tokens"
                gains = ratios.of(base, keys[1])[0] > 1.01
                result.judge(f"{curve}: moving every chunk of {chunk} tokens, of not moving them", cost, gains)
    if lines:
        head = [f"{arm}: {what}" for arm in ("by cost", "always") for what in ("throughput / undivided", "prefilled")]
        title = "Chunk sizes without a pool of KV caches; prefilled tokens over sampled ones"
        tables.append(table(title, ["curve", "chunk", *head], lines))
    if lines:
        result.notes.append(
            "Placing requests one by one gives nearly all of division's gain: no worker reads another's cache, so"
            " a move costs a prefill, and few chunks are worth one. The order takes the tail away."
        )
    ways = drafts()
    title = "Draft budget: the least tokens/s over the best fixed length's, at acceptances 0.2, 0.5, 0.8"
    tables.append(table(title, ["curve", "rows", "budget", *(f"always {gamma}" for gamma in GAMMAS)], ways))
    least = min(line[2] for line in ways)
    result.judge("draft budget >= 0.97 of the best fixed length at 1 to 128 rows", f"{least:.2f}", least >= 0.97)
    fixed = max(min(line[3 + i] for line in ways if line[0] == gpu_like.__name__) for i in range(1, len(GAMMAS)))
    result.judge("on the GPU-like curve no fixed length manages that", f"the best {fixed:.2f}", fixed < 0.97)
    return result


GAINS = {
    "requests": "throughput of placing requests one by one over whole groups at a worker",
    "context": "throughput that the order adds",
}
"""The names of the arms' gains over the arm before."""


def _ladder(result: Result, ratios: Ratios, curve: str) -> None:
    prefix, lines = f"ladder/{curve}/", []
    for arm in ARMS:
        key, base = prefix + arm, prefix + ARMS[0]
        columns = ("preempted", "prefilled", "regenerated", "longest_wait")
        moved = statistics.median(seed["moves"]["divided"] for seed in ratios.cells[key]["seeds"])
        both = shown(ratios.of(base, key)), shown(ratios.of(key, base, "tail"))
        lines.append([arm, *both, moved, *(ratios.median(key, name) for name in columns)])
    over = f"/ {ARMS[0]}"
    head = ["arm", f"throughput {over}", f"tail {over}", "chunks moved", "preempted", "prefilled / sampled"]
    head += ["regenerated", "longest wait, s"]
    title = f"{curve}: {SEEDS} paired seeds, median and 95% bootstrap interval"
    result.data["tables"].append(table(title, head, lines))
    for lower, higher in (("whole groups", "requests"), ("divided", "context"), ("context", "oracle")):
        gain = ratios.of(prefix + lower, prefix + higher)
        met = gain[1] > 1 if higher != "oracle" else gain[2] >= 1  # at most as good, within noise
        what = GAINS.get(higher, f"throughput of {higher} over {lower}")
        result.judge(f"{curve}: {what}", f"{shown(gain)} x", met)
    for name, least in (("makespan", 0.6), ("tail", 0.8)):
        closed = ratios.closed(prefix, name)
        target = f"{curve}: context closes >= {least:.0%} of the gap from divided to oracle, {name}"
        result.judge(target, f"{closed:.0%}", closed >= least)
    texts = {tuple(seed["digest"] for seed in ratios.cells[prefix + arm]["seeds"]) for arm in ARMS}
    result.judge(f"{curve}: texts equal in all arms", f"{len(texts)} digest for {len(ARMS)} arms", len(texts) == 1)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--discard", action="store_true", help="drop the pieces that are there")
    given = parser.parse_args()
    shape = {"groups": GROUPS, "size": SIZE, "workers": WORKERS, "cache": CACHE, "limit": LIMIT, "seeds": SEEDS}
    logging.disable(logging.WARNING)  # workers leave when a step has ended
    cells = Cells(figures, shape, discard=given.discard)
    for key, measured in plan().items():
        cells.measure(key, measured)
    cells.tell()


if __name__ == "__main__":
    main()
