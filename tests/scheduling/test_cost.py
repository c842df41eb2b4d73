"""What work costs: nothing of a worker's paid time is lost or counted twice, whoever pays; bills survive restarts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.peers import MODEL, Service, eventually, job_of

from rookery import protocol
from rookery.cli.jobs import cost_lines
from rookery.controller.jobs.step import init_adapter
from rookery.controller.rollout.scheduler import SamplingRequest
from rookery.controller.training.policy_trainer import ForwardRequest, PolicyTrainer
from rookery.controller.views import JobView
from rookery.errors import Unavailable
from rookery.scheduling.cost import (
    HOUR,
    LINGER,
    SECOND,
    UNIT,
    Meter,
    ResourceUsage,
    SettledUsage,
    WorkDone,
    reserved_alone,
    split,
)
from rookery.spec.job import JobSpec

# --- sharing out ------------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**18), st.lists(st.integers(0, 10**15), min_size=1).filter(any))
def test_a_split_is_exact_and_fair(total: int, weights: list[int]) -> None:
    shares = split(total, weights)
    assert sum(shares) == total
    whole = sum(weights)
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share * whole - total * weight) <= whole, "no share is off by more than the smallest coin"


@dataclass
class Paying:
    """A worker that is there, and what the account says of it."""

    price: float
    began: float
    meter: Meter[str]
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    last: float = 0.0
    money: int = 0
    time: int = 0
    used: Counter[str] = field(default_factory=Counter)
    computed: int = 0
    idle: int = 0

    def add(self, settled: SettledUsage[str]) -> None:
        self.money += settled.money
        self.time += settled.time
        self.idle += settled.idle
        for payer, used in settled.used.items():
            self.used[payer] += used.money
            self.computed += used.time
            assert used.money >= 0 and used.time >= 0
        assert settled.money >= 0 and settled.time >= 0 and settled.idle >= 0

    def check(self, now: float) -> None:
        """All money is somebody's, nobody's or waits, and it is price × time."""
        time = round((now - self.began) * SECOND)
        assert self.time == time
        assert self.money == round(self.price * UNIT) * time // HOUR
        assert sum(self.used.values()) + self.idle + self.meter.waiting == self.money
        assert self.computed <= time


seconds = st.floats(0, 1e4) | st.sampled_from([0.0, 1e-9, 2.0, 1e7, float("nan"), float("inf"), -1.0])
events = st.lists(
    st.one_of(
        st.tuples(st.just("pass"), st.floats(0, 100), st.none()),
        st.tuples(st.just("join"), st.floats(0, 100) | st.just(0.0), st.none()),
        st.tuples(st.just("leave"), st.integers(0, 5), st.none()),
        st.tuples(st.just("beat"), st.integers(0, 5), st.tuples(seconds, seconds, st.booleans(), st.booleans())),
        st.tuples(st.just("sampled"), st.integers(0, 5), st.tuples(st.sampled_from("abc"), st.integers(1, 99))),
        st.tuples(st.just("trained"), st.integers(0, 5), st.tuples(st.sampled_from("abc"), seconds)),
    ),
    max_size=60,
)


@settings(max_examples=300)
@given(events)
def test_all_money_is_somebodys_nobodys_or_waits(history: list[tuple[str, Any, Any]]) -> None:
    now, here = 1000.0, []
    for what, which, more in history:
        if what == "pass":
            now += which
        elif what == "join":
            here.append(Paying(which, now, Meter(which, now)))
        elif here:
            worker = here[which % len(here)]
            if what == "leave":
                worker.add(worker.meter.close(now))
                assert worker.meter.waiting == 0
                worker.check(now)
                here.remove(worker)
            elif what == "beat":
                worker.seconds = [then + new for then, new in zip(worker.seconds, more[:2], strict=True)]
                worker.add(worker.meter.beat(now, *worker.seconds, decoding=more[2], training=more[3]))
                worker.check(now)
            elif what == "sampled":
                worker.meter.sampled(*more)
            else:
                worker.meter.trained(more[0], 10.0, more[1])
    for worker in here:
        worker.add(worker.meter.close(now))
        worker.check(now)


def shares(settled: SettledUsage[str]) -> dict[str, tuple[float, float]]:
    """By payer, seconds of decoding and of training."""
    return {who: (used.decode.time / SECOND, used.train.time / SECOND) for who, used in settled.used.items()}


def test_decoding_is_paid_by_tokens_training_by_its_operations_seconds() -> None:
    meter: Meter[str] = Meter(3600.0, 0.0)
    meter.beat(0.0, 5.0, 7.0, decoding=False, training=False)  # a process that had worked before this connection
    meter.sampled("a", 30)
    meter.sampled("b", 10)
    meter.trained("a", 500, 1.0)
    settled = meter.beat(10.0, 9.0, 10.0, decoding=True, training=True)
    assert shares(settled) == {"a": (3.0, 1.0), "b": (1.0, 0.0)}
    assert settled.money == 10 * UNIT and settled.idle == 3 * UNIT
    assert meter.waiting == 2 * UNIT, "two seconds of training are of operations that go on"
    assert settled.used["a"].money == 4 * UNIT and settled.used["a"].train.tokens == 500
    meter.trained("b", 500, 2.5)
    settled = meter.beat(12.0, 9.0, 10.5, decoding=True, training=True)
    assert shares(settled) == {"b": (0.0, 2.5)}


def test_one_tenants_long_operation_is_not_paid_by_whoever_ends_first() -> None:
    """Both train for 30 of 60 seconds, turn by turn; a's answer comes at 60 s, b's just after."""
    meter: Meter[str] = Meter(3600.0, 0.0)
    meter.beat(0.0, 0.0, 0.0, decoding=False, training=False)
    paid: Counter[str] = Counter()
    for round_ in range(4):
        for beat in range(1, 31):
            at = 60.0 * round_ + 2 * beat
            if beat == 30:
                meter.trained("a", 1, 30.0)
            if beat == 1 and round_:
                meter.trained("b", 1, 30.0)
            for who, used in meter.beat(at, 0.0, at, decoding=False, training=True).used.items():
                paid[who] += used.money
    assert paid == {"a": 120 * UNIT, "b": 90 * UNIT}


def test_work_whose_result_never_comes_is_idle() -> None:
    meter: Meter[str] = Meter(3600.0, 0.0)
    meter.beat(0.0, 0.0, 0.0, decoding=False, training=False)
    meter.beat(5.0, 0.0, 5.0, decoding=False, training=True)
    settled = meter.beat(6.0, 0.0, 5.0, decoding=False, training=False)
    assert meter.waiting == 5 * UNIT and settled.idle == 1 * UNIT
    late = 7.0 + LINGER / SECOND
    assert meter.beat(late, 0.0, 5.0, decoding=False, training=False).idle == (late - 6 + 5) * UNIT
    meter.beat(late + 2, 2.0, 5.0, decoding=True, training=False)
    settled = meter.close(late + 3)
    assert (settled.idle, meter.waiting) == (3 * UNIT, 0), "it died before it sent a token"


def test_busy_seconds_beyond_the_interval_are_scaled_down() -> None:
    meter: Meter[str] = Meter(3600.0, 0.0)
    meter.beat(0.0, 0.0, 0.0, decoding=False, training=False)
    meter.sampled("a", 1)
    meter.trained("a", 1, 9.0)
    assert shares(meter.beat(4.0, 3.0, 9.0, decoding=True, training=True)) == {"a": (1.0, 3.0)}


def used(decode: tuple[float, float, int], train: tuple[float, float, int] = (0, 0, 0)) -> ResourceUsage:
    """(seconds, money, tokens) of each."""
    return ResourceUsage(*(WorkDone(round(s * SECOND), round(m * UNIT), t) for s, m, t in (decode, train)))


def test_on_reserved_capacity_alone() -> None:
    mine = {"preemptible": used((100, 10, 1000)), "reserved": used((0, 0, 0), (50, 20, 500))}
    assert reserved_alone(mine, {"preemptible": used((100, 10, 1000))}) is None
    # Reserved workers cost 0.4 a second and were never seen to decode: as fast as the others.
    everybody = {"preemptible": used((100, 10, 1000)), "reserved": used((0, 0, 0), (50, 20, 500))}
    assert reserved_alone(mine, everybody) == (20 + 100 * 0.4) * UNIT
    # They decode twice as fast as preemptible workers: half the seconds.
    everybody = {"preemptible": used((1000, 10, 1000)), "reserved": used((500, 200, 1000))}
    assert reserved_alone(mine, everybody) == (20 + 50 * 0.4) * UNIT
    assert reserved_alone({}, everybody) == 0


# --- bills ------------------------------------------------------------------------------------------------------------


class Busy:
    """A worker of the service, whose beats say what a test wants. Prices are per second."""

    def __init__(self, service: Service, name: str, price: float, kind: str = "reserved", **script: Any) -> None:
        self.worker = service.worker(name, **script)
        self.worker.hello |= {"price": 3600.0 * price, "kind": kind}
        self.service = service
        self.decode = self.train = 0.0

    async def join(self) -> Busy:
        await self.worker.join()
        await self.beat()
        return self

    async def beat(self, decode: float = 0.0, train: float = 0.0) -> None:
        """After so many seconds more of each."""
        self.decode += decode
        self.train += train
        known = self.service.controller.context.fleet.named(self.worker.name)
        assert known is not None
        before = known.beat
        await self.worker.say(
            protocol.Heartbeat(
                epoch=0, progress=0, active=0, waiting=0, training=0, adapters=0, generated=0, trained=0,
                decode_seconds=self.decode, train_seconds=self.train, memory_bytes=0,
            )
        )  # fmt: skip
        await eventually(lambda: known.beat is not before)


def question(tenant: str = "bob", name: str = "sample-1") -> SamplingRequest:
    generate = protocol.Generate(
        request=name, adapter=None, prompt=[1], shared_prefix=1, max_tokens=8, temperature=1.0, seed=1, stop_tokens=[2],
        interactive=True,
    )  # fmt: skip
    return SamplingRequest(tenant, name, MODEL, generate)


async def trained(service: Service, busy: Busy) -> JobView:
    """A job that ran on ``busy`` alone, four seconds of training in four operations of a second each; not yet paid."""
    await service.host().join()

    async def answer(op: Any) -> protocol.OperationDone:
        done = busy.worker._operate(op)
        return msgspec.structs.replace(done, metrics={**done.metrics, "seconds": 1.0})

    busy.worker.answer = answer
    view, _ = await service.controller.submit("alice", job_of())
    return await service.ends(view.id)


async def test_a_job_pays_for_what_it_used_and_idle_time_is_the_fleets(service: Service) -> None:
    busy = await Busy(service, "worker", 2.0).join()
    view = await trained(service, busy)
    operations = sum(isinstance(op, protocol.ForwardBackward | protocol.OptimStep) for op in busy.worker.operations)
    service.clock.now += 100.0
    await busy.beat(decode=10.0, train=float(operations))
    seen = (await service.controller.queries.show("alice", view.id)).cost
    assert (seen.seconds, seen.cost) == (10.0 + operations, 2 * (10.0 + operations))
    assert (seen.reserved, seen.preemptible, seen.reserved_alone) == (seen.cost, 0.0, seen.cost)
    assert seen.tokens_per_unit == pytest.approx(view.tokens / seen.cost)
    assert (await service.controller.queries.list("alice"))[0].cost == seen
    told = await service.controller.queries.costs()
    assert {row["name"]: row["cost"].cost for row in told["tenants"]} == {"Alice": seen.cost, "Bob": 0.0}
    (fleet,) = told["workers"]
    assert fleet.cost == 200.0 and fleet.used == seen.cost and fleet.idle == 200.0 - seen.cost
    totals = service.controller.queries.health()["totals"]
    assert (totals["cost_used"], totals["cost_idle"]) == (seen.cost, fleet.idle)
    assert service.controller.queries.health()["gauges"]["price_per_hour"] == 7200.0


async def test_a_spot_workers_job_shows_what_reserved_ones_would_have_cost(service: Service) -> None:
    reserved = await Busy(service, "reserved", 4.0, roles=["train"]).join()
    spot = await Busy(service, "spot", 1.0, "preemptible", roles=["rollout"]).join()
    view = await trained(service, reserved)
    service.clock.now += 50.0
    await reserved.beat(train=1.0)
    await spot.beat(decode=20.0)
    seen = (await service.controller.queries.show("alice", view.id)).cost
    assert (seen.reserved, seen.preemptible) == (4.0, 20.0)
    assert seen.reserved_alone == 4.0 + 20.0 * 4.0, "no reserved worker decoded: as fast as the spot one"


async def test_questions_and_clients_models_are_their_tenants(service: Service) -> None:
    busy = await Busy(service, "worker", 1.0).join()
    rollouts, training = service.controller.context.rollouts, service.controller.context.training
    reply = await rollouts.sample(question())
    assert reply.tokens
    trainee = PolicyTrainer(training, tenant="bob", policy="policy-of-a-client", model=MODEL, next_lease=lease)
    spec = JobSpec.model_validate(job_of())
    manifest = await trainee.init(partial(init_adapter, spec, "policy-of-a-client"), None)
    parent = protocol.AdapterRef(policy="policy-of-a-client", version=0, hash=manifest.hash, rank=16, alpha=32.0)
    busy.worker.answer = None

    async def answer(op: Any) -> protocol.OperationDone:
        return protocol.OperationDone(epoch=0, op=op.op, metrics={"tokens": 5.0, "seconds": 3.0})

    busy.worker.answer = answer
    await trainee.forward(
        parent, ForwardRequest(protocol.encode(protocol.TrainingBatch()), protocol.Loss(name="cross_entropy"))
    )
    service.clock.now += 10.0
    await busy.beat(decode=2.0, train=3.0)
    billing = service.controller.context.billing
    assert billing.whole("bob").cost == 5.0 and billing.whole("alice").cost == 0.0
    assert list(await billing.bills("bob")) == [""]


async def lease() -> int:
    return 1


async def test_bills_outlive_the_service_and_a_crash_loses_only_what_was_not_stored(tmp_path: Path) -> None:
    service = Service(tmp_path, usage_flush_seconds=1.0)
    await service.start()
    busy = await Busy(service, "worker", 1.0).join()
    view = await trained(service, busy)
    service.clock.now += 10.0
    await busy.beat(decode=4.0)
    await service.close()
    controller = await service.start()
    assert (await controller.queries.show("alice", view.id)).cost.cost == 4.0
    assert controller.context.billing.whole("alice").cost == 4.0
    (fleet,) = (await controller.queries.costs())["workers"]
    assert (fleet.cost, fleet.used, fleet.idle, fleet.waiting) == (10.0, 4.0, 6.0, 0.0)
    assert controller.queries.health()["totals"]["cost_used"] == 0, "of this process"

    busy = await Busy(service, "worker", 1.0).join()
    await controller.context.rollouts.sample(question("alice", "sample-2"))
    service.clock.now += 10.0
    await busy.beat(decode=3.0)
    stored = lambda: service.database.all_whole_bills()["alice"]["reserved"]["decode"]["money"]  # noqa: E731
    await service.clock.advance(2.0)
    await eventually(lambda: stored() == 7 * UNIT)
    await controller.context.rollouts.sample(question("alice", "sample-3"))
    service.clock.now += 10.0
    await busy.beat(decode=5.0)
    assert controller.context.billing.whole("alice").cost == 12.0
    await service.crash()
    controller = await service.start()
    assert controller.context.billing.whole("alice").cost == 7.0
    (fleet,) = (await controller.queries.costs())["workers"]
    assert fleet.waiting == 0.0 and fleet.cost == fleet.used + fleet.idle
    await service.close()
    service.database.close()


async def test_a_draining_worker_is_paid_for_until_it_is_gone(service: Service) -> None:
    busy = await Busy(service, "worker", 1.0).join()
    service.clock.now += 10.0
    await busy.worker.say(protocol.Draining(epoch=0))
    worker = service.controller.context.fleet.named("worker")
    assert worker is not None
    await eventually(lambda: worker.state == "draining")
    service.clock.now += 5.0
    await busy.worker.die()
    await eventually(lambda: worker.state == "gone")
    assert service.controller.context.billing.fleet()[0].cost == 15.0
    service.clock.now += 5.0
    assert service.controller.context.billing.price() == 0.0


async def test_a_database_that_is_away_delays_the_account_alone(
    service: Service, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = await Busy(service, "worker", 1.0).join()
    await service.controller.context.rollouts.sample(question())
    service.clock.now += 10.0
    await busy.beat(decode=4.0)
    save = service.database.save_bills

    def away(*arguments: Any) -> None:
        raise Unavailable("the database does not answer")

    monkeypatch.setattr(service.database, "save_bills", away)
    await service.clock.advance(40.0)
    await eventually(lambda: "the account of costs is not stored yet" in caplog.text)
    monkeypatch.setattr(service.database, "save_bills", save)
    await service.controller.context.billing.save()
    assert service.database.bill("bob", "")["reserved"]["decode"]["money"] == 4 * UNIT


async def test_a_price_that_is_none_is_refused(service: Service) -> None:
    for price in (-1.0, float("nan"), float("inf")):
        with pytest.raises(PermissionError, match="price"):
            await Busy(service, "worker", price).worker.join()


def test_jobs_show_tells_what_a_job_cost() -> None:
    nothing = {"cost": 0.0, "reserved": 0.0, "preemptible": 0.0, "seconds": 0.0, "tokens_per_unit": None,
               "reserved_alone": None}  # fmt: skip
    assert cost_lines(nothing) == []
    free = {**nothing, "seconds": 1234.5}
    assert cost_lines(free) == [("compute", "1,234 s")]
    priced = {**free, "cost": 24.0, "reserved": 4.0, "preemptible": 20.0, "tokens_per_unit": 1500.4}
    assert cost_lines(priced)[1:] == [
        ("cost", "24 (4 reserved, 20 preemptible)"),
        ("tokens per price unit", "1,500"),
    ]
    assert cost_lines({**priced, "reserved_alone": 84.0})[-1] == ("cost on reserved alone", "84 (estimated)")
