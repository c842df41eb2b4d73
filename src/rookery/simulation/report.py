"""Results of a simulation as tables, JSON and plots, all labelled as simulated."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Group
from rich.table import Table

from rookery.simulation.replay import ReplayResult
from rookery.simulation.traces import HOUR

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    """Of all event logs, in the order of the outcomes: SHA-256 in hex."""
    return hashlib.sha256("".join(outcome.digest for outcome in outcomes).encode()).hexdigest()


def _mode(outcome: ReplayResult, alone: ReplayResult) -> dict[str, Any]:
    figures = asdict(outcome)
    del figures["scenario"]
    derived = (
        "tokens", "tokens_per_second", "steps_per_hour", "cost", "tokens_per_price", "waiting", "trainer_wait",
        "remote_wait", "queue",
    )  # fmt: skip
    shown = {name: getattr(outcome, name) for name in derived}
    return {**shown, "break_even_discount": _break_even(outcome, alone), **figures}


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
        rented = outcome.preemptible_hours * HOUR / outcome.seconds
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
            f"{outcome.waiting:.1f} s",
            _seconds(outcome.trainer_wait),
            _seconds(outcome.remote_wait),
            f"{outcome.queue:.1f} s",
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


STYLES = {
    "co-located": ("#555555", "--"),
    "disaggregated": ("#c46a1b", "--"),
    "rookery": ("#1f6fb4", "-"),
    "no-seeding": ("#3a9e5b", "-."),
    "no-migration": ("#b8336a", "-."),
    "no-memory": ("#7e57c2", ":"),
}
"""Colour and line of each mode, the same in every picture."""

WINDOWS = 30
"""Stretches of a run over which its throughput is taken: few enough that single steps do not show, enough that a change
of the instances does."""

WIDTH = 9.0
"""Inches."""


def draw(outcomes: Sequence[ReplayResult], folder: Path) -> list[Path]:
    """Write the pictures as PNG into ``folder``; their paths. Raises ``ModuleNotFoundError`` without matplotlib."""
    import matplotlib

    matplotlib.use("agg")
    made = []
    for name, make in (("throughput", _throughput), ("cost", _cost), ("waits", _waits)):
        figure = make(outcomes)
        figure.suptitle(f"Simulated: {_about(outcomes[0])}", fontsize=10)
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=130)
        made.append(path)
    return made


def _about(outcome: ReplayResult) -> str:
    scenario = outcome.scenario
    profile = scenario.profile
    return f"profile {profile.name} ({profile.label}), trace {scenario.trace.name}, seed {scenario.seed}"


def _new(height: float, rows: int = 1, columns: int = 1, **more: Any) -> tuple[Figure, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=(WIDTH, height), layout="constrained", **more)
    pyplot.close(figure)  # it is saved, not shown
    return figure, axes


def _throughput(outcomes: Sequence[ReplayResult]) -> Figure:
    """Tokens per second over time, and below it the instances."""
    figure, (above, below) = _new(6.5, rows=2, sharex=True, height_ratios=[2.2, 1])
    for outcome in outcomes:
        colour, line = STYLES[outcome.mode]
        times, rates = _rates(outcome)
        width = 2.4 if outcome.mode == "rookery" else 1.4
        above.plot(times, rates, line, color=colour, label=outcome.mode, linewidth=width)
    above.set_ylabel("trained tokens per second")
    above.set_ylim(bottom=0)
    above.yaxis.set_major_formatter(lambda value, _: _short(value))
    above.legend(ncols=6, fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    trace = outcomes[0].scenario.trace
    hours = [since / 3600 for since, _ in trace.changes] + [trace.seconds / 3600]
    counts = [count for _, count in trace.changes]
    below.stairs(counts, hours, fill=True, color="#dddddd", label="available")
    for outcome in outcomes:
        if outcome.preemptible_hours and outcome.mode in ("rookery", "disaggregated"):
            colour, line = STYLES[outcome.mode]
            edges = [time / 3600 for time, *_ in outcome.instances] + [outcome.seconds / 3600]
            rented = [number for *_, number in outcome.instances]
            below.stairs(rented, edges, baseline=None, color=colour, linestyle=line, linewidth=1.6,
                         label=f"rented, {outcome.mode}")  # fmt: skip
    below.set_ylabel("preemptible instances")
    below.set_xlabel("hours")
    below.set_ylim(0, max(counts) + 0.5)
    below.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    _plain(above, below)
    return figure


def _rates(outcome: ReplayResult) -> tuple[list[float], list[float]]:
    """(hours, tokens per second): a step's tokens are spread over the time since the step before of its job."""
    width = outcome.seconds / WINDOWS
    sums = [0.0] * WINDOWS
    before: dict[str, float] = {}
    for step in outcome.steps:
        begin = before.get(step.job, 0.0)
        before[step.job] = step.time
        for window in range(int(begin / width), min(WINDOWS, int(step.time / width) + 1)):
            part = min(step.time, (window + 1) * width) - max(begin, window * width)
            sums[window] += step.tokens * max(0.0, part) / (step.time - begin)
    last = max(before.values(), default=0.0)
    known = [window for window in range(WINDOWS) if (window + 1) * width <= last]
    return [(window + 0.5) * width / 3600 for window in known], [sums[window] / width for window in known]


