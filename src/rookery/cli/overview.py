"""One look at a service: its runs, figures and workers, and what is wrong with a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rookery.client import Client
from rookery.errors import Forbidden, count_of

RUNS_SHOWN = 200
"""The newest runs, or the first in the chosen order: more would not be looked at in a terminal."""


@dataclass
class Overview:
    """The data of ``rookery top``, read from the service at one time."""

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
        parts.append(f"{count_of(running, 'request runs', 'requests run')}, {waiting:.0f} wait")
        if self.workers is not None:
            serving = sum(worker["state"] == "serving" for worker in self.workers)
            parts.append(f"{serving} of {count_of(len(self.workers), 'worker')} serve")
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
        """The faults of a run, with advice."""
        return [
            f"{one.name}{f' ({one.policy})' if one.policy else ''}: {one.problem}; {one.remedy}"
            for one in self.client.job(run).health().alarms
        ]
