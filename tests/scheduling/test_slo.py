"""The SLO gate: slack, the largest candidate, the cost table, the cut of the cache, and a worker under a load."""

from __future__ import annotations

import math
import statistics

import pytest
from benchmarks.scale.serving_simulation import ARMS, Load, Run, bound, cache, simulate
from hypothesis import given
from hypothesis import strategies as st

from rookery.errors import UserError
from rookery.scheduling.costs import FIRST_MARGIN, WINDOW, CostTable
from rookery.scheduling.slo import (
    AIM,
    PERIOD_SECONDS,
    CacheBudget,
    Demand,
    admit,
    deadline,
    parse_objectives,
    slack,
)


def table() -> CostTable:
    costs = CostTable()
    for kind, sizes, each in (("decode", (1, 4, 16, 64), 0.002), ("prefill", (16, 512), 0.0005), ("train", (1,), 1.0)):
        for size in sizes:
            costs.record(kind, size, 0.02 + each * size, first=True)  # type: ignore[arg-type]
    return costs


def test_a_token_is_due_at_the_mean_pace_and_no_pause_is_longer_than_the_first_wait() -> None:
    ttft, tpot = 2 / AIM, 0.1 / AIM
    assert deadline(ttft, tpot, 5.0, None, 0.0, 0) == pytest.approx(7.0)
    assert deadline(ttft, tpot, 5.0, 6.0, 6.0, 1) == pytest.approx(6.1)
    assert deadline(ttft, tpot, 5.0, 6.0, 6.2, 10) == pytest.approx(7.0), "it was quick: others may have the time"
    assert deadline(ttft, tpot, 5.0, 6.0, 6.2, 500) == pytest.approx(8.2)
    assert deadline(0, 0, 5.0, None, 0.0, 0) == deadline(0, 0, 5.0, 6.0, 6.0, 3) == math.inf


@given(
    prefill=st.integers(0, 2000),
    decoding=st.integers(0, 60),
    due=st.floats(0, 3),
    token_due=st.floats(0, 3),
    own=st.integers(0, 64),
    candidates=st.integers(0, 64),
)
def test_the_largest_candidate_that_leaves_every_slack_is_admitted(
    prefill: int, decoding: int, due: float, token_due: float, own: int, candidates: int
) -> None:
    costs = table()
    demand = Demand(prefill, decoding, due if prefill else math.inf, token_due if decoding else math.inf)
    count = admit(demand, "decode", own, candidates, 0.0, costs)
    fits = [n for n in range(candidates + 1) if slack(demand, "decode", own + n, 0.0, costs) >= 0]
    assert count == max(fits, default=0)
    if not prefill and not decoding:
        assert count == candidates


def test_training_and_prefill_slices_count_the_work_that_follows() -> None:
    costs = table()
    alone = costs.seconds("decode", 3)
    demand = Demand(decoding=3, decode_due=5.0)
    assert slack(demand, "train", 1, 0.0, costs) == pytest.approx(5.0 - costs.seconds("train", 1) - alone)
    demand = Demand(prefill=300, prefill_due=5.0)
    assert slack(demand, "prefill", 300, 0.0, costs) == pytest.approx(5.0 - costs.seconds("prefill", 300))
    assert slack(demand, "decode", 8, 0.0, costs) < slack(demand, "prefill", 300, 0.0, costs)


def test_costs_follow_the_slices_and_their_errors_widen_the_margin() -> None:
    costs = table()
    assert costs.predict("decode", 10) == pytest.approx(0.04) and costs.predict("decode", 128) == pytest.approx(0.296)
    assert costs.margin("decode") == FIRST_MARGIN and CostTable().seconds("decode", 4) == 0
    for _ in range(2 * WINDOW):
        costs.record("decode", 16, 0.1)
    assert costs.predict("decode", 16) == pytest.approx(0.1, rel=0.01) and costs.margin("decode") < 0.02
    assert costs.predict("decode", 64) >= costs.predict("decode", 16) >= costs.predict("decode", 4), "never falls"
    for number in range(2 * WINDOW):
        costs.record("decode", 16, 0.1 * (1.5 if number % 10 == 0 else 1.0))
    assert costs.margin("decode") > 0.3, "one in ten took half as much again"


def test_the_cache_of_rollouts_is_cut_once_and_grows_at_the_next_step() -> None:
    budget = CacheBudget(1000, 0.2, lambda: 0.0)
    assert budget.rollouts == 800 and not budget.cut(200, {"p": 3})
    assert budget.cut(201, {"p": 3}) and budget.rollouts == 400 and budget.frozen
    assert not budget.cut(600, {"p": 3}), "the cut made room"
    budget.on_version("p", 3)
    assert budget.frozen and budget.rollouts == 400, "frozen within the step"
    budget.on_version("p", 4)
    assert not budget.frozen and budget.rollouts == 200, "the cache less headroom and the use since then"
    assert budget.cuts == 1


