"""Pictures of the measures, from what their results hold and nothing else. Needs matplotlib (the extra ``plots``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.jobs import agentic_figures
from benchmarks.jobs.curve_figures import LATENCIES, PAPER_GAIN, TENANTS
from benchmarks.jobs.lag_figures import LAGS, LOSSES, collapsed, curve, final, of_arm
from benchmarks.lib.harness import HERE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = HERE / "plots"
WIDTH = 10.0
"""Inches."""
DPI = 130

LATENCY_COLOURS = dict(zip(LATENCIES, ("#1f6fb4", "#3a9e5b", "#c46a1b", "#7e57c2"), strict=True))
LOSS_COLOURS = dict(zip(LOSSES, ("#555555", "#1f6fb4", "#3a9e5b", "#c46a1b"), strict=True))
GREY = "#999999"


def draw(results: Mapping[str, dict[str, Any]], folder: Path = FOLDER) -> dict[str, Path]:
    """The picture of every result that has one and enough data for it: its path, by the result's name. ``speed`` is
    of several."""
    makers: dict[str, Callable[[dict[str, Any]], Figure | None]] = {
        "curve": _curve, "agentic": _agentic, "lag_study": _lag_study, "asynchrony": _asynchrony,
        "tenants": _tenants,
    }  # fmt: skip
    figures = {name: make(results[name]["data"]) for name, make in makers.items() if name in results}
    made = {}
    for name, figure in {**figures, "speed": _speed(results)}.items():
        if figure is not None:
            folder.mkdir(exist_ok=True)
            made[name] = folder / f"{name}.png"
            # no date and no version inside: the same figures are the same file
            figure.savefig(made[name], dpi=DPI, metadata={"Software": None})
    return made


def _new(height: float, columns: int, rows: int = 1, **more: Any) -> tuple[Figure, Any]:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=(WIDTH, height), layout="constrained", **more)
    pyplot.close(figure)  # it is saved, not shown
    return figure, axes


def _plain(*axes: Axes) -> None:
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
        each.grid(alpha=0.3)
        each.set_axisbelow(True)


# --- beside what people use today -------------------------------------------------------------------------------------


def _speed(results: Mapping[str, dict[str, Any]]) -> Figure | None:
    """Medians, with their range, of generation, training, a GRPO step and Tinker calls, beside the peers of each."""
    panels = [
        ("generation", "64 sequences, ", "generation, 64 sequences: tokens/s"),
        ("training", "8 x 128, ", "training, 8 x 128: tokens/s"),
        ("training", "8 x 512, ", "training, 8 x 512: tokens/s"),
        ("grpo_step", "", "a GRPO step: seconds"),
    ]
    found = [(_bars(results[name]["rows"], prefix), prefix, title) for name, prefix, title in panels if name in results]
    shown = [each for each in found if each[0]]  # a quick run leaves some out
    if not shown:
        return None
    figure, axes = _new(3.2, len(shown), squeeze=False)
    for panel, (bars, prefix, title) in zip(axes[0], shown, strict=True):
        for place, row in enumerate(bars):
            middle = median(row["values"])
            ours = row["what"].removeprefix(prefix).startswith("Rookery")
            colour = "#1f6fb4" if ours else GREY if "floor" in row["what"] else "#c46a1b"
            reach = [[middle - min(row["values"])], [max(row["values"]) - middle]]
            panel.bar(place, middle, color=colour, yerr=reach, capsize=2, error_kw={"linewidth": 0.8})
            figures = f"{middle:.3g}" if middle < 100 else f"{middle:.0f}"
            panel.text(place, middle / 2, figures, ha="center", va="center", fontsize=7, color="white")
        names = [row["what"].removeprefix(prefix).replace(", ", "\n").replace(" GRPOTrainer", "") for row in bars]
        panel.set_xticks(range(len(bars)), names, fontsize=6, rotation=90)
        panel.set_title(title, fontsize=8)
    _plain(*axes[0])
    return figure


def _bars(rows: list[dict[str, Any]], prefix: str) -> list[dict[str, Any]]:
    """Those of a panel: times and speeds of one contender each."""
    timed = [row for row in rows if row["what"].startswith(prefix) and row["unit"] in ("tokens/s", "s")]
    return [row for row in timed if "paired" not in row["what"]]


# --- the curve --------------------------------------------------------------------------------------------------------


def _curve(data: dict[str, Any]) -> Figure | None:
    """Makespan per tenant with its bound, gain over one after another, and the worker's busy share."""
    points = data["points"]
    if not points:
        return None
    figure, (times, gains, busy) = _new(4.2, 3)
    for name, colour in LATENCY_COLOURS.items():
        of = [point for point in points if point["latency"] == name]
        if not of:
            continue
        tenants = [point["tenants"] for point in of]
        label = f"latency {name}" + ("" if name == "mixed" else " s")
        each, least = ([point[what] / point["tenants"] for point in of] for what in ("makespan", "bound"))
        times.plot(tenants, each, "o-", color=colour, markersize=4, label=label)
        times.plot(tenants, least, ":", color=colour, linewidth=1.2)
        gains.plot(tenants, [point["gains"]["sync"] for point in of], "o-", color=colour, markersize=4, label=label)
        later = [(point["tenants"], point["gains"]["async"]) for point in of if point["gains"]["async"] is not None]
        gains.plot(*zip(*later, strict=True), "--", color=colour, linewidth=1) if later else None
        busy.plot(tenants, [100 * point["busy"] for point in of], "o-", color=colour, markersize=4, label=label)
    times.plot([], [], ":", color=GREY, label="bound")
    gains.plot([], [], "o-", color=GREY, markersize=4, label="over staleness 0")
    gains.plot([], [], "--", color=GREY, linewidth=1, label="over staleness 2")
    times.set_ylabel("makespan / tenants, s")
    times.set_ylim(bottom=0)
    gains.set_ylabel("gain over one after another")
    gains.axhline(PAPER_GAIN, color=GREY, linewidth=1)
    gains.text(1, PAPER_GAIN, f"{PAPER_GAIN:.1f} x", fontsize=8, color="#555555", va="bottom")
    gains.axhline(1, color=GREY, linewidth=1)
    gains.set_ylim(bottom=0)
    busy.set_ylabel("worker busy, % of the makespan")
    busy.set_ylim(0, 105)
    for axes in (times, gains, busy):
        axes.set_xscale("log", base=2)
        axes.set_xticks(TENANTS, [str(count) for count in TENANTS])
        axes.set_xlabel("tenants")
    times.legend(fontsize=7)
    gains.legend(fontsize=7, handles=gains.get_lines()[-4:-2], loc="center left")
    _plain(times, gains, busy)
    return figure


