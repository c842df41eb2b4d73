"""RLBoost's Algorithm 2: the pure decisions against their definitions, the index against looking at everybody, the
plateau against curves whose knee is known, and all of it in rollouts on scripted workers."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from operator import truediv
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.controller.rollout.test_scheduler import Room, check
from tests.support.draws import examples
from tests.support.peers import ScriptedWorker, eventually, settle, text_of
from tests.support.room import beat as heartbeat

from rookery import protocol
from rookery.scheduling.balancing import (
    SHORTAGE_HEARTBEATS,
    SLOWER,
    MigrationPlan,
    WorkerLoad,
    balance,
    handicap,
    load,
    select,
)
from rookery.scheduling.costs import CostTable, isotonic
from rookery.scheduling.divided_rollout import DecodingWorker, moves, saved_per_token
from rookery.scheduling.saturation import ENOUGH, FLAT, KEPT, SaturationEstimator
from rookery.scheduling.worker_index import WorkerIndex

# --- what a worker's load is ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "decoding", "beats", "expected"),
    [
        (0, 0, [], (0, 0, 8)),
        (5, 0, [], (0, 5, 3)),  # rows are free: what it was given decodes
        (11, 8, [], (3, 8, 0)),
        (5, 0, [(2, 3)], (0, 5, 3)),  # they may have come just then
        (5, 0, [(2, 3), (2, 0)], (0, 5, 3)),
        (5, 0, [(2, 0), (2, 3)], (0, 5, 3)),
        (5, 2, [(1, 4), (2, 3)], (3, 2, 0)),  # no room for more than two
        (5, 1, [(2, 3), (1, 4)], (3, 2, 0)),
        (5, 4, [(2, 3), (2, 3)], (1, 4, 0)),  # tokens of four came
        (5, 5, [(2, 3), (2, 3)], (0, 5, 0)),
        (5, 0, [(0, 5), (0, 5)], (5, 0, 0)),  # it pulls their adapter
        (3, 0, [(5, 2), (5, 2)], (0, 3, 2)),  # some ended since
        (9, 0, [(12, 4), (12, 4)], (1, 8, 0)),  # never more than its rows
    ],
)
def test_load_follows_from_tokens_and_heartbeats(
    held: int, decoding: int, beats: list[tuple[int, int]], expected: tuple[int, int, int]
) -> None:
    assert load(8, held, decoding, beats) == expected


@given(
    st.integers(1, 8), st.integers(0, 30), st.integers(0, 30),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=SHORTAGE_HEARTBEATS),
)  # fmt: skip
def test_a_load_adds_up(rows: int, held: int, decoding: int, beats: list[tuple[int, int]]) -> None:
    decoding = min(decoding, held)
    pending, executing, free = load(rows, held, decoding, beats)
    assert min(pending, executing, free) >= 0
    assert pending + executing == held
    assert not (pending and free), "what waits would have taken the row"
    assert executing >= min(decoding, rows)
    assert executing + free <= rows


# --- select and balance, branch by branch -----------------------------------------------------------------------------


def at(name: str, pending: int, executing: int, free: int, flat: int | None = None) -> WorkerLoad:
    return WorkerLoad(name, pending, executing, free, flat)


def test_a_request_goes_to_the_least_pending_below_theta_or_is_held() -> None:
    full, fuller = at("a", 2, 8, 0), at("b", 3, 8, 0)
    assert select([], 4) is None
    assert select([full, fuller], 4) == "a"
    assert select([full, fuller], 3) == "a"
    assert select([full, fuller], 2) is None
    assert select([fuller, at("c", 0, 8, 0)], 1) == "c"
    assert select([at("c", 0, 8, 0), at("d", 0, 1, 7)], 4) == "d", "a free row before a full worker"
    assert select([at("c", 0, 4, 4), at("d", 0, 1, 7)], 4) == "d", "then the emptier"
    assert select([at("d", 0, 1, 7), at("c", 0, 1, 7)], 4) == "c", "then the first by name"
    assert select([at("c", 0, 8, 0), at("d", 0, 1, 7)], 0) == "d", "Θ = 0: free rows only"
    assert select([at("c", 0, 8, 0)], 0) is None


def test_one_pending_request_moves_from_the_most_pending_to_a_worker_without_any() -> None:
    a, b, idle = at("a", 2, 8, 0), at("b", 3, 8, 0), at("c", 0, 1, 7)
    assert balance([a, b, idle], [a, b, idle]) == MigrationPlan("b", "c", 1, executing=False)
    assert balance([a, b, idle], [a, b]) is None, "who takes it not is no target"
    full = at("c", 0, 8, 0)
    assert balance([a, b, full], [a, b, full]) is None, "it would wait there as well"
    tie = at("0", 3, 8, 0)
    assert balance([a, b, tie, idle], [idle]) == MigrationPlan("0", "c", 1, executing=False)


def test_an_idle_worker_takes_executing_requests_beyond_the_plateau_of_the_busiest() -> None:
    a, b, idle = at("a", 0, 20, 44, flat=8), at("b", 0, 30, 34, flat=8), at("c", 0, 0, 64, flat=8)
    assert balance([a, b, idle], [a, b, idle]) == MigrationPlan("b", "c", 22, executing=True)
    assert balance([a, b], [a, b]) is None, "nobody is idle"
    small = at("c", 0, 0, 4)
    assert balance([a, b, small], [small]) == MigrationPlan("b", "c", 4, executing=True), "as many as begin at once"
    assert balance([a, at("b", 0, 30, 34, flat=30), idle], [idle]) is None, "it is not beyond"
    assert balance([a, at("b", 0, 30, 34), idle], [idle]) is None, "and not where the plateau is unknown"
    assert balance([a, b, idle, at("d", 1, 64, 0)], [idle]) == MigrationPlan("d", "c", 1, executing=False), (
        "pending first"
    )
    assert balance([idle], [idle]) is None
    assert balance([idle], []) is None


CURVE = [(1, 0.011), (8, 0.0135), (16, 0.0175), (64, 0.0435)]


def decoding(slowness: float) -> CostTable:
    return CostTable.of({"decode": [(size, seconds * slowness) for size, seconds in CURVE]})


def test_slow_worker_gets_a_request_where_the_quickest_would_decode_it_as_slowly() -> None:
    quickest = decoding(1)
    assert handicap(decoding(1.4), quickest, 0) == 0, "equal workers measure unequal costs"
    assert handicap(decoding(0.0435 / 0.011), quickest, 0) == 63
    assert handicap(decoding(20), quickest, 0) > 300
    assert handicap(CostTable(), quickest, 0) == handicap(quickest, CostTable(), 0) == 0


@given(st.lists(st.tuples(st.floats(1, 30), st.integers(0, 63)), min_size=2, max_size=6))
def test_request_goes_where_it_is_decoded_soonest(drawn: list[tuple[float, int]]) -> None:
    """Within the factor from which a worker counts as slow, and the rounding to a row."""
    tables = [decoding(slowness) for slowness, _ in drawn]
    quickest = max(tables, key=lambda table: table.throughput("decode"))
    known = [
        WorkerLoad(f"{n}", 0, held, 64 - held, handicap=handicap(table, quickest, held))
        for n, (table, (_, held)) in enumerate(zip(tables, drawn, strict=True))
    ]
    chosen = int(select(known, 0) or "")
    seconds = [
        [t.predict("decode", held + more) for t, (_, held) in zip(tables, drawn, strict=True)] for more in (1, 2)
    ]
    row = max(map(truediv, seconds[1], seconds[0]))
    assert seconds[0][chosen] <= SLOWER * row * min(seconds[0])


instances = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 30), st.integers(0, 12), st.none() | st.integers(1, 8)), max_size=7
).map(
    lambda drawn: [
        WorkerLoad(f"w{n}", *load(rows, held, min(held, decoding, rows), []), flat)
        for n, (rows, held, decoding, flat) in enumerate(drawn)
    ]
)


@given(instances)
def test_balancing_comes_to_rest(known: list[WorkerLoad]) -> None:
    """From any state, without arrivals: never more moves than what is pending and what executes beyond B."""
    state = {instance.name: instance for instance in known}
    beyond = sum(max(0, i.executing - i.saturated_rows) for i in known if i.saturated_rows is not None)
    bound, moves = sum(i.pending for i in known) + beyond, 0
    while (move := balance(state.values(), state.values())) is not None:
        assert move.count >= 1 and move.source != move.target
        source, target = state[move.source], state[move.target]
        assert target.free >= move.count, "it begins at once"
        if move.executing:
            state[move.source] = replace(source, executing=source.executing - move.count, free=source.free + move.count)
        else:
            state[move.source] = replace(source, pending=source.pending - 1)
        state[move.target] = replace(target, executing=target.executing + move.count, free=target.free - move.count)
        moves += 1
        assert moves <= bound + len(known)
    waiting = [i for i in state.values() if i.pending]
    assert not waiting or not any(i.free and not i.pending for i in state.values()), "nobody waits beside a free row"


@settings(max_examples=examples(100))
@given(st.integers(0, 2**32))
def test_the_index_decides_as_a_full_scan(seed: int) -> None:
    """Workers come, go and change, in any order."""
    random = Random(seed)
    index, known, tags = WorkerIndex(), {}, {}
    names, colours = [f"w{n}" for n in range(random.randint(1, 6))], ["all", "red", "blue"]
    for _ in range(60):
        name = random.choice(names)
        if name in known and random.random() < 0.2:
            index.remove(name)
            del known[name], tags[name]
        else:
            state = load(random.randint(1, 6), random.randint(0, 9), 0, [])
            known[name] = WorkerLoad(name, *state, random.choice([None, 1, 2, 4]))
            tags[name] = frozenset(random.sample(colours, random.randint(0, 3)))
            index.put(known[name], tags[name])
        wanted = random.sample(colours, random.randint(0, 3))
        takers = [instance for name, instance in known.items() if tags[name] & set(wanted)]
        for theta in (0, 1, 3):
            assert select(index.first(wanted), theta) == select(takers, theta)
        assert balance(index.fullest(), index.first(wanted)) == balance(known.values(), takers)


def test_an_index_without_instances_is_empty() -> None:
    index = WorkerIndex()
    for name in ("a", "b"):
        index.put(WorkerLoad(name, 1, 2, 0), frozenset({"all"}))
    index.remove("a")
    index.remove("b")
    assert not index.first(["all"]) and not index.fullest()


# --- the plateau ------------------------------------------------------------------------------------------------------


def fed(
    plateau: SaturationEstimator, rate: object, rows: list[int], noise: float, random: Random, times: int = KEPT
) -> SaturationEstimator:
    for _ in range(times):
        for count in rows:
            seconds = random.uniform(0.5, 2.0)
            tokens = rate(count) * seconds * random.uniform(1 - noise, 1 + noise)  # type: ignore[operator]
            plateau.add(count, count, round(tokens), seconds)
    return plateau


@settings(max_examples=examples(60))
@given(knee=st.integers(2, 24), noise=st.floats(0, 0.1), seed=st.integers(0, 1000))
def test_the_knee_of_a_roofline_is_found(knee: int, noise: float, seed: int) -> None:
    """Throughput grows with the rows up to ``knee`` and is flat beyond: B lies between where FLAT of the best is
    reached and the half-octave after the knee's, and the noise moves it by no more than its own share."""
    rows = sorted({round(2 ** (half / 4)) for half in range(4 * 7 + 1)})
    plateau = fed(SaturationEstimator(), lambda count: 100.0 * min(count, knee), rows, noise, Random(seed))
    assert plateau.saturated_rows is not None
    assert (FLAT - noise) * knee / math.sqrt(2) <= plateau.saturated_rows <= 2 * knee


