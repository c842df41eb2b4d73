"""A worker's time among its tenants: a small job of one keeps half of its speed next to any number of another's."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples

from rookery.scheduling.fair_slices import ServedItems, fair_items, most_rows, next_row, short_of_rows
from rookery.scheduling.queues import FairQueue, TokenCounters
from rookery.scheduling.worker_time import TimeSlice, WorkerTime, divide_slices, next_slice
from rookery.worker.compute import within_slice

ROWS = 64
SLICE = 0.1
"""Seconds of a training slice, and of a decode step of all rows, which takes half of it without rows."""


def decode_seconds(rows: int) -> float:
    return SLICE * (0.5 + 0.5 * rows / ROWS)


class Part:
    def step(self) -> bool:
        return True


class Worker:
    """An engine whose rows the large tenant fills, and a trainer where it always has a batch. The small tenant's job
    decodes with a few rows for so many slices, then trains for so many, and begins again. The large one's training
    slices take ``long`` times as long as its own. ``debts``: engine and trainer owe each other time for ever."""

    def __init__(
        self, decode: int, train: int, rows: int, *, fair: bool, large: bool = True, long: float = 1.0,
        debts: bool = False,
    ) -> None:  # fmt: skip
        self.long, self.debts = long, debts
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
        if self.fair:
            clocks = [part.clock for part in self.parts]
            divide_slices(self.parts, self.time, self.engine(), self.trainer())
            for part, clock in zip(self.parts, clocks, strict=True):
                part.clock = clock if self.debts else part.clock
        chosen = next_slice(self.parts)
        assert chosen is not None
        if chosen is self.parts[0]:
            shares: dict[str, float] = dict(self.engine())
            if self.fair:
                rows = [tenant for tenant, count in self.engine().items() for _ in range(count)]
                weights = self.time.weights_within(self.engine())
                shares = dict(Counter(rows[at] for at in fair_items(rows, weights, decode_seconds)))
            kind, seconds = "decode", decode_seconds(int(sum(shares.values())))
        else:
            tenant = self.queue.order(sorted(self.trainer()))[0]  # as the trainer divides its slices
            self.queue.charge(tenant, 1 / self.time.weight_within(tenant))
            shares, kind, seconds = {tenant: 1.0}, "train", SLICE * (self.long if tenant == "large" else 1)
        chosen.charge(seconds)
        self.now += seconds
        self.time.charge(seconds, shares)
        for tenant, share in shares.items():
            self.used[tenant] += seconds * share / sum(shares.values())  # type: ignore[assignment]
        if "small" in shares:
            self.left[kind] -= 1
            if not any(self.left.values()):
                self.left, self.steps = dict(self.phases), self.steps + 1
                self.queue.lift("small")

    def rate(self, slices: int = 1000) -> float:
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
    whole_phases = decode * train > 1  # a phase of one slice begins after a slice of the other tenant's
    assert after >= (0.48 if whole_phases else 0.43) and after > before
    if decode > 10 * train and rows < 10:
        assert before < 0.3, "half of the time, in which the steps of a full engine are slower than its own"


@pytest.mark.parametrize(("decode", "train"), [(10, 3), (20, 2), (3, 3)])
def test_a_small_job_waits_for_no_debt_of_engine_or_trainer(decode: int, train: int) -> None:
    alone = Worker(decode, train, 8, fair=True, large=False).rate()
    before, after = (Worker(decode, train, 8, fair=True, long=8, debts=debts).rate() / alone for debts in (True, False))
    assert after > 1.05 * before


def test_engine_and_trainer_share_time_equally() -> None:
    decode, train = TimeSlice(Part(), lambda: True), TimeSlice(Part(), lambda: training)

    def spend(turns: int) -> None:
        for _ in range(turns):
            turn = next_slice([decode, train])
            assert turn is not None
            spent = 0.1 if turn is decode else 1.0
            turn.clock += spent
            turn.seconds += spent

    training = False
    spend(100)
    assert (round(decode.seconds), train.seconds) == (10, 0)
    training = True  # idle time gives no credit
    spend(110)
    assert abs(decode.seconds - 10 - train.seconds) <= 1.0
    training = False
    spend(1000)
    training = True  # nor a debt
    before = train.seconds
    spend(110)
    assert abs(train.seconds - before - 10) <= 1.0


@given(st.lists(st.sampled_from(["", "e", "t", "et"]), min_size=1, max_size=6), st.floats(0.1, 10.0))
@settings(max_examples=examples(60))
def test_neither_engine_nor_trainer_starves_however_tenants_arrive(small: list[str], long: float) -> None:
    parts = [TimeSlice(Part(), lambda: True), TimeSlice(Part(), lambda: True)]
    time, used = WorkerTime({}), [0.0, 0.0]
    for number in range(400):
        phase = small[number % len(small)]
        divide_slices(parts, time, "l" + "s" * ("e" in phase), "l" + "s" * ("t" in phase))
        chosen = next_slice(parts)
        assert chosen is not None
        seconds = long if chosen is parts[1] else 1.0
        chosen.charge(seconds)
        used[parts.index(chosen)] += seconds
    assert min(used) >= 0.9 * LEAST_SHARE * sum(used) - long


def test_a_tenant_alone_has_the_whole_worker() -> None:
    worker = Worker(10, 10, 8, fair=True, large=False)
    worker.rate()
    assert worker.used.keys() == {"small"}


def test_time_is_divided_where_the_small_tenant_fills_its_half() -> None:
    """It decodes with as many rows as the other: neither gets more than half of the time."""
    worker = Worker(50, 50, 32, fair=True)
    worker.rate()
    assert worker.used["small"] / worker.used.total() == pytest.approx(0.5, abs=0.05)


LEAST_SHARE = 0.25
"""Of engine or trainer where another tenant has work in the other one only."""

NAMES = "abcd"
works = st.fixed_dictionaries({name: st.tuples(st.sampled_from([None, 0, 1, 8, 64]), st.booleans()) for name in NAMES})
"""By tenant: its rows, 0 where all of its rollouts wait, None without rollouts; and whether it trains."""
weights = st.dictionaries(st.sampled_from(NAMES), st.sampled_from([0.5, 1.0, 4.0]))


@given(st.lists(works, min_size=1, max_size=4), weights, st.floats(0.01, 1), st.floats(0.01, 1), st.booleans())
@settings(max_examples=examples(60))
def test_engine_and_trainer_never_have_less_than_the_shares_of_their_tenants(
    phases: list[dict[str, tuple[int | None, bool]]],
    given_weights: dict[str, float],
    one: float,
    other: float,
    mix: bool,
) -> None:
    """A tenant's share is its weight of all that use time, half of it in each part where it has work in both. The
    mix changes after every 150 slices; or with every slice, then the bound is the least of the mixes'."""
    time, now = WorkerTime(given_weights), 0
    parts = [TimeSlice(Part(), lambda: True), TimeSlice(Part(), lambda: True)]
    mixes = []
    for phase in phases:
        engine = [name for name, (rows, _) in phase.items() if rows]
        trainer = [name for name, (_, trains) in phase.items() if trains]
        if engine and trainer:
            weight = {name: given_weights.get(name, 1.0) for name in {*engine, *trainer}}
            half = {
                name: weight[name] / ((name in engine) + (name in trainer)) / sum(weight.values()) for name in weight
            }
            mixes.append((engine, trainer, (sum(half[name] for name in engine), sum(half[name] for name in trainer))))
    if not mixes:
        return
    periods = [mixes] if mix else [[one_mix] for one_mix in mixes]
    for period in periods:
        used = [0.0, 0.0]
        begun = [part.clock for part in parts]
        for _ in range(150):
            engine, trainer, expected = period[now % len(period)]
            now += 1
            shares = time.divide(engine, trainer)
            assert shares == pytest.approx(expected)
            for part, share in zip(parts, shares, strict=True):
                part.share = 2 * share
            chosen = next_slice(parts)
            assert chosen is not None
            number = parts.index(chosen)
            seconds = (one, other)[number]
            chosen.charge(seconds)
            used[number] += seconds
            time.charge(seconds, time.weights_within((engine, trainer)[number]))
        slack = 2 * max(one, other) + abs(begun[0] - begun[1])
        for number in (0, 1):
            least = min(expected[number] for *_, expected in period)
            assert used[number] >= least * sum(used) - slack / min(min(expected) for *_, expected in period)


