"""Lines of steps and advice: what a reader of ``rookery run`` sees."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.cli.steps import HEADER_ROWS, STEP_COLUMNS, StepLines, advice, fitting, tokens_per_second

SPEC = {"sampling": {"max_tokens": 8}}


def row(step: int, **values: Any) -> dict[str, Any]:
    metrics = {
        "reward": 0.25, "zero_variance_share": 0.5, "length_mean": 5.0, "length_max": 7.0, "turns_mean": 1.0,
        "staleness_mean": 0.0, "staleness_max": 0.0, "entropy": 1.5, "logp_diff_mean": 0.002, "ratio": 1.0, "kl": 0.0,
        "grad_norm": 0.4, "seconds/queue": 0.5, "seconds/generation": 1.0, "seconds/environment": 0.1,
        "seconds/waiting": 2.0, "seconds/train": 1.5, "seconds/commit": 0.01, "loss": 0.02, "skipped": 0.0,
    }  # fmt: skip
    return {"step": step, "time": 100.0 + 2 * step, "tokens_sampled": 600 * step, **metrics, **values}


def test_eighty_columns_show_the_figures_that_the_quickstart_names() -> None:
    lines = StepLines(80)
    legend, *head, first = lines.of(row(1), SPEC)
    (second,) = lines.of(row(2), SPEC)
    for metric in ("zero_variance_share", "length_mean", "staleness_mean", "tokens/s", "seconds/generation",
                   "seconds/environment", "seconds/waiting", "seconds/train", "logp_diff_mean", "entropy"):  # fmt: skip
        assert metric in legend
    assert "loss" not in legend
    assert len(head) == 2 and all(len(line) <= 80 for line in (*head, first, second))
    assert first.split()[:2] == ["1", "0.250"] and "-" in first.split(), "the first step has no rate yet"
    assert "300" in second.split()


def test_a_log_names_every_metric() -> None:
    lines = StepLines(None)
    list(lines.of(row(1), SPEC))
    (text,) = lines.of(row(2), SPEC)
    for column in STEP_COLUMNS:
        assert f"{column.metric} " in text
    assert "tokens/s 300" in text and "loss" not in text


def test_advice_is_by_the_steps_of_one_policy() -> None:
    def advised(*rows: dict[str, Any]) -> list[str]:
        lines = StepLines(None)
        return [line for row in rows for line in lines.of(row, SPEC) if line.startswith("advice")]

    def of(policy: str, ratio: float, steps: range) -> list[dict[str, Any]]:
        return [row(step, policy=policy, ratio=ratio) for step in steps]

    alone = advised(*(row(step, ratio=9.0) for step in range(1, 21)))
    assert alone and all(line.startswith("advice: ") for line in alone)
    both = sorted(of("a", 9.0, range(1, 40, 2)) + of("b", 1.0, range(2, 41, 2)), key=lambda one: one["step"])
    assert advised(*both) == [line.replace("advice", "advice (a)", 1) for line in alone]


@given(width=st.integers(10, 300), size=st.floats(-1e12, 1e12) | st.sampled_from([None, float("nan")]))
def test_lines_keep_their_columns_for_all_numbers(width: int, size: float | None) -> None:
    lines = StepLines(width)
    values = {column.metric: size for column in STEP_COLUMNS if column.metric not in ("step", "tokens/s")}
    *_, text = (line for line in lines.of(row(7, **values), {}) if not line.startswith("advice"))
    assert len(text.split()) == len(fitting(width))


def test_header_is_repeated() -> None:
    lines = StepLines(80)
    text = [line for step in range(HEADER_ROWS + 1) for line in lines.of(row(step), {})]
    assert sum("reward zero_" in line for line in text) == 2


def test_rate_of_tokens() -> None:
    assert tokens_per_second(row(2), row(1)) == 300
    assert tokens_per_second(row(2), None) is None and tokens_per_second(row(1), row(1)) is None


@pytest.mark.parametrize(
    ("metric", "values"),
    [
        ("length_max", {"length_max": 8.0}),
        ("entropy", {"entropy": 0.001}),
        ("logp_diff_mean", {"logp_diff_mean": 0.2}),
        ("ratio", {"ratio": 7.0}),
        ("seconds/waiting", {"seconds/waiting": 30.0}),
    ],
)
def test_advice_needs_three_steps_that_agree(metric: str, values: dict[str, float]) -> None:
    wrong = [row(step, **values) for step in range(3)]
    assert list(advice(wrong, SPEC)) == [metric]
    assert advice(wrong[:2], SPEC) == {} == advice([*wrong[:2], row(2)], SPEC)
    lines = StepLines(None)
    said = [line for step in range(9) for line in lines.of(row(step, **values), SPEC) if line.startswith("advice")]
    assert len(said) == 1 and metric in said[0], "each advice is given once"


def test_a_skipped_step_is_reported_at_once_and_a_healthy_run_needs_no_advice() -> None:
    assert "skipped" in advice([row(1, skipped=1.0)], SPEC)
    assert advice([row(step) for step in range(3)], SPEC) == {}
    assert advice([], SPEC) == {}


def test_a_difference_of_log_probabilities_is_no_fault_of_the_engine_when_groups_are_stale() -> None:
    assert advice([row(step, logp_diff_mean=0.2, staleness_max=2.0) for step in range(3)], SPEC) == {}


def test_missing_metrics_are_dashes() -> None:
    bare = {"step": 1, "reward": None}
    *_, text = StepLines(80).of(bare, {})
    assert set(text.split()[1:]) == {"-"}
    assert list(StepLines(None).of(bare, {})) == ["step     1  "]


def test_the_table_of_several_policies_names_the_policy_of_each_step() -> None:
    spec = {**SPEC, "policies": {"solver": {}, "verifier": {}, "judge": {"train": False}}}
    lines = StepLines(80)
    _, head, _, first = lines.of(row(1, policy="solver"), spec)
    (second,) = lines.of(row(2, policy="verifier"), spec)
    assert head.split()[:3] == ["step", "policy", "reward"]
    assert first.split()[:3] == ["1", "solver", "0.250"] and second.split()[:3] == ["2", "verifier", "0.250"]
    assert all(len(line) <= 80 for line in (head, first, second))
    _, alone, *_ = StepLines(80).of(row(1), {**SPEC, "policies": {"main": {}}})
    assert "policy" not in alone


def test_a_long_name_of_a_policy_leaves_room_for_metrics() -> None:
    spec = {**SPEC, "policies": {"a" * 60: {}, "b": {}}}
    *_, first = StepLines(60).of(row(1, policy="a" * 60), spec)
    assert len(first) <= 60 and first.split()[1:3] == ["a" * 16, "0.250"]