def _agentic(data: dict[str, Any]) -> Figure | None:
    """Small agentic jobs: time saved over one after another, the worker's busy share, and the ablations' makespans."""
    points = data["points"]
    if not points:
        return None
    arms = data.get("ablations", [])
    figure, (saved, busy, *rest) = _new(4.2, 3 if arms else 2)
    _by_tenants(points, saved, busy)
    for bars in rest:
        for place, (arm, _, ratio) in enumerate(arms):
            bars.bar(place, ratio, color="#c46a1b")
            name = arm.replace(" per", "\nper")
            bars.text(place, ratio / 2, f"{ratio:.2f}\n{name}", ha="center", fontsize=7, color="white")
        bars.axhline(1, color=GREY, linewidth=1)
        bars.set_xticks([])
        workload = f"{agentic_figures.ABLATED_TENANTS} tenants, tool {agentic_figures.TOOL_SECONDS:g} s"
        bars.set_ylabel(f"makespan without it, {workload}")
    _plain(saved, busy, *rest)
    return figure


def _tenants(data: dict[str, Any]) -> Figure | None:
    """The same in virtual time."""
    if not data["points"]:
        return None
    figure, (saved, busy) = _new(4.2, 2)
    _by_tenants(data["points"], saved, busy)
    _plain(saved, busy)
    return figure


def _by_tenants(points: list[dict[str, Any]], saved: Axes, busy: Axes) -> None:
    """Time saved over one after another, and the worker's busy share, by tenants; a line per latency."""
    latencies = sorted({point["latency"] for point in points})
    for latency, colour in zip(latencies, LATENCY_COLOURS.values(), strict=False):
        of = [point for point in points if point["latency"] == latency]
        for panel, name in ((saved, "saved"), (busy, "busy")):
            label, shares = f"tool {latency:g} s", [100 * point[name] for point in of]
            panel.plot([point["tenants"] for point in of], shares, "o-", color=colour, markersize=4, label=label)
    saved.axhline(85, color=GREY, linewidth=1)
    saved.text(1, 85, "MARLaaS: 85%", fontsize=8, color="#555555", va="bottom")
    saved.set_ylabel("time saved over one after another, %")
    busy.set_ylabel("worker busy, % of the makespan")
    counts = sorted({point["tenants"] for point in points})
    for axes in (saved, busy):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_xlabel("tenants")
        axes.set_ylim(-15 if axes is saved else 0, 105)
    saved.legend(fontsize=7)