@pytest.mark.parametrize(
    ("engine", "trainer", "expected"),
    [
        ("b", "a", 1 / 2),  # another tenant's rollouts only wait
        ("bt", "a", 1 / 3),
        ("bt", "b", 1 / 4),
        ("abt", "abt", 1 / 2),
        ("a", "a", 1 / 2),
        ("t", "abt", 5 / 6),
        ("abct", "c", 1 / 8),
        ("", "a", 1 / 2),
    ],
)
def test_the_trainer_has_the_shares_of_those_that_train(engine: str, trainer: str, expected: float) -> None:
    time = WorkerTime({})
    assert time.divide(engine, trainer) == pytest.approx((1 - expected, expected))
    assert time.only_in_engine == bool(set(engine) - set(trainer))


def test_operations_within_a_slice_do_not_overtake_changes_of_states() -> None:
    names = ["queue", "engine", "states", "queue", "engine", "states"]
    calls = [(Future(), lambda core: None, touches) for touches in names]  # type: ignore[var-annotated]
    taken, left = within_slice(calls)  # type: ignore[arg-type]
    assert taken == [calls[0], calls[1], calls[4]] and left == [calls[2], calls[3], calls[5]]


# --- rows, turns and slices together --------------------------------------------------------------------------------

CROWD_ROWS, AHEAD = 16, 4


