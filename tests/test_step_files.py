"""The table of ``docs/architecture.md`` has the files that a step of a job passes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MOST_MAIN_FILES = 66
"""Files of the table that a step passes: 25 rows, each of one idea, and a file has at most 500 lines of code. A new
idea on the way of a step belongs into one of them, or raises this number with its reason."""

MOST_FILES = 168
"""All that a step passes but for watches, whose turn falls into a step or not: 166 when it was counted, and the bounds
of chat templates' work. Two in three are rooms that every call uses (settings, bounds, the parsers and views of HTTP),
or are only asked whether they have work."""


def named(text: str) -> list[str]:
    """The files and, with a slash at their end, the folders that ``text`` names."""
    return re.findall(r"`([\w./]+(?:\.py|/))`", text)


@pytest.mark.heavy
def test_the_table_of_a_step_has_the_files_that_a_step_passes(tmp_path: Path) -> None:
    section = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("## One step, file by file")[1]
    section = section.split("\n## ")[0]
    rows = [line for line in section.splitlines() if re.match(r"\| \d+ \|", line)]
    table = {file for row in rows for file in named(row.split("|")[2])}
    further = tuple(named(section.split("passes in addition:")[1]))
    ran = subprocess.run(
        [sys.executable, "-m", "tests.support.traced_step", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=250, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    passed = set(json.loads(ran.stdout.splitlines()[-1]))
    watches = tuple(named(section.split("- **Watches**")[1].split("\n- **")[0]))
    passed = {file for file in passed if not file.startswith(watches)}
    main = {file for file in passed if file.startswith(tuple(table))}
    print(f"a step passes {len(passed)} files, of which the table has {len(main)}")
    assert len(main) <= MOST_MAIN_FILES and len(passed) <= MOST_FILES, sorted(passed)
    unpassed = {one for one in table if not any(file.startswith(one) for file in passed)}
    assert not unpassed, "entries of the table that a step does not pass"
    left = {file for file in passed if not file.startswith((*table, *further))}
    assert not left, "files that a step passes, neither in the table nor in the list after it"
    missing = [file for file in (*table, *further) if not (ROOT / "src" / "rookery" / file).exists()]
    assert not missing
