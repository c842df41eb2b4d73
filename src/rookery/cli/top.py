"""``rookery top``: runs, fleet and health, live."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from rookery.cli.options import Cli, with_options
from rookery.cli.output import is_terminal, print_json, show
from rookery.client import Client
from rookery.errors import Forbidden
from rookery.telemetry.rows import printable
from rookery.telemetry.table import job_table, worker_table

RUNS_SHOWN = 200
"""The newest runs, or the first in the chosen order: more would not be looked at in a terminal."""


@dataclass
class Overview:
    """What ``rookery top`` shows, as one look at the service."""

    url: str
    runs: list[Any]
    total: int
    """Runs, also those that are not among ``runs``."""
    figures: Mapping[str, Any]
    workers: list[Any] | None
    """None for a tenant's key, which sees no fleet."""
    alarms: dict[str, list[str]] = field(default_factory=dict)
    """By run, for those that run."""

    @property
    def line(self) -> str:
        """The state of the service in one line."""
        jobs = ", ".join(f"{count} {state}" for state, count in self.figures["jobs"].items()) or "no runs"
        rate = sum(run["tokens_per_second"] for run in self.runs if run["state"] == "running")
        gauges = self.figures["gauges"]
        parts = [jobs, f"{rate:,.0f} tokens/s"]
        running, waiting = gauges.get("requests_running", 0), gauges.get("requests_waiting", 0)
        parts.append(f"{running:.0f} requests run, {waiting:.0f} wait")
        if self.workers is not None:
            serving = sum(worker["state"] == "serving" for worker in self.workers)
            parts.append(f"{serving} of {len(self.workers)} workers serve")
        return " · ".join(parts)


class ServiceReader:
    """Reads the service. ``admin`` becomes False where the key may not see the fleet."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.admin = True

    def read(
        self, order: str = "created", descending: bool = True, text: str = "", running_only: bool = False
    ) -> Overview:
        """Everything but the alarms."""
        states = {"state": ["running", "queued"]} if running_only else {}
        page = self.client.runs(order=order, descending=descending, text=text, limit=RUNS_SHOWN, **states)
        workers = None
        if self.admin:
            try:
                workers = self.client.workers()
            except Forbidden:
                self.admin = False
        return Overview(self.client.url, list(page.runs), page.total, self.client.figures(), workers)

    def alarms(self, run: str) -> list[str]:
        """What is wrong with a run, and what to do."""
        return [f"{one.name}: {one.problem} {one.remedy}" for one in self.client.job(run).health().alarms]


@with_options
def top(
    cli: Cli,
    once: Annotated[bool, typer.Option("--once", help="Print it once, as where the output is no terminal.")] = False,
) -> None:
    """Runs, fleet and health in a live table for the terminal; ``?`` shows the keys, ``q`` ends."""
    with cli.client() as client:
        source = ServiceReader(client)
        if is_terminal() and not once and not cli.json:
            from rookery.cli.top_screen import TopScreen  # textual is imported only where it is shown

            TopScreen(source).run()
            return
        seen = source.read()
        seen.alarms = {run["id"]: source.alarms(run["id"]) for run in seen.runs if run["state"] == "running"}
    if cli.json:
        print_json({"runs": seen.runs, "total": seen.total, "figures": seen.figures, "workers": seen.workers,
                    "alarms": seen.alarms})  # fmt: skip
    else:
        show(plain(seen))


def plain(seen: Overview) -> RenderableType:
    """The overview as text."""
    parts: list[RenderableType] = [Text(seen.line)]
    if seen.runs:
        parts.append(job_table(seen.runs))
    if seen.total > len(seen.runs):
        parts.append(Text(f"{seen.total - len(seen.runs)} older runs are not shown"))
    if seen.workers:
        parts.append(worker_table(seen.workers))
    names = {run["id"]: run["name"] for run in seen.runs}
    parts += [Text(printable(f"{names[run]}: {line}")) for run, lines in seen.alarms.items() for line in lines]
    return Group(*parts)
