"""Pictures of the measures, from what their results hold and nothing else. Needs matplotlib (the extra ``plots``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.lib.harness import HERE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FOLDER = HERE / "plots"
WIDTH = 10.0
"""Inches."""
DPI = 130

COLOURS = ("#1f6fb4", "#3a9e5b", "#c46a1b", "#7e57c2")
GREY = "#999999"


def draw(results: Mapping[str, dict[str, Any]], folder: Path = FOLDER) -> dict[str, Path]:
    """The picture of every result that has one and enough data for it: its path, by the result's name. ``speed`` is
    of several."""
    made = {}
    for name, maker in {"speed": speed, "agentic": agentic, "tenants": tenants}.items():
        figure = maker(results)
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


def speed(results: Mapping[str, dict[str, Any]]) -> Figure | None:
    """How many times as fast Rookery is as each peer; a bar per peer, with the two figures."""
    bars = []
    for name, ours, theirs, what in COMPARED:
        rows = {row["what"]: row for row in results[name]["rows"]} if name in results else {}
        peers = [median(row["values"]) for row_name, row in rows.items() if row_name.startswith(theirs)]
        if ours in rows and peers:
            a, unit = median(rows[ours]["values"]), rows[ours]["unit"]
            b = max(peers) if unit == "tokens/s" else min(peers)
            times = a / b if unit == "tokens/s" else b / a
            bars.append((what, times, f"{_figure(a)} against {_figure(b)} {unit}", results[name]))
    if not bars:
        return None
    figure, axes = _new(0.45 * len(bars) + 1.3, 1)
    for index, (_, times, figures, _) in enumerate(bars):
        axes.barh(index, times, 0.6, color=COLOURS[0] if times >= 1 else COLOURS[2])
        axes.text(max(times, 1) + 0.08, index, f"{times:.2f} x   ({figures})", va="center", fontsize=9)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(bars)), [what for what, *_ in bars], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.5 * max(times for _, times, *_ in bars))
    axes.set_xlabel("speed of Rookery / speed of the other (1: equal)")
    origin = _origin(*(result for *_, result in bars))
    figure.suptitle(f"Rookery compared with vLLM, PEFT and TRL. {origin}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


COMPARED = (
    ("generation", "64 sequences, Rookery, 4 adapters", "64 sequences, vLLM, 4 adapters",
     "generation, 64 rows, 4 adapters: vLLM, 4 adapters"),
    ("generation", "64 sequences, Rookery, 4 adapters", "64 sequences, vLLM, no adapters, compiled",
     "generation, 64 rows, 4 adapters: vLLM compiled, none"),
    ("generation", "64 sequences, Rookery, no adapters", "64 sequences, vLLM, no adapters, compiled",
     "generation, 64 rows, no adapters: vLLM compiled"),
    ("generation", "8 sequences, Rookery, 4 adapters", "8 sequences, vLLM, 4 adapters",
     "generation, 8 rows, 4 adapters: vLLM, 4 adapters"),
    ("generation", "8 sequences, Rookery, no adapters", "8 sequences, vLLM, no adapters, compiled",
     "generation, 8 rows, no adapters: vLLM compiled"),
    ("training", "8 x 128, Rookery", "8 x 128, PEFT", "training, 8 x 128 tokens: PEFT"),
    ("grpo_step", "Rookery, staleness 0", "TRL GRPOTrainer", "a GRPO step, staleness 0: TRL"),
)  # fmt: skip
"""Result, our row, the beginning of the peer's rows, of which the best counts, the label: like compared with like."""


def _origin(*results: dict[str, Any]) -> str:
    """The machines and the days, as a caption says them."""
    days = sorted({result["date"] for result in results})
    machines = dict.fromkeys(result["machine"].partition(", Python")[0] for result in results)
    return f"{' and '.join(machines)}, {days[0]}{' to ' + days[-1] if days[1:] else ''}"


# --- many tenants -----------------------------------------------------------------------------------------------------


def agentic(results: Mapping[str, dict[str, Any]]) -> Figure | None:
    """Makespan of N tenants at once and one after another, for a tool of 2 s."""
    result = results.get("agentic")
    points = [p for p in result["data"]["points"] if p["latency"] == TOOL_SECONDS] if result else []
    if len(points) < 2 or result is None:
        return None
    figure, axes = _new(3.6, 1)
    groups = {
        "one after another, staleness 0": (GREY, lambda p: p["makespan"] / (1 - p["saved"])),
        "one after another, staleness 2": (COLOURS[2], lambda p: p["makespan"] / (1 - p["saved_async"])),
        "all at once, staleness 2": (COLOURS[0], lambda p: p["makespan"]),
    }
    for number, (label, (colour, seconds)) in enumerate(groups.items()):
        for index, point in enumerate(points):
            at, value = index + (number - 1) * 0.27, seconds(point)
            axes.bar(at, value, 0.25, color=colour, label=label if not index else None)
            axes.text(at, value, f"{value:,.0f}", ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(points)), [f"{p['tenants']} tenant{'s' * (p['tenants'] > 1)}" for p in points])
    axes.set_ylabel("seconds until all jobs are done")
    axes.legend(fontsize=8, frameon=False)
    runs = [point["runs"] for point in points]
    least, most = min(runs), max(runs)
    of_runs = "one run" if most == 1 else f"medians of {f'{least} to ' if least < most else ''}{most} runs"
    axes.set_title(f"Small jobs, each of three turns waits 2 s for a tool; {of_runs}. {_origin(result)}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


TOOL_SECONDS = 2.0


def tenants(results: Mapping[str, dict[str, Any]]) -> Figure | None:
    """Simulated: time saved over one after another at the same staleness, and the worker's busy share."""
    result = results.get("tenants")
    if result is None or not result["data"]["points"]:
        return None
    points = result["data"]["points"]
    figure, (saved, busy) = _new(3.6, 2)
    for latency, colour in zip(sorted({p["latency"] for p in points}), COLOURS, strict=False):
        of = [point for point in points if point["latency"] == latency]
        for panel, name in ((saved, "saved_async"), (busy, "busy")):
            shares = [100 * point[name] for point in of]
            label = f"tool {latency:g} s"
            panel.plot([point["tenants"] for point in of], shares, "o-", color=colour, markersize=4, label=label)
    saved.set_ylabel("time saved, %")
    saved.set_title("against one after another, same staleness", fontsize=9)
    busy.set_ylabel("worker busy, % of the time")
    busy.set_title("the worker's busy share", fontsize=9)
    counts = sorted({point["tenants"] for point in points})
    for axes in (saved, busy):
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(count) for count in counts])
        axes.set_xlabel("tenants at once")
        axes.set_ylim(0, 105)
    saved.legend(fontsize=8)
    _plain(saved, busy)
    figure.suptitle(f"SIMULATED, one GPU-like worker whose costs are assumed, {result['date']}", fontsize=9)
    return figure