@given(st.lists(st.floats(0, 100), max_size=8))
def test_a_growing_curve_is_the_nearest_one(values: list[float]) -> None:
    """Among all: against the formula rᵢ = max over j ≤ i of min over k ≥ i of the mean of j … k."""
    found = isotonic(values)
    for i in range(len(values)):
        means = [[sum(values[j : k + 1]) / (k + 1 - j) for k in range(i, len(values))] for j in range(i + 1)]
        assert found[i] == pytest.approx(max(min(row) for row in means), abs=1e-9)


@settings(max_examples=examples(60))
@given(overhead=st.floats(0.5, 5), noise=st.floats(0, 0.05), seed=st.integers(0, 1000))
def test_on_a_smooth_curve_nearly_all_of_the_throughput_is_there(overhead: float, noise: float, seed: int) -> None:
    """A step of b rows takes overhead + b: the rate is b / (overhead + b)."""

    def rate(count: float) -> float:
        return 1000 * count / (overhead + count)

    plateau = fed(SaturationEstimator(), rate, [*range(1, 16), *range(16, 193, 16)], noise, Random(seed))
    assert plateau.saturated_rows is not None
    best = rate(192)
    assert rate(plateau.saturated_rows * math.sqrt(2)) >= (FLAT - noise) * best
    assert rate(plateau.saturated_rows / 2) <= (FLAT + 2 * noise) * best


