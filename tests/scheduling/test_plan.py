"""Plans for unlike machines: predictions, the search, and when roles are planned again."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml
from benchmarks.scale.planning import jobs, scattered

from rookery.errors import UserError
from rookery.scheduling.plan.predict import PLAYS, ROLES, Role, devices_of, predict
from rookery.scheduling.plan.replan import replan
from rookery.scheduling.plan.search import SHARINGS, WORTH_USING, SearchParts, gains, homogeneous, search
from rookery.spec.fleet import FleetMachine, FleetSpec, JobDemand, Link, read_fleet, read_plan
from rookery.spec.machine import MachineMemory

DEMAND = JobDemand(
    name="a", group_size=8, groups_per_step=8, prompt_tokens=48, median_tokens=180, sigma=0.6, max_tokens=768,
    micro_batch=16,
)  # fmt: skip
TWO = [DEMAND, DEMAND.model_copy(update={"name": "b", "groups_per_step": 4, "staleness": 1})]


def machine(name: str, decode: float = 1.0, train: float = 1.0, **fields: Any) -> FleetMachine:
    """So many times as fast as two cores."""
    return FleetMachine(
        **{
            "name": name, "rows": 64, "cache_tokens": 140_000, "context": 2048,
            "decode": [(1, 0.03 / decode), (8, 0.035 / decode), (32, 0.052 / decode), (64, 0.077 / decode)],
            "prefill_token": 0.0003 / decode, "prefill_slice": 512, "train_token": 0.0018 / train, "train_slice": 512,
            "optimizer": 0.1, "adapter_bytes": 10**7, "state_bytes": 6 * 10**7, "download": 1e8, "upload": 1e8,
            "load": 10, "latency": 0.01,
        }
        | fields
    )  # fmt: skip


def drawn(random: Random, count: int) -> FleetSpec:
    speeds = (0.3, 0.5, 1.0, 2.0, 4.0)
    return FleetSpec(
        machines=[
            machine(f"m{i}", random.choice(speeds), random.choice(speeds), preemptible=i > 0 and random.random() < 0.2)
            for i in range(count)
        ]
    )


@pytest.mark.parametrize("case", range(3))
def test_search_finds_the_optimum_that_enumeration_finds(case: int) -> None:
    random = Random(case)
    fleet = drawn(random, 4)
    devices = devices_of(fleet)
    demands = random.choice([[DEMAND], TWO])
    optimum = min(predict(fleet, devices, demands, roles).seconds for roles in product(ROLES, repeat=len(devices)))
    found = search(fleet, devices, demands, budget=48, seed=case)
    assert found.prediction.seconds <= 1.05 * optimum
    assert found.evaluations <= 48


def test_search_of_a_large_fleet_is_as_good_as_one_that_exchanges_nothing() -> None:
    """Where the budget has few pulls for each arm."""
    random = Random(1003)
    fleet, demands = scattered(random, 24), jobs(random)
    devices = devices_of(fleet)
    found, other = (
        search(fleet, devices, demands, budget=332, seed=3, parts=SearchParts(swaps=swaps)) for swaps in (True, False)
    )
    assert found.evaluations <= 332 and found.prediction.seconds <= 1.001 * other.prediction.seconds


def test_equal_machines_leave_nothing_to_plan() -> None:
    fleet = FleetSpec(machines=[machine("m", count=6)])
    devices = devices_of(fleet)
    found = search(fleet, devices, TWO)
    best = min(predict(fleet, devices, TWO, roles).seconds for roles in homogeneous(devices))
    assert found.prediction.seconds <= best * 1.01, "a machine is left out where that costs less than this"
    assert found.evaluations <= len(SHARINGS) * len(devices), "the search ends when those plans are known"
    unbalanced = predict(fleet, devices, TWO, found.roles, balanced=False)
    assert unbalanced.seconds >= found.prediction.seconds


@pytest.mark.parametrize("demands", [[DEMAND], [DEMAND.model_copy(update={"staleness": 2})]])
def test_a_device_that_is_twenty_times_slower_is_left_out(demands: list[JobDemand]) -> None:
    fleet = FleetSpec(machines=[machine("slow", 0.05, 0.05), machine("fast", count=8)])
    devices = devices_of(fleet)
    found = search(fleet, devices, demands)
    assert found.roles[0] == "off"
    with_it = predict(fleet, devices, demands, ("rollout", *found.roles[1:]))
    assert with_it.seconds >= 0.99 * found.prediction.seconds


@pytest.mark.parametrize("case", range(4))
def test_one_more_machine_never_worsens_a_plan_and_a_slower_link_never_improves_one(case: int) -> None:
    fleet = drawn(Random(100 + case), 3)
    found = search(fleet, devices_of(fleet), TWO, budget=60)
    saved = gains(fleet, TWO, found, budget=60)
    assert all(-WORTH_USING <= share < 1 for share in saved.values()), saved
    links = [Link(between=("", "far"), bandwidth=bandwidth, latency=0.05) for bandwidth in (5e6, 10e6)]
    away = [kind.model_copy(update={"site": "far"}) for kind in fleet.machines[1:]]
    slow, fast = (FleetSpec(machines=[fleet.machines[0], *away], links=[link]) for link in links)
    for roles in product(ROLES, repeat=3):
        assert (
            predict(slow, devices_of(slow), TWO, roles).seconds >= predict(fast, devices_of(fast), TWO, roles).seconds
        )


def test_plans_fit_the_memory() -> None:
    small = MachineMemory(total=10**9, base=9 * 10**8, cache_token=10**6, train_token=10**5)
    fleet = FleetSpec(machines=[machine("small", 4.0, 4.0, memory=small), machine("large", count=2)])
    devices = devices_of(fleet)
    for roles in product(ROLES, repeat=3):
        if roles[0] != "off":
            assert math.isinf(predict(fleet, devices, TWO, roles).seconds)
    assert search(fleet, devices, TWO).roles[0] == "off"
    only = FleetSpec(machines=[fleet.machines[0]])
    found = search(only, devices_of(only), TWO)
    assert math.isinf(found.prediction.seconds) and "no memory" in found.prediction.problem


def test_preemptible_machines_do_not_train() -> None:
    fleet = FleetSpec(machines=[machine("spot", 4.0, 4.0, preemptible=True, count=3), machine("kept")])
    found = search(fleet, devices_of(fleet), TWO)
    assert found.roles[3] in ("train", "both")
    assert set(found.roles[:3]) <= {"rollout", "off"}


@pytest.mark.parametrize("case", range(3))
def test_no_plan_gives_a_machine_a_role_that_it_may_not_have(case: int) -> None:
    random = Random(case)
    fleet = drawn(random, 4)
    may = [frozenset(random.sample(["rollout", "train"], random.choice([1, 2]))) for _ in fleet.machines]
    may[0] = frozenset(PLAYS["both"])
    devices = [replace(device, may=roles) for device, roles in zip(devices_of(fleet), may, strict=True)]
    allowed = [*product(*([role for role in ROLES if {*PLAYS[role]} <= device.may] for device in devices))]
    optimum = min(predict(fleet, devices, TWO, roles).seconds for roles in allowed)
    found = search(fleet, devices, TWO, budget=60, seed=case, start=["both"] * 4)
    assert found.roles in allowed and found.prediction.seconds <= 1.05 * optimum
    others = {*product(ROLES, repeat=4)} - {*allowed}
    assert all(math.isinf(predict(fleet, devices, TWO, roles).seconds) for roles in others)


def test_sharing_by_speed_helps_on_policy_rollouts() -> None:
    fleet = FleetSpec(machines=[machine("slow", 0.5, count=2), machine("fast", 2.0, count=2)])
    devices = devices_of(fleet)
    roles: list[Role] = ["rollout", "rollout", "both", "rollout"]
    on_policy = [DEMAND.model_copy(update={"micro_batch": 0})]
    equal, by_speed = (predict(fleet, devices, on_policy, roles, balanced=b).seconds for b in (False, True))
    assert by_speed < 0.9 * equal


def test_roles_change_only_where_it_pays() -> None:
    """Three machines, then those that do not train, then three again: no role flaps."""
    fleet = FleetSpec(machines=[machine("m", count=3)])
    devices = devices_of(fleet)
    roles: list[Role] = ["both", "rollout", "rollout"]
    assert replan(fleet, devices[1:], TWO, roles[1:], 0) is not None, "no job can run without a trainer"
    forced = replan(fleet, devices[1:], TWO, roles[1:], 1)
    assert forced is not None and math.isinf(forced.before) and math.isfinite(forced.after)
    assert "both" in forced.roles or "train" in forced.roles
    again = ["off", *forced.roles]
    back = replan(fleet, devices, TWO, again, 1000)
    settled = again if back is None else back.roles
    assert back is None or back.after <= 0.95 * back.before
    assert replan(fleet, devices, TWO, settled, 1000) is None, "the same machines: nothing changes any more"
    slow: list[Role] = ["train", "off", "rollout"]
    assert replan(fleet, devices, TWO, slow, 1000) is not None
    assert replan(fleet, devices, TWO, slow, 0) is None, "nothing is left to gain"


@pytest.mark.parametrize(("steps", "stay", "moves"), [(1000, math.inf, True), (0, math.inf, False), (1000, 0.1, False)])
def test_roles_of_the_plan_come_back_only_where_they_pay(steps: int, stay: float, moves: bool) -> None:
    fleet = FleetSpec(machines=[machine("m", count=3)])
    devices = devices_of(fleet)
    forced: list[Role] = ["off", "both", "rollout"]
    planned: list[Role] = ["both", "rollout", "rollout"]
    found = replan(fleet, devices, TWO, forced, steps, stay=stay, planned=planned)
    assert (found is not None) == moves and (found is None or found.roles == tuple(planned))


def test_a_fleet_of_machines_that_may_vanish_has_no_plan() -> None:
    fleet = FleetSpec(machines=[machine(name, preemptible=True) for name in ("one", "other")])
    devices = devices_of(fleet)
    found = search(fleet, devices, TWO)
    assert math.isinf(found.prediction.seconds) and "may vanish" in found.prediction.problem
    assert replan(fleet, devices, TWO, ["rollout", "rollout"], 1000) is None


MEMORY = {"total": 100, "base": 40, "cache_token": 1, "train_token": 1}


@pytest.mark.parametrize("memory", [MEMORY, MEMORY | {"base": 100}, MEMORY | {"states": 60, "state": 61}])
def test_memory_whose_parts_fit_is_taken(memory: dict[str, int]) -> None:
    assert machine("a", memory=memory).memory == MachineMemory.model_validate(memory)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"machines": []}, "machines"),
        ({"machines": [{"name": "a"}]}, "rows"),
        ({"memory": {"total": -1, "base": 0, "cache_token": 1, "train_token": 1}}, "memory.total"),
        ({"decode": [[8, 0.1], [1, 0.2]]}, "rows ascend"),
        ({"decode": [[1, 0.05], [8, 0.04]]}, "more rows takes as long or longer"),
        ({"count": 65}, "machines.0.count: given 65, allowed: less than or equal to 64"),
        ({"count": 0}, "count"),
        ({"context": 1}, "machines.0.context: given 1, allowed: greater than or equal to 2"),
        (
            {"memory": MEMORY | {"total": 0, "base": 0, "states": 0}},
            "machines.0.memory.total: given 0, allowed: greater",
        ),
        ({"count": "3"}, 'machines.0.count: given "3", allowed: a number, without quotes'),
        ({"count": True}, "machines.0.count: given true, allowed: a number"),
        ({"count": 1.5}, "machines.0.count: given 1.5, allowed: a valid integer"),
        ({"price": math.nan}, "machines.0.price: given NaN, allowed: a finite number"),
        ({"price": math.inf}, "machines.0.price: given Infinity, allowed: a finite number"),
        ({"price": 1e300}, "machines.0.price: given 1e+300, allowed: less than or equal to"),
        ({"load": "10"}, 'machines.0.load: given "10", allowed: a number, without quotes'),
        ({"rows": 10**30}, "machines.0.rows: given 1000000000000000000000000000000, allowed: less than or equal to"),
        ({"cache_tokens": 10**400}, "machines.0.cache_tokens: given "),
        ({"decode": [[1, "0.1"]]}, 'machines.0.decode.0.1: given "0.1", allowed: a number, without quotes'),
        ({"decode": [[1]]}, "machines.0.decode.0.1: missing"),
        ({"decode": []}, "machines.0.decode: given [], allowed: have at least 1 item"),
        ({"preemptible": "no"}, 'machines.0.preemptible: given "no", allowed: true or false, without quotes'),
        ({"price": 1e-320}, "machines.0.price: given 1e-320, allowed: greater than or equal to"),
        ({"decode": [[1, 1e-320]]}, "machines.0.decode.0.1: given 1e-320, allowed: greater than or equal to"),
        ({"a\nb": 1}, "machines.0.a\\nb: unknown field; allowed: "),
        ({"site": "a\nb"}, 'machines.0.site: given "a\\nb", allowed: printable characters, in one line'),
        ({"model": "a\nb"}, 'machines.0.model: given "a\\nb", allowed: printable characters, in one line'),
        ({"service": "a\x1b[2J"}, 'service: given "a\\u001b[2J", allowed: printable characters'),
        ({"links": [{"between": ["", "a\u2028"], "bandwidth": 1, "latency": 1}]}, "links.0.between.1: given"),
        ({"site": "a b", "links": [{"between": ["", "x"], "bandwidth": 1, "latency": 1}]}, "sites: '', 'a b'"),
        ({"memory": {"total": "24GB", "base": 0, "cache_token": 1, "train_token": 1}}, "sizes in bytes"),
        ({"load": "10s"}, 'machines.0.load: given "10s", allowed: a number; without a unit: times are in seconds,'),
        ({"links": [{"between": ["", ""], "bandwidth": "1 Gbit/s", "latency": 1}]}, "rates in bytes per second"),
        ({"memory": {"total": -1, "base": 0, "cache_token": 1, "train_token": 1}}, "machines.0.memory.total: given -1"),
        ({"memory": {"total": 9, "base": -1, "cache_token": 1, "train_token": 1}}, "machines.0.memory.base: given -1"),
        ({"memory": {"total": "10", "base": 0, "cache_token": 1, "train_token": 1}}, "machines.0.memory.total"),
        # Fields that contradict each other.
        ({"memory": MEMORY | {"base": 101}}, "machines.0.memory: base: given 101, allowed: at most total, 100"),
        ({"memory": MEMORY | {"states": 101}}, "machines.0.memory: states: given 101, allowed: at most total - base,"),
        ({"memory": MEMORY | {"states": 61}}, "machines.0.memory: states: given 61, allowed: at most total - base, 60"),
        ({"rows": 9, "cache_tokens": 8}, "machines.0: rows: given 9, allowed: at most cache_tokens, 8"),
        ({"gpu": "big"}, "machines.0.gpu: unknown field; allowed: "),
        ({"decod": [[1, 0.1]]}, "machines.0.decod: unknown field; did you mean decode?"),
        ({"machines": None}, "machines: given null, allowed: a valid list"),
        ({"links": [{"between": ["", ""], "bandwidth": 1e6, "latency": 1}]}, "links: between '' and itself"),
        ({"links": [{"between": [""], "bandwidth": 1e6, "latency": 1}]}, "links.0.between.1: missing"),
        ({"links": [{"between": ["", "x"], "bandwidth": 0, "latency": 1}]}, "links.0.bandwidth: given 0, allowed: "),
        ({"links": [{"between": ["", "x"], "bandwidth": 1, "latency": 1e300}]}, "links.0.latency: given 1e+300, "),
        ({"name": ""}, "name"),
        ({"name": "my box; true"}, "name"),
        ({"name": "a/b"}, "name"),
        ({"links": [{"between": ["", "moon"], "bandwidth": 1e6, "latency": 1}]}, "no machine is at the site 'moon'"),
    ],
)
def test_a_wrong_fleet_file_is_refused_in_one_line(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    content = FleetSpec(machines=[machine("a")]).model_dump(mode="json", exclude_none=True)
    for name, value in change.items():
        (content if name in content else content["machines"][0])[name] = value
    path = tmp_path / "fleet.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=r"fleet\.yaml: ") as refusal:
        read_fleet(path)
    assert says in str(refusal.value) and str(refusal.value).isprintable()
    assert len(str(refusal.value)) < len(str(path)) + 600


def test_two_kinds_of_one_name_are_refused(tmp_path: Path) -> None:
    content = [machine("a").model_dump(mode="json", exclude_none=True)] * 2
    (path := tmp_path / "fleet.yaml").write_text(yaml.safe_dump({"machines": content}))
    with pytest.raises(UserError, match=r"fleet\.yaml: machines: the name a is there twice; give each kind its"):
        read_fleet(path)


def test_more_policies_than_episodes_have_a_plan() -> None:
    demand = DEMAND.model_copy(update={"group_size": 2, "groups_per_step": 1, "turns": 5, "policies": 5})
    fleet = FleetSpec(machines=[machine("m")])
    assert 0 < search(fleet, devices_of(fleet), [demand]).prediction.seconds < math.inf


def test_a_machine_whose_context_holds_no_prompt_does_not_generate() -> None:
    fleet = FleetSpec(machines=[machine("short", 9.0, context=TWO[0].prompt_tokens), machine("long")])
    devices = devices_of(fleet)
    found = search(fleet, devices, TWO)
    roles = dict(zip([device.name for device in devices], found.roles, strict=True))
    assert math.isfinite(found.prediction.seconds) and roles["short-0"] in ("off", "train")
    alone = FleetSpec(machines=[machine("short", context=TWO[0].prompt_tokens)])
    assert "context of" in search(alone, devices_of(alone), TWO).prediction.problem


@pytest.mark.parametrize("count", range(4))
def test_machines_that_can_do_nothing_hide_no_plan(count: int) -> None:
    full = MachineMemory(total=10**9, base=10**9, cache_token=10**6, train_token=10**6)
    away = {"context": 40, "preemptible": True}
    fit = [machine("trainer", context=40), machine("generator", preemptible=True, site="a")]
    useless = [machine(f"short-{site}", 9.0, site=site, count=max(1, count), **away) for site in ("a", "b")]
    useless.append(machine("full", 9.0, 9.0, memory=full, count=max(1, count)))
    fleet = FleetSpec(machines=[*fit, *useless[: 3 * min(1, count)]])
    found = search(fleet, devices_of(fleet), TWO)
    assert found.prediction.seconds == predict(fleet, devices_of(fleet), TWO, found.roles).seconds < math.inf
    assert found.roles == ("train", "rollout", *("off",) * 3 * count)


@pytest.mark.parametrize("staleness", [0, 1, 4, 64])
@pytest.mark.parametrize("speed", [0.2, 1.0, 4.0])
def test_every_role_of_a_plan_is_played_and_all_episodes_are_shared_out(staleness: int, speed: float) -> None:
    fleet = FleetSpec(machines=[machine("slow", 0.01, 0.01), machine("m", 1.0, speed, count=2)])
    devices, demands = devices_of(fleet), [DEMAND.model_copy(update={"staleness": staleness})]
    found = search(fleet, devices, demands).prediction
    for i, use in enumerate(found.uses):
        assert ("train" in PLAYS[use.role]) == bool(use.policies)
        assert ("rollout" in PLAYS[use.role]) == (use.episodes > 0)
        assert found.busy(i) <= 1 + 1e-9
    assert sum(use.episodes for use in found.uses) == pytest.approx(DEMAND.episodes)


def planned(name: str, machine: str = "a", *roles: str, **fields: Any) -> dict[str, Any]:
    usual = {"name": name, "machine": machine, "max_rows": 1, "slice_tokens": 512}
    return {**usual, "roles": list(roles) or ["rollout", "train"], **fields}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"workers": [planned("b-0", "b")]}, "workers: b-0 is no machine of the plan's fleet"),
        ({"workers": [planned("a-0"), planned("a-0")]}, "workers: a name is there twice"),
        ({"workers": [planned("b\n")]}, "workers: b\\n is no machine of the plan's fleet"),
        ({"workers": []}, "workers: given [], allowed: have at least 1 item"),
        ({"workers": [planned("a-0", "spot")]}, "workers: a-0 is of the kind a, given 'spot'"),
        ({"workers": [planned("a-0", "a", "rollout")]}, "workers: none has the role train"),
        ({"workers": [planned("a-0", "a", "train")]}, "workers: none has the role rollout"),
        ({"workers": [planned("a-0", "a", "rollout"), planned("spot-0", "spot", "train")]}, "spot-0 may vanish"),
        ({"workers": [planned("a-0", "a", "judge")]}, 'workers.0.roles.0: given "judge", allowed: '),
        ({"workers": [planned("a-0", max_rows="4")]}, 'workers.0.max_rows: given "4", allowed: a number, without'),
        ({"workers": [planned("a-0", role="train")]}, "workers.0.role: unknown field; did you mean roles?"),
        ({"step_seconds": math.inf}, "step_seconds: given Infinity, allowed: "),
        ({"jobs": []}, "jobs: given [], allowed: have at least 1 item"),
        ({"jobs": [DEMAND.model_dump() | {"group_size": 10**9}]}, "jobs.0.group_size: given 1000000000, allowed: "),
        (
            {"jobs": [DEMAND.model_dump() | {"name": "a\x1b[2J"}]},
            'jobs.0.name: given "a\\u001b[2J", allowed: printable',
        ),
        ({"model": "a\nb"}, 'model: given "a\\nb", allowed: printable characters, in one line'),
        ({"jobs": [DEMAND.model_dump() | {"policies": 2}]}, "jobs.0: policies: 2 train, and 1 reply"),
        # Fields that contradict each other.
        ({"jobs": [DEMAND.model_dump() | {"micro_batch": 65}]}, "jobs.0: micro_batch: given 65, allowed: at most the"),
        (
            {"jobs": [DEMAND.model_dump() | {"median_tokens": 769}]},
            "jobs.0: median_tokens: given 769, allowed: at most",
        ),
        ({"workers": [planned("a-0", "a", "train", "train")]}, "workers: a-0 has the role train twice"),
        ({"workers": [planned("a-0", max_rows=65)]}, "workers: max_rows of a-0: given 65, allowed: at most rows of a,"),
        ({"workers": [planned("a-0", slice_tokens=9)]}, "workers: slice_tokens of a-0: given 9, allowed: train_slice "),
        ({"fleet": {"machines": []}}, "fleet.machines: given [], allowed: "),
    ],
)
def test_a_plan_that_no_worker_can_follow_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    fleet = FleetSpec(machines=[machine("a"), machine("spot", preemptible=True)])
    content = {"step_seconds": 1.0, "workers": [planned("a-0")], "jobs": [DEMAND.model_dump()]}
    content["fleet"] = fleet.model_dump(mode="json", exclude_none=True)
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(content))
    assert [worker.name for worker in read_plan(path).workers] == ["a-0"]
    path.write_text(yaml.safe_dump(content | change))
    with pytest.raises(UserError, match=r"plan\.yaml: ") as refusal:
        read_plan(path)
    assert says in str(refusal.value) and str(refusal.value).isprintable()
