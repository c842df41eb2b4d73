"""Ratios that depend on the code more than on the machine, on the real model (``make bench-smoke``).

Bounds are generous, and every ratio is of the best of some turns: they notice a path that has fallen back to something
slow, not a percentage, and not a neighbour on the machine. The percentages are in ``benchmarks/RESULTS.md``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.lib.contender import Contender
from benchmarks.lib.workload import random_ids

pytestmark = pytest.mark.heavy
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
LEAST_TURNS, MOST_TURNS = 2, 8
"""Other programs on the machine spoil two turns, seldom eight; a slower measure is slow in all."""
VOCABULARY = 49152


@pytest.fixture(scope="module", params=["engine", "trainer"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Contender]:
    folder = tmp_path_factory.mktemp("bench")
    script = BENCHMARKS / "lib" / f"contender_{request.param}.py"
    contender = Contender(request.param, [sys.executable, str(script)], {"ROOKERY_BENCH": str(folder)})
    yield contender
    contender.close()


engine = pytest.mark.parametrize("made", ["engine"], indirect=True)
trainer = pytest.mark.parametrize("made", ["trainer"], indirect=True)


def within(times: float, runs: tuple[Callable[[], float], Callable[[], float]]) -> bool:
    """Whether the first takes at most so many ``times`` as long as the second, each at its best of all turns after one
    that warms up. Turns end once that is so."""
    seconds: list[list[float]] = []
    for turn in range(MOST_TURNS + 1):
        took = [run() for run in runs]
        if not turn:
            continue
        seconds.append(took)
        first, second = map(min, zip(*seconds, strict=True))
        if turn >= LEAST_TURNS and first < times * second:
            return True
    print(f"seconds of each turn: {seconds}")
    return False


def seconds(contender: Contender, **task: Any) -> float:
    return float(contender.run(**task)["seconds"])


@engine
def test_a_decode_step_is_mostly_its_linear_layers(made: Contender) -> None:
    """16 texts over 4 adapters; about 2.5 times the layers alone on two quiet cores."""
    prompts = random_ids(16, 24, VOCABULARY)
    steps = (
        lambda: float(made.run(prompts=prompts, adapters=4, tokens=12)["step_seconds"]),
        lambda: seconds(made, what="floor", rows=16),
    )
    assert within(8, steps)


@engine
def test_a_groups_prompt_is_computed_once(made: Contender) -> None:
    """8 replies to one prompt: about 6 times as fast as to 8 prompts."""
    prompt = random_ids(1, 256, VOCABULARY) * 8
    replies = (
        lambda: seconds(made, prompts=prompt, adapters=1, tokens=2, shared=True),
        lambda: seconds(made, prompts=prompt, adapters=1, tokens=2),
    )
    assert within(1 / 2, replies)


@trainer
def test_tenants_packed_train_like_one(made: Contender) -> None:
    """Four with two sequences each beside one with eight: about as fast."""
    packed_and_alone = (
        lambda: seconds(made, shapes=[[64, 64]] * 4),
        lambda: seconds(made, shapes=[[64] * 8]),
    )
    assert within(1.7, packed_and_alone)


@trainer
def test_training_is_mostly_its_linear_layers(made: Contender) -> None:
    """Loss on every token; about twice the layers and the output projection alone."""
    step_and_floor = (
        lambda: seconds(made, shapes=[[128] * 4]),
        lambda: seconds(made, what="floor", tokens=512),
    )
    assert within(6, step_and_floor)