def test_saturation_is_unknown_before_enough_samples() -> None:
    plateau, random = SaturationEstimator(), Random(0)
    assert plateau.saturated_rows is None
    fed(plateau, lambda count: 10.0 * count, list(range(1, 65)), 0.05, random)
    assert plateau.saturated_rows is None, "still growing at the last that was seen"
    few = fed(SaturationEstimator(), lambda count: 100.0, [1, 2, 4, 8], 0.0, random, times=ENOUGH - 1)
    assert few.saturated_rows is None, "too few to tell"
    fed(few, lambda count: 100.0, [1, 2, 4, 8], 0.0, random, times=1)
    assert few.saturated_rows == 1


def test_uninformative_heartbeats_are_ignored_and_old_ones_dropped() -> None:
    plateau, random = SaturationEstimator(), Random(0)
    for before, after, tokens, seconds in [(0, 8, 100, 1.0), (2, 8, 100, 1.0), (8, 8, 0, 1.0), (8, 8, 100, 0.01)]:
        for _ in range(KEPT):
            plateau.add(before, after, tokens, seconds)
    assert not plateau._samples
    fed(plateau, lambda count: 100.0 * min(count, 4), [2, 4, 8, 16, 32], 0.0, random)
    assert plateau.saturated_rows == 4
    fed(plateau, lambda count: 100.0 * min(count, 8), [2, 4, 8, 16, 32], 0.0, random)
    assert plateau.saturated_rows == 8, "the class has changed"


