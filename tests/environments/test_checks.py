"""Options and rows are checked in confined processes: no pattern and no dataset takes the service's memory or time."""

from __future__ import annotations

import json
import os
import threading
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from rookery.children import take_child_seconds
from rookery.environments.base import SplitSizes
from rookery.environments.builtins import BUILTINS
from rookery.environments.checks import EnvironmentChecks, bytes_of
from rookery.environments.jsonl import Jsonl, JsonlOptions
from rookery.errors import Unavailable, UserError

ROWS = [{"prompt": "2+2?", "answer": "4"}]


@pytest.fixture(scope="module")
def checks() -> Iterator[EnvironmentChecks]:
    made = EnvironmentChecks()
    yield made
    made.close()


def regex(pattern: str) -> dict[str, Any]:
    return {"rows": ROWS, "verifier": {"name": "regex", "pattern": pattern}}


HOSTILE = {
    "nested repeats": "(" * 20 + "a" + "){1,9}" * 20,
    "one long repeat": "a{30000000}",
    "nested long repeats": "((a{1,5000}){1,5000}){1,5000}",
    "many long repeats": "a{9999}" * 1000,
    "deep": "(" * 5000 + ")" * 5000,
    "sets": "[" + "a-z" * 3000 + "]{1,99999}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pattern_is_checked_within_the_limits(checks: EnvironmentChecks, name: str) -> None:
    """Refused in one line, or compiled with little; this process takes no part in it."""
    before, began = psutil.Process().memory_info().rss, time.process_time()
    take_child_seconds()
    try:
        checks.validate("jsonl", regex(HOSTILE[name]))
    except UserError as refused:
        assert len(str(refused)) < 300 and "\n" not in str(refused)
        assert "pattern" in str(refused)
    assert psutil.Process().memory_info().rss - before < 50 << 20 and time.process_time() - began < 1
    assert 0 < take_child_seconds() < 4, "the processes' time is known to the caller, who charges it"


def test_patterns_of_people_compile_within_the_limits(checks: EnvironmentChecks) -> None:
    words = "|".join(f"word{number:04}" for number in range(1000))
    for pattern in (words, f"(?i){words}", r"\b(?:\p{Lu}\p{Ll}*\s*){1,50}\b", "x{1,2000}", r"<answer>(.*?)</answer>"):
        checks.validate("jsonl", regex(pattern))


@pytest.mark.parametrize(
    ("id", "options", "line"),
    [
        ("jsonl", {"rows": ROWS, "verifier": "exakt"}, 'environment.verifier.name: given "exakt"'),
        ("jsonl", {"rows": [{"prompt": "x"}], "verifier": "exact"}, "row 1: the row has no field 'answer'"),
        ("jsonl", {"verifier": "exact"}, "exactly one of rows, path and dataset"),
        ("jsonl", {"rows": ROWS, "verifier": "exact", "eval_last": 1}, "eval_last: given 1, allowed: less than"),
        ("jsonl", {"path": "/no/such/file", "verifier": "exact"}, "/no/such/file cannot be read"),
        ("calculator", {"low": 9, "high": 1}, "low is at most high"),
        ("calculatr", {}, "did you mean calculator?"),
    ],
)
def test_refusals_are_those_of_the_construction(
    checks: EnvironmentChecks, id: str, options: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError) as refused:
        checks.validate(id, options)
    assert line in str(refused.value)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}+1?", "answer": "{n + 1}"}}\n\n' for n in range(20_000)))
    return path


def test_a_dataset_is_read_once_for_the_same_check(checks: EnvironmentChecks, dataset: Path) -> None:
    options = {"path": str(dataset), "verifier": {"name": "number"}}
    checks.validate("jsonl", options)
    assert checks.count_rows(dataset, 1000, 100_000) == 20_000
    with pytest.raises(UserError, match="more than 100 rows"):
        checks.count_rows(dataset, 1000, 100)
    dataset.write_text("no row")
    checks.validate("jsonl", options)
    with pytest.raises(UserError):
        checks.validate("jsonl", {**options, "verifier": {"name": "exact"}})


def test_an_environment_of_checked_rows_is_the_one_that_checks_itself(checks: EnvironmentChecks, dataset: Path) -> None:
    held_out = dataset.with_name("eval.jsonl")
    held_out.write_text('\ufeff{"prompt": "x", "answer": "1"}\n')
    options = {"path": str(dataset), "eval_path": str(held_out), "verifier": "number"}
    built = BUILTINS["jsonl"].built_in_host(options, checks)
    itself = Jsonl(JsonlOptions.model_validate(options))
    for split in ("train", "eval"):
        assert list(built.prompts(split)) == list(itself.prompts(split))  # type: ignore[arg-type]
    bad = dataset.with_name("bad.jsonl")
    bad.write_text('{"prompt": "x", "answer": "none"}\n')
    with pytest.raises(UserError, match="line 1"):
        BUILTINS["jsonl"].built_in_host({"path": str(bad), "verifier": "number"}, checks)


def test_a_check_imports_no_other_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment of another library is built by its host."""
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    checks = EnvironmentChecks()
    assert checks.validate("reasoning-gym", {"task": "absent", "size": 7}).train == 7
    checks.close()


def test_closing_ends_a_check_that_runs(tmp_path: Path) -> None:
    fifo, checks, seen = tmp_path / "rows.jsonl", EnvironmentChecks(), []
    os.mkfifo(fifo)  # a file that never ends

    def check() -> None:
        try:
            checks.validate("jsonl", {"path": str(fifo), "verifier": "exact"})
        except Exception as error:
            seen.append(error)

    running = threading.Thread(target=check)
    running.start()
    with fifo.open("wb"):  # once the check has opened it, too
        checks.close()
    running.join(10)
    assert isinstance(seen[0], Unavailable)


@pytest.mark.parametrize(("forms", "roles"), [(0, 0), (1, 2), (100, 3), (100, 256)])
def test_kept_results_are_counted_by_their_memory(forms: int, roles: int) -> None:
    """A dry run over rows of a hundred long forms took half a megabyte for as long as it was one of the last 4,096."""
    found = asdict(SplitSizes(1, 1, forms=[(["assistant", "tool"] * (roles // 2), f"row {n}") for n in range(forms)]))
    answer = json.dumps(found)
    tracemalloc.start()
    sizes = SplitSizes(**json.loads(answer))
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sizes.train == 1 and taken / 2 <= bytes_of(sizes) <= 2 * taken + 1000
