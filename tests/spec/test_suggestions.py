"""The advice for a job whose author has used another trainer before, or has mistyped a name."""

from __future__ import annotations

import difflib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.spec.job import StopSpec
from rookery.spec.parsing import EXAMPLES, SpecError, parse_job
from rookery.spec.policy import AlgorithmSpec, PolicyAlgorithm, PolicySampling, PolicyStop, SamplingSpec
from rookery.spec.suggestions import KNOWN_AS, VALUES, fields_by_name


def job(**more: Any) -> dict[str, Any]:
    return {"name": "j", "base_model": "m", "environment": {"id": "jsonl"}, "stop": {"steps": 1}, **more}


def said(spec: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as caught:
        parse_job(spec)
    (line,) = caught.value.problems
    return line


@pytest.mark.parametrize(
    ("spec", "hint"),
    [
        (job(learning_rate=1e-5), "did you mean policies.main.optimizer.lr?"),
        (job(lr=1e-5), "did you mean policies.main.optimizer.lr?"),
        (job(num_generations=8), "did you mean algorithm.group_size?"),
        (job(algorithm={"num_generations": 8}), "algorithm.num_generations: unknown field; did you mean group_size?"),
        (job(algorithm={"beta": 0.1}), "did you mean kl_weight?"),
        (job(beta=0.1), "did you mean algorithm.kl_weight?"),
        (job(policies={"main": {"r": 8}}), "policies.main.r: unknown field; did you mean rank?"),
        (job(policies={"main": {"lora_alpha": 8}}), "did you mean alpha?"),
        (job(policies={"solver": {"learning_rate": 1e-5}}), "did you mean optimizer.lr?"),
        (job(policies={"solver": {"group_size": 8}}), "did you mean algorithm.group_size?"),
        (job(policies={"a": {"algorithm": {"num_generations": 8}}}), "did you mean algorithm.group_size?"),
        (job(policies={"a": {"algorithm": {"max_stalenes": 8}}}), "did you mean max_staleness?"),
        (job(policies={"main": {"optimizer": {"learning_rate": 1e-5}}}), "did you mean lr?"),
        (job(policies={"main": {"optimizer": {"rank": 8}}}), "did you mean policies.main.rank?"),
        (job(policies={"main": {"targets": ["q_proj"]}}), "did you mean q?"),
        (job(policies={"main": {"targets": "all"}}), "one of all-linear, attention, mlp, or a list of q, k"),
        (job(sampling={"max_new_tokens": 8}), "did you mean max_tokens?"),
        (job(max_steps=8), "did you mean stop.steps?"),
        (job(algorithm={"loss": {"name": "pppo"}}), "did you mean ppo?"),
        (job(algorithm={"name": "drgrpo"}), "did you mean dr_grpo?"),
        (job(temperature=1.0), "did you mean sampling.temperature?"),
        (job(zzzzzz=1), "zzzzzz: unknown field; allowed: name, base_model"),
    ],
)
def test_the_name_of_another_trainer_leads_to_the_field(spec: dict[str, Any], hint: str) -> None:
    assert hint in said(spec)


@pytest.mark.parametrize(
    ("section", "of_job", "of_policy"),
    [
        ("algorithm", AlgorithmSpec, PolicyAlgorithm),
        ("sampling", SamplingSpec, PolicySampling),
        ("stop", StopSpec, PolicyStop),
    ],
)
def test_a_field_that_a_policy_cannot_change_leads_to_that_of_the_job(
    section: str, of_job: Any, of_policy: Any
) -> None:
    """Also where the policy has a field of a similar name."""
    for name in of_job.model_fields.keys() - of_policy.model_fields.keys():
        line = said(job(policies={"a": {section: {name: 1}}}))
        wanted = KNOWN_AS.get(name, f"{section}.{name}")
        within, _, last = wanted.rpartition(".")
        wanted = last if within == section and last in of_policy.model_fields else wanted
        assert line == f"policies.a.{section}.{name}: unknown field; did you mean {wanted}?"


def test_every_suggested_path_exists_and_no_alias_hides_a_field() -> None:
    paths = {path for paths in fields_by_name().values() for path in paths}
    losses = {"algorithm.loss.clip_low_threshold", "algorithm.loss.clip_high_threshold", "environment.eval_path"}
    assert {*KNOWN_AS.values()} <= paths | losses
    assert not KNOWN_AS.keys() & {"name", "base_model", "environment", "stop"}
    assert VALUES["down_proj"] == "down"


@pytest.mark.parametrize("field", ["name", "base_model", "environment", "stop"])
def test_a_missing_field_shows_an_example(field: str) -> None:
    spec = job()
    del spec[field]
    assert said(spec) == f"{field}: missing; such as {EXAMPLES[field]}"


@given(name=st.text("abcdefghijklmnop_", min_size=1, max_size=20))
def test_any_unknown_name_is_one_line(name: str) -> None:
    known = {path.split(".")[0] for paths in fields_by_name().values() for path in paths}
    if name not in known:
        line = said(job(**{name: 1}))
        assert line.startswith(f"{name}: unknown field; ") and "\n" not in line
        if difflib.get_close_matches(name, known, 1) and name not in KNOWN_AS:
            assert "did you mean" in line
