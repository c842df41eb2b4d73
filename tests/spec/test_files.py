"""Job files: YAML 1.2's core schema, texts as they are written, JSON."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rookery.errors import UserError
from rookery.spec.files import read_job
from rookery.spec.fleet import read_fleet, read_plan
from rookery.spec.parsing import SpecError, parse_job

JOB = """
name: yaml
base_model: m
environment: {{id: jsonl, verifier: exact, rows: [{{prompt: "?", answer: {answer}}}]}}
stop: {{steps: 1}}
"""


def job_in(folder: Path, content: str) -> dict[str, Any]:
    file = folder / "job.yaml"
    file.write_text(content, encoding="utf-8")
    return read_job(file)


def answer_in(folder: Path, answer: str) -> Any:
    return job_in(folder, JOB.format(answer=answer))["environment"]["rows"][0]["answer"]


TEXTS = """
yes no Yes NO on off y n 12:30 1:30:00 1_000 0b11 2024-01-02 2024-01-02T10:00:00Z 1.2.3 1e 0x 0o8 +-1 <<a = 3/4 .e5
nan inf -.nan none None undefined 1,234 5% 1e5x é
""".split()


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_stays_as_it_is_written(tmp_path: Path, text: str) -> None:
    assert answer_in(tmp_path, text if "," not in text else f"'{text}'") == text
    assert job_in(tmp_path, f"environment:\n  rows:\n  - {text}\n")["environment"]["rows"] == [text]


@pytest.mark.parametrize("value", [0, 7, -3, 1.5, -0.25, True, False, None, 12345678901234567890, 1e16, 1e-05])
def test_a_value_of_a_row_that_json_writes_alike_is_that_value(tmp_path: Path, value: Any) -> None:
    found = answer_in(tmp_path, json.dumps(value))
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    "written",
    ["010", "-007", "0.50", "5.", ".5", "+5", "1e3", "1E5", "1e-5", "0x1F", "0o17", "00", "True", "FALSE", "~", "Null",
     "", ".inf", "-.Inf", ".NaN", "-0", "1.0e1"],
)  # fmt: skip
def test_a_row_that_would_be_written_differently_has_to_be_quoted(tmp_path: Path, written: str) -> None:
    with pytest.raises(UserError, match=rf"job\.yaml: line 4: .*quote it: '{re.escape(written)}'$") as refused:
        answer_in(tmp_path, written)
    assert "\n" not in str(refused.value)
    for quote in ("'", '"'):
        assert answer_in(tmp_path, f"{quote}{written}{quote}") == written
    assert answer_in(tmp_path, f"!!str {written}") == written


@given(
    st.text(
        st.characters(codec="utf-8", exclude_characters="\r\n\x85\u2028\u2029", categories=["L", "N", "P", "S", "Zs"])
    )
)
def test_an_unquoted_answer_is_the_text_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Whatever YAML makes of a line: a row never holds another text, nor a number that is written otherwise."""
    file = tmp_path_factory.getbasetemp() / "any.yaml"
    file.write_text(f"environment:\n  rows:\n  - answer: {text}\n", encoding="utf-8")
    try:
        found = read_job(file)["environment"]["rows"][0]["answer"]
    except (UserError, TypeError):
        return
    if isinstance(found, int | float) or found is None:
        assert json.dumps(found) == re.split(r"\s#", f" {text}")[0].strip(" ")
    elif isinstance(found, str) and not re.match("[ ]*['\"&!|>]", text):
        assert found == re.split(r"\s#", f" {text}")[0].strip(" ")


