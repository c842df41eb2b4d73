"""Results of a simulation as tables and JSON, labelled as simulated."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table

from rookery.simulation.replay import ReplayResult
from rookery.simulation.traces import HOUR

DERIVED = ("tokens", "tokens_per_second", "steps_per_hour", "cost", "tokens_per_price")
RELATIVE = ("tokens_per_second", "tokens_per_price")
"""Figures of which the tables show the quotient with those of the first outcome."""
MEANS = ("waiting", "trainer_wait", "remote_wait", "queue")


def as_json(outcomes: Sequence[ReplayResult]) -> dict[str, Any]:
    """All of it, the first outcome being what the others are compared with."""
    scenario = outcomes[0].scenario
    profile = scenario.profile
    return {
        "simulated": True,
        "profile": profile.model_dump(mode="json"),
        "trace": {
            "name": scenario.trace.name,
            "changes": [list(change) for change in scenario.trace.changes],
            "seconds": scenario.trace.seconds,
            "mean": scenario.trace.mean(),
        },
        "scenario": {name: value for name, value in asdict(scenario).items() if name not in ("profile", "trace")},
        "event_log": digest(outcomes),
        "modes": [_mode(outcome, outcomes[0]) for outcome in outcomes],
    }


def digest(outcomes: Sequence[ReplayResult]) -> str:
    """The digest of all event logs, in the order of the outcomes: SHA-256 in hex."""
    return hashlib.sha256("".join(outcome.digest for outcome in outcomes).encode()).hexdigest()


def _mode(outcome: ReplayResult, alone: ReplayResult) -> dict[str, Any]:
    figures = asdict(outcome)
    del figures["scenario"]
    shown = {name: getattr(outcome, name) for name in DERIVED}
    means = {name: outcome.mean(name) for name in MEANS}
    relative = {name: getattr(outcome, name) / (getattr(alone, name) or math.nan) for name in RELATIVE}
    return {
        **shown, **means, "instances": instances(outcome), "break_even_discount": _break_even(outcome, alone),
        "of_the_first": {name: None if math.isnan(ratio) else ratio for name, ratio in relative.items()}, **figures,
    }  # fmt: skip


def instances(outcome: ReplayResult) -> float:
    """The mean number of preemptible machines that were rented."""
    return outcome.preemptible_hours * HOUR / outcome.seconds


def _break_even(outcome: ReplayResult, alone: ReplayResult) -> float | None:
    return outcome.break_even(alone) if alone is not outcome and not alone.preemptible_hours else None


def tables(outcomes: Sequence[ReplayResult]) -> Group:
    """Two tables with a row per mode: what came of it, and where the time went."""
    scenario, alone = outcomes[0].scenario, outcomes[0]
    profile, trace = scenario.profile, scenario.trace
    title = (
        f"SIMULATED · profile {profile.name} ({profile.label}) · trace {trace.name}, {trace.seconds / HOUR:g} h,"
        f" {trace.mean():.1f} instances on average · discount {scenario.discount:.0%} · seed {scenario.seed}"
    )
    gained = _table(
        "tokens/s", f"of {alone.mode}", "steps/h", "machines", "cost", "tokens per\nprice unit", f"of {alone.mode}",
        "pays from a\ndiscount of",
    )  # fmt: skip
    spent = _table(
        "job waits for\nrollouts", "trainer\nwait", "remote\nwait", "request\nqueues", "idle\nreserved",
        "idle\npreemptible", "preempted", "requests\nlost", "tokens\nunsent", "tokens\nrepeated",
    )  # fmt: skip
    for outcome in outcomes:
        even = _break_even(outcome, alone)
        rented = instances(outcome)
        gained.add_row(
            outcome.mode,
            f"{outcome.tokens_per_second:,.0f}",
            _times(outcome.tokens_per_second, alone.tokens_per_second),
            f"{outcome.steps_per_hour:.1f}",
            f"{scenario.reserved} + {rented:.1f}",
            f"{outcome.cost:.2f}",
            f"{outcome.tokens_per_price:,.0f}",
            _times(outcome.tokens_per_price, alone.tokens_per_price),
            "–" if even is None else f"{even:.0%}",
        )
        spent.add_row(
            outcome.mode,
            *(_seconds(outcome.mean(name)) for name in MEANS),
            f"{outcome.reserved_idle:.0%}",
            f"{outcome.preemptible_idle:.0%}" if rented else "–",
            str(outcome.preemptions),
            f"{outcome.requeued.get('lost', 0):,}",
            f"{outcome.unsent_tokens:,}",
            f"{outcome.discarded_tokens:,}",
        )
    return Group(title, gained, "Per step, the means:", spent)


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("mode", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _times(value: float, alone: float) -> str:
    return f"{value / alone:.2f}×" if alone else "–"


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"
