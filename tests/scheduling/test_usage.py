"""Usage accounting: no paid time of a worker is lost or counted twice, whoever it is charged to; counters survive
restarts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.support.draws import examples
from tests.support.peers import MODEL, Service, eventually, job_of

from rookery import protocol
from rookery.cli.jobs import cost_lines
from rookery.controller.rollout.request import SamplingRequest
from rookery.controller.training.policy_run import ForwardRequest, PolicyRun
from rookery.controller.training.policy_versions import PolicyVersions
from rookery.controller.usage import FLUSH_SECONDS
from rookery.controller.views import JobView
from rookery.errors import Unavailable
from rookery.protocol.connection import RegistrationRefused
from rookery.scheduling.usage import (
    PENDING_SECONDS,
    Interval,
    WorkerMeter,
)
from rookery.storage.columns import rows
from rookery.storage.models import PolicyRow, UsageRow, VersionRow
from rookery.storage.repositories import tenants
from rookery.storage.repositories.tenants import TENANT_TOTAL
from rookery.storage.repositories.versions import NextVersion

# --- sharing an interval ----------------------------------------------------------------------------------------------


@dataclass
class Metered:
    """A connected worker and the sums of its intervals."""

    price: float
    began: float
    meter: WorkerMeter[str]
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    paid: float = 0.0
    time: float = 0.0
    used: Counter[str] = field(default_factory=Counter)
    computed: float = 0.0
    idle: float = 0.0

    def add(self, interval: Interval[str]) -> None:
        self.paid += interval.cost
        self.time += interval.seconds
        self.idle += interval.idle
        for account, used in interval.used.items():
            self.used[account] += used.cost  # type: ignore[assignment]
            self.computed += used.seconds
            assert used.cost >= 0 and used.seconds >= 0
        assert interval.cost >= 0 and interval.seconds >= 0 and interval.idle >= 0

    def check(self, now: float) -> None:
        """All cost is used, idle or pending, and it is price × time."""
        close = partial(pytest.approx, rel=1e-9, abs=1e-9)
        assert self.time == close(now - self.began)
        assert self.paid == close(self.price * (now - self.began) / 3600)
        assert sum(self.used.values()) + self.idle + self.meter.pending == close(self.paid)
        assert self.computed <= self.time * (1 + 1e-9)


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


REST = (0.0, 0.0, False, False)


@settings(max_examples=examples(300))
@given(events)
@example([("join", 1.0, None), ("beat", 0, REST), ("pass", 54.0625, None), ("beat", 0, (0.0, inf, False, False))])
def test_all_cost_is_used_idle_or_pending(history: list[tuple[str, Any, Any]]) -> None:
    now, here = 1000.0, []
    for what, which, more in history:
        if what == "pass":
            now += which
        elif what == "join":
            here.append(Metered(which, now, WorkerMeter(which, now)))
        elif here:
            worker = here[which % len(here)]
            if what == "leave":
                worker.add(worker.meter.close(now))
                assert worker.meter.pending == 0
                worker.check(now)
                here.remove(worker)
            elif what == "beat":
                worker.seconds = [then + new for then, new in zip(worker.seconds, more[:2], strict=True)]
                worker.add(worker.meter.heartbeat(now, *worker.seconds, decoding=more[2], training=more[3]))
                worker.check(now)
            elif what == "sampled":
                worker.meter.sampled(*more)
            else:
                worker.meter.trained(more[0], 10.0, more[1])
    for worker in here:
        worker.add(worker.meter.close(now))
        worker.check(now)


def shares(interval: Interval[str]) -> dict[str, tuple[float, float]]:
    """By account, seconds of decoding and of training."""
    return {account: (used.decode.seconds, used.train.seconds) for account, used in interval.used.items()}


def test_decoding_is_charged_by_tokens_and_training_by_seconds() -> None:
    meter: WorkerMeter[str] = WorkerMeter(3600.0, 0.0)
    meter.heartbeat(0.0, 5.0, 7.0, decoding=False, training=False)  # a process that had worked before this connection
    meter.sampled("a", 30)
    meter.sampled("b", 10)
    meter.trained("a", 500, 1.0)
    interval = meter.heartbeat(10.0, 9.0, 10.0, decoding=True, training=True)
    assert shares(interval) == {"a": (3.0, 1.0), "b": (1.0, 0.0)}
    assert interval.cost == 10 and interval.idle == 3
    assert meter.pending == 2, "two seconds of training belong to operations that are not finished"
    assert interval.used["a"].cost == 4 and interval.used["a"].train.tokens == 500
    meter.trained("b", 500, 2.5)
    interval = meter.heartbeat(12.0, 9.0, 10.5, decoding=True, training=True)
    assert shares(interval) == {"b": (0.0, 2.5)}


def test_a_long_operation_is_not_charged_to_the_account_that_finishes_first() -> None:
    """Both train for 30 of 60 seconds, in turns; a's answer comes at 60 s, b's just after."""
    meter: WorkerMeter[str] = WorkerMeter(3600.0, 0.0)
    meter.heartbeat(0.0, 0.0, 0.0, decoding=False, training=False)
    charged: Counter[str] = Counter()
    for round_ in range(4):
        for beat in range(1, 31):
            at = 60.0 * round_ + 2 * beat
            if beat == 30:
                meter.trained("a", 1, 30.0)
            if beat == 1 and round_:
                meter.trained("b", 1, 30.0)
            for account, used in meter.heartbeat(at, 0.0, at, decoding=False, training=True).used.items():
                charged[account] += used.cost  # type: ignore[assignment]
    assert charged == {"a": 120, "b": 90}


def test_work_whose_result_never_comes_is_idle() -> None:
    meter: WorkerMeter[str] = WorkerMeter(3600.0, 0.0)
    meter.heartbeat(0.0, 0.0, 0.0, decoding=False, training=False)
    meter.heartbeat(5.0, 0.0, 5.0, decoding=False, training=True)
    interval = meter.heartbeat(6.0, 0.0, 5.0, decoding=False, training=False)
    assert meter.pending == 5 and interval.idle == 1
    late = 7.0 + PENDING_SECONDS
    assert meter.heartbeat(late, 0.0, 5.0, decoding=False, training=False).idle == late - 6 + 5
    meter.heartbeat(late + 2, 2.0, 5.0, decoding=True, training=False)
    interval = meter.close(late + 3)
    assert (interval.idle, meter.pending) == (3, 0), "it died before it sent a token"


def test_busy_seconds_beyond_the_interval_are_scaled_down() -> None:
    meter: WorkerMeter[str] = WorkerMeter(3600.0, 0.0)
    meter.heartbeat(0.0, 0.0, 0.0, decoding=False, training=False)
    meter.sampled("a", 1)
    meter.trained("a", 1, 9.0)
    assert shares(meter.heartbeat(4.0, 3.0, 9.0, decoding=True, training=True)) == {"a": (1.0, 3.0)}


def test_concurrent_training_is_charged_to_its_tenant() -> None:
    """Both lanes are busy all the time: half of it is training's. First a trains, then b."""
    meter: WorkerMeter[str] = WorkerMeter(3600.0, 0.0)
    meter.heartbeat(0.0, 0.0, 0.0, decoding=False, training=False)
    charged: Counter[str] = Counter()
    for beat in range(1, 61):
        account, at = "a" if beat <= 40 else "b", 2.0 * beat
        if beat % 5 == 0:  # it claims the seconds of its pass
            meter.trained(account, 1, 10.0)
        meter.sampled("c", 1)
        for name, used in meter.heartbeat(at, at, at, decoding=True, training=True).used.items():
            charged[name] += used.cost  # type: ignore[assignment]
    assert charged == pytest.approx({"a": 40.0, "b": 20.0, "c": 60.0}) and meter.pending == pytest.approx(0.0)


