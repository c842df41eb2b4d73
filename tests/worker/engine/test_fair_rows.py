"""Rollouts of several tenants in one engine: a step takes what leaves the smallest its fair share, and no text depends
on it."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from tests.support.tiny import COMPUTED
from tests.worker.engine.test_engine import finish, order
from tests.worker.engine.test_slo_gate import Clock, chat, filled, gated, tokens

from rookery.scheduling.worker_time import WorkerTime
from rookery.worker.core import WorkerCore
from rookery.worker.engine.native.engine import PATIENCE, NativeEngine
from rookery.worker.trainer.operation_queue import OperationQueue

SMALL, LARGE = 2, 6


def submit(engine: NativeEngine, tenant: str, count: int, **changes: object) -> None:
    for number in range(count):
        engine.submit(order(f"{tenant}{number}", seed=number, tenant=tenant, **{"max_tokens": 12, **changes}))


def start(engine: NativeEngine, count: int) -> None:
    """Step until so many requests run and each has a token."""
    while len(tokens(engine)) < count or not all(tokens(engine).values()):
        assert engine.step()


def crowd() -> NativeEngine:
    engine = gated(Clock())
    submit(engine, "large", LARGE)
    submit(engine, "small", SMALL)
    return engine


def test_a_decode_step_costs_twice_the_time_of_the_smaller_of_two_tenants_alone() -> None:
    engine = crowd()
    start(engine, SMALL + LARGE)
    for _ in range(4):
        before, steps = tokens(engine), engine.stats["decode_steps"]
        assert engine.step() and engine.stats["decode_steps"] == steps + 1
        grown = {name: count - before[name] for name, count in tokens(engine).items()}
        assert sum(grown.values()) == 2 * SMALL, "a row costs 10 ms"
        assert all(grown[f"small{number}"] for number in range(SMALL))
        assert engine.tenant_tokens() == {"small": SMALL, "large": SMALL}


def test_a_request_that_gets_the_next_row_counts_as_work_in_the_engine() -> None:
    """Else a long training slice would not let the engine begin it."""
    engine = gated(Clock(), max_rows=LARGE)
    submit(engine, "large", LARGE + SMALL)
    start(engine, LARGE)
    assert set(engine.sharing()) == {"large"}
    submit(engine, "small", SMALL)
    assert set(engine.sharing()) == {"large", "small"}, "a tenant short of rows gets one beyond the number"
    submit(empty := gated(Clock()), "small", 1)
    assert set(empty.sharing()) == {"small"}


def test_a_request_without_memory_is_no_work_in_the_engine() -> None:
    engine = gated(Clock(), kv_budget_bytes=COMPUTED.itemsize << 15)
    submit(engine, "large", 8)
    assert engine.step() and 0 < len(engine.admission.running) < 8
    submit(engine, "small", 1)
    assert set(engine.sharing()) == {"large"}, "it waits behind one to which memory gave no row"


def test_a_tenant_alone_has_all_rows() -> None:
    engine = gated(Clock())
    submit(engine, "large", SMALL + LARGE)
    start(engine, SMALL + LARGE)
    before = tokens(engine)
    assert engine.step()
    assert all(count == before[name] + 1 for name, count in tokens(engine).items())


def test_texts_are_the_same_bits_with_another_tenant() -> None:
    together = finish(crowd())
    for tenant, count in (("small", SMALL), ("large", LARGE)):
        engine = gated(Clock())
        submit(engine, tenant, count)
        for name, (text, last) in finish(engine).items():
            assert together[name][0] == text and together[name][1].finish == last.finish


def test_long_prompts_of_another_tenant_wait_while_a_tenant_with_less_time_decodes() -> None:
    """Without the worker's time, prompts and decoding alternate."""
    steps = {}
    for charged in (False, True):
        engine, time = gated(Clock(), prefill_tokens=16), WorkerTime({})
        engine.share_time(time)
        submit(engine, "small", SMALL, max_tokens=30)
        start(engine, SMALL)
        submit(engine, "large", 1, prompt=list(range(1, 101)), shared_prefix=0)
        if charged:
            time.divide({"small", "large"}, ())
            time.charge(10.0, {"large": 1.0})
        before = engine.stats["decode_steps"]
        while engine.stats["prefill_tokens"] < 100 and "small0" in tokens(engine):
            assert engine.step()
        steps[charged] = engine.stats["decode_steps"] - before
    assert steps[True] > 25 > 10 > steps[False]


