"""Workers with unlike links: a slow one does not hold up those behind it. In virtual time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from tests.support.peers import MODEL
from tests.support.room import beat
from tests.support.weights import Links, VirtualStore

from rookery import protocol
from rookery.controller.fleet.worker import Worker
from rookery.controller.weights.store import ArtifactReferences, Transfer
from rookery.scheduling.replication import TRIES

SIZE = 10_000_000
QUICK, SLOW = 20e6, 100e3
NAMES = "abcdefgh"


def ref(version: int) -> protocol.AdapterRef:
    return protocol.AdapterRef(policy="p", version=version, hash=f"{version:064}", rank=4, alpha=8.0)


def fleet(down: dict[str, float], up: dict[str, float] | None = None, names: str = NAMES, site: str = "") -> Links:
    usual = {**dict.fromkeys(names, QUICK), "trainer": QUICK, **down}
    links = Links(SIZE, usual, up or {})
    links.join("trainer", [ref(version).hash for version in range(1, 9)], roles=["train"])
    for name in names:
        links.join(name, site=site)
    return links


@pytest.mark.parametrize("slow", ["a", "d", "h", "ab", "ad", "abc"])
def test_slow_receivers_delay_no_other_ones(slow: str) -> None:
    """The first version shows which ones are slow, while it is on its way; further ones pass them by."""
    links = fleet(dict.fromkeys(slow, SLOW))
    first = links.publish(ref(1))
    others = sorted(set(NAMES) - set(slow))
    assert max(first[name] for name in others) < 25, "of 100 seconds"
    assert max(first.values()) < 1.3 * SIZE / SLOW
    assert {worker.name for worker in links.fleet.all() if worker.slow} == set(slow)
    for version in (2, 3):
        taken = links.publish(ref(version))
        assert max(taken[name] for name in others) < 2.5 * SIZE / QUICK


def test_slow_receiver_of_another_site_delays_no_other_one() -> None:
    links = fleet({"a": SLOW}, site="far")
    first = links.publish(ref(1))
    assert max(seconds for name, seconds in first.items() if name != "a") < 15
    assert links.store.routed["elsewhere"] <= 3, "one copy crosses, and the rest of it after that was begun"


def test_slow_uplink_delays_no_other_worker() -> None:
    links = fleet({}, {"a": SLOW})
    assert max(links.publish(ref(1)).values()) < 15


@pytest.mark.parametrize("late", ["c", "cd", "cdef"])
def test_late_receivers_do_not_read_from_one_that_was_left(late: str) -> None:
    """The slow one has few readers and is near the start of a chain: it would be the cheapest source."""
    links = fleet({"a": SLOW, **dict.fromkeys(late, QUICK)}, names="ab")
    taken = links.publish(ref(1), late=late, after=20.0)
    assert max(taken[name] for name in late) < 2.5 * SIZE / QUICK
    assert taken["a"] < 1.1 * SIZE / SLOW


def test_slow_link_between_sites_is_learnt_and_its_receivers_are_left_alone() -> None:
    """The rates of receivers at home are no measure of those behind the link."""
    size, home, between = 400_000_000, 10e6, 2e6
    links = Links(size, dict.fromkeys(["trainer", *"abwxyz"], home), {}, between)
    links.join("trainer", [ref(version).hash for version in (1, 2)], roles=["train"])
    for name in "abwxyz":
        links.join(name, site="far" if name in "wxyz" else "")
    for version in (1, 2):
        before = links.replaced
        taken = links.publish(ref(version), step=0.5)
        assert max(taken[name] for name in "ab") < 1.1 * size / (home - between)
        assert max(taken.values()) < 1.1 * size / between, "one copy crosses"
    assert links.replaced == before


@pytest.mark.parametrize("names", ["a", "ab", "abc", NAMES])
def test_equal_links_are_left_alone(names: str) -> None:
    """Once it is known that the source gives no more, nobody is sent elsewhere, and it has cost nothing."""
    slow = dict.fromkeys([*names, "trainer"], 0.5e6)
    links = fleet(slow, names=names)
    assert max(links.publish(ref(1)).values()) < 1.1 * SIZE / 0.5e6
    assert links.replaced <= 2 * TRIES
    before = links.replaced
    for version in (2, 3, 4):
        assert max(links.publish(ref(version)).values()) < 1.1 * SIZE / 0.5e6
    assert links.replaced == before
    assert not any(worker.slow for worker in links.fleet.all())


def test_short_transfers_are_not_judged() -> None:
    links = fleet({"a": QUICK / 8})
    for version in (1, 2, 3):
        links.publish(ref(version))
    assert links.replaced == 0


class Counted(dict[Worker, Transfer]):
    """Transfers of an artifact, and how many of them were looked through."""

    looked = 0

    def __iter__(self) -> Iterator[Worker]:
        for one in super().__iter__():
            self.looked += 1
            yield one

    def items(self) -> Any:
        self.looked += len(self)
        return super().items()


def looked_through(receivers: int) -> int:
    """The most transfers that a heartbeat looks through, where all receivers read from the service and none has
    readers."""
    links = VirtualStore()
    for number in range(receivers):
        links.join(f"w{number}", address="")
    links.store.publish(MODEL, ref(1))
    first = links.fleet.all()[0]
    [entry] = [one for one in gc.get_objects() if type(one) is ArtifactReferences and first in one.transfers]
    entry.transfers = counted = Counted(entry.transfers)
    most = 0
    for size in range(5):
        for number, worker in enumerate(links.fleet.all()):
            before = counted.looked
            rate = 1_000 if number % 2 else 100_000
            links.store.on_heartbeat(worker, beat(receiving={ref(1).hash: size * rate}))
            most = max(most, counted.looked - before)
        links.clock.now += 2.0
    assert len(counted) == receivers
    return most


def test_a_heartbeat_takes_as_long_however_many_others_receive_the_artifact() -> None:
    assert looked_through(20) == looked_through(200) == 0


@pytest.mark.parametrize("seed", range(20))
def test_readers_are_those_that_the_transfers_name(seed: int) -> None:
    """Whatever begins, is redirected, is left and ends."""
    random, virtual = Random(seed), VirtualStore()
    workers = [virtual.join(f"w{number}", site="ab"[number % 2]) for number in range(6)]
    addresses = [worker.hello.address for worker in workers]
    entry = ArtifactReferences(1.0)
    for _ in range(200):
        worker = random.choice(workers)
        sources, move = random.sample(addresses, random.randrange(3)), entry.transfers.get(worker)
        match random.choice(("begin", "redirect", "leave", "end")):
            case "begin":
                entry.begin(worker, Transfer(sources, 0.0))
            case "redirect" if move is not None:
                entry.redirect(worker, move, sources)
            case "leave" if move is not None:
                entry.leave(worker, move)
            case "end":
                assert entry.end(worker) is move
        for source in workers:
            reading = [one for one, its in entry.transfers.items() if its.sources[:1] == [source.hello.address]]
            assert {*entry.readers(source)} == {*reading} and len(entry.readers(source)) == len(reading)
        for site in "ab":
            assert entry.all_left(site) == all(
                its.left for one, its in entry.transfers.items() if one.hello.site == site
            )
