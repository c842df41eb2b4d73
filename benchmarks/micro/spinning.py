"""How long threads that wait for each other should spin before they sleep (``rookery.worker``): decoding with each
setting, on a quiet machine and next to processes that want its cores.

A thread that sleeps is woken late where a virtual machine's host has others for its core; one that spins holds up the
thread that it waits for, where both want one core. All settings take turns within one run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.lib.contender import Contender
from benchmarks.lib.harness import HERE, Result, command, repeats
from benchmarks.lib.model import chat_ids
from benchmarks.lib.workload import questions

TURNS = (0, 1_000, 3_000, 10_000, 30_000)
ROWS = 8
NEW_TOKENS = 12
BURSTS = """
import time
while True:
    began = time.perf_counter()
    while time.perf_counter() - began < 0.002:
        pass
    time.sleep(0.008)
"""
"""A controller's share of a busy service: a fifth of a core, in pieces of 2 ms."""
NEIGHBOURS = {
    "alone": [],
    "next to bursts": [BURSTS],
    "next to one that wants a core": ["while True: pass"],
    "next to two that want a core each": ["while True: pass"] * 2,
}


@contextmanager
def neighbours(programs: list[str]) -> Iterator[None]:
    """While these run."""
    started = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def main() -> None:
    times = repeats(__doc__)
    result = Result(
        "spinning", f"How long a waiting thread spins: a decode step of {ROWS} rows over 4 adapters", command()
    )
    script = [sys.executable, str(HERE / "lib" / "contender_engine.py")]
    engines = {turns: Contender(f"{turns} turns", script, {"GOMP_SPINCOUNT": str(turns)}) for turns in TURNS}
    prompts = chat_ids(questions(ROWS))
    for where, programs in NEIGHBOURS.items():
        steps: dict[int, list[float]] = {turns: [] for turns in TURNS}
        with neighbours(programs):
            for turn in range(times + 1):  # the first does not count
                for turns, engine in engines.items():
                    answer = engine.run(prompts=prompts, tokens=NEW_TOKENS if turn else 2, adapters=4)
                    if turn:
                        steps[turns].append(1000 * answer["step_seconds"])
        for turns, values in steps.items():
            result.add(f"{where}, {turns:,} turns", values, "ms")
    for engine in engines.values():
        engine.close()
    result.save()


if __name__ == "__main__":
    main()
