"""Resident memory of the one worker: 32 tenants against 1.

What may grow: adapters in memory (bf16, and float32 masters), AdamW's moments, gradients, and the attention cache
within its budget. The bound is computed from the model's shapes and the worker's settings; what is measured is the
worker's resident set, the largest of many looks while the jobs run; every repeat has a worker of its own."""

from __future__ import annotations

import statistics
import threading
from typing import Self

from benchmarks.lib.harness import Result, command, repeats
from benchmarks.lib.model import ours
from benchmarks.lib.orders import RANK
from benchmarks.lib.service import Bench, Liked, job, service
from benchmarks.lib.workload import PROMPTS, questions

from rookery.settings import Settings
from rookery.worker.memory import SHARES
from rookery.worker.model.adapter import PARTS
from rookery.worker.model.config import DecoderConfig

TENANTS = 32
STEPS = 2
LOOK_SECONDS = 0.05
MEBIBYTE = 2**20
FLOATS = 4 * 4 + 2
"""Bytes of a trained number: float32 master, gradient and two moments, and the bf16 copy that meets the activations."""
SERVED = 2 * 2 * 2
"""Bytes of a served number: bf16, of at most two versions at once, in the LoRA slots and in the stack of a batch."""


class Watch:
    """``most``: the largest resident set of the service's workers while it lasts, in bytes."""

    def __init__(self, bench: Bench) -> None:
        self.most = 0
        self._bench = bench
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_SECONDS):
            self.most = max(self.most, *(process.memory_info().rss for process in self._bench.workers()))


def _train(bench: Bench, tenants: int) -> None:
    environment = Liked(questions(PROMPTS * STEPS))
    jobs = [
        bench.client.train(environment=environment, **job(f"m{tenants}-{i}", STEPS, seed=i)) for i in range(tenants)
    ]
    for one in jobs:
        ended = one.wait()
        assert ended.state == "completed", ended.reason


def told(peaks: dict[int, list[float]], cache_bytes: int) -> Result:
    """The figures of the largest resident sets of the repeats so far, in MiB."""
    result = Result("memory", f"Resident memory of the worker with {TENANTS} tenants against 1", command())
    for tenants, found in peaks.items():
        result.add(f"{tenants} tenant{'s' * (tenants > 1)}, peak", found, "MiB")
    config = DecoderConfig.read(ours())
    numbers = sum(RANK * sum(config.site_shape(part)) for part in PARTS) * config.layers
    bound = ((TENANTS - 1) * numbers * (FLOATS + SERVED) + cache_bytes) / MEBIBYTE
    grown = [many - one for one, many in zip(peaks[1], peaks[TENANTS], strict=True)]
    result.add("growth", grown, "MiB")
    result.add("adapters, moments, gradients of the others, and the cache's budget", [bound], "MiB", "counted")
    growth = statistics.median(grown)
    per_tenant = growth / (TENANTS - 1)
    result.judge(
        "memory grows by adapters, moments, gradients and the cache's budget only",
        f"{per_tenant:.1f} MiB per tenant",
        growth <= bound,
    )
    result.notes.append(
        f"numbers per adapter: {numbers:,}; default limit of the engine's rows: {Settings().engine.max_rows}"
    )
    return result


def main() -> None:
    times = repeats(__doc__)
    budget = 4 << 30
    cache_bytes = int(SHARES["cpu"]["kv_cache"] * budget)
    peaks: dict[int, list[float]] = {1: [], TENANTS: []}
    for _ in range(times):
        with service(memory_bytes=budget) as bench:
            for tenants, found in peaks.items():
                with Watch(bench) as watch:
                    _train(bench, tenants)
                found.append(watch.most / MEBIBYTE)
                print(f"  {tenants}: {found[-1]:.0f} MiB", flush=True)
        told(peaks, cache_bytes).save()  # a repeat takes up to 17 minutes: what there is, is kept


if __name__ == "__main__":
    main()
