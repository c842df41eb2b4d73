"""Routes of an artifact: one copy per site, chains within, no circles, whoever fails."""

from __future__ import annotations

import heapq
import sys
from collections import Counter
from random import Random
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.scheduling.replication import (
    ADAPTER_HOPS,
    MODEL_HOPS,
    SERVICE,
    Replica,
    Route,
    hops_of,
    plan_routes,
)


def replica(name: str, site: str, **fields: object) -> Replica:
    return Replica(name, f"machine of {name}", site, **fields)  # type: ignore[arg-type]


TRAINER = replica("trainer", "s0")


def fleet(count: int, sites: int) -> list[Replica]:
    return [replica(f"w{number:04}", f"s{number % sites}") for number in range(count)]


def routes(receivers: list[Replica], holders: list[Replica], hops: float = MODEL_HOPS, site: str = "") -> list[Route]:
    return plan_routes(receivers, holders, site=site, hops=hops)


def crossing(found: list[Route], everyone: list[Replica]) -> int:
    """Copies that cross from one site to another; the service has a site of its own."""
    at = {one.name: one.site for one in everyone} | {SERVICE: "the service's"}
    return sum(at[route.source] != at[route.receiver] for route in found)


@pytest.mark.parametrize("sites", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 64])
def test_one_copy_crosses_to_each_site_and_the_trainer_sends_few(count: int, sites: int) -> None:
    receivers = fleet(count, sites)
    found = routes(receivers, [TRAINER])
    used = {one.site for one in receivers}
    assert crossing(found, [TRAINER, *receivers]) == len(used - {"s0"})
    assert Counter(route.source for route in found)["trainer"] <= len(used) + 1


@given(st.integers(1, 200), st.integers(1, 6), st.randoms(use_true_random=False))
def test_late_joiners_read_within_their_site(count: int, sites: int, random: Random) -> None:
    """Whatever the order in which workers come, one copy crosses to each site."""
    receivers = fleet(count, sites)
    random.shuffle(receivers)
    holders, found = [TRAINER], list[Route]()
    while receivers:
        batch = [receivers.pop() for _ in range(min(len(receivers), random.randint(1, 9)))]
        decided = routes(batch, holders)
        found += decided
        by_name = {one.name: one for one in batch}
        holders += [by_name[route.receiver]._replace(source=route.source) for route in decided]
        holders = [one._replace(source=None) if random.random() < 0.3 else one for one in holders]
    assert crossing(found, holders) == len({one.site for one in holders} - {"s0"})


def depths(found: list[Route]) -> dict[str, int]:
    source = {route.receiver: route.source for route in found}

    def depth(name: str) -> int:
        return 0 if name not in source else 1 + depth(source[name])

    return {name: depth(name) for name in source}


def test_models_pass_along_a_chain_and_adapters_spread_as_a_tree() -> None:
    chain, tree = routes(fleet(64, 1), [TRAINER]), routes(fleet(64, 1), [TRAINER], ADAPTER_HOPS)
    assert max(Counter(route.source for route in chain).values()) == 1
    assert max(depths(chain).values()) == 64
    assert max(Counter(route.source for route in tree).values()) <= 3
    assert max(depths(tree).values()) <= 2 * ADAPTER_HOPS
    assert (hops_of(16), hops_of(0)) == (ADAPTER_HOPS, MODEL_HOPS)


def test_nearest_source_comes_first() -> None:
    receiver = Replica("r", "m", "s1")
    machine, site, elsewhere = Replica("a", "m", "s1"), replica("b", "s1"), replica("c", "s2")
    busy = [Replica(f"x{n}", "", "s9", source="a") for n in range(9)]
    assert routes([receiver], [elsewhere, site, machine, *busy])[0].source == "a"
    assert routes([receiver], [elsewhere, site])[0].source == "b"
    assert routes([receiver], [elsewhere])[0].source == "c"
    assert routes([receiver], [elsewhere], site="s1")[0].source == SERVICE, "the service's copy is nearer"
    assert routes([receiver], [elsewhere], site="s2")[0].source == "c", "the durable copy is the last of its distance"
    assert routes([receiver], [])[0].source == SERVICE


def test_receiver_without_an_address_is_no_source() -> None:
    mute = [replica(f"a{n}", "s1", serves=False) for n in range(3)]
    found = routes([*mute, replica("z", "s1")], [TRAINER])
    assert found[0] == Route("z", ("trainer",)), "one that serves receives first"
    assert {route.source for route in found[1:]} == {"z"}
    assert {route.source for route in routes(mute, [])} == {SERVICE}


def test_address_of_a_receiver_is_no_source_of_it() -> None:
    """A process came to the address of one whose end nobody has noticed yet, and is nearest to it."""
    earlier = replica("earlier", "s1", address="a")
    later = Replica("later", earlier.machine, "s1", source="trainer", address="a")
    near = replica("near", "s1", address="b")
    [route] = routes([earlier], [TRAINER, later, near])
    assert route.sources == ("near",)
    [route] = routes([earlier], [TRAINER, later])
    assert route.source == "trainer"


def test_reserved_receivers_come_before_preemptible_ones() -> None:
    spot, reserved = replica("a", "s1", reserved=False), replica("b", "s1")
    assert [route.receiver for route in routes([spot, reserved], [TRAINER])] == ["b", "a"]


def test_alternatives_hold_the_artifact_whole() -> None:
    holders = [replica(f"h{n}", "s0") for n in range(4)]
    found = routes(fleet(8, 1), holders)
    for route in found:
        assert len(set(route.sources)) == len(route.sources) <= 3
        assert set(route.sources[1:]) <= {one.name for one in holders}


@given(st.integers(2, 40), st.integers(1, 4), st.randoms(use_true_random=False))
def test_failures_make_no_circle_and_no_route_to_a_failed_source(count: int, sites: int, random: Random) -> None:
    """Sources die and report failures in any order: each receiver reads, over others, from a holder or the service."""
    workers = {one.name: one for one in [TRAINER, *fleet(count, sites)]}
    decided = routes([one for one in workers.values() if one is not TRAINER], [TRAINER])
    source: dict[str, str | None] = {"trainer": None, **{route.receiver: route.source for route in decided}}
    failed: dict[str, set[str]] = {name: set() for name in workers}
    for _ in range(count):
        if random.random() < 0.3 and len(source) > 1:
            source.pop(random.choice(sorted(source)))
        waiting = [name for name, one in source.items() if one is not None]
        if not waiting:
            break
        name = random.choice(waiting)
        failed[name].add(source[name] or SERVICE)
        holders = [workers[one]._replace(source=source[one]) for one in source if one != name]
        [route] = plan_routes([workers[name]], holders, site="", hops=MODEL_HOPS, excluded=failed[name])
        assert route.source not in failed[name] - {SERVICE}
        assert route.source == SERVICE or route.source in source
        source[name] = route.source
        for start in source:
            at, steps = start, 0
            while (after := source.get(at)) not in (None, SERVICE):
                at, steps = after, steps + 1  # type: ignore[assignment]
                assert steps <= len(source), f"{start} waits for itself"


def test_decision_for_a_thousand_receivers_is_quick() -> None:
    """Each receiver costs a bounded number of looks at sources."""
    pushes, workers = 0, fleet(1000, 5)

    def count(frame: FrameType, event: str, called: Any) -> None:
        nonlocal pushes
        pushes += event == "c_call" and called is heapq.heappush

    sys.setprofile(count)
    try:
        routes(workers, [TRAINER])
    finally:
        sys.setprofile(None)
    assert 1000 <= pushes < 8 * 1000
