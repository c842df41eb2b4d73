"""A worker's threads next to programs that always run: a decode step of 8 rows and an optimizer step of 4 x 240 tokens.

Three ways, each alone, beside one program and beside two: threads as they are without any control; threads that only
spin briefly; and fewer of them, as a worker does where results do not depend on their number. Each way has
``SETTLE_SECONDS`` of work before what counts, in which its control looks as often as a worker's."""

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
from rookery.worker.spinning import LOOK_SECONDS, SparePool, ThreadControl

PROGRAMS = (0, 1, 2)
ROWS, TOKENS = 8, 16
SHAPE = [[240] * 4]
SETTLE_SECONDS = 3.0
MOST = 2.5
"""A decode step beside one program, over one alone without any control: one core of two, and the caches are shared."""
WAYS = ("no control", "spinning", "threads")


class Way:
    """One of ``WAYS``: with how many threads the next step computes."""

    def __init__(self, name: str, most: int) -> None:
        self.threads = self._most = most
        self._pool = SparePool()
        self._control = ThreadControl(self._pool, self._use)
        self._control.begin(most, fixed=name == "spinning")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        if name != "no control":
            self._thread.start()

    def _use(self, threads: int) -> None:
        self.threads = threads

    def _look(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            self._control.look()

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._pool.stop()
        teams.use(self._most)


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


def measure(way: Way, step: Callable[[], float], repeats: int) -> list[float]:
    """Milliseconds of steps, after some that do not count."""
    until = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < until:
        teams.use(way.threads)
        step()
    found = []
    for _ in range(repeats):
        teams.use(way.threads)
        found.append(1000 * step())
    return found


def over_alone(medians: Mapping[tuple[str, int, str], float], what: str, count: int) -> dict[str, float]:
    """Each way's time beside so many programs, over the time alone without any control: else a way that is slow alone
    would look quick beside others."""
    return {name: medians[what, count, name] / medians[what, 0, "no control"] for name in WAYS}


def main() -> None:
    given = options(__doc__, "decoding only").parse_args()
    result = Result("neighbours", "Next to other programs that always run", command())
    engine, training, most = Engine(), Training(), torch.get_num_threads()
    teams.reserve(most)
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
                    way = Way(name, most)
                    values = measure(way, step, given.repeats)
                    note = f"{way.threads} threads at the end"
                    way.close()
                    result.add(f"{what}, {count} programs, {name}", values, "ms", note)
                    medians[what, count, name] = statistics.median(values)
    for what in works:
        for count in PROGRAMS[1:]:
            over = over_alone(medians, what, count)
            why = f"{over['no control']:.1f} x without control, {over['spinning']:.1f} x by spinning alone"
            met = over["threads"] <= MOST if count == 1 else None
            target = f"{what}, beside {count}: <= {MOST} x alone" if count == 1 else f"{what}, beside {count}: x alone"
            result.judge(target, f"{over['threads']:.1f} x", met, why)
    result.save()


if __name__ == "__main__":
    main()
