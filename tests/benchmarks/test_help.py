"""Every script of the benchmarks that has options explains them."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.heavy


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"

SCRIPTS = sorted(
    ".".join(("benchmarks", path.parent.name, path.stem))
    for path in BENCHMARKS.glob("*/*.py")
    if not path.stem.startswith("weights_")  # processes of benchmarks.scale.weights
    and re.search(r"parse_args\(|[= ]options\(|repeats\(__doc__", text := path.read_text())
    and "__main__" in text
    and path.parent.name != "peers"  # they run in environments of their own
)


@pytest.mark.parametrize("name", SCRIPTS)
def test_script_prints_its_options(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(name).main()
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("usage: ")