# --- the lag study ----------------------------------------------------------------------------------------------------


def _lag_study(data: dict[str, Any]) -> Figure | None:
    """Held-out reward over the steps, a panel per lag; and the last one of every run."""
    cells = data["cells"]
    if not any(run["evaluations"] for run in cells.values()):
        return None
    figure, axes = _new(3.8, len(LAGS) + 1, sharey=True)
    for lag, panel in zip(LAGS, axes, strict=False):
        for loss, correction in LOSSES.items():
            whole = [run for run in of_arm(cells, loss, lag) if run["evaluations"]]
            of = curve(whole)
            if of:
                steps, means, errors = zip(*of, strict=True)
                panel.errorbar(steps, means, errors, fmt="o-", color=LOSS_COLOURS[loss], markersize=3, linewidth=1.3,
                               capsize=2, label=correction.name)  # fmt: skip
        panel.set_title(f"staleness {lag}", fontsize=9)
        panel.set_xlabel("optimizer steps")
    axes[0].set_ylabel("held-out reward (mean of the seeds, ± s.e.)", fontsize=8)
    axes[0].legend(fontsize=7)
    last = axes[-1]
    for place, lag in enumerate(LAGS):
        for number, loss in enumerate(LOSSES):
            at = place + (number - (len(LOSSES) - 1) / 2) * 0.18
            for run in of_arm(cells, loss, lag):
                value = final(run)
                if value is not None:
                    mark = "x" if collapsed(run) else "o"
                    last.plot(at, value, mark, color=LOSS_COLOURS[loss], markersize=4, fillstyle="none")
    last.set_xticks(range(len(LAGS)), [str(lag) for lag in LAGS])
    last.set_title("last, every run (x: collapsed)", fontsize=9)
    last.set_xlabel("staleness")
    last.set_ylim(bottom=0)
    _plain(*axes)
    return figure


# --- asynchrony -------------------------------------------------------------------------------------------------------


def _asynchrony(data: dict[str, Any]) -> Figure | None:
    """Costs by micro-batch; predicted against measured steps."""
    if not data["costs"]:
        return None
    figure, (left, right) = _new(4.6, 2, width_ratios=[1, 1.5])
    for cost in data["costs"]:
        colour = {"generation": "#1f6fb4", "training": "#c46a1b"}[cost["phase"]]
        cores = f"{cost['cores']} core{'s' * (cost['cores'] > 1)}"
        line = "o-" if cost["cores"] > 1 else "s--"
        times = [1000 * seconds for seconds in cost["seconds"]]
        left.plot(cost["samples"], times, line, color=colour, markersize=4, label=f"{cost['phase']}, {cores}")
    left.set_xscale("log", base=2)
    left.set_xticks([4, 8, 16, 32, 64], ["4", "8", "16", "32", "64"])
    left.set_xlabel("samples at a time")
    left.set_ylabel("ms per sample")
    left.set_ylim(bottom=0)
    left.legend(fontsize=7)
    steps = data["steps"]
    for place, step in enumerate(steps):
        right.barh(place - 0.2, step["predicted"], 0.36, color="#bbbbbb", label="predicted" if not place else None)
        colour = "#1f6fb4" if step["staleness"] else "#c46a1b"
        first = [one["staleness"] for one in steps].index(step["staleness"]) == place
        label = f"measured, lag {step['staleness']}" if first else None
        right.barh(place + 0.2, step["measured"], 0.36, color=colour, label=label)
        right.text(step["measured"], place + 0.2, f" {step['measured']:.2f}", va="center", fontsize=7)
    names = [f"{step['place'].replace(', ', chr(10), 1)}, lag {step['staleness']}" for step in steps]
    right.set_yticks(range(len(steps)), names, fontsize=7)
    right.invert_yaxis()
    right.set_xlabel("seconds per step")
    right.margins(x=0.1)  # for the figures behind the bars
    if steps:
        right.legend(fontsize=7, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    _plain(left, right)
    return figure