# --- in rollouts ------------------------------------------------------------------------------------------------------


async def frozen(room: Room, name: str, rows: int) -> ScriptedWorker:
    """A worker that generates nothing until it is told to."""
    worker = await room.worker(name, max_rows=rows, chunk=1)
    worker.generating.clear()
    return worker


def texts(count: int, longest: int = 12) -> list[int]:
    """Seeds whose texts have full length, so that nothing ends before its time."""
    return [seed for seed in range(1000) if len(text_of(seed, longest)[0]) == longest][:count]


async def say(worker: ScriptedWorker, request: str) -> None:
    chunk = worker.next_chunk(request)
    worker.sampled.update((request, chunk.offset + i) for i in range(len(chunk.tokens)))
    await worker.say(protocol.Output(epoch=0, chunks=[chunk]))


async def beat(worker: ScriptedWorker, active: int, waiting: int, generated: int = 0, seconds: float = 0.0) -> None:
    await worker.say(
        protocol.Heartbeat(
            epoch=0, progress=0, active=active, waiting=waiting, training=0, generated=generated,
            decode_seconds=seconds, train_seconds=0.0,
        )
    )  # fmt: skip
    await settle()


async def finish(room: Room, seeds: list[int], replies: list[asyncio.Task[Any]], *workers: ScriptedWorker) -> None:
    """Let the workers generate; every reply is the text of its seed."""
    for worker in workers:
        worker.generating.set()
    for seed, reply in zip(seeds, await asyncio.gather(*replies), strict=True):
        check(reply, seed)
    await room.close()


