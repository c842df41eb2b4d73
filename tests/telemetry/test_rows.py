"""Tables at any width: names and ids are whole, everything else is there."""

from __future__ import annotations

import io
import re
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rookery.telemetry.rows import Rows, columns, printable
from rookery.telemetry.table import job_list, job_table, memory_table, worker_table


def shown(table: Rows, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(table, soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


words = st.text("abcdefgh-", min_size=1, max_size=12)


@given(
    name=st.text("abcdefghij-", min_size=1, max_size=64),
    id=st.text("0123456789abcdef", min_size=8, max_size=32),
    note=st.lists(words, max_size=30).map(" ".join),
    width=st.integers(20, 200),
)
def test_names_and_ids_are_whole_at_any_width_and_no_word_is_lost(name: str, id: str, note: str, width: int) -> None:
    table = Rows(columns(("name", "state", "id"), ("step",), ("reason",)))
    table.add(name, "running", id, 3, note)
    table.add("other", "queued", "f" * 28, 4, "")
    text = shown(table, width)
    lines = [line.split() for line in text.splitlines()]
    assert any(name in line for line in lines) and any(id in line for line in lines)
    assert any("f" * 28 in line for line in lines)
    letters = re.sub(r"\s", "", text)
    assert Counter(re.sub(r"\s", "", note)) <= Counter(letters)
    for line in text.splitlines():
        assert len(line) <= max(width, len(name), len(id) + 8, 28 + 8)


def test_wide_values_are_shown_under_their_row() -> None:
    table = Rows(columns(("job", "id"), notes=("reason",)))
    table.add("sums", "job-" + "0" * 24, "waits for the engine, which has ninety-three replies to give first")
    beside, under = shown(table, 120), shown(table, 50)
    assert len(beside.splitlines()) == 2
    assert under.splitlines()[1].split() == ["sums", "job-" + "0" * 24]
    assert under.splitlines()[2].startswith("    reason: waits for the engine")
    assert shown(table, 70).count("\n") > 2, "a column with room folds beside the row"
    narrow = shown(table, 24)
    assert narrow.splitlines()[:2] == ["job", "sums"] and f"id job-{'0' * 24}" in narrow


@given(notes=st.lists(st.integers(0, 300), min_size=1, max_size=12), width=st.integers(40, 160))
def test_a_note_folds_next_to_its_row_only_where_that_takes_no_more_lines(notes: list[int], width: int) -> None:
    table = Rows(columns(("job", "state"), notes=("reason",)))
    for number, length in enumerate(notes):
        table.add(f"job-{number:02d}", "running", "word " * (length // 5))
    under = sum(1 + -(-len("reason: " + "word " * (length // 5)) // 24) for length in notes)
    text = shown(table, width)
    assert max(map(len, text.splitlines())) <= width and len(text.splitlines()) <= 1 + under


def test_the_unit_of_a_table_stands_above_it_at_any_width() -> None:
    parts = {"base": (1 << 30, 2 << 30), "kv_cache": (0, 1 << 30)}
    beat = {"gauges": {"worker_memory_bytes": 3 << 29, "worker_memory_budget_bytes": 1 << 32}, "memory_parts": parts}
    for width in (20, 40, 80, 160):
        text = shown(memory_table([{"name": "local-smollm2-135m-instruct-1", "beat": beat}]), width)
        assert text.startswith("memory in GB") and "1.00 of 2.00" in text and "1.50" in text


@given(
    lengths=st.lists(st.integers(1, 100), max_size=50),
    state=st.sampled_from(["queued", "running", "paused", "failed"]),
    width=st.sampled_from([80, 160]),
)
def test_runs_have_whole_names_and_reasons_at_every_width(lengths: list[int], state: str, width: int) -> None:
    jobs = [
        {
            "name": f"j{number:02d}".ljust(length, "x"), "state": state, "step": 3, "steps": 400, "reward": 0.5,
            "rewards": [0.1, 0.9] * 20, "tokens_per_second": 12.0, "staleness": 1.0,
            "waits_for": "engine (109 replies, 32 ahead in the queue)", "reason": "",
        }
        for number, length in enumerate(lengths)
    ]  # fmt: skip
    lines = shown(job_table(jobs), width).splitlines()
    letters = re.sub(r"\s", "", "".join(lines))
    assert all(sum(job["name"] in line for line in lines) == 1 for job in jobs)
    assert letters.count("engine(109replies,32aheadinthequeue)") == len(jobs)
    assert max(map(len, lines), default=0) <= max(width, *lengths, 0)


def test_control_characters_are_not_written() -> None:
    table = Rows(columns(("job",)))
    table.add("a\x1b[31mb\nc\x9bd")
    assert shown(table, 80).splitlines()[1] == r"a\x1b[31mb c\x9bd"
    assert printable("höher 数\u202e\t!") == r"höher 数\u202e !"


def test_jobs_and_workers_fit_eighty_columns() -> None:
    job = {
        "name": "a-name-of-thirty-characters-yes", "id": "job-" + "1" * 24, "state": "paused", "step": 3, "steps": 400,
        "reward": 0.25, "reason": "most recent episodes failed: " + "x y " * 60, "waits_for": "",
    }  # fmt: skip
    text = shown(job_list([job]), 80)
    assert job["name"] in text and job["id"] in text and "3/400" in text and text.count("x y") == 60
    assert max(map(len, text.splitlines())) <= 80
    worker = {
        "name": "a-worker-with-a-long-name-0123456789", "kind": "preemptible", "state": "serving", "seconds": 90.0,
        "model": "smollm2-135m-instruct", "engine": "native", "roles": ["rollout", "train"], "adapters": 3,
        "beat": None, "tokens_per_second": 400.0, "price": 0.4, "note": "slow " * 30, "site": "",
    }  # fmt: skip
    text = shown(worker_table([worker]), 80)
    assert worker["name"] in text and "smollm2-135m-instruct" in text and text.count("slow") == 30
    assert max(map(len, text.splitlines())) <= 80