# --- the counters -----------------------------------------------------------------------------------------------------


class Busy:
    """A worker of the service, whose heartbeats a test chooses. Prices are per second."""

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
        known = self.service.controller.context.rooms.fleet.get(self.worker.name)
        assert known is not None
        before = known.beat
        await self.worker.say(
            protocol.Heartbeat(
                epoch=0, progress=0, active=0, waiting=0, training=0, generated=0, decode_seconds=self.decode,
                train_seconds=self.train,
            )
        )  # fmt: skip
        await eventually(lambda: known.beat is not before)


def question(tenant: str = "bob", name: str = "sample-1") -> SamplingRequest:
    generate = protocol.Generate(
        request=name, adapter=None, prompt=[1], shared_prefix=1, max_tokens=8, temperature=1.0, seed=1, stop_tokens=[2],
        client=True,
    )  # fmt: skip
    return SamplingRequest(tenant, name, MODEL, generate)


async def trained(service: Service, busy: Busy) -> JobView:
    """A job that ran on ``busy`` alone: four seconds of training in four operations, not yet charged."""
    await service.host().join()

    async def answer(op: Any) -> protocol.OperationDone:
        done = busy.worker.operate(op)
        return msgspec.structs.replace(done, metrics={**done.metrics, "seconds": 1.0})

    busy.worker.answer = answer
    view, _ = await service.controller.submit("alice", job_of())
    return await service.ends(view.id)


