"""Training beside decoding in one worker: as its planner chooses, and always, against turns, in the shipped compute
thread.

Both kinds of work wait all the time: so many rows that decode, and optimizer steps of 8 x 128 tokens. A rate is the
tokens of a kind per second over those of the same kind alone on all cores; the sum of both rates is 1 in turns that
cost nothing. What is judged is the sum over that in turns of the same round: a weighted mean of what each kind gains,
of which an error of a rate alone moves the weights only. Arms take turns within one process. Each round measures each
kind alone again, generation before and after the arms and only while every row decodes, so that a machine that others
load, and texts that grow, move all arms alike. No text ends within a round. Last, each kind of work alone, with the
planner and without.

``python -m benchmarks.micro.lanes``; six minutes.
"""

from __future__ import annotations

import rookery.worker  # sets how torch's threads wait, before torch is there  # noqa: F401

# isort: split

import asyncio
import itertools
import os
import statistics
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from benchmarks.lib import bars
from benchmarks.lib.cells import table
from benchmarks.lib.harness import Result, command, options
from benchmarks.lib.model import ours
from benchmarks.lib.orders import RANK, load_policies, ref, unit
from benchmarks.lib.workload import random_ids

from rookery import protocol
from rookery.settings import Settings
from rookery.worker.compute import Compute
from rookery.worker.core import WorkerCore

ROWS = (64, 16, 4)
ARMS = ("turns", "auto", "beside")
"""``beside``: half of the cores for each, always. ``benchmarks.scale.jigsaw`` reads its slowdowns; those of ``auto``
would be of a mixture of both modes."""
PLANNED = ("turns", "auto")
"""With one kind of work, which nothing runs beside."""
REPEATS = 5
STEPS = 1
"""Optimizer steps of a measurement, after which the tokens that were generated meanwhile are counted."""
ALONE_SECONDS = 1.0
POLL_SECONDS = 0.001
"""A fiftieth of a decode step of 64 rows, and more where the processor is slow."""
PREFILL_SECONDS = 60.0
"""Within which every row must have its first token."""
PROMPT, REPLY = 16, 1024
QUICK_ROWS = (16,)


class Worker:
    """A worker's compute thread with work of both kinds."""

    def __init__(self) -> None:
        settings = Settings.load(lanes="auto")
        self._output = threading.Event()
        self.compute = Compute(ours, settings, self._output.set)
        self.compute.start()
        self.core: WorkerCore = self.compute.ready.result()
        self._names = itertools.count()
        self._rows = 0
        self._running: set[str] = set()
        self._begun: set[str] = set()
        """Of them, the texts that have a token."""
        self._decoding = threading.Event()
        self._taken = 0
        self._done: dict[str, Future[None]] = {}
        self._stop = False
        self._ids = random_ids(64, 128, 49152)
        self._call(lambda core: load_policies(core.queue.trainer_of(RANK), 1))
        self._feeder = threading.Thread(target=self._feed, daemon=True)
        self._feeder.start()

    def _call(self, function: Any, *, touches: Any = "states") -> Any:
        return asyncio.run(self.compute.call(function, touches=touches))

    def _feed(self) -> None:
        """Collects output; a text that has ended is followed by the next."""
        while not self._stop:
            self._output.wait()
            self._output.clear()
            chunks, results = self.compute.take()
            self._running -= {chunk.request for chunk in chunks if chunk.finish}
            self._begun = (self._begun | {chunk.request for chunk in chunks}) & self._running
            self._fill()
            if self._rows and len(self._begun) == self._rows:
                self._decoding.set()
            for done, _ in results:
                if done.error:
                    raise RuntimeError(done.error)
                if done.op in self._done:
                    self._done.pop(done.op).set_result(None)

    def _fill(self) -> None:
        while len(self._running) < self._rows:
            number = next(self._names)
            order = protocol.Generate(
                request=str(number), adapter=None, prompt=self._ids[number % 64][:PROMPT], shared_prefix=0,
                max_tokens=REPLY, temperature=1.0, seed=number, stop_tokens=[],
            )  # fmt: skip
            self._running.add(str(number))
            self.compute.post("a text", lambda core, order=order: core.engine.submit(order), touches="engine")

    def decode(self, rows: int) -> None:
        """Keep so many texts running from now on; returns once all of them decode."""
        names, self._rows = list(self._running), rows
        self._decoding.clear()
        if not rows:
            self._running.clear()
            self._call(lambda core: [core.engine.abort(name) for name in names], touches="engine")
        self._output.set()
        if rows and not self._decoding.wait(PREFILL_SECONDS):
            raise TimeoutError(f"after {PREFILL_SECONDS:g} s not all of {rows} rows decode")

    def train(self, steps: int) -> None:
        """So many optimizer steps on 8 x 128 tokens, to their end."""
        batch, loss = (
            protocol.TrainingBatch(groups=[unit(ids) for ids in self._ids[:8]]),
            protocol.Loss(name="cross_entropy"),
        )
        last: Future[None] = Future()
        for _ in range(steps):
            where: dict[str, Any] = {
                "policy": "0", "lease": 1, "parent": ref(0), "steps": self._taken, "tenant": "0",
            }  # fmt: skip
            name, self._taken = str(self._taken), self._taken + 1
            forward = protocol.ForwardBackward(op=f"f{name}", batch_ticket="", loss=loss, temperature=1.0, **where)
            step = protocol.OptimStep(op=f"o{name}", operations=1, adam=protocol.Adam(lr=1e-4, clip=1.0), **where)
            self._done[step.op] = last = Future()

            def enqueue(core: WorkerCore, forward: Any = forward, step: Any = step) -> None:
                trainer = core.queue.trainer_of(RANK)
                trainer.forward_backward(forward, batch)
                trainer.optim_step(step)

            self.compute.post("a step", enqueue)
        last.result()

    def tokens(self) -> int:
        return self.compute.status.beat.generated

    def alone(self, rows: int) -> tuple[float, float]:
        """Tokens generated per second, and seconds of an optimizer step, each without the other. Texts start again."""
        self.decode(0)
        began = time.perf_counter()
        self.train(STEPS)
        step = (time.perf_counter() - began) / STEPS
        self.decode(rows)
        return self.generated(), step

    def generated(self) -> float:
        """Tokens per second from now on, over whole decode steps: a second may hold only four of them."""
        before, began = self._after_a_step()
        time.sleep(ALONE_SECONDS)
        after, ended = self._after_a_step()
        return (after - before) / (ended - began)

    def _after_a_step(self) -> tuple[int, float]:
        """The tokens after the present decode step, and when it ended."""
        before = self.tokens()
        while (count := self.tokens()) == before:
            time.sleep(POLL_SECONDS)
        return count, time.perf_counter()

    def together(self, arm: str) -> tuple[float, float]:
        """The figures with both at once."""
        self.compute.lanes = arm  # type: ignore[assignment]
        before, began = self.tokens(), time.perf_counter()
        self.train(STEPS)
        seconds = time.perf_counter() - began
        return (self.tokens() - before) / seconds, seconds / STEPS

    def close(self) -> None:
        self.compute.stop()
        self.compute.ended.result()


