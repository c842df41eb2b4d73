"""Fair shares: the bounds that :mod:`rookery.scheduling.queues` states, under a virtual clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable
from random import Random
from typing import TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.draws import examples

from rookery.scheduling.queues import FairQueue

T = TypeVar("T", bound=Hashable)


def take(
    queue: FairQueue[T],
    now: float = 0.0,
    ready: Callable[[T], bool] = lambda item: True,
    *,
    short: Collection[str] = (),
    among: Collection[str] | None = None,
) -> T | None:
    taken = queue.take(ready, now, short=short, among=among)
    return taken[0] if taken is not None else None


owners = st.tuples(st.sampled_from(["a", "b", "c"]), st.sampled_from(["1", "2", "3"]))
weights = st.dictionaries(st.sampled_from("abc"), st.floats(0.1, 10))


@given(
    st.lists(st.tuples(st.sampled_from(["put", "take", "drop", "charge"]), owners, st.booleans())),
    weights,
    st.integers(1, 3),
)
def test_every_item_comes_out_exactly_once_in_the_order_of_its_job(
    actions: list[tuple[str, tuple[str, str], bool]], shares: dict[str, float], turn: int
) -> None:
    queue: FairQueue[int] = FairQueue(shares, turn=turn, patience=5.0)
    inside: dict[tuple[str, str], list[int]] = defaultdict(list)
    for now, (action, owner, first) in enumerate(actions):
        if action == "put":
            queue.put(*owner, now, first=first, now=now)
            inside[owner].insert(0 if first else len(inside[owner]), now)
        elif action == "take":
            item = take(queue, now)
            assert (item is None) == (not any(inside.values()))
            if item is not None:
                [its] = [items for items in inside.values() if items and items[0] == item]
                its.pop(0)
        elif action == "charge":
            queue.counters.charge(owner[0], 7.0)
        else:
            victim = inside[owner].pop() if inside[owner] else -1
            assert queue.remove(*owner, victim) == (victim >= 0)
            assert not queue.remove(*owner, victim)
        assert sorted(queue) == sorted(item for items in inside.values() for item in items)
        assert len(queue) == sum(map(len, inside.values()))


@settings(max_examples=examples(60))
@given(
    seed=st.integers(0, 2**32),
    shares=st.dictionaries(st.sampled_from("abcd"), st.floats(0.1, 10)),
    turn=st.integers(1, 4),
    rows=st.integers(1, 6),
    longest=st.integers(1, 12),
    expected=st.integers(0, 12),
)
def test_waiting_tenants_get_tokens_by_their_weights_within_the_bound(
    seed: int, shares: dict[str, float], turn: int, rows: int, longest: int, expected: int
) -> None:
    """An engine with so many rows samples a token for each of them in a tick; tenants begin and stop to send requests
    of any length at any time. Each request is charged ``expected`` tokens in advance."""
    random, expected = Random(seed), min(expected, longest)
    queue: FairQueue[int] = FairQueue(shares, turn=turn)
    length: dict[int, tuple[str, int]] = {}
    running: dict[int, int] = {}
    served: Counter[str] = Counter()
    """Tokens."""
    since: dict[str, Counter[str]] = {}
    """By tenant that waits all the time: what everybody had been served when it began to wait."""
    sends = dict.fromkeys("abcd", False)
    for tick in range(300):
        for tenant in sends:
            sends[tenant] ^= random.random() < 0.02 or tick == 0
            while sends[tenant] and sum(length[item][0] == tenant for item in queue) < rows + turn:
                item = len(length)
                length[item] = tenant, random.randint(1, longest)
                queue.put(tenant, random.choice("12"), item)
            if sends[tenant]:
                since.setdefault(tenant, served.copy())
            else:
                since.pop(tenant, None)
                for item in [item for item in queue if length[item][0] == tenant]:
                    assert queue.remove(tenant, "1", item) or queue.remove(tenant, "2", item)
        while len(running) < rows and (item := take(queue)) is not None:
            running[item] = 0
            queue.counters.charge(length[item][0], expected)
        for item in list(running):
            tenant, tokens = length[item]
            served[tenant] += 1
            running[item] += 1
            if running[item] > expected:
                queue.counters.charge(tenant, 1.0)
            if running[item] == tokens:
                queue.counters.charge(tenant, min(0, tokens - expected))
                del running[item]
        bound = (turn + rows) * longest / min([1.0, *shares.values()])
        for one in since:
            for other in since:
                assert abs(queue.counters[one] - queue.counters[other]) <= bound
                begun = max(since[one], since[other], key=Counter.total)
                got = [(served[name] - begun[name]) / shares.get(name, 1.0) for name in (one, other)]
                assert abs(got[0] - got[1]) <= 2 * bound


@given(
    seed=st.integers(0, 2**32),
    shares=st.dictionaries(st.sampled_from("abcd"), st.floats(0.001, 1000)),
    patience=st.floats(1, 50),
)
def test_no_waiting_tenant_starves(seed: int, shares: dict[str, float], patience: float) -> None:
    """One item is taken at a time, however far the counters are apart."""
    random = Random(seed)
    queue: FairQueue[int] = FairQueue(shares, patience=patience)
    owner: dict[int, str] = {}
    last = dict.fromkeys("abcd", 0.0)
    now = longest_gap = 0.0
    for _ in range(200):
        for tenant in last:
            if tenant not in {owner[item] for item in queue}:
                owner[len(owner)] = tenant
                queue.put(tenant, "1", len(owner) - 1, now=now)
        gap = random.uniform(0.0, 2.0)
        now, longest_gap = now + gap, max(longest_gap, gap)
        item = take(queue, now)
        assert item is not None
        queue.counters.charge(owner[item], random.choice([1.0, 1e6]))
        for tenant in last:  # each of the others may be late before it
            assert now - last[tenant] <= patience + len(last) * longest_gap
        last[owner[item]] = now


def test_the_guard_gives_a_tenant_one_item_and_leaves_the_turn_to_the_other() -> None:
    queue: FairQueue[str] = FairQueue(turn=2, patience=10.0)
    queue.counters.charge("b", 1e9)
    for number in range(4):
        queue.put("a", "1", f"a{number}")
        queue.put("b", "1", f"b{number}")
    taken = [take(queue, now) for now in (0.0, 4.0, 9.0, 11.0, 12.0)]
    assert taken == ["a0", "a1", "a2", "b0", "a3"]


@pytest.mark.parametrize(
    ("short", "charged", "expected"),
    [("", 0.0, "a1"), ("b", 0.0, "b0"), ("ab", 0.0, "a1"), ("a", 0.0, "a1"), ("b", 5.0, "a1")],
)
def test_the_turn_of_a_tenant_with_its_share_ends_for_one_that_has_less(
    short: str, charged: float, expected: str
) -> None:
    """Where that one is next by its counter."""
    queue: FairQueue[str] = FairQueue(turn=4)
    for number in range(4):
        queue.put("a", "1", f"a{number}")
    assert take(queue) == "a0"
    queue.counters.charge("a", 1.0)
    queue.put("b", "1", "b0")
    queue.counters.charge("b", charged)
    assert take(queue, short=set(short)) == expected
    assert take(queue, among={"c"}) is None


def test_time_without_work_is_not_saved_up() -> None:
    queue: FairQueue[str] = FairQueue()

    def served(count: int) -> Counter[str]:
        taken: Counter[str] = Counter()
        for _ in range(count):
            tenant = str(take(queue)).split()[0]
            queue.counters.charge(tenant, 100.0)
            taken[tenant] += 1
        return taken

    for number in range(50):
        queue.put("busy", "1", f"busy {number}")
        queue.put("idle", "1", f"idle {number}") if number >= 40 else served(1)
    assert served(10) == {"busy": 5, "idle": 5}


def test_turns_of_jobs_and_items_that_are_not_ready() -> None:
    queue: FairQueue[str] = FairQueue(turn=2)
    for item in ("a1", "a2", "a3", "A1", "b1", "b2", "b3"):
        queue.put(item[0].lower(), item[0], item)
    assert [queue.position("a", "a"), queue.position("a", "A"), queue.position("b", "b")] == [0, 4, 2]
    assert queue.position("b", "nothing") is None and queue.position("nobody", "a") is None
    assert take(queue, ready=lambda item: item.startswith("b")) == "b1"
    assert take(queue, ready=lambda item: item == "nothing") is None
    assert [take(queue) for _ in range(6)] == ["b2", "a1", "a2", "b3", "A1", "a3"]