def _cost(outcomes: Sequence[ReplayResult]) -> Figure:
    """Tokens per price unit at the scenario's discount, and at every other."""
    figure, (left, right) = _new(3.8, columns=2)
    for place, outcome in enumerate(outcomes):
        colour, _ = STYLES[outcome.mode]
        left.barh(place, outcome.tokens_per_price, color=colour)
        left.text(outcome.tokens_per_price, place, f" {_short(outcome.tokens_per_price)} ", va="center", fontsize=8)
    left.set_yticks(range(len(outcomes)), [outcome.mode for outcome in outcomes])
    left.invert_yaxis()
    left.set_xlim(0, 1.3 * max(outcome.tokens_per_price for outcome in outcomes))
    left.set_xlabel(f"tokens per price unit, discount {outcomes[0].scenario.discount:.0%}")
    discounts = [step / 100 for step in range(100)]
    for outcome in outcomes:
        colour, line = STYLES[outcome.mode]
        worth = [outcome.tokens / outcome.cost_at(discount) for discount in discounts]
        right.plot([100 * d for d in discounts], worth, line, color=colour, label=outcome.mode)
    right.axvline(100 * outcomes[0].scenario.discount, color="#bbbbbb", linewidth=1, zorder=0)
    right.set_xlabel("discount on preemptible machines, %")
    right.set_ylabel("tokens per price unit")
    right.set_ylim(bottom=0)
    right.legend(fontsize=7)
    left.xaxis.set_major_formatter(lambda value, _: _short(value))
    right.yaxis.set_major_formatter(lambda value, _: _short(value))
    _plain(left, right)
    return figure


def _short(value: float) -> str:
    """1,234,567 as 1.23M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def _waits(outcomes: Sequence[ReplayResult]) -> Figure:
    """Waits per step, and idle shares of the machines' time."""
    figure, (left, right) = _new(3.8, columns=2, width_ratios=[1.7, 1])
    kinds = [
        ("jobs for rollouts", "#1f6fb4", "waiting"),
        ("trainer, after seeding", "#3a9e5b", "trainer_wait"),
        ("preemptible, for work", "#c46a1b", "remote_wait"),
        ("requests, for a place", "#7e57c2", "queue"),
    ]
    _bars(left, outcomes, kinds)
    left.set_ylabel("seconds per step")
    _bars(right, outcomes, [("reserved", "#555555", "reserved_idle"), ("preemptible", "#c46a1b", "preemptible_idle")])
    right.set_ylabel("share of time idle")
    right.set_ylim(0, 1)
    _plain(left, right)
    return figure


def _bars(axes: Axes, outcomes: Sequence[ReplayResult], kinds: list[tuple[str, str, str]]) -> None:
    width = 0.8 / len(kinds)
    for number, (label, colour, name) in enumerate(kinds):
        places = [place - 0.4 + (number + 0.5) * width for place in range(len(outcomes))]
        axes.bar(places, [getattr(outcome, name) or 0 for outcome in outcomes], width, color=colour, label=label)
    axes.set_xticks(range(len(outcomes)), [outcome.mode for outcome in outcomes], rotation=35, ha="right", fontsize=8)
    axes.legend(fontsize=7, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)


def _plain(*axes: Axes) -> None:
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(alpha=0.3)
        each.set_axisbelow(True)