def measure(worker: Worker, rows: int, times: int) -> dict[str, list[tuple[float, float]]]:
    """(rate of generation, rate of training) of each arm, in each round."""
    rates: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    worker.decode(rows)
    for arm in ARMS:
        worker.together(arm)  # warms up
    for turn in range(times):
        worker.compute.lanes = "turns"
        before, step = worker.alone(rows)
        found = {arm: worker.together(arm) for arm in (ARMS if turn % 2 else ARMS[::-1])}
        worker.compute.lanes = "turns"
        generated = (before + worker.generated()) / 2
        for arm, (speed, took) in found.items():
            rates[arm].append((speed / generated, step / took))
    worker.decode(0)
    return rates


def slowdowns_of(rates: Mapping[str, list[tuple[float, float]]]) -> list[float]:
    """Of generation and training, always at the same time, where turns cost nothing."""
    rounds = zip(rates["turns"], rates["beside"], strict=True)
    found = [[sum(turns) / rate for rate in beside] for turns, beside in rounds]
    return [statistics.median(part) for part in zip(*found, strict=True)]


def one_kind(worker: Worker, times: int) -> tuple[list[float], list[float]]:
    """Speed of generation and of training, each alone: with the planner over that in turns."""
    generation, training = [], []
    for turn in range(times):
        found: dict[str, tuple[float, float]] = {}
        for arm in PLANNED if turn % 2 else PLANNED[::-1]:
            worker.compute.lanes = arm  # type: ignore[assignment]
            found[arm] = worker.alone(QUICK_ROWS[0])
        generation.append(found["auto"][0] / found["turns"][0])
        training.append(found["turns"][1] / found["auto"][1])
    worker.decode(0)
    return generation, training


def main() -> None:
    given = options(__doc__, "16 rows only", repeats=REPEATS).parse_args()
    result = Result("lanes", "Training beside decoding in one worker", command())
    worker = Worker()
    if worker.core.no_lanes:
        result.notes.append(f"no lanes here: {worker.core.no_lanes}")
        result.save()
        return
    lines: list[list[Any]] = []
    slowdowns: dict[str, list[float]] = {}
    for rows in QUICK_ROWS if given.quick else ROWS:
        rates = measure(worker, rows, given.repeats)
        sums = {arm: [sum(pair) for pair in pairs] for arm, pairs in rates.items()}
        slowdowns[str(rows)] = slowdowns_of(rates)
        for arm, values in sums.items():
            result.add(f"{rows} rows, {arm}: rates, summed", values, "of one alone")
        for arm, pairs in rates.items():
            lines.append([rows, arm, *(statistics.median(column) for column in zip(*pairs, strict=True))])
    for kind, values in zip(("generation", "training"), one_kind(worker, given.repeats), strict=True):
        result.add(f"{kind} alone: with the planner over turns", values, "")
    result.judge_rows(bars.lanes)
    result.data["slowdowns"] = slowdowns
    result.data["load"] = os.getloadavg()
    result.data["tables"] = [table("Rates beside each other", ["rows", "mode", "generation", "training"], lines)]
    worker.close()
    result.save()


if __name__ == "__main__":
    main()
