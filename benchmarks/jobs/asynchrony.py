"""LlamaRL's theory of asynchrony, against this engine and trainer: costs by micro-batch, predicted and measured steps.

``python -m benchmarks.jobs.asynchrony [--repeats N] [--discard]``; resumable. Every repeat is first the costs: seconds
per sample of generation and of training by micro-batch, with both cores and with one, and the memory of each. From them
follow the micro-batches of each memory budget, and the predictions (``asynchrony_theory.py``). Then, within the same
hour, since machines are not equally quick at all times, jobs of a real service with those micro-batches: on one worker
that has both cores for both phases (*shared*), and on two workers with a core each, of which one generates and one
trains (*apart*); staleness 0 and 2; with an environment that answers at once, and with one that takes its time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

from benchmarks.jobs.asynchrony_figures import (
    CORES,
    PLACES,
    ROWS,
    STALENESS,
    STEPS,
    UNITS,
    Place,
    costs_key,
    figures,
    job_key,
    micro_batches,
)
from benchmarks.lib.cells import Cell, Cells
from benchmarks.lib.contender import Contender
from benchmarks.lib.harness import HERE, MODEL
from benchmarks.lib.model import chat_ids
from benchmarks.lib.service import BEAT_SECONDS, Bench, Liked, busy, completed, job, service, until_served
from benchmarks.lib.workload import COMPLETIONS, PROMPTS, REPLY_TOKENS, stories

from rookery.settings import TOKEN_VARIABLE

STOP_SECONDS = 30.0
"""A worker told to end has ended by then."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=3, help="runs of every cost and of every job (default: 3)")
    parser.add_argument("--discard", action="store_true", help="drop the cells that are there")
    given = parser.parse_args()
    plan = {"model": MODEL, "job": [PROMPTS, COMPLETIONS, REPLY_TOKENS, STEPS], "repeats": given.repeats}
    cells = Cells(figures, plan, discard=given.discard)
    prompts = chat_ids(stories(PROMPTS))
    for repeat in range(given.repeats):
        for cores in CORES:
            cells.measure(costs_key(cores, repeat), lambda cores=cores: costs(prompts, cores))
        for place in PLACES:
            jobs(cells, place, repeat, prompts)
    cells.tell()


def jobs(cells: Cells, place: Place, repeat: int, prompts: list[list[int]]) -> None:
    """Those of one repeat that are missing at ``place``, on workers of their own."""
    missing = [lag for lag in STALENESS if job_key(place, lag, repeat) not in cells.cells]
    if not missing:
        return
    rows, units = micro_batches(cells.cells, place)
    with workers(place, rows, units, prompts) as bench:
        for lag in missing:
            cells.measure(
                job_key(place, lag, repeat),
                lambda lag=lag: {"rows": rows, "units": units} | steps(bench, place, lag, repeat),
            )


def costs(prompts: list[list[int]], cores: int) -> Cell:
    """Seconds of a step's generation by rows, and of its training by units in a pass, with so many cores; the bytes of
    the rows' cache, and the most memory that the trainer's process had had by then."""
    threads = {"OMP_NUM_THREADS": str(cores)}
    engine = Contender("engine", [sys.executable, str(HERE / "lib" / "contender_engine.py")], threads)
    texts = [prompt for prompt in prompts for _ in range(COMPLETIONS)]
    engine.run(prompts=texts, adapters=1, tokens=REPLY_TOKENS, shared=True)
    generation = {
        rows: engine.run(prompts=texts, adapters=1, tokens=REPLY_TOKENS, shared=True, rows=rows) for rows in ROWS
    }
    engine.close()
    trainer = Contender("trainer", [sys.executable, str(HERE / "lib" / "contender_trainer.py")], threads)
    unit = {"groups": PROMPTS, "prompt": max(map(len, prompts)), "members": COMPLETIONS, "reply": REPLY_TOKENS}
    training = {units: trainer.run(what="groups", units=units, **unit) for units in UNITS}  # ascending: peaks grow
    for units in UNITS:
        training[units]["seconds"] = trainer.run(what="groups", units=units, **unit)["seconds"]  # now that all is warm
    trainer.close()
    return {
        "cores": cores,
        "generation": {str(n): {"seconds": run["seconds"], "bytes": run["bytes"]} for n, run in generation.items()},
        "training": {str(n): {"seconds": run["seconds"], "peak": run["bytes"]} for n, run in training.items()},
    }


@contextmanager
def workers(place: Place, rows: int, units: int, prompts: list[list[int]]) -> Iterator[Bench]:
    """A service with one worker for both phases, or with one for each on a core of its own."""
    longest = max(map(len, prompts)) + COMPLETIONS * (REPLY_TOKENS - 1)
    settings = {"max_rows": rows, "slice_tokens": units * longest}
    beats = {"heartbeat_seconds": BEAT_SECONDS}
    if place.layout == "shared":
        with service(**settings, **beats) as bench:
            yield bench
        return
    with service(workers=0, **beats) as bench, ExitStack() as stack:
        token = (bench.data / "worker.token").read_text().strip()
        environment = {f"ROOKERY_{name.upper()}": str(value) for name, value in settings.items()}
        environment |= {TOKEN_VARIABLE: token, "ROOKERY_THREADS": "1", "OMP_NUM_THREADS": "1"}
        for role in ("rollout", "train"):
            command = [sys.executable, "-m", "rookery.cli", "worker", "--connect", bench.url, "--model", MODEL]
            log = stack.enter_context((bench.data / f"{role}.log").open("wb"))
            process = subprocess.Popen(
                [*command, "--name", role, "--roles", role], env=os.environ | environment, stdout=log, stderr=log
            )
            stack.callback(_end, process)
        until_served(bench.client, 2)
        yield bench


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def steps(bench: Bench, place: Place, lag: int, repeat: int) -> Cell:
    """A job's steady steps: those between the ``lag + 1``-th commit and the one from which on nothing more is begun.
    ``decode`` and ``train``: seconds per step in which a worker did either, over the whole job."""
    spec: dict[str, Any] = job(f"{place.key}-{lag}-{repeat}".replace("/", "-"), STEPS, staleness=lag, seed=repeat)
    spec["checkpoints"] = {"keep_last": 1, "keep_best": False}
    before = busy(bench)
    one = bench.client.train(environment=Liked(stories(PROMPTS * STEPS), place.latency), **spec)
    completed(one)
    after = busy(bench)
    rows = list(one.metrics(follow=False))
    steady = rows[lag : STEPS - lag]
    return {
        "place": place.key,
        "staleness": lag,
        "step": (steady[-1].time - steady[0].time) / (len(steady) - 1),
        "decode": (after[0] - before[0]) / STEPS,
        "train": (after[1] - before[1]) / STEPS,
        "intervals": [b.time - a.time for a, b in pairwise(rows)],
        **{
            f"seconds/{stage}": statistics.fmean(row[f"seconds/{stage}"] for row in steady)
            for stage in ("queue", "generation", "environment", "waiting", "train", "commit")
        },
        "length_mean": statistics.fmean(row.length_mean for row in steady),
        "staleness_mean": statistics.fmean(row.staleness_mean for row in steady),
    }


if __name__ == "__main__":
    main()
