"""Tables of jobs and workers for the terminal: state, step, reward with a sparkline, tokens per second, staleness.

:func:`job_table` is a pure function of job views in JSON, so the command line, the demo and the picture in the README
show the same table. Render it to an image with ``rich.console.Console(record=True).export_svg()``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from rookery.telemetry.rows import Rows, columns, printable

BARS = "▁▂▃▄▅▆▇█"

STYLES = {
    "queued": "yellow",
    "running": "bold green",
    "paused": "bold yellow",
    "completed": "bold cyan",
    "failed": "bold red",
    "cancelled": "dim",
}

WORKER_STYLES = {
    "joining": "yellow",
    "catching up": "yellow",
    "serving": "bold green",
    "draining": "cyan",
    "suspect": "bold red",
    "gone": "dim",
}

SPARK_WIDTH = 14
"""Characters of a sparkline, such that the table fits a terminal of 80 columns."""


def sparkline(values: Sequence[float | None], width: int = SPARK_WIDTH) -> str:
    """The last ``width`` values as bars between their minimum and maximum; a missing value is a space."""
    shown = list(values)[-width:]
    known = [value for value in shown if value is not None and math.isfinite(value)]
    if not known:
        return ""
    low, high = min(known), max(known)
    span = high / 2 - low / 2  # in halves: the difference may exceed the largest float

    def bar(value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return " "
        return BARS[round((value / 2 - low / 2) / span * (len(BARS) - 1))] if span > 0 else BARS[0]

    return "".join(bar(value) for value in shown)


def job_table(jobs: Sequence[Mapping[str, Any]]) -> Rows:
    """One row per job view (``controller/views.JobView`` as a mapping)."""
    table = Rows([*columns(("job", "state"), ("step", "reward")), *columns(("last steps",)),
                  *columns((), ("tok/s", "stale"), ("waits for",))])  # fmt: skip
    for job in jobs:
        running = job["state"] == "running"
        table.add(
            *job_cells(job),
            Text(sparkline(job.get("rewards") or []), "green"),
            rounded(job.get("tokens_per_second"), "{:.0f}") if running else "–",
            rounded(job.get("staleness"), "{:.1f}"),
            Text(printable(waits(job)), "dim"),
        )
    return table


def job_line(job: Mapping[str, Any]) -> Text:
    """One job's present state on one line, or several where the terminal is narrow."""
    name, state, step, reward = job_cells(job)
    running = job["state"] == "running"
    each = [one for one in job.get("policies") or [] if one.get("reward") is not None]  # where there are several
    bars = (sparkline(job.get("rewards") or []), "green")
    parts: list[str | Text | tuple[str, str]] = [name, " ", state, f"  step {step}  reward "]
    for one in each:
        figure = f"{printable(one['name'])} {rounded(one['reward'], '{:.3f}')} "
        parts.extend([figure, bars if one["name"] == job.get("policy") else "", " "])
    if not each:
        parts.extend([reward, " ", bars])
    if running:
        parts.append(f"  {rounded(job.get('tokens_per_second'), '{:.0f}')} tokens/s")
    if waited := waits(job):
        parts.append((f"  waits for {waited}" if running else f"  {waited}", "dim"))
    return Text.assemble(*parts, overflow="fold")


def policy_figures(policy: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures of the last step of one of several policies; none where the job has one policy."""
    shown = {"step": "{:d}", "reward": "{:.3f}", "loss": "{:.4g}", "staleness": "{:.2g}"}
    values = [(name, policy.get(name), form) for name, form in shown.items()]
    return [(name, form.format(value)) for name, value, form in values if value is not None]


def job_list(jobs: Sequence[Mapping[str, Any]]) -> Rows:
    """A table of the jobs with their ids, for commands that take one."""
    table = Rows([*columns(("job", "state"), ("step", "reward")), *columns(("id",), notes=("reason",))])
    for job in jobs:
        table.add(*job_cells(job), job["id"], Text(printable(waits(job)), "dim"))
    return table


def worker_table(workers: Sequence[Mapping[str, Any]]) -> Rows:
    """One row per worker view. ``active`` requests decode, ``waiting`` ones do not yet. The column of sites is there
    where a worker has one."""
    numbers = ("adapters", "active", "waiting", "tok/s", "price/h")
    sites = any(worker["site"] for worker in workers)
    head = columns(("worker", *["site"] * sites, "kind", "state"), ("since",))
    table = Rows(head + columns(("model", "engine", "roles"), numbers, ("lanes", "note")))
    for worker in workers:
        state, beat = str(worker["state"]), worker.get("beat") or {}
        table.add(
            worker["name"],
            *[Text(printable(worker["site"]))] * sites,
            worker["kind"],
            Text(state, WORKER_STYLES.get(state, "")),
            _ago(float(worker["seconds"])),
            worker["model"],
            worker["engine"] or "–",
            ", ".join(worker["roles"]),
            worker["adapters"],
            rounded(beat.get("active"), "{:d}"),
            rounded(beat.get("waiting"), "{:d}"),
            rounded(worker["tokens_per_second"], "{:.0f}"),
            rounded(worker["price"], "{:g}"),
            Text(printable(str(beat.get("lanes") or "")), "dim"),
            Text(printable(str(worker["note"])), "dim"),
        )
    return table


def memory_table(workers: Sequence[Mapping[str, Any]]) -> Rows:
    """The memory of each worker that has sent a heartbeat: its resident size and budget, and use and budget by part."""
    beats = {str(worker["name"]): worker["beat"] for worker in workers if worker.get("beat")}
    parts = sorted({part for beat in beats.values() for part in beat.get("memory_parts", {})})
    table = Rows(columns(("memory in GB",), ("process", "budget", *parts)))
    for name, beat in beats.items():
        sizes = [beat.get("memory_parts", {}).get(part) for part in parts]
        table.add(
            name,
            _gigabytes(beat["gauges"].get("worker_memory_bytes") or 0),
            _gigabytes(beat["gauges"].get("worker_memory_budget_bytes") or 0),
            *("" if size is None else " of ".join(map(_gigabytes, size)) for size in sizes),
        )
    return table


def _gigabytes(size: float) -> str:
    return f"{size / (1 << 30):.2f}"


def _ago(seconds: float) -> str:
    """A duration in its largest unit."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def job_cells(job: Mapping[str, Any]) -> list[Text | str]:
    """Name, state, step and reward, with the policy whose reward it is in a job with several."""
    whose = f" ({printable(job['policy'])})" if job.get("policy") else ""
    state, steps = str(job["state"]), job.get("steps")
    return [
        Text(printable(str(job["name"]))),
        Text(state, STYLES.get(state, "")),
        f"{job['step']}/{steps}" if steps is not None else str(job["step"]),
        rounded(job.get("reward"), "{:.3f}") + whose,
    ]


def waits(job: Mapping[str, Any]) -> str:
    """The resource that a running job waits for; for another job, the reason of its state."""
    waits, reason = str(job.get("waits_for") or ""), str(job.get("reason") or "")
    return waits if job["state"] == "running" else reason or waits


def rounded(value: Any, form: str) -> str:
    """A number in this form; a dash for what is none."""
    return form.format(value) if isinstance(value, int | float) and math.isfinite(value) else "–"