async def test_a_job_is_charged_for_its_work_and_idle_time_is_the_fleets(service: Service) -> None:
    busy = await Busy(service, "worker", 2.0).join()
    view = await trained(service, busy)
    operations = sum(isinstance(op, protocol.ForwardBackward | protocol.OptimStep) for op in busy.worker.operations)
    service.clock.now += 100.0
    await busy.beat(decode=10.0, train=float(operations))
    seen = (await service.controller.queries.show("alice", view.id)).cost
    assert (seen.seconds, seen.cost) == (10.0 + operations, 2 * (10.0 + operations))
    assert (seen.reserved, seen.preemptible) == (seen.cost, 0.0)
    assert seen.tokens_per_unit == pytest.approx(view.tokens / seen.cost)
    assert (await service.controller.queries.list("alice"))[0].cost == seen
    told = await service.controller.queries.costs()
    assert {row.name: row.cost.cost for row in told.tenants} == {"Alice": seen.cost, "Bob": 0.0}
    (fleet,) = told.workers
    assert fleet.cost == 200.0 and fleet.used == seen.cost and fleet.idle == 200.0 - seen.cost
    totals = service.controller.queries.health().totals
    assert (totals["cost_used"], totals["cost_idle"]) == (seen.cost, fleet.idle)
    assert service.controller.queries.health().gauges["price_per_hour"] == 7200.0


async def test_a_job_on_preemptible_workers_shows_its_cost_on_reserved_ones(service: Service) -> None:
    reserved = await Busy(service, "reserved", 4.0, roles=["train"]).join()
    spot = await Busy(service, "spot", 1.0, "preemptible", roles=["rollout"]).join()
    view = await trained(service, reserved)
    service.clock.now += 50.0
    await reserved.beat(train=1.0)
    await spot.beat(decode=20.0)
    seen = (await service.controller.queries.show("alice", view.id)).cost
    assert (seen.reserved, seen.preemptible) == (4.0, 20.0)


async def test_chat_requests_and_clients_models_are_charged_to_their_tenants(service: Service) -> None:
    busy = await Busy(service, "worker", 1.0).join()
    context = service.controller.context
    rooms, rollouts = context.rooms, context.rooms.rollouts
    reply = await rollouts.sample(question())
    assert reply.tokens
    row = PolicyRow(id="policy-of-a-client", tenant="bob", name="run", rank=16, alpha=32.0, targets=["q"])
    versions = PolicyVersions(context, context.records.spans, rooms.collector, row)
    run = PolicyRun(rooms.training, rooms.weights, lease, MODEL, versions)
    await run.create(first_version, 0, None)
    busy.worker.answer = None

    async def answer(op: Any) -> protocol.OperationDone:
        return protocol.OperationDone(epoch=0, op=op.op, metrics={"tokens": 5.0, "seconds": 3.0})

    busy.worker.answer = answer
    await run.forward(ForwardRequest(protocol.encode(protocol.TrainingBatch()), protocol.Loss(name="cross_entropy")))
    service.clock.now += 10.0
    await busy.beat(decode=2.0, train=3.0)
    usage = rooms.usage
    assert usage.tenant_view("bob").cost == 5.0 and usage.tenant_view("alice").cost == 0.0
    await usage.save()
    assert [row.job for row in service.database.read(rows, UsageRow, tenant="bob")] == [TENANT_TOTAL]


async def lease(policy: str) -> int:
    return 1


async def first_version(version: NextVersion) -> VersionRow:
    return VersionRow(
        tenant="bob", policy=version.policy, version=0, parent=None, manifest=version.manifest,
        hash=version.manifest.hash, size=1, step=0, created=version.time,
    )  # fmt: skip


