"""A worker's time among its tenants: a small job of one keeps half of its speed next to any number of another's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples

from rookery.scheduling.queues import TokenCounters
from rookery.scheduling.worker_time import WorkerTime
from rookery.worker.compute import TimeSlice, next_slice, within_slice

ROWS = 64
SLICE = 0.1
"""Seconds of a training slice, and of a decode step of all rows, which takes half of it without rows."""


class Part:
    def step(self) -> bool:
        return True


class Worker:
    """An engine whose rows the large tenant fills, and a trainer where it always has a batch. The small tenant's job
    decodes with a few rows for so many slices, then trains for so many, and begins again."""

    def __init__(self, decode: int, train: int, rows: int, *, fair: bool, large: bool = True) -> None:
        self.left = {"decode": decode, "train": train}
        self.phases, self.rows, self.fair, self.large = dict(self.left), rows, fair, large
        self.parts = [TimeSlice(Part(), lambda: bool(self.engine())), TimeSlice(Part(), lambda: bool(self.trainer()))]
        self.time = WorkerTime({})
        self.queue = TokenCounters({})
        self.steps, self.now = 0, 0.0
        self.used: Counter[str] = Counter()

    def engine(self) -> dict[str, int]:
        small = {"small": self.rows} if self.left["decode"] else {}
        return small | ({"large": ROWS - self.rows * bool(small)} if self.large else {})

    def trainer(self) -> list[str]:
        small = ["small"] if not self.left["decode"] else []
        return small + ["large"] * self.large

    def slice(self) -> None:
        number = self.time.favoured([self.engine(), self.trainer()]) if self.fair else None
        favoured = self.parts[number] if number is not None else None
        chosen = next_slice(self.parts, favoured=favoured)
        assert chosen is not None
        if chosen is self.parts[0]:
            shares: dict[str, float] = dict(self.engine())
            kind, seconds = "decode", SLICE * (0.5 + 0.5 * sum(shares.values()) / ROWS)
        else:
            tenant = self.queue.order(sorted(self.trainer()))[0]  # as the trainer divides its slices
            self.queue.charge(tenant, 1)
            shares, kind, seconds = {tenant: 1.0}, "train", SLICE
        chosen.clock += 0 if favoured is not None else seconds
        self.now += seconds
        self.time.charge(seconds, shares)
        for tenant, share in shares.items():
            self.used[tenant] += seconds * share / sum(shares.values())  # type: ignore[assignment]
        if "small" in shares:
            self.left[kind] -= 1
            if not any(self.left.values()):
                self.left, self.steps = dict(self.phases), self.steps + 1
                self.queue.lift("small")

    def rate(self, slices: int = 4000) -> float:
        """Steps of the small job per second."""
        for _ in range(slices):
            self.slice()
        return self.steps / self.now


@pytest.mark.parametrize(("decode", "train"), [(10, 10), (3, 30), (30, 3), (1, 1), (100, 5)])
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_a_small_job_keeps_half_of_its_speed_next_to_a_tenant_with_work_everywhere(
    decode: int, train: int, rows: int
) -> None:
    alone = Worker(decode, train, rows, fair=True, large=False).rate()
    before, after = (Worker(decode, train, rows, fair=fair).rate() / alone for fair in (False, True))
    assert after >= 0.49 and after > before
    if decode > 10 * train and rows < 10:
        assert before < 0.3, "half of the time, in which the steps of a full engine are slower than its own"


def test_a_tenant_alone_has_the_whole_worker() -> None:
    worker = Worker(10, 10, 8, fair=True, large=False)
    worker.rate()
    assert worker.used.keys() == {"small"}


def test_time_is_divided_where_the_small_tenant_fills_its_half() -> None:
    """It decodes with as many rows as the other: neither gets more than half of the time."""
    worker = Worker(50, 50, 32, fair=True)
    worker.rate()
    assert worker.used["small"] / worker.used.total() == pytest.approx(0.5, abs=0.05)


tenants = st.sets(st.sampled_from(["a", "b", "c", "d"]))


@given(st.lists(st.tuples(tenants, tenants), max_size=60))
@settings(max_examples=examples(200))
def test_the_favoured_part_works_for_the_tenant_with_the_least_time(turns: list[tuple[set[str], set[str]]]) -> None:
    time = WorkerTime({})
    for engine, trainer in turns:
        number = time.favoured([engine, trainer])
        if not engine or not trainer or engine == trainer:
            assert number is None
        if number is not None:
            part, other = ((engine, trainer), (trainer, engine))[number]
            assert part - other, "some tenant has work only there"
        for shares in (engine, trainer) if number is None else ((engine, trainer)[number],):
            time.charge(1.0, dict.fromkeys(shares, 1.0))


def test_operations_within_a_slice_do_not_overtake_what_changes_states() -> None:
    names = ["queue", "engine", "states", "queue", "engine", "states"]
    calls = [(Future(), lambda core: None, touches) for touches in names]  # type: ignore[var-annotated]
    taken, left = within_slice(calls)  # type: ignore[arg-type]
    assert taken == [calls[0], calls[1], calls[4]] and left == [calls[2], calls[3], calls[5]]


def test_no_tenant_is_passed_over_for_ever() -> None:
    """One works in the engine only, the other in the trainer only: they alternate."""
    time, turns = WorkerTime({"b": 2.0}), Counter[int]()
    tell: Callable[[], int | None] = lambda: time.favoured([{"a"}, {"b"}])  # noqa: E731
    for _ in range(300):
        number = tell()
        assert number is not None
        turns[number] += 1
        time.charge(0.1, {"ab"[number]: 1})
    assert turns == {0: 100, 1: 200}, "b has twice the weight"
