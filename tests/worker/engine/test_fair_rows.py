"""Rollouts of several tenants in one engine: a step takes what leaves the smallest its fair share, and no text depends
on it."""

from __future__ import annotations

import pytest
from tests.worker.engine.test_engine import finish, order
from tests.worker.engine.test_slo_gate import Clock, filled, gated, tokens

from rookery.scheduling.worker_time import WorkerTime
from rookery.worker.core import WorkerCore
from rookery.worker.engine.native.engine import NativeEngine
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


def test_a_decode_step_costs_twice_what_the_smaller_of_two_tenants_takes_alone() -> None:
    engine = crowd()
    start(engine, SMALL + LARGE)
    for _ in range(4):
        before, steps = tokens(engine), engine.stats["decode_steps"]
        assert engine.step() and engine.stats["decode_steps"] == steps + 1
        grown = {name: count - before[name] for name, count in tokens(engine).items()}
        assert sum(grown.values()) == 2 * SMALL, "a row costs 10 ms"
        assert all(grown[f"small{number}"] for number in range(SMALL))
        assert engine.tenant_tokens() == {"small": SMALL, "large": SMALL}


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
