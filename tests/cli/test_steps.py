"""Lines of steps and advice: what a reader of ``rookery run`` sees."""

from __future__ import annotations

import json
import time
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.cli.follow import Follower, pause_line
from rookery.cli.options import Cli
from rookery.cli.steps import HEADER_ROWS, STEP_COLUMNS, StepLines, advice, fitting, tokens_per_second
from rookery.client import Job, Record
from rookery.settings import Settings

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


def test_rates_are_those_of_one_policy_and_start_again_after_a_rollback() -> None:
    spec, lines = {**SPEC, "policies": {"a": {}, "b": {}}}, StepLines(None)
    made = [("a", 10.0, 1000), ("b", 10.1, 1000), ("a", 20.0, 2000), ("b", 20.05, 2001)]
    texts = [
        next(lines.of({"step": step, "policy": policy, "time": time, "tokens_sampled": tokens}, spec))
        for step, (policy, time, tokens) in enumerate(made)
    ]
    assert ["tokens/s" in text for text in texts] == [False, False, True, True]
    assert "tokens/s 100" in texts[2] and "tokens/s 100.6" in texts[3]
    lines.back(1)
    (again,) = lines.of({"step": 2, "policy": "a", "time": 99.0, "tokens_sampled": 2100}, spec)
    assert "tokens/s" not in again


def test_a_rollback_is_shown_between_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    view = Record(id="job-1", name="sums", state="completed", reason="", spec=Record(SPEC))

    class Rolled:
        id = "job-1"

        def follow(self) -> Any:
            rows = [Record(row(1)), Record(row(2)), Record({"step": 1}), Record(row(2))]
            kinds = ("metrics", "metrics", "rollback", "metrics")
            yield from [("job", view), *zip(kinds, rows, strict=True), ("end", view)]

        def events(self, limit: int) -> list[Record]:
            return []

    for as_json in (True, False):
        cli = Cli(Settings(), as_json, None, {})
        Follower(cli, cast(Job, Rolled()), ends_paused=True).follow()
    lines = capsys.readouterr().out.splitlines()
    assert [next(iter(json.loads(line))) for line in lines[:6]] == [
        "job", "metrics", "metrics", "rollback", "metrics", "job",
    ]  # fmt: skip
    assert json.loads(lines[3]) == {"rollback": {"step": 1}}
    assert [line for line in lines[6:] if "went back to step 1" in line] == lines[8:9]


def test_each_event_is_shown_once_in_any_order_of_times(capsys: pytest.CaptureFixture[str]) -> None:
    """The service's clock may be set back, and two events may have one time; old ones leave the window."""
    view = Record(id="job-1", name="sums", state="completed", reason="", spec=Record(SPEC))
    written = [(9.0, "one"), (3.0, "two"), (3.0, "three"), (2.0, "four"), (2.0, "four")]
    looks = iter([written[:1], written[:2], written[1:4], written[2:], written[2:]])

    class Warned:
        id = "job-1"

        def follow(self) -> Any:
            yield from [("job", view), *[("end", view)] * 5]

        def events(self, limit: int) -> list[Record]:
            return [Record(time=time, kind="warning", text=text) for time, text in next(looks)]

    follower = Follower(Cli(Settings(), True, None, {}), cast(Job, Warned()), ends_paused=True)
    follower._asked = time.monotonic()  # the first look is that of an end
    follower.follow()
    rows = map(json.loads, capsys.readouterr().out.splitlines())
    assert [row["event"]["text"] for row in rows if "event" in row] == ["one", "two", "three", "four", "four"]


def test_a_paused_job_names_the_command_that_reaches_it() -> None:
    job = cast(Job, Record(id="job-1"))
    view = Record(name="sums", reason="no", paused_by="fault")
    assert pause_line(job, view).endswith("rookery jobs resume job-1")
    assert pause_line(job, view, "the same command continues it").endswith("fixed: the same command continues it")
    assert pause_line(job, Record(view, paused_by="outage"), "x").endswith("it resumes by itself")


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