async def test_a_joining_worker_gets_pending_requests_at_once(tmp_path: Path) -> None:
    room = Room(tmp_path, dispatch_ahead=6)
    old = await frozen(room, "old", 4)
    seeds = texts(10)
    replies = [room.sample(seed) for seed in seeds]
    await eventually(lambda: len(old.active) == 10)
    for seed in seeds[:4]:
        await say(old, f"job-{seed}")
    await settle()
    known = room.fleet.get("old")
    assert known is not None
    assert (room.rollouts.pool.slots(known).load[1], room.rollouts.pool.outstanding(known)) == (4, 10)
    new = await frozen(room, "new", 4)
    await eventually(lambda: len(new.active) == 4)
    await eventually(lambda: len(old.active) == 6)
    assert room.rollouts.requeues["balanced"] == room.rollouts.migrated == 4
    assert [g.request for g in new.generates] == [f"job-{seed}" for seed in reversed(seeds[-4:])], "the last given"
    assert set(old.active) == {f"job-{seed}" for seed in seeds[:6]}
    assert not any(g.prefix_tokens for g in new.generates)
    await finish(room, seeds, replies, old, new)
    assert set((old.sampled + new.sampled).values()) == {1}


async def test_slow_worker_gets_requests_without_a_row_on_a_quick_one(tmp_path: Path) -> None:
    room = Room(tmp_path)
    slow, quick = await frozen(room, "a", 8), await frozen(room, "b", 8)
    for worker, slowness in ((slow, 8.0), (quick, 1.0), (slow, 8.0)):
        await worker.say(heartbeat(costs=decoding(slowness).curves))
        await settle()
    seeds = texts(10)
    replies = [room.sample(seed) for seed in seeds]
    await eventually(lambda: len(slow.active) + len(quick.active) == 10)
    assert (len(slow.active), len(quick.active)) == (2, 8)
    await finish(room, seeds, replies, slow, quick)
    assert set((slow.sampled + quick.sampled).values()) == {1}


async def test_heartbeats_report_requests_that_wait_despite_free_rows(tmp_path: Path) -> None:
    """The first worker has memory for two; the second takes one of the others each time that it has a row."""
    room = Room(tmp_path, dispatch_ahead=4)
    one, two = await frozen(room, "one", 4), await frozen(room, "two", 4)
    replies = [room.sample(seed) for seed in texts(8)]
    await eventually(lambda: len(one.active) == len(two.active) == 4)
    for _ in range(SHORTAGE_HEARTBEATS):
        await beat(one, active=2, waiting=2)
    assert (len(one.active), len(two.active)) == (4, 4), "nobody has a row"
    first = next(iter(two.active))
    while first in two.active:
        await say(two, first)
    await settle()
    assert (len(one.active), len(two.active)) == (3, 4)
    assert room.rollouts.requeues["balanced"] == 1
    assert room.rollouts.waiting() == 0
    for worker in (one, two):
        worker.generating.set()
    await asyncio.gather(*replies)
    await room.close()


async def test_a_worker_never_has_more_pending_requests_than_theta(tmp_path: Path) -> None:
    room = Room(tmp_path, dispatch_ahead=3)
    worker = await frozen(room, "one", 4)
    seeds = texts(20)
    replies = [room.sample(seed) for seed in seeds]
    await eventually(lambda: len(worker.active) == 7)
    for _ in range(SHORTAGE_HEARTBEATS):
        await beat(worker, active=1, waiting=6)
    for _ in range(11):
        await say(worker, "job-" + str(seeds[0]))
    await settle()
    assert len(worker.active) == 7, "six wait: more than Θ already"
    await say(worker, "job-" + str(seeds[0]))
    await settle()
    assert len(worker.active) == 6, "five wait"
    await beat(worker, active=4, waiting=2)
    await settle()
    assert len(worker.active) == 7, "two wait: one more may"
    await finish(room, seeds, replies, worker)


async def test_an_idle_worker_takes_decoding_requests_beyond_the_plateau(tmp_path: Path) -> None:
    """B is learned from beats: twice as many rows gave no more tokens."""
    room = Room(tmp_path)
    old = await frozen(room, "old", 16)
    generated, seconds = 0, 0.0
    for rows in (4, 8, 16):
        for _ in range(ENOUGH + 1):
            await beat(old, rows, 0, generated, seconds)
            generated, seconds = generated + 400, seconds + 1.0
    seeds = texts(10)
    replies = [room.sample(seed) for seed in seeds]
    await eventually(lambda: len(old.active) == 10)
    for number, seed in enumerate(seeds):
        for _ in range(number + 1):
            await say(old, f"job-{seed}")
    new = await frozen(room, "new", 16)
    await eventually(lambda: len(new.active) == 6)
    await settle()
    assert room.rollouts.requeues["balanced"] == 6
    assert sorted(len(g.prefix_tokens) for g in new.generates) == [1, 2, 3, 4, 5, 6], (
        "the fewest tokens to compute again"
    )
    assert len(old.active) == 4
    await finish(room, seeds, replies, old, new)


