"""A worker's planner: what it learns from slices, and when it chooses to run beside."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.tiny import COMPUTED, small

from rookery.scheduling.costs import CostTable
from rookery.scheduling.pipelines import BUCKETS, TAKING_TURNS, TURNS, LaneChoice, SlowdownTable, Stage, StagePredictor
from rookery.worker import teams
from rookery.worker.engine.native import kernels
from rookery.worker.engine.native.runner import best_runner
from rookery.worker.engine.slo_gate import SloGate, measure_costs
from rookery.worker.lane_plan import (
    FEWEST_TOKENS,
    MEASURE_SECONDS,
    MEASURE_TOKENS,
    PLAN_SECONDS,
    RETRY_SECONDS,
    LanePlan,
    Part,
    affordable_tokens,
    measure_slowdowns,
    parts_of,
    splits,
)
from rookery.worker.model.lora import LoraManager
from rookery.worker.trainer.native.backbone import NativeBackbone

STEP, TOKENS, PASS = 0.02, 100.0, 1.0


class Moment:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def plan(engine: float = 1.6, trainer: float = 1.7, depth: int = 0) -> tuple[LanePlan, Moment]:
    """Of a worker with two cores."""
    table, costs, clock = SlowdownTable(), CostTable(), Moment()
    for rows in BUCKETS:
        table.record(1, "decode", rows, engine=engine, trainer=trainer)
        costs.record("decode", rows, STEP)
    return LanePlan(splits(2), table, costs, depth, clock), clock


def work(
    planned: LanePlan, tenant: str, *, steps: int = 0, passes: int = 0, threads: int | None = TURNS, slow: float = 1.0
) -> None:
    for _ in range(steps):
        planned.on_engine("decode", 16, STEP * slow, threads, {tenant: 16})
    for _ in range(passes):
        planned.on_trainer(PASS * slow, {tenant: TOKENS}, TOKENS, threads, 16)


def decide(planned: LanePlan, rows: dict[str, int], training: list[str]) -> LaneChoice:
    return planned.choose(planned.due(rows, training))


def step(planned: LanePlan, tenant: str, *, steps: int = 0, passes: int = 0) -> None:
    """One stage of a tenant, as the compute thread tells of it: after its arrival and after each slice."""
    part: Part = "engine" if steps else "trainer"
    planned.end_stages(part, [tenant])
    for _ in range(steps + passes):
        work(planned, tenant, steps=bool(steps), passes=bool(passes))
        planned.end_stages(part, [tenant])
    planned.end_stages(part, [])


def test_lanes_run_where_the_table_gains_and_there_are_two_kinds_of_work() -> None:
    planned, clock = plan()
    assert decide(planned, {"a": 16}, ["b"]).threads == 1
    clock.now += PLAN_SECONDS
    assert decide(planned, {}, ["b"]) == (TURNS, 0.0, "no work to run beside")
    planned, _ = plan(2.0, 2.1)
    assert decide(planned, {"a": 16}, ["b"]) == (TURNS, 0.0, "nothing gains")


def test_slices_correct_the_table_and_the_start_counts_again_after_a_while_in_turns() -> None:
    planned, clock = plan()
    work(planned, "b", passes=2)
    for _ in range(40):
        work(planned, "a", steps=1, threads=1, slow=2.6)
        work(planned, "b", passes=1, threads=1, slow=2.2)
    assert planned.slowdowns(16, 1) == pytest.approx((2.6, 2.2), rel=0.05)
    clock.now += 1
    assert not decide(planned, {"a": 16}, ["b"]).active
    clock.now += RETRY_SECONDS + 1
    assert decide(planned, {"a": 16}, ["b"]).threads == 1


def test_durations_of_stages_are_those_of_the_last_step_alone() -> None:
    """Decoding is quick beside training, and training slow. A tenant that has much to decode after it has trained gets
    turns; that is known after its second step, although nothing was decided meanwhile."""
    planned, clock = plan(1.05, 5.0)
    for _ in range(3):
        step(planned, "b", steps=400)
        step(planned, "b", passes=2)
    for _ in range(3):
        step(planned, "a", steps=500)
    clock.now += 1
    assert not decide(planned, {"a": 16}, ["b"]).active


def test_slices_with_fewer_cores_teach_nothing_of_those_with_all() -> None:
    planned, _ = plan(1.9, 2.2)
    work(planned, "a", steps=40, threads=None, slow=3.0)
    work(planned, "b", passes=2)
    work(planned, "b", passes=40, threads=None, slow=3.0)
    assert planned.slowdowns(16, 1) == (1.9, 2.2)
    work(planned, "a", steps=40, threads=1, slow=1.9)
    work(planned, "b", passes=40, threads=1, slow=2.2)
    assert planned.slowdowns(16, 1) == pytest.approx((1.9, 2.2))
    assert not decide(planned, {"a": 16}, ["b"]).active
    assert decide(planned, {"a": 16}, ["b"]).why == "nothing gains"


def test_a_slice_of_the_trainer_corrects_the_slowdown_of_the_work_next_to_it() -> None:
    """Prompts slow training more than decoding does, and both are in the engine of a worker."""
    table, costs = SlowdownTable(), CostTable()
    costs.record("decode", 16, STEP)
    costs.record("prefill", 512, 10 * STEP)
    for kind, rows in (("decode", 16), ("prefill", 0)):
        table.record(1, kind, rows, engine=1.5, trainer=1.5)  # type: ignore[arg-type]
    planned = LanePlan(splits(2), table, costs, 1, Moment())
    work(planned, "b", passes=1)
    for _ in range(40):
        planned.on_engine("decode", 16, 1.5 * STEP, 1, {"a": 16})
        work(planned, "b", passes=1, threads=1, slow=1.5)
        planned.on_engine("decode", 16, 1.5 * STEP, 1, {"a": 16})
        planned.on_engine("prefill", 512, 15 * STEP, 1, {"a": 512})
        work(planned, "b", passes=2, threads=1, slow=2.5)  # during the second one no slice of the engine ends
    assert planned.table.slowdown(1, "decode", 16) == pytest.approx((1.5, 1.5), rel=0.01)
    assert planned.table.slowdown(1, "prefill", 0) == pytest.approx((1.5, 2.5), rel=0.01)


def test_an_optimizer_step_next_to_decoding_counts_as_its_time_alone() -> None:
    found: dict[str, float] = {}

    class Recorded(StagePredictor):
        def record(self, name: str, seconds: float) -> None:
            found[name] = seconds

    table = SlowdownTable()
    table.record(1, "decode", 16, engine=1.6, trainer=1.7)
    planned = LanePlan(splits(2), table, CostTable(), 1, Moment(), Recorded())
    planned.end_stages("trainer", ["b"])
    planned.on_trainer(0.34, {"b": 64.0}, 0.0, 1, 16)
    planned.end_stages("trainer", [])
    assert found == {"b optimizer": pytest.approx(0.2)}


def test_work_of_a_tenant_in_a_shared_batch_is_that_of_its_rows() -> None:
    found: dict[str, float] = {}

    class Recorded(StagePredictor):
        def record(self, name: str, seconds: float) -> None:
            found[name] = seconds

    table, costs = SlowdownTable(), CostTable()
    for rows, seconds in ((4, 0.010), (16, 0.016), (64, 0.040)):
        costs.record("decode", rows, seconds)
    costs.record("prefill", 100, 0.2)
    planned = LanePlan(splits(2), table, costs, 1, Moment(), Recorded())
    planned.end_stages("engine", ["a", "b"])
    planned.on_engine("prefill", 100, 0.2, TURNS, {"a": 25, "b": 75})
    for _ in range(10):
        planned.on_engine("decode", 64, 0.040, TURNS, {"a": 4, "b": 60})
    planned.end_stages("engine", [])
    assert found["a prefill"] == pytest.approx(0.05) and found["b prefill"] == pytest.approx(0.15)
    assert found["a decode"] == pytest.approx(0.1)
    assert found["b decode"] == pytest.approx(10 * costs.predict("decode", 60))


def test_the_time_between_a_tenants_two_parts_is_a_stage() -> None:
    planned, clock = plan()
    for _ in range(3):
        step(planned, "a", steps=100)
        clock.now += 3.0
        step(planned, "a", passes=2)
        clock.now += 5.0
    assert planned.foreseen([], []) == [], "the next step is late"
    decode, train = Stage("decode", pytest.approx(2.0), 16), Stage("train", pytest.approx(2.0))
    decide(planned, {"a": 16}, [])
    assert planned.foreseen(["a"], []) == [(decode, Stage("environment", 3.0), train)]
    assert planned.foreseen([], ["a"]) == [(train, Stage("environment", 5.0), decode)]
    step(planned, "a", steps=100)
    clock.now += 1.0
    assert planned.foreseen([], []) == [(Stage("environment", 2.0), train)]
    clock.now += 2.5
    assert planned.foreseen([], []) == []
    step(planned, "a", steps=100)
    assert planned.foreseen([], []) == [(Stage("environment", 3.0), train)], "from engine to engine it is another"


def test_plans_take_a_hundredth_of_the_time() -> None:
    class Slow(Moment):
        def __call__(self) -> float:
            self.now += 0.01
            return self.now

    table = SlowdownTable()
    for rows in BUCKETS:
        table.record(1, "decode", rows, engine=1.6, trainer=1.7)
    clock = Slow()
    planned = LanePlan(splits(2), table, CostTable(), 0, clock)
    first = decide(planned, {"a": 16}, ["b"])
    assert first.active and decide(planned, {"a": 16}, ["c"]) is first
    assert not decide(planned, {}, ["c"]).active
    second = decide(planned, {"a": 16}, ["c"])
    assert second.active
    clock.now += 3.0
    assert decide(planned, {"a": 16}, ["b"]) is not second


@pytest.mark.parametrize(("threads", "expected"), [(1, [0]), (2, [0, 1]), (4, [0, 2, 1, 3]), (16, [0, 8, 4, 12])])
def test_splits_of_the_cores(threads: int, expected: list[int]) -> None:
    assert splits(threads) == expected
    assert splits(threads, "cuda:0") == [TURNS, max(1, threads // 2)], "a GPU has no parts"


@pytest.mark.parametrize(
    ("device_name", "threads", "lane", "computes", "expected"),
    [
        ("cpu", 2, 1, True, (0.5, 0.5)),
        ("cpu", 2, 1, False, (0.5, 1.0)),
        ("cpu", 4, 1, True, (0.25, 0.75)),
        ("cpu", 4, 3, False, (0.75, 0.25)),
        ("cuda:0", 1, 1, True, (0.5, 0.5)),
        ("cuda:0", 1, 1, False, (0.5, 1.0)),
        ("cuda:0", 16, 8, True, (0.5, 0.5)),
    ],
)
def test_both_lanes_are_charged_for_their_parts_of_the_device(
    device_name: str, threads: int, lane: int, computes: bool, expected: tuple[float, float]
) -> None:
    assert parts_of(device_name, threads, lane, computes=computes) == expected


@pytest.mark.parametrize("token_seconds", [1e-4, 1e-3, 4e-3, 2e-2])
def test_a_slow_processor_measures_shorter_passes_and_no_fewer(token_seconds: float) -> None:
    """Of 256 tokens, those of 5 ms a token allowed the start one of four measurements: the others stayed unknown. The
    choice takes no longer than the measurement."""
    passes, spent = 8, list[float]()

    def train(tokens: int) -> float:
        spent.append(tokens * token_seconds)
        return spent[-1]

    tokens = affordable_tokens(train, passes)
    assert sum(spent) <= MEASURE_SECONDS
    in_time = tokens * token_seconds * 2 * passes <= MEASURE_SECONDS
    assert in_time or tokens == FEWEST_TOKENS
    assert tokens == MEASURE_TOKENS or 2 * tokens * token_seconds * 2 * passes > MEASURE_SECONDS


@pytest.mark.skipif(
    not kernels.load(None) or bool(teams.why_inexact(torch.device("cpu"), COMPUTED, kernels=True)),
    reason="no lanes on this processor",
)
def test_the_start_measures_every_split_and_leaves_nothing_behind(tmp_path: Path) -> None:
    decoder, where, gate = small("llama", torch.bfloat16), torch.device("cpu"), SloGate()
    runner = best_runner(decoder, LoraManager(decoder.config, decoder.dtype, where, 16), 1 << 26)
    measure_costs(gate.costs, runner, where, 64, 128)
    free, threads = runner.store.bytes, torch.get_num_threads()
    table = measure_slowdowns(2, runner, NativeBackbone(decoder), gate.costs, 64, where)
    assert {at for at, _ in table.figures().items()} == {(1, key) for key in ("4", "16", "64", "prefill")}
    assert table.slowdown(1, "decode", 16) != TAKING_TURNS and runner.store.bytes == free
    teams.use(threads)
