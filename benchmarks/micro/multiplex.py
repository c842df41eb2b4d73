"""Whether two kinds of work gain from running beside each other: two processes with one core each against one after
the other on all cores.

s = seconds of a unit beside the other work / seconds alone on all cores. A pair gains if 1/s_a + 1/s_b is above 1.05:
one after the other is 1. The work is a worker's: decode steps of so many rows, prompts of 256 tokens, optimizer steps
on 8 x 128 tokens. The slowdowns of lanes within one worker are measured by
``benchmarks.micro.lanes``."""

from __future__ import annotations

import rookery.worker  # sets how torch's threads wait, before torch is there  # noqa: F401

# isort: split

import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from benchmarks.lib.cells import table
from benchmarks.lib.child import serve
from benchmarks.lib.contender import Contender
from benchmarks.lib.harness import Result, command, repeats
from benchmarks.lib.model import ours
from benchmarks.lib.orders import optimizer_steps, trainer_of, unit
from benchmarks.lib.workload import random_ids

from rookery import protocol
from rookery.settings import Settings
from rookery.tokenization.chat import Chat
from rookery.worker.engine.native.engine import NativeEngine
from rookery.worker.engine.native.runner import WeightSets, best_runner
from rookery.worker.model.decoder import Decoder
from rookery.worker.model.lora import LoraManager

PAYS = 1.05
"""1/s_a + 1/s_b of a pair should be above it, s being the slowdown beside the other: 1 is one after the other."""
ROWS = {f"decode {rows}": rows for rows in (1, 4, 16, 64)}
KINDS = (*ROWS, "prefill", "train")
PAIRS = [(kind, "train") for kind in KINDS] + [("decode 4", "decode 4"), ("decode 16", "decode 16"), ("prefill",) * 2]
PAIRS += [("decode 4", "prefill"), ("decode 16", "prefill")]
SECONDS = {1: 3.0, 2: 5.0}
"""Of a measurement, by the kinds that run at the same time."""
PROMPT, REPLY = 256, 96
KV_BYTES = 1 << 30


class Work:
    """One process's engine and trainer, as a worker has them."""

    def __init__(self) -> None:
        folder, settings = ours(), Settings.load()
        decoder = Decoder.load(folder, pack=settings.engine.pack_weights)
        loras = LoraManager(decoder.config, decoder.dtype, decoder.device, 16)
        runner = best_runner(decoder, loras, KV_BYTES, compiled=settings.engine.cpu_kernels, cache=settings.cache)
        self._engine = NativeEngine(WeightSets(decoder, loras, runner), Chat.load(folder).decode, max_rows=64)
        self._trainer = trainer_of(decoder, 1, settings.training.slice_tokens)
        self._ids = random_ids(64, PROMPT, decoder.config.vocab)
        self._names = itertools.count()
        self._held: set[str] = set()
        self._steps = 0

    def run(self, kind: str, seconds: float) -> dict[str, Any]:
        """Seconds of a unit: the mean of those that ended within ``seconds``; the work goes on until then."""
        began = time.perf_counter()
        done, until = [began], began + seconds
        for _ in self._train() if kind == "train" else self._generate(kind):
            done.append(time.perf_counter())
            if done[-1] > until:
                break
        counted = done if len(done) < 3 else done[:-1]
        return {"seconds": (counted[-1] - counted[0]) / (len(counted) - 1)}

    def _train(self) -> Iterator[None]:
        batch = protocol.TrainingBatch(groups=[unit(ids[:128]) for ids in self._ids[:8]])
        while True:
            optimizer_steps(self._trainer, [batch], protocol.Loss(name="cross_entropy"), self._steps)
            self._steps += 1
            yield

    def _generate(self, kind: str) -> Iterator[None]:
        """Decode steps or prompts; rows are renewed all together, so steps of prefill count for little."""
        rows = ROWS.get(kind, 1)
        texts, most = ([ids[:16] for ids in self._ids], REPLY) if kind in ROWS else (self._ids, 1)
        engine = self._engine
        for request in list(self._held):
            engine.abort(request)
        while True:
            for text in texts[:rows]:
                name = f"{next(self._names)}"
                self._held.add(name)
                engine.submit(
                    protocol.Generate(
                        request=name, adapter=None, prompt=text, shared_prefix=0, max_tokens=most, temperature=1.0,
                        seed=0, stop_tokens=[],
                    )
                )  # fmt: skip
            while engine.step():
                ended = [chunk.request for chunk in engine.drain() if chunk.finish]
                self._held.difference_update(ended)
                yield


def measure(processes: list[Contender], kinds: tuple[str, ...]) -> list[float]:
    """Milliseconds of a unit of each kind, at the same time."""
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(process.run, kind=kind, seconds=SECONDS[len(kinds)])
            for process, kind in zip(processes, kinds, strict=True)
        ]
        return [1000 * float(run.result()["seconds"]) for run in runs]


def main() -> None:
    times = repeats(__doc__)
    result = Result("multiplex", "Training beside decoding: one core each against one after the other", command())
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    script = [sys.executable, "-m", "benchmarks.micro.multiplex", "--child"]

    def start(name: str, own: list[int]) -> Contender:
        chosen = ["taskset", "--cpu-list", ",".join(map(str, own))]
        return Contender(name, chosen + script, {"OMP_NUM_THREADS": str(len(own))})

    everything, left, right = start("all cores", cores), start("left", cores[:half]), start("right", cores[half:])
    alone: dict[str, list[float]] = {kind: [] for kind in KINDS}
    together: dict[tuple[str, ...], list[list[float]]] = {pair: [] for pair in PAIRS}
    for kind in KINDS:  # warms up
        measure([everything], (kind,))
        measure([left, right], (kind, kind))
    for _ in range(times):
        for kind in KINDS:
            alone[kind] += measure([everything], (kind,))
        for pair in PAIRS:
            together[pair].append(measure([left, right], pair))
    for process in (everything, left, right):
        process.close()
    base = {kind: statistics.median(values) for kind, values in alone.items()}
    lines, slowdown = [], {}
    for both, runs in together.items():
        slow = [
            statistics.median(run[i] / whole for run, whole in zip(runs, alone[kind], strict=True))
            for i, kind in enumerate(both)
        ]
        speed = sum(1 / factor for factor in slow)
        slowdown["|".join(both)] = slow
        named = [f"{kind} ({base[kind]:.0f} ms)" for kind in both]
        lines.append([*named, *slow, speed, "yes" if speed > PAYS else "no"])
    result.data |= {"slowdown": slowdown, "alone": base, "repeats": alone}
    head = ["work a (alone)", "work b (alone)", "s of a", "s of b", "1/s_a + 1/s_b", f"above {PAYS}"]
    title = f"Slowdown beside each other, medians of {times}"
    result.data["tables"] = [table(title, head, lines)]
    result.save()


if __name__ == "__main__":
    if "--child" in sys.argv:
        work = Work()
        serve({"torch": torch.__version__, "threads": torch.get_num_threads()}, work.run)
    else:
        main()
