"""The simulated step on a tiny load: what every arm must have in common, and the figures of its cells."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.scale import seer

pytestmark = pytest.mark.heavy


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"GROUPS": 6, "SIZE": 4, "WORKERS": 2, "SEEDS": 2, "CACHE": 2048, "LIMIT": 400}.items():
        monkeypatch.setattr(seer, name, value)


@pytest.mark.parametrize("curve", seer.CURVES)
def test_texts_are_equal_in_every_arm(curve: str) -> None:
    cells = {f"ladder/{curve}/{arm}": seer.cell(arm, curve, 16) for arm in seer.ARMS}
    runs: list[dict[str, Any]] = [run for cell in cells.values() for run in cell["seeds"]]
    assert len({run["digest"] for run in runs}) == seer.SEEDS
    assert all(run["makespan"] >= run["tail"] >= 0 for run in runs)
    for arm in ("whole groups", "requests"):
        assert not any(run["moves"]["divided"] for run in cells[f"ladder/{curve}/{arm}"]["seeds"])
    unbalanced = [run for run in runs if not run["moves"]["balanced"]]
    assert unbalanced and not any(run["regenerated"] for run in unbalanced), "division samples no token twice"
    found = seer.figures(cells)
    assert any("texts equal" in verdict.target and verdict.met for verdict in found.verdicts)


def test_the_same_seed_gives_the_same_run_and_forced_moves_cost_prefills() -> None:
    first, again = (seer.simulate("divided", "this machine", seer.Load(seed=1), 16) for _ in range(2))
    assert first == again
    forced = seer.cell("always", "this machine", 16)["seeds"][1]
    assert forced["digest"] == first["digest"] and forced["prefilled"] >= first["prefilled"]
