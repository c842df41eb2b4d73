"""Jobs as they are written: every refusal names the field, what was given and what is allowed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.support.peers import job_of

from rookery import protocol
from rookery.errors import UserError
from rookery.settings import Settings
from rookery.spec.files import read_job
from rookery.spec.job import JobSpec, needed_models
from rookery.spec.parsing import SpecError, parse_job
from rookery.spec.policy import LOSS_PARAMETERS, AlgorithmSpec


def main(**fields: Any) -> dict[str, Any]:
    return job_of(policies={"main": fields})


REFUSED: list[tuple[Any, str]] = [
    ([1], "job: given list, allowed: a mapping of fields (name, base_model, …)"),
    ({}, "name: missing"),
    (job_of(nme="x"), "nme: unknown field; did you mean name?"),
    (main(**{"a\nb": 1}), "policies.main.a\\nb: unknown field; allowed: rank, "),
    (job_of(policies={"a\x1b[2J": {"rank": 0}}), "policies.a\\x1b[2J.rank: given 0, allowed: greater than"),
    (job_of(algorithm__group_sise=4), "algorithm.group_sise: unknown field; did you mean group_size?"),
    (main(rnk=3), "policies.main.rnk: unknown field; did you mean rank?"),
    (main(optimizer={"x": 3}), "policies.main.optimizer.x: unknown field; allowed: lr, schedule, beta1, beta2, eps,"),
    (main(optimizer={"eps": 1e-50}), "policies.main.optimizer.eps: given 1e-50, allowed: greater than or equal to"),
    (main(optimizer={"weight_decay": 1e39}), "policies.main.optimizer.weight_decay: given 1e+39, allowed: less than"),
    (
        main(optimizer={"schedule": {"nam": 1}}),
        "policies.main.optimizer.schedule.nam: unknown field; did you mean name?",
    ),
    (
        job_of(sampling__top_k=3),
        "sampling.top_k: top_k is not supported: a trainer cannot reproduce it exactly; use samp",
    ),
    (
        job_of(top_p=0.9),
        "top_p: top_p is not supported: a trainer cannot reproduce it exactly; use sampling.temperature",
    ),
    (job_of(temperature=0.9), "temperature: unknown field; did you mean sampling.temperature?"),
    (job_of(name="-bad"), 'name: given "-bad", allowed: 1 to 100 letters, digits, dots, dashes or underscores, the'),
    (job_of(base_model=""), 'base_model: given "", allowed: have at least 1 character'),
    (job_of(seed=-1), "seed: given -1, allowed: greater than or equal to 0"),
    (job_of(seed=True), "seed: given true, allowed: a number, neither true nor false"),
    (job_of(shuffle=3), "shuffle: given 3, allowed: true or false, not a number"),
    (job_of(shuffle=1), "shuffle: given 1, allowed: true or false, not a number"),
    (job_of(shuffle="yes"), 'shuffle: given "yes", allowed: true or false, without quotes: true'),
    (main(train="off"), 'policies.main.train: given "off", allowed: true or false, without quotes: false'),
    (main(train="never"), 'policies.main.train: given "never", allowed: true or false'),
    (job_of(seed="3"), 'seed: given "3", allowed: a number, without quotes: 3'),
    (job_of(seed="many"), 'seed: given "many", allowed: a number'),
    (
        main(optimizer={"lr": "2e-4"}),
        'policies.main.optimizer.lr: given "2e-4", allowed: a number, without quotes: 2.0e-4',
    ),
    (job_of(stop__reward="1"), 'stop.reward: given "1", allowed: a number, without quotes: 1'),
    (job_of(algorithm="grpo"), 'algorithm: given "grpo", allowed: a mapping of fields'),
    (
        job_of(algorithm__name="ppo"),
        "algorithm.name: given \"ppo\", allowed: 'grpo', 'dr_grpo', 'rloo', 'mean', 'sft' or 'dpo'",
    ),
    (job_of(algorithm__group_size=1), "algorithm.group_size: given 1, allowed: greater than or equal to 2"),
    (job_of(algorithm__max_staleness=65), "algorithm.max_staleness: given 65, allowed: less than or equal to 64"),
    (job_of(algorithm__kl_weight=-1), "algorithm.kl_weight: given -1, allowed: greater than or equal to 0"),
    (
        job_of(algorithm__kl_weight=0.1, algorithm__loss="cross_entropy"),
        "algorithm: kl_weight: with the loss cross_entropy, allowed is 0",
    ),
    (job_of(algorithm__kl_weight=1e39), "algorithm.kl_weight: given 1e+39, allowed: less than 3.4e+38"),
    (main(algorithm={"kl_weight": 1e39}), "policies.main.algorithm.kl_weight: given 1e+39, allowed: less than"),
    *(
        (job_of(algorithm__loss={"name": loss, name: 1e39}), f"algorithm.loss: {name} is ")
        for loss, parameters in LOSS_PARAMETERS.items()
        for name in parameters
    ),
    (main(algorithm={"loss": {"name": "aipo", "rho": 1e300}}), "policies.main.algorithm.loss: rho is below 3.4e+38,"),
    (job_of(algorithm__loss="pppo"), "algorithm.loss.name: given \"pppo\", allowed: 'cross_entropy', "),
    (job_of(algorithm__loss={"name": "aipo", "rhoo": 3}), "algorithm.loss: aipo has no parameter 'rhoo'; it has rho"),
    (job_of(algorithm__loss={"name": "aipo", "rho": -3}), "algorithm.loss: rho is a number above 0, given -3"),
    (job_of(algorithm__loss={"name": "aipo", "rho": True}), "algorithm.loss: rho is a number above 0, given True"),
    (
        job_of(algorithm__loss={"name": "ppo", "clip_low_threshold": 2}),
        "clip_low_threshold is a bound of the ratio, at",
    ),
    (job_of(algorithm__loss={"name": "ppo", "clip_high_threshold": 0.2}), "; for an epsilon of 0.2 give 1.2"),
    (job_of(sampling__temperature=0), "sampling.temperature: given 0, allowed: greater than or equal to 0.000001"),
    (job_of(sampling__stop=[""]), 'sampling.stop.0: given "", allowed: have at least 1 character'),
    (job_of(stop={}), "stop: at least one of steps, epochs, reward, wall_time, tokens"),
    (job_of(stop__steps=2.5), "stop.steps: given 2.5, allowed: a valid integer"),
    (job_of(stop__steps=True), "stop.steps: given true, allowed: a number, neither"),
    (job_of(stop__wall_time="3 weeks"), 'stop.wall_time: given "3 weeks", allowed: a number of seconds, or a number'),
    (job_of(stop__wall_time="1.2.3h"), 'stop.wall_time: given "1.2.3h", allowed: a number of seconds, or a number'),
    (job_of(stop__wall_time=0), "stop.wall_time: given 0, allowed: greater than 0"),
    (job_of(stop__wall_time=float("inf")), "stop.wall_time: given Infinity, allowed: a finite number"),
    (job_of(stop__reward=float("nan")), "stop.reward: given NaN, allowed: a finite number"),
    (job_of(environment="jsonl"), 'environment: given "jsonl", allowed: a mapping of fields'),
    (job_of(environment={}), "environment: exactly one of id (a built-in) and hosted (your own process)"),
    (job_of(environment={"id": "a", "hosted": "b"}), "environment: exactly one of id (a built-in) and hosted"),
    (
        job_of(environment={"hosted": "builtin:jsonl"}),
        'environment: hosted: given "builtin:jsonl", which is the service',
    ),
    (job_of(environment={"hosted": ""}), 'environment: hosted: given "", allowed: a text that is not empty'),
    (job_of(environment__max_turns=0), "environment.max_turns: given 0, allowed: greater than or equal to 1"),
    (job_of(environment__step_timeout="x"), 'environment.step_timeout: given "x", allowed: a number of seconds'),
    (job_of(environment__seed=2**64), "environment.seed: given 18446744073709551616, allowed: a whole number"),
    (job_of(environment__rows=[{"a": 1}, {"n": [-(2**63) - 1]}]), "environment.rows.1.n.0: given -9223372036854775809"),
    (job_of(policies={}), "policies: given {}, allowed: have at least 1 item"),
    (job_of(policies={f"p{i}": {} for i in range(17)}), "allowed: have at most 16 items"),
    (job_of(sampling__stop=["a"] * 17), "allowed: have at most 16 items"),
    (job_of(metadata={str(i): "" for i in range(17)}), "allowed: have at most 16 items"),
    (job_of(policies=["main"]), 'policies: given ["main"], allowed: a mapping of fields'),
    (job_of(policies={"solver": {}, "10": {}}), "policies.10: a name of digits alone; add a letter"),
    (job_of(policies={"solver": {}, "Solver": {}}), "policies.Solver: differs from solver in case alone; give one of"),
    (job_of(sinks=[{"url": "http://a", "secrt": "s"}]), "sinks.0.secrt: unknown field; did you mean secret?"),
    (job_of(policies={"a b": {}}), "policies: policy name 'a b': 1 to 64 letters, digits, dots, dashes, underscores"),
    (job_of(policies={"__proto__": {}}), "policies: policy name '__proto__': 1 to 64 letters, digits, dots, dashes, "),
    (job_of(policies={"a" * 65: {}}), "the first one a letter or digit"),
    (job_of(policies={"a": {}, "b": {"train": False}}), "policies.b: train: a frozen policy needs weights; give warm_"),
    (main(rank=0), "policies.main.rank: given 0, allowed: greater than or equal to 1"),
    (main(alpha=float("nan")), "policies.main.alpha: given NaN, allowed: a finite number"),
    (main(targets=["q", "x"]), "policies.main.targets.1: given \"x\", allowed: 'q', 'k', 'v', 'o', 'gate', 'up' or"),
    (main(targets=[]), "policies.main.targets: given [], allowed: at least one of q, k, v, o, gate, up, down"),
    (main(optimizer={"lr": 0}), "policies.main.optimizer.lr: given 0, allowed: greater than 0"),
    (main(optimizer={"schedule": "cosin"}), 'policies.main.optimizer.schedule.name: given "cosin", allowed: \'con'),
    (main(warm_start={}), "policies.main.warm_start: exactly one of job, peft and upload"),
    (main(warm_start={"job": "x", "peft": "y"}), "policies.main.warm_start: exactly one of job, peft and upload"),
    (main(warm_start={"upload": "0" * 64, "version": 3}), "policies.main.warm_start.version: given 3, allowed: with"),
    (main(warm_start={"peft": "x", "policy": "b\n"}), 'policies.main.warm_start.policy: given "b\\n", allowed: with'),
    (
        main(warm_start={"upload": "y"}),
        'policies.main.warm_start.upload: given "y", allowed: 64 digits and letters a to f',
    ),
    (
        job_of(policies={"a": {"algorithm": {"loss": "cross_entropy"}}}, algorithm__kl_weight=0.1),
        "policies.a.algorithm: kl_weight: ",
    ),
    (
        job_of(algorithm__micro_batch=1000),
        "algorithm.micro_batch: given 1000, allowed: at most group_size x groups_per",
    ),
    (
        job_of(
            policies={"a": {"algorithm": {"groups_per_step": 1}}}, algorithm__micro_batch=9, algorithm__group_size=8
        ),
        "policies.a.algorithm.micro_batch: given 9, allowed: at most group_size x groups_per_step = 8",
    ),
    (main(seed=1, warm_start={"job": "x"}), "policies.main: seed: not with warm_start, which gives the first weights"),
    (main(seed=1, full=True, optimizer={"lr": 1e-5}), "policies.main: seed: not with full: true"),
    *(
        (
            job_of(policies={"a": {}, "b": {"train": False, "seed": 1, **weights}}),
            f"policies.b: seed: not with train: {after}",
        )
        for weights, after in (
            ({"warm_start": {"job": "x"}}, "false; leave"),
            ({"base": True}, "false, base: true; leave"),
            ({"follows": {"policy": "a", "every": 2}}, "false and follows; leave"),
        )
    ),
    (job_of(checkpoints__keep_last=0), "checkpoints.keep_last: given 0, allowed: greater than or equal to 1"),
    (
        job_of(checkpoints__commit_every=2),
        "checkpoints.commit_every: given 2, allowed at most algorithm.max_staleness + 1 = 1",
    ),
    (
        {**main(optimizer={"schedule": "cosine"}), "stop": {"reward": 1}},
        "policies.main.optimizer.schedule: cosine needs total_steps, or stop.steps",
    ),
]


@pytest.mark.parametrize(("job", "problem"), REFUSED, ids=[problem[:50] for _, problem in REFUSED])
def test_a_mistake_is_named(job: Any, problem: str) -> None:
    with pytest.raises(SpecError) as refused:
        parse_job(job)
    assert any(problem in line for line in refused.value.problems), refused.value.problems
    assert all(line.isprintable() for line in refused.value.problems)
    assert all(not re.search("\n|Input should|after validation", line) for line in refused.value.problems)
    assert str(refused.value).startswith("the job is refused: ")


def test_every_mistake_is_named_at_once() -> None:
    with pytest.raises(SpecError) as refused:
        parse_job({"stop": {"steps": 0}, "sampling": {"temperature": -1}, "nonsense": 1})
    fields = {line.split(":")[0] for line in refused.value.problems}
    assert fields == {"name", "base_model", "environment", "stop.steps", "sampling.temperature", "nonsense"}


def test_any_options_of_a_job_can_be_sent_to_a_host() -> None:
    options = {"low": -(2**63), "high": 2**64 - 1, "rows": [{"n": [0, True, None, 1e300, "18446744073709551616"]}]}
    spec = parse_job(job_of(**{f"environment__{name}": value for name, value in options.items()}))
    reset = protocol.Reset(
        call="", episode="", job="", environment="", options=spec.environment.options, prompt=b"", seed=0
    )
    assert protocol.decode(protocol.to_host, protocol.encode(reset)) == reset


def test_long_values_are_cut() -> None:
    with pytest.raises(SpecError) as refused:
        parse_job(job_of(name="x" * 1000))
    assert len(refused.value.problems[0]) < 200


WHOLE = """
name: json-adder
base_model: smollm2-135m-instruct
environment: {id: jsonl, dataset: abc, verifier: exact, strict: true, step_timeout: 90s}
policies:
  main: {rank: 8, targets: attention, optimizer: {lr: 3.0e-4, schedule: {name: uba, phi: 2, warmup_steps: 3}}}