async def test_counters_survive_a_restart_and_a_crash_loses_only_those_not_stored(tmp_path: Path) -> None:
    service = Service(tmp_path, suspect_seconds=1e6)
    await service.start()
    busy = await Busy(service, "worker", 1.0).join()
    view = await trained(service, busy)
    service.clock.now += 10.0
    await busy.beat(decode=4.0)
    await service.close()
    controller = await service.start()
    assert (await controller.queries.show("alice", view.id)).cost.cost == 4.0
    assert controller.context.rooms.usage.tenant_view("alice").cost == 4.0
    (fleet,) = (await controller.queries.costs()).workers
    assert (fleet.cost, fleet.used, fleet.idle, fleet.waiting) == (10.0, 4.0, 6.0, 0.0)
    assert controller.queries.health().totals["cost_used"] == 0, "of this process"

    busy = await Busy(service, "worker", 1.0).join()
    await controller.context.rooms.rollouts.sample(question("alice", "sample-2"))
    service.clock.now += 10.0
    await busy.beat(decode=3.0)
    stored = lambda: service.database.read(tenants.usage_totals)["alice"]["reserved"]["decode"]["cost"]  # noqa: E731
    await service.clock.advance(FLUSH_SECONDS + 1)
    await eventually(lambda: stored() == 7)
    await controller.context.rooms.rollouts.sample(question("alice", "sample-3"))
    service.clock.now += 10.0
    await busy.beat(decode=5.0)
    assert controller.context.rooms.usage.tenant_view("alice").cost == 12.0
    await service.crash()
    controller = await service.start()
    assert controller.context.rooms.usage.tenant_view("alice").cost == 7.0
    (fleet,) = (await controller.queries.costs()).workers
    assert fleet.waiting == 0.0 and fleet.cost == fleet.used + fleet.idle
    await service.close()
    service.database.close()


async def test_a_draining_worker_is_paid_for_until_it_is_gone(service: Service) -> None:
    busy = await Busy(service, "worker", 1.0).join()
    service.clock.now += 10.0
    await busy.worker.say(protocol.Draining(epoch=0))
    worker = service.controller.context.rooms.fleet.get("worker")
    assert worker is not None
    await eventually(lambda: worker.state == "draining")
    service.clock.now += 5.0
    await busy.worker.die()
    await eventually(lambda: worker.state == "gone")
    assert service.controller.context.rooms.usage.fleet()[0].cost == 15.0
    service.clock.now += 5.0
    assert service.controller.context.rooms.usage.price() == 0.0


async def test_an_unavailable_database_delays_only_the_counters(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    busy = await Busy(service, "worker", 1.0).join()
    await service.controller.context.rooms.rollouts.sample(question())
    service.clock.now += 10.0
    await busy.beat(decode=4.0)

    away = True

    def save_usage(real: Any, *arguments: Any) -> Any:
        if away:
            raise Unavailable("the database does not answer")
        return real(*arguments)

    service.database.intercept("save_usage", save_usage)
    await service.clock.advance(40.0)
    await eventually(lambda: "usage is not stored yet" in caplog.text)
    away = False
    await service.controller.context.rooms.usage.save()
    assert service.database.read(tenants.job_usage, "bob", TENANT_TOTAL)["reserved"]["decode"]["cost"] == 4


async def test_an_invalid_price_is_refused(service: Service) -> None:
    for price in (-1.0, float("nan"), float("inf")):
        with pytest.raises(RegistrationRefused, match="price"):
            await Busy(service, "worker", price).worker.join()


def test_jobs_show_prints_the_cost_of_a_job() -> None:
    nothing = {"cost": 0.0, "reserved": 0.0, "preemptible": 0.0, "seconds": 0.0, "tokens_per_unit": None}
    assert cost_lines(nothing) == []
    free = {**nothing, "seconds": 1234.5}
    assert cost_lines(free) == [("compute", "1,234 s")]
    priced = {**free, "cost": 24.0, "reserved": 4.0, "preemptible": 20.0, "tokens_per_unit": 1500.4}
    assert cost_lines(priced)[1:] == [
        ("cost", "24 (4 reserved, 20 preemptible)"),
        ("tokens per price unit", "1,500"),
    ]
