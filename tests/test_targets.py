"""Every test has a make target that runs it, and CI calls targets that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()


def test_every_file_with_heavy_tests_is_in_a_target() -> None:
    named = [ROOT / path for path in re.findall(r"tests/[\w/.]+", MAKEFILE) if (ROOT / path).exists()]
    for file in (ROOT / "tests").rglob("test_*.py"):
        if re.search(r"\bmark\.heavy\b", file.read_text()):
            assert any(file == path or path in file.parents for path in named), (
                f"no target runs {file.relative_to(ROOT)}"
            )


def test_ci_names_targets_that_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
    script = (ROOT / ".ci/run").read_text().replace("\\\n", "")
    named = re.findall(r"^(?:# )?[^#]*?\bmake ((?:[a-z0-9-]+\s?)+)", script, re.MULTILINE)
    named += re.findall(r"^for target in ((?:[a-z0-9-]+\s*)+);", script, re.MULTILINE)
    wanted = {target for line in named for target in line.split()}
    assert {"test", "test-integration"} <= wanted
    assert wanted <= targets | {"once"}


def test_every_target_that_runs_tests_is_phony() -> None:
    phony = set(re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[0].split())
    assert set(re.findall(r"^([a-z][\w-]*):", MAKEFILE, re.MULTILINE)) == phony
