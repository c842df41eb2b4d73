"""Following a job at the terminal: its steps, events and state, as ``rookery run`` and ``rookery jobs logs -f`` show
them.

A terminal shows a line per step, events as they come, and under them the job's present state. Elsewhere the same lines
are written without the state, and with ``--json`` one object per line: ``job``, ``metrics``, ``rollback`` and
``event``. The last line of ``rookery run --json`` has the job with its evaluations and the folder of its adapter.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.text import Text

from rookery.cli.options import Cli
from rookery.cli.output import console, is_terminal, print_json, show
from rookery.cli.steps import StepLines
from rookery.client import Job, Record
from rookery.client.job import ENDED, TEMPORARY
from rookery.errors import RookeryError
from rookery.telemetry.rows import printable
from rookery.telemetry.table import job_line

EVENT_SECONDS = 2.0
"""Least time between two requests for a job's events."""

EVENTS_SHOWN = 100
"""Newest events that are looked at: more do not come between two requests."""

QUIET_KINDS = ("state",)
"""Kinds of events that the follower shows otherwise."""


STYLES = {"warning": "yellow", "no_signal": "yellow"}
"""Of events that their reader should act on."""

PROSE = ("advice", "Columns")
"""How lines begin that are sentences."""


class Follower:
    """Shows one job while it is followed. ``ends_paused``: a pause that does not end by itself ends the following.
    ``continues``: how the job continues after a fault, where ``rookery jobs resume`` does not reach it."""

    def __init__(self, cli: Cli, job: Job, *, ends_paused: bool, continues: str = "") -> None:
        self._cli = cli
        self._job = job
        self._ends_paused = ends_paused
        self._continues = continues
        self._live: Live | None = None
        self._steps = StepLines(console().width if is_terminal() else None)
        self._seen = Counter[tuple[Any, ...]]()
        """The events of the last request. Their order is not that of their times: the service's clock may be set."""
        self._asked = -EVENT_SECONDS

    def follow(self) -> Record:
        """The job when it has ended, or is paused for good."""
        view = Record()
        with self._status():
            for kind, data in self._job.follow():
                if kind in ("job", "end"):
                    self._state(view, data)
                    view = data
                elif kind == "metrics":
                    self._row(data, view)
                elif kind == "rollback":
                    self._back(data)
                self._events(last=kind == "end")
                if self._live is not None and kind != "end":
                    with suppress(*TEMPORARY):  # the next event tries again, and the stream reports what is wrong
                        self._live.update(_status(self._job.show()), refresh=True)
                if view and view.state == "paused" and self._ends_paused and view.paused_by == "fault":
                    self._events(last=True)
                    break
        return view

    @contextmanager
    def _status(self) -> Iterator[None]:
        """Within, a terminal shows the job's state under the lines that are written."""
        if self._cli.json or not is_terminal():
            yield
            return
        with Live(console=console(), auto_refresh=False, transient=True) as self._live:
            yield

    def _write(self, line: str, style: str = "", *, words: bool = True) -> None:
        """A line, on a terminal broken between ``words``."""
        if self._live is not None:
            self._live.console.print(Text(line, style), soft_wrap=not words)
        else:
            show(line)

    def _row(self, row: Record, view: Record) -> None:
        if self._cli.json:
            print_json({"metrics": self._steps.figures(row, view.spec)})
            return
        for line in self._steps.of(row, view.spec):
            self._write(line, words=line.startswith(PROSE))

    def _back(self, data: Record) -> None:
        """Shows that the rows of the steps after this one are deleted."""
        self._steps.back(data.step)
        if self._cli.json:
            print_json({"rollback": data})
        else:
            self._write(f"the job went back to step {max(data.step, 0)}: later steps are taken again", "yellow")

    def _state(self, before: Record, view: Record) -> None:
        """Shows that the state has changed."""
        if self._cli.json:
            print_json({"job": view})
        elif view.state == "paused":
            self._write(pause_line(self._job, view, self._continues), "yellow")
        elif before and view.state != before.state and view.state not in ENDED:
            self._write(f"{view.name} is {view.state}")

    def _events(self, *, last: bool) -> None:
        """Shows events that are new since the last request."""
        now = time.monotonic()
        if now - self._asked < EVENT_SECONDS and not last:
            return
        self._asked = now
        try:
            events = self._job.events(EVENTS_SHOWN)
        except RookeryError:  # the stream of the job reports what is wrong
            return
        keys = [tuple(event.values()) for event in events]
        known, self._seen = self._seen, Counter(keys)
        for key, event in zip(keys, events, strict=True):
            known[key] -= 1
            if known[key] < 0 and event.kind not in QUIET_KINDS:
                if self._cli.json:
                    print_json({"event": event})
                else:
                    self._write(f"{event.kind.replace('_', ' ')}: {printable(event.text)}", STYLES.get(event.kind, ""))


def pause_line(job: Job, view: Record, continues: str = "") -> str:
    """Why a job is paused, and how it continues; ``continues`` after a fault."""
    then = {
        "outage": "it resumes by itself",
        "owner": f"waiting for: rookery jobs resume {job.id}",
    }.get(view.paused_by, f"when that is fixed: {continues or f'rookery jobs resume {job.id}'}")
    return f"{view.name} is paused: {printable(view.reason)}; {then}"


def _status(view: Record) -> Group:
    return Group(job_line(view), Text("Ctrl-C stops following", style="dim"))
