"""``rookery plan`` and ``rookery profile``."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import typer
import yaml
from tests.scheduling.test_plan import DEMAND, machine
from tests.support.small_model import save_small_model

from rookery.cli import app, main
from rookery.cli.plan import MEASURED_SLOWER, UNMEASURED, add_entry, command, demands_of
from rookery.errors import UserError
from rookery.scheduling.plan.predict import devices_of, plan_of, predict
from rookery.simulation.planned import simulate_plan
from rookery.spec.fleet import FleetSpec, Link, read_fleet, read_plan
from rookery.spec.parsing import parse_job
from rookery.worker.memory import divide
from rookery.worker.profile import shares
from rookery.worker.trainer.optim import PolicyState

JOB = {
    "name": "sums", "base_model": "smollm2-135m-instruct", "environment": {"id": "calculator"},
    "algorithm": {"group_size": 4, "groups_per_step": 4}, "sampling": {"max_tokens": 64}, "stop": {"steps": 20},
}  # fmt: skip


def code(arguments: list[str]) -> int:
    """The exit code of a command."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    fleet = FleetSpec(machines=[machine("slow", 0.5, count=2), machine("fast", 2.0, 2.0)])
    (tmp_path / "fleet.yaml").write_text(json.dumps(fleet.model_dump(mode="json", exclude_none=True)))
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(JOB))
    return str(tmp_path / "fleet.yaml"), str(tmp_path / "job.yaml")