@pytest.mark.parametrize("others", [1, 3])
@pytest.mark.parametrize(("long", "short"), [(100, 20), (100, 40), (90, 8), (30, 30), (60, 16)])
def test_a_short_prompt_is_computed_next_to_longer_ones_that_came_before(long: int, short: int, others: int) -> None:
    """In one slice, which costs as much as the short one alone for each tenant."""
    engine = gated(Clock(), prefill_tokens=512)
    for number in range(others):
        submit(engine, f"large{number}", 1, prompt=list(range(1, long + 1)), shared_prefix=0)
    submit(engine, "small", 1, prompt=list(range(1, short + 1)), shared_prefix=0)
    assert engine.step()
    assert filled(engine, "small0") == short and tokens(engine)["small0"] == 1
    computed = engine.tenant_tokens()
    assert len(computed) == 1 + others and all(computed.values())
    assert sum(computed.values()) <= max(16, short) * (1 + others)


def test_weights_of_rollouts_divide_a_decode_step_where_nothing_trains() -> None:
    engine = gated(Clock())
    core = WorkerCore(engine, OperationQueue())
    for tenant, count, weight in (("light", 5, 1.0), ("heavy", 3, 3.0)):
        for number in range(count):
            core.submit(order(f"{tenant}{number}", seed=number, tenant=tenant, weight=weight, max_tokens=12), None, 0.0)
    start(engine, 8)
    before = tokens(engine)
    assert engine.step()
    grown = {name: count - before[name] for name, count in tokens(engine).items()}
    assert core.time.weights == {"light": 1.0, "heavy": 3.0}
    assert engine.tenant_tokens() == {"light": 1, "heavy": 3} and sum(grown.values()) == 4


def grown(engine: NativeEngine, before: dict[str, int]) -> set[str]:
    """The requests that have more tokens than before."""
    return {name for name, count in tokens(engine).items() if count > before.get(name, 0)}


def test_a_step_with_a_chat_takes_rollouts_of_all_tenants_in_turns() -> None:
    """In order of admission the small tenant's would have none."""
    engine = gated(Clock())
    submit(engine, "large", LARGE - 1)
    submit(engine, "small", SMALL)
    engine.submit(chat(max_tokens=50))
    start(engine, SMALL + LARGE)
    for _ in range(4):
        before = tokens(engine)
        assert engine.step()
        assert {"chat", "small0", "small1"} < grown(engine, before)
        assert engine.tenant_tokens()["small"] == SMALL, "rollouts' time has its tenants"


def test_where_a_chat_leaves_room_for_one_rollout_tenants_take_turns() -> None:
    clock = Clock()
    engine = gated(clock)
    submit(engine, "large", LARGE, max_tokens=60)
    submit(engine, "small", 1, max_tokens=60)
    engine.submit(chat(max_tokens=60))
    start(engine, LARGE + 2)
    had = Counter[str]()
    for _ in range(20):
        clock.now = engine.gate.tracked["chat"].due - 0.026  # a step of two rows takes 25 ms
        before = tokens(engine)
        assert engine.step()
        [rollout] = grown(engine, before) - {"chat"}
        had[rollout[:5]] += 1
    assert had == {"large": 10, "small": 10}


def charge(engine: NativeEngine, time: WorkerTime, used: Counter[str]) -> None:
    """A step of 10 ms, whose time is charged as a worker without training does."""
    time.divide(engine.sharing(), ())
    assert engine.step()
    seconds = 10.0 * engine.gate.rollout_share
    tenants = [tenant for tenant, count in engine.tenant_tokens().items() if count]
    time.charge(seconds, time.weights_within(tenants))
    used.update(dict.fromkeys(tenants, seconds / max(1, len(tenants))))


@pytest.mark.parametrize("enabled", [True, False])
def test_clients_without_objectives_share_the_time_with_other_tenants_rollouts(enabled: bool) -> None:
    engine, time, used = gated(Clock(), enabled=enabled), WorkerTime({}), Counter[str]()
    engine.share_time(time)
    submit(engine, "jobs", 2, max_tokens=50)
    submit(engine, "chats", 2, max_tokens=50, client=True)
    for _ in range(30):
        charge(engine, time, used)
        assert set(used) <= set(engine.sharing())
    assert min(used.values()) > 100 and abs(used["chats"] - used["jobs"]) <= 10, "the first slice is one's prompt"


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_the_time_of_a_slice_is_that_of_the_rows_that_it_computed(rows: int) -> None:
    """The gate allows rollouts, and a step has no room for them."""
    engine, used = gated(Clock(), max_rows=rows), Counter[str]()
    submit(engine, "jobs", 2, max_tokens=50)
    for number in range(rows):
        engine.submit(chat(f"chat{number}", tenant="chats", max_tokens=50, ttft_ms=1e6, tpot_ms=1e6))
    for _ in range(6):
        engine.step()
    for _ in range(20):
        before, steps = tokens(engine), engine.stats["decode_steps"]
        charge(engine, WorkerTime({}), used)
        if engine.stats["decode_steps"] > steps:
            had = grown(engine, before)
            assert engine.gate.rollout_share == sum("jobs" in name for name in had) / len(had)