async def test_nothing_decoding_moves_before_the_plateau_is_known(tmp_path: Path) -> None:
    room = Room(tmp_path)
    old = await frozen(room, "old", 16)
    replies = [room.sample(seed) for seed in texts(10)]
    await eventually(lambda: len(old.active) == 10)
    new = await frozen(room, "new", 16)
    await settle()
    assert not new.active
    old.generating.set()
    await asyncio.gather(*replies)
    await room.close()


async def test_requests_in_reserved_rows_are_not_moved(tmp_path: Path) -> None:
    room = Room(tmp_path, dispatch_ahead=4)
    old = await frozen(room, "old", 2)
    rollouts = [room.sample(seed) for seed in texts(2)]
    await eventually(lambda: len(old.active) == 2)
    chats = [room.sample(seed, "a", f"chat-{seed}", client=True, episode="") for seed in texts(2)]
    await eventually(lambda: len(old.active) == 4)
    new = await frozen(room, "new", 2)
    await eventually(lambda: len(new.active) == 2)
    await settle()
    assert all(generate.request.startswith("job-") for generate in new.generates)
    for worker in (old, new):
        worker.generating.set()
    await asyncio.gather(*chats, *rollouts)
    await room.close()


async def test_the_cost_of_a_frame_does_not_depend_on_jobs_and_workers(tmp_path: Path) -> None:
    """However many wait: one look for a worker of the request that takes the place of the one that ended."""
    room = Room(tmp_path, dispatch_ahead=0)
    workers = [await frozen(room, f"w{number}", 1) for number in range(20)]
    seeds = texts(60)
    replies = [room.sample(seed, f"tenant-{seed % 5}", f"job-{seed}") for seed in seeds]
    await eventually(lambda: all(worker.active for worker in workers))
    assert room.rollouts.waiting() == 40
    looks: list[str] = []
    pool = room.rollouts.pool
    choose, put = pool.choose, pool._reindex
    pool.choose = lambda *given: (looks.append("choose"), choose(*given))[1]  # type: ignore[method-assign]
    pool._reindex = lambda *given: (looks.append("put"), put(*given))[1]  # type: ignore[method-assign]
    [first] = workers[0].active
    for _ in range(11):
        await say(workers[0], first)
    await settle()
    looks.clear()
    await say(workers[0], first)
    await settle()
    assert room.rollouts.waiting() == 39
    assert sorted(looks) == ["choose", "put", "put"]
    for worker in workers:
        worker.generating.set()
    await asyncio.gather(*replies)
    await room.close()


# --- merging the tails of workers that train --------------------------------------------------------------------------


COSTS: Any = {"decode": [(1, 0.02), (8, 0.024)], "prefill": [(1, 0.001), (512, 0.5)]}


async def training(worker: ScriptedWorker, operations: int, seconds: float, **fields: Any) -> None:
    known = {"costs": COSTS, "free_tokens": 1000, **fields}
    await worker.say(heartbeat(training=operations, train_seconds=seconds, **known))
    await settle()


