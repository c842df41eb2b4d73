"""The order of a job's waiting requests: the rule, its guard, and lengths from which nothing can be learned."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.chaos.mutations import ORDER_STARVES, applied

from rookery.scheduling.rollout_order import ENOUGH, GUARD, Description, RolloutOrder

Item = tuple[str, int]
LIMIT = 1000


def describe(item: Item) -> Description:
    return Description(item[0], 0, LIMIT)


def filled(groups: int, members: int) -> RolloutOrder[Item]:
    order: RolloutOrder[Item] = RolloutOrder(describe)
    for group in range(groups):
        for member in range(members):
            order.put((f"g{group}", member))
    return order


def take(order: RolloutOrder[Item], count: int) -> list[Item]:
    taken = []
    for _ in range(count):
        item = order.next()
        order.take(item)
        taken.append(item)
    return taken


def test_a_probe_of_each_group_then_the_longest_estimate() -> None:
    order = filled(4, 4)
    assert take(order, 4) == [(f"g{n}", 0) for n in range(4)]
    assert order.probes == 4 and order.estimate(("g0", 1)) is None
    for group, length in (("g0", 30), ("g1", 500), ("g2", 70)):
        order.finish((group, 0), length)
    assert order.estimate(("g1", 1)) == 500
    assert take(order, 3) == [("g3", n) for n in (1, 2, 3)], "unknown counts as the limit"
    assert take(order, 1) == [("g0", 1)], "every eighth is the oldest"
    assert take(order, 2) == [("g1", 1), ("g1", 2)]
    order.finish(("g0", 1), 900)
    assert take(order, 1) == [("g0", 2)], "the longest finished member counts"
    order.finish(("g0", 2), 10)
    assert order.estimate(("g0", 3)) == 900


def test_of_several_probes_the_one_with_the_fewest_tokens() -> None:
    tokens = {"a": 40, "b": 0, "c": 7}
    order: RolloutOrder[Item] = RolloutOrder(lambda item: Description(item[0], tokens[item[0]], LIMIT))
    for group in tokens:
        order.put((group, 0))
    assert [group for group, _ in take(order, 3)] == ["b", "c", "a"]


def test_later_turns_precede_and_lone_items_keep_their_order() -> None:
    order = filled(1, 3)
    order.put(("", 1))
    order.put(("", 2))
    order.put(("g0", 9), first=True)
    assert take(order, 4) == [("g0", 9), ("g0", 0), ("", 1), ("", 2)]


@given(st.integers(0, 2**32), st.integers(0, 30))
def test_no_item_waits_longer_than_the_stated_bound(seed: int, before: int) -> None:
    """Whatever finishes, and however many newer items with larger estimates come."""
    random, order = Random(seed), filled(0, 0)
    for number in range(before):
        order.put((f"g{random.randrange(6)}", number))
    order.put(("short", 0))
    order.put(("short", 1))
    take(order, 1)
    for waited in range(GUARD * (before + 2)):
        for member in range(2):
            order.put((f"new{waited}", member))
        item = take(order, 1)[0]
        if item == ("short", 1):
            assert waited < GUARD * (before + 2)
            return
        order.finish(item, 1 if item[0] == "short" else random.randint(500, LIMIT))
    raise AssertionError("it starved")


def test_an_order_that_starves_is_noticed() -> None:
    def waited(most: int) -> int:
        """Items that begin before the last of a short group, while longer groups keep coming."""
        order = filled(0, 0)
        order.put(("short", 0))
        order.put(("short", 1))
        order.finish(take(order, 1)[0], 1)
        for count in range(most):
            for member in range(2):
                order.put((f"new{count}", member))
            if take(order, 1) == [("short", 1)]:
                return count
        return most

    assert waited(1000) < GUARD
    with applied(ORDER_STARVES):
        assert waited(1000) == 1000


@given(st.integers(0, 2**32))
def test_every_item_is_taken_or_removed_once(seed: int) -> None:
    random, order = Random(seed), filled(0, 0)
    inside, running, number = set[Item](), set[Item](), 0
    for _ in range(150):
        match random.randrange(5):
            case 0 | 1:
                item = (random.choice(["", "a", "b", "c"]), number)
                number += 1
                order.put(item, first=random.random() < 0.2)
                inside.add(item)
            case 2 if inside:
                item = take(order, 1)[0]
                inside.remove(item)
                running.add(item)
            case 3 if inside:
                item = random.choice(sorted(inside))
                assert order.remove(item) and not order.remove(item)
                inside.remove(item)
                order.finish(item, None)
            case _ if running:
                item = running.pop()
                if random.random() < 0.3:  # its worker was lost
                    order.put(item, first=True)
                    inside.add(item)
                else:
                    order.finish(item, random.randint(1, LIMIT))
        assert set(order) == inside and len(order) == len(inside)
        assert not inside or order.next() in inside
    for item in [*inside]:
        order.remove(item)
    for item in inside | running:
        order.finish(item, None)
    assert not order._groups, "nothing is kept of groups that ended"


@pytest.mark.parametrize(("spread", "shared", "active"), [(1.0, 0.9, True), (1.0, 0.0, False), (0.0, 0.9, False)])
def test_the_order_is_active_where_groups_predict_their_members(spread: float, shared: float, active: bool) -> None:
    random = Random(3)
    order = filled(64, 8)
    assert order.active, "until it is known better"
    lengths = {}
    for group in range(64):
        level = random.gauss(0, 1)
        for member in range(8):
            noise = math.sqrt(shared) * level + math.sqrt(1 - shared) * random.gauss(0, 1)
            lengths[f"g{group}", member] = max(1, round(200 * math.exp(spread * noise)))
    for item in sorted(take(order, 64 * 8), key=lengths.__getitem__):  # as if all began at once
        order.finish(item, lengths[item])
    assert order.active is active


def test_an_inactive_order_is_first_come_first_served() -> None:
    order = filled(ENOUGH + 1, 4)
    for item in take(order, 2 * (ENOUGH + 1)):
        order.finish(item, 100)
    assert not order.active
    rest = list(order)
    assert take(order, len(rest)) == rest