@dataclass(eq=False)
class Reply:
    job: Job
    left: int


@dataclass(eq=False)
class Job:
    """Each of its steps is so many replies of so many tokens, then so many slices of training. ``varied``: of any
    length up to twice that."""

    tenant: str
    rows: int
    tokens: int
    train: int
    varied: bool = False
    open: int = 0
    steps: int = 0


class Crowd:
    """The queue of the service, the rows of a worker, its engine and its trainer, with the functions that these use.
    ``room``: rollouts that fit into a step next to a client's request that always decodes; None without one."""

    def __init__(self, jobs: Sequence[Job], room: int | None, seed: int) -> None:
        self.room, self.random = room, Random(seed)
        self.queue: FairQueue[Reply] = FairQueue(turn=CROWD_ROWS // 2)
        self.waiting: list[Reply] = []
        self.running: list[Reply] = []
        self.operations: dict[str, deque[tuple[Job, int]]] = {}
        self.served, self.trained, self.time = ServedItems(), TokenCounters({}), WorkerTime({})
        self.parts = [TimeSlice(Part(), lambda: bool(self.running)), TimeSlice(Part(), lambda: bool(self.operations))]
        self.now = 0.0
        for job in jobs:
            self.begin(job)

    def begin(self, job: Job) -> None:
        for _ in range(job.rows):
            tokens = self.random.randint(1, 2 * job.tokens) if job.varied else job.tokens
            self.queue.put(job.tenant, str(id(job)), Reply(job, tokens))
        job.open = job.rows

    def dispatch(self) -> None:
        held = self.tenants([*self.waiting, *self.running])

        def give(reply: Reply) -> None:
            self.queue.counters.charge(reply.job.tenant, reply.left)
            held[reply.job.tenant] += 1
            self.waiting.append(reply)

        while held.total() < max(CROWD_ROWS, len(self.running)) + AHEAD:
            short = short_of_rows(self.queue.tenants, held, {}, CROWD_ROWS)
            if (taken := self.queue.take(lambda reply: True, short=short)) is None:
                break
            give(taken[0])
        while held.total() < most_rows(CROWD_ROWS) + AHEAD:
            short = short_of_rows(self.queue.tenants, held, {}, CROWD_ROWS)
            if not short or (taken := self.queue.take(lambda reply: True, among=short)) is None:
                break
            give(taken[0])
        while True:
            at = next_row([reply.job.tenant for reply in self.waiting], self.tenants(self.running), {}, CROWD_ROWS)
            if at is None:
                break
            self.running.append(self.waiting.pop(at))

    def tenants(self, replies: Sequence[Reply]) -> Counter[str]:
        return Counter(reply.job.tenant for reply in replies)

    def decode(self) -> tuple[float, dict[str, float]]:
        tenants, clients = [reply.job.tenant for reply in self.running], int(self.room is not None)
        weights = self.time.weights_within(set(tenants))
        order = fair_items(tenants, weights, lambda count: step(count + clients), self.served.begin(tenants))
        fair = [self.running[at] for at in order]
        first = self.served.order([reply.job.tenant for reply in fair], weights)[: self.room]
        rows = [fair[at] for at in first[:CROWD_ROWS]]
        computed = self.tenants(rows)
        self.served.end(computed, Counter(tenants) - computed, weights)
        for reply in rows:
            reply.left -= 1
            if not reply.left:
                self.running.remove(reply)
                reply.job.open -= 1
                if not reply.job.open:
                    self.train(reply.job, reply.job.train)
        return step(len(rows) + clients), self.time.weights_within(computed)

    def train(self, job: Job, slices: int) -> None:
        if job.tenant not in self.operations:
            self.trained.lift(job.tenant)
        self.operations.setdefault(job.tenant, deque()).append((job, slices))

    def slice(self) -> None:
        self.dispatch()
        divide_slices(self.parts, self.time, self.tenants(self.running), self.operations)
        chosen = next_slice(self.parts)
        assert chosen is not None
        if chosen is self.parts[0]:
            seconds, used = self.decode()
        else:
            seconds, tenant = SLICE, self.trained.order(self.operations)[0]
            used = {tenant: 1.0}
            self.trained.charge(tenant, seconds / self.time.weight_within(tenant))
            job, left = self.operations[tenant].popleft()
            if left > 1:
                self.train(job, left - 1)
            else:
                job.steps += 1
                self.begin(job)
            if not self.operations[tenant]:
                del self.operations[tenant]
        chosen.charge(seconds)
        self.now += seconds
        self.time.charge(seconds, used)


def step(rows: int) -> float:
    return SLICE * (0.2 + 0.8 * rows / CROWD_ROWS)


def speed(small: Job, others: Sequence[Job], room: int | None, seed: int, seconds: float = 90.0) -> float:
    """Steps of the small job per second, after a while."""
    small = replace(small)
    crowd = Crowd([small, *others], room, seed)
    while crowd.now < seconds / 3:
        crowd.slice()
    before, began = small.steps, crowd.now
    while crowd.now < seconds:
        crowd.slice()
    return (small.steps - before) / (crowd.now - began)


@given(
    small=st.builds(Job, st.just("small"), st.integers(1, 4), st.integers(8, 32), st.integers(1, 6)),
    count=st.integers(1, 12),
    large=st.builds(
        Job, st.just("large"), st.integers(4, 16), st.sampled_from([4, 32, 128]), st.integers(1, 6), st.booleans()
    ),
    room=st.sampled_from([None, 8, 12]),
    seed=st.integers(0, 100),
)
@settings(max_examples=examples(8))
def test_a_small_job_keeps_its_speed_with_any_jobs_of_another_tenant(
    small: Job, count: int, large: Job, room: int | None, seed: int
) -> None:
    alone = speed(small, [], room, seed)
    assert speed(small, [replace(large) for _ in range(count)], room, seed) >= 0.4 * alone
