"""Tables at any width: names and ids are whole, everything else is there."""

from __future__ import annotations

import io
import re
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rookery.telemetry.rows import Rows, columns, printable
from rookery.telemetry.table import job_list, worker_table


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
    assert narrow.splitlines()[0] == "sums" and f"id job-{'0' * 24}" in narrow


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
