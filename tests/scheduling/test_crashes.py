"""The suspects after a crash: the cause is found among any others, and no other job waits for long."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.scheduling.crashes import DELAYS, GROUP_SECONDS, GROWTH_BYTES, LastRun, Starting, delays, suspects


def last(seconds: float = 10.0, memory: int = 0, short: int = 0, **jobs: Starting) -> LastRun:
    return LastRun("boot", 100.0, 100.0 + seconds, memory, short, jobs)


BUSY, READY = Starting(101.0, 0), Starting(101.0, 0, assembling=False)
LATE = Starting(109.0, 0, assembling=False)


@pytest.mark.parametrize(
    ("run", "boot", "right"),
    [
        (last(), "boot", set()),
        (last(a=BUSY), "boot", {"a"}),
        (last(a=BUSY), "next", set()),  # the machine started again
        (last(a=BUSY, short=1), "next", set()),
        (last(a=BUSY, short=2), "next", {"a"}),  # on another machine after each of three short lives
        (last(seconds=100, a=BUSY, short=9), "next", set()),
        (last(a=BUSY, b=READY), "boot", {"a"}),  # what it was doing
        (last(a=BUSY, b=BUSY), "boot", {"a", "b"}),
        (last(a=READY, b=READY), "boot", set()),  # a kill at any moment shows nothing
        (last(a=READY, b=READY, memory=GROWTH_BYTES), "boot", {"a", "b"}),
        (last(a=READY, b=Starting(105.0, GROWTH_BYTES, False), memory=GROWTH_BYTES), "boot", {"a"}),  # memory growth
        (last(a=BUSY, b=READY, memory=GROWTH_BYTES), "boot", {"a"}),
        (last(a=READY, b=LATE, short=1), "boot", set()),
        (last(a=READY, b=LATE, short=2), "boot", {"b"}),  # the third short life in a row
        (last(a=READY, b=READY, short=2), "boot", {"a", "b"}),
        (last(seconds=100, a=READY, short=9), "boot", set()),  # this life was long
    ],
)
def test_suspects(run: LastRun, boot: str, right: set[str]) -> None:
    assert suspects(run, boot) == right


@given(count=st.integers(1, 200), seed=st.integers(0, 2**32))
def test_the_cause_is_found_in_a_few_crashes_and_delays_the_others_for_seconds(count: int, seed: int) -> None:
    jobs = [str(number) for number in range(count)]
    cause = random.Random(seed).choice(jobs)
    found, crashes = jobs, 0
    while len(found) > 1:
        when = delays(found)
        assert set(when) == set(found) and max(when.values()) < 4 * GROUP_SECONDS
        found = [job for job in found if when[job] == when[cause]]  # those that are starting when it ends the service
        crashes += 1
    assert found == [cause] and crashes <= 4


def test_delays_of_one_cause_grow() -> None:
    grown = [delays(["a"], crashes)["a"] for crashes in range(1, 9)]
    assert grown == sorted(grown) and grown[: len(DELAYS)] == list(DELAYS) and set(grown[len(DELAYS) :]) == {DELAYS[-1]}
