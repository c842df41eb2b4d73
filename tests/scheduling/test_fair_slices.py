"""How much of a slice each tenant has: the smallest keeps its fair share of its speed, nobody starves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples

from rookery.scheduling.fair_slices import ServedItems, fair_amount, fair_items, in_turns, most_rows, next_row, shares

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


def serve(served: ServedItems, items: list[str], room: int, given: dict[str, float]) -> Counter[str]:
    """A slice with room for so many items."""
    fair = [items[at] for at in fair_items(items, given, lambda count: 0.0, served.begin(items))]
    chosen = Counter(fair[at] for at in served.order(fair, given)[:room])
    served.end(chosen, Counter(items) - chosen, given)
    return chosen


@given(st.integers(1, 4), st.integers(1, 9), weights, st.integers(0, 20))
@settings(max_examples=examples(100))
def test_tenants_take_turns_where_a_slice_has_not_room_for_all(
    count: int, room: int, given: dict[str, float], before: int
) -> None:
    """The last of them comes after so many slices of the others, and has no credit for these."""
    served, names = ServedItems(), TENANTS[:count]
    items = [tenant for tenant in names for _ in range(40)]
    for _ in range(before):
        serve(served, [item for item in items if item != names[-1]] or items, room, given)
    total = sum((serve(served, items, room, given) for _ in range(60)), Counter[str]())
    got = [total[tenant] / given.get(tenant, 1.0) for tenant in names]
    assert max(got) - min(got) <= 2 / min(given.get(tenant, 1.0) for tenant in names) + 1e-9


@given(st.integers(1, 64), st.lists(st.sampled_from(TENANTS), max_size=100), st.dictionaries(
    st.sampled_from(TENANTS), st.integers(0, 64)
), weights)  # fmt: skip
@settings(max_examples=examples(200))
def test_a_tenant_below_its_share_of_rows_waits_for_none_of_anothers(
    rows: int, waiting: list[str], held: dict[str, int], given: dict[str, float]
) -> None:
    held, waiting, before = Counter(held), list(waiting), Counter(held)
    share = shares({*waiting, *+Counter(held)}, given, rows) if waiting else {}
    while (at := next_row(waiting, held, given, rows)) is not None:
        tenant = waiting.pop(at)
        assert tenant not in waiting[:at], "a tenant's requests keep their order"
        assert held[tenant] < share[tenant] or held.total() < rows
        held[tenant] += 1
    assert held.total() <= max(before.total(), most_rows(rows))
    if held.total() < rows:
        assert not waiting
    if held.total() < most_rows(rows) and len({*waiting, *+held}) > 1:
        assert all(held[tenant] >= share[tenant] for tenant in waiting)


def test_rows_are_divided_among_those_that_want_some() -> None:
    assert shares("ab", {}, 64) == {"a": 32, "b": 32}
    assert shares("ab", {"a": 3.0}, 64) == {"a": 48, "b": 16}
    assert shares("abc", {}, 2) == {"a": 1, "b": 1, "c": 1}
    assert next_row("llls", {"l": 64}, {}, 64) == 3 and next_row("lll", {"l": 64}, {}, 64) is None
    assert next_row("ls", {"l": 64, "s": 32}, {}, 64) is None, "half as many beyond"
    assert next_row("ls", {"l": 31, "s": 32}, {}, 64) == 0