def test_the_prompt_of_a_waiting_client_is_a_clients() -> None:
    engine = gated(Clock(), max_rows=2)
    for number in range(4):
        prompt = [number + 1] * 8
        engine.submit(chat(f"chat{number}", tenant="chats", prompt=prompt, shared_prefix=8, reserved=number < 2))
    engine.step()
    assert engine.stats["prefill_tokens"] > 16, "more than the prompts of those that run"
    assert not engine.tenant_tokens()["chats"] and engine.gate.rollout_share == 0


@pytest.mark.parametrize("seed", range(12))
def test_every_running_row_gets_a_token_within_a_bound(seed: int) -> None:
    """Clients with and without objectives and rollouts of several tenants, more than there are rows, that come at any
    time. A row waits no longer than patience, and then for the others that wait as long."""
    chance = random.Random(seed)
    rows, time, used = chance.choice([1, 2, 3, 5]), WorkerTime({}), Counter[str]()
    engine = gated(Clock(), max_rows=rows, enabled=chance.random() < 0.8)
    engine.share_time(time)
    names = [f"tenant{number}" for number in range(chance.randint(1, 4))]
    since, most = dict[str, int](), 0
    for step in range(240):
        if step < 120 and chance.random() < 0.3:
            prompt = [chance.randint(1, 50) for _ in range(chance.choice([4, 30]))]
            kind = chance.choice(["rollout", "rollout", "client", "chat"])
            options = {"rollout": {}, "client": {"client": True}, "chat": {"client": True, "ttft_ms": 1e7}}[kind]
            reserved = kind == "chat" and chance.random() < 0.5
            changes = {"tenant": chance.choice(names), "reserved": reserved, "prompt": prompt, **options}
            engine.submit(order(f"{kind}{step}", seed=step, shared_prefix=0, max_tokens=60, **changes))
        before = tokens(engine)
        if engine.active or engine.waiting:
            charge(engine, time, used)
        running = engine.admission.running
        assert sum(row.params.client for row in running) <= rows
        moved = grown(engine, before)
        since = {name: step if name in moved else since.get(name, step) for name in tokens(engine)}
        most = max([most, *(step - last for last in since.values())])
    assert most <= 3 * PATIENCE


@pytest.mark.parametrize("long", [20, 100])
def test_a_prompt_joins_a_chats_behind_others_that_came_before(long: int) -> None:
    """Prompts of the large tenant fill the slice, or do not fit into it."""
    engine = gated(Clock(), prefill_tokens=64)
    submit(engine, "large", 3, prompt=list(range(1, long + 1)), shared_prefix=0)
    submit(engine, "small", 1, prompt=list(range(1, 9)), shared_prefix=0)
    engine.submit(chat(prompt=list(range(1, 9)), shared_prefix=0))
    assert engine.step()
    assert tokens(engine)["chat"] == tokens(engine)["small0"] == 1


def test_a_tenant_below_its_share_gets_rows_while_another_has_them_all() -> None:
    engine = gated(Clock())
    submit(engine, "large", 10)
    start(engine, 8)
    submit(engine, "small", 6)
    engine.step()
    held = Counter(name[:5] for name in tokens(engine))
    assert held == {"large": 8, "small": 4} and engine.waiting == 4, "half as many rows in all, and half of its share"
    before, generated = tokens(engine), engine.generated
    while not {f"small{number}" for number in range(4)} <= grown(engine, before):
        generated = engine.generated
        assert engine.step()
    assert engine.generated - generated <= engine.limits.max_rows


def test_an_interactive_request_takes_one_row_of_the_tenant_with_the_most() -> None:
    engine = gated(Clock())
    submit(engine, "large", 8)
    start(engine, 8)
    submit(engine, "small", 2)
    engine.step()
    engine.submit(chat())
    engine.step()
    assert Counter(name[:5] for name in tokens(engine)) == {"large": 7, "small": 2, "chat": 1}
    assert engine.stats["preempted"] == 1


@pytest.mark.parametrize("rows", [3, 4, 5])
def test_texts_are_the_same_bits_in_rows_beyond_and_with_a_chat(rows: int) -> None:
    def crowded() -> NativeEngine:
        engine = gated(Clock(), max_rows=rows)
        submit(engine, "large", LARGE)
        engine.step()
        submit(engine, "small", SMALL)
        engine.submit(chat(max_tokens=12))
        return engine

    together = finish(crowded())
    for tenant, count in (("small", SMALL), ("large", LARGE)):
        engine = gated(Clock())
        submit(engine, tenant, count)
        for name, (text, last) in finish(engine).items():
            assert together[name][0] == text and together[name][1].finish == last.finish
