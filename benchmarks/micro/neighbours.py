"""A worker's threads next to programs that always run: a decode step of 8 rows and an optimizer step of 4 x 240 tokens.

Two ways, each alone, beside one program and beside two: threads as they are without any control, and threads that spin
briefly where they wait for cores, as a worker's do. Each way has ``SETTLE_SECONDS`` of work before what counts, in
which its control looks as often as a worker's."""

from __future__ import annotations

import rookery.worker  # sets how torch's threads wait, before torch is there  # noqa: F401

# isort: split

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from benchmarks.lib.contender_engine import Engine
from benchmarks.lib.contender_trainer import Training
from benchmarks.lib.harness import Result, command, options
from benchmarks.lib.model import chat_ids
from benchmarks.lib.workload import questions

from rookery.worker import teams
from rookery.worker.spinning import LOOK_SECONDS, SparePool, SpinControl

PROGRAMS = (0, 1, 2)
ROWS, TOKENS = 8, 16
SHAPE = [[240] * 4]
SETTLE_SECONDS = 5.0
MOST = {1: 2.5, 2: 2.5}
"""A step beside so many programs, over one alone without any control: half of two cores, and the caches are shared."""
WAYS = ("no control", "spinning")


class Way:
    """One of ``WAYS``."""

    def __init__(self, name: str) -> None:
        self._pool = SparePool()
        self._control = SpinControl(self._pool, lambda crowded: None)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        if name != "no control":
            self._thread.start()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._control.look()

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._pool.stop()


@contextmanager
def programs(count: int) -> Iterator[None]:
    """So many that always run."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in running:
            program.kill()
            program.wait()


def measure(step: Callable[[], float], repeats: int) -> list[float]:
    """Milliseconds of steps, after some that do not count."""
    until = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < until:
        step()
    return [1000 * step() for _ in range(repeats)]


def over_alone(medians: Mapping[tuple[str, int, str], float], what: str, count: int) -> dict[str, float]:
    """Each way's time beside so many programs, over the time alone without any control: else a way that is slow alone
    would look quick beside others."""
    return {name: medians[what, count, name] / medians[what, 0, "no control"] for name in WAYS}


def main() -> None:
    given = options(__doc__, "decoding only").parse_args()
    result = Result("neighbours", "Next to other programs that always run", command())
    engine, training = Engine(), Training()
    teams.reserve(torch.get_num_threads())
    prompts = chat_ids(questions(ROWS))

    def decode() -> float:
        return float(engine.run(prompts=prompts, adapters=4, tokens=TOKENS)["step_seconds"])

    def train() -> float:
        return float(training.run(shapes=SHAPE)["seconds"])

    works = {f"decode step, {ROWS} rows": decode} | ({} if given.quick else {"optimizer step, 4 x 240": train})
    medians = {}
    for what, step in works.items():
        for count in PROGRAMS:
            with programs(count):
                for name in WAYS:
                    way = Way(name)
                    values = measure(step, given.repeats)
                    way.close()
                    result.add(f"{what}, {count} programs, {name}", values, "ms")
                    medians[what, count, name] = statistics.median(values)
    for what in works:
        for count in PROGRAMS[1:]:
            over = over_alone(medians, what, count)
            target = f"{what}, beside {count}: <= {MOST[count]} x alone"
            why = f"{over['no control']:.1f} x without control"
            result.judge(target, f"{over['spinning']:.1f} x", over["spinning"] <= MOST[count], why)
    result.save()


if __name__ == "__main__":
    main()