def test_plan_prints_roles_and_writes_a_file_that_the_service_reads(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, job = files
    out = tmp_path / "plan.yaml"
    assert code(["plan", "--workers", fleet, "--jobs", job, "--jobs", job, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "times as long as predicted" in text and "One more slow" in text
    assert "rookery worker --connect URL --name fast-0" in text
    assert "--roles" not in text, "the service that has the plan gives the roles"
    plan = read_plan(out)
    assert {worker.name for worker in plan.workers} <= {"slow-0", "slow-1", "fast-0"}
    assert len(plan.jobs) == 2
    assert code(["plan", "--workers", fleet, "--jobs", job]) == 0
    assert f"--name fast-0 --model {JOB['base_model']} --roles " in capsys.readouterr().out
    assert code(["plan", "--workers", fleet, "--jobs", job, "--simulate", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["step_seconds"] == pytest.approx(report["simulated_seconds"], rel=0.6)
    assert sum(worker["episodes"] for worker in report["workers"]) == pytest.approx(16)


@pytest.mark.parametrize(
    ("context", "exit_code", "says"), [(2048, 0, "simulated_seconds"), (70, 2, "be simulated: job")]
)
def test_a_plan_is_simulated_with_the_context_of_the_machines_that_generate(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str], context: int, exit_code: int, says: str
) -> None:
    """One that only trains may have a shorter one. A prompt that leaves no room for a reply ends it in one line."""
    there = [machine("trainer", context=40), machine("generator", context=context, preemptible=True)]
    (path := tmp_path / "fleet.yaml").write_text(
        json.dumps(FleetSpec(machines=there).model_dump(mode="json", exclude_none=True))
    )
    assert code(["plan", "--workers", str(path), "--jobs", files[1], "--simulate", "--json"]) == exit_code
    found = capsys.readouterr()
    assert says in found.out + found.err and "Traceback" not in found.err


def test_a_slow_link_to_the_service_takes_its_time_in_a_simulation() -> None:
    demand = DEMAND.model_copy(update={"groups_per_step": 1, "micro_batch": 0})
    seconds = []
    for bandwidth in (1e9, 1e6):
        link = Link(between=("", "far"), bandwidth=bandwidth, latency=0.0)
        fleet = FleetSpec(machines=[machine("near"), machine("away", site="far")], links=[link])
        devices = devices_of(fleet)
        found = predict(fleet, devices, [demand], ("train", "rollout"))
        seconds.append(simulate_plan(plan_of(fleet, devices, [demand], found), steps=1))
    pull = machine("away").adapter_bytes / 1e6
    assert seconds[1] - seconds[0] == pytest.approx(pull, rel=0.1)


def test_plan_refuses_in_one_line_files_that_it_cannot_plan(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, job = files
    for written in files:
        before = Path(written).read_text()
        assert code(["plan", "--workers", fleet, "--jobs", job, "--out", written]) == 2
        assert "give another file" in capsys.readouterr().err and Path(written).read_text() == before
    only = tmp_path / "spot.yaml"
    only.write_text(json.dumps({"machines": [machine("spot", preemptible=True).model_dump(exclude_none=True)]}))
    assert code(["plan", "--workers", str(only), "--jobs", job]) == 2
    assert "no plan can run these jobs: spot-0 may vanish" in capsys.readouterr().err
    small = machine("desk").model_dump(mode="json", exclude_none=True)
    small["memory"] = {"total": 10, "base": 10, "cache_token": 1, "train_token": 0}
    only.write_text(json.dumps({"machines": [*json.loads(only.read_text())["machines"], small]}))
    assert code(["plan", "--workers", str(only), "--jobs", job]) == 2
    assert "desk-0 has no memory" in capsys.readouterr().err
    slow = {**small, "decode": [[1, 1e18]], "memory": None}
    only.write_text(json.dumps({"machines": [slow]}))
    assert code(["plan", "--workers", str(only), "--jobs", job]) == 2
    assert "no plan can run these jobs: a step would take 6.4e+19 s" in capsys.readouterr().err
    assert code(["plan", "--workers", str(tmp_path / "none.yaml"), "--jobs", job]) == 2
    assert "give the path of a fleet file" in capsys.readouterr().err


def test_plan_of_the_example_leaves_out_machines_behind_a_slow_link(capsys: pytest.CaptureFixture[str]) -> None:
    examples = Path(__file__).parents[2] / "examples"
    jobs = ["--jobs", str(examples / "programs.yaml"), "--budget", "50"]
    assert code(["plan", "--workers", str(examples / "fleet.yaml"), *jobs, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    roles = {worker["name"]: worker["role"] for worker in report["workers"]}
    assert roles == {"desk-0": "rollout", "workstation-0": "both", **{f"spot-{i}": "off" for i in range(4)}}


def test_plan_names_the_file_of_each_mistake_before_it_searches(
    files: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, job = files
    (bad := tmp_path / "bad.yaml").write_text(json.dumps(JOB | {"stop": {}, "name": "a b"}))
    monkeypatch.setattr("rookery.cli.plan.search", None)
    assert code(["plan", "--workers", fleet, "--jobs", job, "--jobs", str(bad)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith(f"rookery: {bad}: ") for line in lines)
    assert code(["plan", "--workers", fleet, "--jobs", job, "--out", str(tmp_path / "away" / "plan.yaml")]) == 2
    assert f"--out: {tmp_path / 'away'} is not a folder" in capsys.readouterr().err
    assert code(["plan", "--workers", fleet]) == 2
    assert "Missing option '--jobs'" in capsys.readouterr().err


def test_numbers_of_every_command_are_finite() -> None:
    """No bound of an option refuses ``nan``, and few refuse ``inf``."""
    apps, seen = [app, *(group.typer_instance for group in app.registered_groups)], list[str]()
    for registered in (each for one in apps if one is not None for each in one.registered_commands):
        assert registered.callback is not None
        for name, annotation in get_type_hints(registered.callback, include_extras=True).items():
            kind, *options = get_args(annotation) or [annotation]
            if float in (kind, *get_args(kind)):
                seen.append(f"{registered.name} {name}")
                [option] = options
                for given in (math.nan, math.inf, -math.inf):
                    with pytest.raises(typer.BadParameter):
                        option.callback(given)
    assert {"plan sigma", "simulate notice", "worker price", "chat temperature"} <= {*seen}


@pytest.mark.parametrize("options", [["--sigma", "nan"], ["--reply-tokens", "inf"], ["--prompt-tokens", "9" * 30]])
def test_plan_refuses_options_that_are_no_usable_numbers(
    files: tuple[str, str], capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    assert code(["plan", "--workers", files[0], "--jobs", files[1], *options]) == 2
    assert f"Invalid value for '{options[0]}'" in capsys.readouterr().err


def test_a_job_that_samples_nothing_has_no_plan() -> None:
    row = {"prompt": "a", "completion": "b"}
    rows = {"environment": {"id": "demonstrations", "rows": [row]}, "algorithm": {"name": "sft"}, "sampling": {}}
    with pytest.raises(UserError, match="sft samples nothing"):
        demands_of(parse_job(JOB | rows), None, 0.6, 64, 0.0)


def test_plan_refuses_jobs_and_machines_that_it_does_not_count(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, job = files
    changes: dict[str, dict[str, Any]] = {
        "trains all parameters": {"policies": {"main": {"full": True, "optimizer": {"lr": 1e-5}}}},
        "the base models": {"base_model": "qwen3-0.6b"},
    }
    for told, changed in changes.items():
        (tmp_path / "other.yaml").write_text(yaml.safe_dump(JOB | changed))
        assert code(["plan", "--workers", fleet, "--jobs", job, "--jobs", str(tmp_path / "other.yaml")]) == 2
        assert told in capsys.readouterr().err
    policies = {f"policy-{number}": {} for number in range(16)}
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(JOB | {"policies": policies}))
    assert code(["plan", "--workers", fleet, *["--jobs", str(tmp_path / "other.yaml")] * 17]) == 2
    assert "they train 272 policies, at most 256; plan some of them" in capsys.readouterr().err
    for field, value in (("train_token", 1e308), ("adapter_bytes", 10**400), ("decode", [[1, 1e308]])):
        entry = machine("big").model_dump(mode="json", exclude_none=True) | {field: value}
        (tmp_path / "big.json").write_text(json.dumps({"machines": [entry]}))
        assert code(["plan", "--workers", str(tmp_path / "big.json"), "--jobs", job]) == 2
        assert field in capsys.readouterr().err


def test_memory_and_transfers_of_a_plan_grow_with_the_rank() -> None:
    small = machine("m").model_dump(exclude_none=True)
    state = small["state_bytes"]
    small["memory"] = {"total": 4 * state, "base": 0, "cache_token": 1, "train_token": 0}
    small["cache_tokens"] = state
    fleet = FleetSpec.model_validate({"machines": [small]})
    seconds = []
    for rank in (16, 32, 64, 128):
        [demand] = demands_of(parse_job(JOB | {"policies": {"main": {"rank": rank}}}), None, 0.6, 64, 0.0)
        seconds.append(predict(fleet, devices_of(fleet), [demand], ["both"]).seconds)
    assert seconds[0] < seconds[1] < math.inf and seconds[2] == seconds[3] == math.inf


@pytest.mark.parametrize("rank", [16, 64, 256])
def test_states_of_a_measured_machine_fit_the_share_that_its_worker_has_for_them(rank: int) -> None:
    numbers = 4_884_480  # of an adapter of rank 16
    sizes = {"adapter_bytes": 4 * numbers, "state_bytes": 8 * numbers}
    state = PolicyState.bytes_for(numbers, torch.bfloat16)
    budget = divide(8 << 30, 1 << 30, "cpu")
    memory = shares(budget, 100_000, 512, state)
    fleet = FleetSpec(machines=[machine("m", memory=memory, cache_tokens=100_000, **sizes)])
    [demand] = demands_of(parse_job(JOB | {"policies": {"main": {"rank": rank}}}), None, 0.6, 64, 0.0)
    fitting = int((budget.training_states - 12 * numbers * rank // 16) // (state * rank // 16))
    assert bool(fitting) == (rank < 256)
    for count, fits in (*[(fitting, True)] * bool(fitting), (fitting + 1, False), (64, False)):
        demands = [demand.model_copy(update={"name": f"job-{i}"}) for i in range(count)]
        found = predict(fleet, devices_of(fleet), demands, ["both"])
        assert math.isfinite(found.seconds) == fits and ("no memory" in found.problem) != fits
        if fits:
            assert found.uses[0].rows == fleet.machines[0].rows, "states take nothing from the cache's share"


def test_commands_set_the_slices_with_which_a_machine_was_measured() -> None:
    for tokens, begins in ((512, "rookery worker "), (256, "ROOKERY_SLICE_TOKENS=256 rookery worker ")):
        fleet = FleetSpec(machines=[machine("m", train_slice=tokens)])
        devices, [demand] = devices_of(fleet), demands_of(parse_job(JOB), None, 0.6, 64, 0.0)
        plan = plan_of(fleet, devices, [demand], predict(fleet, devices, [demand], ["both"]))
        assert command(plan.workers[0], plan, followed=True).startswith(begins)


def test_the_interval_of_a_prediction_covers_the_measured_plans() -> None:
    rows = json.loads((Path(__file__).parents[2] / "benchmarks/results/plan_measured.json").read_text())["rows"]
    [errors] = [row["values"] for row in rows if row["what"].startswith("error of the predicted")]
    low, high = MEASURED_SLOWER
    assert all(low <= 1 / (1 - error) <= high for error in errors), "all were slower than predicted"


def test_an_entry_is_added_to_a_fleet_file_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    for decode in (1.0, 2.0):
        add_entry(path, machine("a", decode).model_dump(exclude_none=True))
    add_entry(path, machine("b").model_dump(exclude_none=True))
    fleet = read_fleet(path)
    assert [kind.name for kind in fleet.machines] == ["a", "b"]
    assert fleet.machines[0] == machine("a", 2.0)


def test_a_second_measurement_keeps_the_fields_that_were_added_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wrong file is refused before the measurement."""
    path = tmp_path / "fleet.yaml"
    memory = {"total": 10**9, "base": 10**8, "cache_token": 1, "train_token": 1}
    spot = machine("spot", count=4, preemptible=True, site="cloud", price=0.3, memory=memory, download=1e7)
    links = [{"between": ["", "cloud"], "bandwidth": 1e7, "latency": 0.02}]
    fleet = FleetSpec.model_validate({"machines": [machine("desk").model_dump(), spot.model_dump()], "links": links})
    path.write_text(yaml.safe_dump(fleet.model_dump(mode="json", exclude_none=True)))
    measured = {field: getattr(machine("spot", 3.0), field) for field in UNMEASURED}
    runs = list[list[str]]()

    def measure(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        runs.append(command)
        return subprocess.CompletedProcess(command, 0, stdout=json.dumps({"name": "spot", **measured}).encode())

    monkeypatch.setattr(subprocess, "run", measure)
    profile = ["profile", "--name", "spot", "--out", str(path), "--model", "Qwen/Qwen3-0.6B"]
    assert code([*profile, "--price", "0.5"]) == 0
    expected = spot.model_copy(update={**measured, "price": 0.5, "model": "qwen3-0.6b"})
    assert read_fleet(path) == fleet.model_copy(update={"machines": [fleet.machines[0], expected]})
    for refused, says in (
        (["--site", ""], "no machine is at the site 'cloud'"),
        (["--model", "n"], "measured with qwen3-0.6b"),
    ):
        assert code([*profile, *refused]) == 2
        assert says in capsys.readouterr().err and len(runs) == 1


def test_a_plan_is_for_machines_that_were_measured_with_the_base_model_of_its_jobs(
    files: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, job = files
    path, out = tmp_path / "measured.yaml", tmp_path / "plan.yaml"
    spelt = "HuggingFaceTB/SmolLM2-135M-Instruct"
    Path(job).write_text(yaml.safe_dump({**JOB, "base_model": spelt.lower()}))
    for model, expected in (("qwen3-0.6b", 2), (spelt, 0), (JOB["base_model"], 0)):
        path.write_text(json.dumps({"machines": [machine("a", model=model).model_dump(exclude_none=True)]}))
        assert code(["plan", "--workers", str(path), "--jobs", job, "--out", str(out)]) == expected
        shown = capsys.readouterr()
        assert (f"a was measured with {model}" in shown.err) == (expected == 2)
    assert f"--name a-0 --model {JOB['base_model']} " in shown.out and read_plan(out).model == JOB["base_model"]


def test_a_65th_machine_and_a_file_that_is_none_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fleet.yaml"
    add_entry(path, machine("a", count=64).model_dump(mode="json", exclude_none=True))
    before = path.read_text()
    with pytest.raises(UserError, match="65 machines, at most 64"):
        add_entry(path, machine("b").model_dump(mode="json", exclude_none=True))
    assert path.read_text() == before
    path.write_text("[")
    assert code(["profile", "--out", str(path)]) == 2
    assert code(["profile", "--name", "x" * 1000]) == 2
    assert "allowed: 1 to 100 letters" in capsys.readouterr().err
    for wrong in (["--bandwidth", "inf"], ["--latency", "inf"], ["--site", "x" * 400], ["--out", "/nowhere/f.yaml"]):
        assert code(["profile", "--model", "none", *wrong]) == 2
        assert wrong[0][2:5] in capsys.readouterr().err.replace("download", "bandwidth")


def test_each_trained_policy_of_a_job_is_planned(files: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    fleet, job = files
    frozen = {"judge": {"train": False, "base": True}, "solver": {"algorithm": {"max_staleness": 2}}}
    [demand] = demands_of(parse_job({**JOB, "policies": frozen}), None, 0.5, 64, 0.0)
    assert (demand.name, demand.staleness, demand.turns, demand.policies, demand.replies) == ("sums", 2, 2, 1, 32)
    [demand] = demands_of(parse_job({**JOB, "policies": frozen}), None, 0.5, 64, 10.0)
    assert demand.environment * demand.turns == 10.0, "of an episode"
    several = {"solver": {}, "verifier": {}, "judge": {"train": False, "base": True}}
    Path(job).write_text(yaml.safe_dump({**JOB, "policies": several}))
    found = demands_of(parse_job({**JOB, "policies": several}), None, 0.5, 64, 0.0)
    assert [demand.name for demand in found] == ["sums/solver", "sums/verifier"]
    assert sum(demand.replies for demand in found) == 3 * 16
    assert code(["plan", "--workers", fleet, "--jobs", job, "--simulate", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert {name for worker in report["workers"] for name in worker["policies"]} == {"sums/solver", "sums/verifier"}
    assert report["step_seconds"] == pytest.approx(report["simulated_seconds"], rel=0.6)


def test_policies_of_several_base_models_are_not_planned_together() -> None:
    policies = {"solver": {}, "verifier": {"base_model": "qwen3-0.6b"}}
    with pytest.raises(UserError, match=r"qwen3-0\.6b and smollm2-135m-instruct; a plan is for one base model"):
        demands_of(parse_job({**JOB, "policies": policies}), None, 0.5, 64, 0.0)


@pytest.mark.heavy
def test_profile_measures_this_machine(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_small_model(tmp_path / "small")
    monkeypatch.setenv("ROOKERY_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "fleet.yaml"
    command = ["profile", "--name", "here", "--model", str(tmp_path / "small"), "--out", str(out), "--json"]
    assert code(command) == 0
    (measured,) = read_fleet(out).machines
    assert measured.name == "here" and measured.train_token > 0 and measured.adapter_bytes > 0
    memory = measured.memory
    assert memory is not None and memory.states and memory.state and memory.total > memory.base > 0
    assert memory.state > measured.state_bytes, "a gradient and the copies that compute as well"
    assert 0.25 < memory.cache_token * measured.cache_tokens / (memory.total - memory.base) < 0.35
    rows = [rows for rows, _ in measured.decode]
    assert rows == sorted(rows) and len(rows) >= 3


MEASURED = """
import sys, torch
from rookery.settings import Settings
from rookery.worker.profile import measure
measure(sys.argv[1], Settings.load({}, cache=sys.argv[2], threads=1))
print(torch.get_num_threads())
"""


@pytest.mark.heavy
def test_profile_measures_with_the_threads_of_the_setting(tmp_path: Path) -> None:
    model = save_small_model(tmp_path / "small")
    command = [sys.executable, "-c", MEASURED, str(model), str(tmp_path / "cache")]
    assert subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip() == "1"