@pytest.mark.parametrize(
    ("needs", "rollouts", "cuts"),
    [
        ([200], 800, 0),
        ([201, 250, 400, 600], 400, 1),
        ([201, 700, 700, 650], 300, 1),
        ([900], 100, 1),
        ([1100] * 200, 0, 1),
    ],
    ids=["headroom", "burst", "more than the half", "at once", "more than the cache, at every step"],
)
def test_a_burst_cuts_the_cache_of_rollouts_once_and_lowers_it_to_its_need(
    needs: list[int], rollouts: int, cuts: int
) -> None:
    budget = CacheBudget(1000, 0.2, lambda: 0.0)
    lowered = [budget.cut(need, {}) for need in needs]
    assert (budget.rollouts, budget.cuts) == (rollouts, cuts)
    assert sum(lowered) <= 2, "only a greater need lowers it"


@pytest.mark.parametrize("versions", [{}, {"p": 3}], ids=["no rollout runs", "one version"])
def test_the_cache_of_rollouts_grows_without_a_step(versions: dict[str, int]) -> None:
    """As for rollouts of the base model, or of a version that stays."""
    now = 0.0
    budget = CacheBudget(1000, 0.2, lambda: now)
    assert budget.cut(700, versions)
    for now in range(int(PERIOD_SECONDS)):  # noqa: B007
        budget.observe(0)
        budget.on_version("p", 3)
        assert budget.frozen and budget.rollouts == 300
    now = PERIOD_SECONDS
    budget.observe(0)
    assert not budget.frozen and budget.rollouts == 100, "the same burst may come again"
    now += PERIOD_SECONDS
    budget.observe(200)
    assert budget.rollouts == 800, "clients need no more than the headroom"


def test_overrides_name_classes_and_models() -> None:
    assert parse_objectives("") == {}
    assert parse_objectives("chat=1000/150, smollm2-135m-instruct=2500.5/300") == {
        "chat": (1000, 150),
        "smollm2-135m-instruct": (2500.5, 300),
    }
    with pytest.raises(UserError, match="chat=fast"):
        parse_objectives("chat=fast")


# --- a worker under a load, in virtual time ---------------------------------------------------------------------------


def run(arm: str, load: float, seed: int = 0, **changes: float) -> Run:
    return simulate(ARMS[arm], Load(load, seconds=120, seed=seed, **changes))


@pytest.mark.parametrize("load", [0.2, 0.5, 0.8])
def test_objectives_hold_with_most_of_the_useful_work_that_exact_costs_admit(load: float) -> None:
    arms = ("gate", "gate that sees one slice ahead", "serving only", "no gate")
    runs = {arm: [run(arm, load, seed) for seed in range(5)] for arm in arms}
    within = {arm: statistics.median(one.within for one in made) for arm, made in runs.items()}
    useful = {arm: statistics.median(one.useful for one in made) for arm, made in runs.items()}
    ours, exact, alone, none = arms
    assert within[ours] >= within[alone] - 0.04 and useful[ours] >= 0.8 * useful[exact]
    assert useful[ours] > 0.5 * useful[none] and within[none] < 0.5


def test_saturated_serving_admits_nothing_and_idle_serving_costs_nothing() -> None:
    saturated, alone = run("gate", 2.5), run("serving only", 2.5)
    assert saturated.useful < 0.02 * run("rollouts only", 0.0).useful
    assert saturated.ttft(0.5) <= 1.05 * alone.ttft(0.5)
    assert run("gate", 0.0).useful == run("rollouts only", 0.0).useful


@pytest.mark.parametrize("load", [0.0, 0.2, 0.5, 0.8, 1.3])
@pytest.mark.parametrize("arm", ["no gate", "gate", "gate that sees one slice ahead"])
def test_no_schedule_does_more_useful_work_than_the_bound(arm: str, load: float) -> None:
    for seed in range(3):
        assert run(arm, load, seed).useful / 120 <= bound(Load(load, seconds=120, seed=seed))


@pytest.mark.parametrize("error", [0.7, 1.3])
def test_objectives_hold_with_a_wrong_cost_table(error: float) -> None:
    assert run("gate", 0.5, error=error).within >= run("serving only", 0.5).within - 0.02


def test_a_gate_that_forgets_the_candidate_is_noticed() -> None:
    assert run("gate without the candidate", 0.8).within < run("serving only", 0.8).within - 0.05


def test_the_cut_saves_interactive_requests_and_the_freeze_saves_cuts() -> None:
    none, swings, ours = (
        [cache(mode, seed) for seed in range(5)] for mode in ("no cut", "no freeze", "cut and freeze")
    )
    assert min(one.exhausted for one in none) > 0 == max(one.exhausted for one in ours)
    assert sum(one.cuts for one in swings) > 3 * sum(one.cuts for one in ours)
    assert sum(one.moved for one in swings) > sum(one.moved for one in ours)