def test_numbers_of_fields_may_be_written_in_any_way(tmp_path: Path) -> None:
    content = """
name: numbers
base_model: m
environment: &e {id: jsonl, dataset: a, verifier: {name: number, tolerance: 1e-3}, max_turns: 0x10}
policies: {main: {alpha: .5, optimizer: {lr: 2e-4, eps: 1E-8, beta2: +0.9}}}
algorithm: {kl_weight: 5., loss: {name: aipo, rho: 4}}
shuffle: FALSE
seed: 0o17
stop: {wall_time: 90m}
"""
    spec = parse_job(job_in(tmp_path, content))
    policy = spec.policy[1]
    assert (policy.alpha, policy.optimizer.lr, policy.optimizer.eps, policy.optimizer.beta2) == (0.5, 2e-4, 1e-8, 0.9)
    assert (spec.environment.max_turns, spec.seed, spec.shuffle, spec.stop.wall_time) == (16, 15, False, 5400)
    assert spec.environment.options["verifier"]["tolerance"] == 1e-3
    assert spec.algorithm.kl_weight == 5


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("seed: 010", "line 1: 010: a number does not begin with 0; drop it, or quote it: '010'"),
        ("a: 1\n'a': 2", "line 2: a is given twice"),
        ("1: a\n'1': b", "line 2: 1 is given twice"),
        ('"a\\nb": 1\n"a\\nb": 2', r"line 2: a\\nb is given twice"),
        ("[" * 5000, "nested"),
        ("a: !!python/object:os.system x", "line 1: the tag !!python/object:os.system has no meaning here"),
        ("a: 1\nb: !!set [1]", "line 2: the tag !!set has no meaning here"),
        ("? !!timestamp [1]\n: 2", "line 1: the tag !!timestamp has no meaning here"),
        ("a: !!bool maybe", "line 1: maybe is no !!bool"),
        ("a: 1\n---\nb: 2", r"job\.yaml: line 2, column 1: is neither YAML nor JSON \(expected a single document"),
        ('a: 1\nb: "2', r"line 2, column 6: is neither .* from line 2, column 4: found unexpected end of stream"),
        ("a: \a", r"neither YAML nor JSON \(character #x0007 at position 4"),
        ('{"a": 1e400}', r"job\.yaml: a: given 1e400, allowed: a number between"),
        ("a: " + "9" * 5000, "neither YAML nor JSON"),
    ],
    ids=["octal", "twice", "twice as number", "lines", "deep", "python", "set", "key", "bool", "documents", "quote",
         "bell", "json", "digits"],
)  # fmt: skip
def test_a_file_that_no_job_can_be_read_from_is_refused(tmp_path: Path, content: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as refused:
        job_in(tmp_path, content)
    assert "\n" not in str(refused.value) and "unicode string" not in str(refused.value)


def ladder(rung: str, steps: int = 60) -> str:
    """A file in which each line repeats the line before, as ``rung`` says, nine times."""
    names = [f"n{number}" for number in range(steps)]
    lines = [f"{name}: &{name} {rung.replace('*', f'*{below}')}" for below, name in pairwise(names)]
    return "\n".join(["n0: &n0 {a: x}", *lines])


RING = r"line 1: the value contains an alias of itself; leave that out$"
REPEATED = r"line \d+: aliases repeat more than 16 MB; put rows into a JSONL file$"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a: &x [*x]", RING),
        ("&x {a: 1, b: {c: [2, *x]}}", RING),
        ("a: &x {<<: *x}", RING),
        ("a: &x {? [*x] : 1}", RING),
        ("a: &x [" + "[" * 50 + "*x" + "]" * 50 + "]", RING),
        (ladder("[" + ", ".join("*" * 9) + "]"), REPEATED),
        (ladder("{" + ", ".join(f"{key}: *" for key in "abcdefghi") + "}"), REPEATED),
        (ladder("{<<: [" + ", ".join("*" * 9) + "], b: 1}"), REPEATED),
        ("a: &a " + "x" * 100_000 + "\nb: [" + ", ".join(["*a"] * 200) + "]", REPEATED),
        ("a: &a {}\nb: &b [" + ", ".join(["*a"] * 2000) + "]\nc: [" + ", ".join(["*b"] * 2000) + "]", REPEATED),
    ],
    ids=["ring", "ring of a mapping", "ring of a merge", "ring in a key", "deep ring", "lists", "mappings", "merges",
         "a long text", "empty mappings"],
)  # fmt: skip
@pytest.mark.parametrize("read", [read_job, read_fleet, read_plan])
def test_aliases_that_would_fill_the_memory_are_refused_at_once(
    tmp_path: Path, read: Callable[[Path], object], content: str, says: str
) -> None:
    """In processor time that even a busy machine has: a ring took 27 s."""
    (tmp_path / "file.yaml").write_text(content, encoding="utf-8")
    began = time.process_time()
    with pytest.raises(UserError, match=rf"file\.yaml: {says}"):
        read(tmp_path / "file.yaml")
    assert time.process_time() - began < 3


def test_aliases_may_repeat_values_that_fit_into_a_request(tmp_path: Path) -> None:
    rows = "".join(f"  - {{prompt: *p, answer: '{number}'}}\n" for number in range(1000))
    content = f"prompt: &p {'word ' * 1000}\nenvironment:\n  rows:\n{rows}"
    found = job_in(tmp_path, content)["environment"]["rows"]
    assert len(found) == 1000 and {row["prompt"] for row in found} == {"word " * 999 + "word"}


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(UserError, match=r"^/dev/zero: has more than 64 MB; put rows into a JSONL file$"):
        read_job(Path("/dev/zero"))


def test_aliases_and_merge_keys_are_taken(tmp_path: Path) -> None:
    content = """
environment:
  rows:
  - &row {prompt: "?", answer: yes}
  - {<<: *row, prompt: other}
  - *row
"""
    first, second, third = job_in(tmp_path, content)["environment"]["rows"]
    assert first == third == {"prompt": "?", "answer": "yes"}
    assert second == {"prompt": "other", "answer": "yes"}


def test_escapes_of_one_character_in_two_halves_are_read_in_yaml_and_json(tmp_path: Path) -> None:
    for content in (r'{"a": "\ud83d\ude00"}', r'a: "\ud83d\ude00"'):
        assert job_in(tmp_path, content) == {"a": "\U0001f600"}
    with pytest.raises(SpecError, match=r"a: given .* whole characters"):
        parse_job(job_in(tmp_path, r'a: "\ud83d"'))


@pytest.mark.parametrize("field", ["rows", "eval_rows"])
@pytest.mark.parametrize(
    ("number", "lost"),
    [("12345678.123456789012", True), ("3.14159265358979323846", True), ("1.2345678e-320", True),
     ("0.30000000000000004", False), ("0.10000000000000001", False), ("12345678901234567890", False),
     ("1e-300", False), ("1.5", False)],
)  # fmt: skip
def test_a_row_of_a_json_job_keeps_its_digits_or_is_refused(
    tmp_path: Path, field: str, number: str, lost: bool
) -> None:
    rows = f'[{{"answer": "x"}}, {{"a": [{number}]}}]'
    content = f'{{"environment": {{"{field}": {rows}}}, "lr": 3.14159265358979323846}}'
    if lost:
        where = rf"environment\.{field}\.1\.a\.0: given {re.escape(number)}, which would become .*; quote it"
        with pytest.raises(UserError, match=where):
            job_in(tmp_path, content)
    else:
        assert job_in(tmp_path, content)["environment"][field][1]["a"] == [json.loads(number)]


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    assert job_in(tmp_path, "\ufeffa: 1") == job_in(tmp_path, '\ufeff{"a": 1}') == {"a": 1}


def test_a_value_that_no_file_has_is_refused_by_its_field() -> None:
    with pytest.raises(SpecError, match=r"seed: given date, allowed: texts, numbers"):
        parse_job({"seed": date(2024, 1, 2)})