algorithm: {name: rloo, group_size: 4, max_staleness: 2, loss: {name: ppo, clip_high_threshold: 1.3}}
sampling: {temperature: 1, max_tokens: 24, stop: ["."]}
evaluation: {every: 5, prompts: 64}
checkpoints: {keep_last: 2, commit_every: 3}
stop: {steps: 40, wall_time: 1.5h}
"""


def test_yaml_json_and_python_mean_the_same(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(WHOLE)
    (tmp_path / "job.json").write_text(json.dumps(yaml.safe_load(WHOLE)))
    from_yaml, from_json = (parse_job(read_job(tmp_path / name)) for name in ("job.yaml", "job.json"))
    in_python = parse_job(
        {
            "name": "json-adder",
            "base_model": "smollm2-135m-instruct",
            "environment": {"id": "jsonl", "dataset": "abc", "verifier": "exact", "strict": True, "step_timeout": 90},
            "policies": {
                "main": {
                    "rank": 8,
                    "targets": ["o", "v", "k", "q"],
                    "optimizer": {"lr": 3.0e-4, "schedule": {"name": "uba", "phi": 2.0, "warmup_steps": 3}},
                }
            },
            "algorithm": {
                "name": "rloo", "group_size": 4, "max_staleness": 2,
                "loss": {"name": "ppo", "clip_high_threshold": 1.3},
            },
            "sampling": {"temperature": 1.0, "max_tokens": 24, "stop": ["."]},
            "evaluation": {"every": 5, "prompts": 64},
            "checkpoints": {"keep_last": 2, "commit_every": 3},
            "stop": {"steps": 40, "wall_time": 5400},
        }
    )  # fmt: skip
    assert from_yaml == from_json == in_python
    assert in_python.environment.options == {"dataset": "abc", "verifier": "exact", "strict": True}
    assert in_python.environment.name == "builtin:jsonl"
    assert in_python.algorithm.loss.params == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.3}
    assert in_python.policy[1].scale_alpha == 16.0
    resolved = in_python.model_dump(mode="json")
    assert parse_job(json.loads(json.dumps(resolved))) == in_python
    assert resolved["checkpoints"]["keep_best"] is True, "defaults are filled in"


def test_short_forms() -> None:
    spec = parse_job(job_of(algorithm__loss="gspo", policies={"p": {"targets": "all-linear"}}))
    assert spec.algorithm.loss.params == LOSS_PARAMETERS["gspo"]
    assert spec.policy[1].targets == ["q", "k", "v", "o", "gate", "up", "down"]
    assert parse_job(main(targets="mlp")).policy[1].targets == ["gate", "up", "down"]
    assert parse_job(job_of()).policy[0] == "main"
    assert parse_job(job_of()).environment.name == "task"


@given(st.integers(1, 10**6), st.sampled_from([("s", 1), ("m", 60), ("h", 3600), ("d", 86400), ("", 1)]))
def test_durations(number: int, unit: tuple[str, int]) -> None:
    spec = parse_job(job_of(stop={"wall_time": f"{number}{unit[0]}"}))
    assert spec.stop.wall_time == number * unit[1]
    assert parse_job(job_of(stop={"wall_time": number})).stop.wall_time == number
    assert parse_job(job_of(stop={"wall_time": "1.5 h"})).stop.wall_time == 5400


def test_files_that_are_no_jobs(tmp_path: Path) -> None:
    for content, problem in (
        (b"a: [", "neither YAML nor JSON"),
        (b"- 1", "holds list"),
        (b"\xff", "neither YAML nor"),
        (b"", "the file is empty"),
        (b"# only a comment", "the file is empty"),
        (b"name: a\nstop: {steps: 1}\nname: b", "line 3: name is given twice"),
        (b'{"stop": {"steps": 1, "steps": 2}}', r"job\.yaml: stop\.steps: given twice"),
        (b"{stop: {steps: 1, steps: 2}}", "line 1: steps is given twice"),
    ):
        (tmp_path / "job.yaml").write_bytes(content)
        with pytest.raises(UserError, match=problem):
            read_job(tmp_path / "job.yaml")
    with pytest.raises(UserError, match="cannot be read"):
        read_job(tmp_path / "none.yaml")


def test_a_job_does_not_change() -> None:
    spec = parse_job(job_of())
    with pytest.raises(ValueError, match="frozen"):
        spec.seed = 3  # type: ignore[misc]
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_settings_come_from_the_environment(tmp_path: Path) -> None:
    settings = Settings.load({"ROOKERY_PORT": "8000", "ROOKERY_DATA": str(tmp_path)}, port=None, host="0.0.0.0")
    assert (settings.server.port, settings.server.host, settings.data) == (8000, "0.0.0.0", tmp_path)
    assert settings.base_url == "http://127.0.0.1:8000"
    with pytest.raises(UserError, match="setting ROOKERY_PORT: given 'x'"):
        Settings.load({"ROOKERY_PORT": "x"})
    assert Settings.load({}, data=Path("~/x")).data.is_absolute()


def test_a_log_level_is_one_of_logging_in_any_case_of_letters() -> None:
    for level in ("debug", "Debug", "DEBUG"):
        assert Settings.load({"ROOKERY_LOG_LEVEL": level}).server.log_level == "DEBUG"
    assert Settings(log_level="warning").server.log_level == "WARNING"  # type: ignore[arg-type]
    for level in ("trace", "inf"):
        with pytest.raises(UserError, match=r"ROOKERY_LOG_LEVEL.*'DEBUG', 'INFO', 'WARNING', 'ERROR' or 'CRITICAL'"):
            Settings.load({"ROOKERY_LOG_LEVEL": level})


@pytest.mark.parametrize(
    ("prompts", "stop", "policies", "expected"),
    [
        (6, {"epochs": 1}, {"a": {}}, {"a": 3}),
        (6, {"epochs": 1}, {"a": {}, "b": {"algorithm": {"groups_per_step": 1}}}, {"a": 3, "b": 6}),
        (7, {"epochs": 2}, {"a": {"algorithm": {"groups_per_step": 4}}, "b": {}}, {"a": 4, "b": 7}),
        (6, {"epochs": 1, "steps": 4}, {"a": {}, "b": {"algorithm": {"groups_per_step": 1}}}, {"a": 3, "b": 4}),
        (6, {"epochs": 1}, {"a": {"stop": {"steps": 2}}, "b": {"stop": {"steps": 9}}}, {"a": 2, "b": 3}),
        (6, {"epochs": 1}, {"a": {"stop": {"reward": 1.0}, "algorithm": {"groups_per_step": 3}}}, {"a": 2}),
        (1, {"epochs": 0.1}, {"a": {}, "b": {"train": False, "base": True}}, {"a": 1}),
        (10, {"epochs": 1.1}, {"a": {"algorithm": {"groups_per_step": 1}}}, {"a": 11}),
        (6, {"steps": 5}, {"a": {}, "b": {"algorithm": {"groups_per_step": 1}}}, {"a": 5, "b": 5}),
    ],
)
def test_epochs_are_steps_of_each_policy(
    prompts: int, stop: dict[str, Any], policies: dict[str, Any], expected: dict[str, int]
) -> None:
    job = job_of(policies=policies, algorithm__groups_per_step=2) | {"stop": stop}
    spec = parse_job(job).with_epochs(prompts)
    stored = JobSpec.model_validate(spec.model_dump(mode="json"))
    assert {name: stored.of_policy(name).stop.steps for name in stored.trained} == expected
    for name, policy in policies.items():
        given, now = policy.get("stop", {}).get("reward"), stored.policies[name].stop
        assert given is None or (now is not None and now.reward == given)


@pytest.mark.parametrize(
    ("given", "off_policy", "overlaps"),
    [
        ({}, False, False),
        ({"max_staleness": 1}, True, True),
        ({"micro_batch": 4}, False, True),
        ({"max_staleness": 2, "micro_batch": 4}, True, True),
        ({"name": "sft"}, False, False),
        ({"name": "dpo"}, False, False),
    ],
)
def test_micro_batches_overlap_with_rollouts_without_being_off_policy(
    given: dict[str, Any], off_policy: bool, overlaps: bool
) -> None:
    algorithm = AlgorithmSpec(**given)
    assert (algorithm.off_policy, algorithm.overlaps) == (off_policy, overlaps)


@pytest.mark.parametrize(
    ("policies", "line"),
    [
        ({}, "base model a"),
        ({"main": {}, "old": {"follows": {"policy": "main"}}}, "base model a"),
        ({"main": {"base_model": "b"}, "old": {"follows": {"policy": "main"}}}, "base model b"),
        ({"main": {}, "other": {"base_model": "b"}}, "base models a and b"),
        ({"main": {"base_model": "d"}, "other": {"base_model": "b"}, "third": {}}, "base models a, b and d"),
    ],
)
def test_a_line_names_the_base_models_that_a_job_needs(policies: dict[str, Any], line: str) -> None:
    assert needed_models({"base_model": "a", "policies": policies}) == line
