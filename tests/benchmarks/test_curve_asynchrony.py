"""Asynchrony: the theory's formulas, the lag study's statistics, the page and the pictures that show both."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.jobs import agentic_figures, asynchrony_figures, curve_figures, lag_figures, lag_study
from benchmarks.jobs.asynchrony_figures import (
    APART,
    BUDGETS,
    PLACES,
    Place,
    choices,
    gains,
    micro_batches,
    phases,
    steps,
    theory,
)
from benchmarks.jobs.asynchrony_theory import Phase, apart, jointly, separately, shared, tight_budget
from benchmarks.jobs.lag_figures import LAGS, LOSSES, Arm, collapsed, comparisons
from benchmarks.lib import pages
from benchmarks.lib.harness import RESULTS, ROOT
from benchmarks.lib.plots import FOLDER, draw
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.support.measured import agentic_cells, asynchrony_cells, curve_cells, lag_run

from rookery.algorithms.losses import LOSSES as LOSS_FUNCTIONS
from rookery.spec.parsing import parse_job

SECONDS = st.floats(0.01, 10)


@st.composite
def phase(draw: st.DrawFn) -> Phase:
    """Costs and sizes of a few micro-batches; sizes grow with them."""
    batches = draw(st.lists(st.integers(1, 64), min_size=1, max_size=5, unique=True))
    each = draw(st.floats(1, 100))
    return Phase({batch: draw(SECONDS) for batch in batches}, {batch: each * batch for batch in batches})


# --- the theory -------------------------------------------------------------------------------------------------------


@given(phase(), phase(), st.floats(1, 20_000))
def test_asynchrony_never_loses(generation: Phase, training: Phase, budget: float) -> None:
    least = min(generation.size.values()) + min(training.size.values())
    assume(budget >= least)
    together, alone = jointly(generation, training, budget), separately(generation, training, budget)
    assert alone.seconds <= together.seconds
    assert generation.size[together.generation] + training.size[together.training] <= budget
    assert max(generation.size[alone.generation], training.size[alone.training]) <= budget


@given(phase(), phase())
def test_without_a_binding_constraint_it_gains_nothing(generation: Phase, training: Phase) -> None:
    assert jointly(generation, training, math.inf).seconds == separately(generation, training, math.inf).seconds


@given(phase(), phase())
def test_the_tight_budget_takes_something_from_generation(generation: Phase, training: Phase) -> None:
    budget = tight_budget(generation, training)
    best = generation.best(math.inf)
    together, alone = jointly(generation, training, budget), separately(generation, training, budget)
    assert alone.generation == best
    if generation.size[best] > min(generation.size.values()):
        assert together.generation != best
        assert alone.seconds < together.seconds or generation.seconds[best] == generation.seconds[together.generation]


def test_what_fits_nowhere_is_refused() -> None:
    one = Phase({8: 1.0}, {8: 100.0})
    with pytest.raises(ValueError, match="no micro-batch fits 99 bytes"):
        one.best(99)
    with pytest.raises(ValueError, match="no pair"):
        jointly(one, one, 199)


@given(SECONDS, SECONDS, st.floats(0, 10), st.integers(0, 8))
def test_lag_saves_the_bubbles_and_no_more_on_one_processor(g: float, t: float, bubbles: float, lag: int) -> None:
    assert shared(g, t, 0.0, lag) == g + t
    assert g + t <= shared(g, t, bubbles, lag) <= g + t + bubbles
    assert shared(g, t, bubbles, 0) == g + t + bubbles
    assert shared(g, t, bubbles, lag + 1) <= shared(g, t, bubbles, lag)


@given(SECONDS, SECONDS, st.floats(0, 10), st.integers(1, 8))
def test_two_devices_are_as_slow_as_the_slower(g: float, t: float, bubbles: float, lag: int) -> None:
    assert apart(g, t, bubbles, 0) == g + t + bubbles
    assert max(g, t) <= apart(g, t, bubbles, lag) <= g + t + bubbles


# --- what is made of the measures -------------------------------------------------------------------------------------


def test_jobs_that_behave_as_predicted_are_found_to() -> None:
    cells = asynchrony_cells()
    result = asynchrony_figures.figures(cells)
    assert len(steps(cells)) == 2 * len(PLACES)
    assert all(step.measured == pytest.approx(step.predicted, rel=0.002) for step in steps(cells))
    assert len(gains(steps(cells))) == len(PLACES) + len(BUDGETS)
    assert all(verdict.met for verdict in result.verdicts)
    both = phases(cells, 2)
    assert both is not None
    assert both[1].size[64] == pytest.approx(8e8)  # the slope of the peaks, not what was there before
    free, tight, eased = theory(cells)
    assert free[1] == pytest.approx(free[2])  # one core is half of two here, so nothing is gained where nothing binds
    assert tight[1] > eased[1] > eased[2] >= tight[2]


def test_a_gain_that_was_not_predicted_is_found_out() -> None:
    cells = asynchrony_cells()
    for key, cell in cells.items():
        if key.startswith("job/free/shared/0/2/"):
            cell["step"] *= 0.7
    verdicts = asynchrony_figures.figures(cells).verdicts
    assert [v.met for v in verdicts if "free memory, one worker, both cores: lag" in v.target] == [False]


def test_micro_batches_follow_from_the_budget() -> None:
    cells = asynchrony_cells()
    chosen = {place.key: choices(cells, place) for place in PLACES}
    assert chosen["free/shared/0"].generation == chosen["tight/apart/0"].generation == 64
    assert chosen["tight/shared/0"].generation < chosen["eased/shared/0"].generation < 64
    assert chosen["tight/apart/0"].training == 8
    for budget, alone in APART.items():  # what is measured once for both is the same for both
        assert choices(cells, Place(budget, "apart")) == choices(cells, Place(alone, "apart"))


def test_later_runs_take_the_micro_batches_of_the_first() -> None:
    cells = asynchrony_cells()
    costs = {key: cell for key, cell in cells.items() if key.startswith("costs/")}
    for place in PLACES:
        best = choices(costs, place)
        assert micro_batches(costs, place) == (best.generation, best.training // 8)
        cells[f"job/{place.key}/0/0"]["rows"] = 5
        assert micro_batches(cells, place) == (5, best.training // 8)


def test_whatever_is_missing_is_not_made_up() -> None:
    cells = asynchrony_cells()
    for count in range(0, len(cells), 3):
        json.dumps(asynchrony_figures.figures(dict(list(cells.items())[:count])).data, allow_nan=False)
    assert asynchrony_figures.figures({}).verdicts == []
    with pytest.raises(ValueError, match="no costs"):
        choices({}, PLACES[0])


# --- the lag study ----------------------------------------------------------------------------------------------------


def lag_cells() -> dict[str, Any]:
    """Lag 8 without correction does harm; nothing else differs."""
    cells = {}
    for seed in range(3):
        for lag in LAGS:
            for loss in LOSSES:
                last = (0.45 if loss == "none" and lag == 8 else 0.9) + 0.01 * seed
                cells[Arm(loss, lag, seed).key] = lag_run(loss, lag, seed, 0.2, 0.6, last)
    return cells


@pytest.mark.parametrize(
    ("means", "state", "fell"),
    [
        ((0.2, 0.5, 0.9), "completed", False),
        ((0.2, 0.9, 0.5), "completed", False),  # lower than before, not by half
        ((0.2, 0.9, 0.44), "completed", True),
        ((0.2, 0.25, 0.19), "completed", True),  # below the untrained policy
        ((0.2, 0.5, 0.9), "failed", True),
        ((), "completed", True),
    ],
)
def test_a_collapse_is_what_is_said(means: tuple[float, ...], state: str, fell: bool) -> None:
    assert collapsed(lag_run("none", 8, 0, *means, state=state)) is fell


def test_harm_is_found_where_it_was_done_and_nowhere_else() -> None:
    found = comparisons(lag_cells())
    assert len(found) == 8 + 9
    harmed = {what for what, interval in found if not interval.null}
    assert harmed == {
        "no correction: lag 8 less lag 0",
        *(f"lag 8: {LOSSES[name].name} less no correction" for name in LOSSES if name != "none"),
    }
    result = lag_figures.figures(lag_cells())
    assert result.verdicts[0].met
    assert [row[-1] for row in result.data["tables"][1]["rows"]].count("differs") == 4
    assert any(note.startswith("4 of 17 intervals") for note in result.notes)


def test_runs_that_are_missing_or_failed_are_said_so() -> None:
    cells = lag_cells()
    assert lag_figures.figures({}).verdicts[0].met is None
    del cells["ppo/2/1"]
    assert lag_figures.figures(cells).verdicts[0].met is False
    cells = {"none/0/0": lag_run("none", 0, 0, state="failed")}
    row = lag_figures.figures(cells).data["tables"][0]["rows"][0]
    assert row[2] is None and row[6] == 1
    json.dumps(lag_figures.figures(cells).data, allow_nan=False)


@given(st.integers(0, 2**31))
def test_no_correction_is_the_plain_policy_gradient(seed: int) -> None:
    """−w·A per token, whatever the ratio: in float64, to the last bit."""
    g = torch.Generator().manual_seed(seed)
    q, logp, advantages = (torch.randn(7, generator=g, dtype=torch.float64) for _ in range(3))
    weights = torch.rand(7, generator=g, dtype=torch.float64)
    logp.requires_grad_()
    spec = dict(LOSSES["none"].spec)
    loss = LOSS_FUNCTIONS[spec.pop("name")](logp, q, advantages, weights, torch.zeros(7, dtype=torch.int64), **spec)
    (gradient,) = torch.autograd.grad(loss.total, logp)
    assert torch.equal(gradient, -weights * advantages)


def test_every_arm_is_a_job() -> None:
    arms = [Arm(loss, lag, 0) for lag in LAGS for loss in LOSSES]
    jobs = [parse_job(lag_study.spec(arm, lag_study.STEPS)) for arm in arms]
    assert len({job.name for job in jobs}) == len(arms)
    assert {job.algorithm.max_staleness for job in jobs} == set(LAGS)
    assert lag_study.STEPS % jobs[0].evaluation.every == 0  # the last version is among the evaluated
    assert {(job.algorithm.loss.name, *job.algorithm.loss.params.values()) for job in jobs} == {
        ("cispo", 1.0, 1.0), ("aipo", 2.0), ("aipo", 10.0), ("ppo", 0.8, 1.2),
    }  # fmt: skip


# --- shown ------------------------------------------------------------------------------------------------------------


def test_pictures_are_drawn_of_what_there_is(tmp_path: Path) -> None:
    results = {
        "curve": {"data": {**curve_figures.figures(curve_cells()).data, "cells": curve_cells()}},
        "agentic": {"data": {**agentic_figures.figures(agentic_cells()).data, "cells": agentic_cells()}},
        "lag_study": {"data": {**lag_figures.figures(lag_cells()).data, "cells": lag_cells()}},
        "asynchrony": {"data": {**asynchrony_figures.figures(asynchrony_cells()).data, "cells": asynchrony_cells()}},
    }
    made = draw(json.loads(json.dumps(results)), tmp_path)
    assert sorted(path.name for path in made.values()) == [
        "agentic.png",
        "asynchrony.png",
        "curve.png",
        "lag_study.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made.values())


def test_of_nothing_no_picture_is_drawn(tmp_path: Path) -> None:
    results = {
        "curve": {"data": curve_figures.figures({}).data},
        "agentic": {"data": agentic_figures.figures({}).data},
        "lag_study": {"data": {**lag_figures.figures({}).data, "cells": {}}},
        "asynchrony": {"data": asynchrony_figures.figures({}).data},
    }
    assert draw(results, tmp_path / "plots") == {}
    assert draw({}, tmp_path / "plots") == {}


def test_a_page_takes_its_figures_from_the_results(tmp_path: Path) -> None:
    page = ROOT / "benchmarks" / "studies" / "asynchrony.md"
    result = {
        "command": "python x.py", "machine": "two cores", "title": "X", "notes": ["A note."],
        "rows": [{"what": "one", "values": [3.0, 1.0, 2.0], "unit": "s", "note": ""}],
        "verdicts": [{"target": "a | b", "measured": "1", "met": True, "why": ""}],
        "data": {"tables": [{"title": "T", "head": ["a", "b"], "rows": [[1.23456, None], ["x", 32]]}]},
    }  # fmt: skip
    text = pages.filled(page, {"asynchrony": result}, {"asynchrony": ROOT / "benchmarks" / "plots" / "asynchrony.png"})
    assert "| one | 2 s | 1 to 3 | 3 |  |" in text
    assert "| 1.23 |  |" in text and "| x | 32 |" in text and "a \\| b" in text and "A note." in text
    assert "(../../benchmarks/plots/asynchrony.png)" in text
    copy = tmp_path / "page.md"
    copy.write_text(text)
    assert pages.filled(copy, {}, {}) == pages.filled(page, {}, {})  # what stood there is replaced, nothing else


SHOWN = {
    "benchmarks/studies/asynchrony.md": {"asynchrony", "lag_study"},
    "benchmarks/studies/speed.md": {"generation", "spinning", "training", "grpo_step", "curve"},
}


@pytest.mark.parametrize("page", pages.PAGES)
def test_pages_say_what_the_results_say(page: str) -> None:
    results = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
    plots = {path.stem: path for path in FOLDER.glob("*.png")}
    text = (ROOT / page).read_text(encoding="utf-8")
    assert pages.filled(ROOT / page, results, plots) == text, "run: python -m benchmarks.lib.report"
    named = {match[2] for match in pages.MARKED.finditer(text)}
    assert named == SHOWN[page]