@pytest.mark.parametrize(
    ("lasts", "waiting", "on", "merged"),
    [
        ([40.0, 40.0], 0, True, 2),
        ([40.0, 4.0, 40.0], 0, True, 0),  # trainings do not predict each other
        ([40.0, 40.0], 1, True, 0),  # its rows would be filled at once
        ([0.001, 0.001], 0, True, 0),  # it gains less than the prefill costs
        ([40.0, 40.0], 0, False, 0),
    ],
)
async def test_rollouts_leave_a_worker_that_trains_where_that_gains(
    tmp_path: Path, lasts: list[float], waiting: int, on: bool, merged: int
) -> None:
    """Two of them decode at each worker; the other one's batch takes both, with the tokens that they have."""
    room = Room(tmp_path, dispatch_ahead=0, merge_tails=on)
    trainer, other = await frozen(room, "a", 2), await frozen(room, "b", 4)
    seeds = texts(4 + 2 * waiting + waiting)
    replies = [room.sample(seed) for seed in seeds[:4]]
    await eventually(lambda: len(trainer.active) == len(other.active) == 2)
    await training(other, 0, 0.0)
    spent = 0.0
    for seconds in lasts:
        await training(trainer, 1, spent)
        spent += seconds
        await training(trainer, 0, spent)
    for name in (*trainer.active, *other.active):
        await say(trainer if name in trainer.active else other, name)
    replies += [room.sample(seed) for seed in seeds[4:]]
    await settle()
    held = dict(trainer.active)
    await training(trainer, 1, spent)
    assert room.rollouts.requeues["merged"] == merged
    assert len(trainer.active) == 2 - merged
    if merged:
        moved = {request.request: request.prefix_tokens for request in other.generates[-2:]}
        assert set(moved) == set(held) and all(len(tokens) == 1 for tokens in moved.values())
    await finish(room, seeds, replies, trainer, other)
    assert set((trainer.sampled + other.sampled).values()) == {1}, "no token is sampled twice"


# --- divided rollout ---

EVEN = CostTable.of({"decode": [(1, 0.01), (64, 0.01)], "prefill": [(1, 1e-4), (4096, 0.4)]})
LINEAR = CostTable.of({"decode": [(1, 0.01), (64, 0.64)], "prefill": [(1, 1e-4), (4096, 0.4)]})


def site(costs: CostTable, executing: int, pending: int = 0, free: int = 8, free_tokens: int = 10**6) -> DecodingWorker:
    return DecodingWorker(costs, executing, pending, free, free_tokens)


def test_a_flat_curve_gives_a_reason_to_move_only_where_requests_wait() -> None:
    assert not moves(site(EVEN, 60), site(EVEN, 2), 200, 500)
    assert moves(site(EVEN, 60, pending=3), site(EVEN, 2), 200, 500)
    assert not moves(site(EVEN, 60, pending=3), site(EVEN, 2), 4000, 100), "its prefill costs more"


def test_a_linear_curve_balances_rows() -> None:
    assert moves(site(LINEAR, 20), site(LINEAR, 2), 200, 500)
    assert not moves(site(LINEAR, 20), site(LINEAR, 19), 200, 500)
    assert not moves(site(LINEAR, 20), site(LINEAR, 2), 200, 0)


def test_the_target_has_a_row_memory_and_costs() -> None:
    crowded = site(LINEAR, 20, pending=5)
    for target in (
        site(LINEAR, 2, free=0),
        site(LINEAR, 2, pending=1),
        site(LINEAR, 2, free_tokens=699),
        site(CostTable(), 2),
        site(CostTable.of({"decode": [(1, 0.01)]}), 2),
    ):
        assert not moves(crowded, target, 200, 500)
    assert moves(crowded, site(LINEAR, 2, free_tokens=700), 200, 500)
    assert not moves(site(CostTable(), 20), site(LINEAR, 2), 200, 500)


@given(st.integers(1, 64), st.integers(0, 63), st.integers(1, 4000), st.integers(1, 4000))
def test_a_move_is_never_undone_at_once(here: int, there: int, tokens: int, left: int) -> None:
    """Where it pays to go, it does not pay to come back: requests do not oscillate between equal workers."""
    if moves(site(LINEAR, here), site(LINEAR, there), tokens, left):
        assert not moves(site(LINEAR, there + 1), site(LINEAR, here - 1), tokens, left)


@given(st.integers(2, 64), st.integers(0, 63))
def test_saved_seconds_are_those_of_all_rows(here: int, there: int) -> None:
    """On two equal workers: the sum over all rows of the time per token before, less after."""

    def total(rows: int) -> float:
        return rows * LINEAR.predict("decode", rows)

    saved = total(here) + total(there) - total(here - 1) - total(there + 1)
    assert abs(saved_per_token(site(LINEAR, here), site(LINEAR, there)) - saved) < 1e-9
