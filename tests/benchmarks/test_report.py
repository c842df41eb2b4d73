"""The page of results: which verdicts it shows, by which bars, and what it marks as old."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from benchmarks.lib import ages, bars, harness, report
from benchmarks.lib.harness import Result, ResultFolders, Row

HERE = "2 cores"


def results() -> list[dict[str, Any]]:
    paths = [*sorted(harness.RESULTS.glob("*.json")), *sorted((harness.RESULTS / "other").glob("*.json"))]
    return [json.loads(path.read_text()) for path in paths]


def stored(name: str, outcomes: list[tuple[str, bool | None]]) -> dict[str, Any]:
    result = Result(name, "", f"python -m benchmarks.{name} --quick", machine=HERE, date="2026-11-28", commit="")
    for number, (target, met) in enumerate(outcomes):
        result.judge(f"{target} {number}", f"figure {number}", met)
    return asdict(result)


def test_a_run_that_measured_nothing_leaves_the_earlier_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for values in ([1.0], []):
        result = Result("lanes", "", "python -m benchmarks.micro.lanes", notes=["no lanes here"])
        if values:
            result.add("a rate", values, "")
        result.save(ResultFolders(tmp_path))
    assert json.loads((tmp_path / "lanes.json").read_text())["rows"][0]["values"] == [1.0]
    assert "nothing was measured: no lanes here" in capsys.readouterr().out


# --- lines ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missed", range(10))
def test_missed_verdicts_are_on_the_page_also_where_a_pattern_hides_them(missed: int) -> None:
    """Verdicts of single attacks are hidden while they are met."""
    outcomes = [(f"C{number} attack", number >= missed) for number in range(9)] + [("no call fails", True)]
    lines = report.lines_of(stored("callers", outcomes), {HERE: "A"}, set())
    text = " ".join(" ".join(line) for line in lines)
    assert len(lines) <= report.MOST_LINES
    assert [f"figure {number}" in text for number in range(10)] == [
        number < missed or number == 9 for number in range(10)
    ]
    assert text.count("not met") >= min(missed, report.MOST_LINES)


def test_verdicts_of_the_committed_results_that_are_not_met_are_on_the_page() -> None:
    text = (harness.HERE / "RESULTS.md").read_text()
    shown: set[tuple[str, str]] = set()
    for result in results():
        lines = report.lines_of(result, {result["machine"]: "A"}, shown)
        assert len(lines) <= report.MOST_LINES, result["name"]
    for name, target in {(one["name"], v["target"]) for one in results() for v in one["verdicts"] if v["met"] is False}:
        assert target.replace("|", "\\|") in text, name


def test_yardsticks_without_a_figure_are_listed_with_their_command() -> None:
    first = stored("small", [("a step", None), ("a gain", None), ("a loss", True)])
    second = stored("small", [("a step", True)])
    shown: set[tuple[str, str]] = set()
    for result in (first, second):
        report.lines_of(result, {HERE: "A"}, shown)
    assert report.unmeasured([first, second], shown) == {"small: a gain 1": "python -m benchmarks.small"}


# --- bars -------------------------------------------------------------------------------------------------------------


def test_a_stored_result_is_judged_by_the_bars_as_they_are_now(tmp_path: Path) -> None:
    result = Result("training", "", "", machine=HERE)
    for name, speed in (("Rookery", 62.0), ("floor", 100.0), ("PEFT, micro-batch 4", 62.0 / 1.26)):
        result.rows.append(Row(f"8 x 128, {name}", [speed], "tokens/s"))
    result.judge("8 x 128 >= 55% of the floor", "62%", True)
    path = tmp_path / "training.json"
    path.write_text(json.dumps(asdict(result)))
    found = {one["target"]: (one["measured"], one["met"]) for one in report.read(path)["verdicts"]}
    assert found["8 x 128 >= 75% of the floor"] == ("62%", False)
    assert found["8 x 128 >= 2 x PEFT + transformers at its best"] == ("1.26 x", False)
    assert found["4 tenants packed >= 95% of one"] == ("-", None)
    assert "8 x 128 >= 55% of the floor" not in found and json.loads(path.read_text())["verdicts"]


@pytest.mark.parametrize("judge", bars.JUDGED.values(), ids=bars.JUDGED)
def test_nothing_is_judged_without_rows(judge: Any) -> None:
    assert [one.met for one in judge({})] == [None] * len(judge({}))


@pytest.mark.parametrize(("planned", "expected"), [(1.2, ("1.25", True)), (1.0, ("1.04", False))])
def test_lanes_are_judged_by_rounds_and_report_the_sum_of_turns(planned: float, expected: tuple[str, bool]) -> None:
    turns, auto = ([value * noise for noise in (0.5, 1.0, 2.0)] for value in (0.96, planned))
    figures = {"64 rows, turns: rates, summed": turns, "64 rows, auto: rates, summed": auto}
    found = bars.lanes({name: Row(name, values, "") for name, values in figures.items()})[0]
    assert (found.measured, found.met) == expected and found.why == "turns sum to 0.96"


@pytest.mark.parametrize(
    ("value", "bar", "expected"),
    [(0.987, 0.99, "0.987 x"), (0.9, 0.99, "0.90 x"), (0.99, 0.99, "0.99 x"), (2.24, 1.8, "2.24 x")],
)
def test_a_figure_near_its_bar_has_more_digits(value: float, bar: float, expected: str) -> None:
    assert bars.shown(value, bar) == expected


# --- ages -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def history(tmp_path: Path) -> Path:
    """A repository with two commits, each of a kernel and a page."""
    git(tmp_path, "init", "-q")
    for text in ("first", "second"):
        for name in ("src/rookery/worker/engine/kernel.py", "src/rookery/cli/page.py"):
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            git(tmp_path, "add", name)
            git(tmp_path, "commit", "-qm", f"Write {text} {path.name}")
    return tmp_path


def git(root: Path, *arguments: str) -> str:
    named = ["-c", "user.name=A", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", *named, *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_a_figure_older_than_its_code_is_marked(history: Path) -> None:
    def measured(commit: str, name: str = "generation") -> str:
        result = {"name": name, "commit": git(history, "rev-parse", "--short", commit) + "+"}
        assert not ages.absent(result, history)
        return ages.changed(result, history)

    assert measured("HEAD") == measured("HEAD~1") == ""
    assert measured("HEAD~2") == "; code changed since (1 commit)", "of the kernel"
    assert measured("HEAD~2", "planning") == "", "the plan has no kernel"
    assert measured("HEAD~3", "a new measure") == "; code changed since (3 commits)", "it may measure everything"


def test_a_commit_that_the_history_lacks_is_marked_and_counts_from_its_result(history: Path) -> None:
    result = {"name": "generation", "commit": "0123abcd+"}
    assert ages.commit_of(result, history) == "0123abcd+ (not in this history)"
    assert ages.changed(result, history) == "", "no commit has the result"
    path = history / "benchmarks" / "results" / "generation.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(result))
    git(history, "add", ".")
    git(history, "commit", "-qm", "Measure")
    (history / "src/rookery/worker/engine/kernel.py").write_text("third")
    git(history, "commit", "-qam", "Write a third kernel")
    assert ages.changed(result, history) == "; code changed since (1 commit)"
    line = f"2026-11-28, {ages.commit_of(result, history)}, A{ages.changed(result, history)}"
    assert ages.unmarked(line) == "2026-11-28, 0123abcd+, A"


def test_without_git_there_are_no_marks(tmp_path: Path) -> None:
    result = {"name": "generation", "commit": "0123abcd+"}
    assert (ages.commit_of(result, tmp_path), ages.changed(result, tmp_path)) == ("0123abcd+", "")


def test_every_measure_names_rooms_that_exist() -> None:
    assert {one["name"] for one in results()} <= ages.ROOMS.keys()
    absent = {
        room for rooms in ages.ROOMS.values() for room in rooms if not (harness.ROOT / "src/rookery" / room).exists()
    }
    assert absent == set()


def test_a_quick_run_keeps_the_whole_one_that_it_replaces(tmp_path: Path) -> None:
    path, other = tmp_path / "small.json", tmp_path / "other" / "small.json"
    for command, kept in (("measure", None), ("measure --quick", "measure"), ("measure --quick", "measure")):
        harness.keep_whole(path, command)
        path.write_text(json.dumps({"command": command}))
        assert (json.loads(other.read_text())["command"] if other.exists() else None) == kept
