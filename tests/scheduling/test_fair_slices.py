"""How much of a slice each tenant has: the smallest keeps its fair share of its speed, nobody starves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples

from rookery.scheduling.fair_slices import fair_amount, fair_items, in_turns

TENANTS = "abcd"
tenants = st.lists(st.sampled_from(TENANTS), min_size=1, max_size=80)
weights = st.dictionaries(st.sampled_from(TENANTS), st.sampled_from([0.5, 1.0, 2.0, 3.0]))


def line(fixed: float, each: float) -> Callable[[int], float]:
    return lambda amount: fixed + each * amount if amount else 0.0


costs = st.builds(line, st.floats(0, 10), st.floats(0.01, 1))
no_weights: dict[str, float] = {}


@given(tenants, costs)
@settings(max_examples=examples(300))
def test_the_tenant_with_the_fewest_items_has_them_all_and_its_fair_share_of_the_time(
    items: list[str], cost: Callable[[int], float]
) -> None:
    chosen, counts = fair_items(items, no_weights, cost), Counter(items)
    taken = Counter(items[at] for at in chosen)
    least = min(counts.values())
    assert all(taken[tenant] >= least for tenant in counts)
    if len(counts) > 1:
        assert cost(len(chosen)) <= len(counts) * cost(least) * (1 + 1e-9)


@given(tenants, weights, costs)
@settings(max_examples=examples(300))
def test_every_tenant_has_an_item_and_no_item_is_chosen_twice(
    items: list[str], given: dict[str, float], cost: Callable[[int], float]
) -> None:
    chosen = fair_items(items, given, cost)
    assert {items[at] for at in chosen} == set(items)
    assert len(set(chosen)) == len(chosen)
    for tenant in set(items):
        own = [at for at in chosen if items[at] == tenant]
        assert own == sorted(own), "a tenant's items keep their order"


@given(tenants, weights, costs, st.randoms())
@settings(max_examples=examples(200))
def test_work_strictly_falls_until_none_is_left(
    items: list[str], given: dict[str, float], cost: Callable[[int], float], random: object
) -> None:
    """Each chosen item needs some more steps; the others wait. The waits end with the items before them."""
    left = [1 + at % 3 for at in range(len(items))]
    for _ in range(sum(left)):
        open_items = [at for at, count in enumerate(left) if count]
        if not open_items:
            break
        before = sum(left)
        for at in fair_items([items[one] for one in open_items], given, cost):
            left[open_items[at]] -= 1
        assert sum(left) < before
    assert not any(left)


@given(st.integers(1, 80), weights, costs)
def test_a_tenant_alone_has_all(count: int, given: dict[str, float], cost: Callable[[int], float]) -> None:
    assert fair_items(["a"] * count, given, cost) == list(range(count))
    assert fair_amount({"a": 3}, given, cost, count) == count


@pytest.mark.parametrize(("fixed", "each", "expected"), [(0.0, 1.0, 16), (8.0, 1.0, 24), (100.0, 1.0, 64)])
def test_a_slice_costs_as_many_times_the_smallest_tenants_work_as_there_are_tenants(
    fixed: float, each: float, expected: int
) -> None:
    """8 rows beside 56: what is saved by computing together is the larger tenant's."""
    chosen = fair_items(["large"] * 56 + ["small"] * 8, no_weights, line(fixed, each))
    assert len(chosen) == expected


def test_a_tenant_of_twice_the_weight_has_two_items_per_turn() -> None:
    items = "aaaaabbb"
    assert "".join(items[at] for at in in_turns(items, {"a": 2.0})) == "abaabaab"
    assert Counter("abbb"[at] for at in fair_items(list("abbb"), {"a": 2.0}, line(0.0, 1.0))) == {"a": 1, "b": 1}


def test_unknown_costs_bound_nothing() -> None:
    assert len(fair_items(list("aaab"), no_weights, lambda count: 0.0)) == 4
    assert len(fair_items(list("aaaaabb"), no_weights, lambda count: 1e9 * count**2)) == 4, "as many as the smallest"
