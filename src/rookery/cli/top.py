"""``rookery top``: runs, fleet and health, live."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from rookery.cli.options import Cli, with_options
from rookery.cli.output import is_terminal, print_json, show
from rookery.cli.overview import Overview, ServiceReader
from rookery.errors import count_of
from rookery.telemetry.rows import printable
from rookery.telemetry.table import job_table, worker_table


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

            screen = TopScreen(source)
            screen.run()
            raise typer.Exit(screen.return_code or 0)
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
        parts += ["", job_table(seen.runs)]
    if seen.total > len(seen.runs):
        parts.append(Text(f"{count_of(seen.total - len(seen.runs), 'older run is', 'older runs are')} not shown"))
    if seen.workers:
        parts += ["", worker_table(seen.workers)]
    names = {run["id"]: run["name"] for run in seen.runs}
    parts += [Text(printable(f"{names[run]}: {line}")) for run, lines in seen.alarms.items() for line in lines]
    return Group(*parts)
